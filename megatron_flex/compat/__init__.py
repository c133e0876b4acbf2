"""The interface of FlexModel (2023): code written for it runs after changing the import.

`core`, `distributed`, `traverse` and `utils` have the public names of the original modules. The
implementation uses the native `megatron_flex.FlexModel`.
"""

from megatron_flex.compat import core, distributed, traverse, utils
from megatron_flex.compat.core import DummyModule, FlexModel, HookFunction

__all__ = ["DummyModule", "FlexModel", "HookFunction", "core", "distributed", "traverse", "utils"]
