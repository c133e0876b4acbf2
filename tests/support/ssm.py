"""Hybrid models for the tests: Megatron's layers without attention, and what stands in for their kernels.

`mamba_ssm` and `fla` are CUDA libraries. Megatron's mixers, with their projections, packing and tensor
parallel split, run for real; only the functions that they call out of those libraries are written here,
plainly in torch. The gated delta rule itself is Megatron's own torch version (`deterministic_mode`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import latent

MAMBA = {"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2}
DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
}
# In the whole, as the sizes above make them with hidden size 32 and Mamba's expansion of 2.
MAMBA_PARTS = {"z": 64, "x": 64, "B": 8, "C": 8, "dt": 8}
DELTA_PARTS = {"q": 8, "k": 8, "v": 24, "z": 24, "beta": 4, "alpha": 4}
PREPARE, DECAY = "_prepare_input_for_gated_delta_rule", "_compute_g_and_beta"
METHODS = {
    "q": (PREPARE, 0),
    "k": (PREPARE, 1),
    "v": (PREPARE, 2),
    "gate": (PREPARE, 3),
    "g": (DECAY, 0),
    "beta": (DECAY, 1),
    "core": ("gated_delta_rule", 0),
}


# -- instead of the CUDA libraries -------------------------------------------------------------------


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    activation: str = "silu",
    headdim: int = 1,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """What `mamba_split_conv1d_scan_combined` does without its norm: `[b, s, z|x|B|C|dt]` to `[b, s, z]`."""
    assert activation == "silu"
    assert seq_idx is None
    batch, length, _ = zxbcdt.shape
    heads, inner = A.shape[0], A.shape[0] * headdim
    state = (conv1d_weight.shape[0] - inner) // 2
    z, packed, dt = zxbcdt.split([inner, inner + 2 * state, heads], -1)
    width = conv1d_weight.shape[1]
    packed = F.pad(packed.transpose(1, 2), (width - 1, 0))
    packed = F.silu(F.conv1d(packed, conv1d_weight[:, None], conv1d_bias, groups=packed.shape[1]))
    x, B, C = packed.transpose(1, 2).split([inner, state, state], -1)
    x = x.reshape(batch, length, heads, headdim)
    B, C = (t.reshape(batch, length, ngroups, -1).repeat_interleave(heads // ngroups, 2) for t in (B, C))
    dt = F.softplus(dt + dt_bias)
    memory = x.new_zeros(batch, heads, headdim, B.shape[-1])
    out = []
    for t in range(length):
        new = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        memory = memory * torch.exp(dt[:, t] * A)[..., None, None] + new
        out.append((memory * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1).reshape(batch, length, inner) * F.silu(z)


class GroupNorm(nn.Module):
    """`mamba_ssm`'s gated RMSNorm over groups of features, as the mixer calls it: without the gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def l2norm(x: Tensor) -> Tensor:
    """`fla`'s: each head's vector at length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _of_a_gpu(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("only a GPU has this kernel")


def install_kernels() -> None:
    """Put the functions above where Megatron imports the CUDA libraries' from."""
    if "megatron.core.ssm.mamba_mixer" in sys.modules:
        return
    for name, members in {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GroupNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": _of_a_gpu,
            "mamba_split_conv1d_scan_combined": split_conv1d_scan,
        },
        "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": _of_a_gpu},
        "fla.modules.convolution": {"causal_conv1d": _of_a_gpu},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _of_a_gpu},
    }.items():
        steps = name.split(".")
        for depth in range(1, len(steps) + 1):
            sys.modules.setdefault(".".join(steps[:depth]), ModuleType(".".join(steps[:depth])))
        vars(sys.modules[name]).update(members)


# -- models ------------------------------------------------------------------------------------------


def layers_of(pattern: str) -> str:
    """The decoder's layers in a pattern, one symbol for each: without cuts, and without prediction."""
    return pattern.partition("/")[0].replace("|", "")


def model(case: Any, common: dict[str, Any], stage: int | None, hybrid_spec: Callable[[], Any]) -> nn.Module:
    """A model of a case's pattern, of Megatron's local classes: a HybridModel, or MambaModel before 0.19."""
    install_kernels()
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        from megatron.core.models.mamba.mamba_model import MambaModel

        pattern = layers_of(case.pattern)  # the older one cuts it into equal stages by itself
        return MambaModel(mamba_stack_spec=_mamba_stack(), hybrid_override_pattern=pattern, **common)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    spec = stack(case, hybrid_spec)
    return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=case.pattern, vp_stage=stage, **common)


