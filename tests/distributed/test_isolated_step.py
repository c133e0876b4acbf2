"""An isolated step: the parameters of one run, loaded into another one of another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import compare
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from megatron_flex.errors import DumpError
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pages import ROOT, mine
from tests.support.pool import run
from tests.support.training import Trainer

pytest.importorskip("megatron.core")

CASE = Case("tp2 pp2", tp=2, pp=2)
STEP = 3


def built(case: Case, state: dict[str, Tensor] | None) -> tuple[list[Any], dict[str, Tensor]]:
    """The chunks of this rank, and the weights that all runs begin with."""
    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, state)
    return chunks, state


def trained(case: Case, path: str, state: dict[str, Tensor] | None, rate: float = 1.0) -> dict[str, Tensor]:
    """Steps of training, with a dump of each; gradients times a rate."""
    import megatron_flex as mf

    chunks, state = built(case, state)
    trainer = Trainer(case, chunks, ranks.mine(chunks))
    for group in trainer.optimizer.param_groups:
        group["lr"] *= rate
    with mf.attach(
        trainer.models, dumps=mf.Dump(path, "**:*", gradients=True, parameters="**", order="blocks")
    ):
        for _ in range(STEP + 1):
            trainer.step()
    return state


def isolated(case: Case, one: str, path: str, state: dict[str, Tensor], code: str, rate: float) -> None:
    """The code of the page, on ranks that trained with another learning rate."""
    chunks, _ = built(case, state)
    trainer = Trainer(case, chunks, ranks.mine(chunks))
    for group in trainer.optimizer.param_groups:
        group["lr"] *= rate
    names = {"chunks": trainer.models, "one": one, "isolated": path, "STEP": STEP}
    exec(code, {**names, "train_step": lambda _: trainer.step()})


def test_the_recipe_of_the_page(tmp_path: Path) -> None:
    """After three steps with another learning rate runs diverge; the step itself is right."""
    (*_, code) = mine(ROOT / "docs" / "compare.md")
    one, wrong, alone = (str(tmp_path / n) for n in ("one", "wrong", "isolated"))
    (state,) = run(1, trained, CASE.single(), one, None)
    run(CASE.world, trained, CASE, wrong, state, 3.0)
    assert compare(one, wrong, iterations=[STEP]).verdict == "diverges"
    run(CASE.world, isolated, CASE, one, alone, state, code, 3.0)
    result = compare(one, alone, iterations=[STEP])
    assert result.verdict == INDISTINGUISHABLE, str(result)
    parameters = [r for r in result.rows if r.kind == "parameter"]
    assert parameters
    assert all(r.equal for r in parameters), "they are those of the other run"
    values = [r for r in result.rows if r.kind == "value"]
    assert max(r.floor for r in values) < 1e-4, "the power of a first step"


def test_a_dump_without_the_step(tmp_path: Path) -> None:
    from megatron_flex.compare import load_parameters
    from tests.support import dumps

    value = dumps.random(1, 8, 4)
    dumps.write(tmp_path / "none", {"decoder.layers.0:output": dumps.Given(dumps.random(1, 4, 8, 8))})
    dumps.write(tmp_path / "first", {}, parameters={"w": dumps.Given(value, dumps.WEIGHT)}, iterations=[2])
    with raises(DumpError, tmp_path / "none", 'parameters="**'):
        load_parameters(_Never(), tmp_path / "none", 0)
    with raises(DumpError, tmp_path / "first", "w", 7, 2):
        load_parameters(_Never(), tmp_path / "first", 7)


class _Never:
    """A model that nothing may be loaded into."""

    def set_module_parameter(self, name: str, value: torch.Tensor | None, *, optimizer: Any = None) -> None:
        raise AssertionError(name)
