"""The traffic of a hook at a site, computed once for each layout and shape."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from megatron_flex.errors import FlexError
from megatron_flex.estimate.hook_estimate import Links, Placement, estimate_pass
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.estimate.tensor_sizes import EstimatedTensor, TensorSizes, UnknownSizeError
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

Json = dict[str, Any]
# In words that hold on a GPU and on a CPU. Traffic.shared counts the bytes of `pcie` again.
LINK_LABELS = {"nvlink": "within the node", "network": "between nodes", "pcie": "to host memory"}
PLANNED_HOOKS = {"read": HookSpec("**"), "edit": HookSpec("**", "general")}


def estimate_sites(
    sites: Iterable[Site], sizes: TensorSizes, mesh: Mesh, links: Links | None = None
) -> dict[str, Json]:
    """For each site the traffic of a read, and of an edit of the full tensor, for each call.

    Args:
        sites: hidden ones are left out.
        sizes: of the tensors.
        mesh: as its first rank sees it.
        links: between its ranks.

    Returns:
        `{"read": value, "edit": value}`, with shared objects for equal values; each `{"why"}` or `{"way",
        "sent": [[op, axis, ranks, bytes, backward]], "whole", "part", "leader": {link: bytes}}`.
    """
    placement = Placement(mesh.sizes, (links or Links()).gpus_per_node)
    known: dict[Hashable, Json] = {}
    out = {}
    for site in sites:
        if site.hidden:
            continue
        key: Hashable
        try:
            tensor = sizes.activation(site)
        except UnknownSizeError as error:
            key = error.reason
            known.setdefault(key, {kind: {"why": error.reason} for kind in PLANNED_HOOKS})
        else:
            key = (tensor.layout, tensor.shape, tensor.local, tensor.dtype, site.read_only_reason)
            if key not in known:
                known[key] = {
                    kind: _estimate_json(hook, tensor, site, mesh, placement)
                    for kind, hook in PLANNED_HOOKS.items()
                }
        out[site.name] = known[key]
    return out


def _estimate_json(
    hook: HookSpec, tensor: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement
) -> Json:
    try:
        each = estimate_pass(hook, tensor, site, mesh, placement)
    except UnknownSizeError as error:
        return {"why": error.reason}
    except FlexError as error:
        return {"why": str(error).removeprefix(f"{site.name} ").removeprefix(f"{site.name}: ")}
    return {
        "way": each.action,
        "sent": [[s.op, s.axis, s.ranks, s.nbytes, int(s.backward)] for s in each.collectives],
        "whole": each.full,
        "part": each.shard,
        "leader": {
            label: round(sent) for link, label in LINK_LABELS.items() if (sent := getattr(each.leader, link))
        },
    }
