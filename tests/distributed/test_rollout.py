"""Rollouts of one process beside training runs in other layouts: clean pairs agree, faults are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.rollout import RolloutComparison, compare_rollout
from tests.support import packed, rollouts
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
EXPERTS = Case("tp2 ep2 sp", tp=2, ep=2, etp=1, sp=True, experts=4, qk_norm=True)
DENSE = Case("tp2 sp bf16", tp=2, sp=True, qk_norm=True, extra=HALF)
PACKED = Case("packed cp2 pp2", cp=2, pp=2, packed="flat", padded=True, layers=2)


class Pair:
    """A training run in several processes, and rollouts of the same weights in one.

    Args:
        folder: for its files.
        case: of the training run.
        sites: that it dumps.
    """

    def __init__(self, folder: Path, case: Case, sites: list[str]) -> None:
        self.folder, self.case = folder, case
        (self.state,) = run(1, rollouts.make_state, case.single())
        run(case.world, rollouts.write_dump, case, self.state, str(folder / "dump"), sites)

    def compare(self, fault: str = "", hidden: bool = True, **settings: Any) -> RolloutComparison:
        """Compare a rollout that has a fault."""
        into = self.folder / (fault or "clean").replace(" ", "-")
        if not into.exists():
            run(1, rollouts.write_rollout, self.case.single(), self.state, str(into), fault)
        states = {"hidden": into / "hidden", "layers": rollouts.LAYERS} if hidden else {}
        return compare_rollout(into / "rollout.jsonl", self.folder / "dump", **states, **settings)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("experts"), EXPERTS, rollouts.SITES)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    sites = [site for site in rollouts.SITES if "mlp" not in site]
    return Pair(tmp_path_factory.mktemp("dense"), DENSE, sites)


@pytest.fixture(scope="module")
def ties(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ties"), replace(EXPERTS, extra=HALF), rollouts.SITES)


TOKENS = 4 * rollouts.SEQUENCE  # each but the first of a sequence, and one more, which follows the last


def test_a_clean_pair_in_fp32_agrees(experts: Pair) -> None:
    found = experts.compare()
    assert (found.exit_status, found.compared, found.beyond, found.causes) == (0, TOKENS, 0, ())
    assert found.site is None
    assert 0 < abs(found.greatest.difference) < 1e-5
    assert list(found.layers) == ["embedding:output", *(f"decoder.layers.{n}:output" for n in range(4))]
    assert found.uncompared == {"the table has no log-probability": 4}


def test_a_clean_pair_in_bf16_agrees(dense: Pair) -> None:
    found = dense.compare()
    assert (found.exit_status, found.compared, found.beyond, found.causes) == (0, TOKENS, 0, ()), str(found)
    assert abs(found.greatest.difference) > 1e-3, "the two runs round differently"


def test_near_ties_of_routers_are_left_out_in_bf16(ties: Pair) -> None:
    found = ties.compare()
    assert (found.exit_status, found.beyond, found.causes, found.site) == (0, 0, (), None), str(found)
    assert found.compared + sum(found.uncompared.values()) == TOKENS + 4
    assert 0 < found.compared < TOKENS, "tokens that attend to one with other experts are not compared"
    assert ties.compare("stale weights").site.site == f"decoder.layers.{rollouts.STALE}:output"
    alone = ties.compare(hidden=False)
    assert alone.exit_status == 1, "without hidden states nothing shows which tokens had other experts"


def test_packed_sequences_of_another_layout_agree(tmp_path: Path) -> None:
    (state,) = run(1, rollouts.make_state, PACKED.single())
    sites = ["embedding.word_embeddings:input", "output_layer", "loss"]
    run(PACKED.world, rollouts.write_dump, PACKED, state, str(tmp_path / "dump"), sites, False)
    run(1, rollouts.write_documents, PACKED.single(), state, str(tmp_path / "rollout.jsonl"))
    found = compare_rollout(tmp_path / "rollout.jsonl", tmp_path / "dump")
    documents = PACKED.microbatches * (len(packed.ENDS) - 1)
    compared = PACKED.microbatches * packed.ENDS[-1] - documents
    assert (found.exit_status, found.compared, found.causes) == (0, compared, ()), str(found)


# The cause of each fault, and the first hidden state that differs: layer, and position.
PLANTED: dict[str, tuple[str, tuple[str, int] | None]] = {
    "stale weights": ("weights", (f"decoder.layers.{rollouts.STALE}:output", 0)),
    "rope frequencies": ("rotary embedding", ("decoder.layers.0:output", 1)),
    "rope scaling": ("attention scores", ("decoder.layers.0:output", 1)),
    "no query norm": ("attention scores", ("decoder.layers.0:output", 1)),
    "bf16 router": ("bf16 router", ("decoder.layers.0:output", 0)),
    "expert choice": ("expert choice", (f"decoder.layers.{rollouts.FLIPPED}:output", 51)),
    "temperature": ("temperature", None),
    "shifted tokens": ("positions shifted", ("decoder.layers.0:output", 1)),
    "shifted log-probabilities": ("log-probabilities shifted", None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_each_fault_is_named(fault: str, experts: Pair) -> None:
    cause, site = PLANTED[fault]
    found = experts.compare(fault)
    assert found.exit_status == 1
    assert [c.name for c in found.causes] == [cause], "\n".join(found.summary())
    assert found.first is not None
    place = None if found.site is None else (found.site.site, found.site.position)
    assert place == site, "\n".join(found.summary())


@pytest.mark.parametrize("fault", ["stale weights", "no query norm", "rope scaling", "temperature"])
def test_faults_are_named_in_bf16(fault: str, dense: Pair) -> None:
    cause, site = PLANTED[fault]
    found = dense.compare(fault)
    assert [c.name for c in found.causes] == [cause], "\n".join(found.summary())
    place = None if found.site is None else (found.site.site, found.site.position)
    assert place == site, "\n".join(found.summary())


def test_without_hidden_states_only_what_tokens_show_is_named(experts: Pair) -> None:
    for fault in ("stale weights", "rope scaling", "expert choice"):
        found = experts.compare(fault, hidden=False)
        assert (found.exit_status, found.causes, found.site) == (1, (), None), "\n".join(found.summary())
        assert len(found.measured) == 1
    found = experts.compare("temperature", hidden=False)
    assert [c.name for c in found.causes] == ["temperature"]
    assert_names(found.causes[0].text, rollouts.TEMPERATURE)


def test_a_temperature_that_is_given_is_not_a_difference(experts: Pair) -> None:
    found = experts.compare("temperature", temperature=rollouts.TEMPERATURE)
    assert (found.exit_status, found.beyond, found.causes) == (0, 0, ())


def test_estimates_of_the_divergence_are_those_of_the_differences(experts: Pair) -> None:
    found = experts.compare("temperature")
    d = torch.tensor([token.difference for token in found.tokens], dtype=torch.float64)
    assert len(d) == TOKENS, "all differ"
    assert found.mean == pytest.approx(float(d.mean()))
    assert found.k1 == pytest.approx(float(-d.mean()))
    assert found.k3 == pytest.approx(float((d.exp() - 1 - d).mean()))
    assert found.greatest.difference == pytest.approx(float(d[d.abs().argmax()]))
