"""What an adapter gives the runtime: mesh, sites, parameters, and word of what the framework is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

Undo = Callable[[], None]


class Listener(Protocol):
    """Whom an adapter tells about steps and microbatches; the runtime's clock."""

    def step_begins(
        self,
        iteration: int | None,
        gradient_factor: Callable[[], float] | None = None,
        microbatches: int = 1,
    ) -> None:
        """A schedule starts over `microbatches` of them; `iteration` if the framework counts those.

        The number is 0 where it is not known beforehand.

        `gradient_factor` tells by how much the gradients that this schedule makes are greater than those of
        one microbatch's own loss; None where they are these.
        """

    def step_ends(self, failed: bool) -> None:
        """The schedule returned, or raised."""

    def forward_begins(self, microbatch: int, chunk: int) -> None:
        """The forward pass of one microbatch through one of this rank's chunks starts."""

    def forward_ends(self, output: Any, tokens: Tensor | None = None) -> None:
        """It ended with this output, by which `backward_begins` will know the microbatch again.

        `tokens` are those that its loss is a sum over, if gradients are divided by all tokens at the end.
        """

    def backward_begins(self, output: Any) -> None:
        """The backward pass from that output starts."""

    def backward_ends(self) -> None:
        """It is over."""

    def cannot(self, why: str) -> None:
        """What this step does cannot be hooked; told on every rank, which raises when the step is over."""

    def fails(self, why: str) -> None:
        """Something is wrong on this rank; all raise when the step is over."""

    def hooked(self) -> bool:
        """Whether there is any hook that counts now."""

    def call_begins(self, gradient_factor: Callable[[], float] | None = None) -> None:
        """The model is called by itself, outside any schedule; `gradient_factor` as in `step_begins`."""

    def call_ends(self, failed: bool) -> None:
        """That call returned, or raised."""


class Part(NamedTuple):
    """What was found in or around a model: who keeps its parameters, who calls it, what wraps it.

    Attributes:
        name: its own name, `DistributedDataParallel`.
        why: what in the model shows it, in words.
    """

    name: str
    why: str


class GradientLayoutSource(Protocol):
    """Tells in which layout the gradient of a parameter comes."""

    def want(self) -> Undo:
        """Have calls of the model followed until the returned function is called."""

    def gradient(self, layout: Layout) -> Layout | str:
        """The layout of the gradient of one backward pass, or why it is not known.

        Args:
            layout: the parameter's.
        """


@dataclass(frozen=True, slots=True)
class ParameterSite:
    """A parameter, whose gradient can be hooked.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1.weight`.
        layout: how the local parameter relates to the whole one.
        shape: the whole's shape.
        parameter: the local parameter; None on ranks that do not own it.
        stage: pipeline stage that owns it.
        chunk: which of that stage's virtual chunks it is in.
        owner: coordinates, such as `(("ep", 2),)`, that its owning ranks have beside their stage. All ranks
            of the stage list the parameter.
        copy_of: the name of the parameter that this one is a copy of on another stage (a tied output
            layer); empty if it is none. The gradients of copies are summands.
        hidden: why its gradient cannot be hooked; empty if it can.
        inferred: whether nothing tells the layout: every rank holds the whole, unless an `expected_shape`
            says what is cut. `layout` and `shape` are then those of the local parameter.
        local: the shape of what `Adapter.value` gives for it.
        sharded: whether `parameter` is only a part of that, or is kept in a form of its own.
        followed: what tells in which layout its gradient comes, where that depends on how the model uses it;
            None where `layout` tells.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    parameter: nn.Parameter | None = field(compare=False, repr=False)
    stage: int = 0
    owner: tuple[tuple[str, int], ...] = ()
    copy_of: str = ""
    hidden: str = ""
    inferred: bool = False
    chunk: int = 0
    local: tuple[int, ...] = ()
    sharded: bool = False
    followed: GradientLayoutSource | None = field(default=None, compare=False, repr=False)

    def remote(self) -> ParameterSite:
        """The parameter as ranks know it that do not own it."""
        return replace(self, parameter=None, followed=None)


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """A parameter's gradient as this rank holds it.

    Attributes:
        tensor: of the local parameter's shape, in the memory that the optimizer reads; None if there is none.
        part: the entries, counted flat, that are reduced on this rank; None for all.
        group: over whose ranks the parts make up the whole `tensor`; None where `part` is.
    """

    tensor: Tensor | None
    part: tuple[int, int] | None = None
    group: Any = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a decoder is made of, as far as the names of other libraries depend on it.

    Attributes:
        heads: attention heads.
        rms: whether its norms are RMSNorm; LayerNorm otherwise.
        epsilon: what the norms add to the mean square.
        unit_offset: whether a norm's weight is stored less one.
        gated: whether its MLPs are gated.
        rotary: whether queries and keys are rotated by their positions.
        causal: whether attention is masked to earlier positions, and by nothing else.
        scaled_by_layer: whether scores of layer N are kept divided by N + 1.
        tied: whether the logits are made by the word embeddings.
    """

    heads: int
    rms: bool
    epsilon: float
    unit_offset: bool = False
    gated: bool = False
    rotary: bool = False
    causal: bool = True
    scaled_by_layer: bool = False
    tied: bool = False


