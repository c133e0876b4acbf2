"""The layers of a HybridModel, of Megatron's own modules: its ready-made spec names Transformer Engine's."""

from __future__ import annotations

from typing import Any


def local_hybrid_stack_spec() -> Any:
    """Return a stack spec with attention (`*`), MLP (`-`) and experts (`E`), of Megatron's local modules.

    Mamba and gated delta net layers are left out: their kernels need a GPU.

    Returns:
        Megatron's `ModuleSpec`, for `HybridModel(hybrid_stack_spec=...)`.

    Examples:
        >>> from megatron_flex import cpu
        >>> cpu.local_hybrid_stack_spec().module.__name__
        'HybridStack'
    """
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    # Of experts their number is in the configuration; here it only must be one.
    experts = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=partial(MLP.as_mlp_submodule, submodules=linears),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add
            ),
        ),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)
