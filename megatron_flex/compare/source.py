"""A dump as comparing sees it: what it has, in the order in which it came to be, and who held what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.layouts import from_json
from megatron_flex.dump.reading import DumpArray, OpenDump, open_dump
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import Layout
from megatron_flex.sites import GRAD

SAMPLE, TOKEN, MICROBATCH = "sample", "token", "microbatch"
__all__ = ["GRADIENT", "PARAMETER", "PARAMETER_GRADIENT", "VALUE", "Item", "Source", "opened"]


@dataclass(frozen=True, slots=True)
class Item:
    """What is compared: a site's values or gradients in one of its calls, a parameter, its gradient.

    Attributes:
        site: of the site or parameter.
        kind: `value`, `gradient`, `parameter_gradient`, `parameter`.
        call: the pass through the site within a microbatch.
    """

    site: str
    kind: str
    call: int = 0

    @property
    def name(self) -> str:
        """The name, with `.grad` of a gradient, and `#1` of a second call."""
        grad = GRAD if self.kind in (GRADIENT, PARAMETER_GRADIENT) else ""
        return self.site + grad + (f"#{self.call}" if self.call else "")


class Source:
    """One of the dumps.

    Attributes:
        dump: as `open_dump` gives it.
        label: `A`, `B` or `C`.
        path: of it.
        sizes: the mesh.
        ranks: their numbers and coordinates.
        order: names of sites, in the order of execution.
        iterations: the numbers of those that are whole.
    """

    def __init__(self, dump: OpenDump, label: str) -> None:
        self.dump, self.label = dump, label
        self.path = str(dump.path)
        self.manifest = dump.manifest
        self.sizes: Mapping[str, int] = dict(self.manifest.sizes)
        self.ranks: Sequence[tuple[int, Mapping[str, int]]] = self.manifest.ranks
        self.order = [n for n in dump.order if not n.endswith(GRAD)]
        self.iterations: list[int] = list(dump.iterations)
        self._places = {p.name: p for p in (*self.manifest.sites, *self.manifest.parameters)}
        self._arrays: dict[Item, DumpArray] = {}
        self._items: list[Item] | None = None

    @property
    def told(self) -> Mapping[str, int]:
        """The axes that people speak of, as far as they are longer than 1."""
        return {a: n for a, n in self.sizes.items() if n > 1 and a != "edp"}

    def describe(self) -> str:
        """The dump in words."""
        mesh = " x ".join(f"{a}={n}" for a, n in self.told.items()) or "one rank"
        return f"{self.path} ({mesh}, {len(self.iterations)} iterations)"

    def items(self) -> list[Item]:
        """All that the dump has, in order: parameters, which are dumped as a step finds them; values as they
        passed, gradients as they came back, gradients of parameters.
        """
        if self._items is None:
            grads = [n.removesuffix(GRAD) for n in self.dump.order if n.endswith(GRAD)]
            names = self.dump.parameters
            self._items = [
                *(i for n in names if self._has(i := Item(n, PARAMETER))),
                *(Item(n, VALUE, c) for n in self.order for c in self._calls(n, VALUE)),
                *(Item(n, GRADIENT, c) for n in grads for c in self._calls(n, GRADIENT)),
            ]
            back = [Item(n, PARAMETER_GRADIENT) for n in reversed(names)]
            self._items += [i for i in back if self._has(i)]
        return self._items

    def _calls(self, name: str, kind: str) -> list[int]:
        """The passes through a site within a microbatch, in the first iteration that has some."""
        for iteration in self.iterations:
            written = self.dump.written((iteration, 0))
            for replica in written.run.replicas:
                found = self.dump.entries(written, name, kind, self._places[name].stage, replica)
                if found:
                    return sorted({entry.call for _, entry, *_ in found})
        return []

    def _has(self, item: Item) -> bool:
        try:
            return bool(self.array(item).shape)
        except DumpError:
            return False

    def array(self, item: Item) -> DumpArray:
        """The tensor over iterations."""
        if item not in self._arrays:
            found: DumpArray
            if item.kind in (PARAMETER, PARAMETER_GRADIENT):
                found = self.dump.parameter(item.site, gradient=item.kind == PARAMETER_GRADIENT)
            else:
                name = item.site + (GRAD if item.kind == GRADIENT else "")
                found = self.dump[name, item.call]
            self._arrays[item] = found
        return self._arrays[item]

    def layout(self, item: Item) -> Layout | None:
        """How ranks held it; None if the manifest does not tell."""
        place = self._places.get(item.site)
        if place is None or place.inferred:
            return None
        try:
            return from_json(place.layout)
        except (LayoutError, KeyError, TypeError, ValueError):
            return None

    def stage(self, item: Item) -> int | None:
        """The pipeline stage that owns it."""
        place = self._places.get(item.site)
        return None if place is None else place.stage

    def dealt(self, item: Item, iteration: int) -> dict[int, int]:
        """Which data parallel rank had which sample."""
        out: dict[int, int] = {}
        if self.sizes.get("dp", 1) > 1 and item.kind in (VALUE, GRADIENT):
            for piece in self.array(item).at(iteration).pieces():
                if piece.array.dims[:1] == (SAMPLE,) and piece.array.samples is not None:
                    out.update(dict.fromkeys(piece.array.samples.tolist(), piece.replica))
        return out


@contextmanager
def opened(dump: Any, label: str) -> Iterator[Any]:
    """A dump, opened here if it is a path, which is then closed again; None for None."""
    if dump is None:
        yield None
    elif isinstance(dump, (str, PathLike)):
        with open_dump(dump) as found:
            yield Source(found, label)
    else:
        yield Source(dump, label)
