"""The names of dims, followed through functions of torch: a name that is given is right at every entry."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_flex.adapters.propagation import LayoutPropagator
from megatron_flex.adapters.propagation.dim_names import describe_dims, name_dims, regroup
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import DimNames

NAMES = ("b", "s", "n", "d")
ALONE = Mesh(tuple(Axis(n, 1, 0, None, (0,)) for n in ("pp", "dp", "cp", "tp")))


def coordinates(shape: tuple[int, ...], dim: int) -> Tensor:
    """At each entry its index along a dim."""
    return torch.arange(shape[dim]).view([-1 if i == dim else 1 for i in range(len(shape))]).expand(shape)


def wrong_names(names: tuple[str, ...], moved: list[Tensor]) -> list[str]:
    """The names along whose dims entries do not have the index that they had along the dim of that name."""
    return [
        name
        for at, name in enumerate(names)
        if name in NAMES
        and not torch.equal(moved[NAMES.index(name)], coordinates(tuple(moved[NAMES.index(name)].shape), at))
    ]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """A shape, one of as many entries, and the dim of it that is given as -1."""
    shape = draw(shapes())
    factors = [f for n in shape for f in ((2, 2) if n == 4 and draw(st.booleans()) else (n,))]
    new: list[int] = []
    for factor in factors:
        if new and draw(st.booleans()):
            new[-1] *= factor
        else:
            new += [1] * draw(st.integers(0, 1)) + [factor]
    free = draw(st.none() | st.integers(0, len(new) - 1))
    return shape, tuple(new), free


@settings(max_examples=300, deadline=None)
@given(reshapes(), reshapes())
def test_reshapes(first: Any, second: Any) -> None:
    shape, new, free = first
    dims = regroup(name_dims(shape, NAMES[: len(shape)]), new, free)
    assert dims is not None
    moved = [coordinates(shape, d).reshape(new) for d in range(len(shape))]
    assert [prod(f.size for f in d) for d in dims] == list(new)
    assert not wrong_names(describe_dims(dims), moved)
    back = regroup(dims, shape, 0)
    assert back is not None
    assert not wrong_names(describe_dims(back), [m.reshape(shape) for m in moved])


def test_merged_dims_come_apart_again() -> None:
    dims = name_dims((3, 8, 32), ("b", "s", "h"))
    flat = regroup(dims, (24, 32), 0)
    assert flat is not None
    assert describe_dims(flat) == ("b*s", "h")
    assert regroup(flat, (3, 8, 32)) == dims
    cut = regroup(dims, (3, 2, 4, 32))
    assert cut is not None
    assert describe_dims(cut) == ("b", "", "", "h"), "a part of the positions is not the positions"
    heads = regroup(name_dims((3, 8, 32), ("b", "s")), (3, 8, 4, 8), None, {(4, 8): "n"})
    assert heads is not None
    assert describe_dims(heads) == ("b", "s", "n", "d")


class Moves(nn.Module):
    """Calls a function, whose result is the input of another module."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move, self.seen = move, nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.seen(self.move(x))


def names_after(move: Callable[[Tensor], Tensor], x: Tensor, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the dims of what a function makes of a tensor with names."""
    model, found = Moves(move), []
    propagator = LayoutPropagator(model, {}, ALONE)
    propagator.named = [model]
    propagator.want_names(("seen:input", 0))

    def see(_: nn.Module, args: tuple[Tensor]) -> None:
        found.append(propagator.find_names(("seen:input", 0), args[0]))

    def name(_: nn.Module, args: tuple[Tensor]) -> None:
        trace = propagator._trace
        assert trace is not None
        trace.mark(args[0]).names = name_dims(args[0].shape, names)

    model.register_forward_pre_hook(name)
    model.seen.register_forward_pre_hook(see)
    undo = propagator.watch()
    model(x)
    undo()
    (known,) = found
    assert isinstance(known, DimNames)
    return known.names


W = torch.randn(5, 5)
MOVES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "transpose": (lambda x: x.transpose(1, 2), ("b", "n", "s", "d")),
    "permute": (lambda x: x.permute(3, 0, 2, 1), ("d", "b", "n", "s")),
    "a new dim": (lambda x: x[:, None], ("b", "", "s", "n", "d")),
    "all positions": (lambda x: x[:, slice(0, None)], ("b", "s", "n", "d")),
    "some positions": (lambda x: x[:, -2:], ("b", "", "n", "d")),
    "one position": (lambda x: x[:, -1], ("b", "n", "d")),
    "chosen positions": (lambda x: x[:, torch.tensor([1, 0, 2])], ("b", "", "n", "d")),
    "turned": (lambda x: x.flip(1), ("b", "", "n", "d")),
    "rolled": (lambda x: x.roll(1, 1), ("b", "", "n", "d")),
    "sorted": (lambda x: x.sort(dim=1).values, ("b", "", "n", "d")),
    "a part": (lambda x: x.chunk(2, dim=2)[0], ("b", "s", "", "d")),
    "appended": (lambda x: torch.cat([x, x], dim=1), ("b", "", "n", "d")),
    "stacked": (lambda x: torch.stack([x, x], dim=1), ("b", "", "s", "n", "d")),
    "repeated": (lambda x: x[:, :, :1].expand(-1, -1, 4, -1), ("b", "s", "", "d")),
    "merged": (lambda x: x.flatten(2), ("b", "s", "n*d")),
    "tokens": (lambda x: x.flatten(0, 1), ("b*s", "n", "d")),
    "linear": (lambda x: nn.functional.linear(x, W), ("b", "s", "n", "")),
    "softmax": (lambda x: x.softmax(1), ("b", "s", "n", "d")),
    "mean": (lambda x: x.mean(1), ("b", "n", "d")),
    "mean, kept": (lambda x: x.mean(1, keepdim=True), ("b", "", "n", "d")),
    "scores": (lambda x: x.transpose(1, 2) @ x.permute(0, 2, 3, 1), ("b", "n", "s", "s")),
    "sum of both": (lambda x: x.flip(1) + x, ("b", "s", "n", "d")),
    "einsum": (lambda x: torch.einsum("bsnd,de->bnse", x, W), ("b", "n", "s", "")),
    "attention": (
        lambda x: nn.functional.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3),
        ("b", "n", "s", "d"),
    ),
    "in place": (lambda x: x.clone().mul_(2.0), ("b", "s", "n", "d")),
    "turned in place": (lambda x: x.clone().transpose_(1, 2), ("", "", "", "")),
    "unknown": (lambda x: torch.fft.fft(x, dim=1).real, ("", "", "", "")),
}


@pytest.mark.parametrize("move", MOVES)
def test_functions(move: str) -> None:
    function, want = MOVES[move]
    x = torch.randn(2, 3, 4, 5)
    assert names_after(function, x, NAMES) == want


def test_a_sum_of_tensors_whose_dims_have_other_names() -> None:
    x = torch.randn(2, 3, 3, 5)
    assert names_after(lambda x: x + x.transpose(1, 2), x, NAMES) == ("b", "", "", "d")
