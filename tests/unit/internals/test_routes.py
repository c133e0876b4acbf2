"""The rows of experts on their way to their tokens and back, on ranks without a framework."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import Dispatch, Route, choose_exchange, enter, exit
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.config import flex_config
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from tests.support.pool import run

TOKENS, EXPERTS, SLOTS = 8, 4, 2
ROWS = Layout((Dim("t"), Dim("h")))


def chosen() -> Tensor:
    """`[tokens, experts]` of the whole: one or two experts for each token."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(6))
    best = scores.topk(SLOTS, 1).indices
    out = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, best, True)
    out[3] = torch.arange(EXPERTS) == 2
    return out


def value(token: int, expert: int) -> list[float]:
    return [10.0 * token + expert, 1.0 + token * expert]


def whole(expert: int | None) -> Tensor:
    """What the entrance is to give: by token, and for each by expert; of one expert by token."""
    picked = chosen()
    if expert is not None:
        return torch.tensor([value(t, expert) for t in range(TOKENS) if picked[t, expert]])
    out = torch.zeros(TOKENS, 1, SLOTS, 2)
    for t in range(TOKENS):
        for slot, e in enumerate(picked[t].nonzero()[:, 0].tolist()):
            out[t, 0, slot] = torch.tensor(value(t, e))
    return out


def route_over_two(kind: str, expert: int | None) -> tuple[Route, Tensor, float]:
    """Experts over two ranks of `ep`, or partial sums over two of `etp`; all rows, this rank's share."""
    rank = dist.get_rank()

    def axis(name: str) -> Axis:
        return Axis(name, 2, rank, dist.group.WORLD, (0, 1))

    cut = Cut("cp", "zigzag") if kind == "ep" else Cut("tp")
    mesh = Mesh((axis(cut.axis),), (axis(kind),))
    theirs = [[0, 1, 6, 7], [2, 3, 4, 5]] if kind == "ep" else [[0, 1, 2, 3], [4, 5, 6, 7]]
    stream = Layout((Dim("s", (cut,)), Dim("b")))
    home = Layout((*stream.dims, Dim("k"), Dim("h")))
    if expert is not None:
        home = Layout((Dim("t", (Cut(cut.axis),), uneven=True), Dim("h")))
    picked = chosen()
    dispatch = Dispatch(picked[theirs[rank]], (TOKENS // 2, 1), SLOTS, stream, True, mesh)
    layout = ROWS if kind == "ep" else Layout(ROWS.dims, partial=("etp",))
    mine = range(EXPERTS)[2 * rank : 2 * rank + 2] if kind == "ep" else range(EXPERTS)
    order = [(t, e) for e in mine for ours in theirs for t in ours if picked[t, e] and expert in (None, e)]
    rows = torch.tensor([value(t, e) for t, e in order]).reshape(-1, 2)
    return Route(dispatch, layout, home, expert), rows, 1.0 if kind == "ep" else (0.25, 0.75)[rank]


def over_two(kind: str, expert: int | None) -> dict[str, Tensor]:
    """What is found, and wanted."""
    route, rows, share = route_over_two(kind, expert)
    local = (share * rows).requires_grad_()
    exchange = choose_exchange(route.token_layout, route.mesh, local, route)
    got = enter(local, exchange)
    passed = exit(got * 3, got, local, exchange)
    weight = torch.arange(got.numel()).view(got.shape).float()
    (got * weight).sum().backward()
    want = whole(expert)
    at = weight.flatten(end_dim=-2)[[_place(want, row) for row in rows]]
    first = kind == "ep" or dist.get_rank() == 0  # of partial sums the first gets the value
    return {
        "value": (got.detach(), want),
        "edited": (passed.detach(), 3 * rows * first),
        "gradient": (local.grad, at),
    }


def _place(of: Tensor, row: Tensor) -> int:
    return int((of.flatten(end_dim=-2) == row).all(1).nonzero()[0])


def check(kind: str, expert: int | None) -> None:
    for found in run(2, over_two, kind, expert):
        for what, (got, want) in found.items():
            torch.testing.assert_close(got, want, msg=lambda text, what=what: f"{what}: {text}")


def test_experts_over_ranks() -> None:
    check("ep", None)


def test_one_expert_over_ranks() -> None:
    """Of the first rank and of the second; the order of their rows is not its own inverse."""
    check("ep", 0)
    check("ep", 2)


def test_summands_of_experts() -> None:
    check("etp", None)


def test_summands_of_one_expert() -> None:
    check("etp", 2)


CAPTURES, WINDOW = 10, 2  # captures in all, and as many as may wait


def in_windows(expert: int | None) -> tuple[list[int], list[bool]]:
    """Capture rows of experts, in messages of a window each: how many wait after each, and what arrives."""
    route, rows, share = route_over_two("ep", expert)
    tokens = TOKENS * SLOTS if expert is None else TOKENS * SLOTS // EXPERTS  # of one expert its share
    flex_config.pending_bytes = WINDOW * tokens * 2 * rows.element_size()
    transport, waiting, arrived = ProcessGroupTransport(route.mesh), list[int](), list[Any]()
    for number in range(CAPTURES):
        assert transport.submit(number, share * rows + number, route.token_layout, route)
        arrived += transport.start()
        waiting.append(len(transport._pending))
    arrived += transport.finish()
    want = whole(expert)
    real = want != 0
    return waiting, [torch.equal(full, want + number * real) for number, full in arrived]


@pytest.mark.parametrize("expert", [None, 2], ids=["all experts", "one expert"])
def test_rows_are_sent_in_windows(expert: int | None) -> None:
    (leader, arrived), (other, nothing) = run(2, in_windows, expert)
    assert leader == other == [*range(1, WINDOW + 1), *[0, 1, 2] * 2, 0, 1], "all ranks decide alike"
    assert arrived == [True] * CAPTURES
    assert nothing == []
