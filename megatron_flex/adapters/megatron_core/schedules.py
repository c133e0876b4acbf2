"""Watches Megatron's pipeline schedules: which step and microbatch runs, and where it begins and ends.

The schedules look up their helpers in their module at each call, so replacing the module's functions is
enough, in every version; the microbatch is stored on the output tensor from forward to backward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from megatron_flex.adapters.adapter_base import Listener, StepReport, Undo, training_argument
from megatron_flex.adapters.megatron_core.model_parts import config_of
from megatron_flex.adapters.megatron_core.module_classes import unwrap_model
from megatron_flex.adapters.taps import add_hook, intercept, join_undos
from megatron_flex.errors import FlexError, LayoutError
from megatron_flex.layout import PackedSequences
from megatron_flex.layout.packed_sequences import explain_uneven_sequence

SCHEDULE_FUNCTIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

INFERENCE_WRAPPER = "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper"
INFERENCE_METHODS = ("run_one_forward_step", "forward_pass_with_pipeline_parallel")

OWN_GROUP = (
    "packed sequences with local_cp_size={size}: their context parallel group changes from batch to batch, "
    "and no layout says which rank has which tokens; leave out hybrid context parallelism, or remove the "
    "hooks"
)
NO_ENDS = (
    "packed_seq_params of qkv_format='thd' have no cu_seqlens_q, so that nobody knows where a sequence ends; "
    "pass cu_seqlens_q, or remove the hooks"
)
PACKED_ARGUMENT = "packed_seq_params"
INFERENCE_ARGUMENT = "inference_context"  # always by keyword

PER_SAMPLE = (
    "experts get packed sequences by tokens_per_sample, of which a sequence parallel rank has other samples "
    "and not other positions; leave out tokens_per_sample or --sequence-parallel, or remove the hooks"
)


def watch_schedules(roots: list[nn.Module], context_parallel: int, listener: Listener) -> Undo:
    """Notify `listener` of the schedules' events for these models and of calls without a schedule."""
    from megatron.core.pipeline_parallel import schedules

    state = _ScheduleWatcher(roots, context_parallel, listener)
    undos = [intercept(schedules, name, state.run) for name in SCHEDULE_FUNCTIONS]
    undos.append(intercept(schedules, "forward_step", state.forward))
    undos.append(intercept(schedules, "backward_step", state.backward))
    for number, root in enumerate(roots):
        undos.append(add_hook(root, partial(state.before_call, number), pre=True, with_kwargs=True))
        undos.append(add_hook(root, state.after_call, always_call=True))
    wrapper: Any = getattr(sys.modules.get(INFERENCE_WRAPPER), "AbstractModelInferenceWrapper", None)
    undos += [intercept(wrapper, name, state.infer) for name in INFERENCE_METHODS if hasattr(wrapper, name)]
    return join_undos(undos)


def keep_schedules_watchable() -> Undo:
    """Let models attached later also observe the schedule that a loop fetches from now on."""
    from megatron.core.pipeline_parallel import schedules

    return join_undos([intercept(schedules, name, _call_unchanged) for name in SCHEDULE_FUNCTIONS])


