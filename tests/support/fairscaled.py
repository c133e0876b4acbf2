"""Fairscale's layers with the least that rules can say of them, to follow layouts between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_flex.adapters import adapter_registry, pytorch
from megatron_flex.adapters.layout_rules import FULL, Rule, Spread
from megatron_flex.adapters.module_adapter import ModuleAdapter
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import llama
from tests.support.rank import changes

LAST = Spread(((-1, "tp"),))
ROWS = Layout((Dim("", (Cut("tp"),)), Dim()))
COLUMNS = Layout((Dim(), Dim("", (Cut("tp"),))))


class Rules:
    """Of columns, rows and vocabularies."""

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        from fairscale.nn.model_parallel import layers

        if isinstance(module, layers.ColumnParallelLinear):
            return Rule(FULL, FULL if module.gather_output else LAST, {"weight": ROWS})
        if isinstance(module, layers.RowParallelLinear):
            return Rule(LAST if module.input_is_parallel else FULL, FULL, {"weight": COLUMNS})
        if isinstance(module, layers.VocabParallelEmbedding):
            return Rule(FULL, FULL, {"weight": ROWS})
        return None


def start(size: int) -> None:
    """Fairscale's groups: all ranks in one, whatever an earlier test of these ranks had."""
    from fairscale.nn.model_parallel import initialize

    if initialize.model_parallel_is_initialized():
        if initialize.get_model_parallel_world_size() == size:
            return
        initialize.destroy_model_parallel()
    initialize.initialize_model_parallel(size)


def parts(gather: bool = True) -> llama.Parts:
    """What the model is made of; `gather`: whether all ranks get all logits."""
    from fairscale.nn.model_parallel import layers

    def linear(cut: str, inputs: int, outputs: int) -> nn.Module:
        if cut == "row":
            return layers.RowParallelLinear(inputs, outputs, bias=False, input_is_parallel=True)
        whole = gather and cut == "logits"
        return layers.ColumnParallelLinear(inputs, outputs, bias=False, gather_output=whole)

    return llama.Parts(linear, layers.VocabParallelEmbedding)


def load(model: nn.Module, whole: nn.Module, size: int, rank: int) -> None:
    """Give a model its parts of a whole one's parameters."""
    theirs = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            want = theirs[name]
            dims = [i for i, (n, w) in enumerate(zip(parameter.shape, want.shape, strict=True)) if n != w]
            parameter.copy_(want.chunk(size, dims[0])[rank] if dims else want)


def take_over() -> None:
    """Have these rules for every model that the running function makes, and no other adapter."""

    def claim(chunks: list[Any], said: Any, group: Any) -> adapter_registry.FrameworkMatch:
        return adapter_registry.FrameworkMatch(
            "followed", "a test says so", lambda: adapter(chunks, said, group)
        )

    finder = adapter_registry.FinderEntry("claim", lambda: claim, package="torch")
    changes.setattr(adapter_registry, "BUILT_IN", (finder,))


def adapter(chunks: list[Any], said: Any, group: Any = None) -> ModuleAdapter:
    """What stands for fairscale's adapter."""
    mesh = pytorch.make_mesh(said, group)
    return ModuleAdapter(chunks[0], mesh, Rules(), name="followed")


def llama_of(size: int, **options: Any) -> llama.Llama:
    """The model on this rank."""
    import torch.distributed as dist

    start(size)
    model = llama.Llama(parts(**options))
    load(model, llama.single(), size, dist.get_rank() % size)
    return model


__all__ = ["Rules", "adapter", "llama_of", "load", "parts", "start", "take_over"]
