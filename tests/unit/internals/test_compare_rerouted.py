"""Which tokens ties of the router explain, and how many there are by chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.routing_ties import ReroutedTokens, count_ties, find_likely_ties
from megatron_flex.compare.tensor_pairs import align_arrays
from megatron_flex.dump import VALUE
from tests.support import dumps
from tests.support.dumps import Given
from tests.unit.test_compare_routing import IN_BF16, MLP, SAMPLES, TOKENS, WIDTH


def off_by(sizes: list[float], noise: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A result of experts, and one whose first tokens differ so much, relative to the norm of a token."""
    value = dumps.random(1, SAMPLES, TOKENS, WIDTH)
    other = value + noise * dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=1)
    change = dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=2)[0, 0, : len(sizes)]
    change *= value.square().mean().sqrt() * WIDTH**0.5 / change.norm(dim=-1, keepdim=True)
    other[0, 0, : len(sizes)] = value[0, 0, : len(sizes)] + change * torch.tensor(sizes)[:, None]
    return value, other


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        ([], 0),
        ([0.19, 0.19], 2),
        ([0.3, 0.19], 2),
        ([0.3, 0.19, 0.19], 1),  # more than ties explain: the greater bound counts
        ([0.3, 0.3, 0.19, 0.19], 2),
        ([0.19, 0.19, 0.19], 0),
        ([0.3, 0.3, 0.3], 0),
    ],
)
def test_the_lesser_bound_of_a_token_counts_where_ties_explain_those_above(
    tmp_path: Path, sizes: list[float], tied: int
) -> None:
    for folder, value in zip("ab", off_by(sizes), strict=True):
        dumps.write(tmp_path / folder, {MLP: Given(value)}, model=IN_BF16)
    with mf.open_dump(tmp_path / "a") as a, mf.open_dump(tmp_path / "b") as b:
        pairs = align_arrays(ComparedTensor(MLP, VALUE), 0, a[MLP], b[MLP])
        assert not isinstance(pairs, str)
        found = find_likely_ties(pairs, [0.15, 0.25], 2, ReroutedTokens())
    assert (0 if found is None else found.tied_tokens) == tied


def test_the_number_of_ties_is_that_of_normal_logits() -> None:
    """Noise turns the choice of about as many tokens as the bound expects."""
    generator = torch.Generator().manual_seed(2)
    noise, tokens = 1e-2, 100_000
    for experts, chosen in ((4, 2), (64, 6)):
        logits = torch.randn(tokens, experts, generator=generator)
        others = logits + noise * torch.randn(tokens, experts, generator=generator)
        one, two = (x.topk(chosen).indices.sort().values for x in (logits, others))
        turned = int((one != two).any(-1).sum())
        model = {"num_moe_experts": experts, "moe_router_topk": chosen}
        assert turned < count_ties(tokens, noise, model) < 2.5 * turned
    assert count_ties(tokens, noise, {"num_moe_experts": 2, "moe_router_topk": 2}) == 0
