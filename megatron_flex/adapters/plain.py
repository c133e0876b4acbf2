"""Any nn.Module that no framework's adapter knows: the person says the mesh, and where needed the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.ranks import divide_ranks, groups_along_axes
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh

RANK_ORDER = ("pp", "dp", "tp")  # from the outermost to the innermost
PARALLEL_PACKAGES = ("megatron.", "transformer_engine.")  # whose modules hold shards

AxisSizes = Mapping[str, int | None]  # axis name to the size that a person gave


def make_plain_adapter(chunks: list[nn.Module], said: AxisSizes, process_group: Any = None) -> Modules:
    """The adapter of a plain module.

    Collective over the group's ranks, the first time that they are divided so.

    Raises:
        FlexError: there are several chunks, the sizes do not fit the number of ranks, or the module has
            a framework's parallel layers in it and nobody says the tensor parallel size.
    """
    names = ", ".join(dict.fromkeys(type(c).__name__ for c in chunks)) or "no module"
    if len(chunks) != 1:
        raise FlexError(
            f"{names}: {len(chunks)} virtual chunks that no known framework built as one model; give one "
            "module"
        )
    root = unwrap(chunks[0])
    shards = next((m for m in root.modules() if _is_framework_module(m)), None)
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1
    if shards is not None and not alone and said.get("tp") is None:
        raise FlexError(
            f"{names} holds a {type(shards).__name__} and is no model that is known as a whole, as "
            "megatron-core's GPTModel, HybridModel, MambaModel and BertModel are; say tensor_parallel_size "
            "to have it as a plain module, and expected_shape where tensors are cut"
        )
    return compose(chunks[0], mesh_of(said, process_group))


def mesh_of(said: AxisSizes, process_group: Any = None) -> Mesh:
    """The ranks of a group as pipeline, data and tensor parallel ones, the last next to each other.

    Args:
        said: the sizes; `tp` and `pp` are 1 where none is given, and `dp` is what is left.
        process_group: all ranks that take part, in the order of their numbers; the default group if None, or
            one process without any.

    Raises:
        FlexError: the sizes do not make up the number of ranks, or this rank is not in the group.
    """
    joined = dist.is_available() and dist.is_initialized()
    ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))) if joined else (0,)
    rank = dist.get_rank() if joined else 0
    if rank not in ranks:
        raise FlexError(
            f"rank {rank} is none of process_group's {list(ranks)}; make the FlexModel on those ranks only"
        )
    tp, pp = said.get("tp") or 1, said.get("pp") or 1
    dp = said.get("dp") or max(1, len(ranks) // (tp * pp))
    if tp * pp * dp != len(ranks):
        raise FlexError(
            f"tensor_parallel_size={tp} x pipeline_parallel_size={pp} x data_parallel_size={dp} make "
            f"{tp * pp * dp} ranks, but there are {len(ranks)}; let the product be that"
        )
    sizes = (pp, dp, tp)
    groups = groups_along_axes(ranks, sizes, process_group) if joined else [None] * len(RANK_ORDER)
    axes = []
    for name, group, lines in zip(RANK_ORDER, groups, divide_ranks(ranks, sizes), strict=True):
        line = next(n for n in lines if rank in n)
        axes.append(Axis(name, len(line), line.index(rank), group, line))
    return Mesh(tuple(axes), ranks=ranks)


def _is_framework_module(module: nn.Module) -> bool:
    return any(c.__module__.startswith(PARALLEL_PACKAGES) for c in type(module).__mro__)
