"""FlexModel, HookFunction and DummyModule as they were."""

from megatron_flex.compat.core.hook_function import HookFunction, default_editing_function
from megatron_flex.compat.core.modules import DummyModule
from megatron_flex.compat.core.wrapper import FlexModel

__all__ = ["DummyModule", "FlexModel", "HookFunction", "default_editing_function"]
