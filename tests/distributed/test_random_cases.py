"""Law 1 where nobody chose the case: models, layouts, hooks, edits and schedules drawn at random."""

from __future__ import annotations

import importlib.metadata
import random
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from tests.support import design, edit_table, failing, random_proof
from tests.support.failing import Row
from tests.support.random_cases import GRADIENTS, VALUES, Draw, Hook, plain
from tests.support.random_proof import Verdict, prove
from tests.support.shrinker import shrink

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="some of the models drawn came with 0.19")

# Of so many draws of a seed the fewest, on up to four ranks, that have each kind of hook, with an edit and
# without, and each edit along each axis that any of the draws has them on.
SEED, DRAWS, RANKS = 0, 600, 4
CASES = 43
AXES = ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "recompute")
KINDS = (*VALUES, *GRADIENTS)


@cache
def candidates() -> list[Draw]:
    """Drawn when a test of this file runs, not when it is collected: drawing takes seconds."""
    draws = (plain(random.Random(f"{SEED}/{number}"), (1, 2, 4)) for number in range(DRAWS))
    return [d for d in draws if d.world <= RANKS]


@cache
def selected_cases() -> list[Draw]:
    cases = design.least(candidates(), lambda d: d.elements, lambda d: 1 + d.world / 2)
    return sorted(cases, key=lambda d: (d.world, d.layout))


def test_each_kind_of_hook_and_of_edit_is_there_along_each_axis() -> None:
    covered = set().union(*(d.elements for d in selected_cases()))
    assert covered == set().union(*(d.elements for d in candidates()))
    assert covered >= {("hook", kind, axis) for kind in KINDS[:-1] for axis in AXES}
    assert covered >= {("hook", "parameter", axis) for axis in AXES if axis != "ep"}
    assert covered >= {("edited", kind, axis) for kind in KINDS[:-1] for axis in AXES}
    assert covered >= {(run, axis) for run in ("replicated", "once") for axis in AXES}
    for name in edit_table.TABLE:
        assert len({axis for axis in AXES if ("edit", name, axis) in covered}) >= len(AXES) - 1, name
    assert len(selected_cases()) == CASES


@pytest.mark.parametrize("number", range(CASES))
def test_a_random_case(number: int) -> None:
    draw = selected_cases()[number]
    verdict = prove(draw)
    again = f"scripts/dev/fuzz_layouts --case '{draw.text()}'"
    assert verdict.good, f"{verdict.told()}\nmade smaller by: {again}"
    assert len(verdict.unjudged) <= len(verdict.cells) // 4, verdict.unjudged


FC1, QKV = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.self_attention.linear_qkv"
PARTS_OF_ONE = [
    (Hook(f"{FC1}:output"), Hook(f"{FC1}:up", edit="scale")),
    (Hook(f"{FC1}:output", edit="scale"), Hook(f"{FC1}:gate", edit="softened", run="once")),
    (Hook(f"{QKV}:output"), Hook(f"{QKV}:q", edit="scale"), Hook(f"{QKV}:v")),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("hooks", PARTS_OF_ONE, ids=["read and edit", "two edits", "three places"])
def test_places_of_one_module_fire_in_the_order_of_the_data_flow(
    hooks: tuple[Hook, ...], turned: bool
) -> None:
    """Each sees what those before it in the data flow left, in whatever order they were registered."""
    verdict = prove(Draw(tp=2, layers=1, hooks=hooks[::-1] if turned else hooks))
    assert verdict.good, verdict.told()


# -- faults are found --------------------------------------------------------------------------------


def faulty(draw: Draw, state: dict[str, Tensor], shapes: Any, folder: str) -> dict[str, Any]:
    """Ranks that take the packed features `gate|up` to be cut as if they were not packed."""
    from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts

    right = ModelLayouts.features

    def wrong(self: Any, name: str, segments: tuple[int, ...] = (1,)) -> Any:
        return right(self, name)

    ModelLayouts.features = wrong  # type: ignore[method-assign]
    try:
        return random_proof.spread(draw, state, shapes, folder)
    finally:
        ModelLayouts.features = right  # type: ignore[method-assign]


def test_a_fault_is_found_and_made_small() -> None:
    """Of a case with other hooks, replicas, layers and recomputation, what the fault needs is left."""
    packed = Hook("decoder.layers.1.mlp.linear_fc1:output")
    others = (Hook("decoder.layers.0:output", "tensor"), Hook("decoder.layers.*.mlp:input", edit="softened"))
    draw = Draw(tp=2, dp=2, layers=2, recompute=("full",), hooks=(*others, packed))
    first = prove(draw, faulty)
    assert {c.site for c in first.bad} == {packed.site}
    assert all(c.check.startswith("value") for c in first.bad)

    def fails(smaller: Draw) -> bool:
        verdict = prove(smaller, faulty)
        assert not verdict.error
        return bool(verdict.bad)

    small = shrink(draw, fails, 24)
    assert small.draw == Draw(tp=2, hooks=(Hook("decoder.layers.0.mlp.linear_fc1:output"),))
    assert prove(small.draw).good, "it is the fault, and not the case"


def raising(draw: Draw, state: dict[str, Tensor], shapes: Any, folder: str) -> dict[str, Any]:
    raise RuntimeError("as upstream refuses a model")


def test_what_is_raised_is_a_failure() -> None:
    verdict = prove(Draw(hooks=(Hook("decoder:output"),)), raising)
    assert not verdict.good
    assert "as upstream refuses a model" in verdict.told()


def test_nothing_compared_is_no_pass() -> None:
    assert not Verdict(Draw()).good


# -- failing ranks and frozen parts --------------------------------------------------------------------

LATER = "decoder.layers.1:input"


def failing_nowhere(case: Any, state: Any, rows: Any, fails: bool) -> dict[str, Any]:
    return failing.run_rows(case, state, rows, False)


def test_a_failing_edit_in_a_frozen_model_is_judged() -> None:
    rows = (Row("module", LATER, "model", rank=1), Row("gathered", LATER, "embedding", rank=2, step=1))
    draw = Draw(tp=2, dp=2, layers=2, failures=rows)
    verdict = prove(draw)
    assert verdict.good, verdict.told()
    assert [c.site for c in prove(draw, failing_nowhere).bad] == [LATER, LATER]


def test_hooks_in_a_frozen_model() -> None:
    hooks = (Hook("decoder.layers.1.mlp:input", "tensor"), Hook("decoder.layers.0:input", edit="mixed"))
    verdict = prove(Draw(dp=2, tp=2, layers=2, frozen="embedding", hooks=hooks))
    assert verdict.good, verdict.told()
    assert not [c for c in verdict.cells if c.site.startswith("embedding")]
