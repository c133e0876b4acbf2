"""Points of patched source: nothing where no hook stands, hooks in their order, and no trace behind them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.taps import module_output, source_point
from megatron_flex.sites import TapCallbacks


class Patched(nn.Module):
    flex_points = points.Points("output")

    def forward(self, x: Tensor) -> Tensor:
        out = x + 1
        return self.flex_points("output", out)


class Derived(Patched):
    pass


class Overriding(Patched):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_nothing_stands() -> None:
    module, x = Patched(), torch.ones(2)
    assert module.flex_points("output", x) is x
    assert not module.flex_points.stands("output")
    assert "flex_points" not in vars(module)


def test_hooks_run_in_their_order_and_leave_nothing() -> None:
    module, other = Patched(), Patched()
    first = points.install(module, "output", lambda t: t * 2)
    second = points.install(module, "output", lambda t: t + 5)
    assert module.flex_points.stands("output")
    assert module(torch.ones(1)).item() == 9
    assert other(torch.ones(1)).item() == 2, "another module of the class"
    first()
    first()
    assert module(torch.ones(1)).item() == 7
    second()
    assert "flex_points" not in vars(module)
    assert module(torch.ones(1)).item() == 2


def test_which_classes_have_points() -> None:
    assert points.declares(Patched(), "output")
    assert points.declares(Derived(), "output")
    assert not points.declares(Overriding(), "output"), "its own forward was not patched"
    assert not points.declares(Patched(), "partial")
    assert not points.declares(nn.Linear(1, 1), "output")


def test_taps_use_points_where_there_are_some() -> None:
    for module, hooks in ((Patched(), 0), (Overriding(), 1)):
        want = module(torch.ones(1)) + 3
        undo = module_output(module, TapCallbacks(lambda local, layout=None, route=None: local + 3))
        assert len(module._forward_hooks) == hooks
        assert torch.equal(module(torch.ones(1)), want)
        undo()
        assert torch.equal(module(torch.ones(1)), want - 3)
        assert "flex_points" not in vars(module)


def test_what_the_call_says_reaches_the_layout() -> None:
    said = []

    def resolve(kwargs: dict[str, bool]) -> None:
        said.append(kwargs)

    module = Patched()
    module_output(module, TapCallbacks(lambda local, layout=None, route=None: local), 0, resolve)
    module.flex_points("output", torch.ones(1), runtime_gather_output=True)
    assert said == [{"runtime_gather_output": True}]


def test_a_point_tap_hears_no_keywords() -> None:
    module = Patched()
    undo = source_point(module, TapCallbacks(lambda local, layout=None, route=None: local * 10), "output")
    assert module.flex_points("output", torch.ones(1), anything=1).item() == 10
    undo()


def test_alone_is_the_module_but_for_its_collectives() -> None:
    class Linear(nn.Module):
        cut = True

        def _forward_impl(self, **how: bool) -> dict[str, bool]:
            return how

    told = points.Alone(Linear())._forward_impl(weight=True, sequence_parallel=True, allreduce_dgrad=True)
    assert told == {"weight": True, "sequence_parallel": False, "allreduce_dgrad": False}
    assert points.Alone(Linear()).cut
