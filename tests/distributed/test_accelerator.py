"""Every kind of hook on a simulated accelerator: devices, host waits, late copies, order of collectives."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_flex.adapters.mesh_axes import groups_of_lines
from megatron_flex.collectives import PipelineGather, pipeline_gather
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexWarning
from megatron_flex.mesh import Axis, Mesh
from tests.support.accelerated import FC1, KINDS, Report, report
from tests.support.accelerator import CUDA, differences, simulated
from tests.support.accelerator.streams import device_of_process
from tests.support.messages import assert_names
from tests.support.pool import run, run_alone
from tests.support.rank import changes

pytest.importorskip("megatron.core")

FAILING, WATCH = "failing edit", "values that are not finite"
FEATURES = ("features", "features with gradients", "gathered features")
MEMBERS = (0, 1)  # the ranks of a job of three that have a model
ENTRIES = 1 << 15  # of a tensor that is sent by itself
WITHOUT_CAPTURES = (
    "nothing",
    "gathered edit without capture",
    "dump",
    "statistics",
    *FEATURES,
    WATCH,
    FAILING,
)


class Budget(NamedTuple):
    """How often the host waits in a step of two microbatches, on each rank; rank 0 receives captures.

    `passes` is until the last backward pass has ended, and should be none; `end` after it, and should be one.
    A number that falls is lowered here, and none rises.
    """

    passes: tuple[int, int] = (0, 0)
    end: tuple[int, int] = (2, 2)


HOOKED = Budget()  # the copies of captures, and the flags of the step's end
BUDGETS = {
    **dict.fromkeys(KINDS, HOOKED),
    "nothing": Budget(end=(0, 0)),
    "read": Budget(end=(3, 2)),  # a partial sum is reduced on the device, and copied after the flags
    "linear edit": Budget(end=(2, 1)),  # a partial sum again
    "gathered edit without capture": Budget(end=(1, 1)),
    "skipped edit": Budget(end=(4, 4)),  # which passes failed, and the warning
    "trainable module": Budget(end=(3, 3)),  # which gradients some rank has
    "dump": Budget(end=(0, 0)),
    "statistics": Budget(end=(1, 1)),
    # A message by the host for each layer and microbatch: its copies are waited for, where stages send.
    "features": Budget((2, 2), (1, 1)),
    "features with gradients": Budget((4, 3), (1, 2)),
    "gathered features": Budget(end=(1, 1)),
    WATCH: Budget(end=(2, 2)),  # the ranges, and the flags of the step's end
    "read experts": Budget((2, 2), (8, 7)),  # the numbers of rows, once a layer
    "read selected rows of experts": Budget((6, 6), (2, 1)),
    "edit of experts": Budget((6, 6), (3, 2)),
    "gradients of experts": Budget(end=(9, 8)),
    "packed sequences": Budget((2, 2)),  # the lengths of sequences
    "fairscale gradients": Budget(end=(2, 1)),
}
NOT_COUNTED = (FAILING, "verify")  # which are no steps of a run


@cache
def reports(kind: str, folder: Path) -> list[Report]:
    return run(2, report, KINDS[kind].setup, kind, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerator")


@pytest.fixture
def answers(kind: str, folder: Path) -> list[Report]:
    pytest.importorskip("fairscale" if KINDS[kind].setup.framework == "fairscale" else "megatron.core")
    return reports(kind, folder / kind)


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_results_are_those_of_the_cpu(kind: str, answers: list[Report]) -> None:
    """Not if a tensor is on another device, a copy is read too early, or its source is overwritten."""
    for answer in answers:
        assert answer.violations == []
        assert answer.unequal == []
        if kind == FAILING:
            assert_names(answer.error, FC1, 1, "on purpose")
        else:
            assert answer.error == ""
    assert bool(answers[0].captures) == (kind not in WITHOUT_CAPTURES)
    assert not answers[1].captures


@each_kind
def test_ranks_call_the_same_collectives_in_the_same_order(kind: str, answers: list[Report]) -> None:
    assert answers[0].collectives
    assert differences([a.collectives for a in answers]) == []


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NOT_COUNTED])
def test_host_waits(kind: str, answers: list[Report]) -> None:
    counted = Budget(*zip(*[(a.waits.passes, a.waits.end) for a in answers], strict=True))
    assert counted == BUDGETS[kind], "\n".join(str(a.places) for a in answers)


# -- the rules of NCCL -----------------------------------------------------------------------------------


def refused(call: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except RuntimeError:
        return True
    return False


class Rules(NamedTuple):
    """Ranks on which nothing else is made."""

    topology: str = "accelerator rules"


def following_rules(_: Rules) -> dict[str, bool]:
    with simulated() as recording:
        host, device = torch.ones(2), torch.ones(2, device=CUDA)
        of_host = dist.new_group(backend="gloo")
        rows = [torch.empty(2, device=CUDA) for _ in range(2)]
        out = {
            "backends": (dist.get_backend(), dist.get_backend(of_host)) == ("nccl", "gloo"),
            "host tensor": refused(dist.all_reduce, host),
            "host tensor among others": refused(dist.all_gather, rows, host),
            "device tensor": refused(dist.all_reduce, device, group=of_host),
            "strides": refused(dist.all_reduce, torch.ones(2, 2, device=CUDA).t()[0]),
            "dtype": refused(dist.all_reduce, device.short()),
            "sizes": dist.get_rank() != 0 or refused(dist.gather, device, [rows[0], rows[1][:1]], dst=0),
        }
        recording.violations.clear()
        dist.all_reduce(device)
        dist.all_gather(rows, device)
        dist.all_reduce(host, group=of_host)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, dist.get_rank())
        dist.barrier()
        out["values"] = device.tolist() == [2, 2] and rows[1].tolist() == [2, 2] and host.tolist() == [2, 2]
        out["objects"] = objects == [0, 1]
        out["allowed"] = not recording.violations
        dist.destroy_process_group(of_host)
    return out


def test_the_rules_of_nccl() -> None:
    for answer in run(2, following_rules, Rules()):
        assert [name for name, good in answer.items() if not good] == []


LARGE_ROWS = 1 << 12  # of 128 bytes


def registering(_: Rules) -> list[Any]:
    """What is mapped and what the driver knows at the ends of steps, which capture more and more."""
    from megatron_flex.collectives.transport import segments
    from megatron_flex.collectives.transport.shared_memory import SharedMemoryTransport
    from megatron_flex.layout import Cut, Dim, Layout
    from megatron_flex.mesh import Axis, Mesh
    from megatron_flex.runtime.captures import Captures, Key
    from megatron_flex.runtime.recorder import Recorder

    changes.setattr(segments, "FIRST_BYTES", 1 << 16)
    rank, layout, out = dist.get_rank(), Layout((Dim("s"), Dim("h", (Cut("tp"),)))), []
    with simulated() as recording:
        group = dist.new_group()
        mesh = Mesh((Axis("tp", 2, rank, group, (0, 1)),))
        captures = Captures()
        recorder = Recorder(mesh, captures, "session")
        recorder.prepare()
        for step, rows in enumerate((4, 4, 4, *(LARGE_ROWS,) * 4)):
            recorder.shard(
                Key("site", step, step, 0, 0), torch.full((rows, 16), float(step), device=CUDA), layout
            )
            recorder.collect([0], mesh, "the end")
            recorder.flush()
            if rows == 4:
                captures.clear()
            shared = recorder._transports[0]
            assert isinstance(shared, SharedMemoryTransport)
            mapped = {s.address: s.size for s in shared._list_mapped()}
            out.append((mapped, dict(device_of_process().registered)))
        recorder.close()
        assert not device_of_process().registered
        assert not recording.violations
        dist.destroy_process_group(group)
    return out


def test_registered_memory_is_what_is_shared() -> None:
    for answer in run(2, registering, Rules()):
        assert all(registered.items() <= mapped.items() for mapped, registered in answer)
        first, last = answer[1][1], answer[-1][1]
        assert min(first.values()) < LARGE_ROWS * 128 <= min(last.values()), "small segments are given back"


def in_other_order(_: Rules) -> Any:
    with simulated() as recording:
        groups = [dist.new_group() for _ in range(2)]
        recording.collectives.clear()
        order = groups if dist.get_rank() == 0 else groups[::-1]
        works = [dist.all_reduce(torch.ones(2, device=CUDA), group=g, async_op=True) for g in order]
        for work in works:
            work.wait()
        for group in groups:
            dist.destroy_process_group(group)
        return recording.collectives


def test_communicators_in_another_order_on_another_rank() -> None:
    assert differences(run(2, in_other_order, Rules())) != []


class Bound(NamedTuple):
    """What a rank sees of a group of some ranks, in a job whose group is bound to a device."""

    bound: bool
    total: list[float]
    violations: list[str]
    refused: bool


def of_members(_: Rules) -> Bound:
    with simulated() as recording:
        job: Any = dist.group.WORLD
        job.bound_device_id = torch.device("cuda", 0)
        total = torch.ones(1, device=CUDA)
        if dist.get_rank() in MEMBERS:
            (group,) = groups_of_lines([[MEMBERS]], part=True)
            dist.all_reduce(total, group=group)
        seen = job.bound_device_id == torch.device("cuda", 0), total.tolist(), list(recording.violations)
        split = refused(dist.new_group, list(MEMBERS), use_local_synchronization=True)
        job.bound_device_id = None
        return Bound(*seen, split)


def test_members_alone_make_a_group_in_a_job_that_is_bound_to_a_device() -> None:
    for rank, answer in enumerate(run_alone(3, of_members, Rules())):
        assert answer == Bound(True, [2.0 if rank in MEMBERS else 1.0], [], True)


# -- from stage to stage without gloo --------------------------------------------------------------------


class Unconnected(NamedTuple):
    """What is seen on one rank of captures that go up the pipeline."""

    arrived: bool
    warned: list[str]
    allocated: list[int]
    violations: list[str]


def without_hosts(_: Rules) -> Unconnected:
    """The hosts of stages cannot connect: captures pass through the device, a window at a time."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no interface")

    with simulated() as recording, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlexWarning)
        rank, group = dist.get_rank(), dist.new_group()
        gather = PipelineGather(Mesh((Axis("pp", 2, rank, group, (0, 1)),)))
        changes.setattr(pipeline_gather, "open_host_group", refuse)
        recording.violations.clear()
        gather.open()
        flex_config.pending_bytes = 2 * ENTRIES * 4
        allocated: list[int] = []
        wait = pipeline_gather._wait

        def counted(begin: Any) -> Any:
            def call(tensor: Any, *stage: int) -> Any:
                allocated[-1] += tensor.nbytes
                assert tensor.is_cuda == bool(stage), "what arrives, arrives on the device"
                return begin(tensor, *stage)

            return call

        def waited(works: Any) -> None:
            wait(works)
            allocated.append(0)

        allocated.append(0)
        for name in ("_begin_send", "_begin_receive"):
            setattr(gather, name, counted(getattr(gather, name)))
        changes.setattr(pipeline_gather, "_wait", waited)
        items = [(f"site{i}", torch.full((ENTRIES,), 10.0 * rank + i)) for i in range(5)]
        came = gather.gather(items)
        wanted = [10.0 * stage + i for stage in range(2) for i in range(5)] if rank == 0 else []
        right = [bool((t == v).all()) and t.is_cpu for (_, _, t), v in zip(came, wanted, strict=True)]
        dist.destroy_process_group(group)
        return Unconnected(all(right), [str(w.message) for w in caught], allocated, recording.violations)


def test_stages_whose_hosts_cannot_connect() -> None:
    answers = run(2, without_hosts, Rules())
    for answer in answers:
        assert answer.arrived
        assert answer.violations == []
        assert max(answer.allocated) <= 2 * ENTRIES * 4
        assert sum(answer.allocated) > 5 * ENTRIES * 4
    (warning,) = answers[0].warned
    assert_names(warning, "rank 0", "no interface", "GLOO_SOCKET_IFNAME")
    assert answers[1].warned == []
