"""What a hook captures of a full tensor, planned as a local operation on each shard and a final one on the
leader.

`plan.finish(assemble(plan.layout, [plan.local(shard) for each shard]))` equals the selection applied to
`assemble(layout, shards)`. No rank sends more than its part of the selected entries, and no partial sums are
added that were not partial sums before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from megatron_flex.errors import HookError, LayoutError
from megatron_flex.layout import (
    Coords,
    Dim,
    Layout,
    Sizes,
    compact_index,
    count_parts,
    full_order,
    is_partial,
    spans,
)
from megatron_flex.runtime.selection.entry_selection import EACH, DimChoice, Select, describe_missing_dim
from megatron_flex.runtime.selection.reduce import Reduction, ReductionContext, Results
from megatron_flex.sites import HEAD_DIMS, PACKED_HEAD_DIMS, DimNames, Site

EVERYTHING = Select()


@dataclass(frozen=True, eq=False, slots=True)
class CaptureSelection:
    """A selection of entries, followed by a reduction.

    Attributes:
        select: the entries.
        reduce: the reduction of the entries; None to capture the entries themselves.
    """

    select: Select = EVERYTHING
    reduce: Reduction | None = None

    def same(self, other: CaptureSelection | None) -> bool:
        """Whether two are equal."""
        return other is not None and self.select == other.select and self.reduce is other.reduce

    @property
    def each_sequence(self) -> bool:
        """Whether each packed sequence is captured under a name of its own."""
        return self.select.sequences == EACH

    def in_sequence(self, number: int) -> CaptureSelection:
        """The selection and the reduction within one packed sequence."""
        return CaptureSelection(replace(self.select, sequences=number), self.reduce)

    @property
    def needs_dim_names(self) -> bool:
        """Whether the selection or the reduction depends on which dim is which."""
        reduced = self.reduce is not None and any(isinstance(d, str) for d in self.reduce.dims)
        return self.select.needs_dim_names or reduced

    def describe(self) -> str:
        """The selection and the reduction as text."""
        reduction = None if self.reduce is None else self.reduce.describe()
        if self.select == EVERYTHING:
            return reduction or "everything"
        return self.select.describe() + (f", then {reduction}" if reduction else "")

    def check(self, site: Site) -> None:
        """Validate before any step begins.

        Raises:
            HookError: the site has no such dim, or a dim of known length has no such entry.
        """
        names = self.select.names or site.dims
        if site.dims and len(names) != len(site.dims):
            raise HookError(f"{self.describe()}: {site.name} has {len(site.dims)} dims")
        if not names:
            if self.needs_dim_names and site.inferred and not site.names_dims:
                unknown = describe_missing_dim("s", ("",) * 3, site.name)
                raise HookError(f"{self.describe()}: {unknown}")
            return
        choices = self.select.choices(names, None, site.name)
        lengths: list[int | str] = list(site.shape) if len(site.shape) == len(names) else list(names)
        if self.select.heads is not None and all(c.what != "heads" for c in choices):
            lengths[[n in (*HEAD_DIMS, *PACKED_HEAD_DIMS) for n in names].index(True)] = (
                "heads"  # a step provides the number
            )
        for choice in choices:
            length = lengths[choice.dim]
            if isinstance(length, int):
                lengths[choice.dim] = len(choice.find_indices(length))
        if self.reduce is not None:
            last = lengths[self.reduce.places(names, site.name)[-1]]
            if isinstance(last, int):
                self.reduce.check(last)


@dataclass(frozen=True, eq=False, slots=True)
class DimEntries:
    """The location of the selected entries of a dim.

    Attributes:
        local: the indices, in the local shard, of this rank's selected entries.
        places: their indices in the list of selected entries.
        most: the largest number of entries on any rank.
        order: the index of each selected entry after shards of `most` entries are concatenated; None if they
            are in order.
    """

    local: Tensor
    places: Tensor
    most: int
    order: Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class SelectionPlan:
    """The plan of a selection for one shape of tensors at one site.

    Attributes:
        layout: the layout of the result of `local`.
        everywhere: whether only all ranks together know the selected entries: they must then gather the
            tensor, and `finish` may raise.
        order: the full tensor's dims in terms of the local dims.
        view: the part of the local shard's selection that is a view.
        picks: the remaining selection, by dim.
        part: the local reduction.
        where: the argument of `part`.
        arrange: on the leader: the order of the entries, by dim.
        late: the selection on the leader.
        rest: the reduction on the leader.
    """

    layout: Layout
    everywhere: bool
    order: tuple[int, ...] | None
    view: tuple[slice, ...] | None
    picks: tuple[tuple[int, Tensor], ...]
    part: Reduction | None
    where: ReductionContext
    arrange: tuple[tuple[int, Tensor], ...]
    late: tuple[DimChoice, ...]
    rest: Reduction | None

    def local(self, tensor: Tensor) -> Tensor:
        """The tensor that this rank sends; it may be a view."""
        tensor = tensor.detach()
        if self.order is not None:
            tensor = tensor.permute(self.order)
        if self.view is not None:
            tensor = tensor[self.view]
        for dim, entries in self.picks:
            tensor = tensor.index_select(dim, entries)
        return tensor if self.part is None else self.part.part(tensor, self.where)

    @property
    def finishes(self) -> bool:
        """Whether an operation remains after all shards are concatenated."""
        return bool(self.arrange or self.late or self.rest or self.part)

    def finish(self, full: Tensor) -> Results:
        """The captures, by the suffix of the site's name.

        Raises:
            HookError: the tensor has no such entries; only if `everywhere`.
        """
        for dim, entries in self.arrange:
            full = full.index_select(dim, entries.to(full.device))
        for choice in self.late:
            entries = torch.tensor(choice.find_indices(full.shape[choice.dim]), device=full.device)
            full = full.index_select(choice.dim, entries)
        if self.part is not None:
            return self.part.combine(full, self.where)
        if self.rest is None:
            return {"": full}
        lengths = [full.shape[d] for d in self.where.dims]
        self.rest.check(lengths[-1], full.dtype)
        return self.rest.reduce_full(full, widen_context(self.where, prod(lengths), lengths[-1], full.dtype))


def widen_context(where: ReductionContext, number: int, most: int, dtype: torch.dtype) -> ReductionContext:
    """The context of the full tensor's reduction."""
    return where._replace(number=number, entries=None, most=most, dtype=dtype)


