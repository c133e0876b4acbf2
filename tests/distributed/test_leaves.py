"""What Megatron's modules return behind their first tensor: the biases that parallel linears hand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

LAYER = "decoder.layers.1"
PLACES = ("self_attention", "self_attention.linear_proj", "mlp", "mlp.linear_fc1", "mlp.linear_fc2")
CASES = [
    Case("tp2 sp", tp=2, sp=True, bias=True, layers=2),
    Case("tp2 pp2", tp=2, pp=2, bias=True, layers=2),
    Case("tp2 cp2", tp=2, cp=2, sp=True, bias=True, layers=2, gated=False),
]


def _install(root: Any, place: str, visit: Any) -> None:
    module = root.get_submodule(f"{LAYER}.{place}")
    module.register_forward_hook(lambda m, a, out: (out[0], visit(out[1])))


def alone(case: Case) -> dict[str, Any]:
    """The truth by plain hooks on one process."""
    truth = oracle.run(case, [], [])
    for place in PLACES:
        chunks = gpt.build(case)
        gpt.load(chunks, truth["state"])
        values: list[Tensor] = []
        gradients: list[Tensor] = []

        def keep(bias: Tensor, values: list[Tensor] = values, gradients: list[Tensor] = gradients) -> Tensor:
            values.append(bias.detach().clone())
            bias = bias.clone()
            bias.register_hook(lambda g: gradients.append(g * case.microbatches))
            return bias

        _install(chunks[0], place, keep)
        gpt.step(case, chunks, 0)
        truth[place] = values, gradients
        chunks = gpt.build(case)
        gpt.load(chunks, truth["state"])
        _install(chunks[0], place, oracle.edit)
        truth["edited"][place] = oracle._step(case, chunks)
    return truth


def spread(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return oracle.edit(inputs)

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    answer: dict[str, Any] = {"edited": {}, "dp": 0}
    flex = mf.FlexModel(chunks)
    answer |= {"coords": dict(flex.session.mesh.coords), "sizes": dict(flex.session.mesh.sizes)}
    for place in PLACES:
        name = f"{LAYER}.{place}"
        flex.register_forward_hook(mf.HookFunction(name, unpack_idx=1))
        back = mf.HookFunction(name, unpack_idx=1, gradient_scale="loss")
        flex.register_full_backward_pre_hook(back)
    flex.verify()
    answer["plain"] = gpt.step(case, chunks, 0), matrix._gradients(flex, chunks)
    answer["read"] = {n: list(r) for n, r in flex.output_dict.items()}
    flex.restore()
    for place in PLACES:
        hook = mf.HookFunction(f"{LAYER}.{place}", edit, unpack_idx=1, save=False)
        with mf.attach(chunks, [hook]) as flex:
            answer["edited"][place] = gpt.step(case, chunks, 0), matrix._gradients(flex, chunks)
    flex = mf.attach(chunks, [mf.HookFunction(f"{LAYER}.self_attention.linear_qkv", unpack_idx=1)])
    answer["none"] = ranks.step_says(case, chunks, flex)
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_biases_beside_outputs_equal_those_of_one_process(case: Case) -> None:
    truth = truths.once(alone, case.single())
    answers = run(case.world, spread, case, truth["state"], timeout=240)
    read = answers[0]["read"]
    for place in PLACES:
        values, gradients = truth[place]
        name = f"{LAYER}.{place}:output[1]"
        torch.testing.assert_close(read[name], values, rtol=0, atol=0)
        torch.testing.assert_close(read[f"{name}.grad"], gradients, rtol=1e-5, atol=1e-6)
    cells = matrix._effects(case, list(PLACES), truth, answers)
    assert len(cells) == 2 + 2 * len(PLACES)
    assert not [c for c in cells if not c.good], [c for c in cells if not c.good]
    assert len({a["none"] for a in answers}) == 1
    assert_names(answers[0]["none"], "unpack_idx=1", 1)
