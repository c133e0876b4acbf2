"""Reads by shared memory: right in every layout, no collective, bounded, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.rank_agreement import Agreement
from megatron_flex.collectives.transport import segments, shared_memory
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.collectives.transport.shared_memory import SharedMemoryTransport
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, FlexWarning, HookError
from megatron_flex.layout import Cut, Dim, Layout, assemble, coordinates, extract, is_partial
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.captures import Captures, Key
from megatron_flex.runtime.recorder import Recorder
from tests.support.counting import counting
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run  # what nodes share is kept for good
from tests.support.rank import changes

B, H = Dim("b"), Dim("h")
LAYOUTS = {
    "cut": (Layout((Dim("s"), B, Dim("h", (Cut("tp"),)))), (8, 2, 16)),
    "sequence in zigzag": (Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), B, H)), (16, 2, 4)),
    "segments": (Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("4h", (Cut("tp"),), (1, 2)))), (8, 24)),
    "vocabulary": (Layout((Dim("s"), Dim("v", (Cut("tp"),), keep=29))), (4, 32)),
    "one has only padding": (Layout((Dim("v", (Cut("tp"),), keep=3), H)), (8, 4)),
    "permuted": (Layout((Dim("s"), B, Dim("h", (Cut("tp"),))), permute=(2, 0, 1)), (4, 2, 8)),
    "copies": (Layout((Dim("s", (Cut("cp"),)), Dim("kv", (Cut("tp", copies=2),)))), (4, 8)),
    "summed": (Layout((Dim("s", (Cut("cp"),)), H), ("tp",)), (4, 8)),
    "summed copies": (Layout((Dim("s"), Dim("kv", (Cut("tp", copies=2, partial=True),)))), (4, 8)),
    "summed twice": (Layout((H,), ("cp", "tp")), (8,)),
    "replicated": (Layout((Dim("s"), H)), (4, 8)),
    "a number": (Layout((), ("tp",)), ()),
    "empty": (Layout((Dim("s"), Dim("h", (Cut("tp"),)))), (0, 8)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@contextmanager
def saying() -> Iterator[Counter[str]]:
    """How many collectives and messages of each name this rank makes, known when it ends."""
    said: Counter[str] = Counter()
    with counting() as calls:
        yield said
    said.update(call.op for call in calls)


def mesh_of(tp: int, cp: int) -> Mesh:
    """Axes over all ranks, `tp` fastest."""
    rank = dist.get_rank()
    groups: dict[str, Any] = {}
    for c in range(cp):
        group = dist.new_group(mine := [c * tp + t for t in range(tp)])
        groups |= {"tp": (group, mine)} if rank in mine else {}
    for t in range(tp):
        group = dist.new_group(mine := [c * tp + t for c in range(cp)])
        groups |= {"cp": (group, mine)} if rank in mine else {}
    at = {"tp": rank % tp, "cp": rank // tp}
    return Mesh(
        tuple(Axis(n, s, at[n], groups[n][0], tuple(groups[n][1])) for n, s in (("cp", cp), ("tp", tp)))
    )


def recorder(mesh: Mesh, watch: Callable[[], None] | None = None) -> tuple[Recorder, Captures]:
    captures = Captures()
    made = Recorder(mesh, captures, "session", watch)
    made.prepare()
    return made, captures


def flush(made: Recorder) -> None:
    """End a step in which no hook failed."""
    flags, why = made.collect([0], made.mesh, "the end of a step")
    if flags[0]:
        made.drop()
        raise FlexError(why)
    made.flush()


def gathering(made: Recorder) -> ProcessGroupTransport:
    (found,) = (t for t in made._transports if isinstance(t, ProcessGroupTransport))
    return found


def key(step: int, site: str = "x", call: int = 0) -> Key:
    return Key(site, step, step, 0, call)


def shards_of(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> list[Tensor]:
    """Every rank's, with real summands, in the order of the layout's coordinates."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randint(-40, 40, shape, generator=generator).to(dtype)
    kept = Layout(layout.dims, layout.partial)
    shards = [extract(_padded(kept), whole, c, mesh.sizes) for c in coordinates(layout, mesh.sizes)]
    for number, (shard, at) in enumerate(zip(shards, coordinates(layout, mesh.sizes), strict=True)):
        summed = layout.partial or any(c.partial for d in layout.dims for c in d.cuts)
        if summed and sum(at.values()):
            shard.copy_(torch.arange(shard.numel()).reshape(shard.shape) % 7 + number)
    return shards


