"""Keeps torch from compiling: Megatron's fused functions are `torch.compile` and gain nothing here."""

from __future__ import annotations

import os
import sys

from megatron_flex.cpu.patching import Patches

_DYNAMO_CONFIG = "torch._dynamo.config"
_COMPILE_VARIABLE = "TORCH_COMPILE_DISABLE"


def disable_compilation(patches: Patches) -> None:
    """Switch dynamo off, for functions that are decorated already and for those to come.

    What dynamo read from the environment when it was imported is set in its configuration; if it is
    imported later, it reads the environment, and the configuration is set right on the way out.
    """
    config = sys.modules.get(_DYNAMO_CONFIG)
    before = os.environ.get(_COMPILE_VARIABLE, "0") == "1" if config is None else bool(config.disable)
    patches.set_item(os.environ, _COMPILE_VARIABLE, "1")
    _set_dynamo_disabled(True)
    patches.on_restore(lambda: _set_dynamo_disabled(before))


def _set_dynamo_disabled(value: bool) -> None:
    config = sys.modules.get(_DYNAMO_CONFIG)
    if config is not None:
        config.disable = value  # type: ignore[attr-defined]
