"""megatron_flex: read and edit the tensors of a distributed model as one device would hold them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_flex.adapters.adapter_registry import register_adapter
from megatron_flex.adapters.detection import detect
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
from megatron_flex.layout import Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.model import FlexModel, attach
from megatron_flex.runtime import HookFunction
from megatron_flex.runtime.debug.edit_debugger import breakpoint
from megatron_flex.runtime.function_digest import rank_dependent
from megatron_flex.runtime.selection import Select, reduce
from megatron_flex.sites import Site
from megatron_flex.statistics import Statistics
from megatron_flex.version import __version__

if TYPE_CHECKING:
    from megatron_flex import edits, figures, plot
    from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
    from megatron_flex.edits import local
    from megatron_flex.launch.argparse_flags import add_flex_args
    from megatron_flex.statistics.statistics_reader import OpenStatistics, open_statistics

__all__ = [
    "Dim",
    "Dump",
    "DumpArray",
    "DumpError",
    "FlexError",
    "FlexModel",
    "FlexWarning",
    "HookError",
    "HookFunction",
    "Layout",
    "LayoutError",
    "Mesh",
    "OpenDump",
    "OpenStatistics",
    "Select",
    "Site",
    "SiteError",
    "Statistics",
    "VerifyError",
    "__version__",
    "add_flex_args",
    "attach",
    "breakpoint",
    "detect",
    "edits",
    "figures",
    "local",
    "open_dump",
    "open_statistics",
    "plot",
    "rank_dependent",
    "reduce",
    "register_adapter",
    "sampled",
]


def __getattr__(name: str) -> Any:
    """Import edits, pictures, flags, and what reads dumps and statistics, when asked for: no one waits."""
    if name in ("edits", "figures", "plot"):
        return import_module(f"megatron_flex.{name}")
    if name == "local":
        return import_module("megatron_flex.edits").local
    if name in ("DumpArray", "OpenDump", "open_dump"):
        return getattr(import_module("megatron_flex.dump.reader"), name)
    if name == "add_flex_args":
        return import_module("megatron_flex.launch.argparse_flags").add_flex_args
    if name in ("OpenStatistics", "open_statistics"):
        return getattr(import_module("megatron_flex.statistics.statistics_reader"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those that are imported when asked for among them, and nothing else."""
    return sorted(__all__)
