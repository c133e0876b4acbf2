"""Experts' rows of a dump go home to their tokens, however ranks are divided and whatever routers decide."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_flex.dump.expert_routing import (
    ExpertRouting,
    choice_from_json,
    choice_to_json,
    pack_choice,
    scatter_rows_to_tokens,
    unpack_choice,
)
from megatron_flex.dump.schema import layout_from_json, layout_to_json
from megatron_flex.errors import DumpError
from megatron_flex.layout import Cut, Dim, ExpertChoice, Layout, assemble, coordinates, extract
from tests.support.messages import raises

FEATURES = 8
LAYOUTS = {
    "the same": Layout((Dim("t"), Dim("h")), shared=("etp",)),
    "cut": Layout((Dim("t"), Dim("f", (Cut("etp"),)))),
    "halves cut": Layout((Dim("t"), Dim("f", (Cut("etp"),), (1, 1)))),
    "summands": Layout((Dim("t"), Dim("h")), partial=("etp",)),
}


class Ranks:
    """A stage of dp x cp x tp ranks and their tokens, each with a number; experts over edp x ep x etp."""

    def __init__(
        self, dense: tuple[int, int, int], experts: tuple[int, int, int], sp: bool, each: int, outer: bool
    ) -> None:
        (dp, cp, tp), (edp, ep, etp) = dense, experts
        self.sizes = {"dp": dp, "cp": cp, "tp": tp, "edp": edp, "ep": ep, "etp": etp, "pp": 1}
        cuts = (Cut("cp", "zigzag"), *((Cut("tp"),) if sp else ()))
        self.stream = Layout((Dim("s", cuts), Dim("b"), Dim("h")))
        self.length, self.batch, self.count = 2 * cp * tp * 2, 2, each * ep
        self.coords = [
            {"dp": r // (cp * tp), "cp": r // tp % cp, "tp": r % tp}
            | {"edp": r // (ep * etp), "ep": r // etp % ep, "etp": r % etp}
            for r in range(dp * cp * tp)
        ]
        self.outer = outer

    def route(self, slots: int, seed: int) -> list[Tensor]:
        """For each replica `[s, b, experts]`: which experts each token goes to, at most `slots`."""
        generator = torch.Generator().manual_seed(seed)
        out = []
        for _ in range(self.sizes["dp"]):
            scores = torch.rand(self.length, self.batch, self.count, generator=generator)
            top = scores.topk(min(slots, self.count), -1).indices
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top, True)
            out.append(chosen & (torch.rand(scores.shape, generator=generator) < 0.8))  # some are dropped
        return out

    def choices(self, chosen: list[Tensor], slots: int) -> list[tuple[dict[str, int], ExpertChoice]]:
        out = []
        for coords in self.coords:
            own = extract(self.stream, chosen[coords["dp"]], coords, self.sizes)
            shape = int(own.shape[0]), int(own.shape[1])
            out.append((coords, ExpertChoice(own.flatten(0, 1), shape, slots, self.stream, self.outer)))
        return out

    def rows(self, chosen: list[Tensor], layout: Layout, expert: int | None) -> dict[Any, Tensor]:
        """What each rank's experts have, put together token by token."""
        value = [self.value(d) for d in range(self.sizes["dp"])]
        tokens = [
            (
                coords,
                extract(self.stream, chosen[d], coords, self.sizes),
                extract(self.stream, value[d], coords, self.sizes),
            )
            for coords in self.coords
            for d in (coords["dp"],)
        ]
        out = {}
        for coords in self.coords:
            group = [t for t in tokens if t[0]["edp"] == coords["edp"]]
            group.sort(key=lambda t: (t[0]["etp"], t[0]["ep"]) if self.outer else (t[0]["ep"], t[0]["etp"]))
            each = self.count // self.sizes["ep"]
            mine = range(coords["ep"] * each, (coords["ep"] + 1) * each)
            found = [
                values[s, b, e]
                for e in mine
                if expert in (None, e)
                for _, went, values in group
                for s, b in went[..., e].nonzero().tolist()
            ]
            local = torch.stack(found) if found else torch.zeros(0, FEATURES)
            if expert is None or expert in mine:
                out[coords["edp"], coords["ep"], coords["etp"]] = extract(layout, local, coords, self.sizes)
        return out

    def value(self, replica: int) -> Tensor:
        """`[s, b, experts, features]`: what a token's row is at an expert."""
        shape = self.length, self.batch, self.count, FEATURES
        return (
            torch.arange(1.0, 1 + self.length * self.batch * self.count * FEATURES).view(shape)
            + 1e5 * replica
        )


MESHES = [  # (dp, cp, tp), (edp, ep, etp)
    ((1, 1, 1), (1, 1, 1)),
    ((2, 1, 1), (1, 2, 1)),
    ((2, 1, 2), (1, 2, 2)),
    ((1, 2, 2), (1, 4, 1)),
    ((2, 2, 2), (2, 2, 2)),
    ((2, 1, 2), (4, 1, 1)),
    ((1, 1, 4), (1, 1, 4)),
]


