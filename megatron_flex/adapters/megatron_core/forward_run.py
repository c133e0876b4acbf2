"""Forward runs of a Megatron model over full tokens, by the schedule of the version that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.megatron_core.model_architecture import DECODERS
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.errors import FlexError
from megatron_flex.layout import extract
from megatron_flex.mesh import Mesh

LEARNED_POSITIONS = "learned_absolute"
NEEDS_LABELS = (
    "this megatron-core runs a model with mtp_num_layers={} with labels only, and here are tokens alone; run "
    "your own step in `with flex.interp.trace()`, or take a megatron-core that has process_mtp_loss (0.19)"
)


def run_forward(chunks: list[nn.Module], root: Any, mesh: Mesh, tokens: Tensor, size: int | None) -> None:
    """Run all chunks forward; see `ModelRunner.run`."""
    size = tokens.shape[0] if size is None and tokens.ndim == 2 else size
    if not is_megatron(root, *DECODERS):
        raise FlexError(
            f"a {type(root).__name__} cannot be run on tokens alone; run your step in "
            "`with flex.interp.trace()`"
        )
    check_tokens(root, mesh, tokens, size)
    _check_runs_without_labels(root.config)
    microbatches = [shard_batch(root, mesh, microbatch) for microbatch in tokens.split(size or 1)]
    missing = count_microbatches(root.config, len(microbatches), len(chunks)) - len(microbatches)
    microbatches += microbatches[-1:] * missing
    from megatron.core.pipeline_parallel import get_forward_backward_func

    interleaved = len(chunks) > 1
    with torch.no_grad(), keep_random_states():
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(microbatches) for _ in chunks] if interleaved else iter(microbatches),
            model=chunks if interleaved else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=tokens.shape[1],
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,  # so that the output is not treated as a loss
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
    cp, tp, parallel = mesh["cp"].size, mesh["tp"].size, bool(root.config.sequence_parallel)
    parts = (2 * cp if cp > 1 else 1) * (tp if parallel else 1)
    if length % parts:
        why = f"context parallel size {cp}, tensor parallel size {tp}, sequence_parallel={parallel}"
        raise FlexError(
            f"a sequence of {length} cannot be cut into {parts} equal parts ({why}); pad them at the "
            f"end to {-(-length // parts) * parts}: later tokens do not change what is before them"
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


def _forward_step(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(iterator)
    return model(batch["tokens"], batch["positions"], None), _discard_logits


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
