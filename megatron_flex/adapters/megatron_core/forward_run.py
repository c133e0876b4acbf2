"""Forward runs of a Megatron model over full tokens, by the schedule of the version that is installed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters.megatron_core.model_architecture import DECODERS
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.collectives import gather_distinct
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, extract
from megatron_flex.mesh import Mesh

GRADIENT = "gradient of the logits"  # in a microbatch
LEARNED_POSITIONS = "learned_absolute"
NEEDS_LABELS = (
    "this megatron-core runs a model with mtp_num_layers={} with labels only, and here are tokens alone; run "
    "your own step in `with flex.interp.trace()`, or take a megatron-core that has process_mtp_loss (0.19)"
)


NOT_CAUSAL = (
    "{layer} has attn_mask_type {kind} and would attend to padding; run prompts of the same length together"
)


class OutputGradient(NamedTuple):
    """A gradient of the logits, from which a backward pass begins.

    Attributes:
        tensor: `[batch, pos, vocabulary]`.
        layout: of the site of the logits.
    """

    tensor: Tensor
    layout: Layout

    def shard(self, mesh: Mesh, rows: slice) -> Tensor:
        """This rank's part for a microbatch, `[batch, pos, vocabulary]`."""
        part = self.tensor[rows].transpose(0, 1).contiguous()
        return extract(self.layout, part, mesh.coords, mesh.sizes).transpose(0, 1)


def run_forward(
    chunks: list[nn.Module],
    roots: list[nn.Module],
    mesh: Mesh,
    prompts: Prompts,
    size: int | None,
    gradient: OutputGradient | None = None,
) -> None:
    """Run all chunks forward, and backward from a gradient; see `ModelRunner.run`."""
    root: Any = roots[0]
    if prompts.attention_mask is not None:  # a token of padding may not be in the vocabulary
        prompts = replace(prompts, tokens=prompts.tokens.masked_fill(prompts.attention_mask == 0, 0))
    tokens = prompts.tokens
    size = tokens.shape[0] if size is None and tokens.ndim == 2 else size
    if not is_megatron(root, *DECODERS):
        raise FlexError(
            f"a {type(root).__name__} cannot be run on tokens alone; run your step in "
            "`with flex.interp.trace()`"
        )
    check_tokens(root, mesh, tokens, size)
    _check_runs_without_labels(root.config)
    check_keywords(root, prompts)
    if prompts.padded:
        check_causal(roots, mesh)
    microbatches = [shard_prompts(root, mesh, part) for part in prompts.split(size)]
    for number, batch in enumerate(microbatches if gradient is not None else ()):
        assert gradient is not None
        assert size is not None
        batch[GRADIENT] = gradient.shard(mesh, slice(number * size, (number + 1) * size))
    missing = count_microbatches(root.config, len(microbatches), len(chunks)) - len(microbatches)
    microbatches += microbatches[-1:] * missing
    from megatron.core.pipeline_parallel import get_forward_backward_func

    interleaved = len(chunks) > 1
    with torch.set_grad_enabled(gradient is not None), keep_random_states():
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(microbatches) for _ in chunks] if interleaved else iter(microbatches),
            model=chunks if interleaved else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=tokens.shape[1],
            micro_batch_size=size,
            forward_only=gradient is None,
            collect_non_loss_data=gradient is None,  # so that the output is not treated as a loss
        )


def check_tokens(root: Any, mesh: Mesh, tokens: Tensor, size: int | None) -> None:
    """Refuse tokens that would fail on some ranks only, or in the middle of the model.

    Raises:
        FlexError: on all ranks, which have the same tokens.
    """
    if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
        raise FlexError(
            f"tokens of shape {tuple(tokens.shape)} and dtype {tokens.dtype}; give integers [batch, sequence]"
        )
    batch, length = tokens.shape
    if not size or size < 0 or batch % size:
        raise FlexError(f"microbatch_size={size} must divide the batch of {batch}; choose one that does")
    parts = count_sequence_parts(root, mesh)
    if length % parts:
        cp, tp, parallel = mesh["cp"].size, mesh["tp"].size, bool(root.config.sequence_parallel)
        why = f"context parallel size {cp}, tensor parallel size {tp}, sequence_parallel={parallel}"
        raise FlexError(
            f"a sequence of {length} cannot be cut into {parts} equal parts ({why}); pad them at the "
            f"end to {-(-length // parts) * parts}: later tokens do not change what is before them; or give "
            "an attention_mask, with which that is done here"
        )
    longest = getattr(root, "max_sequence_length", length)
    if getattr(root, "position_embedding_type", "") == LEARNED_POSITIONS and length > longest:
        raise FlexError(
            f"a sequence of {length} has no positions in this model; give at most {longest} tokens"
        )
    known = getattr(root, "vocab_size", None)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (isinstance(known, int) and high >= known):
        raise FlexError(f"tokens from {low} to {high} are not all in the vocabulary of {known}; give its own")


