"""Meta's LLaMA 2 as Meta wrote it, on fairscale's layers: several ranks against one, each by that code.

`scripts/meta_llama PATH` runs this file with a copy of the model. Its forward pass has no gradients
(`torch.inference_mode`) and writes keys and values into a cache in place. What a person adds for gradients is
in docs/contributing/design.md, from where the test takes it.
"""

from __future__ import annotations

import importlib.util
import os
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support.pages import ROOT, mine
from tests.support.pool import run

SOURCE = os.environ.get("FLEX_META_LLAMA", "")
if not SOURCE:  # Meta's license does not let this project keep a copy
    pytest.skip("Meta's LLaMA is not on this machine: run scripts/meta_llama PATH", allow_module_level=True)
pytest.importorskip("fairscale")

BOUND = 1e-5
SAMPLES, TOKENS, WIDTH, VOCABULARY = 2, 8, 32, 64
SETTINGS = {
    "dim": WIDTH,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 4,  # one on each rank, of four
    "vocab_size": VOCABULARY,
    "multiple_of": 16,
    "max_batch_size": SAMPLES,
    "max_seq_len": 2 * TOKENS,
}
LAYER = "layers.1"
SITES = (
    "tok_embeddings:output",
    *(f"{LAYER}.attention.{p}" for p in ("wq:output", "wk:output", "wv:output", "wo:input", "wo:output")),
    *(f"{LAYER}.feed_forward.{p}" for p in ("w1:output", "w3:output", "w2:input", "w2:output")),
    f"{LAYER}.attention_norm:output",
    f"{LAYER}:output",
    "norm:output",
    "output:output",
)
Edits = tuple[tuple[str, str], ...]


def build(size: int) -> Any:
    """The model of this rank, with the same full weights whatever the number of ranks."""
    from fairscale.nn.model_parallel import initialize, layers

    from tests.support.llama_fairscale import initialize as make_groups

    make_groups(size)
    spec = importlib.util.spec_from_file_location("meta_llama_model", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(Tensor, "cuda", lambda tensor: tensor)  # of the caches, and there is no GPU
        spec.loader.exec_module(source)
        model = source.Transformer(source.ModelArgs(**SETTINGS))
    draw, rank = torch.Generator().manual_seed(6), initialize.get_model_parallel_rank()
    dims = {layers.ColumnParallelLinear: 0, layers.RowParallelLinear: 1, layers.ParallelEmbedding: 1}
    for _, module in sorted(model.named_modules()):
        for parameter in module.parameters(recurse=False):
            dim, shape = dims.get(type(module)), list(parameter.shape)
            if dim is None:
                parameter.data = 1 + torch.randn(shape, generator=draw) / 8
                continue
            shape[dim] *= size
            full = torch.randn(shape, generator=draw) / WIDTH**0.5
            parameter.data = full.chunk(size, dim)[rank].clone()
    return model


def mix(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """What needs the full tensor."""
    return inputs - inputs.mean(-1, keepdim=True) + 0.2 * inputs.flip(-1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def some_tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(9))


def trained(size: int, edits: Edits, lines: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and gradients of the second of two steps, and the gradients of parameters."""
    model, tokens = build(size), some_tokens()
    hooks = [mf.HookFunction(site, hook_type=kind) for site in SITES for kind in ("forward", "tensor")]
    hooks += [mf.HookFunction(site, hook_type=kind, editing_function=mix, save=False) for site, kind in edits]
    with mf.attach(model, hooks) as flex:
        for _ in range(2):
            flex.output_dict.clear()
            model.zero_grad()
            exec(lines, {"model": model, "types": types})
            loss_of(model(tokens, 0), tokens).backward()
        read = {name: found[0].detach() for name, found in flex.output_dict.items()}
        full = dict(flex.named_full_parameters(gradients=True, everywhere=True, reduced=False))
    return read, full


EDITS: dict[str, Edits] = {
    "reads": (),
    "keys": ((f"{LAYER}.attention.wk:output", "forward"),),
    "gradients of queries and values": (
        (f"{LAYER}.attention.wq:output", "tensor"),
        (f"{LAYER}.attention.wv:output", "tensor"),
    ),
    "MLP and stream": ((f"{LAYER}.feed_forward.w2:input", "forward"), (f"{LAYER}:output", "tensor")),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_a_step_is_that_of_one_rank(size: int, edits: Edits) -> None:
    (lines,) = mine(ROOT / "docs" / "contributing" / "design.md")
    ((want, gradients),) = run(1, trained, 1, edits, lines)
    assert want.keys() >= {*SITES, *(f"{site}.grad" for site in SITES)}
    assert len(gradients) == 3 * 9 + 3
    ranks = run(size, trained, size, edits, lines)
    read = ranks[0][0]
    assert read.keys() == want.keys()
    for name, tensor in want.items():
        assert read[name].shape == tensor.shape, name
        assert relative(read[name], tensor) < BOUND, name
    for _, found in ranks:
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative(found[name], gradient) < BOUND, name


def generated(size: int) -> dict[str, list[Tensor]]:
    """What is read while tokens are generated one after the other, by the forward pass as it is."""
    model, tokens = build(size), some_tokens()
    edit = mf.HookFunction(f"{LAYER}.attention.wv:output", editing_function=mix, save=False)
    with mf.attach(model, [*(mf.HookFunction(site) for site in SITES), edit]) as flex:
        past = TOKENS // 2
        logits = model(tokens[:, :past], 0)
        for _ in range(3):
            following = logits[:, -1:].argmax(-1)
            logits = model(following, past)
            past += 1
        return {name: [t.clone() for t in found] for name, found in flex.output_dict.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_generation_is_that_of_one_rank(size: int) -> None:
    (want,) = run(1, generated, 1)
    read = run(size, generated, size)[0]
    assert read.keys() == want.keys()
    for name, tensors in want.items():
        assert len(tensors) == len(read[name]) == 4, name
        for got, tensor in zip(read[name], tensors, strict=True):
            assert relative(got, tensor) < BOUND, name
