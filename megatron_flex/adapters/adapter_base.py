"""The adapter interface: mesh, sites, parameters, and notifications of the schedule's events.

Also the loggers of a framework's training loop, where it has them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_flex.adapters.decoder_paths import DecoderPaths
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, PackedSequences, replicated
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

if TYPE_CHECKING:
    from megatron_flex.adapters.model_calls import ModelRunner
    from megatron_flex.adapters.parameter_storage import ParameterStorage
    from megatron_flex.adapters.propagation.layout_propagation import PropagatedParameter

Undo = Callable[[], None]
AxisSizes = Mapping[str, int | None]  # axis name to the size given by the user


class Listener(Protocol):
    """Receives notifications of steps and microbatches from an adapter; the runtime's clock."""

    def step_begins(
        self,
        iteration: int | None,
        gradient_factor: Callable[[], float] | None = None,
        microbatches: int = 1,
    ) -> None:
        """A schedule starts over `microbatches`; `iteration` if the framework counts iterations.

        `microbatches` is 0 where the number is not known beforehand.

        `gradient_factor` returns the factor between this schedule's gradients and those of one
        microbatch's own loss; None where it is 1.
        """

    def step_ends(self, failed: bool) -> None:
        """The schedule returned, or raised."""

    def forward_begins(self, microbatch: int, chunk: int) -> None:
        """The forward pass of one microbatch through one of this rank's chunks starts."""

    def forward_ends(self, output: Any, tokens: Tensor | None = None) -> None:
        """It ended with this output, which identifies the microbatch in `backward_begins`.

        `tokens` are those that its loss sums over, if gradients are divided by all tokens at the end.
        """

    def backward_begins(self, output: Any) -> None:
        """The backward pass from that output starts."""

    def backward_ends(self) -> None:
        """That backward pass ended."""

    def reject_step(self, why: str) -> None:
        """This step cannot be hooked; called on every rank, which raises at the end of the step."""

    def pack_begins(self, pack: PackedSequences) -> None:
        """The model is called on packed sequences, whose tensors have a batch dim of one or none."""

    def text_continues(self, first: int) -> None:
        """The model is called on tokens of a text, the first of which is token `first`; -1 if unknown."""

    def report_error(self, why: str) -> None:
        """Report an error of this rank; all ranks raise at the end of the step."""

    def hooked(self) -> bool:
        """Whether any hook is active now."""

    def check_call(self) -> None:
        """Refuse, on this rank, a call outside of a step where ranks could not synchronize at its end.

        Called before the call waits for another rank, where an adapter knows the caller.

        Raises:
            HookError: the model is on several pipeline stages, and hooks are active outside of a step.
        """

    def in_step(self) -> bool:
        """Whether a step is open: a schedule's, or the user's `flex.step()`."""

    def needs_step(self) -> bool:
        """Whether a dump or statistics cannot record all that they want in a call outside a step."""

    def call_begins(
        self,
        gradient_factor: Callable[[], float] | None = None,
        chunk: int = 0,
        microbatch: int | None = None,
    ) -> None:
        """One of this rank's chunks is called outside of any schedule.

        `gradient_factor` as in `step_begins`. Checked as by `check_call`. `microbatch` is the one that the
        call belongs to in an open step; None to count the calls.
        """

    def call_ends(self, failed: bool) -> None:
        """That call returned, or raised."""


@dataclass(slots=True)
class StepReport:
    """Reports the step that runs in a `with` block; arguments as for `Listener.step_begins`."""

    listener: Listener
    iteration: int | None
    gradient_factor: Callable[[], float] | None = None
    microbatches: int = 1

    def __enter__(self) -> None:
        self.listener.step_begins(self.iteration, self.gradient_factor, self.microbatches)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The end of a good step may raise too, which is not a failure of what ran in the block.
        self.listener.step_ends(kind is not None)


class NormListener(Protocol):
    """Is notified when the framework computes the norm of all gradients."""

    def norm_begins(
        self, without: Iterable[Any] = (), counts: Callable[[nn.Parameter], bool] | None = None
    ) -> None:
        """Gradients are complete and not yet clipped.

        Args:
            without: parameters that this norm leaves out.
            counts: whether this rank adds a parameter's local gradient to the norm; None if unknown.
        """

    def norm_ends(self, norm: float | None, scale: float = 1.0) -> None:
        """The framework has computed the norm of the gradients divided by `scale`; None if it has none."""


class Part(NamedTuple):
    """A component detected in or around a model: its parameter storage, its caller, or a wrapper.

    Attributes:
        name: its name, such as `DistributedDataParallel`.
        why: the evidence in the model, as text.
    """

    name: str
    why: str


