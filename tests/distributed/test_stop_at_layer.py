"""Runs that stop at a layer: what they return and capture, and which layers run, on every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import BOUND
from tests.distributed.test_lens import far, lens, tokens, truth_of
from tests.distributed.test_lens_use import said
from tests.support import gpt, hf_llama, llama, proof, ranks, ssm, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

LAYERS = 4
ONE = Case("one", layers=LAYERS)
CASES = (
    Case("tp2 sp", tp=2, sp=True, layers=LAYERS),
    Case("pp2", pp=2, layers=LAYERS),
    Case("pp2 vpp2", pp=2, vpp=2, layers=LAYERS),
)
STOPS = {0: 0, 1: 1, 2: 2, -1: 3, 4: 4}  # the first layer that does not run
HEAD = 100

# -- Megatron --------------------------------------------------------------------------------------------


def layers_of(chunks: list[Any]) -> dict[nn.Module, int]:
    """The modules to count on this rank: parts of layers, with the layer's number, and the head."""
    out: dict[nn.Module, int] = {}
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            out[layer.self_attention] = out[layer.mlp] = layer.layer_number - 1
        if chunk.post_process:
            out[chunk.output_layer] = out[chunk.decoder.final_layernorm] = HEAD
    return out


@contextmanager
def counted(modules: dict[nn.Module, int]) -> Iterator[set[nn.Module]]:
    """Those of some modules that run in the block."""
    ran: set[nn.Module] = set()
    handles = [m.register_forward_pre_hook(lambda module, _: ran.add(module)) for m in modules]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def stopped(case: Case, state: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Any]:
    """Distances from one process, and what else runs that stop do on this rank, by name."""
    flex, out = lens(case, state), {}
    modules = layers_of(list(flex.chunks))
    late: list[int] = []

    def note(module: Any, inputs: Tensor, save_ctx: Any, trained: Any) -> Tensor:
        late.append(1)
        return inputs

    handle = flex.register_forward_hook(
        mf.HookFunction(f"decoder.layers.{LAYERS - 1}", editing_function=note)
    )
    for stop, first in STOPS.items():
        late.clear()
        with counted(modules) as ran:
            result, cache = flex.interp.run_with_cache(tokens(), stop_at_layer=stop)
        at_stop = (
            f"blocks.{first}.hook_resid_pre" if first < LAYERS else f"blocks.{LAYERS - 1}.hook_resid_post"
        )
        out[f"result {stop}"] = far(result, truth[at_stop])
        out[f"cache {stop}"] = max(far(cache[name], truth[name]) for name in cache)
        out[f"layers {stop}"] = ran == {m for m, layer in modules.items() if layer < first}
        out[f"hook {stop}"] = not late or first == LAYERS
        out[f"names {stop}"] = list(cache)
    handle.remove()
    edits = [("blocks.1.hook_mlp_out", lambda out, hook: 0 * out)]
    result = flex.interp.run_with_hooks(tokens(), edits, stop_at_layer=2)
    out["edited"] = far(result, truth["blocks.1.hook_resid_mid"])
    with flex.interp.trace(tokens(), stop_at_layer=2, microbatch_size=1) as trace:
        stream = trace["blocks.1"].output
    out["trace"] = far(stream.value, truth["blocks.1.hook_resid_post"])
    out["errors"] = {name: said(call) for name, call in mistakes(flex).items()}
    logits, _ = flex.interp.run_with_cache(tokens(), [])
    out["afterwards"] = far(logits, truth["logits"])
    flex.restore()
    return out


