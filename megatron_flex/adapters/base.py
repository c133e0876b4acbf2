"""What an adapter gives the runtime: mesh, sites, parameters, and word of what the framework is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

Undo = Callable[[], None]


class Listener(Protocol):
    """Whom an adapter tells about steps and microbatches; the runtime's clock."""

    def step_begins(self, iteration: int | None, gradient_factor: Callable[[], float] | None = None) -> None:
        """A schedule starts over all microbatches; `iteration` if the framework counts them.

        `gradient_factor` tells by how much the gradients that this schedule makes are greater than those of
        one microbatch's own loss; None where they are these.
        """

    def step_ends(self, failed: bool) -> None:
        """The schedule returned, or raised."""

    def forward_begins(self, microbatch: int) -> None:
        """The forward pass of one microbatch through one chunk starts."""

    def forward_ends(self, output: Any) -> None:
        """It ended with this output, by which `backward_begins` will know the microbatch again."""

    def backward_begins(self, output: Any) -> None:
        """The backward pass from that output starts."""

    def cannot(self, why: str) -> None:
        """What this step does cannot be hooked; told on every rank, which raises when the step is over."""

    def call_begins(self) -> None:
        """The model is called by itself, outside any schedule."""

    def call_ends(self, failed: bool) -> None:
        """That call returned, or raised."""


@dataclass(frozen=True, slots=True)
class ParameterSite:
    """A parameter, whose gradient can be hooked.

    Attributes:
        name: global name, `decoder.layers.17.mlp.linear_fc1.weight`.
        layout: how the local parameter relates to the whole one.
        shape: the whole's shape.
        parameter: the local parameter; None on ranks that do not own it.
        stage: pipeline stage that owns it.
        owner: coordinates, such as `(("ep", 2),)`, that its owning ranks have beside their stage. All ranks
            of the stage list the parameter.
        copy_of: the name of the parameter that this one is a copy of on another stage (a tied output
            layer); empty if it is none. The gradients of copies are summands.
        hidden: why its gradient cannot be hooked; empty if it can.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    parameter: nn.Parameter | None = field(compare=False, repr=False)
    stage: int = 0
    owner: tuple[tuple[str, int], ...] = ()
    copy_of: str = ""
    hidden: str = ""

    def remote(self) -> ParameterSite:
        """The parameter as ranks know it that do not own it."""
        return replace(self, parameter=None)


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


class Adapter(Protocol):
    """One framework's view of one model (a list of chunks)."""

    name: str
    mesh: Mesh

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

    def gradients_reduced(self) -> bool | None:
        """Whether gradients are reduced over data (and so over tensor) parallel ranks when a step is over.

        None if only the person who wrote the loop knows.
        """

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """A parameter's gradient, reduced or not yet.

        Raises:
            FlexError: what is asked for does not exist at this moment.
        """

    def watch(self, listener: Listener) -> Undo:
        """Tell `listener` what the schedule does, until the returned function is called."""


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