@dataclass(frozen=True)  # without slots, for the `SiteForm` of experts' parameters
class ParameterSite:
    """A parameter, whose gradient can be hooked.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1.weight`.
        layout: the relation of the local parameter to the full parameter.
        shape: the full parameter's shape.
        parameter: the local parameter; None on ranks that do not own it.
        stage: the pipeline stage that owns it.
        chunk: the virtual chunk of that stage.
        owner: further coordinates of its owning ranks, such as `(("ep", 2),)`. All ranks of the stage list
            the parameter.
        copy_of: the name of the parameter on another stage of which this is a copy (a tied output layer);
            empty if it is none. The gradients of copies must be summed.
        hidden: why its gradient cannot be hooked; empty if it can.
        inferred: whether the layout is not declared: the parameter is treated as replicated, unless an
            `expected_shape` says which dim is sharded. `layout` and `shape` are then those of the local
            parameter.
        local: the shape of the result of `ParameterStorage.value`.
        sharded: whether `parameter` is only a part of that, or has a different form.
        gradient_layout_source: determines the layout of its gradient where that depends on the use of the
            parameter; None where `layout` does.
        order: its place in the order of the model, the same on all stages; None where its name tells that.
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
    gradient_layout_source: PropagatedParameter | None = field(default=None, compare=False, repr=False)
    order: tuple[int, int] | None = None

    @property
    def propagated(self) -> bool:
        """Whether the layout of its gradient depends on the use of the parameter at run time."""
        return self.gradient_layout_source is not None

    def remote(self) -> ParameterSite:
        """The parameter as known on ranks that do not own it."""
        return replace(self, parameter=None, gradient_layout_source=None)


def make_buffer_site(name: str, buffer: Tensor, mesh: Mesh, inferred: bool = False) -> ParameterSite:
    """A buffer that each rank of a stage holds in full, or, if `inferred`, may hold in part."""
    layout, shape = replicated(*("",) * buffer.ndim), tuple(buffer.shape)
    as_parameter = cast(nn.Parameter, buffer)  # only the gradient of a parameter sets the two apart
    return ParameterSite(name, layout, shape, as_parameter, mesh["pp"].coord, local=shape, inferred=inferred)


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """A parameter's gradient as this rank holds it.

    Attributes:
        tensor: of the local parameter's shape, in the memory that the optimizer reads; None if there is none.
        part: the entries, counted flat, that are reduced on this rank; None for all.
        group: the ranks whose parts make up the full `tensor`; None where `part` is.
    """

    tensor: Tensor | None
    part: tuple[int, int] | None = None
    group: Any = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of a decoder that the names of other libraries depend on.

    Attributes:
        paths: where the parts of the decoder are.
        heads: number of attention heads.
        groups: number of heads of keys and values.
        head_size: the width of a head.
        hidden: the width of the residual stream.
        neurons: the width of a dense MLP.
        vocabulary: number of rows of the word embeddings.
        context: the greatest number of positions; None if the configuration does not tell it.
        rms: whether its norms are RMSNorm; LayerNorm otherwise.
        epsilon: the constant that the norms add to the mean square.
        unit_offset: whether a norm's weight is stored minus one.
        gated: whether its MLPs are gated.
        rotary: whether queries and keys get rotary position embedding.
        causal: whether attention is causal, without other masks.
        mask_added: whether scores have the mask added to them already, whatever it is.
        scaled_by_layer: whether scores of layer N are divided by N + 1.
        tied: whether the output layer shares the word embeddings.
        embedding_scale: what the embeddings are multiplied by before they enter the residual stream, by the
            model.
        table_scale: what the module of the embeddings multiplies the rows of its weight by.
        logit_scale: what the output layer's result is multiplied by to give the logits.
        soft_cap: the greatest absolute logit, if a tanh caps them; 0 if none does.
        scale_logits: the model's own function that does so; None if it has none.
        not_linear: why the logits may be more than a product with the output layer's weight and that scale,
            as the rank that has the output layer knows it; empty if they are not.
    """

    paths: DecoderPaths
    heads: int
    groups: int
    head_size: int
    hidden: int
    neurons: int
    vocabulary: int
    rms: bool
    epsilon: float
    context: int | None = None
    unit_offset: bool = False
    gated: bool = False
    rotary: bool = False
    causal: bool = True
    mask_added: bool = False
    scaled_by_layer: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    table_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float = 0.0
    scale_logits: Callable[[Tensor], Tensor] | None = None
    not_linear: str = ""


class LayerStack(NamedTuple):
    """The layers of a model, through which the residual stream passes.

    Attributes:
        path: the global name of their list.
        before: the hook point of the stream before the first layer, outside it; empty if there is none.
    """

    path: str
    before: str


