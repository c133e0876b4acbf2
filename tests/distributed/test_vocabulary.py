"""Logits come without the vocabulary's padding, and an edit of them leaves the padding as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import _gradients, relative, whole_gradients
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")
pytest.importorskip("megatron.training", reason="the number of tokens is megatron.training's to know")

CASE = Case("tp4 sp", tp=4, sp=True, groups=4)
FACTOR = 1.5
REAL = 45  # of 64: the third of four ranks has both, the fourth nothing but padding


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return oracle.edit(inputs)


def single(case: Case, local: bool) -> Any:
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    seen: list[Tensor] = []

    def visit(logits: Tensor) -> Tensor:
        seen.append(logits.detach().clone())
        real = logits[..., :REAL]
        return torch.cat([real * FACTOR if local else oracle.edit(real), logits[..., REAL:]], -1)

    oracle.install(chunks[0], "output_layer:output", visit)
    losses = gpt.step(case, chunks, 0)
    return state, losses, seen, {n: p.grad for n, p in gpt.global_names(chunks[0])}


def sharded(case: Case, state: dict[str, Tensor], local: bool) -> dict[str, Any]:
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable()
    import megatron.training.global_vars as known

    changes.setattr(known, "_GLOBAL_TOKENIZER", SimpleNamespace(vocab_size=REAL))
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    flex = mf.FlexModel(chunks)
    flex.register_forward_hook(
        mf.HookFunction("output_layer", editing_function=mf.edits.scale(FACTOR) if local else edit)
    )
    losses = gpt.step(case, chunks, 0)
    mesh = flex.session.mesh
    answer = {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": 0, "losses": losses}
    answer["gradients"] = _gradients(flex, chunks)
    answer["read"] = list(flex.output_dict["output_layer"]) if flex.is_leader else []
    answer["shape"] = flex.sites("output_layer:output")[0].shape
    flex.restore()
    return answer


@pytest.mark.parametrize("local", [False, True], ids=["the whole", "ranks' parts"])
def test_padding_is_kept_aside(local: bool) -> None:
    state, losses, seen, gradients = truths.once(single, CASE.single(), local)
    answers = run(4, sharded, CASE, state, local)
    assert answers[0]["shape"] == ("s", "b", REAL)
    assert len(answers[0]["read"]) == len(seen) == CASE.microbatches
    for got, want in zip(answers[0]["read"], seen, strict=True):
        assert relative(got, want[..., :REAL]) < 1e-5
    assert answers[0]["losses"] == pytest.approx(losses, rel=1e-5)
    found = whole_gradients(answers, lambda a: a["gradients"])
    assert found.keys() == gradients.keys()
    for name, want in gradients.items():
        tokens = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        assert relative(found[name], want[:REAL] if tokens else want) < 1e-5, name


def weights(case: Case, state: dict[str, Tensor]) -> Any:
    """Read and set with and without padding; what every rank holds of the padding at last."""
    from megatron_flex import cpu

    cpu.enable()
    import megatron.training.global_vars as known

    import megatron_flex as mf

    changes.setattr(known, "_GLOBAL_TOKENIZER", SimpleNamespace(vocab_size=REAL))
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    flex = mf.FlexModel(chunks)
    answer = {}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        plain = flex.get_module_parameter(name, (REAL, gpt.HIDDEN), everywhere=True)
        padded = flex.get_module_parameter(name, (gpt.VOCABULARY, gpt.HIDDEN), padded=True, everywhere=True)
        flex.set_module_parameter(name, -plain)
        kept = flex.get_module_parameter(name, padded=True, everywhere=True)
        flex.set_module_parameter(name, 2 * padded, padded=True)
        answer[name] = plain, padded, kept, flex.get_module_parameter(name, padded=True, everywhere=True)
    flex.restore()
    return answer


def test_weights_come_without_padding_and_keep_it() -> None:
    state, *_ = truths.once(single, CASE.single(), False)
    for answer in run(4, weights, CASE, state):
        for name, (plain, padded, kept, doubled) in answer.items():
            assert torch.equal(plain, state[name][:REAL])
            assert torch.equal(padded, state[name])
            assert torch.equal(kept[:REAL], -state[name][:REAL])
            assert torch.equal(kept[REAL:], state[name][REAL:])
            assert torch.equal(doubled, 2 * state[name])
