"""Bugs of context, data and pipeline parallelism, and of the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.support import context, gpt
from tests.support.bugs.bug import (
    CP2,
    DP2,
    FACTOR,
    LAYER,
    MISSING,
    PERMUTED,
    PP2,
    PRECISION,
    TIED,
    TP2,
    VPP2,
    WORDS,
    Bug,
    Patch,
    State,
    attribute,
    gradient,
    modules,
    rank_of,
    round_to,
    size_of,
    stale,
    unwrapped,
)

# -- the loss ------------------------------------------------------------------------------------------


def loss_times(factor: Callable[[float, int], float]) -> Patch:
    """Multiply the loss before its gradient is taken; the factor is of the magnitude and the microbatch."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        real, calls = gpt.forward_step, [0]

        def forward_step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
            output, loss_function = real(iterator, model)

            def other(output: Tensor) -> Any:
                loss, report = loss_function(output)
                calls[0] += 1
                return loss * factor(magnitude, calls[0] - 1), report

            return output, other

        with patch.object(gpt, "forward_step", forward_step):
            yield

    return apply


@contextmanager
def without_context_factor(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The schedule does not know of context parallel ranks, and DDP averages over them."""
    from megatron.core.pipeline_parallel import schedules

    real = schedules.forward_step_calc_loss

    def calculate(*args: Any) -> Any:
        return real(*args[:8], 1, *args[9:])

    with patch.object(schedules, "forward_step_calc_loss", calculate):
        yield


# -- context parallel ------------------------------------------------------------------------------------


@contextmanager
def contiguous_data(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The data loader deals a sequence out in one piece for each context parallel rank."""
    size, rank = size_of("cp"), rank_of("cp")
    with patch.object(context, "here", lambda length: torch.arange(length).chunk(size)[rank]):
        yield


@contextmanager
def keys_as_they_come(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Attention takes the gathered keys and values for contiguous parts of the sequence."""

    def contiguous(length: int, size: int, rank: int) -> Tensor:
        return torch.arange(length).chunk(size)[rank]

    here = context.here(gpt.SEQUENCE)
    with patch.object(context, "places", contiguous), patch.object(context, "here", lambda _: here):
        yield


@contextmanager
def contiguous_mask(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Attention masks its queries as if they were a contiguous part of the sequence."""
    size, rank = size_of("cp"), rank_of("cp")
    loader = SimpleNamespace(**{n: getattr(context, n) for n in ("here", "total", "plug_in")})
    with (
        patch.object(gpt, "context", loader),
        patch.object(context, "here", lambda length: torch.arange(length).chunk(size)[rank]),
    ):
        yield


def positions(change: Callable[[Tensor, int, Any], Tensor]) -> Patch:
    """Change the rotary angles that a context parallel rank takes of the full sequence's."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        from megatron.core.models.common.embeddings import rotary_pos_embedding as module

        real = module.get_pos_emb_on_this_cp_rank

        def other(angles: Tensor, dim: int, group: Any) -> Tensor:
            return (
                change(angles, dim, group)
                if change is restarted
                else real(change(angles, dim, group), dim, group)
            )

        with patch.object(module, "get_pos_emb_on_this_cp_rank", other):
            yield

    return apply


def restarted(angles: Tensor, dim: int, group: Any) -> Tensor:
    """Each context parallel rank counts its positions from 0."""
    return angles.narrow(dim, 0, angles.shape[dim] // group.size())


def offset(angles: Tensor, dim: int, group: Any) -> Tensor:
    """The second context parallel rank counts from 1."""
    return angles.roll(-1, dim) if group.rank() == 1 else angles


@contextmanager
def own_keys_gradient(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Gradients of keys and values are not summed over the ranks whose queries read them."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.order].chunk(ctx.group.size())[ctx.group.rank()], None

    with patch.object(context.Gather, "backward", staticmethod(backward)):
        yield


# -- data parallel ---------------------------------------------------------------------------------------


def groups_of(models: list[Any], experts: bool = True) -> list[Any]:
    """The bucket groups of DDP."""
    return [
        g for m in models for g in [*m.bucket_groups, *(m.expert_parallel_bucket_groups if experts else ())]
    ]


def averaged(factor: Callable[[float, float], float], on: str = "", only_experts: bool = False) -> Patch:
    """Another factor of the gradients before DDP's reduction, made of the right one and the magnitude."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        with ExitStack() as stack:
            for group in groups_of(models) if not on or rank_of(on) == 1 else ():
                if only_experts and group not in [g for m in models for g in m.expert_parallel_bucket_groups]:
                    continue
                for bucket in group.buckets:
                    value = factor(bucket.gradient_scaling_factor, magnitude)
                    stack.enter_context(patch.object(bucket, "gradient_scaling_factor", value))
            yield

    return apply


def reduced_over(group: Callable[[], Any]) -> Patch:
    """DDP reduces gradients over another group."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        with ExitStack() as stack:
            for item in groups_of(models):
                stack.enter_context(patch.object(item, "data_parallel_group", group()))
            yield

    return apply


def one_rank() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def without_context_ranks() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def data(change: Callable[[list[dict[str, Tensor]]], list[dict[str, Tensor]]]) -> Patch:
    """Change the microbatches that the loader has."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        real = gpt.data
        with patch.object(gpt, "data", lambda count: change(real(count))):
            yield

    return apply


def same_data(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Every data parallel rank reads the first one's samples."""
    half = len(batches) // 2
    return [*batches[:half], *batches[:half]]


def turned(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The second data parallel rank reads its microbatches in the other order."""
    half = len(batches) // 2
    return [*batches[:half], *batches[half:][::-1]]


def labels_of_the_next(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The last stage has the labels of another microbatch."""
    if rank_of("pp") < size_of("pp") - 1:
        return batches
    return [
        {**mine, "labels": other["labels"]}
        for mine, other in zip(batches, [*batches[1:], batches[0]], strict=True)
    ]


# -- pipeline --------------------------------------------------------------------------------------------


def passed_on(layer: Any, magnitude: float) -> Callable[..., Any]:
    return lambda hidden_states, **_: (hidden_states, None)


def run_twice(layer: Any, magnitude: float) -> Callable[..., Any]:
    real = layer.forward
    return lambda hidden_states, **kwargs: real(real(hidden_states, **kwargs)[0], **kwargs)


def loaded_from(place: Callable[[int], int], stages: tuple[int, ...]) -> Patch:
    """Stages load their layers from other places of the checkpoint."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        if rank_of("pp") in stages:
            for model in models:
                for name, weight in gpt.global_names(unwrapped(model)):
                    steps = name.split(".")
                    if "layers" in steps:
                        steps[2] = str(place(int(steps[2])))
                        weight.data.copy_(state[".".join(steps)])
        yield

    return apply


@contextmanager
def untied(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The last stage's copy of the embedding never got the first stage's weights."""
    for module in modules(models, "output_layer"):
        if module.weight is not None:
            module.weight.data.copy_(stale(module.weight.data, magnitude))
    yield


def tied_gradient(times: int) -> Patch:
    """The two stages that hold the embedding sum its gradient so many times."""

    @contextmanager
    def apply(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
        finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        real = finalize._allreduce_word_embedding_grads

        def reduce(*args: Any, **kwargs: Any) -> None:
            for _ in range(times):
                real(*args, **kwargs)

        with patch.object(finalize, "_allreduce_word_embedding_grads", reduce):
            yield

    return apply


@contextmanager
def rounded_between_stages(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """What the second stage receives was sent in a narrower dtype."""
    if rank_of("pp") != 1:
        yield
        return
    inner = unwrapped(models[0])
    real = inner.set_input_tensor

    def receive(tensors: Any) -> None:
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if tensor is not None:
                tensor.data.copy_(round_to(tensor.data, magnitude))
        real(tensors)

    with patch.object(inner, "set_input_tensor", receive):
        yield


ALL = ""  # of all parameters the last one's gradient is compared first

SPREAD = [
    # Context parallel.
    Bug(
        "wrong loss scale under context parallelism",
        "CP",
        CP2,
        without_context_factor,
        "loss:output",
        "gradient",
        "1 / cp",
    ),
    Bug("wrong zigzag order", "CP", CP2, contiguous_data, WORDS, hint="contiguous parts"),
    Bug(
        "keys gathered in the order of ranks",
        "CP",
        CP2,
        keys_as_they_come,
        "decoder.layers.0.self_attention.core_attention:scores",
        hint=PERMUTED,
    ),
    Bug(
        "attention mask of a contiguous part",
        "CP",
        CP2,
        contiguous_mask,
        "decoder.layers.0.self_attention.core_attention",
        hint="mask|zero wherever|position|token",
    ),
    Bug(
        "rotary positions restarted per sequence shard",
        "CP",
        CP2,
        positions(restarted),
        "decoder.layers.0.self_attention.core_attention",
        hint="position|token|cp rank",
    ),
    Bug(
        "rotary offset on one rank",
        "CP",
        CP2,
        positions(offset),
        "decoder.layers.0.self_attention.core_attention",
        hint="cp rank 1",
    ),
    Bug(
        "gradients of keys and values not summed",
        "CP",
        CP2,
        own_keys_gradient,
        (f"{LAYER}.self_attention.core_attention", f"{LAYER}.self_attention"),
        "gradient",
        MISSING,
    ),
    Bug(
        "gradients not reduced over context parallel ranks",
        "CP",
        CP2,
        reduced_over(without_context_ranks),
        ALL,
        "parameter_gradient",
        MISSING,
    ),
    Bug(
        "one rank's loss weighs more",
        "CP",
        CP2,
        loss_times(lambda m, _: 1 + m * (rank_of("cp") == 1)),
        "loss:output",
        "gradient",
        "cp rank 1",
        sweep=(1e-7, 0.1),
    ),
    # Data parallel and the loss.
    Bug(
        "wrong loss scale under data parallelism",
        "DP",
        DP2,
        averaged(lambda f, m: 1.0),
        ALL,
        "parameter_gradient",
        "which is .*dp",
    ),
    Bug(
        "loss divided by the data parallel ranks twice",
        "DP",
        DP2,
        loss_times(lambda m, _: 1 / size_of("dp")),
        "loss:output",
        "gradient",
        "1 / dp",
    ),
    Bug(
        "every data parallel rank reads the same samples",
        "DP",
        DP2,
        data(same_data),
        WORDS,
        hint="samples are repeated",
    ),
    Bug("microbatches of a rank in the other order", "DP", DP2, data(turned), WORDS, hint=PERMUTED),
    Bug("gradients not reduced", "DP", DP2, reduced_over(one_rank), ALL, "parameter_gradient", MISSING),
    Bug(
        "one rank's gradients weigh less",
        "DP",
        DP2,
        averaged(lambda f, m: f * (1 - m), "dp"),
        ALL,
        "parameter_gradient",
        "",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "all gradients off by a factor",
        "DP",
        DP2,
        averaged(lambda f, m: f * (1 + m)),
        ALL,
        "parameter_gradient",
        FACTOR,
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "loss off by a factor",
        "loss",
        TP2,
        loss_times(lambda m, _: 1 + m),
        "loss:output",
        "gradient",
        FACTOR,
        sweep=(1e-8, 0.1),
    ),
    Bug(
        "loss not averaged over microbatches",
        "loss",
        TP2,
        loss_times(lambda m, _: 2.0),
        "loss:output",
        "gradient",
        FACTOR,
    ),
    Bug(
        "one microbatch weighs less",
        "loss",
        TP2,
        loss_times(lambda m, number: 1 - m * (number == 1)),
        "loss:output",
        "gradient",
        "sample|microbatch",
        sweep=(1e-8, 1.0),
    ),
    # Pipeline.
    Bug(
        "wrong pipeline split: a layer skipped",
        "PP",
        PP2,
        attribute("decoder.layers.2", "forward", passed_on),
        "decoder.layers.2",
        hint="ran in A only",
    ),
    Bug(
        "wrong pipeline split: a layer run twice",
        "PP",
        PP2,
        attribute(LAYER, "forward", run_twice),
        LAYER,
        hint="ran more often in B",
    ),
    Bug(
        "wrong pipeline split: weights of the layers before",
        "PP",
        PP2,
        loaded_from(lambda n: n - 1, (1,)),
        "decoder.layers.2.input_layernorm.weight",
        "parameter",
        f"{PERMUTED}|layer",
    ),
    Bug(
        "virtual chunks dealt out contiguously",
        "PP",
        VPP2,
        loaded_from(lambda n: {0: 0, 2: 1, 1: 2, 3: 3}[n], (0, 1)),
        "decoder.layers.1.input_layernorm.weight",
        "parameter",
        f"{PERMUTED}|layer",
    ),
    Bug(
        "tied embeddings out of step",
        "PP",
        TIED,
        untied,
        ("output_layer:output", f"{WORDS}.weight"),
        hint="replicas differ",
        replica=f"{WORDS}.weight",
        sweep=(1e-7, 0.3),
    ),
    Bug(
        "gradient of tied embeddings not reduced over stages",
        "PP",
        TIED,
        tied_gradient(0),
        f"{WORDS}.weight",
        "parameter_gradient",
        MISSING,
        f"{WORDS}.weight.grad",
    ),
    Bug(
        "gradient of tied embeddings reduced twice",
        "PP",
        TIED,
        tied_gradient(2),
        f"{WORDS}.weight",
        "parameter_gradient",
        "which is .*pp",
    ),
    Bug(
        "activations sent in a narrower dtype",
        "PP",
        PP2,
        rounded_between_stages,
        "decoder.layers.2",
        hint=PRECISION,
        sweep=(2.0**-22, 2.0**-4),
        measure="unit roundoff",
    ),
    Bug(
        "gradient sent to the stage before off by the number of stages",
        "PP",
        PP2,
        gradient("decoder.layers.1", lambda g, m: g / 2),
        "decoder.layers.1",
        "gradient",
        "1 / pp",
    ),
    Bug(
        "labels of another microbatch on the last stage",
        "PP",
        PP2,
        data(labels_of_the_next),
        "loss:output",
        hint="",
    ),
]
