"""The axes of a run: lines of ranks with their process groups, and axes from torch's DeviceMeshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters.adapter_base import AxisSizes
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.collectives import all_gather_pickled
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh

Ranks = tuple[int, ...]
GroupCache = dict[Any, list[Any]]  # by all ranks and the sizes of the axes, or by the lines, or by one line

_group_cache: WeakKeyDictionary[Any, GroupCache] = WeakKeyDictionary()  # by the process group of the job


def divide_ranks(ranks: Ranks, sizes: Ranks) -> list[list[Ranks]]:
    """For each axis its lines of ranks, one for each coordinate on the other axes."""
    out = []
    for axis, size in enumerate(sizes):
        step = prod(sizes[axis + 1 :])
        firsts = [n for n in range(len(ranks)) if n // step % size == 0]
        out.append([tuple(ranks[first + i * step] for i in range(size)) for first in firsts])
    return out


def groups_along_axes(ranks: Ranks, sizes: Ranks, given: Any) -> list[Any]:
    """This rank's process group on each axis of more than one rank; cached."""
    known = _group_cache.setdefault(dist.group.WORLD, {})
    if (ranks, sizes) not in known:
        part = len(ranks) < dist.get_world_size()
        if part and max(sizes) == len(ranks):
            return [given if size > 1 else None for size in sizes]
        if part:
            _check_group_names(given)
        known[ranks, sizes] = [_line_group(lines, part) for lines in divide_ranks(ranks, sizes)]
    return known[ranks, sizes]


def groups_of_lines(divided: list[list[Ranks]], part: bool) -> list[Any]:
    """This rank's process group of each division of ranks into lines; cached.

    Args:
        divided: each division.
        part: whether only some of the job's ranks are in them, and call this.
    """
    known, key = _group_cache.setdefault(dist.group.WORLD, {}), tuple(tuple(lines) for lines in divided)
    if key not in known:
        known[key] = [_line_group(lines, part) for lines in divided]
    return known[key]


def _line_group(lines: list[Ranks], part: bool) -> Any:
    """The group of this rank's line. All ranks create all lines, unless they are only a part of the job.

    The cache is shared: a group that another division created for the same line is reused.
    """
    known, group = _group_cache.setdefault(dist.group.WORLD, {}), None
    for line in lines:
        if len(line) > 1 and (not part or dist.get_rank() in line):
            if (line, part) not in known:
                known[line, part] = [_group_of_members(line) if part else dist.new_group(list(line))]
            group = known[line, part][0] if dist.get_rank() in line else group
    return group


def _group_of_members(line: Ranks) -> Any:
    """A process group that its members alone create.

    In a job whose group is bound to a device (`init_process_group(device_id=...)`) torch splits NCCL's
    communicator of all ranks, and waits for those that do not call this. Where none is bound, the new group
    has a communicator of its own.
    """
    job: Any = dist.group.WORLD
    bound, job.bound_device_id = job.bound_device_id, None
    try:
        return dist.new_group(list(line), use_local_synchronization=True)
    finally:
        job.bound_device_id = bound


def _check_group_names(group: Any) -> None:
    """Refuse where torch would name the same new group differently on its ranks, and hang.

    Collective over `group`.
    """
    counts = all_gather_pickled(len(dist.distributed_c10d._world.pg_names), group)
    if len(set(counts)) > 1:
        raise FlexError(
            f"the ranks of process_group are in differently many process groups ({counts}), so that torch "
            "cannot make groups among them; make the FlexModel before those, or give no process_group"
        )


def make_axis(name: str, group: Any) -> Axis:
    """The axis of an existing process group; of one rank if it is None."""
    if group is None:
        return Axis(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group if len(ranks) > 1 else None, ranks)


MeshUse = tuple[Any, str]  # a DeviceMesh, and the axis of a dim without a known name in this use

AXIS_NAMES = {
    **dict.fromkeys(("tp", "sp", "model", "tensor", "tensor_parallel"), "tp"),
    **dict.fromkeys(("dp", "data", "fsdp", "dp_shard", "dp_replicate", "shard", "replicate"), "dp"),
    **dict.fromkeys(("hsdp", "ddp", "data_parallel"), "dp"),
    **dict.fromkeys(("pp", "pipe", "pipeline", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("cp", "context", "context_parallel"), "cp"),
}
_line_cache: WeakKeyDictionary[Any, list[Ranks]] = WeakKeyDictionary()  # of each DeviceMesh, once determined

NAME_THE_DIMS = (
    "name its dims tp, dp (or dp_replicate and dp_shard), pp, cp in init_device_mesh(mesh_dim_names=...)"
)


def mesh_uses_in(root: nn.Module) -> list[MeshUse]:
    """The meshes that DTensor parameters, parallel styles and `fully_shard` of a model use, each once."""
    uses: list[MeshUse] = []
    walk = walk_modules(root)
    # A module of another class than its own: `fully_shard` gave it that.
    fully_sharded = walk.of_classes(lambda kind: hasattr(kind, "_get_fsdp_state"))
    if walk.hooked or fully_sharded:
        for module in walk.modules:
            uses += [(style_mesh, "tp") for style_mesh in style_meshes(module)]
            state = getattr(type(module), "_get_fsdp_state", None)  # asking the module itself is slow
            for group in () if state is None else _fsdp_groups(state(module)):
                uses.append((group.mesh_info.mesh, "dp"))
    sharded = bool(uses) and all(axis == "dp" for _, axis in uses)
    for parameter in walk.parameters:
        device_mesh = getattr(parameter, "device_mesh", None)
        if device_mesh is not None:
            uses.append((device_mesh, "dp" if sharded else "tp"))
    return [u for i, u in enumerate(uses) if u not in uses[:i]]


def _fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    single = getattr(state, "_fsdp_param_group", None) if groups is None else None
    return list(groups or ([] if single is None else [single]))


def style_meshes(module: nn.Module) -> Iterator[Any]:
    """The meshes that the hooks of parallel styles on a module hold."""
    from torch.distributed.device_mesh import DeviceMesh

    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, DeviceMesh):
                yield cell.cell_contents


