"""Bugs of tensor and sequence parallelism, and of the arithmetic of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.support.bugs.bug import (
    ATTENTION,
    BIAS,
    CORE,
    DROPOUT,
    FC1,
    FC2,
    LAYER,
    MLP,
    PERMUTED,
    PRECISION,
    PROJ,
    QKV,
    TP2,
    TP2_DP2,
    TP2_SP,
    VECTOR,
    WORDS,
    Alone,
    Bug,
    State,
    attribute,
    modules,
    output,
    parameter,
    product,
    rank_of,
    rounded,
    stale,
    together,
    weight_in_product,
)

# -- reductions ----------------------------------------------------------------------------------------


def data_parallel_group(module: Any, magnitude: float) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def summed_again(tensor: Tensor, magnitude: float) -> Tensor:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    group = parallel_state.get_tensor_model_parallel_group()
    return mappings.reduce_from_tensor_model_parallel_region(tensor, group=group)  # type: ignore[no-any-return]


def gradient_summed_again(linear: Any, magnitude: float) -> Callable[..., Any]:
    """The input's gradient, which the linear sums, is summed once more."""
    from megatron.core.tensor_parallel import mappings

    real = linear.forward

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        again = mappings.copy_to_tensor_model_parallel_region(input, group=linear.tp_group)
        return real(again, *args, **kwargs)

    return forward


unreduced_gradient = together(  # a column-parallel linear leaves the sum of its input's gradient to another
    attribute(FC1, "allreduce_dgrad", lambda *_: False),
    attribute(FC1, "disable_grad_reduce", lambda *_: True),
)


def bias_before_reduction(linear: Any, magnitude: float) -> Callable[..., Tensor]:
    """The bias goes into each rank's partial sum."""
    gemm = linear._forward_impl
    return lambda *args, **kwargs: gemm(*args, **kwargs) + linear.bias


def weaker_bias(linear: Any, magnitude: float) -> Callable[..., Any]:
    """A part of the bias is left out."""
    real = linear.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out, bias = real(*args, **kwargs)
        return out, bias * (1 - magnitude)

    return forward


def gathered(linear: Any, reduce: bool) -> Callable[..., Any]:
    """The sequence is gathered before the linear: its gradient is split without a sum, or summed twice."""
    from megatron.core.tensor_parallel import mappings

    real = linear.forward

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        full = mappings.gather_from_sequence_parallel_region(
            input, tensor_parallel_output_grad=reduce, group=linear.tp_group
        )
        with (
            patch.object(linear, "sequence_parallel", False),
            patch.object(linear, "allreduce_dgrad", reduce),
            patch.object(linear, "disable_grad_reduce", not reduce),  # or it would copy its input for a sum
        ):
            return real(full, *args, **kwargs)

    return forward


def scattered(linear: Any, magnitude: float) -> Callable[..., Any]:
    """Each rank keeps its tokens of its own partial sum."""
    from megatron.core.tensor_parallel import mappings

    group = linear.tp_group

    def reduce(tensor: Tensor, **_: Any) -> Tensor:
        return mappings.scatter_to_sequence_parallel_region(tensor, group=group)  # type: ignore[no-any-return]

    return in_place_of_the_reduction(linear, reduce)


def in_place_of_the_reduction(linear: Any, reduce: Callable[..., Tensor]) -> Callable[..., Any]:
    from megatron.core.tensor_parallel import layers

    real = linear.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with patch.object(layers, "reduce_scatter_to_sequence_parallel_region", reduce):
            return real(*args, **kwargs)

    return forward


def to_the_other(linear: Any, magnitude: float) -> Callable[..., Any]:
    """The parts of the sequence go to the ranks in the other order."""
    from megatron.core.tensor_parallel import mappings

    group = linear.tp_group

    def reduce(tensor: Tensor, **_: Any) -> Tensor:
        turned = torch.cat(tensor.chunk(2)[::-1])
        return mappings.reduce_scatter_to_sequence_parallel_region(turned, group=group)  # type: ignore[no-any-return]

    return in_place_of_the_reduction(linear, reduce)


def unmarked(norm: Any, magnitude: float) -> nn.Parameter:
    """A norm's weight without the mark by which Megatron sums its gradient under sequence parallelism."""
    norm.weight.sequence_parallel = False
    return norm.weight  # type: ignore[no-any-return]


