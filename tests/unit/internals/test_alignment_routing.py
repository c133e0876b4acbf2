"""Tokens whose experts are equal up to round-off, and those that choose wrong experts."""

from __future__ import annotations

import pytest
import torch

from megatron_flex.compare.routing_ties import find_ties

BOUND = 1e-3  # relative to the greatest logit
NEAR, FAR = 2.0 * BOUND, 0.5


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_only_choices_among_equal_experts_are_ties(scale: float) -> None:
    """Four tokens of one sample choose two of four experts each; the greatest logit is 4."""
    logits = torch.tensor([[[4.0, 3.0, 1.0, 0.0]] * 4])
    logits[0, 1, 2] = 3.0 - NEAR  # the second and the third expert are equal up to round-off
    logits[0, 2, 2] = 3.0 - FAR
    here = torch.zeros(1, 4, 4, dtype=torch.bool)
    here[..., :2] = True
    there = here.clone()
    for token in (1, 2):  # Hugging Face takes the third expert instead of the second
        there[0, token, 1:3] = torch.tensor([False, True])
    there[0, 3] = torch.tensor([False, True, False, True])  # the first expert is far from the last
    assert NEAR < 4 * BOUND < FAR
    differs, ties = find_ties(here, there, logits * scale, BOUND * 4 * scale)
    assert differs.tolist() == [[False, True, True, True]]
    assert ties.tolist() == [[False, True, False, False]]
    assert not any(mask.any() for mask in find_ties(here, here, logits * scale, BOUND * 4 * scale))