def root_mesh_of(device_mesh: Any) -> Any:
    """The mesh that a mesh was sliced from."""
    get_root = getattr(device_mesh, "_get_root_mesh", None)
    if get_root is not None:
        return get_root()
    from torch.distributed.device_mesh import _mesh_resources  # its location in older torch

    return _mesh_resources.get_root_mesh(device_mesh)


def axes_of_device_mesh(device_mesh: Any, mesh: Mesh) -> list[str]:
    """For each dim of a DeviceMesh the axis of the run along which it extends; empty where it has one rank.

    Raises:
        FlexError: it extends along no axis of the run.
    """
    out = []
    for dim, (size, line) in enumerate(zip(device_mesh.mesh.shape, rank_lines(device_mesh), strict=True)):
        name = _axis_by_name(device_mesh, dim)
        axis = next((a.name for a in mesh if a.size > 1 and a.ranks == line), "")
        if not axis and name == "dp" and set(line) <= set(mesh["dp"].ranks):
            axis = "dp"  # one of several dims of data parallel ranks
        if size > 1 and not axis:
            raise FlexError(
                f"ranks {list(line)} of dim {dim} of {device_mesh} are not an axis of the model's mesh "
                f"({mesh.describe()}); give all its modules slices of one mesh"
            )
        out.append(axis if size > 1 else "")
    return out


def rank_lines(device_mesh: Any) -> list[Ranks]:
    """For each dim of a DeviceMesh this rank's line along it.

    Raises:
        FlexError: this rank is not in it.
    """
    if device_mesh in _line_cache:
        return _line_cache[device_mesh]
    at, ranks = device_mesh.get_coordinate(), device_mesh.mesh
    if at is None:
        raise FlexError(
            f"rank {dist.get_rank()} is not one of {device_mesh}'s; make the FlexModel on its ranks only, "
            "with their process_group"
        )
    out = []
    for dim in range(ranks.ndim):
        index = tuple(slice(None) if i == dim else int(c) for i, c in enumerate(at))
        out.append(tuple(int(r) for r in ranks[index].tolist()))
    _line_cache[device_mesh] = out
    return out


def mesh_of_device_meshes(uses: Iterable[MeshUse], axis_sizes: AxisSizes, process_group: Any = None) -> Mesh:
    """The axes of a run from the DeviceMeshes of its model.

    Each axis has the DeviceMesh's own process group. Ranks of the job beyond the mesh are other replicas or
    stages if the user gives their number. Collective over the group's ranks.

    Args:
        uses: the meshes, root meshes or slices.
        axis_sizes: the sizes given by the user, by axis.
        process_group: all ranks that take part; the default group if None.

    Raises:
        FlexError: meshes disagree, a dim's meaning is unknown, or the other ranks are not accounted for.
    """
    axes, covered = _axes_of_uses(list(uses))
    ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD)))
    if set(covered) - set(ranks):
        raise FlexError(
            f"the model's device mesh has ranks {list(covered)}, of which process_group's {list(ranks)} lack "
            "some; give the group of all ranks that the model is on"
        )
    if len(covered) < len(ranks):
        axes = [*_axes_beyond_mesh(axes, covered, ranks, axis_sizes, process_group), *axes]
    is_world = len(ranks) == dist.get_world_size()
    mesh = Mesh(tuple(axes), ranks=() if is_world else ranks)
    mesh.check_sizes(axis_sizes)
    return mesh


def _axes_of_uses(uses: list[MeshUse]) -> tuple[list[Axis], Ranks]:
    """The axes of the mesh that has all dims of the others, and all their ranks."""
    roots: list[Any] = []
    for device_mesh, _ in uses:
        if all(root_mesh_of(device_mesh) is not r for r in roots):
            roots.append(root_mesh_of(device_mesh))
    roots.sort(key=lambda r: -r.mesh.numel())
    largest = roots[0]
    axes = _axes_of_root(largest, uses)
    for other in roots[1:]:
        for axis in _axes_of_root(other, uses):
            same = next((a for a in axes if a.name == axis.name), None)
            if axis.size > 1 and (same is None or same.ranks != axis.ranks):
                raise FlexError(
                    f"device meshes disagree: {other} has ranks {list(axis.ranks)} as {axis.name}, and "
                    f"{largest} has {'none' if same is None else list(same.ranks)}; slice both from one "
                    "init_device_mesh"
                )
    return axes, tuple(sorted(int(r) for r in largest.mesh.flatten().tolist()))


