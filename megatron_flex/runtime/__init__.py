"""Runtime: installs and removes taps, runs hooks, stores and sends captures, and tracks the microbatch."""

from megatron_flex.runtime.captures import Captures, Key, Readings
from megatron_flex.runtime.context.save_context import Context
from megatron_flex.runtime.features.features import Features
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.session import Session

__all__ = ["Captures", "Context", "Features", "HookFunction", "Key", "Readings", "Session"]
