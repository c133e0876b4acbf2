"""Preset editing functions, each one line: `HookFunction(site, edits.scale(2.0))`.

They are written for the full tensor and have no rank logic; many run on local shards. `a | b` runs one after
the other, `parse` builds them from text. Each can be restricted to `positions`, `samples`, `heads` and
`features`.

Examples:
    >>> edit = mf.edits.scale(2.0, positions=-1) | mf.edits.clamp(-3.0, 3.0)
    >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.2", edit))
    >>> losses = train_step(chunks)
"""

from megatron_flex.edits.edit_base import Edit
from megatron_flex.edits.local_edit import Local, LocalEdit, local
from megatron_flex.edits.preset_base import Preset, chain
from megatron_flex.edits.preset_parser import PRESETS, parse
from megatron_flex.edits.replacement_edits import LowRank, low_rank, patch, resample, splice, swap
from megatron_flex.edits.tensors import Indices, write
from megatron_flex.edits.value_edits import ablate_heads, ablate_neurons, clamp, mean, noise, scale, zero
from megatron_flex.edits.vector_edits import linear_map, project, project_out, steer
from megatron_flex.runtime.edit_traits import EditTraits

__all__ = [
    "PRESETS",
    "Edit",
    "EditTraits",
    "Indices",
    "Local",
    "LocalEdit",
    "LowRank",
    "Preset",
    "ablate_heads",
    "ablate_neurons",
    "chain",
    "clamp",
    "linear_map",
    "local",
    "low_rank",
    "mean",
    "noise",
    "parse",
    "patch",
    "project",
    "project_out",
    "resample",
    "scale",
    "splice",
    "steer",
    "swap",
    "write",
    "zero",
]
