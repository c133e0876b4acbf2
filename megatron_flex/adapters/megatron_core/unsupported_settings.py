"""Settings of Megatron under which hooks would get wrong tensors or none; `attach` raises.

tests/data/arguments.toml says for every argument of Megatron-LM whether it is supported, unaffected or
refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.errors import FlexError

OFF = (None, False)


class UnsupportedSetting(NamedTuple):
    """A setting that is refused.

    Attributes:
        harmless: the values that are not refused; an absent setting has the first.
        why: what the setting does.
        instead: what the user can set.
    """

    harmless: tuple[Any, ...]
    why: str
    instead: str


CUDA_GRAPHS = (
    "turns on CUDA graphs, which replay kernels without calling any hook",
    "train with --cuda-graph-impl none (older: without --enable-cuda-graph)",
)
HYBRID_CONTEXT = (
    "gives each batch another context parallel group, so that no layout holds for the entire run",
    "use plain context parallelism (--context-parallel-size without this switch)",
)
WEIGHT_SHARDS = (
    "shards weights beyond tensor parallelism, in a way that has no layout here",
    "set it to 1 and tensor_parallel_num_weight_shards to the tensor parallel size",
)
INTERLEAVED_GATES = (
    "mixes the features of gate and up projection in blocks, an order that has no layout here",
    "leave the argument out",
)
# By attribute of the model's config.
UNSUPPORTED_SETTINGS = {
    "cuda_graph_impl": UnsupportedSetting(("none", None), *CUDA_GRAPHS),
    "enable_cuda_graph": UnsupportedSetting(OFF, *CUDA_GRAPHS),
    "external_cuda_graph": UnsupportedSetting(OFF, *CUDA_GRAPHS),
    "hybrid_context_parallel": UnsupportedSetting(OFF, *HYBRID_CONTEXT),
    "dynamic_context_parallel": UnsupportedSetting(OFF, *HYBRID_CONTEXT),  # its name in releases after 0.19
    "gtp_weight_remat_size": UnsupportedSetting((1, None), *WEIGHT_SHARDS),
    "expert_gtp_weight_remat_size": UnsupportedSetting((1, None), *WEIGHT_SHARDS),
    "moe_mlp_glu_interleave_size": UnsupportedSetting(OFF, *INTERLEAVED_GATES),
    "moe_shared_expert_glu_interleave_size": UnsupportedSetting(OFF, *INTERLEAVED_GATES),
    "overlap_moe_expert_parallel_comm": UnsupportedSetting(
        OFF,
        "runs forward and backward of different microbatches merged, past the modules that have hooks",
        "turn it off",
    ),
    "use_inference_optimized_layers": UnsupportedSetting(
        OFF,
        "replaces parallel linears by kernels that reduce, add and normalize in one",
        "use --transformer-impl local or transformer_engine",
    ),
}
FSDP_WRAPPERS = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")


def refuse_settings(config: Any) -> None:
    """Raise if a setting of the model's TransformerConfig is unsupported. Nothing is communicated.

    Raises:
        FlexError: the value is not a harmless one; the error names the setting, the reason and the remedy.
    """
    for name, setting in UNSUPPORTED_SETTINGS.items():
        value = getattr(config, name, setting.harmless[0])
        if value not in setting.harmless:
            raise FlexError(f"{name}={value!r} {setting.why}; {setting.instead}")


def refuse_wrappers(wrappers: Iterable[nn.Module]) -> None:
    """Raise if one of the model's wrappers is an FSDP of Megatron's. Nothing is communicated.

    Raises:
        FlexError: there is one; the error names its class.
    """
    for wrapper in wrappers:
        if is_megatron(wrapper, *FSDP_WRAPPERS):
            raise FlexError(
                f"the model is in Megatron's {type(wrapper).__name__} (--use-megatron-fsdp, "
                "--use-torch-fsdp2), whose sharded parameters and gradients are not supported; use "
                "Megatron's DistributedDataParallel (--use-distributed-optimizer shards its state)"
            )
