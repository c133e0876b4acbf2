"""Real distributed bugs, each a few lines of monkey patch on the ranks of a run of a small Megatron GPT.

A patch stands in Megatron or in the loop around it, as the bug would; nothing of the library is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.support import context, gpt
from tests.support.gpt import Case

Kind = Literal["value", "gradient", "parameter_gradient", "parameter"]
State = dict[str, Tensor]
Patch = Callable[[list[Any], State], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Bug:
    """A bug and where it must show first.

    Attributes:
        name: in words.
        case: the run that has it.
        patch: applied on every rank to what Megatron trains (the chunks in their wrappers, and the weights of
            the whole model by name), before hooks are attached.
        first: the first site, or parameter, that differs from one process; the beginning of its name.
        kind: of what differs there first.
        hint: words that must be among those that tell the pattern of the error.
        replica: a site or parameter, with `.grad` for a gradient, of which ranks hold different copies.
    """

    name: str
    case: Case
    patch: Patch
    first: str
    kind: Kind = "value"
    hint: str = ""
    replica: str = ""


class Alone:
    """Looks like a process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def modules(models: list[Any], path: str) -> list[Any]:
    """The module of that global name, on the ranks that have it."""
    from megatron_flex.adapters.megatron_core.module_classes import global_modules, unwrap_model

    return [m for model in models for name, m in global_modules(unwrap_model(model)) if name == path]


def everywhere(path: str, attribute: str, value: Callable[[Any], Any]) -> Patch:
    """Give a module's attribute another value, on all ranks that have the module."""

    @contextmanager
    def apply(models: list[Any], state: State) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules(models, path):
                stack.enter_context(patch.object(module, attribute, value(module)))
            yield

    return apply


@contextmanager
def changed(weight: Tensor) -> Iterator[None]:
    """Other weights: those of another seed, as it were."""
    kept = weight.detach().clone()
    weight.data.mul_(1 + 0.3 * torch.cos(torch.arange(weight.numel())).view_as(weight).to(weight.dtype))
    yield
    weight.data.copy_(kept)


# -- tensor parallel -----------------------------------------------------------------------------------


def wrong_vocabulary_mask(words: Any) -> int:
    """The first rank's rows end three too early: nobody looks those tokens up."""
    return int(words.vocab_end_index) - (3 if words.vocab_start_index == 0 else 0)


@contextmanager
def unreduced_backward(models: list[Any], state: State) -> Iterator[None]:
    """A column-parallel linear leaves the sum of its input's gradient to somebody else."""
    path = "decoder.layers.1.mlp.linear_fc1"
    off = (
        everywhere(path, "allreduce_dgrad", lambda _: False),
        everywhere(path, "disable_grad_reduce", lambda _: True),
    )
    with off[0](models, state), off[1](models, state):
        yield


def data_parallel_group(_: Any) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def bias_before_reduction(linear: Any) -> Callable[..., Tensor]:
    """The bias goes into each rank's partial sum."""
    gemm = linear._forward_impl
    return lambda *args, **kwargs: gemm(*args, **kwargs) + linear.bias


@contextmanager
def forgotten_norm(models: list[Any], state: State) -> Iterator[None]:
    """A norm's weight without the mark by which Megatron sums its gradient under sequence parallelism."""
    with everywhere("decoder.layers.1.pre_mlp_layernorm", "weight", unmarked)(models, state):
        yield


def unmarked(norm: Any) -> nn.Parameter:
    norm.weight.sequence_parallel = False
    return norm.weight  # type: ignore[no-any-return]


# -- context and data parallel ---------------------------------------------------------------------------


@contextmanager
def without_context_factor(models: list[Any], state: State) -> Iterator[None]:
    """The schedule does not know of context parallel ranks, and DDP averages over them."""
    from megatron.core.pipeline_parallel import schedules

    real = schedules.forward_step_calc_loss

    def calculate(*args: Any) -> Any:
        return real(*args[:8], 1, *args[9:])

    with patch.object(schedules, "forward_step_calc_loss", calculate):
        yield


