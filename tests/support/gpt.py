"""Small Megatron models for tests: one full set of weights, scattered to whatever layout a case wants."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import bert, context, families, latent, lora, moe, mtp, packed, ssm, te

SEQUENCE, BATCH, VOCABULARY, HIDDEN, FFN, HEADS, GROUPS = 16, 2, 64, 32, 48, 4, 2
WEIGHTS_SEED, DATA_SEED = 7, 3


@dataclass(frozen=True)
class Case:
    """A model and the way it is spread.

    `microbatches` is for each data parallel rank, of which `joint` may be put together; `extra` goes to the
    config, `split` too: how the pipeline divides the layers, of which one process knows nothing.
    """

    name: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    microbatches: int = 2
    joint: int = 1  # so many data parallel ranks' samples in one batch
    hybrid: bool = False
    gated: bool = True
    rms: bool = True
    rope: bool = True
    bias: bool = False
    tied: bool = False
    qk_norm: bool = False
    groups: int = GROUPS
    recompute: tuple[str, ...] = ()
    layers: int = 4
    experts: int = 0
    dispatcher: str = "alltoall"
    shared_experts: bool = False
    grouped: bool = False  # experts: Transformer Engine's grouped linears, in its spec
    pattern: str = ""  # of a HybridModel's layers, as Megatron writes it
    mla: str = ""  # multi-latent attention as "upstream" has it, or "mended"
    q_rank: int | None = None
    bert: bool = False
    family: str = ""  # one of `families`
    vocabulary: int = VOCABULARY
    te: bool = False  # layers of Transformer Engine's spec, as in `te`
    adapters: str = ""  # around the linears, in one of the forms of `lora`
    device: str = "cpu"
    packed: str = ""  # sequences packed in one row, and what core attention returns of them
    padded: bool = False  # each packed sequence, so that up to four context parallel ranks can cut it
    extra: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def topology(self) -> str:
        """What ranks of a pool are divided into, and what they stand in for."""
        sizes = {
            n: getattr(self, n) for n in ("tp", "pp", "vpp", "cp", "ep", "etp") if (getattr(self, n) or 1) > 1
        }
        kinds = {"te": self.te, "scans": bool(self.pattern)}
        words = [*(f"{n}{v}" for n, v in sizes.items()), *(n for n, on in kinds.items() if on)]
        return " ".join(["megatron", *words])

    def require(self) -> None:
        """Skip the test where something that the case needs cannot be had."""
        if self.te:
            te.require()

    @property
    def model(self) -> str:
        """What the coverage table files the case under."""
        kinds = (
            (bool(self.adapters), "GPT with LoRA around its linears"),
            (
                self.grouped,
                "GPT with grouped experts of Transformer Engine's layers (its Python; no kernels)",
            ),
            (self.te, "GPT of Transformer Engine's layers (its Python; no kernels)"),
            (bool(self.experts) and not self.pattern, "GPT with experts"),
            ("mtp_num_layers" in self.extra or "/" in self.pattern, "Multi-token prediction"),
            (bool(self.pattern) or self.hybrid, "HybridModel"),
            (self.mla == "mended", "GPT with multi-latent attention, upstream's gradient patched"),
            (self.mla == "upstream", "GPT with multi-latent attention, as upstream has it"),
            (self.bert, "BERT"),
            (bool(self.family), families.TITLES.get(self.family, "")),
        )
        return next((name for is_it, name in kinds if is_it), "GPT")

    def single(self) -> Case:
        """The same model and data on one process."""
        return replace(
            self,
            name="one process",
            tp=1,
            pp=1,
            vpp=None,
            dp=1,
            cp=1,
            ep=1,
            etp=1,
            sp=False,
            microbatches=self.microbatches * self.dp,
            recompute=(),
            pattern=self.pattern.replace("|", ""),
            split={},
        )


def runtime(case: Case) -> None:
    """What Megatron needs where there is no GPU."""
    if case.device == "cpu":
        from megatron_flex import cpu

        cpu.enable()


def initialize(case: Case) -> None:
    """Megatron's groups and random states for a case; groups that this rank has are used again."""
    if case.te:
        te.stand_in()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
    }
    if parallel_state.model_parallel_is_initialized() and _sizes.get(parallel_state) != sizes:
        forget_groups()
    if not parallel_state.model_parallel_is_initialized():
        known = inspect.signature(parallel_state.initialize_model_parallel).parameters
        more = {"create_gloo_process_groups": False} if "create_gloo_process_groups" in known else {}
        parallel_state.initialize_model_parallel(**sizes, **more)
        _sizes.clear()
        _sizes[parallel_state] = sizes
    if case.vpp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    mtp.forget_losses()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


_sizes: dict[Any, dict[str, Any]] = {}  # what Megatron's groups were made for, by its module


