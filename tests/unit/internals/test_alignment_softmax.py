"""What differences of attention scores explain in the tensors after them."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.alignment.site_rows import make_rows
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.tensor_pairs import DifferenceSums
from megatron_flex.compare.tolerance import Precision, Tolerances
from megatron_flex.dump import VALUE

LAYER = "decoder.layers.{}.self_attention.core_attention:{}"
SCORES, PROBABILITIES, OUTPUT = ([LAYER.format(n, p) for n in (0, 1)] for p in ("scores", "probs", "output"))
GAP = 1e-3  # of scores of 100, which agree to 1e-6
SITES = [
    *(LAYER.format(0, "q"), SCORES[0], PROBABILITIES[0], OUTPUT[0]),
    *(LAYER.format(1, "q"), SCORES[1], PROBABILITIES[1], OUTPUT[1], "logits"),
]


def differing(relative: float, greatest: float = 0.0) -> DifferenceSums:
    """Sums of 100 entries of 1 with that relative difference."""
    norm = 100 * relative * relative
    return DifferenceSums(100, 100, finite=100, squares_a=100, squares=norm, greatest=greatest, peak=1e3)


def explained(
    isolated: bool, error: float = 1e-6, probabilities: float = 3e-4, absent: str = ""
) -> list[float]:
    """By site of `SITES`, what scores explain besides the tolerance from dtype and depth."""
    differences = dict.fromkeys(SITES, differing(0.0))
    differences |= dict.fromkeys(SCORES, differing(error, GAP))
    differences |= dict.fromkeys(PROBABILITIES, differing(probabilities))
    differences.pop(absent, None)
    layers = {site: int(site.split(".")[2]) if "." in site else None for site in differences}
    tolerances = Tolerances(None, SITES, [Precision(torch.float32, layers=2)] * 2)
    dtypes = dict.fromkeys(SITES, (torch.float32, torch.float32))
    found = {s: r.tolerance for s, r in make_rows(tolerances, differences, dtypes, layers, isolated).items()}
    usual = {site: tolerances.bound(ComparedTensor(site, VALUE), dtypes[site], isolated) for site in found}
    return [found[site] - usual[site] if site in found else -1.0 for site in SITES]


def test_scores_explain_probabilities_and_these_what_follows() -> None:
    one, two = 2 * 3e-4, 4 * 3e-4
    wanted = [0, 0, GAP, one, one, one, one + GAP, two, two]
    assert explained(isolated=False) == pytest.approx(wanted, abs=1e-9)


def test_nothing_carries_over_between_layers_with_equal_inputs() -> None:
    one = 2 * 3e-4
    assert explained(isolated=True) == pytest.approx([0, 0, GAP, one, 0, 0, GAP, one, 0], abs=1e-9)


def test_what_differs_explains_nothing() -> None:
    assert explained(isolated=False, error=1e-2) == [0.0] * 9
    assert explained(isolated=False, probabilities=0.1)[3] == pytest.approx(GAP)


def test_scores_explain_what_follows_where_there_are_no_probabilities() -> None:
    found = explained(isolated=False, absent=PROBABILITIES[0])
    assert found[3:6] == pytest.approx([GAP, GAP, GAP])
