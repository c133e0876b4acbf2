"""Runtime: taps go in and out, hooks run, what is read is kept and sent, the clock says which microbatch."""

from megatron_flex.runtime.captures import Captures, Key, Readings
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.session import Session
from megatron_flex.runtime.context.save_context import Context

__all__ = ["Captures", "Context", "HookFunction", "Key", "Readings", "Session"]
