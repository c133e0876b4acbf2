"""Dumps: each rank writes its shards of a run's tensors to disk; readers assemble full tensors from them."""

from megatron_flex.dump.dump_settings import Dump
from megatron_flex.dump.file_names import format_run_folder
from megatron_flex.dump.schema import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    REPLICA,
    ROUTING,
    VALUE,
    Manifest,
    ShardEntry,
    SiteRecord,
    describe_dims,
    layout_to_json,
)
from megatron_flex.dump.token_selection import (
    EntrySelection,
    RandomTokens,
    compute_partial_mean,
    make_mean_layout,
    select_entries,
)
from megatron_flex.dump.writer.dump_writer import DumpWriter
from megatron_flex.dump.writer.ownership import Ownership, list_replica_axes
from megatron_flex.dump.writer.run_creation import (
    RunMade,
    create_run,
    find_access_problem,
    find_earlier_runs,
)

sampled = RandomTokens

__all__ = [
    "GRADIENT",
    "PARAMETER",
    "PARAMETER_GRADIENT",
    "REPLICA",
    "ROUTING",
    "VALUE",
    "Dump",
    "DumpWriter",
    "EntrySelection",
    "Manifest",
    "Ownership",
    "RandomTokens",
    "RunMade",
    "ShardEntry",
    "SiteRecord",
    "compute_partial_mean",
    "create_run",
    "describe_dims",
    "find_access_problem",
    "find_earlier_runs",
    "format_run_folder",
    "layout_to_json",
    "list_replica_axes",
    "make_mean_layout",
    "sampled",
    "select_entries",
]
