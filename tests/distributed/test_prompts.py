"""Prompts of different lengths in one run, padded on either side, against each alone on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import BOUND
from tests.distributed.test_lens import far, lens
from tests.distributed.test_lens_use import said
from tests.support import gpt, hf_llama, llama, oracle, proof, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

LENGTHS = (5, 9, 2)
PROBS = "decoder.layers.1.self_attention.core_attention:probs"
NAMES = {
    "blocks.0.hook_resid_post": "decoder.layers.0:output",
    "blocks.1.hook_resid_mid": "decoder.layers.1:mid",
    PROBS: PROBS,
}
CASES = (
    Case("tp2 sp", tp=2, sp=True, layers=2),
    Case("pp2, learned positions", pp=2, layers=2, rope=False),
    Case("cp2", cp=2, layers=2),
)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, gpt.VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def padded(side: str, filler: int = 0) -> tuple[Tensor, Tensor]:
    """The prompts as a tokenizer pads them, and their mask."""
    tokens = torch.full((len(LENGTHS), max(LENGTHS)), filler)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompts()):
        at = slice(0, len(ids)) if side == "right" else slice(-len(ids), None)
        tokens[row, at], mask[row, at] = ids, 1
    return tokens, mask


def words(texts: list[str]) -> dict[str, list[list[int]]]:
    """A tokenizer of numbers."""
    return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def texts() -> list[str]:
    return [" ".join(map(str, ids.tolist())) for ids in prompts()]


def apart(ours: Tensor, alone: list[Tensor], dims: tuple[int, ...] = (0,)) -> float:
    """How far rows are from tensors of single prompts, and whether zeros follow these.

    Args:
        ours: `[batch, ...]`.
        alone: of each prompt, without the batch dim.
        dims: the dims of `alone` that are positions, of which the first is zero at padding.
    """
    distances = []
    for row, truth in zip(ours, alone, strict=True):
        part = row
        for dim in dims:
            part = part.narrow(dim, 0, truth.shape[dim])
        distances.append(far(part, truth))
        rest = row.narrow(dims[0], truth.shape[dims[0]], row.shape[dims[0]] - truth.shape[dims[0]])
        distances.append(float(rest.abs().sum()))
    return max(distances)


# -- Megatron --------------------------------------------------------------------------------------------


def doubled_first(tensor: Tensor) -> Tensor:
    """Of a residual stream `[s, b, h]`, the first position of the text doubled."""
    return torch.cat([2 * tensor[:1], tensor[1:]])


def alone_truth(case: Case) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Weights, and by name the tensors of each prompt alone in plain Megatron; `edited` are edited logits."""
    chunks = ranks.start(case.single())
    state, model = gpt.randomize(chunks[0]), chunks[0]
    seen: dict[str, list[Tensor]] = {name: [] for name in (*NAMES, "logits", "edited", "shifted")}
    edits: list[bool] = []

    def keep(name: str, tensor: Tensor) -> Tensor:
        seen[name].append((tensor if name == PROBS else tensor.transpose(0, 1))[0].detach().clone())
        return tensor

    def edit(tensor: Tensor) -> Tensor:
        return doubled_first(tensor) if edits else tensor

    for name, site in NAMES.items():
        oracle.install(model, site, partial(keep, name))
    oracle.install(model, "decoder.layers.0:output", edit)
    with torch.no_grad():
        for ids in prompts():
            positions = torch.arange(len(ids))[None]
            seen["logits"].append(model(ids[None], positions, None)[0])
        kept = {name: list(tensors) for name, tensors in seen.items()}
        for ids in prompts():
            positions = torch.arange(len(ids))[None]
            kept["shifted"].append(model(ids[None], positions + 3, None)[0])
        edits.append(True)
        for ids in prompts():
            positions = torch.arange(len(ids))[None]
            kept["edited"].append(model(ids[None], positions, None)[0])
    return state, kept