def forget_groups() -> None:
    """Close Megatron's groups, as `destroy_model_parallel` alone does not."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    held = [v for v in vars(parallel_state).values() if isinstance(v, dist.ProcessGroup)]
    parallel_state.destroy_model_parallel()
    for group in {id(g): g for g in held}.values():
        if group in dist.distributed_c10d._world.pg_map and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def spread(case: Case) -> dict[str, Any]:
    """What Megatron's configuration says of the mesh of a case, and of running on a CPU."""
    return {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "sequence_parallel": case.sp,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": not case.vpp,
        "overlap_p2p_comm": bool(case.vpp),
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "attention_softmax_in_fp32": True,
    }


def config(case: Case) -> Any:
    """Megatron's TransformerConfig."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if case.mla else TransformerConfig
    known = set(inspect.signature(kind).parameters)
    wanted: dict[str, Any] = {
        "num_layers": len(ssm.layers_of(case.pattern)) or case.layers * (2 if case.hybrid else 1),
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "num_query_groups": case.groups,
        "kv_channels": HIDDEN // HEADS,
        "gated_linear_unit": case.gated,
        "activation_func": torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        "normalization": "RMSNorm" if case.rms else "LayerNorm",
        "add_bias_linear": case.bias,
        "qk_layernorm": case.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **spread(case),
    }
    wanted.update(moe.settings(case) if case.experts else {})
    if "full" in case.recompute:
        wanted.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif case.recompute:
        wanted.update(recompute_granularity="selective", recompute_modules=list(case.recompute))
    wanted.update(latent.config(case.q_rank) if case.mla else {})
    wanted.update({**case.extra, **case.split})
    return kind(**{k: v for k, v in wanted.items() if k in known})


def build(case: Case) -> list[nn.Module]:
    """The chunks of this rank, with weights of Megatron's own initialisation."""
    from megatron.core import parallel_state

    if case.mla == "mended":
        latent.mend()

    out = []
    for stage in range(case.vpp or 1):
        if case.vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunk = _chunk(case, stage if case.vpp else None).to(case.device)
        halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
        half = next((dtype for name, dtype in halves.items() if case.extra.get(name)), None)
        out.append(chunk if half is None else chunk.to(half))  # as Float16Module does it
    return out


def _ends(stage: int | None) -> tuple[bool, bool]:
    from megatron.core import parallel_state

    result = []
    for ask in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage):
        known = inspect.signature(ask).parameters
        kwargs = {"ignore_virtual": False, "vp_stage": stage}
        result.append(ask(**{k: v for k, v in kwargs.items() if k in known}))
    return result[0], result[1]


