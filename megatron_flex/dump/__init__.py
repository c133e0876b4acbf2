"""Dumps: the tensors of a run on disk, each rank's shards as they are, read back as one device had them."""

from megatron_flex.dump.files import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    REPLICA,
    ROUTING,
    VALUE,
    Entry,
    run_folder,
)
from megatron_flex.dump.layouts import to_json
from megatron_flex.dump.manifest import Manifest, Place
from megatron_flex.dump.opening import open_run, sees
from megatron_flex.dump.ownership import Ownership, holders
from megatron_flex.dump.selection import Picked, Sampled, mean, mean_layout, pick
from megatron_flex.dump.settings import Dump
from megatron_flex.dump.writer import Writer

sampled = Sampled

__all__ = [
    "GRADIENT",
    "PARAMETER",
    "PARAMETER_GRADIENT",
    "REPLICA",
    "ROUTING",
    "VALUE",
    "Dump",
    "Entry",
    "Manifest",
    "Ownership",
    "Picked",
    "Place",
    "Sampled",
    "Writer",
    "holders",
    "mean",
    "mean_layout",
    "open_run",
    "pick",
    "run_folder",
    "sampled",
    "sees",
    "to_json",
]
