"""Transports of captures: which are chosen, what the recorder calls, and the bytes that they estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.collectives import TRANSPORTS, Transport, TransportBytes, open_transports
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.collectives.transport.shared_memory import SharedMemoryTransport
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.captures import Captures, Key
from megatron_flex.runtime.recorder import Recorder
from tests.support.messages import raises

FULL = Layout((Dim("s"), Dim("h")))


def key(site: str) -> Key:
    return Key(site, 0, 0, 0, 0)


@pytest.mark.parametrize("setup", [False, True])
def test_one_rank_needs_no_shared_memory(setup: bool) -> None:
    (found,) = open_transports(Mesh(), None, setup, "session")
    assert isinstance(found, ProcessGroupTransport)


def test_shared_memory_is_tried_first() -> None:
    assert (SharedMemoryTransport, ProcessGroupTransport) == TRANSPORTS


@pytest.mark.parametrize(
    ("ranks", "shared", "group"),
    [
        ((1,), TransportBytes(100, 0, 0), TransportBytes(0, 0, 0)),
        ((4,), TransportBytes(100, 0, 0), TransportBytes(0, 0, 0)),
        ((4, 2, 3), TransportBytes(100, 100, 500), TransportBytes(0, 300, 500)),
    ],
)
def test_bytes_of_a_capture(ranks: Sequence[int], shared: TransportBytes, group: TransportBytes) -> None:
    assert [t.estimate(100, ranks) for t in TRANSPORTS] == [shared, group]


def test_process_group_delivers_copies_in_order() -> None:
    transport: Transport = ProcessGroupTransport(Mesh())
    assert not transport.active
    local = torch.ones(2, 3)
    assert transport.submit("a", local, FULL)
    local.fill_(2)
    assert transport.submit("b", local, FULL)
    local.fill_(3)
    assert transport.active
    assert transport.start() == [], "little waits"
    (first, a), (second, b) = transport.finish()
    assert (first, second) == ("a", "b")
    assert torch.equal(a, torch.ones(2, 3))
    assert torch.equal(b, torch.full((2, 3), 2.0))
    assert not transport.active
    assert transport.submit("c", local, FULL)
    transport.drop(failed=True)
    assert transport.finish() == []


class Picky:
    """Carries the captures of one site, and notes what it is asked."""

    def __init__(self, site: str) -> None:
        self.site, self.calls, self.kept = site, [], []

    active = property(lambda self: bool(self.kept))

    def submit(self, tag: Any, local: Tensor, layout: Layout, route: Any = None) -> bool:
        self.calls.append(f"submit {tag.site}")
        if tag.site == self.site:
            self.kept.append((tag, local.clone()))
        return bool(tag.site == self.site)

    def start(self) -> list[Any]:
        self.calls.append("start")
        return []

    combines = False

    def collect(self, flags: Sequence[int], at: str) -> tuple[list[int], str]:
        self.calls.append("collect")
        return list(flags), ""

    def finish(self) -> list[Any]:
        self.calls.append("finish")
        out, self.kept = self.kept, []
        return out

    def drop(self, failed: bool) -> None:
        self.calls.append(f"drop {failed}")

    def close(self) -> None:
        self.calls.append("close")


def recorder() -> tuple[Recorder, Captures, Picky]:
    made = Recorder(Mesh(), captures := Captures(), "session")
    picky = Picky("x")
    made._transports = (picky, *made._transports)  # type: ignore[assignment]  # it has no `open`, as it is open
    return made, captures, picky


def test_a_capture_goes_with_the_first_that_accepts_it() -> None:
    made, captures, picky = recorder()
    made.shard(key("x"), torch.ones(2), Layout((Dim("h"),)))
    made.shard(key("y"), torch.ones(3), Layout((Dim("h"),)), finish=lambda t: {".sum": t.sum()})
    made.gather_if_large()
    made.flush()
    assert picky.calls == ["submit x", "submit y", "start", "finish"]
    assert sorted(captures) == ["x", "y.sum"]
    assert captures["y.sum"][0].item() == 3
    made.flush()
    assert picky.calls[-1] == "finish"


def test_what_is_left_is_dropped_and_closed() -> None:
    made, captures, picky = recorder()
    made.forget()
    assert picky.calls == [], "nothing is left"
    made.shard(key("y"), torch.ones(3), Layout((Dim("h"),)))
    made.forget()
    made.close()
    assert picky.calls == ["submit y", "drop False", "drop True", "close"]
    made.flush()
    assert not captures


def test_zeros_stand_for_a_shard_that_does_not_fit() -> None:
    axis = Axis("tp", 1, 0, None, (0,))
    made = Recorder(Mesh((axis,)), captures := Captures(), "session")
    cut = Layout((Dim("h", (Cut("tp"),)),))
    made.shard(key("x"), torch.ones(4), cut)
    with raises(LayoutError, (4, 4)):
        made.shard(Key("x", 0, 0, 0, 1), torch.ones(4, 4), cut)
    made.flush()
    assert [t.tolist() for t in captures["x"]] == [[1.0] * 4, [0.0] * 4]
