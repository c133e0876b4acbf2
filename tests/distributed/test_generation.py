"""Activations of a text that a model generates, against one forward pass of one process over that text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.errors import FlexError, HookError
from tests.distributed.matrix import BOUND
from tests.distributed.test_lens import far
from tests.support import gpt, hf_llama, llama, oracle, proof, ranks
from tests.support.gpt import Case
from tests.support.launching import has_pretrain
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

PROMPT, NEW = 5, 4
EDITED = "decoder.layers.0:output"
READ = {
    "blocks.0.hook_resid_post": "decoder.layers.0:output",
    "blocks.1.hook_attn_out": "decoder.layers.1.self_attention:output",
    "decoder.layers.1.mlp": "decoder.layers.1.mlp:output",
}
CASES = (
    Case("tp2", tp=2, layers=2),
    Case("pp2", pp=2, layers=2),
    Case("tp2 pp2, learned positions", tp=2, pp=2, layers=2, rope=False),
    Case("ep2", dp=2, ep=2, layers=2, experts=4),
)
VECTOR = torch.linspace(-1, 1, gpt.HIDDEN)
ABSOLUTE = slice(PROMPT - 1, PROMPT + 2)  # the last token of the prompt, and two that are generated


def prompts() -> Tensor:
    return torch.randint(1, gpt.VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))


class Numbers:
    """A tokenizer of numbers, as Megatron's engine calls it."""

    vocab_size, eod, bos = gpt.VOCABULARY, -1, None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))

    def offsets(self, tokens: list[int], text: str) -> list[int]:
        return [0] * len(tokens)


def generate(model: Any) -> Tensor:
    """The prompts and what Megatron's engine generates greedily after them."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import static_engine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )
    from megatron.core.inference.utils import InferenceMode

    model.eval()
    try:
        context = StaticInferenceContext(max_batch_size=2, max_sequence_length=gpt.SEQUENCE)
        controller = TextGenerationController(GPTInferenceWrapper(model, context), Numbers())
        engine = static_engine.StaticInferenceEngine(controller, max_batch_size=2, legacy=True)
        texts = [" ".join(map(str, row.tolist())) for row in prompts()]
        sampling = SamplingParams(num_tokens_to_generate=NEW, top_k=1)
        with patch.object(static_engine, "tqdm", MagicMock()):  # its bar leaves a thread behind
            done = engine.generate(prompts=texts, sampling_params=sampling)
        return torch.tensor([[*map(int, r.prompt_tokens), *map(int, r.generated_tokens)] for r in done])
    finally:
        InferenceMode.unset_active()


def weights(case: Case) -> dict[str, Tensor]:
    return gpt.randomize(ranks.start(case.single())[0])


def generated(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    """On this rank: what is generated without and with an edit, and the cache of the latter."""
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    steer = mf.edits.steer(VECTOR, positions=ABSOLUTE)
    plain = generate(chunks[0])
    with mf.attach(chunks, [mf.HookFunction(EDITED, steer, save=False)]) as flex:
        with flex.interp.generation(list(READ)) as text:
            tokens = generate(chunks[0])
            with raises(FlexError, "with"):
                text.cache  # noqa: B018  # the property raises
        cache = {name: text.cache[name] for name in READ}
        with flex.interp.generation(list(READ)) as again:  # begins a text anew
            generate(chunks[0])
    same = all(torch.equal(again.cache[name], tensor) for name, tensor in cache.items())
    return {"plain": plain, "tokens": tokens, "cache": cache, "again": same}


def in_one_pass(case: Case, state: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """One process of Megatron over the text at once, with torch's own hooks."""
    (model,) = ranks.start(case.single())
    gpt.load([model], state)
    model.eval()
    out: dict[str, Tensor] = {}

    def edit(stream: Tensor) -> Tensor:
        changed = stream.clone()
        changed[ABSOLUTE] += VECTOR
        return changed

    def keep(name: str, tensor: Tensor) -> Tensor:
        out[name] = tensor.transpose(0, 1).detach().clone()
        return tensor

    oracle.install(model, EDITED, edit)
    for name, site in READ.items():
        oracle.install(model, site, partial(keep, name))
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        out["logits"] = model(tokens, torch.arange(length).expand_as(tokens), mask)
    return out


