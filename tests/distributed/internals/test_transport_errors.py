"""An error of a transport on one rank: all ranks raise it, or captures go with collectives; no rank waits."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from megatron_flex.collectives.transport.segments import Segment
from tests.support import gpt, messages, ranks
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

FC1 = "decoder.layers.*.mlp.linear_fc1"
MANY = 1100  # descriptors that are open
Fault = Callable[[Any], AbstractContextManager[None]]  # of the open session


@contextmanager
def failing(module: Any, name: str, number: int) -> Iterator[None]:
    """Every call of the function raises an OSError."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    plain = getattr(module, name)
    setattr(module, name, fail)
    try:
        yield
    finally:
        setattr(module, name, plain)


def at(module: Any, name: str, number: int) -> Fault:
    return lambda _: failing(module, name, number)


FAULTS: dict[str, Fault] = {
    "open": at(os, "open", errno.EMFILE),
    "folder is full": at(os, "posix_fallocate", errno.ENOSPC),
    "mmap": at(mmap, "mmap", errno.ENOMEM),
    "write": at(Segment, "entries", errno.EIO),
}


def outcomes(case: Case, victim: int) -> dict[str, list[Any]]:
    """For each fault on one rank what comes of three steps: what the leader captured, or the error.

    The fault is there while the session is attached and in its first step, or in its second step, which
    captures more, so that it needs another slot.
    """
    import megatron_flex as mf
    from megatron_flex.collectives.transport import segments

    changes.setattr(segments, "FIRST_BYTES", 1 << 12)
    changes.setattr(segments, "ROUNDING", 1 << 12)
    chunks = ranks.start(case)
    rank = torch.distributed.get_rank()

    def session(fault: Fault, setup: bool) -> list[Any]:
        out: list[Any] = []
        with fault(None) if setup and rank == victim else nullcontext():
            more = (mf.HookFunction(s, groups=["more"]) for s in ("decoder.layers.*", "decoder.layers.*.mlp"))
            flex = mf.attach(chunks, [mf.HookFunction(FC1, groups=["one"]), *more])
            flex.select("none", "+one")
            out.append(step(flex))
        for number in (1, 2):
            if number == 1:
                flex.select("all")
            with fault(flex) if not setup and number == 1 and rank == victim else nullcontext():
                out.append(step(flex))
        (shared, _) = flex.session._recorder._transports
        assert shared._capacity > 0, "the last step uses shared memory again"
        flex.restore()
        return out

    def step(flex: Any) -> Any:
        flex.output_dict.clear()
        try:
            gpt.step(case, chunks, 0)
        except mf.HookError as error:
            return str(error)
        return {name: [t.clone() for t in tensors] for name, tensors in flex.output_dict.items()}

    out = {"none": session(lambda _: nullcontext(), setup=True)}
    for name, fault in FAULTS.items():
        out[f"{name}, setup"] = session(fault, setup=True)
        out[f"{name}, step"] = session(fault, setup=False)
    return out


def same(got: Any, wanted: Any) -> bool:
    return got.keys() == wanted.keys() and all(
        len(got[n]) == len(wanted[n]) and all(map(torch.equal, got[n], wanted[n])) for n in wanted
    )


@pytest.mark.parametrize(
    ("case", "victim"),
    [
        (Case("tp2", tp=2, layers=2), 0),
        (Case("tp2", tp=2, layers=2), 1),
        (Case("tp2 pp2", tp=2, pp=2, layers=2), 3),
    ],
    ids=["first", "other", "stage 1"],
)
def test_an_error_of_one_rank_is_one_of_all(case: Case, victim: int) -> None:
    answers = run(case.tp * case.pp, outcomes, case, victim, timeout=170)
    failed = 0
    for fault in answers[0]:
        for number, found in enumerate(zip(*(a[fault] for a in answers), strict=True)):
            texts = {f for f in found if isinstance(f, str)}
            if texts:
                assert number == (0 if fault.endswith("setup") else 1), (fault, number, texts)
                assert all(isinstance(f, str) for f in found), (fault, number, found)
                (text,) = texts
                messages.assert_names(text, f"rank {victim}", "FLEX_SHARED_BYTES=0", "ulimit -n")
                failed += 1
            else:
                wanted = [a["none"][number] for a in answers]
                assert all(map(same, found, wanted)), (fault, number)
    assert failed == 1, "the mistakes are made where they hurt"
    assert answers[0]["none"][0], "the leader has captures"


def many(case: Case) -> Any:
    import megatron_flex as mf

    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * MANY, most), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    try:
        chunks = ranks.start(case)
        with mf.attach(chunks, [mf.HookFunction(FC1)]) as flex:
            for _ in range(2):
                gpt.step(case, chunks, 0)
            (shared, _) = flex.session._recorder._transports
            return {n: len(t) for n, t in flex.output_dict.items()}, shared._capacity
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def test_many_descriptors() -> None:
    case = Case("tp2", tp=2, layers=1)
    (leader, capacity), (other, same_capacity) = run(2, many, case, timeout=60)
    assert capacity == same_capacity > 0
    assert len(leader) == 1
    assert other == {}