class Adapter(ABC):
    """The adapter of one framework to one model (a list of chunks): a record of its parts and their names.

    Attributes:
        name: the framework's name.
        mesh: the axes of the run.
        storage: what holds parameters and gradients.
        runner: what calls the model.
        logits: the site of the logits.
        prefix: what wrappers add before names, `module.`; mostly empty.
    """

    name: str
    mesh: Mesh
    storage: ParameterStorage
    runner: ModelRunner
    logits: str
    prefix: str

    def parts(self) -> list[Part]:
        """The components detected in and around the model, the outermost first."""
        return [Part(self.storage.name, self.storage.why), Part(self.runner.name, self.runner.why)]

    @abstractmethod
    def module_names(self) -> list[str]:
        """Global names of this rank's modules, in model order, without `prefix`; the model's is empty."""

    @abstractmethod
    def check(self) -> None:
        """Raise a FlexError if this configuration cannot be hooked at all."""

    @abstractmethod
    def sites(self) -> list[Site]:
        """The sites that this rank owns, in model order."""

    @abstractmethod
    def parameters(self) -> list[ParameterSite]:
        """The parameters that this rank owns and whose layout is known, in model order."""

    @abstractmethod
    def without_layout(self) -> dict[str, str]:
        """The names of this rank's other parameters, and the classes of the modules that own them."""

    @abstractmethod
    def buffers(self) -> list[ParameterSite]:
        """This rank's buffers that are equal on all data parallel ranks of a correct run, as parameters."""

    @abstractmethod
    def buffer_owners(self) -> Mapping[str, str]:
        """The names of all buffers on this rank, and the classes of the modules that own them."""

    @abstractmethod
    def gradient_partial_axes(self, name: str) -> tuple[str, ...] | None:
        """The axes over which a parameter's gradient is partial and not yet reduced.

        After the backward pass, in addition to the axes of its layout. None where that is unknown, or not yet
        known.
        """

    @abstractmethod
    def watch(self, listener: Listener) -> Undo:
        """Notify `listener` of the runner's events, and propagate layouts in them, until that is undone."""

    def lengths(self) -> Mapping[str, int]:
        """The configured lengths of dims, by their names in layouts: `s`, `b`."""
        return {}

    def architecture(self) -> Architecture | None:
        """The properties of the decoder; None if it is not a known one."""
        return None

    def loss_scale(self) -> float:
        """The factor of the loss against underflow of gradients, at this time; 1 if there is none."""
        return 1.0

    def layer_stack(self) -> LayerStack:
        """The layers, of which the first ones can run without the others.

        Raises:
            FlexError: they cannot, or are not known; not on all ranks if only some stages have the reason.
        """
        raise FlexError(
            f"stop_at_layer passes by layers, which are not known in a model of {self.name}; run it without"
        )

    def stop_at(self, layer: int) -> Undo:
        """Pass by the layers from one on and what follows them, on all stages, until that is undone.

        Raises:
            FlexError: this model cannot stop there.
        """
        raise FlexError(f"stop_at_layer={layer}: a run of a model of {self.name} cannot stop; run it without")

    def differentiate(
        self, prompts: Prompts, microbatch_size: int | None, gradient: Tensor, layout: Layout
    ) -> None:
        """Run the model forward and backward, as `ModelRunner.run`; no parameter gets a gradient.

        Args:
            prompts: what the model takes, the same on all ranks of a model replica.
            microbatch_size: sequences in a microbatch; all of them if None.
            gradient: of the logits, in the order of the site of the logits, but batch first.
            layout: of that site.

        Raises:
            FlexError: on all ranks: this model cannot be differentiated from here.
        """
        raise FlexError(
            f"incl_bwd=True runs a backward pass, which is not known of a model of {self.name}; register "
            "hooks on gradients and run your own step"
        )

    def enable_recomputed_gradients(self) -> Undo:
        """Let gradients reach trainable modules in recomputed regions of otherwise frozen parameters."""
        return lambda: None


@dataclass(frozen=True)
class FrameworkMatch:
    """The answer of a finder about a model of its framework.

    Attributes:
        name: the framework's name.
        why: the evidence in the model, as text.
        make: creates the adapter; called on all ranks together.
        alone: whether `make` communicates nothing, so that one rank may call it alone.
        around: whether it is only a wrapper, which may contain any framework's parallel modules: their claim
            has priority.
    """

    name: str
    why: str
    make: Callable[[], Adapter]
    alone: bool = False
    around: bool = False


def is_recomputing() -> bool:
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


class TrainingWriters(NamedTuple):
    """The loggers of Megatron's training code on this rank; it creates them on the last rank only.

    Attributes:
        tensorboard: a SummaryWriter, or None.
        wandb: the module, or a run, that has `log`; or None.
        every: the interval between logged iterations.
    """

    tensorboard: Any = None
    wandb: Any = None
    every: int = 1


def training_global(name: str) -> Any:
    """A global of `megatron.training`; None where that does not run."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)


def training_argument(name: str) -> Any:
    """An argument of `megatron.training`; None where that does not run, or has no such argument."""
    return getattr(training_global("_GLOBAL_ARGS"), name, None)


def training_writers() -> TrainingWriters:
    """The writers that `megatron.training` has created so far on this rank; none where it does not run."""
    return TrainingWriters(
        training_global("_GLOBAL_TENSORBOARD_WRITER"),
        training_global("_GLOBAL_WANDB_WRITER"),
        max(1, int(training_argument("tensorboard_log_interval") or 1)),
    )