def _chunk(case: Case, stage: int | None) -> nn.Module:
    first, last = _ends(stage)
    common: dict[str, Any] = {
        "config": config(case),
        "vocab_size": case.vocabulary,
        "max_sequence_length": packed.length(case.padded) if case.packed else SEQUENCE,
        "pre_process": first,
        "post_process": last,
        "parallel_output": True,
        "share_embeddings_and_output_weights": case.tied,
        "position_embedding_type": "rope" if case.rope else "learned_absolute",
    }
    if case.bert:
        return bert.model(common, stage)
    if case.pattern:
        return ssm.model(case, common, stage, partial(_hybrid_spec, case.te))
    if case.hybrid:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        per_stage = ["*-" * (case.layers // case.pp)] * case.pp
        return HybridModel(
            hybrid_stack_spec=_hybrid_spec(case.te), hybrid_layer_pattern="|".join(per_stage), **common
        )
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    make = getattr(gpt_layer_specs, f"get_gpt_layer_{'with_transformer_engine' if case.te else 'local'}_spec")
    known = inspect.signature(make).parameters
    wanted: dict[str, Any] = {
        "qk_layernorm": case.qk_norm,
        "normalization": "RMSNorm" if case.rms else "LayerNorm",
    }
    wanted["multi_latent_attention"] = bool(case.mla)
    if case.experts:
        wanted.update(num_experts=case.experts, moe_grouped_gemm=case.grouped)
    wanted["use_te_op_fuser"] = case.extra.get(te.OP_FUSER, False)
    spec = make(**{k: v for k, v in wanted.items() if k in known})
    if case.mla and not case.te:
        spec.submodules.self_attention.submodules.core_attention = latent.core_attention()
    if case.packed:
        spec = packed.plug_in(spec, case.packed)
    elif case.cp > 1:
        spec = context.plug_in(spec)
    if "vp_stage" in inspect.signature(GPTModel).parameters:
        common["vp_stage"] = stage
    common.update(mtp.arguments(common["config"], spec, stage))
    if case.family:
        return families.model(case, common, spec)
    model = GPTModel(transformer_layer_spec=spec, **common)
    if case.adapters:
        lora.adapt(model, case.adapters, common["config"])
    return model


def _hybrid_spec(transformer_engine: bool = False) -> Any:
    """A stack spec of Megatron's own local classes; the ready-made one names Transformer Engine's."""
    if transformer_engine:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    from megatron_flex.cpu import local_hybrid_stack_spec

    return local_hybrid_stack_spec()


# -- weights -----------------------------------------------------------------------------------------


def global_names(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with layers numbered over the whole model; written here apart from the adapter's way."""
    for name, parameter in root.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer = root.get_submodule(".".join(parts[: at + 1]))
            parts[at] = str(layer.layer_number - 1)
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
            elif "experts" in parts:
                kind, number = parts[-1].rstrip("0123456789"), parts[-1].lstrip("abcdefghijklmnopqrstuvwxyz")
                parts[-1] = f"{kind}{layer.mlp.local_expert_indices[int(number)]}"
        yield ".".join(parts), parameter


def randomize(root: nn.Module) -> dict[str, Tensor]:
    """Give every parameter values that hide nothing (norms and biases too) and return them by global name."""
    generator = torch.Generator().manual_seed(WEIGHTS_SEED)
    state = {}
    for name, parameter in sorted(global_names(root)):
        noise = torch.randn(parameter.shape, generator=generator)
        norm = "norm" in name or "ln_p" in name  # a vision tower's ln_pre and ln_post
        scale, offset = (0.2, 1.0) if norm and name.endswith("weight") else (0.15, 0.0)
        parameter.data.copy_(offset + scale * noise)
        state[name] = parameter.detach().clone()
    return state


def load(chunks: list[nn.Module], state: dict[str, Tensor]) -> None:
    """Scatter a one-process state to this rank's chunks."""
    from megatron_flex.adapters import detect
    from megatron_flex.layout import extract

    adapter = detect(chunks)
    sites = {p.name: p for p in adapter.parameters()}
    mesh = adapter.mesh
    for root in chunks:
        for name, parameter in global_names(root):
            value = state[sites[name].copy_of or name]
            shard = extract(sites[name].layout, value, mesh.coords, mesh.sizes)
            parameter.data.copy_(shard)


# -- data and schedule -------------------------------------------------------------------------------


def data(count: int) -> list[dict[str, Tensor]]:
    """`count` microbatches of tokens, the same everywhere."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    out = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        out.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return out


def forward_step(
    iterator: Iterator[dict[str, Tensor]], model: nn.Module, case: Case | None = None
) -> tuple[Tensor, Any]:
    """What a pretrain script hands to Megatron's schedule."""
    batch = next(iterator)
    here = context.here(SEQUENCE)
    samples = len(batch["tokens"])
    positions = here.expand(samples, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    if hasattr(model, "bert_extended_attention_mask"):
        output = bert.call(model, batch)
    elif case is not None and case.family:
        output = families.call(case, model, batch, positions, mask)
    elif "ends" in batch:
        output, samples = packed.call(model, batch), BATCH
        if output.dim() == 2:  # the loss of each token, on the last stage
            real = packed.real(batch)[None, packed.here(batch["room"])]
            output = output * real.to(output.device)
    else:
        tokens, labels = batch["tokens"][:, here], batch["labels"][:, here]
        device = next(model.parameters()).device
        tokens, positions, mask, labels = (t.to(device) for t in (tokens, positions, mask, labels))
        output = model(tokens, positions, mask, labels=labels)

    def loss_function(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.sum() / (samples * SEQUENCE)  # of a context parallel rank: its share of the mean
        return loss, {"loss": context.total(loss.detach().clone())}

    return output, loss_function


def _length(case: Case) -> int:
    """Of the sequences that stages send to each other."""
    if case.family == families.LLAVA:
        return families.LLAVA_SEQUENCE
    return packed.length(case.padded) if case.packed else SEQUENCE


def step(
    case: Case, chunks: list[nn.Module], rank: int, forward_only: bool = False, interleaved: bool = False
) -> list[float]:
    """One run of Megatron's own schedule over a case's data; returns the losses on the last stage.

    Replicas have blocks of microbatches, or take turns (`interleaved`, as with Megatron's sampler).
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
    here = slice(rank, None, case.dp) if interleaved else slice(rank * case.microbatches, None)
    mine = data(case.microbatches * case.dp)[here][: case.microbatches]
    if case.joint > 1:
        every = data(case.microbatches * case.joint)
        mine = [
            {k: torch.cat([b[k] for b in every[m :: case.microbatches]]) for k in every[m]}
            for m in range(case.microbatches)
        ]
    if case.packed:
        mine = [packed.pack(batch, case.padded) for batch in mine]
    context = torch.no_grad() if forward_only else contextlib.nullcontext()
    with context:
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, case=case) if case.family else forward_step,
            data_iterator=[iter(mine) for _ in chunks] if case.vpp else iter(mine),
            model=chunks if case.vpp else chunks[0],
            num_microbatches=case.microbatches,
            seq_length=_length(case),
            micro_batch_size=1 if case.packed else BATCH * case.joint,
            forward_only=forward_only,
        )
    if not forward_only:
        mtp.sum_embedding_gradients(chunks)
    return [float(item["loss"]) for item in losses]
