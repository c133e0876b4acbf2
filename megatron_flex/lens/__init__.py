"""Caches, names and traces for interpretability, on a model that is distributed over many ranks."""

from megatron_flex.lens.activation_cache import ActivationCache
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.generation import GeneratedText, record_generation
from megatron_flex.lens.lens_config import LensConfig, make_lens_config
from megatron_flex.lens.lens_names import Alias, Filter, LensNames
from megatron_flex.lens.metric_gradients import Metric, differentiate_metric, run_backward
from megatron_flex.lens.model_trace import Trace, TracedModule, TracedTensor
from megatron_flex.lens.prompt_inputs import PromptInput, Tokenizer, read_prompts
from megatron_flex.lens.stop_point import StopPoint
from megatron_flex.lens.temporary_hooks import HookPoint, Hooks, TemporaryCaptures, TemporaryEdits, edits, run

__all__ = [
    "ActivationCache",
    "Alias",
    "Filter",
    "FullWeights",
    "GeneratedText",
    "HookPoint",
    "Hooks",
    "LensConfig",
    "LensNames",
    "Metric",
    "PromptInput",
    "StopPoint",
    "TemporaryCaptures",
    "TemporaryEdits",
    "Tokenizer",
    "Trace",
    "TracedModule",
    "TracedTensor",
    "differentiate_metric",
    "edits",
    "make_lens_config",
    "read_prompts",
    "record_generation",
    "run",
    "run_backward",
]
