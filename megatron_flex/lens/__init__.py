"""Caches, names and traces of interpretability, on a model that is spread over many ranks."""

from megatron_flex.lens.cache import ActivationCache
from megatron_flex.lens.editing import Edits, HookPoint, Hooks, edits
from megatron_flex.lens.lens_names import Alias, Filter, Names
from megatron_flex.lens.reading import Reading, run
from megatron_flex.lens.model_trace import Handle, Place, Trace
from megatron_flex.lens.full_weights import WholeWeights

__all__ = [
    "ActivationCache",
    "Alias",
    "Edits",
    "Filter",
    "Handle",
    "HookPoint",
    "Hooks",
    "Names",
    "Place",
    "Reading",
    "Trace",
    "WholeWeights",
    "edits",
    "run",
]
