"""A LLaMA-style model of fairscale's layers, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support import llama, proof
from tests.support import llama_fairscale as parallel

pytest.importorskip("fairscale")


def build(tp: int, wrapped: bool = False, switches: dict[str, bool] | None = None) -> proof.Built:
    parallel.initialize(tp)
    model: Any = parallel.model(**switches or {})
    if wrapped:
        from fairscale.nn.model_parallel.initialize import get_data_parallel_group

        model = DistributedDataParallel(model, process_group=get_data_parallel_group())

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, averaged=wrapped)


CASES = {
    "mp1 dp1": (1, 1, False, {}),
    "mp2": (2, 1, False, {}),
    "mp4": (4, 1, False, {}),
    "mp1 dp2": (1, 2, False, {}),
    "mp2 dp2": (2, 2, False, {}),
    "mp2 dp2, DDP": (2, 2, True, {}),
    "mp4 dp2, DDP": (4, 2, True, {}),
    "mp2, gathered": (2, 1, False, {"gather": True}),
    "mp2, vocabulary": (2, 1, False, {"vocabulary": True}),
    "mp4, gathered, vocabulary": (4, 1, False, {"gather": True, "vocabulary": True}),
}
BETWEEN = "followed"


@pytest.mark.parametrize("case", CASES)
def test_matrix(case: str, cells: list[Any]) -> None:
    tp, dp, wrapped, switches = CASES[case]
    proof.judge(proof.compare("fairscale", case, tp * dp, build, tp, wrapped, switches), cells)
