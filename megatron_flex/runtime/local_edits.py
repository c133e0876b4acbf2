"""Edits that run on a rank's shard and communicate nothing: whether they can, decided once for each site.

All edits at a site must be local, or the full tensor is gathered for all of them. The decision depends on
hooks, layout and mesh alone, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from megatron_flex.collectives import EditSums, Route, Shard, ShardExchange, join_sum
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout, count_parts, full_order, padded_shape, smallest_part
from megatron_flex.layout.gradient_layout import conjugate_layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import uses_argument, uses_context
from megatron_flex.runtime.hooks import EditingFunction, HookFunction, describe_edit, for_pass

MODULES_ARGUMENT = 3  # index of the trainable modules in an editing function's arguments
MAX_EDIT_PLANS = 4096  # bounds the cache of sites and shapes


def on_shard(edit: EditingFunction, shard: Shard) -> EditingFunction | None:
    """Return what an editing function's method `on_shard` returns for a shard; None without such a method."""
    bind = getattr(edit, "on_shard", None)
    return None if bind is None else cast(EditingFunction | None, bind(shard))


@dataclass(frozen=True)
class LocalEditPlan:
    """How the edits at a site run on a rank's shard.

    Attributes:
        shard: the shard.
        edits: the functions to run on the shard, by hook; without hooks that only capture.
        original_functions: the hooks' own editing functions that these were made from.
        exchange: the shard as the edits see it.
        layout: the layout of the local tensor.
        is_replicated: whether each rank holds the full tensor and its full gradient.
        sums: the sums over ranks of the edits that may have some.
    """

    shard: Shard
    edits: dict[HookFunction, EditingFunction]
    original_functions: dict[HookFunction, EditingFunction]
    exchange: ShardExchange
    layout: Layout
    is_replicated: bool
    sums: dict[HookFunction, EditSums]

    def at(self, hook: HookFunction, key: Key) -> EditingFunction:
        """The function that a hook runs in one pass.

        Raises:
            HookError: the pass needs the full tensor, and it is too late to gather it.
        """
        edit = self.original_functions[hook]
        of_pass = for_pass(edit, key)
        if of_pass is edit:
            return self.edits[hook]
        bound = of_pass if self.is_replicated else on_shard(of_pass, self.shard)
        if bound is None:
            raise HookError(
                f"{describe_edit(of_pass)}, of one pass, needs the full tensor; "
                f"{describe_edit(edit)} does not"
            )
        return bound


class LocalEditPlanner:
    """Decides how edits run, and caches the decision.

    Args:
        mesh: the run's axes.
        trains: whether there are trainable modules now.
        version: the version of the hooks; a new version clears the cache.
    """

    def __init__(self, mesh: Mesh, trains: Callable[[], bool], version: Callable[[], int]) -> None:
        self._mesh, self._trains, self._version = mesh, trains, version
        self._known: dict[
            tuple[str, torch.Size, Layout],
            tuple[dict[HookFunction, EditingFunction], LocalEditPlan | None],
        ] = {}
        self._plans_state: tuple[int, bool] | None = None

    def find_plan(
        self, hooks: Sequence[HookFunction], site: str, shape: torch.Size, layout: Layout, route: Route | None
    ) -> LocalEditPlan | None:
        """Return the plan by which these hooks edit this rank's shard at a site; None: gather the full
        tensor.
        """
        if route is not None:
            return None
        state = self._version(), self._trains()
        if state != self._plans_state or len(self._known) > MAX_EDIT_PLANS:
            self._known.clear()
            self._plans_state = state
        edits = {h: e for h in hooks if (e := h.editing_of(site)) is not None}
        known = self._known.get((site, shape, layout))
        if known is not None and known[0] == edits:
            return known[1]
        plan, _ = plan_local_edits(edits, layout, tuple(shape), self._mesh, state[1])
        self._known[site, shape, layout] = edits, plan
        return plan