def _call_unchanged(schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return schedule(*args, **kwargs)


class _ScheduleWatcher:
    """Wraps Megatron's functions, and reports to the listener what begins and ends.

    A step is one run of a schedule. Without a schedule, each call of the model is a step of its own. The two
    exclude each other, as a schedule calls the model too:

        idle --run()--> running --forward(), backward() for each microbatch--> idle
        idle --before_call()--> calling --after_call()--> idle

    Attributes:
        running: a schedule is running; calls of the model belong to its step.
        calling: a call of the model is running without a schedule.
        first_token: the tokens of the text that came in earlier calls of the model.
    """

    def __init__(self, roots: list[nn.Module], context_parallel: int, listener: Listener) -> None:
        self.roots, self.listener = roots, listener
        self.config = config_of(roots[0])
        self.context_parallel = context_parallel
        self.running = False
        self.calling = False
        self.first_token = 0

    def ours(self, model: Any) -> bool:
        models = model if isinstance(model, (list, tuple)) else [model]
        return any(unwrap_model(m) is root for m in models if isinstance(m, nn.Module) for root in self.roots)

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A schedule may call another one, and a loop may train other models, which are not hooked here.
        if self.running or not self.ours(kwargs.get("model")):
            return schedule(*args, **kwargs)
        count = int(kwargs["num_microbatches"])
        factor = partial(self.gradient_factor, count)
        with StepReport(self.listener, current_iteration(), factor, count):
            self.running = True
            try:
                return schedule(*args, **kwargs)
            finally:
                self.running = False

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model: Any = kwargs.get("model", args[2] if len(args) > 2 else None)
        if not self.ours(model):
            return step(*args, **kwargs)
        if not self.running:
            raise FlexError(
                "the schedule that runs was fetched before the hooks were attached and cannot be followed; "
                "call get_forward_backward_func() after attaching"
            )
        # The virtual chunk: a schedule passes each chunk's model, and not the number of the chunk.
        chunk = next((i for i, root in enumerate(self.roots) if unwrap_model(model) is root), 0)
        self.listener.forward_begins(int(kwargs.get("current_microbatch") or 0), chunk)
        result = step(*args, **kwargs)
        output, tokens = result if isinstance(result, tuple) else (result, None)
        per_token = getattr(self.config, "calculate_per_token_loss", False)
        self.listener.forward_ends(output, tokens if per_token else None)
        return result

    def backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.running:  # Megatron passes the output of the microbatch, by which the listener knows it again
            self.listener.backward_begins(kwargs.get("output_tensor", args[1] if len(args) > 1 else None))
        result = step(*args, **kwargs)
        if self.running:
            self.listener.backward_ends()
        return result

    def gradient_factor(self, microbatches: int) -> float:
        """The factor between Megatron's gradients and those of one microbatch's own loss.

        Without the loss for each token it multiplies a loss by the context parallel size and divides it by
        the number of microbatches, whether a loss function returns a pair or three (then the tokens are a
        rank's own, fewer by the context parallel size). `config.grad_scale_func` is a further factor.
        """
        config = self.config
        factor = 1.0
        if not getattr(config, "calculate_per_token_loss", False):
            factor *= self.context_parallel / microbatches
        return factor * read_loss_scale(self.roots)

    def infer(self, forward: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        """Make all stages raise alike: later ones wait for a tensor before they call their part."""
        if not self.running and self.ours(getattr(wrapper, "model", None)):
            self.listener.check_call()
        return forward(wrapper, *args, **kwargs)

    def before_call(self, chunk: int, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.running and not self.calling:  # no schedule runs: the call is a step of its own
            self.listener.call_begins(chunk=chunk)
            self.calling = True
        first = _count_cached_tokens(kwargs.get(INFERENCE_ARGUMENT))
        if first != self.first_token:
            self.first_token = first
            self.listener.text_continues(first)
        packed = _find_argument(root, args, kwargs, PACKED_ARGUMENT)
        if getattr(packed, "qkv_format", None) == "thd" and self.listener.hooked():
            self._pack_begins(packed)

    def _pack_begins(self, packed: Any) -> None:
        """The model is called on packed sequences: say which, and refuse what no layout describes."""
        config = self.config
        try:
            pack = read_pack(packed)
        except LayoutError as error:
            self.listener.reject_step(str(error))
            return
        self.listener.pack_begins(pack)
        group_size = getattr(packed, "local_cp_size", None)
        if group_size is not None:
            self.listener.reject_step(OWN_GROUP.format(size=group_size))
        elif uneven := explain_uneven_sequence(pack, self.context_parallel):
            self.listener.reject_step(uneven)
        samples = getattr(packed, "tokens_per_sample", None) is not None
        if samples and config.sequence_parallel and getattr(config, "num_moe_experts", None):
            self.listener.reject_step(PER_SAMPLE)

    def after_call(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.calling:
            self.calling = False
            self.listener.call_ends(failed=output is None)  # torch passes None when the forward raised


def _count_cached_tokens(context: Any) -> int:
    """The tokens of a text that came in earlier calls, as Megatron's context of an inference counts them.

    In a dynamic batch each request has its own number, and the requests follow one another in one row: -1.
    """
    if context is None:
        return 0
    is_static = getattr(context, "is_static_batching", None)
    return int(context.sequence_len_offset) if is_static is None or is_static() else -1


def read_loss_scale(roots: list[nn.Module]) -> float:
    """The factor by which Megatron multiplies a loss against underflow: the scale of its optimizer, or 1."""
    scale = config_of(roots[0]).grad_scale_func
    if scale is None:
        return 1.0
    parameter = next(p for root in roots for p in root.parameters())
    return float(scale(torch.ones(1, device=parameter.device)))


def _find_argument(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a model's forward, by keyword or by place; None if it was not given."""
    if name in kwargs or not args:
        return kwargs.get(name)
    kind: Any = type(root)
    place = _place_of(kind, name)
    return args[place] if place is not None and place < len(args) else None


@cache
def _place_of(kind: Any, name: str) -> int | None:
    """The place of an argument of a class's forward, counted without `self`; None if there is none."""
    names = list(inspect.signature(kind.forward).parameters)
    return names.index(name) - 1 if name in names else None


def read_pack(packed: Any) -> PackedSequences:
    """The sequences that Megatron's `PackedSeqParams` describe.

    Raises:
        LayoutError: they describe none.
    """
    ends, padded = packed.cu_seqlens_q, getattr(packed, "cu_seqlens_q_padded", None)
    if ends is None:
        raise LayoutError(NO_ENDS)
    return PackedSequences.from_ends(
        ends.reshape(-1).tolist(),
        None if padded is None else padded.reshape(-1).tolist(),
        by_sequence=not _shards_rows(),
    )


def _shards_rows() -> bool:
    """Whether the launcher shards the row of a pack over context parallel ranks, and not each sequence.

    Megatron's `get_batch` does so with `--dataloader-inter-document-masking`, unless it fine-tunes (`--sft`).
    """
    return bool(training_argument("dataloader_inter_document_masking")) and not training_argument("sft")


def current_iteration() -> int | None:
    """The iteration of `megatron.training`; None in a custom loop."""
    iteration = training_argument("curr_iteration")
    return None if iteration is None else int(iteration)
