"""A dump as the comparison reads it: its tensors in execution order, and which rank held what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import Layout
from megatron_flex.sites import GRADIENT_SUFFIX

SAMPLE_AXIS, TOKEN_AXIS, MICROBATCH_AXIS = "sample", "token", "microbatch"
__all__ = [
    "GRADIENT",
    "PARAMETER",
    "PARAMETER_GRADIENT",
    "VALUE",
    "ComparedDump",
    "ComparedTensor",
    "open_compared_dump",
]


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A compared tensor: a site's values or gradients in one of its calls, a parameter, or its gradient.

    Attributes:
        site: the name of the site or parameter.
        kind: `value`, `gradient`, `parameter_gradient`, `parameter`.
        call: the call of the site within a microbatch.
    """

    site: str
    kind: str
    call: int = 0

    @property
    def name(self) -> str:
        """The name, with `.grad` for a gradient, and `#1` for a second call."""
        grad = GRADIENT_SUFFIX if self.kind in (GRADIENT, PARAMETER_GRADIENT) else ""
        return self.site + grad + (f"#{self.call}" if self.call else "")


class ComparedDump:
    """One of the two dumps.

    Attributes:
        dump: the result of `open_dump`.
        label: `A`, `B` or `C`.
        path: its path.
        sizes: the mesh sizes.
        ranks: their numbers and coordinates.
        order: names of sites, in execution order.
        iterations: the numbers of the complete iterations.
    """

    def __init__(self, dump: OpenDump, label: str) -> None:
        self.dump, self.label = dump, label
        self.path = str(dump.path)
        self.manifest = dump.manifest
        self.sizes: Mapping[str, int] = dict(self.manifest.sizes)
        self.ranks: Sequence[tuple[int, Mapping[str, int]]] = self.manifest.ranks
        self.order = [n for n in dump.order if not n.endswith(GRADIENT_SUFFIX)]
        self.iterations: list[int] = list(dump.iterations)
        self._places = {p.name: p for p in (*self.manifest.sites, *self.manifest.parameters)}
        self._arrays: dict[ComparedTensor, DumpArray] = {}
        self._items: list[ComparedTensor] | None = None

    @property
    def told(self) -> Mapping[str, int]:
        """The axes to show: those longer than 1."""
        return {a: n for a, n in self.sizes.items() if n > 1 and a != "edp"}

    def describe(self) -> str:
        """The dump as text, with the meshes of all its runs."""
        return f"{self.path} ({self.dump.describe_meshes()}; {len(self.iterations)} iterations)"

    def use_run_of(self, iteration: int) -> None:
        """Take mesh, ranks and layouts from the run that wrote an iteration: a dump may be continued in
        another layout.
        """
        self.manifest = self.dump.stored_iteration((iteration, 0)).run.manifest
        self.sizes, self.ranks = dict(self.manifest.sizes), self.manifest.ranks
        self._places = {p.name: p for p in (*self.manifest.sites, *self.manifest.parameters)}

    def items(self) -> list[ComparedTensor]:
        """All tensors of the dump, in order: parameters, which are dumped at the start of a step; values in
        forward order, gradients in backward order, gradients of parameters.
        """
        if self._items is None:
            grads = [n.removesuffix(GRADIENT_SUFFIX) for n in self.dump.order if n.endswith(GRADIENT_SUFFIX)]
            names = self.dump.parameters
            self._items = [
                *(i for n in names if self._has(i := ComparedTensor(n, PARAMETER))),
                *(ComparedTensor(n, VALUE, c) for n in self.order for c in self._calls(n, VALUE)),
                *(ComparedTensor(n, GRADIENT, c) for n in grads for c in self._calls(n, GRADIENT)),
            ]
            parameter_gradients = [ComparedTensor(n, PARAMETER_GRADIENT) for n in reversed(names)]
            self._items += [i for i in parameter_gradients if self._has(i)]
        return self._items

    def _calls(self, name: str, kind: str) -> list[int]:
        """The calls of a site within a microbatch, in the first iteration that has some."""
        for iteration in self.iterations:
            written = self.dump.stored_iteration((iteration, 0))
            for replica in written.run.replicas:
                found = self.dump.entries(written, name, kind, self._places[name].stage, replica)
                if found:
                    return sorted({entry.call for _, entry, *_ in found})
        return []

    def _has(self, item: ComparedTensor) -> bool:
        try:
            return bool(self.array(item).shape)
        except DumpError:
            return False

    def array(self, item: ComparedTensor) -> DumpArray:
        """The tensor over iterations."""
        if item not in self._arrays:
            found: DumpArray
            if item.kind in (PARAMETER, PARAMETER_GRADIENT):
                found = self.dump.parameter(item.site, gradient=item.kind == PARAMETER_GRADIENT)
            else:
                name = item.site + (GRADIENT_SUFFIX if item.kind == GRADIENT else "")
                found = self.dump[name, item.call]
            self._arrays[item] = found
        return self._arrays[item]

    def layout(self, item: ComparedTensor) -> Layout | None:
        """Its layout; None if the manifest has none."""
        place = self._places.get(item.site)
        if place is None or place.inferred:
            return None
        try:
            return layout_from_json(place.layout)
        except (LayoutError, KeyError, TypeError, ValueError):
            return None

    def stage(self, item: ComparedTensor) -> int | None:
        """The pipeline stage that owns it."""
        place = self._places.get(item.site)
        return None if place is None else place.stage

    def map_samples_to_replicas(self, item: ComparedTensor, iteration: int) -> dict[int, int]:
        """For each sample the data parallel rank that had it."""
        out: dict[int, int] = {}
        if self.sizes.get("dp", 1) > 1 and item.kind in (VALUE, GRADIENT):
            for piece in self.array(item).at(iteration).microbatch_arrays():
                if piece.array.dims[:1] == (SAMPLE_AXIS,) and piece.array.samples is not None:
                    out.update(dict.fromkeys(piece.array.samples.tolist(), piece.replica))
        return out


@contextmanager
def open_compared_dump(dump: Any, label: str) -> Iterator[Any]:
    """A dump; a path is opened here and closed again; None for None."""
    if dump is None:
        yield None
    elif isinstance(dump, (str, PathLike)):
        with open_dump(dump) as found:
            yield ComparedDump(found, label)
    else:
        yield ComparedDump(dump, label)