def plan_local_edits(
    edits: dict[HookFunction, EditingFunction],
    layout: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    trains: bool,
) -> tuple[LocalEditPlan | None, str]:
    """Decide how edits run on shards; return the plan, or None and the reason for a gather.

    Args:
        edits: the editing functions at a site, by hook.
        layout: the layout of the tensor at the site.
        shape: the shape of the local tensor.
        mesh: the run's axes.
        trains: whether there are trainable modules.
    """
    sizes = mesh.sizes
    if len(layout.dims) != len(shape):
        return None, f"its layout has {len(layout.dims)} dims, and its shape {shape} has {len(shape)}"
    for dim in (d for d in layout.dims if d.uneven):
        if axes := [c.axis for c in dim.cuts if mesh[c.axis].size > 1]:
            return None, f"its shards along {dim.name!r} over {'/'.join(axes)} may differ in length"
    shard = Shard.from_local(torch.empty(shape, device="meta"), layout, mesh)
    padded = padded_shape(layout, shard.shape, sizes) != shard.full_size
    # The shard is the full tensor, of which any edit may change any entry.
    alone = not layout.active_axes(sizes) and not conjugate_layout(layout).active_axes(sizes) and not padded
    bound_edits: dict[HookFunction, EditingFunction] = {}
    for hook, edit in edits.items():
        name = describe_edit(edit)
        if hook.run == "once":
            return None, f"{name} has run='once', with which one rank edits the full tensor"
        if uses_context(edit):
            return None, f"{name} uses save_ctx"
        if trains and uses_modules(edit):
            return None, f"{name} is given trainable modules"
        bound = edit if alone else on_shard(edit, shard)
        if bound is None:
            return None, _explain_edit(name, edit, shard, layout)
        bound_edits[hook] = bound
    copies = not all(traits_of(e).returns_new_tensor for e in bound_edits.values())
    over = Mesh(tuple(shard.axes(range(len(shard.full_size)))))
    sums = {h: EditSums(over, join_sum) for h, e in bound_edits.items() if over.axes and traits_of(e).sums}
    exchange = ShardExchange(shard, layout, padded, copies)
    return LocalEditPlan(shard, bound_edits, edits, exchange, layout, alone, sums), ""


def explain_gather(
    edits: dict[HookFunction, EditingFunction],
    layout: Layout,
    shape: Sequence[int | str],
    mesh: Mesh,
    trains: bool,
) -> str:
    """Why edits at a site need the full tensor; empty if they run on shards.

    Args:
        edits: the editing functions, by hook.
        layout: the layout of the tensor at the site.
        shape: the shape of the full tensor, with names for lengths that depend on the data.
        mesh: the run's axes.
        trains: whether there are trainable modules.
    """
    order = full_order(layout)
    if len(shape) != len(order):
        return "its layout is found when a tensor passes"
    local = [0] * len(order)
    for length, at in zip(shape, order, strict=True):
        dim = layout.dims[at]
        shards = count_parts(dim, mesh.sizes)
        known = -(-length // shards) if isinstance(length, int) else smallest_part(dim)
        local[at] = known
    return plan_local_edits(edits, layout, tuple(local), mesh, trains)[1]


def uses_modules(edit: Any) -> bool:
    """Whether an edit may use trainable modules."""
    declared = traits_of(edit).uses_modules
    return uses_argument(edit, MODULES_ARGUMENT) if declared is None else declared


def _explain_edit(name: str, edit: Any, shard: Shard, layout: Layout) -> str:
    if not hasattr(edit, "on_shard"):
        return f"{name} is not declared to act on each shard separately, as @mf.local does"
    if shard.summed:
        return f"the tensor is partial, and {name} is not linear"
    names = [layout.dims[i].name or f"dim {i}" for i in full_order(layout)]
    cut = ", ".join(
        f"{names[i]} is sharded over {'/'.join(a.name for a in shard.axes([i]))}" for i in shard.cut
    )
    return f"{name} needs the full tensor: {cut or 'its gradient is partial'}"