class Adapter(Protocol):
    """One framework's view of one model (a list of chunks).

    Attributes:
        name: the framework's.
        mesh: the axes of the run.
        logits: the site where logits pass.
    """

    name: str
    mesh: Mesh
    logits: str
    prefix: str  # what wrappers put in front of a name: `module.`; mostly empty

    def module_names(self) -> list[str]:
        """Global names of this rank's modules, in model order, without `prefix`; the model's is empty."""

    def parts(self) -> list[Part]:
        """What it found in and around the model, the outermost first."""

    def check(self) -> None:
        """Raise a FlexError if this configuration cannot be hooked at all."""

    def sites(self) -> list[Site]:
        """The sites that this rank owns, in model order."""

    def parameters(self) -> list[ParameterSite]:
        """The parameters that this rank owns and a layout is known for, in model order."""

    def without_layout(self) -> dict[str, str]:
        """The names of this rank's other parameters, and the classes of the modules that own them."""

    def settle(self) -> None:
        """Wait for whatever the framework is still doing to the parameters. Every rank calls it."""

    def gradients_reduced(self, called: bool = False) -> bool | str:
        """Whether gradients are reduced over data (and so over tensor) parallel ranks when a step is over.

        Args:
            called: whether the model ran outside the framework's schedule.

        Returns:
            In words why that is not known, and when a person would say what, if only the person who wrote
            the loop knows.
        """

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A parameter as its layout speaks of it: without what shards it over data parallel ranks.

        Not to be written to. All `dp` ranks of a stage call it alike.
        """

    def shares(self, name: str) -> tuple[str, ...] | None:
        """The axes over which each rank has a share of a parameter's gradient that nothing has added up.

        Of what is left behind the backward pass, beside the axes that its layout names. None where that is
        not known, or not yet.
        """

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter to what `value` would return then. Called likewise."""

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Set its gradient to a tensor of that shape. Called likewise."""

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """A parameter's gradient, reduced or not yet. Called likewise.

        Raises:
            FlexError: what is asked for does not exist at this moment.
        """

    def freeze(self) -> Undo:
        """Let no parameter get a gradient, under the framework's wrappers too, until the function is called.

        Raises:
            FlexError: a wrapper waits for gradients that would never come.
        """

    def open_recomputed(self) -> Undo:
        """Let gradients reach trainable modules in recomputed regions that only frozen parameters lead to."""

    def architecture(self) -> Architecture | None:
        """What the model is made of; None if it is no decoder that is known."""

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Run the model forward over whole tokens, as a step of its own. Every rank calls it.

        Nothing is differentiated, and random states are afterwards what they were. If the schedule needs more
        microbatches than the tokens make, copies of the last one follow.

        Args:
            tokens: `[batch, sequence]`, the same on all ranks of a model replica.
            microbatch_size: sequences in a microbatch; all of them in one if it is not given.

        Raises:
            FlexError: before anything runs, on all ranks: tokens that this model cannot be given.
        """

    def watch(self, listener: Listener) -> Undo:
        """Tell `listener` what the schedule does, until the returned function is called."""


def replaying() -> bool:
    """Whether this is activation recomputation: a forward pass inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def leaf(output: Any, index: int | None) -> Tensor | None:
    """The tensor at `index` of a tuple or list output; the output itself if it is a tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)) and index is not None and len(output) > index:
        item = output[index]
        return item if isinstance(item, Tensor) else None
    return None


def with_leaf(output: Any, index: int | None, new: Tensor) -> Any:
    """`output` with the tensor that `leaf` found replaced."""
    if isinstance(output, Tensor):
        return new
    return type(output)(new if i == index else item for i, item in enumerate(output))
