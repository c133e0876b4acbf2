"""One file per framework: how it lays out tensors, where hooks can go, and how to follow its schedule."""

from __future__ import annotations

from torch import nn

from megatron_flex.adapters import megatron_core
from megatron_flex.adapters.base import Adapter, Listener, LocalGradient, ParameterSite, Undo
from megatron_flex.errors import FlexError

__all__ = ["Adapter", "Listener", "LocalGradient", "ParameterSite", "Undo", "detect"]

ADAPTERS = (megatron_core.detect,)


def detect(chunks: list[nn.Module]) -> Adapter:
    """Find the framework that a model was built with.

    Args:
        chunks: the model, or its virtual pipeline chunks; bare or wrapped.

    Raises:
        FlexError: no known framework built it.
    """
    for look in ADAPTERS:
        adapter = look(chunks)
        if adapter is not None:
            return adapter
    kinds = ", ".join(dict.fromkeys(type(c).__name__ for c in chunks)) or "no module"
    raise FlexError(
        f"{kinds}: no known framework builds it as a model that can be hooked; known are megatron-core's "
        "GPTModel, HybridModel, MambaModel and BertModel, bare or wrapped in DistributedDataParallel and "
        "Float16Module"
    )
