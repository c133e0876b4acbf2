"""Models that mcore-bridge built for architectures outside the table: its own bridge converts their weights.

Such a model has modules of mcore-bridge's own. Its configuration has the bridge, so nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.module_classes import unwrap_model
from megatron_flex.conversion.architectures import ARCHITECTURES
from megatron_flex.conversion.checkpoints import check_empty, folder_of, read_config
from megatron_flex.errors import FlexError

PACKAGE = "mcore_bridge"


def find_bridge(chunks: Sequence[nn.Module]) -> Any:
    """The bridge of a model of an architecture outside the table that mcore-bridge built; None for others."""
    config: Any = getattr(unwrap_model(chunks[0]), "config", None)
    if type(config).__module__.partition(".")[0] != PACKAGE or config.hf_model_type in ARCHITECTURES:
        return None
    return config.bridge


def check_source(bridge: Any, source: Any) -> Path:
    """The folder that a bridge is to read.

    Raises:
        FlexError: it is not a folder, or has another architecture than the model.
    """
    if isinstance(source, nn.Module):
        raise FlexError(
            f"{type(source).__name__} is in memory, and mcore-bridge reads folders; save it first"
        )
    folder, kind = folder_of(source), read_config(source).model_type
    if kind != bridge.config.hf_model_type:
        raise FlexError(
            f"{folder} has the architecture {kind!r}, and the model is {bridge.config.hf_model_type!r}"
        )
    return folder


def check_target(target: Any) -> Path:
    """The folder that a bridge is to write.

    Raises:
        FlexError: it is not a folder, or has weights.
    """
    if isinstance(target, nn.Module) or target is None:
        raise FlexError("mcore-bridge writes folders; give one on every rank")
    check_empty(Path(target))
    return Path(target)
