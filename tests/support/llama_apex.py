"""The LLaMA-style model of apex's parallel layers, with one process's weights."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import llama
from tests.support.rank import changes


def parts(sequence: bool = False, fused: bool = False) -> llama.Parts:
    """What apex makes a model of; its layers' biases, which they return beside the output, are left out.

    Args:
        sequence: whether what is between the linears is cut along the first dim, here that of the batch.
        fused: whether weights' gradients are added up in `main_grad`.
    """
    from apex.transformer import tensor_parallel

    class Column(tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    class Row(tensor_parallel.RowParallelLinear):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    class Scattered(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> Tensor:
            return tensor_parallel.mappings.scatter_to_sequence_parallel_region(self.inner(tokens))

    shared: dict[str, Any] = {"bias": False, "use_cpu_initialization": True}
    shared |= {"sequence_parallel_enabled": sequence, "gradient_accumulation_fusion": fused}

    def linear(cut: str, inputs: int, outputs: int) -> nn.Module:
        if cut == "row":
            return Row(inputs, outputs, input_is_parallel=True, **shared)
        gather = cut == "logits" and not sequence
        return Column(
            inputs,
            outputs,
            gather_output=gather,
            no_async_tensor_model_parallel_allreduce=sequence or cut == "logits",
            **shared,
        )

    def embedding(vocabulary: int, width: int) -> nn.Module:
        made = tensor_parallel.VocabParallelEmbedding(vocabulary, width, use_cpu_initialization=True)
        return Scattered(made) if sequence else made

    return llama.Parts(linear, embedding)


class Stage(llama.Llama):
    """A stage of the model, which apex's schedules hand its input beside the call."""

    input_tensor: Tensor | None = None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.input_tensor = received[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens if self.input_tensor is None else self.input_tensor)


def initialize(tp: int, pp: int = 1, chunks: int | None = None) -> None:
    """Make apex's groups; it insists on NCCL, which no CPU has."""
    from apex.transformer import parallel_state

    changes.setattr(parallel_state, "new_process_group", lambda ranks, backend: dist.new_group(list(ranks)))
    if parallel_state.model_parallel_is_initialized():  # for another test of this rank's
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, chunks)


def fused_norms(built: llama.Llama) -> None:
    """Put apex's norms in the place of the model's; on a CPU they call plain torch."""
    sys.modules.setdefault("fused_layer_norm_cuda", ModuleType("fused_layer_norm_cuda"))
    from apex.normalization import FusedRMSNorm, MixedFusedRMSNorm

    for block in built.layers.values():
        block.attention_norm = FusedRMSNorm(llama.HIDDEN, eps=1e-5)
        block.ffn_norm = MixedFusedRMSNorm(llama.HIDDEN, eps=1e-5)


def model(norms: bool = False, kind: type[llama.Llama] = llama.Llama, **switches: bool) -> llama.Llama:
    """The whole model, as this rank has it; with apex's norms or its own."""
    from apex.transformer.parallel_state import get_tensor_model_parallel_rank

    built = kind(parts(**switches))
    if norms:
        fused_norms(built)
    whole = dict(llama.single().named_parameters())
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            part: Any = whole[name.replace(".inner", "")]
            for dim, length in enumerate(parameter.shape):
                if part.shape[dim] != length:
                    part = part.split(length, dim)[get_tensor_model_parallel_rank()]
            parameter.copy_(part)
            if "norm" in name and switches.get("sequence"):
                parameter.sequence_parallel_enabled = True  # type: ignore[attr-defined]
            if switches.get("fused"):
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    return built
