"""Megatron's own training step for tests: DistributedDataParallel, finalize_model_grads, its optimizer."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tests.support import gpt

LOSS_SCALE = 128.0  # of fp16


class Trainer:
    """Chunks in Megatron's wrappers with an optimizer, as `megatron.training` puts them together.

    `ddp` goes to DistributedDataParallelConfig. A model in half precision is wrapped in Float16Module, and
    its optimizer keeps weights in fp32; in fp16 the loss is scaled by a constant.
    """

    def __init__(self, case: gpt.Case, chunks: list[nn.Module], rank: int, **ddp: Any) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.module import Float16Module

        self.case, self.rank = case, rank
        self.half = {n: bool(case.extra.get(n)) for n in ("bf16", "fp16")}
        if any(self.half.values()):
            chunks = [Float16Module(c.config, c) for c in chunks]
        wanted = DistributedDataParallelConfig(**ddp)
        self.overlapped = wanted.overlap_param_gather
        self.models: list[Any] = [
            DistributedDataParallel(chunk.config, wanted, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        for model in self.models:
            model.config.finalize_model_grads_func = finalize_model_grads
            if wanted.overlap_grad_reduce:
                stops = [m.no_sync for m in self.models]
                model.config.no_sync_func = stops if len(stops) > 1 else stops[0]
        self.optimizer = self._optimizer(wanted.use_distributed_optimizer, wanted.overlap_param_gather)

    def _optimizer(self, distributed: bool, overlapped: bool) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        # Adam divides a gradient by its own size: where that is small, so that the sums' last digits are all
        # there is, they would become a whole step. The eps keeps the update smooth there.
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.01,
            weight_decay=0.1,
            adam_eps=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
            **self.half,
            **({"loss_scale": LOSS_SCALE} if self.half["fp16"] else {}),
            **({"params_dtype": self.case.extra["params_dtype"]} if any(self.half.values()) else {}),
            **(
                {"overlap_param_gather": overlapped}
                if "overlap_param_gather" in inspect.signature(OptimizerConfig).parameters
                else {}
            ),
        )
        optimizer = get_megatron_optimizer(config, self.models, use_gloo_process_groups=False)
        if self.half["fp16"]:
            for model in self.models:
                model.config.grad_scale_func = optimizer.scale_loss
        for group in optimizer.param_groups:  # what a scheduler of the learning rate would set
            group["lr"] = 0.01
        return optimizer

    def step(self) -> tuple[list[float], float]:
        """One training step; losses of the microbatches and the norm of the gradient."""
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = gpt.step(self.case, self.models, self.rank)
        good, norm, _ = self.optimizer.step()
        assert good
        return losses, float(norm)

    def settle(self) -> None:
        """Finish gathering parameters that the next forward pass would have waited for."""
        if self.overlapped:
            for model in self.models:
                model.start_param_sync(force_sync=True)
