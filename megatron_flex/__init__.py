"""megatron_flex: read and edit the tensors of a distributed model as one device would hold them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_flex.adapters.detection import Detection, detect
from megatron_flex.adapters.registry import register_adapter
from megatron_flex.dump import Dump, sampled
from megatron_flex.errors import (
    DumpError,
    FlexError,
    FlexWarning,
    HookError,
    LayoutError,
    SiteError,
    VerifyError,
)
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.model import FlexModel, attach
from megatron_flex.runtime import Captures, HookFunction, Key, Readings
from megatron_flex.runtime.debugging.stopping import breakpoint
from megatron_flex.sites import Site
from megatron_flex.version import __version__

if TYPE_CHECKING:
    from megatron_flex import edits

__all__ = [
    "Axis",
    "Captures",
    "Cut",
    "Detection",
    "Dim",
    "Dump",
    "DumpError",
    "FlexError",
    "FlexModel",
    "FlexWarning",
    "HookError",
    "HookFunction",
    "Key",
    "Layout",
    "LayoutError",
    "Mesh",
    "Readings",
    "Site",
    "SiteError",
    "VerifyError",
    "__version__",
    "attach",
    "breakpoint",
    "detect",
    "edits",
    "register_adapter",
    "sampled",
]


def __getattr__(name: str) -> Any:
    """Import `edits` when it is asked for: who makes none does not wait for it."""
    if name == "edits":
        return import_module("megatron_flex.edits")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
