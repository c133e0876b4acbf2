"""Objects that ranks exchange: equal ones are not sent, and every rank has the same answer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_flex.collectives import (
    broadcast_object,
    gather_distinct,
    gather_numbers_to_first,
    gather_reports,
    rank_agreement,
)
from megatron_flex.collectives.store_round import BUCKET, COMPLETE, DIFFERENT, StoreRound
from megatron_flex.errors import MAX_NAMED_RANKS
from megatron_flex.mesh import Axis, Mesh
from tests.support.messages import assert_names
from tests.support.pool import run


def make_mesh() -> Mesh:
    """Two pipeline stages of two data parallel ranks, which hold an expert each."""
    rank = dist.get_rank()
    pp, dp = divmod(rank, 2)
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
    along_pp, along_dp = (dp, dp + 2), (2 * pp, 2 * pp + 1)
    data = Axis("dp", 2, dp, groups[along_dp], along_dp)
    experts = Axis("ep", 2, dp, groups[along_dp], along_dp)
    return Mesh((Axis("pp", 2, pp, groups[along_pp], along_pp), data), (experts,))


def exchanges() -> dict[str, Any]:
    rank, mesh = dist.get_rank(), make_mesh()
    stage = mesh["pp"].coord
    return {
        "equal": gather_distinct({"a": 1}, mesh),
        "of stages": gather_distinct((stage, "x" * 5000), mesh),
        "of ranks": gather_distinct(rank, mesh),
        "of one rank": gather_distinct("odd" if rank == 3 else "even", mesh),
        "along one axis": gather_distinct(rank % 2, mesh, ["pp"]),
        "no reports": gather_reports(None, mesh),
        "reports": gather_reports(f"of {rank}" if rank in (1, 2) else None, mesh),
        "broadcast": broadcast_object(None if rank else {"from": rank}, mesh),
        "none": broadcast_object(None, mesh),
        "numbers": gather_numbers_to_first((rank, 10 * rank), mesh),
    }


def test_exchanges_give_every_rank_the_same() -> None:
    answers = run(4, exchanges)
    for rank, answer in enumerate(answers):
        assert answer.pop("along one axis") == [rank % 2]
        numbers = answer.pop("numbers")
        assert numbers == ([[r, 10 * r] for r in range(4)] if rank == 0 else [])
        assert answer == {
            "equal": [{"a": 1}],
            "of stages": [(0, "x" * 5000), (1, "x" * 5000)],
            "of ranks": [0, 1, 2, 3],
            "of one rank": ["even", "odd"],
            "no reports": [],
            "reports": [(1, "of 1"), (2, "of 2")],
            "broadcast": {"from": 0},
            "none": None,
        }


def test_a_round_of_many_members_says_who_differs_and_leaves_no_key() -> None:
    members = 3 * BUCKET + 5
    for odd in ((), (7,), tuple(range(40, 40 + MAX_NAMED_RANKS + 3))):
        store = dist.HashStore()
        rounds = [StoreRound(store, "round", members, member) for member in range(members)]
        late = rounds.pop(50)
        for number, one in enumerate(rounds):
            one.arrive("b" if number in odd else "a", "", f"details of {number}")
        assert rounds[0].find_missing() == [50]
        assert not rounds[0].has_arrived(50)
        assert rounds[0].has_arrived(49)
        assert rounds[0].outcome() == ""
        for one in rounds:
            one.announce_wait("place3", 12)
        rounds[9].announce_wait("place3", 11)
        assert late.find_waiting("place3") == 11
        late.arrive("a", "", "details of the late one")
        outcomes = {one.outcome() for one in (*rounds, late)}
        assert outcomes == {DIFFERENT if odd else COMPLETE}
        if odd:
            known = late.statements(DIFFERENT)
            assert (known.first, known.text) == (0, "details of 0")
            assert len(known.others) == min(len(odd), MAX_NAMED_RANKS)
            assert known.unnamed == len(odd) - len(known.others)
        for one in (*rounds, late):
            assert store.list_keys() != []
            one.leave()
        assert store.list_keys() == []


def differing() -> str:
    agreement = rank_agreement.Agreement("differing", 30.0)
    try:
        agreement.compare("forward on a" if dist.get_rank() == 0 else "forward on b")
    except rank_agreement.HookError as error:
        return str(error)
    return ""


def test_every_rank_names_the_ranks_that_differ() -> None:
    texts = run(3, differing)
    assert len(set(texts)) == 1
    assert_names(texts[0], "forward on a", "forward on b", "rank 0", "ranks 1, 2")