def plan_selection(
    requested: CaptureSelection,
    layout: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
    coords: Coords,
    heads: int = 0,
    known: DimNames | None = None,
) -> SelectionPlan:
    """Plan a selection.

    Args:
        requested: the selection and the reduction.
        layout: the layout of the shards.
        shape: the shape of this rank's shard.
        dtype: the dtype of the tensor.
        device: the device of the shards.
        sizes: the axis sizes of the mesh.
        coords: this rank's coordinates.
        heads: the module's number of heads; 0 if the module does not provide it.
        known: what is known of the dims, where the layout does not have their names.

    Raises:
        HookError: the full tensor has no such entries; the same on all ranks.
    """
    _check_dims(layout, shape)
    order = full_order(layout)
    dims = [layout.dims[i] for i in order]
    local = [shape[i] for i in order]
    lengths = _list_full_lengths(dims, local, sizes)
    names = list(requested.select.names or (known.names if known else [d.name for d in dims]))
    if len(names) != len(dims):
        raise HookError(f"{requested.describe()}: the tensor has {len(dims)} dims; name each of them")
    first = known.first if known else 0
    choices = {
        c.dim: c for c in requested.select.choices(names, (known and known.heads) or heads, first=first)
    }
    # A rank that does not know the length of a dim sends all its entries; the rank that receives selects.
    late = tuple(c for d, c in choices.items() if lengths[d] is None)
    chosen = {
        d: c.find_indices(n, dims[d].sequences) for d, c in choices.items() if (n := lengths[d]) is not None
    }
    targets = requested.reduce.places(names) if requested.reduce is not None else ()
    counts = [len(chosen[d]) if d in chosen else lengths[d] for d in targets]
    reduction = requested.reduce
    if reduction is not None and counts[-1] is not None:
        reduction.check(counts[-1], dtype)
    # Where the results of shards can be combined, each rank reduces its shard, and sends less.
    pushed = reduction
    if reduction is not None and not _reduces_locally(
        reduction, targets, counts, late, is_partial(layout, sizes), dtype
    ):
        pushed = None
    along = targets if pushed is not None else ()
    work = _PlanBuilder(dims, local, lengths, sizes, coords, device)
    for d in range(len(dims)):
        work.take(d, chosen.get(d), d in along)
    uneven = any(c is None for c in counts)
    where = work.where(targets, 0 if uneven else prod(c for c in counts if c is not None), dtype)
    return SelectionPlan(
        Layout((*work.result, *([Dim()] if pushed is not None and pushed.adds else [])), layout.partial),
        bool(late) or (pushed is None and reduction is not None and uneven and reduction.sized),
        None if layout.permute is None else order,
        tuple(work.view) if any(v != slice(None) for v in work.view) else None,
        tuple(work.picks),
        pushed,
        where,
        tuple(work.arrange),
        late,
        None if pushed is not None else reduction,
    )


def _check_dims(layout: Layout, shape: Sequence[int]) -> None:
    if len(shape) != len(layout.dims):
        raise LayoutError(
            f"a tensor of shape {tuple(shape)} has {len(shape)} dims; layout {layout.describe()} has "
            f"{len(layout.dims)}: the site's rule does not fit this module"
        )


