"""A dump as the comparison reads it: its tensors in execution order, and which rank held what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.gpt_names import GptNames
from megatron_flex.layout import Layout
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.wording import count_words

if TYPE_CHECKING:
    from megatron_flex.compare.statistics_comparison import StatisticsFiles

SAMPLE_AXIS, TOKEN_AXIS, MICROBATCH_AXIS = "sample", "token", "microbatch"


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
        left_out: sites that the other dump's model cannot have, after `use_gpt_names`.
    """

    def __init__(self, dump: OpenDump, label: str) -> None:
        self.dump, self.label = dump, label
        self.path = str(dump.path)
        self.manifest = dump.manifest
        self.sizes: Mapping[str, int] = dict(self.manifest.sizes)
        self.ranks: Sequence[tuple[int, Mapping[str, int]]] = self.manifest.ranks
        self.order = [n for n in dump.order if not n.endswith(GRADIENT_SUFFIX)]
        self.iterations: list[int] = list(dump.iterations)
        self._arrays: dict[ComparedTensor, DumpArray] = {}
        self._items: list[ComparedTensor] | None = None
        self._gpt: GptNames | None = None
        self._stored_names: dict[str, str] = {}  # the dump's names, where others are used here
        self.left_out: list[str] = []
        self._index_records()

    @property
    def gpt_names(self) -> GptNames:
        """The correspondence of the dump's names and a GPTModel's."""
        return self.dump.gpt_names

    def use_gpt_names(self) -> None:
        """Name tensors as a GPTModel with the same weights does; what such a model has not is left out."""
        self._gpt, self._items, self._arrays = self.gpt_names, None, {}
        names = [n for n in self.dump.order if not n.endswith(GRADIENT_SUFFIX)]
        self.left_out = [n for n in names if self._gpt.to_gpt(n) is None]
        self._stored_names = {self.name(n): n for n in [*names, *self.dump.parameters]}
        self.order = [self.name(n) for n in names if n not in self.left_out]
        self._index_records()

    def name(self, name: str) -> str:
        """The name here of one in the dump; those that are left out have a mark."""
        if self._gpt is None:
            return name
        return self._gpt.to_gpt(name) or f"{name} of a HybridModel"

    def _index_records(self) -> None:
        records = (*self.manifest.sites, *self.manifest.parameters)
        self._records = {self.name(p.name): p for p in records}

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The axes to show: those longer than 1."""
        return {a: n for a, n in self.sizes.items() if n > 1 and a != "edp"}

    def describe(self) -> str:
        """The dump as text, with the meshes of all its runs."""
        renamed = "" if self._gpt is None else f"; by a GPTModel's names, the layers are {self._gpt.pattern}"
        iterations = count_words(len(self.iterations), "iteration")
        return f"{self.path} ({self.dump.describe_meshes()}; {iterations}{renamed})"

    def use_run_of(self, iteration: int) -> None:
        """Take mesh, ranks and layouts from the run that wrote an iteration: a dump may be continued in
        another layout.
        """
        self.manifest = self.dump.stored_iteration((iteration, 0)).run.manifest
        self.sizes, self.ranks = dict(self.manifest.sizes), self.manifest.ranks
        self._index_records()

    def items(self) -> list[ComparedTensor]:
        """All tensors of the dump, in order: parameters, which are dumped at the start of a step; values in
        forward order, gradients in backward order, gradients of parameters.
        """
        if self._items is None:
            with_gradients = [
                n.removesuffix(GRADIENT_SUFFIX) for n in self.dump.order if n.endswith(GRADIENT_SUFFIX)
            ]
            grads = [self.name(n) for n in with_gradients if n not in self.left_out]
            names = [self.name(n) for n in self.dump.parameters]
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
                stored_name = self._stored_names.get(name, name)
                entries = self.dump.entries(written, stored_name, kind, self._records[name].stage, replica)
                if entries:
                    return sorted({entry.call for _, entry, *_ in entries})
        return []

    def _has(self, item: ComparedTensor) -> bool:
        try:
            return bool(self.array(item).shape)
        except DumpError:
            return False

    def array(self, item: ComparedTensor) -> DumpArray:
        """The tensor over iterations."""
        if item not in self._arrays:
            array: DumpArray
            stored_name = self._stored_names.get(item.site, item.site)
            if item.kind in (PARAMETER, PARAMETER_GRADIENT):
                array = self.dump.parameter(stored_name, gradient=item.kind == PARAMETER_GRADIENT)
            else:
                name = stored_name + (GRADIENT_SUFFIX if item.kind == GRADIENT else "")
                array = self.dump[name, item.call]
            self._arrays[item] = array
        return self._arrays[item]

    def read_partial_sums(
        self, item: ComparedTensor, iteration: int, most: int
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Each rank's part of a tensor that is their sum, microbatch by microbatch, as the rank wrote it.

        Args:
            item: a site's values.
            iteration: the framework's number.
            most: bytes of a part in fp64; the first rows of a larger one are read.

        Yields:
            The mesh axis of the sum, the rank's coordinate on it, and its part.
        """
        layout = self.layout(item)
        axes = [] if layout is None else [a for a in layout.partial if self.sizes.get(a, 1) > 1]
        written = self.dump.stored_iteration((iteration, 0))
        stored_name = self._stored_names.get(item.site, item.site)
        for replica in written.run.replicas if len(axes) == 1 else ():
            entries = self.dump.entries(written, stored_name, item.kind, self.stage(item) or 0, replica)
            for part, entry, _, coords in entries:
                if entry.call == item.call and not entry.picked and entry.span is None and all(entry.shape):
                    rows = max(1, most // (math.prod(entry.shape[1:]) * 8))
                    where = (range(min(rows, entry.shape[0])), *map(range, entry.shape[1:]))
                    yield axes[0], coords.get(axes[0], 0), self.dump.files.view(part, entry, where)

    def layout(self, item: ComparedTensor) -> Layout | None:
        """Its layout; None if the manifest has none."""
        record = self._records.get(item.site)
        if record is None or record.inferred:
            return None
        try:
            return layout_from_json(record.layout)
        except (LayoutError, KeyError, TypeError, ValueError):
            return None

    def stage(self, item: ComparedTensor) -> int | None:
        """The pipeline stage that owns it."""
        record = self._records.get(item.site)
        return None if record is None else record.stage

    def map_samples_to_replicas(self, item: ComparedTensor, iteration: int) -> dict[int, int]:
        """For each sample the data parallel rank that had it."""
        out: dict[int, int] = {}
        if self.sizes.get("dp", 1) > 1 and item.kind in (VALUE, GRADIENT):
            for piece in self.array(item).at(iteration).microbatch_arrays():
                if piece.array.dims[:1] == (SAMPLE_AXIS,) and piece.array.samples is not None:
                    out.update(dict.fromkeys(piece.array.samples.tolist(), piece.replica))
        return out


def align_names(sources: Sequence[ComparedDump | StatisticsFiles | None]) -> None:
    """Make a HybridModel's sources use a GPTModel's names, if another source is of a GPTModel."""
    present = [source for source in sources if source is not None]
    if any(source.gpt_names.same for source in present):
        for source in present:
            if not source.gpt_names.same and not source.gpt_names.why:
                source.use_gpt_names()


@contextmanager
def open_compared_dump(dump: Any, label: str) -> Iterator[Any]:
    """A dump; a path is opened here and closed again; None for None."""
    if dump is None:
        yield None
    elif isinstance(dump, (str, PathLike)):
        with open_dump(dump) as opened:
            yield ComparedDump(opened, label)
    else:
        yield ComparedDump(dump, label)
