"""The covering design covers what it says, and is less than the product."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("megatron.core")

from tests.distributed import test_latent, test_matrix, test_models, test_moe
from tests.support import design, oracle
from tests.support.gpt import Case

GPT = test_matrix.GPT
LISTS = {
    "GPT": GPT,
    "GPT with experts": test_moe.EXPERTS,
    "prediction of several tokens": [*GPT, *test_models.PREDICTING],
    "hybrid": [*GPT, *test_models.MAMBA, *test_models.HYBRID],
    "BERT": [*GPT, *test_models.ENCODERS],
    "latent attention": [*GPT, test_latent.EVERYWHERE, *test_latent.MENDED],
}
OF_GPT = ("tp", "sp", "pp", "vpp", "cp", "dp", "recompute")
# Sequence parallelism is of tensor parallel ranks, virtual stages are of a pipeline.
NEEDS = {"sp": {"tp"}, "vpp": {"pp"}}


def edited(cases: list[Case]) -> set[tuple[str, str]]:
    """Kinds of sites that are edited, with each axis that a configuration of the edit has."""
    return {(design.kind(s), a) for c in cases for s in design.edits(c, cases) for a in design.axes(c)}


@pytest.fixture(autouse=True)
def no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(design.PRODUCT, raising=False)


@pytest.mark.parametrize("name", LISTS)
def test_every_kind_is_edited_along_every_axis_that_its_configurations_have(name: str) -> None:
    cases = LISTS[name]
    every = {(design.kind(s), a) for c in cases for s in oracle.edits_of(c) for a in design.axes(c)}
    assert edited(cases) == every


@pytest.mark.parametrize("name", LISTS)
def test_the_design_is_a_part_of_the_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = LISTS[name]
    part = {c.name: design.edits(c, cases) for c in cases}
    monkeypatch.setenv(design.PRODUCT, "1")
    for case in cases:
        full = design.edits(case, cases)
        assert full == oracle.edits_of(case)
        assert set(part[case.name]) <= set(full)
        assert part[case.name], "every configuration is edited somewhere"
    assert sum(map(len, part.values())) < 0.6 * sum(len(oracle.edits_of(c)) for c in cases)


def test_every_axis_and_pair_of_axes_is_read() -> None:
    cases = [
        *GPT,
        *test_matrix.UNEVEN,
        *test_matrix.EIGHT,
        *test_moe.EXPERTS,
        *test_moe.FOUR,
        *test_moe.EIGHT,
    ]
    axes = {a for c in cases for a in design.axes(c)}
    assert axes >= {*OF_GPT, "ep", "etp"}
    pairs = {p for c in cases for p in design.pairs(c)}
    wanted = set(combinations(sorted([*OF_GPT, "ep"]), 2))
    assert wanted - pairs == set(), "pairs of axes that no configuration has"
    for case in cases:
        for axis in design.axes(case):
            assert NEEDS.get(axis, set()) <= design.axes(case)


@pytest.mark.parametrize("case", [*GPT[:3], *test_moe.EXPERTS[-2:]], ids=lambda c: c.name)
def test_each_site_is_edited_in_one_run_with_others_of_other_modules(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = oracle.edits_of(case)
    runs = [oracle.apart(r) for r in design.together(sites)]
    assert sorted(s for r in runs for s in r) == sorted(sites)
    assert len(runs) <= 1 + len(sites) // design.AT_ONCE
    for run in runs:
        assert len({s.partition(":")[0] for s in run}) == len(run) <= design.AT_ONCE
    monkeypatch.setenv(design.PRODUCT, "1")
    assert design.together(sites) == sites


def test_a_part_covers_what_the_whole_does_and_takes_a_share_of_the_rest() -> None:
    offers = [list(range(60)), list(range(40, 100)), list(range(100))]

    def elements(number: int, item: int) -> set[int]:
        return {item, 1000 + item % 7}

    parts = [design.part(offers, n, elements) for n in range(3)]
    assert parts[0] == offers[0]
    assert {i for p in parts for i in p} == set(range(100))
    assert set(parts[1]) >= set(range(60, 100))
    assert len(parts[2]) == len([i for i in range(100) if (i + 2) % design.SHARE == 0])


def test_a_configuration_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in list"):
        design.edits(Case("other", tp=2), GPT)


def test_kinds_have_no_numbers() -> None:
    assert design.kind("decoder.layers.12.mlp.experts.local_experts.3.linear_fc1:output") == (
        "decoder.layers.N.mlp.experts.local_experts.N.linear_fc1:output"
    )