def assemble_by_token(
    routing: ExpertRouting,
    rows: dict[tuple[int, int, int], Tensor],
    layout: Layout,
    replica: int,
    expert: int | None,
) -> Tensor:
    """A tensor of experts by token, `[s, b, slots, ...]`, from the rows that each rank has."""

    def fetch(edp: int, ep: int, selected: Tensor) -> Tensor:
        shards = []
        for at in coordinates(layout, routing.sizes):
            etp = range(routing.sizes["etp"]) if "etp" not in at else (at["etp"],)
            shards.append(next(rows[edp, ep, t] for t in etp if (edp, ep, t) in rows)[selected])
        return assemble(layout, shards, routing.sizes)

    locations, slots = routing.rows(replica, expert), 1 if expert is not None else routing.slots
    dense = scatter_rows_to_tokens(locations, fetch, routing.shape, slots, next(iter(rows))[:2])
    return dense if expert is None else dense[:, :, 0].flatten(0, 1)[locations.token.sort().values]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MESHES),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.booleans(),
    st.booleans(),
)
def test_rows_go_home(
    mesh: Any, kind: str, outer: bool, each: int, slots: int, seed: int, one: bool, sp: bool
) -> None:
    ranks, layout = Ranks(*mesh, sp=sp, each=each, outer=outer), LAYOUTS[kind]
    chosen = ranks.route(slots, seed)
    expert = seed % ranks.count if one else None
    routing = ExpertRouting(ranks.choices(chosen, slots), ranks.sizes)
    rows = ranks.rows(chosen, layout, expert)
    if kind == "the same":  # one of those along etp wrote them
        rows = {p: r for p, r in rows.items() if p[2] == (p[0] + p[1]) % ranks.sizes["etp"]}
    for replica, went in enumerate(chosen):
        value = ranks.value(replica)
        got = assemble_by_token(routing, rows, layout, replica, expert)
        if expert is not None:
            assert torch.equal(got, value[:, :, expert][went[:, :, expert]])
            continue
        want = torch.zeros(ranks.length, ranks.batch, slots, FEATURES)
        for s, b in went.any(-1).nonzero().tolist():
            to = went[s, b].nonzero()[:, 0]
            want[s, b, : len(to)] = value[s, b, to]
        assert torch.equal(got, want)


def test_some_tokens_only() -> None:
    ranks = Ranks((2, 1, 2), (1, 2, 2), True, 2, True)
    chosen = ranks.route(2, 5)
    rows = ExpertRouting(ranks.choices(chosen, 2), ranks.sizes).rows(1)
    mask = torch.arange(ranks.length * ranks.batch) % 3 == 0
    assert set(rows.among(mask).token.tolist()) <= set(mask.nonzero()[:, 0].tolist())
    assert len(rows.among(mask).row) == int(chosen[1].flatten(0, 1)[mask].sum())


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 99))
def test_bits(experts: int, tokens: int, seed: int) -> None:
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)) < 0.4
    assert pack_choice(chosen).shape == (tokens, -(-experts // 8))
    assert torch.equal(unpack_choice(pack_choice(chosen), experts), chosen)


def test_decisions_as_json() -> None:
    ranks = Ranks((1, 2, 2), (1, 4, 1), True, 3, False)
    _, choice = ranks.choices(ranks.route(2, 1), 2)[1]
    again = choice_from_json(choice_to_json(choice), pack_choice(choice.chosen))
    assert torch.equal(again.chosen, choice.chosen)
    assert again.stream == layout_from_json(layout_to_json(Layout(choice.stream.dims[:2])))
    same = (again.shape, again.slots, again.etp_outer)
    assert same == (choice.shape, choice.slots, choice.etp_outer)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {},
        {"experts": 3},
        {"experts": "x"},
        5,
        {"shape": [4]},
        {"shape": 4},
        {"stream": {}},
        {"experts": 99},
    ],
)
def test_what_is_no_decision(told: Any) -> None:
    ranks = Ranks((1, 1, 1), (1, 1, 1), False, 4, False)
    _, choice = ranks.choices(ranks.route(2, 1), 2)[0]
    good = choice_to_json(choice)
    broken = {**good, **told} if isinstance(told, dict) and told else told
    with raises(DumpError):
        choice_from_json(
            broken,
            pack_choice(choice.chosen)[:, :0]
            if broken == {**good, "experts": 3}
            else pack_choice(choice.chosen),
        )


def test_what_is_missing_is_named() -> None:
    ranks = Ranks((2, 1, 1), (1, 2, 1), True, 2, True)
    chosen = ranks.route(2, 3)
    choices = ranks.choices(chosen, 2)
    with raises(DumpError, "(edp, ep, etp)=(0, 1, 0)"):
        ExpertRouting(choices[:1], ranks.sizes).rows(0)
    other = replace(choices[1][1], chosen=choices[1][1].chosen[:, :2])
    with raises(DumpError, "[2, 4]"):
        ExpertRouting([choices[0], (choices[1][0], other)], ranks.sizes)


CUT_BY_DATA = {"dims": [{"name": "s", "cuts": [{"axis": "dp"}]}, {"name": "b"}]}
NUMBERS = st.one_of(st.integers(-3, 12), st.just(10**12), st.floats())
NASTY = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=3), st.lists(NUMBERS), st.just(CUT_BY_DATA)
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["experts", "shape", "slots", "stream", "etp_outer"]), NASTY)
def test_nasty_decisions_are_refused_or_harmless(key: str, value: Any) -> None:
    """Whatever an entry says beside its bits: one kind of error, and no memory beyond the dump's own size."""
    ranks = Ranks((2, 1, 1), (1, 2, 1), True, 2, True)
    chosen = ranks.route(2, 3)
    told = [(coords, choice_to_json(c), pack_choice(c.chosen)) for coords, c in ranks.choices(chosen, 2)]
    told[1][1][key] = value
    with contextlib.suppress(DumpError):
        routing = ExpertRouting(
            [(coords, choice_from_json(one, bits)) for coords, one, bits in told], ranks.sizes
        )
        assert len(routing.rows(0).row) == int(chosen[0].sum())
    with raises(DumpError, 4 if key == "slots" else -1):
        ExpertRouting(ranks.choices(chosen, 2), ranks.sizes).rows(0, 4 if key == "slots" else -1)