@pytest.mark.skipif(not has_pretrain(), reason="the engine of megatron-core 0.19")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_megatrons_engine(case: Case) -> None:
    (state,) = run(1, weights, case)
    every = run(case.world, generated, case, state)
    tokens = every[0]["tokens"]
    (truth,) = run(1, in_one_pass, case, state, tokens[:, :-1])
    assert torch.equal(tokens[:, PROMPT:], truth["logits"][:, PROMPT - 1 :].argmax(-1))
    for found in every:
        assert torch.equal(found["tokens"], tokens)
        assert not torch.equal(found["plain"], tokens), "the edit changes the text"
        assert found["again"]
        for name in READ:
            assert found["cache"][name].shape[:2] == (2, PROMPT + NEW - 1)
            assert far(found["cache"][name], truth[name]) <= BOUND, name


# -- transformers ----------------------------------------------------------------------------------------

LAYER, STREAM = "model.layers.0", "model.layers.1"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True},
    "beams": {
        "num_beams": 3,
        "num_return_sequences": 3,  # beams that others have overtaken, too
        "return_dict_in_generate": True,
        "output_scores": True,
    },
}


def texts_of(folder: str, **options: Any) -> dict[str, dict[str, Any]]:
    """On this rank: the sequences of each way of generating, and the cache of an edited layer."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()
    tokens, _ = llama.batch(0)
    tokens = tokens[:, :PROMPT]
    steer = mf.edits.steer(torch.linspace(-1, 1, model.config.hidden_size), positions=ABSOLUTE)
    out: dict[str, dict[str, Any]] = {}
    with mf.attach(model, [mf.HookFunction(LAYER, steer, save=False)]) as flex:
        for way, settings in WAYS.items():
            torch.manual_seed(3)
            with flex.interp.generation([LAYER, STREAM]) as text:
                always = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW}
                result = model.generate(tokens, **{"use_cache": True, **always, **settings})
            beams = not isinstance(result, Tensor)
            cache = text.follow(result.beam_indices) if beams else text.cache
            out[way] = {
                "tokens": result.sequences if beams else result,
                "cache": {name: cache[name] for name in (LAYER, STREAM)},
            }
        for second in (tokens, tokens[:1]):
            with flex.interp.generation(STREAM) as two:
                for part in (tokens, second):
                    model.generate(
                        part, attention_mask=torch.ones_like(part), max_new_tokens=2, use_cache=True
                    )
            with raises(HookError, f"{STREAM}:output"):
                two.cache  # noqa: B018  # the property raises
    return out


def texts_in_one_pass(folder: str, sequences: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """One process of transformers over each text at once, with torch's own hooks."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    seen: dict[str, Tensor] = {}

    def edit(module: Any, args: Any, stream: Tensor) -> Tensor:
        changed = stream.clone()
        changed[:, ABSOLUTE] += torch.linspace(-1, 1, model.config.hidden_size)
        return changed

    def keep(name: str, module: Any, args: Any, stream: Tensor) -> None:
        seen[name] = stream.detach().clone()

    model.get_submodule(LAYER).register_forward_hook(edit)
    for name in (LAYER, STREAM):
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    out = {}
    for way, tokens in sequences.items():
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        out[way] = {**seen, "greedy": logits[:, PROMPT - 1 :].argmax(-1)}
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_transformers(world: int, tmp_path: Path) -> None:
    folder = hf_llama.save(tmp_path)
    options = {"tp_plan": "auto"} if world > 1 else {}
    every = proof.run(world, partial(texts_of, **options), folder, alone=True)
    sequences = {way: every[0][way]["tokens"] for way in WAYS}
    (truth,) = proof.run(1, texts_in_one_pass, folder, sequences, alone=True)
    assert torch.equal(sequences["greedy"][:, PROMPT:], truth["greedy"]["greedy"])
    for found in every:
        for way, tokens in sequences.items():
            assert torch.equal(found[way]["tokens"], tokens), way
            for name in (LAYER, STREAM):
                assert far(found[way]["cache"][name], truth[way][name]) <= BOUND, (way, name)