def ragged_runs(case: Case, state: dict[str, Tensor], truth: dict[str, list[Tensor]]) -> dict[str, float]:
    """How far runs over all prompts together are from each alone, by form of the prompts."""
    flex, out = lens(case, state), {}
    right, left = padded("right", filler=gpt.VOCABULARY + 1), padded("left")
    forms: dict[str, Callable[[], Any]] = {
        "right": lambda: flex.interp.run_with_cache(right[0], list(NAMES), attention_mask=right[1]),
        "left": lambda: flex.interp.run_with_cache(left[0], list(NAMES), attention_mask=left[1].bool()),
        "dict": lambda: flex.interp.run_with_cache(
            {"input_ids": left[0], "attention_mask": left[1]}, list(NAMES), microbatch_size=1
        ),
        "text": lambda: flex.interp.run_with_cache(texts(), list(NAMES)),
    }
    flex.interp.tokenizer = words
    for form, call in forms.items():
        logits, cache = call()
        assert cache.lengths.tolist() == list(LENGTHS)
        assert cache.apply_slice_to_batch_dim([2, 0]).lengths.tolist() == [LENGTHS[2], LENGTHS[0]]
        out[f"{form}: logits"] = apart(logits, truth["logits"])
        for name in NAMES:
            dims = (1, 2) if name == PROBS else (0,)
            out[f"{form}: {name}"] = apart(cache[name], truth[name], dims)

    def double_first(stream: Tensor, hook: Any) -> Tensor:
        stream[:, 0] *= 2
        return stream

    edits = [("blocks.0.hook_resid_post", double_first)]
    logits = flex.interp.run_with_hooks(left[0], edits, attention_mask=left[1])
    out["edited"] = apart(logits, truth["edited"])
    if not case.rope:
        places = (left[1].cumsum(1) + 2).clamp(min=0)
        logits, _ = flex.interp.run_with_cache(left[0], [], attention_mask=left[1], position_ids=places)
        out["position_ids"] = apart(logits, truth["shifted"])
    handle = flex.register_forward_hook(
        mf.HookFunction("decoder.layers.0", select=mf.Select(positions=[0, 1]), keep_as="starts")
    )
    with flex.interp.trace(left[0], attention_mask=left[1]) as trace:
        stream = trace["blocks.0"].output
    out["trace"] = apart(stream.value, truth["blocks.0.hook_resid_post"])
    if flex.is_leader:
        (read,) = flex.output_dict["decoder.layers.0:output.starts"]
        starts = torch.stack([alone[:2] for alone in truth["blocks.0.hook_resid_post"]], 1)
        out["select"] = far(read, starts)
    handle.remove()
    flex.restore()
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_ragged_batch_equals_each_prompt_alone(case: Case) -> None:
    state, truth = truths.once(alone_truth, case)
    assert far(truth["logits"][0], truth["edited"][0]) > 1e-3
    for distances in run(case.world, ragged_runs, case, state, truth):
        assert max(distances.values()) <= BOUND, distances


def refused(case: Case, state: dict[str, Tensor]) -> dict[str, str]:
    """What is said about prompts that cannot be run, by what is wrong."""
    flex = lens(case, state)
    tokens, mask = padded("right")
    rank = torch.distributed.get_rank()
    holes = mask.clone()
    holes[1, 3] = 0
    different = mask.clone()
    different[0, 0] = rank
    calls: dict[str, Callable[..., Any]] = {
        "shape": partial(flex.interp.run_with_cache, tokens, attention_mask=mask[:, 1:]),
        "holes": partial(flex.interp.run_with_cache, tokens, attention_mask=holes),
        "empty": partial(
            flex.interp.run_with_cache, tokens, attention_mask=mask * (mask.sum(1) > 2)[:, None]
        ),
        "values": partial(flex.interp.run_with_cache, tokens, attention_mask=2 * mask),
        "one rank": partial(flex.interp.run_with_cache, tokens, attention_mask=different),
        "text": partial(flex.interp.run_with_hooks, texts()),
        "positions": partial(flex.interp.run_with_cache, tokens, position_ids=mask + 1, attention_mask=mask),
        "keyword": partial(flex.interp.run_with_cache, tokens[:, :8], colour=3),
        "twice": partial(
            flex.interp.run_with_cache, {"input_ids": tokens, "attention_mask": mask}, attention_mask=mask
        ),
        "dict": partial(flex.interp.run_with_cache, {"attention_mask": mask}),
    }
    out = {name: said(call) for name, call in calls.items()}
    with pytest.raises(mf.FlexError), flex.interp.trace(tokens, attention_mask=holes) as trace:
        trace["blocks.0"].output  # noqa: B018  # what is read is not reached
    logits, _ = flex.interp.run_with_cache(tokens, [], attention_mask=mask)  # nothing remains
    assert logits is not None
    flex.restore()
    return out