@contextmanager
def summed_by_ddp(models: list[Any], state: State) -> Iterator[None]:
    """DDP sums gradients over data parallel ranks and does not average them."""
    with ExitStack() as stack:
        for model in models:
            for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
                for bucket in group.buckets:
                    stack.enter_context(patch.object(bucket, "gradient_scaling_factor", 1.0))
        yield


@contextmanager
def divided_twice(models: list[Any], state: State) -> Iterator[None]:
    """The loss is divided by the number of data parallel ranks, and DDP divides once more."""
    from megatron.core import parallel_state

    real, size = gpt.forward_step, parallel_state.get_data_parallel_world_size()

    def forward_step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_function = real(iterator, model)

        def divided(output: Tensor) -> Any:
            loss, report = loss_function(output)
            return loss / size, report

        return output, divided

    with patch.object(gpt, "forward_step", forward_step):
        yield


@contextmanager
def contiguous_data(models: list[Any], state: State) -> Iterator[None]:
    """The data loader deals a sequence out in one piece for each context parallel rank."""
    from megatron.core import parallel_state

    size, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    with patch.object(context, "here", lambda length: torch.arange(length).chunk(size)[rank]):
        yield


@contextmanager
def keys_as_they_come(models: list[Any], state: State) -> Iterator[None]:
    """Attention takes the gathered keys and values for contiguous parts of the sequence."""

    def contiguous(length: int, size: int, rank: int) -> Tensor:
        return torch.arange(length).chunk(size)[rank]

    here = context.here(gpt.SEQUENCE)
    with patch.object(context, "places", contiguous), patch.object(context, "here", lambda _: here):
        yield


@contextmanager
def restarted_positions(models: list[Any], state: State) -> Iterator[None]:
    """Each context parallel rank counts its positions from 0."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def first(emb: Tensor, dim: int, group: Any) -> Tensor:
        return emb.narrow(dim, 0, emb.shape[dim] // group.size())

    with patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", first):
        yield


@contextmanager
def same_data(models: list[Any], state: State) -> Iterator[None]:
    """Every data parallel rank reads the first one's samples."""
    real, size = gpt.data, len(models)
    assert size

    def first(count: int) -> list[dict[str, Tensor]]:
        batches = real(count)
        half = len(batches) // 2
        return [*batches[:half], *batches[:half]]

    with patch.object(gpt, "data", first):
        yield


# -- pipeline --------------------------------------------------------------------------------------------


def passed_on(layer: Any) -> Callable[..., Any]:
    return lambda hidden_states, **_: (hidden_states, None)


def run_twice(layer: Any) -> Callable[..., Any]:
    real = layer.forward
    return lambda hidden_states, **kwargs: real(real(hidden_states, **kwargs)[0], **kwargs)


