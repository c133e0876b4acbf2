"""What explains a reported gradient norm that the full gradients do not have."""

from __future__ import annotations

from math import sqrt

import pytest

from megatron_flex.runtime.gradient_norm import ComparedNorm, GradientSquares, explain_norm

ROUNDING = 2e-5
NORM, FC1, BIAS = "layers.0.norm.weight", "layers.0.fc1.weight", "layers.1.fc1.bias"
SQUARES = {
    NORM: GradientSquares(0.25, {}, {"tp": 2, "dp": 4}),
    "layers.1.norm.weight": GradientSquares(0.125, {}, {"tp": 2, "dp": 4}),
    FC1: GradientSquares(3.0, {"tp": 1.0}, {"dp": 4}),
    BIAS: GradientSquares(1.0, {"tp": 0.25}, {"dp": 4}),
}
TOTAL = 4.375


def explain(square: float) -> ComparedNorm:
    return explain_norm(sqrt(square), SQUARES, ROUNDING)


def test_rounding_is_not_a_finding() -> None:
    assert explain(TOTAL * (1 + 1e-5)).finding == ""
    assert explain(TOTAL * (1 + 4e-5)).finding != ""
    assert (
        explain_norm(
            8 * sqrt(TOTAL), {n: s._replace(total=64 * s.total) for n, s in SQUARES.items()}, 1e-5
        ).finding
        == ""
    )


def test_gradients_that_are_not_finite_have_no_norm() -> None:
    assert explain(float("inf")).finding == ""
    assert explain_norm(2.0, SQUARES | {NORM: GradientSquares(float("nan"), {}, {})}, ROUNDING).finding == ""


@pytest.mark.parametrize(
    ("square", "names"),
    [
        pytest.param(TOTAL + 0.375, (NORM, "layers.1.norm.weight"), id="copies on each rank"),
        pytest.param(TOTAL - 2.0, (FC1,), id="shards of the first rank"),
        pytest.param(TOTAL - 2.75, (FC1, BIAS), id="all shards of the first rank"),
        pytest.param(TOTAL - 1.0, (BIAS,), id="left out"),
        pytest.param(TOTAL + 0.1, (), id="unexplained"),
    ],
)
def test_the_parameters_are_named(square: float, names: tuple[str, ...]) -> None:
    compared = explain(square)
    assert compared.names == names
    assert compared.finding
    assert all(name in compared.finding for name in names)


def test_what_the_framework_says_comes_before_what_numbers_suggest() -> None:
    squares = SQUARES | {BIAS: SQUARES[BIAS]._replace(counts=0.5)}
    assert explain_norm(sqrt(TOTAL), squares, ROUNDING).names == (BIAS,)