def _list_full_lengths(dims: Sequence[Dim], local: Sequence[int], sizes: Sizes) -> list[int | None]:
    """The full tensor's lengths without padding; None where a single rank does not know."""
    out: list[int | None] = []
    for dim, n in zip(dims, local, strict=True):
        count = count_parts(dim, sizes)
        full = n * count
        out.append(None if dim.uneven and count > 1 else full if dim.keep is None else min(full, dim.keep))
    return out


def _reduces_locally(
    reduction: Reduction,
    targets: Sequence[int],
    counts: Sequence[int | None],
    late: Sequence[DimChoice],
    summed: bool,
    dtype: torch.dtype,
) -> bool:
    """Whether local shards can be reduced before they are sent."""
    if (summed and not reduction.linear) or not reduction.holds(dtype):
        return False
    if any(c.dim in targets for c in late):
        return False
    return not (any(c is None for c in counts) and (reduction.counts or reduction.sized))


class _PlanBuilder:
    """Visits the dims and collects the operations."""

    def __init__(
        self,
        dims: Sequence[Dim],
        local: Sequence[int],
        lengths: Sequence[int | None],
        sizes: Sizes,
        coords: Coords,
        device: torch.device,
    ) -> None:
        self._dims, self._lengths, self._sizes, self._coords = dims, lengths, sizes, coords
        self._device, self._local = device, local
        self.result = list(dims)
        self.view = [slice(None)] * len(dims)
        self.picks: list[tuple[int, Tensor]] = []
        self.arrange: list[tuple[int, Tensor]] = []
        self.places: dict[int, Tensor] = {}
        self.most: dict[int, int] = {}

    def where(self, targets: tuple[int, ...], number: int, dtype: torch.dtype) -> ReductionContext:
        """The context of a reduction along these dims."""
        last = targets[-1] if targets else -1
        return ReductionContext(targets, number, self.places.get(last), self.most.get(last, 0), dtype)

    def take(self, d: int, entries: Sequence[int] | None, reduced: bool) -> None:
        """Plan the selection and reduction of a dim."""
        if entries is None and not reduced:
            return
        dim, length = self._dims[d], self._lengths[d]
        live = tuple(c for c in dim.cuts if self._sizes.get(c.axis, 1) > 1)
        self.result[d] = Dim(dim.name, tuple(replace(c, order="contiguous", segments=(1,)) for c in live))
        if length is None:  # select all local entries, without indices: they are not known
            return
        if entries is None:
            entries = range(length)
        located = locate_entries(
            dim, self._local[d] * count_parts(dim, self._sizes), entries, self._sizes, self._coords
        )
        local = located.local.tolist()
        if reduced:
            if live:
                self.places[d] = located.places.to(self._device)
            self.most[d] = located.most
        else:
            local += [0] * (located.most - len(local))  # the filler indices are never read
            if located.order is not None:
                self.arrange.append((d, located.order))
        selected = compact_index(local)
        if isinstance(selected, range):
            if selected != range(length) or live or dim.keep is not None:
                self.view[d] = slice(selected.start, selected.stop, selected.step)
        else:
            self.picks.append((d, torch.tensor(selected, device=self._device)))


def locate_entries(dim: Dim, full: int, entries: Sequence[int], sizes: Sizes, coords: Coords) -> DimEntries:
    """Locate selected entries of a dim.

    Args:
        dim: the dim, whose length every rank knows.
        full: its length in the full tensor, padding included.
        entries: the selected indices.
        sizes: the axis sizes of the mesh.
        coords: this rank's coordinates.
    """
    positions = torch.tensor(list(entries), dtype=torch.int64)
    count = count_parts(dim, sizes)
    slots = torch.arange(len(positions))
    if count == 1:
        return DimEntries(positions, slots, len(positions), None)
    cuts = [c for c in dim.cuts if sizes.get(c.axis, 1) > 1]
    owner, offset = torch.empty(full, dtype=torch.int64), torch.empty(full, dtype=torch.int64)
    local_part = 0
    for number, at in enumerate(product(*(range(sizes[c.axis] // c.copies) for c in cuts))):
        if at == tuple(coords.get(c.axis, 0) // c.copies for c in cuts):
            local_part = number
        first = 0
        where = {c.axis: a * c.copies for c, a in zip(cuts, at, strict=True)}
        for start, stop in spans(dim, full, where, sizes):
            owner[start:stop] = number
            offset[start:stop] = torch.arange(first, first + stop - start)
            first += stop - start
    owners = owner[positions]
    each = torch.bincount(owners, minlength=count)
    most = int(each.max())
    by_owner = torch.argsort(owners, stable=True)
    order = torch.empty_like(slots)
    order[by_owner] = slots - (each.cumsum(0) - each).repeat_interleave(each)
    order += owners * most
    is_local = owners == local_part
    same = count * most == len(positions) and torch.equal(order, slots)
    return DimEntries(offset[positions[is_local]], slots[is_local], most, None if same else order)