def count_sequence_parts(root: Any, mesh: Mesh) -> int:
    """The number of equal parts that context and sequence parallelism divide a sequence into."""
    cp, sequence_parallel = (
        mesh["cp"].size,
        bool(getattr(getattr(root, "config", None), "sequence_parallel", False)),
    )
    return (2 * cp if cp > 1 else 1) * (mesh["tp"].size if sequence_parallel else 1)


def check_keywords(root: Any, prompts: Prompts) -> None:
    """Refuse keywords that the model does not take, and positions that it would not use.

    Raises:
        FlexError: on all ranks, which have the same prompts.
    """
    taken = inspect.signature(root.forward).parameters
    untaken = [name for name in prompts.inputs if name not in taken]
    if untaken:
        raise FlexError(
            f"the forward of {type(root).__name__} takes {', '.join(taken)}, and here is "
            f"{', '.join(untaken)}; leave that out"
        )
    kind, positions = getattr(root, "position_embedding_type", ""), prompts.position_ids
    if positions is None:
        return
    if kind != LEARNED_POSITIONS:
        usual = torch.arange(positions.shape[1], device=positions.device)
        text = slice(None) if prompts.attention_mask is None else prompts.attention_mask.bool()
        if not torch.equal(positions[text], usual.expand_as(positions)[text]):
            raise FlexError(
                f"a {type(root).__name__} with position_embedding_type={kind!r} counts positions itself, so "
                "that position_ids would change nothing; leave them out"
            )
    low, high, longest = (
        int(positions.min()),
        int(positions.max()),
        getattr(root, "max_sequence_length", None),
    )
    if low < 0 or (isinstance(longest, int) and high >= longest):
        raise FlexError(
            f"position_ids from {low} to {high} are not all in this model's {longest}; give its own"
        )


def check_causal(roots: list[nn.Module], mesh: Mesh) -> None:
    """Refuse padding where text would attend to it. Collective, since stages have different layers.

    Raises:
        FlexError: on all ranks: some attention is not causal.
    """
    kinds = ((n, getattr(m, "attn_mask_type", None)) for root in roots for n, m in root.named_modules())
    others = [(n, kind.name) for n, kind in kinds if kind is not None and "causal" not in kind.name]
    why = NOT_CAUSAL.format(layer=others[0][0], kind=others[0][1]) if others else ""
    refusals = [reason for reason in gather_distinct(why, mesh.replica()) if reason]
    if refusals:
        raise FlexError(refusals[0])


def shard_prompts(root: Any, mesh: Mesh, prompts: Prompts) -> dict[str, Any]:
    """This rank's part of one microbatch, as keywords of `_forward_step`.

    Padding follows the text, to which later tokens are masked by causal attention: it needs no mask.
    """
    tokens, positions = prompts.tokens, prompts.position_ids
    per_token = {
        name: value
        for name, value in prompts.inputs.items()
        if isinstance(value, Tensor) and value.shape == tokens.shape
    }
    if positions is not None:
        per_token["positions"] = positions
    return {**prompts.inputs, **shard_batch(root, mesh, tokens, **per_token)}


def _check_runs_without_labels(config: Any) -> None:
    """Refuse multi-token prediction where Megatron computes its losses with labels only."""
    depths = getattr(config, "mtp_num_layers", None)
    if depths is None:
        return
    from megatron.core.transformer import multi_token_prediction

    if not hasattr(multi_token_prediction, "process_mtp_loss"):
        raise FlexError(NEEDS_LABELS.format(depths))


def shard_batch(root: Any, mesh: Mesh, tokens: Tensor, **more: Tensor) -> dict[str, Tensor]:
    """This rank's part of one microbatch under context parallelism: of the tokens, positions and `more`.

    Args:
        root: the unwrapped model.
        mesh: the axes of the run.
        tokens: `[batch, sequence]`.
        more: further tensors of that shape.
    """
    device = next(root.parameters()).device
    layout = ModelLayouts(root.config, mesh, None).loss()
    batch = {"tokens": tokens.long(), "positions": torch.arange(tokens.shape[1]).expand_as(tokens), **more}
    shards = {name: extract(layout, t.cpu(), mesh.coords, mesh.sizes) for name, t in batch.items()}
    return {name: shard.contiguous().to(device) for name, shard in shards.items()}


def _forward_step(iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = dict(next(iterator))  # copies of a microbatch are the same dict
    tokens, positions, gradient = batch.pop("tokens"), batch.pop("positions"), batch.pop(GRADIENT, None)

    def product(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """A loss that has this gradient."""
        return (output.float() * gradient.to(output.device)).sum(), {}

    output = model(tokens, positions, None, **batch)
    return output, _discard_logits if gradient is None else product


def _discard_logits(output: Tensor, non_loss_data: bool = False) -> None:
    """Megatron's logits."""


def count_microbatches(config: Any, count: int, chunks: int) -> int:
    """The minimum number of microbatches of the schedule: an interleaved one runs them in groups."""
    if chunks == 1:
        return count
    stages = config.pipeline_model_parallel_size
    group = getattr(config, "microbatch_group_size_per_vp_stage", None) or stages
    return int(-(-count // group) * group)


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Restore the random generators, so that a training run continues unchanged."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    states = tracker.get_states()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        try:
            yield
        finally:
            tracker.set_states(states)