@contextmanager
def norms_summed_twice(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The gradients of norms are summed over tensor parallel ranks once more."""
    import importlib

    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    real = finalize._allreduce_non_tensor_model_parallel_grads

    def twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    with patch.object(finalize, "_allreduce_non_tensor_model_parallel_grads", twice):
        yield


# -- vocabulary ----------------------------------------------------------------------------------------


def wrong_vocabulary_mask(words: Any, magnitude: float) -> int:
    """The first rank's rows end three too early: nobody looks those tokens up."""
    return int(words.vocab_end_index) - (3 if words.vocab_start_index == 0 else 0)


@contextmanager
def short_range(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The first rank's range in the cross entropy ends six rows too early: their logits are not counted."""
    from megatron.core.tensor_parallel.utils import VocabUtility

    real = VocabUtility.vocab_range_from_per_partition_vocab_size

    def short(size: int, rank: int, world: int) -> tuple[int, int]:
        start, end = real(size, rank, world)
        return start, end - (6 if rank == 0 else 0)

    with patch.object(VocabUtility, "vocab_range_from_per_partition_vocab_size", staticmethod(short)):
        yield


@contextmanager
def unmasked_targets(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Ranks without a token's row add the logit of their first row."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    real = VocabParallelCrossEntropy.calculate_predicted_logits

    def calculate(*args: Any) -> Any:
        mask, rows, predicted, total, exponentials = real(*args)
        flat = exponentials.view(-1, exponentials.shape[-1])
        own = flat[torch.arange(len(flat)), rows].log().view_as(predicted)
        return mask, rows, own, total, exponentials

    with patch.object(VocabParallelCrossEntropy, "calculate_predicted_logits", staticmethod(calculate)):
        yield


@contextmanager
def unreduced_exponentials(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Each rank divides by the sum over its own part of the vocabulary."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    real = VocabParallelCrossEntropy.calculate_cross_entropy_loss

    def calculate(exponentials: Tensor, predicted: Tensor, total: Tensor) -> Any:
        return real(exponentials, predicted, exponentials.sum(-1))

    with patch.object(VocabParallelCrossEntropy, "calculate_cross_entropy_loss", staticmethod(calculate)):
        yield


# -- attention -----------------------------------------------------------------------------------------


def projections(
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], on: str = ""
) -> Any:
    """Change what the attention makes of its projection: queries, keys, values, `[s, b, heads, width]`."""

    def value(module: Any, magnitude: float) -> Callable[..., Any]:
        real = module.get_query_key_value_tensors
        return lambda *args, **kwargs: change(*real(*args, **kwargs))

    return attribute(ATTENTION, "get_query_key_value_tensors", value, on)


# -- parts of a tensor ---------------------------------------------------------------------------------


def not_a_number(tensor: Tensor, magnitude: float) -> Tensor:
    """A buffer with an entry that nobody has written."""
    tensor.data[3, 1, 5] = float("nan")
    return tensor


@contextmanager
def contiguous_halves(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The fused gate and up projection is dealt out in contiguous rows, and not half by half."""
    for fc1 in modules(models, FC1):
        fc1.weight.data.copy_(state[f"{FC1}.weight"].chunk(2)[rank_of("tp")])
    yield


@contextmanager
def exchanged_shards(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The ranks are loaded with each other's heads."""
    for linear in modules(models, QKV):
        linear.weight.data.copy_(state[f"{QKV}.weight"].chunk(2)[1 - rank_of("tp")])
    yield


# -- random numbers ------------------------------------------------------------------------------------


@contextmanager
def seed_of_its_own(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The second rank draws its dropout of replicated activations from another seed."""
    if rank_of("tp") == 1:
        torch.manual_seed(99)
    yield


TENSOR = [
    Bug(
        "wrong vocabulary mask in the embedding",
        "TP",
        TP2,
        attribute(WORDS, "vocab_end_index", wrong_vocabulary_mask),
        f"{WORDS}:partial",
        hint="zero wherever",
    ),
    Bug(
        "all-reduce missing after a row-parallel linear",
        "TP",
        TP2,
        attribute(FC2, "tp_group", lambda *_: Alone()),
        f"{FC2}:output",
        hint=r"replicas differ|missing|partial",
        replica=f"{FC2}:output",
    ),
    Bug(
        "all-reduce doubled after a row-parallel linear",
        "TP",
        TP2,
        output(FC2, summed_again),
        f"{FC2}:output",
        hint=r"which is .*tp",
    ),
    Bug(
        "reduction over the wrong group",
        "TP",
        TP2_DP2,
        attribute(PROJ, "tp_group", data_parallel_group),
        f"{PROJ}:output",
        hint=r"replicas differ|missing|group",
    ),
    Bug(
        "row-parallel output averaged",
        "TP",
        TP2,
        output(FC2, lambda t, m: t / 2),
        f"{FC2}:output",
        hint=r"1 / tp",
    ),
    Bug(
        "all-reduce missing in the backward pass of a column-parallel linear",
        "TP",
        TP2,
        unreduced_gradient,
        FC1,
        "gradient",
        r"replicas differ|missing|partial",
        f"{LAYER}.pre_mlp_layernorm:output.grad",
    ),
    Bug(
        "all-reduce doubled in the backward pass of a column-parallel linear",
        "TP",
        TP2,
        attribute(FC1, "forward", gradient_summed_again),
        (FC1, f"{MLP}:input"),
        "gradient",
        r"which is .*tp",
    ),
    Bug(
        "bias added on every rank before the reduction",
        "TP",
        BIAS,
        attribute(FC2, "_forward_impl", bias_before_reduction),
        f"{FC2}:partial",
        hint=VECTOR,
    ),
    Bug(
        "bias left out",
        "TP",
        BIAS,
        attribute(FC2, "forward", weaker_bias),
        (f"{LAYER}:output", MLP),
        hint=VECTOR,
        sweep=(1e-6, 1.0),
        measure="part of the bias",
    ),
    Bug(
        "stale copy of one rank's fc1 in the product",
        "TP",
        TP2,
        weight_in_product(FC1, stale, "tp"),
        f"{FC1}:output",
        hint=r"tp rank 1",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "stale fc1 on one rank",
        "TP",
        TP2,
        parameter(f"{FC1}.weight", stale, "tp"),
        f"{FC1}.weight",
        "parameter",
        r"tp rank 1",
        sweep=(1e-7, 0.02),
    ),
    Bug(
        "gate and up swapped",
        "TP",
        TP2,
        output(FC1, lambda t, m: torch.cat(t.chunk(2, -1)[::-1], -1)),
        f"{FC1}:output",
        hint=PERMUTED,
    ),
    Bug(
        "gate and up dealt out contiguously",
        "TP",
        TP2,
        contiguous_halves,
        f"{FC1}.weight",
        "parameter",
        PERMUTED,
    ),
    Bug(
        "keys and values swapped",
        "TP",
        TP2,
        projections(lambda q, k, v: (q, v, k)),
        (QKV, ATTENTION),
        hint=PERMUTED,
    ),
    Bug(
        "two heads swapped on one rank",
        "TP",
        TP2,
        projections(lambda q, k, v: (q.flip(2), k, v), "tp"),
        (QKV, ATTENTION),
        hint=PERMUTED,
    ),
    Bug("heads of the ranks exchanged", "TP", TP2, exchanged_shards, f"{QKV}.weight", "parameter", PERMUTED),
    Bug(
        "columns of one rank's product shifted",
        "TP",
        TP2,
        product(FC1, lambda t, m: t.roll(1, -1), "tp"),
        f"{FC1}:output",
        hint=f"{PERMUTED}|shift",
    ),
    Bug(
        "one rank's product in a narrower dtype",
        "TP",
        TP2,
        product(FC2, rounded, "tp"),
        f"{FC2}:partial",
        hint=PRECISION,
        sweep=(2.0**-22, 2.0**-4),
        measure="unit roundoff",
    ),
    Bug(
        "one rank's input in a narrower dtype",
        "TP",
        TP2,
        output(CORE, rounded, "tp"),
        f"{CORE}:output",
        hint=PRECISION,
        sweep=(2.0**-22, 2.0**-4),
        measure="unit roundoff",
    ),
    Bug(
        "short vocabulary range in the cross entropy",
        "TP",
        TP2,
        short_range,
        "loss:output",
        hint="token|sample",
    ),
    Bug("targets not masked in the cross entropy", "TP", TP2, unmasked_targets, "loss:output", hint=""),
    Bug(
        "exponentials not summed in the cross entropy",
        "TP",
        TP2,
        unreduced_exponentials,
        "loss:output",
        hint="replicas differ",
        replica="loss:output",
    ),
    Bug(
        "dropout seed of its own",
        "TP",
        DROPOUT,
        seed_of_its_own,
        ("embedding:output", "decoder.layers.0:input"),
        hint="replicas differ",
        replica="embedding:output",
    ),
    Bug(
        "memory that nobody has written",
        "TP",
        TP2_SP,
        product("decoder.layers.0.mlp.linear_fc2", not_a_number, "tp"),
        "decoder.layers.0.mlp.linear_fc2:partial",
        hint="NaN",
    ),
    Bug(
        "layernorm gradient not reduced under sequence parallelism",
        "SP",
        TP2_SP,
        attribute(f"{LAYER}.pre_mlp_layernorm", "weight", unmarked),
        f"{LAYER}.pre_mlp_layernorm.weight",
        "parameter_gradient",
        r"replicas differ|missing",
        f"{LAYER}.pre_mlp_layernorm.weight.grad",
    ),
    Bug(
        "layernorm gradients reduced twice under sequence parallelism",
        "SP",
        TP2_SP,
        norms_summed_twice,
        "decoder.final_layernorm.weight",
        "parameter_gradient",
        r"which is .*tp",
    ),
    Bug(
        "scatter in place of a reduce-scatter",
        "SP",
        TP2_SP,
        attribute(FC2, "forward", scattered),
        f"{FC2}:output",
        hint=r"missing|partial|summand",
    ),
    Bug(
        "reduce-scatter to the wrong ranks",
        "SP",
        TP2_SP,
        attribute(FC2, "forward", to_the_other),
        f"{FC2}:output",
        hint=PERMUTED,
    ),
    Bug(
        "reduce-scatter missing in the backward pass of a gather",
        "SP",
        TP2_SP,
        attribute(FC1, "forward", lambda module, _: gathered(module, False)),
        (FC1, f"{MLP}:input"),
        "gradient",
        r"missing|partial|summand",
    ),
    Bug(
        "reduce-scatter after an all-reduce in the backward pass",
        "SP",
        TP2_SP,
        attribute(FC1, "forward", lambda module, _: gathered(module, True)),
        (FC1, f"{MLP}:input"),
        "gradient",
        r"which is .*tp",
    ),
]
