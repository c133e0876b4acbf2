"""Megatron's DistributedDataParallel around a case's model, its finalizing of gradients, its optimizers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tests.support import gpt


def ddp(chunks: list[nn.Module], finalize: bool = True, **settings: Any) -> list[nn.Module]:
    """Wrap the chunks.

    Args:
        chunks: the model.
        finalize: whether the schedule finalizes gradients at its end.
        settings: for DistributedDataParallelConfig.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    known = inspect.signature(DistributedDataParallelConfig).parameters
    config = DistributedDataParallelConfig(**{k: v for k, v in settings.items() if k in known})
    if finalize:
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(c.config, config, c) for c in chunks]
    if settings.get("overlap_grad_reduce"):  # or each microbatch would start a reduction
        several = [w.no_sync for w in wrapped]
        for chunk in chunks:
            chunk.config.no_sync_func = several if len(several) > 1 else several[0]
    for chunk in wrapped:
        chunk.broadcast_params()
        chunk.zero_grad_buffer()
    return wrapped


def optimizer(chunks: list[nn.Module], lr: float, **settings: Any) -> Any:
    """Megatron's own optimizer for wrapped chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fields = inspect.signature(OptimizerConfig).parameters
    settings = {k: v for k, v in settings.items() if k in fields}
    config = OptimizerConfig(optimizer="adam", lr=lr, min_lr=lr, weight_decay=0.0, **settings)
    known = inspect.signature(get_megatron_optimizer).parameters
    groups = {"use_gloo_process_groups": False} if "use_gloo_process_groups" in known else {}
    return get_megatron_optimizer(config, chunks, **groups)


def verify_steps(case: gpt.Case, models: list[nn.Module], distributed: bool) -> str:
    """What `verify()` says of two steps of Megatron's optimizer, for wrapped models; empty if nothing."""
    import megatron_flex as mf

    adam: Any = optimizer(models, lr=1e-3, use_distributed_optimizer=distributed, clip_grad=1.0)
    try:
        with mf.FlexModel(models) as flex:
            flex.verify(steps=2)
            for _ in range(2):
                for model in models:
                    model.zero_grad_buffer()
                gpt.step(case, models, flex.session.mesh["dp"].coord)
                done, norm, _ = adam.step()
                assert done
                assert norm > 0
    except mf.VerifyError as error:
        return str(error)
    return ""