def _padded(layout: Layout) -> Layout:
    return Layout(tuple(Dim(d.name, d.cuts, d.segments) for d in layout.dims), layout.partial)


def step_of_all(
    made: Recorder, captures: Captures, mesh: Mesh, number: int, summed: bool = True
) -> list[str]:
    """Record everything and flush; which readings are wrong on the leader, with how many there are."""
    chosen = {n: v for n, v in LAYOUTS.items() if summed or not is_partial(v[0], mesh.sizes)}
    captures.clear()
    every = list(product(chosen.items(), DTYPES))
    sources = []
    for (name, (layout, shape)), dtype in every:
        shards = shards_of(layout, shape, dtype, mesh)
        order = coordinates(layout, mesh.sizes)
        mine = shards[order.index({a: mesh.coords.get(a, 0) for a in layout.axes})].clone()
        made.shard(key(number, f"{name} {dtype}"), mine, layout)
        mine.fill_(0)  # it is overwritten in place at once
        sources.append((f"{name} {dtype}", assemble(layout, shards, mesh.sizes)))
    flush(made)
    wrong = []
    for name, wanted in sources:
        if captures:
            (got,) = captures[name].at(step=number)
            good = got.dtype == wanted.dtype and torch.equal(got, wanted) and got.is_contiguous()
            wrong += [] if good else [name]
    return [*wrong, f"all read: {len(captures) == len(sources)}"]


def layouts(tp: int, cp: int, nodes: bool) -> Any:
    if nodes:
        flex_config.node = f"node{dist.get_rank() // 2}"
    mesh = mesh_of(tp, cp)
    made, captures = recorder(mesh)
    first = step_of_all(made, captures, mesh, 0)
    step_of_all(made, captures, mesh, 1, summed=False)
    with saying() as seen:
        second = step_of_all(made, captures, mesh, 2, summed=False)
    group = gathering(made)
    kept, sizes = list(group._pending), len(group._buffers._free)
    made.close()
    return first, second, dict(seen), kept, sizes


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (4, 1), (2, 2)])
def test_every_layout_with_no_collective(tp: int, cp: int) -> None:
    for rank, (first, second, seen, kept, buffers) in enumerate(run(tp * cp, layouts, tp, cp, False)):
        assert first == second == [f"all read: {rank == 0}"]
        assert seen == {"all_reduce": 1 + (cp > 1)}, "the flags of the step's end"
        assert kept == [], "ranks that do not receive hold nothing"
        assert buffers == 0


def test_two_nodes() -> None:
    for rank, (first, second, seen, _, buffers) in enumerate(run(4, layouts, 2, 2, True)):
        assert first == second == [f"all read: {rank == 0}"]
        assert seen == {"all_reduce": 4}, "flags; shards go from host to host"
        assert buffers == 0


# -- the ring ----------------------------------------------------------------------------------------------

HALF = Layout((Dim("s"), Dim("h", (Cut("tp"),))))


