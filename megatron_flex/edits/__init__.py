"""Ready-made editing functions, each one line: `HookFunction(place, editing_function=edits.scale(2.0))`.

They are written for the whole tensor, and so know nothing of ranks; many run on each rank's part. `a | b`
runs one after the other, `parse` makes them from words. Each can be restricted to `positions`, `samples`,
`heads` and `features`.
"""

from megatron_flex.edits.edit_base import Edit
from megatron_flex.edits.files import write
from megatron_flex.edits.marking import OnParts, local
from megatron_flex.edits.preset_parser import PRESETS, parse
from megatron_flex.edits.preset import Local, Preset, chain
from megatron_flex.edits.sources import patch, resample, swap
from megatron_flex.edits.tensors import Indices
from megatron_flex.edits.trained import LowRank, low_rank, splice
from megatron_flex.edits.value_edits import clamp, heads, mean, neurons, noise, scale, zero
from megatron_flex.edits.vector_edits import linear_map, project, project_out, steer

add = steer
ablate = zero

__all__ = [
    "PRESETS",
    "Edit",
    "Indices",
    "Local",
    "LowRank",
    "OnParts",
    "Preset",
    "ablate",
    "add",
    "chain",
    "clamp",
    "heads",
    "linear_map",
    "local",
    "low_rank",
    "mean",
    "neurons",
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