def mistakes(flex: mf.FlexModel) -> dict[str, Callable[[], Any]]:
    def broken(tensor: Tensor, hook: Any) -> Tensor:
        raise KeyError("mine")

    cached, hooked = (
        partial(function, tokens(), stop_at_layer=2)
        for function in (flex.interp.run_with_cache, flex.interp.run_with_hooks)
    )
    return {
        "name": partial(cached, names_filter="blocks.2.attn.hook_z"),
        "site": partial(cached, names_filter=["hook_embed", "output_layer"]),
        "edit": partial(hooked, fwd_hooks=[("blocks.3.hook_mlp_out", broken)]),
        "raises": partial(hooked, fwd_hooks=[("blocks.0.hook_mlp_out", broken)]),
        "layer": partial(flex.interp.run_with_cache, tokens(), stop_at_layer=LAYERS + 1),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layers_from_the_stop_on_do_not_run(case: Case) -> None:
    state, truth = truths.once(truth_of, ONE)
    answers = run(case.world, stopped, case, state, truth)
    parts = [name for name in truth if name.startswith("blocks.") and not name.endswith("hook_result")]
    for answer in answers:
        errors = answer.pop("errors")
        for stop, first in STOPS.items():
            reached = {"hook_embed", *(name for name in parts if int(name.split(".")[1]) < first)}
            assert set(answer.pop(f"names {stop}")) == reached
        for name, value in answer.items():
            assert value is True if isinstance(value, bool) else value <= BOUND, name
        assert_names(errors["name"], "SiteError", "blocks.2.attn.hook_z", "layer 2")
        assert_names(errors["site"], "SiteError", "output_layer:output", "layer 2")
        assert_names(errors["edit"], "SiteError", "blocks.3.hook_mlp_out", "layer 2")
        assert_names(errors["raises"], "HookError", "'mine'")
        assert_names(errors["layer"], "FlexError", "stop_at_layer=5", -4, 4)


HYBRID = Case("M*-M pp2", pp=2, pattern="M*-M", extra=ssm.MAMBA)


def hybrid_truth(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights, and what leaves each layer of a hybrid model on one process."""
    chunks = ranks.start(case.single())
    state, seen = gpt.randomize(chunks[0]), []
    for layer in chunks[0].decoder.layers:
        layer.register_forward_hook(
            lambda m, args, out: seen.append(
                (out[0] if isinstance(out, tuple) else out).transpose(0, 1).clone()
            )
        )
    ids = tokens()
    with torch.no_grad():
        chunks[0](ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    return state, seen


def stopped_hybrid(case: Case, state: dict[str, Tensor], truth: list[Tensor]) -> list[tuple[float, bool]]:
    """By layer: how far the stream that leaves it is, and whether the layers until there ran on this rank."""
    flex, out = lens(case, state), []
    modules: dict[nn.Module, int] = {
        next(layer.children()): layer.layer_number - 1
        for chunk in flex.chunks
        for layer in chunk.decoder.layers
    }
    for layer, wanted in enumerate(truth):
        with counted({inner: 0 for m in modules for inner in m.modules()}) as ran:
            stream = flex.interp.run_with_hooks(tokens(), stop_at_layer=layer + 1)
        layers = {number for module, number in modules.items() if ran & set(module.modules())}
        out.append((far(stream, wanted), layers <= set(range(layer + 1))))
    flex.restore()
    return out


def test_a_hybrid_model_stops() -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    state, truth = truths.once(hybrid_truth, HYBRID)
    for answer in run(HYBRID.world, stopped_hybrid, HYBRID, state, truth):
        assert len(answer) == 4
        for distance, only in answer:
            assert distance <= BOUND
            assert only


# -- Hugging Face ----------------------------------------------------------------------------------------


def hugging_face(folder: str, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options).eval()


def stopped_under_plan(folder: str, truth: Tensor) -> tuple[float, bool, float, str]:
    """Of runs that stop after one layer: how far they are, whether others ran, and how far logits are."""
    model = hugging_face(folder, tp_plan="auto")
    later = {model.model.layers[1].self_attn: 1, model.lm_head: HEAD, model.model.norm: HEAD}
    ids = llama.batch(0)[0]
    with torch.no_grad():
        plain = model(ids).logits
    flex = mf.FlexModel(model)
    with counted(later) as ran:
        stream, cache = flex.interp.run_with_cache(ids, stop_at_layer=1)
    assert {"hook_embed", "blocks.0.hook_mlp_out"} <= set(cache)
    assert not [name for name in cache if name.startswith(("blocks.1", "ln_final", "unembed"))]
    with flex.interp.stop_at_layer(1), flex.interp.trace() as trace, counted(later) as also, torch.no_grad():
        value = trace["model.layers.0"].output
        model(ids)
    message = said(partial(flex.interp.run_with_cache, ids, ["hook_embed", "model.norm"], stop_at_layer=1))
    logits, _ = flex.interp.run_with_cache(ids, [])
    flex.restore()
    return max(far(stream, truth), far(value.value, truth)), bool(ran or also), far(logits, plain), message


def test_a_model_under_tp_plan_stops(tmp_path: Path) -> None:
    folder = hf_llama.save(tmp_path)
    seen: list[Tensor] = []
    model = hugging_face(folder)
    model.model.layers[0].register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        model(llama.batch(0)[0])
    for distance, ran, after, message in proof.run(2, stopped_under_plan, folder, seen[0], alone=True):
        assert distance <= BOUND
        assert not ran
        assert after == 0
        assert_names(message, "SiteError", "model.norm:output", "layer 1")


def test_layers_that_return_tuples_and_models_without_a_stack() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, stream: Tensor, scale: int) -> tuple[Tensor, int]:
            return stream + self.linear(stream), scale + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(8, 5)

        def forward(self, stream: Tensor) -> Tensor:
            scale = 1
            for layer in self.layers:
                stream, scale = layer(stream, scale)
            return self.head(stream)

    torch.manual_seed(0)
    model, stream = Model(), torch.randn(2, 4, 8)
    with torch.no_grad():
        wanted = model.layers[0](stream, 1)[0]
    with mf.attach(model) as flex, counted(dict.fromkeys(model.modules(), 0)) as ran:
        result, _ = flex.interp.run_with_cache(stream, stop_at_layer=1)
        assert result is not None
        assert torch.equal(result, wanted)
        assert ran == {model, model.layers[0], model.layers[0].linear}
        assert_names(said(partial(flex.interp.run_with_cache, stream, stop_at_layer=0)), "layers.0:input")
    with mf.attach(nn.Sequential(nn.Linear(8, 8))) as flex:
        assert_names(
            said(partial(flex.interp.run_with_cache, stream, stop_at_layer=1)), "FlexError", "Sequential"
        )
