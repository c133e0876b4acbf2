"""What a hook at a site would send, told of each layout and shape once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from megatron_flex.costs import PassEstimate, Links, Placement, PlannedHook, estimate_pass
from megatron_flex.dump.plan import EstimatedTensor, compute_local_shape
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.page.rank_grid import RankGrid
from megatron_flex.sites import Site

Json = dict[str, Any]
PLANNED_HOOKS = {"read": PlannedHook("**"), "edit": PlannedHook("**", "general")}


def estimate_sites(
    sites: Iterable[Site], held: Callable[[Site], EstimatedTensor | str], grid: RankGrid, links: Links | None = None
) -> dict[str, Json]:
    """By site what a read, and an edit of the whole, would send there each time that a tensor passes.

    Args:
        sites: hidden ones are left out.
        held: the tensor at a site, or why nobody knows how large it is.
        grid: the ranks.
        links: between them.

    Returns:
        `{"read": told, "edit": told}`, the same object where the same is told; each `{"why"}` or
        `{"way", "sent": [[op, axis, ranks, bytes, backward]], "whole", "part", "leader": {link: bytes}}`.
    """
    mesh, placement = grid.mesh(), Placement(grid.sizes, (links or Links()).gpus_per_node)
    known: dict[Hashable, Json] = {}
    out = {}
    for site in sites:
        if site.hidden:
            continue
        tensor = held(site)
        key: Hashable = tensor
        if isinstance(tensor, EstimatedTensor):
            key = (tensor.layout, tensor.shape, tensor.local, tensor.weight, site.fixed)
        if key not in known:
            known[key] = {kind: _estimate_json(hook, tensor, site, mesh, placement) for kind, hook in PLANNED_HOOKS.items()}
        out[site.name] = known[key]
    return out


def tensor_at_site(
    site: Site, sizes: Mapping[str, int], weight: int | None, lengths: Mapping[str, int] | None = None
) -> EstimatedTensor | str:
    """The tensor at a site as its shape tells it; or which of its dims only the data tell.

    Args:
        site: the site.
        sizes: the mesh.
        weight: bytes of an entry; None where that is not known.
        lengths: of dims that are named in the shape.
    """
    if site.inferred:
        return "only the data tell: its layout is told when a tensor passes"
    shape = tuple((lengths or {}).get(n, n) if isinstance(n, str) else n for n in site.shape)
    names = [str(n) for n in shape if isinstance(n, str)]
    if names or not shape:
        return f"only the data tell how long {' and '.join(names) or 'it'} is"
    if weight is None:
        return "only the data tell its dtype"
    whole = tuple(int(n) for n in shape)
    try:
        local = compute_local_shape(site.layout, _pad_shape(site.layout, whole, sizes), sizes)
    except FlexError as error:
        return str(error)
    return EstimatedTensor(site.name, "value", site.layout, whole, local, weight, weight)


def _pad_shape(layout: Layout, whole: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The least whole that divides, where what is told is without its padding."""
    order = range(len(whole)) if layout.permute is None else layout.permute
    out = []
    for length, index in zip(whole, order, strict=True):
        dim, count = layout.dims[index], 1
        for cut in dim.cuts:
            count *= sizes.get(cut.axis, 1)
        out.append(-(-length // count) * count if dim.keep is not None else length)
    return tuple(out)


def _estimate_json(hook: PlannedHook, tensor: EstimatedTensor | str, site: Site, mesh: Mesh, placement: Placement) -> Json:
    if isinstance(tensor, str):
        return {"why": tensor}
    try:
        found = estimate_pass(hook, tensor, site, mesh, placement)
    except FlexError as error:
        return {"why": str(error).removeprefix(f"{site.name} ").removeprefix(f"{site.name}: ")}
    return _pass_json(found)


def _pass_json(found: PassEstimate) -> Json:
    moved = {link: round(n) for link, n in asdict(found.leader).items() if n}
    return {
        "way": found.way,
        "sent": [[s.op, s.axis, s.ranks, s.nbytes, int(s.backward)] for s in found.collectives],
        "whole": found.whole,
        "part": found.part,
        "leader": moved,
    }
