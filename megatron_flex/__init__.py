"""megatron_flex: read and edit the tensors of a distributed model as one device would hold them."""

from megatron_flex.errors import FlexError, HookError, LayoutError, SiteError, VerifyError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.model import FlexModel, attach
from megatron_flex.runtime import Captures, HookFunction, Key, Readings
from megatron_flex.sites import Site
from megatron_flex.version import __version__

__all__ = [
    "Axis",
    "Captures",
    "Cut",
    "Dim",
    "FlexError",
    "FlexModel",
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
]