def one(made: Recorder, step: int, entries: int, site: str = "x") -> None:
    rank = dist.get_rank()
    made.shard(key(step, site), torch.full((2, entries // 2), float(10 * step + rank)), HALF)


def right(tensor: Tensor, step: int) -> bool:
    half = tensor.shape[1] // 2
    return bool((tensor[:, :half] == 10 * step).all() and (tensor[:, half:] == 10 * step + 1).all())


def keeping(most: int, steps: int, clear: bool) -> Any:
    flex_config.shared_bytes, segments.FIRST_BYTES = most, 1 << 20
    made, captures = recorder(mesh_of(2, 1))
    with saying() as seen, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            one(made, step, 1 << 17)  # 1 MiB
            flush(made)
            if clear and step >= 2:
                captures.clear()
    pool = next(t._pool for t in made._transports if isinstance(t, SharedMemoryTransport))
    used = len(pool.segments)
    made.close()
    good = (
        all(right(t, k.step) for k, t in zip(captures["x"].keys, captures["x"], strict=True))
        if captures
        else True
    )
    return (
        dict(seen),
        good,
        len(captures["x"]) if captures else 0,
        used,
        [str(w.message) for w in said],
    )


def test_a_reader_who_keeps_everything_has_it_right() -> None:
    """Three slots, and sixteen steps that are all kept: the leader copies out what no slot can hold."""
    leader, other = run(2, keeping, 3 << 20, 16, False)
    assert leader[:3] == ({"all_reduce": 16}, True, 16)
    assert leader[3] == 3
    assert leader[4] == other[4] == []


def test_the_ring_is_as_small_as_what_is_kept() -> None:
    leader, _ = run(2, keeping, 64 << 20, 40, True)
    assert leader[:2] == ({"all_reduce": 40}, True)
    assert leader[3] == 5, "three steps were kept at first, one was written to, and one is spare"


def growing() -> Any:
    flex_config.shared_bytes, segments.FIRST_BYTES = 64 << 20, 1 << 16
    made, captures = recorder(mesh_of(2, 1))
    out = []
    for step, entries in enumerate([1 << 12, 1 << 18, 1 << 18, 1 << 12, 1 << 20, 1 << 20]):
        with saying() as seen:
            one(made, step, entries)
            flush(made)
        (got,) = captures["x"].at(step=step) if captures else (None,)
        out.append((seen, got is None or right(got, step)))
        captures.clear()
    made.close()
    return out


def test_what_does_not_fit_is_gathered_and_fits_in_the_next_step() -> None:
    for answer, message in zip(run(2, growing), ("recv", "send"), strict=True):
        assert all(good for _, good in answer)
        assert [s[message] for s, _ in answer] == [0, 1, 0, 0, 1, 0]


def lacking(folder: str, most: int) -> Any:
    flex_config.shared_folder, flex_config.shared_bytes = folder, most
    made, captures = recorder(mesh_of(2, 1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            one(made, step, 1 << 18)
            flush(made)
    made.close()
    good = (
        all(right(t, k.step) for k, t in zip(captures["x"].keys, captures["x"], strict=True))
        if captures
        else True
    )
    return (
        good,
        len(captures["x"]) if captures else 0,
        [str(w.message) for w in said if w.category is FlexWarning],
    )


@pytest.mark.parametrize(
    ("folder", "most", "values"),
    [
        ("/nowhere/at/all", 4 << 30, ["/nowhere/at/all", 0]),
        ("/dev/shm", 1 << 16, ["FLEX_SHARED_BYTES", 65536]),
        ("/proc", 4 << 30, ["/proc", 0]),
    ],
)
def test_no_room_is_one_warning_and_right(folder: str, most: int, values: list[object]) -> None:
    (good, count, said), other = run(2, lacking, folder, most)
    assert good
    assert count == 3
    (message,) = said
    assert_names(message, *values, 2097152, "docker run --shm-size=1g", "FLEX_SHARED_FOLDER")
    assert other == (True, 0, [])


def no_room() -> Any:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    changes.setattr(os, "posix_fallocate", full)
    return lacking("/dev/shm", 4 << 30)


def test_a_folder_that_fills_up_is_one_warning_and_right() -> None:
    (good, count, said), _ = run(2, no_room)
    assert good
    assert count == 3
    assert len(said) == 1
    assert_names(said[0], "/dev/shm", os.strerror(errno.ENOSPC))


def mapped(how: Callable[[Path], Any], lengths: list[int]) -> Any:
    """Steps of tensors of these lengths, where rank 1 maps files in another way than rank 0 expects."""
    made, captures = recorder(mesh_of(2, 1))
    if dist.get_rank():
        changes.setattr(shared_memory, "map_segment", how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step, length in enumerate(lengths):
            one(made, step, length)
            flush(made)
    made.close()
    received = captures["x"] if captures else []  # rank 1 receives nothing
    good = all(right(t, step) for step, t in enumerate(received))
    return good, [str(w.message) for w in said if w.category is FlexWarning]


def find_no_file(path: Path) -> Any:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def map_late(path: Path) -> Any:
    time.sleep(0.3)
    return segments.map_segment(path)


def test_a_rank_that_is_a_step_behind_finds_the_files() -> None:
    assert run(2, mapped, map_late, [64, 1 << 18, 1 << 20, 64]) == [(True, []), (True, [])]


def test_a_file_that_is_gone_is_one_warning_once_it_is_missed() -> None:
    assert run(2, mapped, find_no_file, [64]) == [(True, []), (True, [])], "no other step needs the file"
    (good, none), (_, said) = run(2, mapped, find_no_file, [64] * 3)
    assert good
    assert not none
    (message,) = said
    assert_names(message, 1, os.strerror(errno.ENOENT))


def switched_off() -> Any:
    return lacking("/dev/shm", 0)


def test_none_asked_for_is_no_warning() -> None:
    assert run(2, switched_off) == [(True, 3, []), (True, 0, [])]


# -- steps that fail, sessions, ends -----------------------------------------------------------------------


def failing() -> Any:
    mesh = mesh_of(2, 1)
    made, captures = recorder(mesh)
    out = []
    for step in range(6):
        with saying() as seen:
            one(made, step, 64)
            if step in (1, 2):
                if dist.get_rank():  # which had come further
                    one(made, step, 64, "y")
                made.drop()
            else:
                one(made, step, 128, "y")
                flush(made)
        out.append(seen)
    made.close()
    good = [
        right(t, k.step)
        for name in captures
        for k, t in zip(captures[name].keys, captures[name], strict=True)
    ]
    return out, good


def test_a_failed_step_and_then_a_good_one() -> None:
    leader, other = run(2, failing)
    assert [seen["recv"] for seen in leader[0]] == [0, 0, 0, 1, 0, 0]
    assert [seen["send"] for seen in other[0]] == [0, 0, 0, 1, 0, 0]
    assert leader[1] == [True] * 8
    assert other[1] == []


def sessions() -> Any:
    mesh = mesh_of(2, 1)
    (a, in_a), (b, in_b) = recorder(mesh), recorder(mesh)
    for step in range(4):
        one(a, step, 64)
        one(b, step + 50, 32)
        flush(b)
        one(a, step, 32, "y")
        flush(a)
    a.close()
    one(b, 60, 64)
    flush(b)
    b.close()
    dist.destroy_process_group()
    gc.collect()
    return [
        (k.site, k.step, right(t, k.step))
        for c in (in_a, in_b)
        for n in c
        for k, t in zip(c[n].keys, c[n], strict=True)
    ]


def test_two_sessions_and_tensors_that_outlive_them() -> None:
    leader, other = run(2, sessions)
    assert [x[:2] for x in leader] == [
        *(("x", s) for s in range(4)),
        *(("y", s) for s in range(4)),
        *(("x", s) for s in (50, 51, 52, 53, 60)),
    ]
    assert all(good for _, _, good in leader)
    assert other == []


def differing() -> Any:
    made, _ = recorder(mesh_of(2, 1))
    one(made, 0, 64, f"site{dist.get_rank()}")
    said = []
    for _ in range(2):
        try:
            flush(made)
        except FlexError as error:
            said.append(str(error))
    made.close()
    return said


def test_ranks_that_recorded_different_things_raise() -> None:
    leader, other = run(2, differing)
    assert len(leader) == len(other) == 1, "the next step has the same on all ranks"
    for message in (*leader, *other):
        assert_names(message, "rank 1", "rank 0", 1)


def killed(victim: int, folder: str) -> Any:
    """Kill a rank in the middle of a step; what the other says, and what of ours is mapped or named."""
    flex_config.shared_folder = folder
    made, _ = recorder(mesh_of(2, 1), Agreement("killed", 60).check_ended)
    one(made, 0, 1 << 16)
    flush(made)
    one(made, 1, 1 << 16)
    rank = dist.get_rank()
    if rank == victim:
        Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
        signal.pause()
    mark = Path(folder, f"pid-{victim}")
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    mark.unlink()
    with pytest.raises(HookError) as raised:
        flush(made)
    Path(folder, "said").write_text(str(raised.value))
    return None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_nothing_and_nobody_hangs(victim: int, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        run(2, killed, victim, str(tmp_path), timeout=60)
    assert_names(raised.value, f"rank {victim}", -9)
    assert_names((tmp_path / "said").read_text(), f"rank {victim}")
    (tmp_path / "said").unlink()
    assert list(tmp_path.iterdir()) == []


def long_run() -> Any:
    made, captures = recorder(mesh_of(2, 1))
    out = []
    for step in range(240):
        one(made, step, 1 << 16)
        one(made, step, 1 << 12, "y")
        flush(made)
        assert all(right(r[0], step) for r in captures.values())
        captures.clear()
        if step in (39, 239):
            gc.collect()
            tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
            files = len(os.listdir("/proc/self/fd"))
            out.append((tensors, files, len(Path("/proc/self/maps").read_text().splitlines())))
    made.close()
    return out


def test_nothing_grows_over_two_hundred_steps() -> None:
    for early, late in run(2, long_run):
        assert late[0] - early[0] <= 2, "a worker of gloo may hold the flags"
        assert early[1] == late[1]
        assert late[2] - early[2] <= 4, "of the mappings, none is for a step"