@contextmanager
def split_off_by_one(models: list[Any], state: State) -> Iterator[None]:
    """The second stage loads its layers one too early: one is there twice, and the last one is missing."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        for name, parameter in gpt.global_names(unwrapped(models[0])):
            steps = name.split(".")
            if "layers" in steps:
                steps[2] = str(int(steps[2]) - 1)
                parameter.data.copy_(state[".".join(steps)])
    yield


@contextmanager
def untied(models: list[Any], state: State) -> Iterator[None]:
    """The last stage's copy of the embedding never got the first stage's weights."""
    output = [m for m in modules(models, "output_layer") if m.weight is not None]
    with changed(output[0].weight) if output else contextlib.nullcontext():
        yield


@contextmanager
def untied_gradient(models: list[Any], state: State) -> Iterator[None]:
    """The two stages that hold the embedding keep each its share of the gradient."""
    import importlib

    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with patch.object(finalize, "_allreduce_word_embedding_grads", lambda *_, **__: None):
        yield


def unwrapped(model: Any) -> Any:
    from megatron_flex.adapters.megatron_core.module_classes import unwrap_model

    return unwrap_model(model)


# -- experts and recomputation ---------------------------------------------------------------------------


@contextmanager
def router_of_its_own(models: list[Any], state: State) -> Iterator[None]:
    """The second data parallel rank starts from another router."""
    from megatron.core import parallel_state

    found = modules(models, "decoder.layers.1.mlp.router")
    second = parallel_state.get_data_parallel_rank() == 1
    with changed(found[0].weight) if found and second else contextlib.nullcontext():
        yield


@contextmanager
def unsorted_experts(models: list[Any], state: State) -> Iterator[None]:
    """Rows that came from other ranks are not sorted by expert; they go home as they came."""
    from megatron.core.transformer.moe import token_dispatcher

    def as_they_are(rows: Tensor, sizes: Tensor, order: Tensor, probs: Any = None, **_: Any) -> Any:
        return rows, probs

    with patch.object(token_dispatcher, "sort_chunks_by_idxs", as_they_are):
        yield


@contextmanager
def stale_input(models: list[Any], state: State) -> Iterator[None]:
    """All checkpointed layers save their input in one buffer: recomputation finds the last layer's there."""
    from megatron.core import tensor_parallel

    real, latest = tensor_parallel.checkpoint, []

    def checkpoint(function: Any, distribute: bool, hidden: Tensor, *rest: Any) -> Any:
        latest[:] = [hidden.detach().clone()]

        def run(hidden: Tensor, *rest: Any) -> Any:
            if torch.is_grad_enabled():  # again, in the backward pass
                hidden = hidden + (latest[0] - hidden).detach()
            return function(hidden, *rest)

        return real(run, distribute, hidden, *rest)

    with patch.object(tensor_parallel, "checkpoint", checkpoint):
        yield


