"""megatron_flex: read and edit the tensors of a distributed model as one device would hold them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_flex.version import __version__

if TYPE_CHECKING:
    from megatron_flex import edits, figures, plot
    from megatron_flex.adapters.adapter_registry import register_adapter
    from megatron_flex.adapters.detection import detect
    from megatron_flex.alignment import Alignment, align, align_dumps, site_names
    from megatron_flex.conversion import config_from_hf, load_hf, to_hf
    from megatron_flex.dump import Dump, sampled
    from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
    from megatron_flex.edits import local
    from megatron_flex.errors import (
        DumpError,
        FlexError,
        FlexWarning,
        HookError,
        LayoutError,
        NonFiniteError,
        SiteError,
        VerifyError,
    )
    from megatron_flex.launch.argparse_flags import add_flex_args
    from megatron_flex.layout import Dim, Layout, PackedSequences
    from megatron_flex.mesh import Mesh
    from megatron_flex.model import FlexModel, attach
    from megatron_flex.nonfinite import NonFinite
    from megatron_flex.runtime import HookFunction
    from megatron_flex.runtime.debug.edit_debugger import breakpoint
    from megatron_flex.runtime.function_digest import rank_dependent
    from megatron_flex.runtime.selection import Select, reduce
    from megatron_flex.sites import Site
    from megatron_flex.statistics import Statistics
    from megatron_flex.statistics.statistics_reader import OpenStatistics, open_statistics

__all__ = [
    "Alignment",
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
    "NonFinite",
    "NonFiniteError",
    "OpenDump",
    "OpenStatistics",
    "PackedSequences",
    "Select",
    "Site",
    "SiteError",
    "Statistics",
    "VerifyError",
    "__version__",
    "add_flex_args",
    "align",
    "align_dumps",
    "attach",
    "breakpoint",
    "config_from_hf",
    "detect",
    "edits",
    "figures",
    "load_hf",
    "local",
    "open_dump",
    "open_statistics",
    "plot",
    "rank_dependent",
    "reduce",
    "register_adapter",
    "sampled",
    "site_names",
    "to_hf",
]

# The module of each public name; a module is imported when one of its names is first used.
_MODULES = {
    "Alignment": "alignment",
    "Dim": "layout",
    "Dump": "dump",
    "DumpArray": "dump.reader",
    "DumpError": "errors",
    "FlexError": "errors",
    "FlexModel": "model",
    "FlexWarning": "errors",
    "HookError": "errors",
    "HookFunction": "runtime",
    "Layout": "layout",
    "LayoutError": "errors",
    "Mesh": "mesh",
    "NonFinite": "nonfinite",
    "NonFiniteError": "errors",
    "OpenDump": "dump.reader",
    "OpenStatistics": "statistics.statistics_reader",
    "PackedSequences": "layout",
    "Select": "runtime.selection",
    "Site": "sites",
    "SiteError": "errors",
    "Statistics": "statistics",
    "VerifyError": "errors",
    "add_flex_args": "launch.argparse_flags",
    "align": "alignment",
    "align_dumps": "alignment",
    "attach": "model",
    "breakpoint": "runtime.debug.edit_debugger",
    "config_from_hf": "conversion",
    "detect": "adapters.detection",
    "load_hf": "conversion",
    "local": "edits",
    "open_dump": "dump.reader",
    "open_statistics": "statistics.statistics_reader",
    "rank_dependent": "runtime.function_digest",
    "reduce": "runtime.selection",
    "register_adapter": "adapters.adapter_registry",
    "sampled": "dump",
    "site_names": "alignment",
    "to_hf": "conversion",
}
_SUBMODULES = ("edits", "figures", "plot")


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used, so that importing the package is cheap.

    Raises:
        AttributeError: the package has no such public name.
    """
    if name in _SUBMODULES:
        return import_module(f"megatron_flex.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"megatron_flex.{_MODULES[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    """The public names, those that are not imported yet included, and nothing else."""
    return sorted(__all__)
