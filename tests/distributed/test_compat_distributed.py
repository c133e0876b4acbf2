"""`compat.distributed`: ranks and groups, and what is sent along them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.compat import FlexModel
from megatron_flex.compat import distributed as fm
from tests.support import compat
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run

GETTERS = (
    "local_rank",
    "local_world_size",
    "subset_rank",
    "subset_world_size",
    "tensor_parallel_rank",
    "tensor_parallel_world_size",
    "pipeline_parallel_rank",
    "pipeline_parallel_world_size",
    "data_parallel_rank",
    "data_parallel_world_size",
)
AXES = ("tensor_parallel", "pipeline_parallel", "data_parallel")


def state(tp: int, pp: int, dp: int) -> Any:
    return fm.initialize_distributed_state(nn.Linear(2, 4), tp, pp, dp)


def told(sizes: tuple[int, int, int]) -> Any:
    fmps = state(*sizes)
    groups = [getattr(fmps, f"get_{axis}_group")() for axis in AXES]
    ranks = [None if g is None else dist.get_process_group_ranks(g) for g in groups]
    subset = dist.get_process_group_ranks(fmps.get_subset_process_group())
    return {n: getattr(fmps, f"get_{n}")() for n in GETTERS}, ranks, subset


def test_initialize_distributed_state() -> None:
    """Ranks as (pipeline, data, tensor), the last counting fastest."""
    for rank, (values, groups, subset) in enumerate(run(4, told, (2, 1, 2))):
        assert values == {
            "local_rank": rank,
            "local_world_size": 4,
            "subset_rank": rank,
            "subset_world_size": 4,
            "tensor_parallel_rank": rank % 2,
            "tensor_parallel_world_size": 2,
            "pipeline_parallel_rank": 0,
            "pipeline_parallel_world_size": 1,
            "data_parallel_rank": rank // 2,
            "data_parallel_world_size": 2,
        }
        assert groups == [[rank // 2 * 2, rank // 2 * 2 + 1], None, [rank % 2, rank % 2 + 2]]
        assert subset == [0, 1, 2, 3]


def several() -> Any:
    first, second = state(1, 1, 2), state(2, 1, 1)
    count = len(dist.distributed_c10d._world.pg_map)
    again = [state(1, 1, 2), state(2, 1, 1)]
    wrong = ""
    try:
        state(2, 2, 1)
    except ValueError as error:
        wrong = str(error)
    return (
        (first.get_data_parallel_world_size(), first.get_tensor_parallel_world_size()),
        (second.get_data_parallel_world_size(), second.get_tensor_parallel_world_size()),
        len(dist.distributed_c10d._world.pg_map) - count,
        len(again),
        wrong,
    )


def test_the_states_of_several_models() -> None:
    for first, second, more, _, wrong in run(2, several):
        assert (first, second, more) == ((2, 1), (1, 2), 0)
        assert_names(wrong, 4)


def launched() -> list[Any]:
    """Under a launcher that set the environment and left torch.distributed to whoever needs it."""
    rank = dist.get_rank()
    store = [os.getpid()]
    dist.broadcast_object_list(store, 0)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + store[0] % 20000))
    before = dist.is_initialized()
    flex = FlexModel(nn.Linear(2, 2), {}, data_parallel_size=2)
    return [before, dist.is_initialized(), flex.fmps.get_data_parallel_rank() == rank]


def test_torch_distributed_is_initialized_under_a_launcher() -> None:
    assert run(2, launched) == [[False, True, True]] * 2


def alone() -> list[Any]:
    """As `python script.py`."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    fmps = FlexModel(nn.Linear(2, 2), {}).fmps
    moved = fm.all_gather_data_parallel(torch.ones(2), 0, fmps)
    return [dist.is_initialized(), fmps.get_local_rank(), fmps.get_subset_process_group(), moved.tolist()]


def test_one_process_without_a_launcher() -> None:
    assert run(1, alone) == [[False, 0, None, [1.0, 1.0]]]


def of_megatron(case: Case) -> Any:
    chunks = compat.start(case)
    fmps = fm.initialize_distributed_state(chunks[0], case.tp, case.pp, case.dp)
    flex = compat.wrap(case, chunks, {})
    same = flex.fmps.get_tensor_parallel_group() is fmps.get_tensor_parallel_group()
    return [fmps.get_pipeline_parallel_rank(), fmps.get_tensor_parallel_rank(), same]


def test_the_state_of_a_megatron_model_is_megatrons() -> None:
    pytest.importorskip("megatron.core")
    case = Case("tp2 pp2", tp=2, pp=2, layers=2)
    assert run(4, of_megatron, case) == [[pp, tp, True] for pp in range(2) for tp in range(2)]


# -- moving tensors ----------------------------------------------------------------------------------

