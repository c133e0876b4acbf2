"""What is really there, against an estimate: every tensor that passes on every rank of a real run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support import gpt, moe, ranks, ssm
from tests.support.gpt import Case

PARALLEL = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
}
NAMED = {  # of a TransformerConfig, and what the flag is called
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


def config(case: Case) -> dict[str, Any]:
    """A case as a person would write it down for Megatron's launcher."""
    out: dict[str, Any] = {
        "num_layers": None if case.pattern or case.hybrid else case.layers,
        "hidden_size": gpt.HIDDEN,
        "ffn_hidden_size": gpt.FFN,
        "num_attention_heads": gpt.HEADS,
        "group_query_attention": True,
        "num_query_groups": case.groups,
        "kv_channels": gpt.HIDDEN // gpt.HEADS,
        "seq_length": gpt.SEQUENCE,
        "micro_batch_size": gpt.BATCH,
        "global_batch_size": gpt.BATCH * case.microbatches * case.dp,
        "padded_vocab_size": gpt.VOCABULARY,
        "normalization": "RMSNorm" if case.rms else "LayerNorm",
        "swiglu": case.gated,
        "disable_bias_linear": not case.bias,
        "qk_layernorm": case.qk_norm,
        "position_embedding_type": "rope" if case.rope else "learned_absolute",
        "untie_embeddings_and_output_weights": not case.tied,
        "sequence_parallel": case.sp,
        "transformer_impl": "transformer_engine" if case.te else "local",
    }
    out.update({flag: getattr(case, name) for name, flag in PARALLEL.items() if getattr(case, name)})
    if case.hybrid:
        out["hybrid_layer_pattern"] = "|".join(["*-" * (case.layers // case.pp)] * case.pp)
    if case.pattern:
        out["hybrid_layer_pattern"] = case.pattern
    if case.experts:
        settings = moe.settings(case)
        out["num_experts"] = settings.pop("num_moe_experts")
        out.update(settings, moe_grouped_gemm=case.grouped)
    return {**out, **case.extra, **{NAMED.get(n, n): v for n, v in case.split.items()}}


def told(case: Case) -> dict[str, Any]:
    """Likewise, with the spec of a hybrid stack of Megatron's local classes, which the cases have."""
    out = config(case)
    if case.hybrid or case.pattern:
        globals()["STACK"] = ssm.stack(case, gpt._hybrid_spec) if case.pattern else gpt._hybrid_spec()
        out["spec"] = [__name__, "STACK"]
    return out


def present(case: Case) -> dict[str, Any]:
    """On one rank: each site, and the shape, bytes and count of what passed there in one step."""
    from megatron_flex.adapters import detect
    from megatron_flex.sites import TapCallbacks

    chunks = ranks.start(case)
    adapter = detect(chunks)
    seen: dict[str, list[tuple[tuple[int, ...], int]]] = {}

    def listen(name: str) -> Any:
        def record(local: Tensor, layout: Any = None, route: Any = None) -> Tensor:
            if torch.is_grad_enabled():
                seen.setdefault(name, []).append((tuple(local.shape), local.element_size()))
            return local

        return record

    sites = adapter.sites()
    undo = [s.tap.install(TapCallbacks(listen(s.name))) for s in sites if not s.hidden and s.tap is not None]
    gpt.step(case, chunks, adapter.mesh["dp"].coord)
    for one in undo:
        one()
    return {
        "coords": dict(adapter.mesh.coords),
        "sizes": dict(adapter.mesh.sizes),
        "sites": {s.name: (_layout(s), s.stage, s.chunk, bool(s.hidden)) for s in sites},
        "seen": seen,
        "parameters": {
            p.name: (
                p.layout,
                p.stage,
                p.chunk,
                p.copy_of,
                p.shape,
                None if p.parameter is None else p.parameter.nbytes,
            )
            for p in adapter.parameters()
        },
    }


def _layout(site: Any) -> Any:
    """Of what a rank holds: of experts' rows that over the ranks of one expert."""
    from megatron_flex.adapters.megatron_core.moe_layers import rows_of_experts

    routed = rows_of_experts(site)
    return site.layout if routed is None else routed.layout


def written(answers: list[dict[str, Any]], name: str, layout: Any) -> int:
    """The bytes of a site over all ranks, each different shard once in each data parallel replica."""
    shards: dict[Any, int] = {}
    for a in answers:
        if name not in a["seen"]:
            continue
        experts = ".experts" in name and ":indices" not in name
        replica = (a["coords"]["ep"], a["coords"]["edp"]) if experts else (a["coords"]["dp"],)
        copies = {c.axis: c.copies for d in layout.dims for c in d.cuts}
        place = tuple(a["coords"][axis] // copies.get(axis, 1) for axis in layout.axes)
        shards[replica, place] = sum(_bytes(shape, size) for shape, size in a["seen"][name])
    return sum(shards.values())


def _bytes(shape: tuple[int, ...], size: int) -> int:
    for n in shape:
        size *= n
    return size
