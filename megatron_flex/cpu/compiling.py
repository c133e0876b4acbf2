"""Keeps torch from compiling: Megatron's fused functions are `torch.compile` and gain nothing here."""

from __future__ import annotations

import os
import sys

from megatron_flex.cpu.patching import Patches

_CONFIG = "torch._dynamo.config"
_SWITCH = "TORCH_COMPILE_DISABLE"


def install(patches: Patches) -> None:
    """Switch dynamo off, for functions that are decorated already and for those to come.

    What dynamo read from the environment when it was imported is set in its configuration; if it is
    imported later, it reads the environment, and the configuration is set right on the way out.
    """
    config = sys.modules.get(_CONFIG)
    before = os.environ.get(_SWITCH, "0") == "1" if config is None else bool(config.disable)
    patches.set_item(os.environ, _SWITCH, "1")
    _set_disable(True)
    patches.on_restore(lambda: _set_disable(before))


def _set_disable(value: bool) -> None:
    config = sys.modules.get(_CONFIG)
    if config is not None:
        config.disable = value  # type: ignore[attr-defined]