# Four ranks: tensor and data parallel groups of two, one of each without rank 0.
SIZES = (2, 1, 2)


def gathered(axis: str) -> list[Tensor]:
    fmps = state(*SIZES)
    place = getattr(fmps, f"get_{axis}_rank")()
    gather = getattr(fm, f"all_gather_{axis}")
    rank = dist.get_rank()
    even = gather(torch.full((2, 1), float(rank)), 1, fmps)
    return [even, gather(torch.full((place + 1,), rank), -1, fmps)]


@pytest.mark.parametrize("axis", ["tensor_parallel", "data_parallel"])
def test_all_gather(axis: str) -> None:
    for rank, (even, uneven) in enumerate(run(4, gathered, axis)):
        first = rank // 2 * 2 if axis == "tensor_parallel" else rank % 2
        second = first + (1 if axis == "tensor_parallel" else 2)
        assert even.tolist() == [[float(first), float(second)]] * 2
        assert uneven.tolist() == [first, second, second]


def scattered(axis: str) -> Any:
    fmps = state(*SIZES)
    scatter = getattr(fm, f"scatter_{axis}")
    part = scatter(torch.arange(8).reshape(2, 4), 1, fmps)
    try:
        scatter(torch.ones(1), 0, fmps)
    except ValueError as error:
        return part, str(error)
    return part, ""


@pytest.mark.parametrize("axis", ["tensor_parallel", "data_parallel"])
def test_scatter(axis: str) -> None:
    for rank, (part, said) in enumerate(run(4, scattered, axis)):
        place = rank % 2 if axis == "tensor_parallel" else rank // 2
        assert part.tolist() == [[2 * place, 2 * place + 1], [2 * place + 4, 2 * place + 5]]
        assert part.is_contiguous()
        assert_names(said, 1)


def spread(axis: str) -> list[Any]:
    fmps = state(*SIZES)
    tensor = torch.full((2, 2), float(dist.get_rank()))
    turned = torch.arange(6.0).reshape(2, 3).t() + 10 * dist.get_rank()
    broadcast = getattr(fm, f"broadcast_{axis}")
    return [broadcast(tensor, fmps) is tensor, float(tensor[1, 1]), broadcast(turned, fmps)]


@pytest.mark.parametrize("axis", ["tensor_parallel", "data_parallel"])
def test_broadcast(axis: str) -> None:
    """From the first rank of each group, which need not be rank 0."""
    for rank, (same, value, turned) in enumerate(run(4, spread, axis)):
        first = rank // 2 * 2 if axis == "tensor_parallel" else rank % 2
        assert same
        assert value == first
        assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).t() + 10 * first)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def staged() -> Any:
    fmps = state(1, 2, 1)
    rank = fmps.get_pipeline_parallel_rank()
    mine = {f"{d} {rank} {n}": torch.full((n, 2), n).to(d) for d in DTYPES for n in range(3)}
    empty = fm.gather_pipeline_parallel_tensor_dicts(fmps, {})
    said = ""
    try:
        fm.gather_pipeline_parallel_tensor_dicts(fmps, {"same": torch.ones(1)})
    except ValueError as error:
        said = str(error)
    return empty, fm.gather_pipeline_parallel_tensor_dicts(fmps, mine), said


def test_gather_pipeline_parallel_tensor_dicts() -> None:
    (empty, first, said), (_, second, nothing) = run(2, staged)
    assert empty == second == {}
    assert len(first) == 2 * 3 * len(DTYPES)
    for name, tensor in first.items():
        dtype, _, number = name.split(" ")
        assert str(tensor.dtype) == dtype
        assert tensor.tolist() == torch.full((int(number), 2), int(number)).to(tensor.dtype).tolist()
    assert_names(said, "same")
    assert nothing == ""


def exchanged() -> Any:
    fmps = state(1, 2, 1)
    rank = fmps.get_pipeline_parallel_rank()
    other = 1 - rank
    arrived = [torch.empty(2), torch.empty(3, 2).t()]
    leaving = [torch.full((2,), float(rank)), torch.full((2, 3), 10.0 + rank)]
    fm.batch_isend_irecv_pipeline_parallel(fmps, arrived, [other, other], leaving, [other, other])
    fm.batch_isend_irecv_pipeline_parallel(fmps, [], [], [], [])
    try:
        fm.batch_isend_irecv_pipeline_parallel(fmps, arrived, [other], [], [])
    except ValueError as error:
        return arrived, str(error)
    return arrived, ""


def test_batch_isend_irecv_pipeline_parallel() -> None:
    for rank, ((small, large), said) in enumerate(run(2, exchanged)):
        assert small.tolist() == [1.0 - rank] * 2
        assert large.tolist() == [[11.0 - rank] * 3] * 2
        assert_names(said, 2, 1)