def not_a_number(linear: Any) -> Callable[..., Tensor]:
    """The last rank's buffer for the product has an entry that nobody has written."""
    from megatron.core import parallel_state

    gemm, last = linear._forward_impl, parallel_state.get_tensor_model_parallel_rank() == 1

    def product(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = gemm(*args, **kwargs)
        if last:
            out.data[3, 1, 5] = float("nan")
        return out

    return product


TP2, TP2_SP = Case("tp2", tp=2, layers=2), Case("tp2 sp", tp=2, sp=True, layers=2)
TP2_DP2 = Case("tp2 dp2", tp=2, dp=2, layers=2)
BIAS = Case("tp2 bias", tp=2, gated=False, rms=False, bias=True, layers=2)
CP2, DP2 = Case("cp2", cp=2, layers=2), Case("dp2", dp=2, layers=2)
PP2, TIED = Case("pp2", pp=2), Case("pp2 tied", pp=2, tied=True, layers=2)
EXPERTS = Case("experts dp2 ep2", dp=2, ep=2, experts=4, shared_experts=True, layers=2)
RECOMPUTED = Case("tp2 sp recomputed", tp=2, sp=True, recompute=("full",), layers=3)

WORDS = "embedding.word_embeddings"
FC2, PROJ = "decoder.layers.1.mlp.linear_fc2", "decoder.layers.1.self_attention.linear_proj"

FOURTEEN = [
    Bug(
        "wrong vocabulary mask in the embedding",
        TP2,
        everywhere(WORDS, "vocab_end_index", wrong_vocabulary_mask),
        f"{WORDS}:partial",
        hint="B is zero wherever they differ",
    ),
    Bug(
        "all-reduce missing after a row-parallel linear",
        TP2,
        everywhere(FC2, "tp_group", lambda _: Alone()),
        f"{FC2}:output",
        replica="decoder.layers.1.mlp.linear_fc2:output",
    ),
    Bug(
        "reduction over the wrong group",
        TP2_DP2,
        everywhere(PROJ, "tp_group", data_parallel_group),
        f"{PROJ}:output",
    ),
    Bug(
        "layernorm gradient not reduced under sequence parallelism",
        TP2_SP,
        forgotten_norm,
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "parameter_gradient",
        replica="decoder.layers.1.pre_mlp_layernorm.weight.grad",
    ),
    Bug(
        "router weights not synchronised",
        EXPERTS,
        router_of_its_own,
        "decoder.layers.1.mlp.router:logits",
        hint="what dp rank 1 of 2 holds in B",
        replica="decoder.layers.1.mlp.router.weight",
    ),
    Bug(
        "wrong loss scale under context parallelism",
        CP2,
        without_context_factor,
        "loss:output",
        "gradient",
        hint="0.5, which is 1 / cp",
    ),
    Bug(
        "wrong loss scale under data parallelism",
        DP2,
        summed_by_ddp,
        "",  # all parameters
        "parameter_gradient",
        hint="2, which is dp",
    ),
    Bug(
        "wrong zigzag order",
        CP2,
        contiguous_data,
        WORDS,
        hint="context parallel ranks had contiguous parts",
    ),
    Bug(
        "wrong pipeline split: a layer skipped",
        PP2,
        everywhere("decoder.layers.2", "forward", passed_on),
        "decoder.layers.2",
        hint="places of it were passed in A only",
    ),
    Bug(
        "tied embeddings out of step",
        TIED,
        untied,
        "output_layer:output",
        replica="embedding.word_embeddings.weight",
    ),
    Bug(
        "stale activation in recomputation",
        RECOMPUTED,
        stale_input,
        "decoder.layers.1.mlp.linear_fc1",
        "gradient",
    ),
    Bug(
        "bias added on every rank before the reduction",
        BIAS,
        everywhere(FC2, "_forward_impl", bias_before_reduction),
        f"{FC2}:partial",
        hint="the same vector for all tokens",
    ),
    Bug(
        "rotary positions restarted per sequence shard",
        CP2,
        restarted_positions,
        "decoder.layers.0.self_attention.core_attention",
    ),
    Bug(
        "a wrong expert permutation",
        EXPERTS,
        unsorted_experts,
        "decoder.layers.0.mlp.experts",
    ),
]
MORE = [
    Bug(
        "wrong pipeline split: a layer run twice",
        PP2,
        everywhere("decoder.layers.1", "forward", run_twice),
        "decoder.layers.1",
        hint="passed more often in B",
    ),
    Bug(
        "wrong pipeline split: weights of the layers before",
        PP2,
        split_off_by_one,
        "decoder.layers.2.input_layernorm.weight",
        "parameter",
    ),
    Bug(
        "gradient of tied embeddings not reduced over stages",
        TIED,
        untied_gradient,
        f"{WORDS}.weight",
        "parameter_gradient",
        replica="embedding.word_embeddings.weight.grad",
    ),
    Bug(
        "all-reduce missing in the backward pass of a column-parallel linear",
        TP2,
        unreduced_backward,
        "decoder.layers.1.mlp.linear_fc1",
        "gradient",
        replica="decoder.layers.1.pre_mlp_layernorm:output.grad",
    ),
    Bug(
        "loss divided by the data parallel ranks twice",
        DP2,
        divided_twice,
        "loss:output",
        "gradient",
        hint="0.5, which is 1 / dp",
    ),
    Bug(
        "keys gathered in the order of ranks",
        CP2,
        keys_as_they_come,
        "decoder.layers.0.self_attention.core_attention:scores",
        hint="are permuted",
    ),
    Bug(
        "every data parallel rank reads the same samples",
        DP2,
        same_data,
        WORDS,
        hint="samples are repeated",
    ),
    Bug(
        "memory that nobody has written",
        TP2_SP,
        everywhere("decoder.layers.0.mlp.linear_fc2", "_forward_impl", not_a_number),
        "decoder.layers.0.mlp.linear_fc2:partial",
        hint="NaN",
    ),
]
BUGS = [*FOURTEEN, *MORE]