def stack(case: Any, hybrid_spec: Callable[[], Any]) -> Any:
    """A stack's spec with every kind of layer that a case's pattern may name."""
    spec = hybrid_spec()
    if case.te:
        return spec  # it has every kind
    more = {"mamba_layer": _mamba_layer(), "gdn_layer": _delta_layer(), "mtp_block_spec": _prediction()}
    if "E" in case.pattern:
        more["moe_layer"] = _expert_layer(case.experts)
    if "+" in case.pattern:
        more["mla_layer"] = _latent_layer()
    spec.submodules = dataclasses.replace(spec.submodules, **more)
    return spec


def _linears() -> dict[str, Any]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}


def _mamba_layer() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**_linears()))
    inside = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=inside)


def _delta_layer() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    net = GatedDeltaNetSubmodules(out_norm=WrappedTorchNorm, **_linears())
    inside = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=net),
        self_attn_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=inside)


def _expert_layer(experts: int) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

    inside = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=MoETransformerLayer, submodules=inside)


def _latent_layer() -> Any:
    """The attention half of GPT's local layer with multi-latent attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    whole = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True).submodules
    whole.self_attention.submodules.core_attention = latent.core_attention()
    names = ("input_layernorm", "self_attention", "self_attn_bda")
    inside = TransformerLayerSubmodules(**{n: getattr(whole, n) for n in names})
    return ModuleSpec(module=TransformerLayer, submodules=inside)


def _prediction() -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm

    layer = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, layer_norm=Norm, eh_proj=ColumnParallelLinear
    )
    block = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=layer)]
    )
    return ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=block)


def _mamba_stack() -> Any:
    """The older stack's spec: attention and MLP layers are the halves of GPT's local layer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    whole = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    halves = {
        TransformerLayer: ("input_layernorm", "self_attention", "self_attn_bda"),
        MLPLayer: ("pre_mlp_layernorm", "mlp", "mlp_bda"),
    }
    attention, mlp = (
        ModuleSpec(
            module=kind, submodules=TransformerLayerSubmodules(**{n: getattr(whole, n) for n in names})
        )
        for kind, names in halves.items()
    )
    inside = MambaStackSubmodules(mamba_layer=_mamba_layer(), attention_layer=attention, mlp_layer=mlp)
    return ModuleSpec(module=MambaStack, submodules=inside)


# -- sites -------------------------------------------------------------------------------------------


def sites_of(
    pattern: str, attention: list[str], mlp: list[str], stack: str = "decoder", experts: Sequence[str] = ()
) -> list[str]:
    """The sites of a pattern's layers, by hand; those of attention, MLP and expert layers are given."""
    ends = ("input", "output")
    linear, row = ("input", "gemm_input", "output"), ("input", "partial", "output")
    own = {
        "*": attention,
        "+": attention,
        "-": mlp,
        "E": experts,
        "M": [
            *(f"{m}:{p}" for m in ("norm", "mixer", "mixer.norm") for p in ends),
            *(f"mixer.in_proj:{p}" for p in (*linear, *MAMBA_PARTS)),
            *(f"mixer.out_proj:{p}" for p in row),
        ],
        "G": [
            *(f"{m}:{p}" for m in ("input_layernorm", "self_attention") for p in ends),
            *(f"self_attention.in_proj:{p}" for p in (*linear, *DELTA_PARTS)),
            *(f"self_attention:{p}" for p in ("conv", *METHODS)),
            *(f"self_attention.out_proj:{p}" for p in row),
        ],
    }
    out = []
    for number, symbol in enumerate(layers_of(pattern)):
        path = f"{stack}.layers.{number}"
        out += [*(f"{path}:{p}" for p in ends), *(f"{path}.{name}" for name in own[symbol])]
    return out


def kept(pattern: str) -> list[str]:
    """The last layer of each kind: enough of them for edits."""
    layers = layers_of(pattern)
    return [f"decoder.layers.{layers.rindex(symbol)}" for symbol in dict.fromkeys(layers)]


def part_of(path: str, point: str) -> slice | None:
    """Where a part lies in the output of an `in_proj`, on one process; None if the point is no part."""
    parts = MAMBA_PARTS if ".mixer." in path else DELTA_PARTS
    if not path.endswith(".in_proj") or point not in parts:
        return None
    widths = list(parts.values())
    at = list(parts).index(point)
    return slice(sum(widths[:at]), sum(widths[: at + 1]))
