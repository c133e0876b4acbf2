"""fairscale's parallel layers in a DeepSpeed engine: one says how tensors are cut, the other keeps them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.distributed.test_deepspeed import initialize, stepping
from tests.support import proof

pytest.importorskip("fairscale")
parallel = pytest.importorskip("tests.support.llama_fairscale")
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def build(stage: int, tp: int) -> proof.Built:
    from fairscale.nn.model_parallel import initialize as mpu

    parallel.initialize(tp)
    engine = initialize(parallel.model(), stage, mpu=mpu)
    return proof.Built(engine, stepping(engine), averaged=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_over_fairscale(stage: int, cells: list[Any]) -> None:
    case = f"ZeRO-{stage} dp2, fairscale mp2"
    proof.judge(proof.compare("DeepSpeed", case, 4, build, stage, 2, alone=True), cells)
