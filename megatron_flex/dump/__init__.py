"""Dumps: the tensors of a run on disk, each rank's shards as they are, read back as one device had them."""

from megatron_flex.dump.part_format import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    REPLICA,
    ROUTING,
    VALUE,
    ShardEntry,
    format_run_folder,
)
from megatron_flex.dump.layouts import layout_to_json
from megatron_flex.dump.manifest import Manifest, SiteRecord
from megatron_flex.dump.opening import create_run, find_access_problem
from megatron_flex.dump.writer.ownership import Ownership, list_replica_axes
from megatron_flex.dump.selection import EntrySelection, RandomTokens, compute_partial_mean, make_mean_layout, select_entries
from megatron_flex.dump.settings import Dump
from megatron_flex.dump.writer.dump_writer import DumpWriter

sampled = RandomTokens

__all__ = [
    "GRADIENT",
    "PARAMETER",
    "PARAMETER_GRADIENT",
    "REPLICA",
    "ROUTING",
    "VALUE",
    "Dump",
    "ShardEntry",
    "Manifest",
    "Ownership",
    "EntrySelection",
    "SiteRecord",
    "RandomTokens",
    "DumpWriter",
    "list_replica_axes",
    "compute_partial_mean",
    "make_mean_layout",
    "create_run",
    "select_entries",
    "format_run_folder",
    "sampled",
    "find_access_problem",
    "layout_to_json",
]
