"""FlexModel, HookFunction and DummyModule with the interface of 2023."""

from megatron_flex.compat.core.core_utils import DummyModule
from megatron_flex.compat.core.hook_function import HookFunction, default_editing_function
from megatron_flex.compat.core.wrapper import FlexModel

__all__ = ["DummyModule", "FlexModel", "HookFunction", "default_editing_function"]