def test_prompts_that_cannot_be_run_are_refused_on_all_ranks() -> None:
    case = CASES[0]
    first, second = run(case.world, refused, case, truths.once(alone_truth, case)[0])
    assert first == second
    assert_names(first["shape"], "FlexError", "attention_mask", (3, 8), (3, 9))
    assert_names(first["holes"], "FlexError", "attention_mask", "row 1")
    assert_names(first["empty"], "FlexError", "attention_mask", "row 2")
    assert_names(first["values"], "FlexError", "attention_mask", 2)
    assert_names(first["one rank"], "FlexError", "attention_mask")
    assert_names(first["text"], "FlexError", "flex.interp.tokenizer")
    assert_names(first["positions"], "FlexError", "position_ids", "position_embedding_type")
    assert_names(first["keyword"], "FlexError", "GPTModel", "colour")
    assert_names(first["twice"], "FlexError", "attention_mask")
    assert_names(first["dict"], "FlexError", "input_ids")


# -- Hugging Face ----------------------------------------------------------------------------------------

LAYER = "model.layers.1:output"


def hugging_face(folder: str, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options).eval()


def together(folder: str, truth: dict[str, list[Tensor]]) -> dict[str, float]:
    """Ragged runs of a model under `tp_plan`, against each prompt alone."""
    flex, out = mf.FlexModel(hugging_face(folder, tp_plan="auto")), {}
    flex.interp.tokenizer = words
    for side in ("left", "right"):
        tokens, mask = padded(side)
        logits, cache = flex.interp.run_with_cache(tokens, LAYER, attention_mask=mask, use_cache=False)
        out[f"{side}: logits"], out[f"{side}: layer"] = (
            apart(logits, truth["logits"]),
            apart(cache[LAYER], truth["layer"]),
        )
    logits, _ = flex.interp.run_with_cache(texts(), [])
    out["text"] = apart(logits, truth["logits"])
    flex.restore()
    return out


def one_by_one(model: Any, layer: str) -> dict[str, list[Tensor]]:
    """Logits, and a layer's output, of each prompt alone in a plain model."""
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(
        lambda m, args, out: seen.append(out[0].clone())
    )
    with torch.no_grad():
        logits = [model(ids[None]).logits[0] for ids in prompts()]
    handle.remove()
    return {"logits": logits, "layer": seen}


def test_a_ragged_batch_under_tp_plan(tmp_path: Path) -> None:
    assert llama.VOCABULARY >= gpt.VOCABULARY
    folder = hf_llama.save(tmp_path)
    truth = one_by_one(hugging_face(folder), "model.layers.1")
    for distances in proof.run(2, together, folder, truth, alone=True):
        assert max(distances.values()) <= BOUND, distances


def test_a_ragged_batch_of_models_on_one_process() -> None:
    from transformers import BatchEncoding, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)).eval()
    truth = one_by_one(model, "transformer.h.1")
    tokens, mask = padded("left")
    encoded = BatchEncoding({"input_ids": tokens, "attention_mask": mask})
    with mf.attach(model) as flex:
        logits, cache = flex.interp.run_with_cache(encoded, ["transformer.h.1", "transformer.ln_f:input"])
        assert logits is not None
        assert apart(logits, truth["logits"]) <= BOUND
        assert apart(cache["transformer.h.1"], truth["layer"]) <= BOUND
        assert cache.lengths is not None
        assert torch.equal(cache.lengths, mask.sum(1))

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    encoder = BertModel(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)).eval()
    kinds = torch.randint(0, 2, tokens.shape, generator=torch.Generator().manual_seed(0)) * mask
    with torch.no_grad():
        rows = zip(tokens, kinds, mask.bool(), strict=True)
        states = [encoder(t[m][None], token_type_ids=k[m][None])[0][0] for t, k, m in rows]
    with mf.attach(encoder) as flex:
        _, cache = flex.interp.run_with_cache(
            {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds}, "encoder.layer.1"
        )
        assert apart(cache["encoder.layer.1"], states) <= BOUND


def test_a_plain_module_has_no_use_for_a_mask() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 8))
    tokens, mask = padded("left")
    with mf.attach(model) as flex:
        message = said(lambda: flex.interp.run_with_cache(tokens, attention_mask=mask))
        assert_names(message, "FlexError", "Sequential", "attention_mask")
        logits, cache = flex.interp.run_with_cache(tokens, attention_mask=torch.ones_like(mask))
        assert logits is not None
        assert cache.lengths is not None
        assert cache.lengths.tolist() == [9, 9, 9]
