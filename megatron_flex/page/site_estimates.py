"""The traffic of a hook at a site, computed once for each layout and shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from megatron_flex.dump.size_estimate import EstimatedTensor, compute_local_shape
from megatron_flex.errors import FlexError
from megatron_flex.estimate import HookSpec, Links, PassEstimate, Placement, estimate_pass
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.page.rank_grid import RankGrid
from megatron_flex.sites import Site

Json = dict[str, Any]
# In words that hold on a GPU and on a CPU. Traffic.shared counts the bytes of `pcie` again.
LINK_LABELS = {"nvlink": "within the node", "network": "between nodes", "pcie": "to host memory"}
PLANNED_HOOKS = {"read": HookSpec("**"), "edit": HookSpec("**", "general")}


def estimate_sites(
    sites: Iterable[Site],
    held: Callable[[Site], EstimatedTensor | str],
    grid: RankGrid,
    links: Links | None = None,
) -> dict[str, Json]:
    """For each site the traffic of a read, and of an edit of the full tensor, for each call.

    Args:
        sites: hidden ones are left out.
        held: the tensor at a site, or why its size is unknown.
        grid: the ranks.
        links: between them.

    Returns:
        `{"read": value, "edit": value}`, with shared objects for equal values; each `{"why"}` or `{"way",
        "sent": [[op, axis, ranks, bytes, backward]], "whole", "part", "leader": {link: bytes}}`.
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
            key = (tensor.layout, tensor.shape, tensor.local, tensor.weight, site.read_only_reason)
        if key not in known:
            known[key] = {
                kind: _estimate_json(hook, tensor, site, mesh, placement)
                for kind, hook in PLANNED_HOOKS.items()
            }
        out[site.name] = known[key]
    return out


def tensor_at_site(
    site: Site, sizes: Mapping[str, int], weight: int | None, lengths: Mapping[str, int] | None = None
) -> EstimatedTensor | str:
    """The tensor at a site from its shape; or which of its dims depend on the data.

    Args:
        site: the site.
        sizes: the sizes of the mesh axes.
        weight: bytes of an entry; None if unknown.
        lengths: lengths of dims that are named in the shape.
    """
    if site.inferred:
        return "it depends on the data: its layout is known when the model runs"
    shape = tuple((lengths or {}).get(n, n) if isinstance(n, str) else n for n in site.shape)
    names = [str(n) for n in shape if isinstance(n, str)]
    if names or not shape:
        return f"only the data tell how long {' and '.join(names) or 'it'} is"
    if weight is None:
        return "only the data tell its dtype"
    full = tuple(int(n) for n in shape)
    try:
        local = compute_local_shape(site.layout, _pad_shape(site.layout, full, sizes), sizes)
    except FlexError as error:
        return str(error)
    return EstimatedTensor(site.name, "value", site.layout, full, local, weight, weight)


def _pad_shape(layout: Layout, full: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The smallest length that divides, where the given length excludes padding."""
    order = range(len(full)) if layout.permute is None else layout.permute
    out = []
    for length, index in zip(full, order, strict=True):
        dim, count = layout.dims[index], 1
        for cut in dim.cuts:
            count *= sizes.get(cut.axis, 1)
        out.append(-(-length // count) * count if dim.keep is not None else length)
    return tuple(out)


def _estimate_json(
    hook: HookSpec, tensor: EstimatedTensor | str, site: Site, mesh: Mesh, placement: Placement
) -> Json:
    if isinstance(tensor, str):
        return {"why": tensor}
    try:
        found = estimate_pass(hook, tensor, site, mesh, placement)
    except FlexError as error:
        return {"why": str(error).removeprefix(f"{site.name} ").removeprefix(f"{site.name}: ")}
    return _pass_json(found)


def _pass_json(found: PassEstimate) -> Json:
    moved = {label: round(n) for link, label in LINK_LABELS.items() if (n := getattr(found.leader, link))}
    return {
        "way": found.action,
        "sent": [[s.op, s.axis, s.ranks, s.nbytes, int(s.backward)] for s in found.collectives],
        "whole": found.full,
        "part": found.shard,
        "leader": moved,
    }
