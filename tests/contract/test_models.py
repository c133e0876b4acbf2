"""What the adapter relies on in models beyond the dense GPT: prediction of several tokens, and scans."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from typing import Any

import pytest

from tests.support import gpt, ranks, ssm
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
hybrid = pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")


def prediction() -> dict[str, Any]:
    """One step of a model with two depths, and what passes by."""
    case = Case("mtp", layers=2, microbatches=1, extra={"mtp_num_layers": 2})
    (model,) = ranks.start(case)
    seen: dict[str, Any] = {"calls": []}
    seen["numbers"] = [layer.layer_number for layer in model.mtp.layers]

    def call(name: str) -> Any:
        return lambda *_: seen["calls"].append(name)

    def enters(module: Any, args: Any, kwargs: Any) -> None:
        seen["layer"] = len(args), "hidden_states" in kwargs, "embedding" in kwargs

    model.embedding.register_forward_hook(call("embedding"))
    model.output_layer.register_forward_hook(call("output_layer"))
    model.mtp.register_forward_pre_hook(call("mtp begins"))
    model.mtp.register_forward_hook(
        lambda m, a, out: seen.update(block=tuple(out.shape)) or call("mtp ends")()
    )
    first = model.mtp.layers[0]
    first.register_forward_pre_hook(enters, with_kwargs=True)
    first.register_forward_hook(lambda m, a, out: seen.update(output=(type(out).__name__, out[0].shape[0])))
    first.eh_proj.register_forward_hook(lambda m, a, out: seen.update(eh_proj=tuple(out[0].shape)))
    seen["linear"] = type(first.eh_proj).__name__
    seen["inner"] = [n for n, m in first.named_children() if type(m).__name__ == "TransformerLayer"]
    loss = model.compute_language_model_loss
    model.compute_language_model_loss = lambda *a: seen["calls"].append("loss") or loss(*a)
    gpt.step(case, [model], 0)
    return seen


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
def test_prediction_calls_the_models_own_embedding_and_output_layer() -> None:
    (seen,) = run(1, prediction)
    assert seen["calls"] == [
        "embedding",
        *("mtp begins", "embedding", "embedding", "mtp ends"),
        *("output_layer", "loss") * 3,
    ], "the decoder looks up first; its own logits and loss come last"
    assert seen["numbers"] == [1, 2], "depths count from one, whatever the decoder's number of layers"
    assert seen["inner"] == ["transformer_layer" if VERSION < (0, 17) else "mtp_model_layer"]
    assert seen["layer"] == (0, True, True)
    assert seen["output"] == ("tuple", gpt.SEQUENCE)
    assert seen["linear"] == "ColumnParallelLinear"
    assert seen["eh_proj"] == (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
    assert seen["block"] == (3 * gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN), "depths lie along the sequence"


def scans() -> dict[str, Any]:
    """One step of a model with both kinds of scan, on two tensor parallel ranks."""
    case = Case("MG", tp=2, microbatches=1, pattern="MG", extra=ssm.MAMBA | ssm.DELTA)
    (model,) = ranks.start(case)
    mamba, delta = model.decoder.layers
    mixer, net = mamba.mixer, delta.self_attention
    seen: dict[str, Any] = {
        "mixer": {n: getattr(mixer, n) for n in ("d_inner", "ngroups", "d_state", "nheads")},
        "mamba": [mixer.in_proj.weight.partition_sizes, mixer.conv1d_weight.partition_sizes],
        "delta": [list(net.in_proj_split_sections), net.in_proj_split_names],
        "numbers": [layer.layer_number for layer in model.decoder.layers],
    }
    mixer.norm.register_forward_pre_hook(lambda m, a: seen.update(norm=[tuple(t.shape) for t in a]))

    def noting(name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        seen[name] = tuple(args[0].shape), [None if t is None else tuple(t.shape) for t in out]
        return out

    for name in ("_prepare_input_for_gated_delta_rule", "_compute_g_and_beta", "gated_delta_rule"):
        setattr(net, name, partial(noting, name, getattr(net, name)))
    gpt.step(case, [model], 0)
    return seen


@hybrid
def test_scans_pack_their_projections_rank_by_rank() -> None:
    seen, _ = run(2, scans)
    half = {name: width // 2 for name, width in ssm.MAMBA_PARTS.items()}
    assert seen["mixer"] == {"d_inner": 64, "ngroups": 2, "d_state": 4, "nheads": 8}
    assert seen["mamba"] == [list(half.values()), [half["x"], half["B"], half["C"]]]
    sizes, names = seen["delta"]
    assert names == ["query", "key", "value", "z", "beta", "alpha"]
    assert sizes == [width // 2 for width in ssm.DELTA_PARTS.values()]
    assert seen["numbers"] == [1, 2]


@hybrid
def test_methods_about_the_scans() -> None:
    seen, _ = run(2, scans)
    s, b = gpt.SEQUENCE, gpt.BATCH
    assert seen["norm"] == [(s, b, 32)], "Mamba's norm gets this rank's groups, and no gate"
    packed, parts = seen["_prepare_input_for_gated_delta_rule"]
    assert packed == (b, s, 20)
    assert parts == [(b, s, 2, 4), (b, s, 2, 4), (b, s, 2, 6), (b, s, 2, 6), (b, s, 2), (b, s, 2)]
    assert seen["_compute_g_and_beta"][1] == [(b, s, 2), (b, s, 2)]
    assert seen["gated_delta_rule"] == ((b, s, 2, 4), [(b, s, 2, 6), None])


def bert() -> dict[str, Any]:
    """One step of a BERT, and what passes by."""
    case = Case("bert", layers=1, microbatches=1, bert=True, gated=False, rms=False, rope=False, bias=True)
    (model,) = ranks.start(case)
    seen: dict[str, Any] = {"children": [n for n, _ in model.named_children()]}
    model.register_forward_hook(lambda m, a, out: seen.update(output=[tuple(t.shape) for t in out]))
    model.pooler.register_forward_hook(lambda m, a, out: seen.update(pooler=tuple(out.shape)))
    model.lm_head.register_forward_hook(lambda m, a, out: seen.update(lm_head=tuple(out.shape)))
    gpt.step(case, [model], 0)
    return seen


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
def test_parts_of_bert() -> None:
    (seen,) = run(1, bert)
    parts = {"embedding", "encoder", "lm_head", "output_layer", "pooler", "binary_head"}
    assert parts <= set(seen["children"])
    assert seen["lm_head"] == (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
    assert seen["pooler"] == (gpt.BATCH, gpt.HIDDEN)
    assert seen["output"] == [(gpt.BATCH, gpt.SEQUENCE), (gpt.BATCH, 2)]