def _axes_of_root(root: Any, uses: list[MeshUse]) -> list[Axis]:
    meaning = [_axis_by_name(root, i) or _axis_by_use(root, i, uses) for i in range(root.mesh.ndim)]
    at, along = root.get_coordinate() or (), rank_lines(root)
    out = []
    for name in dict.fromkeys(m for m in meaning if m):
        dims = [i for i, m in enumerate(meaning) if m == name and root.mesh.shape[i] > 1]
        if name != "dp" and len(dims) > 1:
            raise FlexError(f"{root} has several dims that are {name}, {dims}; {NAME_THE_DIMS}")
        if len(dims) < 2:
            dim = dims[0] if dims else meaning.index(name)
            group = root.get_group(dim) if dims else None
            out.append(_make_axis(name, along[dim], int(at[dim]), group))
        else:
            out.append(_flatten_dims(name, root, dims))
    return out


def _make_axis(name: str, line: Ranks, coord: int, group: Any) -> Axis:
    if group is not None and tuple(dist.get_process_group_ranks(group)) != line:
        raise FlexError(
            f"ranks {list(line)} of axis {name} are in another order in their process group, "
            f"{dist.get_process_group_ranks(group)}; make the mesh of ascending ranks"
        )
    return Axis(name, len(line), coord, group, line)


def _flatten_dims(name: str, root: Any, dims: list[int]) -> Axis:
    """One axis from several dims, the first outermost; its process group is created once."""
    order = [i for i in range(root.mesh.ndim) if i not in dims] + dims
    length = prod(root.mesh.shape[i] for i in dims)
    rows = [tuple(map(int, r)) for r in root.mesh.permute(order).reshape(-1, length).tolist()]
    rank = dist.get_rank()
    line = next(r for r in rows if rank in r)
    part = root.mesh.numel() < dist.get_world_size()
    return _make_axis(name, line, line.index(rank), groups_of_lines([rows], part)[0])


def _axis_by_name(device_mesh: Any, dim: int) -> str:
    """The axis that a dim's name contains; empty if none."""
    names = device_mesh.mesh_dim_names
    return "" if names is None else AXIS_NAMES.get(names[dim].lower(), "")


def _axis_by_use(root: Any, dim: int, uses: list[MeshUse]) -> str:
    """The axis of a dim in its use; empty for one of a single rank."""
    if root.mesh.shape[dim] == 1:
        return ""
    line = rank_lines(root)[dim]
    axes = {axis for used, axis in uses if root_mesh_of(used) is root and line in rank_lines(used)}
    if len(axes) != 1:
        name = "" if root.mesh_dim_names is None else f" {root.mesh_dim_names[dim]!r}"
        raise FlexError(f"what dim {dim}{name} of {root} is for is not known; {NAME_THE_DIMS}")
    return axes.pop()


def _axes_beyond_mesh(
    axes: list[Axis], covered: Ranks, ranks: Ranks, axis_sizes: AxisSizes, group: Any
) -> list[Axis]:
    """Axes along which there are further meshes like this rank's. Collective over the group."""
    known = {a.name for a in axes if a.size > 1}
    sizes = {n: axis_sizes.get(n) or 1 for n in ("pp", "dp") if n not in known}
    many = len(ranks) // len(covered)
    if prod(sizes.values()) * len(covered) != len(ranks):
        raise FlexError(
            f"the model's device mesh has {len(covered)} of {len(ranks)} ranks, and what the others are is "
            "not known; pass data_parallel_size or pipeline_parallel_size, or give the process_group of the "
            f"mesh's own ranks, {list(covered)}"
        )
    everyones = all_gather_pickled(covered, group)
    meshes = sorted(set(everyones))
    if len(meshes) != many or sorted(r for m in meshes for r in m) != list(ranks):
        raise FlexError(
            f"ranks have device meshes of {[list(m) for m in meshes]}, which are not {many} like each other; "
            "make the mesh with init_device_mesh over all ranks"
        )
    rank = dist.get_rank()
    named: dict[str, list[Ranks]] = {name: [] for name in sizes}
    for place in range(len(covered)):
        column = tuple(m[place] for m in meshes)
        for name, rows in zip(sizes, divide_ranks(column, tuple(sizes.values())), strict=True):
            named[name] += rows
    groups = groups_of_lines(list(named.values()), len(ranks) < dist.get_world_size())
    out = []
    for (name, rows), axis_group in zip(named.items(), groups, strict=True):
        line = next(r for r in rows if rank in r)
        out.append(_make_axis(name, line, line.index(rank), axis_group))
    # An axis of one rank in the mesh is dropped, because another one now has its name.
    axes[:] = [a for a in axes if a.name not in sizes]
    return out
