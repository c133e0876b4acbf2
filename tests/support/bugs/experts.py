"""Bugs of experts, of recomputation and of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support import gpt
from tests.support.bugs.bug import (
    BALANCED,
    EXPERTS,
    EXPERTS_SP,
    FACTOR,
    LAYER,
    MISSING,
    MLP,
    PERMUTED,
    PRECISION,
    RECOMPUTED,
    RECOMPUTED_DROPOUT,
    TP2,
    Bug,
    Patch,
    State,
    attribute,
    modules,
    output,
    parameter,
    rank_of,
    rounded,
    scaled,
    stale,
    unwrapped,
)
from tests.support.bugs.spread import ALL, averaged
from tests.support.bugs.tensor import unmarked


@contextmanager
def unsorted_experts(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Rows that came from other ranks are not sorted by expert; they go home as they came."""
    from megatron.core.transformer.moe import token_dispatcher

    def as_they_are(rows: Tensor, sizes: Tensor, order: Tensor, probs: Any = None, **_: Any) -> Any:
        return rows, probs

    with patch.object(token_dispatcher, "sort_chunks_by_idxs", as_they_are):
        yield


def experts_from(place: Callable[[int], int]) -> Patch:
    """Experts of the second layer are loaded with other experts' weights."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        for model in models:
            for name, weight in gpt.global_names(unwrapped(model)):
                steps = name.split(".")
                if "local_experts" in steps and steps[2] == "1":
                    at = steps.index("local_experts") + 1
                    steps[at] = str(place(int(steps[at])))
                    weight.data.copy_(state[".".join(steps)])
        yield

    return apply


@contextmanager
def own_rows(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Partial sums of an expert's tensor parallel ranks are divided among them and not summed."""
    from megatron.core.transformer.moe import token_dispatcher

    def split(rows: Tensor, group: Any, input_split_sizes: Any = None, **_: Any) -> Tensor:
        sizes = input_split_sizes or [len(rows) // group.size()] * group.size()
        return rows.split(sizes)[group.rank()]

    with patch.object(token_dispatcher, "reduce_scatter_to_sequence_parallel_region", split):
        yield


@contextmanager
def balanced_more(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The coefficient of the balancing loss."""
    with ExitStack() as stack:
        for router in modules(models, f"{MLP}.router"):
            value = attribute_of_coefficient(router, magnitude)
            stack.enter_context(patch.object(router, "get_aux_loss_coeff", value))
        yield


def attribute_of_coefficient(router: Any, magnitude: float) -> Callable[[str], float]:
    real = router.get_aux_loss_coeff
    return lambda kind: real(kind) * (1 + magnitude)


def rounded_logits(router: Any, magnitude: float) -> Callable[..., Tensor]:
    real = router.gating
    return lambda *args, **kwargs: rounded(real(*args, **kwargs), magnitude)


def recomputed(change: Callable[[Tensor, Tensor, float], Tensor]) -> Patch:
    """Recomputation begins with another input: of the right one, and the last layer's."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        from megatron.core import tensor_parallel

        real, latest = tensor_parallel.checkpoint, []

        def checkpoint(function: Any, distribute: bool, hidden: Tensor, *rest: Any) -> Any:
            latest[:] = [hidden.detach().clone()]

            def run(hidden: Tensor, *rest: Any) -> Any:
                if torch.is_grad_enabled():  # again, in the backward pass
                    other = change(hidden, latest[0], magnitude)
                    hidden = hidden + (other - hidden).detach()
                return function(hidden, *rest)

            return real(run, distribute, hidden, *rest)

        with patch.object(tensor_parallel, "checkpoint", checkpoint):
            yield

    return apply


@contextmanager
def random_states_lost(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Recomputation does not go back to the random state of the first pass."""
    from megatron.core.tensor_parallel import random

    with patch.object(random, "_set_all_rng_states", lambda *_: None):
        yield


def optimizers() -> Any:
    from megatron.core.optimizer import optimizer

    return optimizer


def optimizer_step(change: Callable[[Any, float], None]) -> Patch:
    """Change the optimizer before its step; the bug shows in the parameters of the next iteration."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        kind = optimizers().MixedPrecisionOptimizer
        plain = optimizers().FP32Optimizer
        with ExitStack() as stack:
            for owner in (kind, plain):
                stack.enter_context(
                    patch.object(owner, "step_with_ready_grads", changed_step(owner, change, magnitude))
                )
            yield

    return apply


def changed_step(owner: Any, change: Callable[[Any, float], None], magnitude: float) -> Callable[[Any], bool]:
    real = owner.step_with_ready_grads

    def step(optimizer: Any) -> bool:
        kept = [(g, {k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
        change(optimizer, magnitude)
        try:
            return bool(real(optimizer))
        finally:
            for group, values in kept:
                group.update(values)

    return step


def faster(optimizer: Any, magnitude: float) -> None:
    """Another learning rate."""
    for group in optimizer.param_groups:
        group["lr"] *= 1 + magnitude


def decayed_norms(optimizer: Any, magnitude: float) -> None:
    """Norms decay more than they should."""
    for group in optimizer.param_groups:
        if not group["wd_mult"]:
            group["weight_decay"] *= 1 + magnitude


def other_momentum(optimizer: Any, magnitude: float) -> None:
    """Another epsilon in the denominator of Adam."""
    for group in optimizer.param_groups:
        group["eps"] *= 1 + magnitude


@contextmanager
def local_norm(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Each rank clips by the norm of its own gradients."""
    from megatron.core.optimizer import optimizer

    def own(grads: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> float:
        return float(torch.sqrt(sum((g.float().square().sum() for g in grads), torch.zeros(()))))

    with patch.object(optimizer, "get_grad_norm_fp32", own):
        yield


@contextmanager
def lost_update(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The second rank's fc1 gets a part of its update only."""
    from megatron.core.optimizer import optimizer

    kinds = (optimizer.MixedPrecisionOptimizer, optimizer.FP32Optimizer)
    weights = [m.weight for m in modules(models, f"{MLP}.linear_fc1")] if rank_of("tp") == 1 else []
    with ExitStack() as stack:
        for kind in kinds:
            real = kind.step_with_ready_grads

            def step(found: Any, real: Any = real) -> bool:
                before = [w.detach().clone() for w in weights]
                good = real(found)
                for weight, old in zip(weights, before, strict=True):
                    weight.data.lerp_(old, magnitude)
                return bool(good)

            stack.enter_context(patch.object(kind, "step_with_ready_grads", step))
        yield


@contextmanager
def kept_gradients(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The gradient buffers are not cleared before the next step."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(patch.object(model, "zero_grad_buffer", lambda: None))
        yield


EXPERTS_AND_STEPS = [
    # Experts.
    Bug(
        "router weights not synchronised",
        "EP",
        EXPERTS,
        parameter(f"{MLP}.router.weight", stale, "dp"),
        (f"{MLP}.router:logits", f"{MLP}.router.weight"),
        hint=r"dp rank 1 of 2|replicas differ",
        replica=f"{MLP}.router.weight",
        sweep=(1e-6, 0.3),
    ),
    Bug(
        "router's gradient not reduced under sequence parallelism",
        "EP",
        EXPERTS_SP,
        attribute(f"{MLP}.router", "weight", unmarked),
        f"{MLP}.router.weight",
        "parameter_gradient",
        MISSING,
    ),
    Bug(
        "a wrong expert permutation",
        "EP",
        EXPERTS,
        unsorted_experts,
        "decoder.layers.0.mlp.experts",
        hint=f"{PERMUTED}|expert",
    ),
    Bug(
        "two experts swapped",
        "EP",
        EXPERTS,
        experts_from(lambda n: {0: 1, 1: 0}.get(n, n)),
        f"{MLP}.experts.local_experts",
        "parameter",
        f"{PERMUTED}|expert",
    ),
    Bug(
        "experts dealt out to the wrong ranks",
        "EP",
        EXPERTS,
        experts_from(lambda n: {0: 0, 1: 2, 2: 1, 3: 3}[n]),
        f"{MLP}.experts.local_experts",
        "parameter",
        f"{PERMUTED}|expert",
    ),
    Bug(
        "gradients of experts averaged over their own group",
        "EP",
        EXPERTS,
        averaged(lambda f, m: f * 2, only_experts=True),
        "decoder.layers",
        "parameter_gradient",
        r"which is .*(ep|dp)",
    ),
    Bug(
        "stale expert",
        "EP",
        EXPERTS,
        parameter(f"{MLP}.experts.local_experts.2.linear_fc1.weight", stale),
        f"{MLP}.experts.local_experts.2.linear_fc1.weight",
        "parameter",
        "",
        sweep=(1e-7, 0.02),
    ),
    Bug(
        "router probabilities off by a factor",
        "EP",
        EXPERTS,
        output(f"{MLP}.router", scaled),
        f"{MLP}.router:probs",
        hint=FACTOR,
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "router logits in a narrower dtype",
        "EP",
        EXPERTS,
        attribute(f"{MLP}.router", "gating", rounded_logits),
        f"{MLP}.router:logits",
        hint=PRECISION,
        sweep=(2.0**-22, 2.0**-8),
        measure="unit roundoff",
    ),
    Bug(
        "coefficient of the balancing loss",
        "EP",
        BALANCED,
        balanced_more,
        f"{MLP}.router",
        "gradient",
        "",
        sweep=(1e-5, 1.0),
    ),
    Bug(
        "shared expert off by a factor",
        "EP",
        EXPERTS,
        output(f"{MLP}.shared_experts", scaled),
        f"{MLP}.shared_experts:output",
        hint=FACTOR,
        sweep=(1e-7, 1.0),
    ),
    Bug(
        "partial sums of experts not reduced",
        "ETP",
        EXPERTS_SP,
        own_rows,
        ("decoder.layers.0.mlp.experts", "decoder.layers.0.mlp:output"),
        hint=MISSING,
    ),
    # Recomputation.
    Bug(
        "stale activation in recomputation",
        "recomputation",
        RECOMPUTED,
        recomputed(lambda own, last, m: last),
        f"{MLP}.linear_fc1",
        "gradient",
    ),
    Bug(
        "recomputation of another input",
        "recomputation",
        RECOMPUTED,
        recomputed(lambda own, last, m: stale(own, m)),
        "decoder.layers.2",
        "gradient",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "recomputation with other dropout",
        "recomputation",
        RECOMPUTED_DROPOUT,
        random_states_lost,
        LAYER,
        "gradient",
    ),
    # The optimizer.
    Bug(
        "learning rate",
        "optimizer",
        TP2,
        optimizer_step(faster),
        ALL,
        "parameter",
        "",
        sweep=(1e-6, 1.0),
        steps=2,
    ),
    Bug(
        "epsilon of Adam",
        "optimizer",
        TP2,
        optimizer_step(other_momentum),
        ALL,
        "parameter",
        "",
        sweep=(1e-5, 10.0),
        steps=2,
    ),
    Bug(
        "weight decay of norms",
        "optimizer",
        TP2,
        optimizer_step(decayed_norms),
        ALL,
        "parameter",
        "",
        sweep=(1e-5, 10.0),
        steps=2,
    ),
    Bug("gradient norm of one rank", "optimizer", TP2, local_norm, ALL, "parameter", "", steps=2),
    Bug(
        "update of one rank's weight lost",
        "optimizer",
        TP2,
        lost_update,
        f"{MLP}.linear_fc1.weight",
        "parameter",
        "tp rank 1",
        sweep=(1e-5, 1.0),
        steps=2,
    ),
    Bug("gradients not cleared", "optimizer", TP2, kept_gradients, ALL, "parameter_gradient", "", steps=2),
]
