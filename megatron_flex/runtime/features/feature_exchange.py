"""Takes features at their layers, and brings them to the ranks that asked for them, with their gradients.

A virtual stage sends the tensors of its layers at the end of each forward pass of a microbatch, whatever has
failed in it; so a receiver never waits for a message that does not come. A receiving stage waits for what
earlier virtual stages have sent when its last forward pass of the microbatch begins, and for what later ones
have sent when its last backward pass begins; without a backward pass, some microbatches later. The pipeline's
own order ensures that all of it was sent. Gradients go back when the receiver's backward pass ends.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives import Enter, PipelineRelay, Route, StageMessage, gather_full, is_leader
from megatron_flex.errors import HookError, describe_error
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.context.context_values import DetachedRead
from megatron_flex.runtime.features.feature_plan import FeaturePlan, FeatureRequest
from megatron_flex.runtime.features.receiving_ranks import ReceivingRanks
from megatron_flex.runtime.gradient_dispatcher import GradientHooks

Note = Callable[[str, BaseException], None]
OnFeatures = Callable[[Mapping[int, Tensor], int], None]


class FeatureHeader(NamedTuple):
    """What a receiver has to know of a tensor; `layout` is None where it is that of the hook point."""

    layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    layout: Layout | None = None
    wants: bool = False


class TakenFeature(NamedTuple):
    """A tensor that this rank has to send: without its graph, and as it was at that version."""

    tensor: Tensor
    version: int | None
    layout: Layout
    wants: bool


@dataclass(slots=True)
class MicrobatchFeatures:
    """The features of a microbatch on this rank.

    Attributes:
        training: whether its forward pass began with gradients enabled.
        taken: the layers whose tensors have passed.
        values: what this rank has received, or has of its own.
        outgoing: what it has not sent yet.
        joined: the layers whose tensors get gradients of their features by `JoinedGradients`.
        gradients: of this rank's tensors, summed over those that have read them.
    """

    training: bool
    taken: set[int] = field(default_factory=set)
    values: dict[int, Tensor] = field(default_factory=dict)
    outgoing: dict[int, TakenFeature] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def add_gradient(self, layer: int, grad: Tensor) -> None:
        """Add the gradient of one reader of a tensor."""
        known = self.gradients.get(layer)
        self.gradients[layer] = grad if known is None else known + grad

    def join_gradient(self, layer: int, grad: Tensor) -> Tensor:
        """The gradient of a tensor in the model with that of its features."""
        of_features = self.gradients.pop(layer, None)
        return grad if of_features is None else grad + of_features


class FeatureExchange:
    """The features of one request on this rank.

    Args:
        request: what is asked for.
        plan: the transfers.
        mesh: the run's axes.
        clock: the current microbatch.
        note: records an error, which all ranks raise at the end of the step.
        name: the same on all ranks, and different from the name of every earlier exchange.
        on_features: called on the receiving ranks with the features of each microbatch, and its number.

    Attributes:
        receives: whether this rank has the features.
    """

    def __init__(
        self,
        request: FeatureRequest,
        plan: FeaturePlan,
        mesh: Mesh,
        clock: Clock,
        note: Note,
        name: str,
        on_features: OnFeatures | None,
    ) -> None:
        self.request, self.plan, self.mesh, self.clock = request, plan, mesh, clock
        self._layers = {site.name: layer for layer, site in request.sites.items()}
        self._note, self._on_features = note, on_features
        self._stage = mesh["pp"].coord
        self._gathers = self._stage in plan.receivers
        # All ranks of a stage with a receiver take part, as they gather the tensor together.
        receivers = request.to
        chosen = receivers.here if isinstance(receivers, ReceivingRanks) else True
        self.receives = self._gathers and (is_leader(mesh) if receivers == "leader" else chosen)
        self._late = plan.list_late(self._stage) if self._gathers else []
        self._relay = PipelineRelay(mesh, name)
        self._micros: dict[int, MicrobatchFeatures] = {}
        self._completed: deque[int] = deque()  # microbatches without a backward pass, oldest first

    def open(self) -> None:
        """Connect the stages, if anything is sent between them. Collective over the ranks of `pp` then."""
        if self.plan.links:
            self._relay.open()

    def close(self) -> None:
        """Forget everything. Does not wait for any rank."""
        self.begin()
        self._relay.close()

    @property
    def joins_gradients(self) -> bool:
        """Whether gradients of features are added to those of tensors of this rank."""
        return self.request.gradients

    @property
    def values(self) -> Mapping[int, Tensor]:
        """The features of the running microbatch that have arrived."""
        micro = self._micros.get(self.clock.microbatch)
        return {} if micro is None else micro.values

    @property
    def _virtual_stage(self) -> int:
        return self.clock.chunk * self.plan.stages + self._stage

    def _open_microbatch(self) -> MicrobatchFeatures:
        number = self.clock.microbatch
        if number not in self._micros:
            self._micros[number] = MicrobatchFeatures(torch.is_grad_enabled())
        return self._micros[number]

    # -- the order of a step ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin or end a step: forget the microbatches of the one before."""
        self.forget_values()
        self._micros.clear()
        self._completed.clear()

    def forget_values(self) -> None:
        """Forget the features of earlier microbatches, as their graphs refer to the microbatches."""
        for micro in self._micros.values():
            micro.values.clear()

    def forward_begins(self) -> None:
        """Begin a microbatch's forward pass through a virtual stage."""
        micro = self._open_microbatch()
        if self._is_receiver():
            for owner in self.plan.list_remote(self._stage):
                if owner not in self._late:
                    self._receive(micro, self.clock.microbatch, owner)

    def forward_ends(self) -> None:
        """End the forward pass through the virtual stage."""
        micro, virtual_stage, number = self._open_microbatch(), self._virtual_stage, self.clock.microbatch
        if virtual_stage in self.plan.layers:
            self._send(micro, virtual_stage)
        if self._is_receiver() and not self._late:
            self._deliver(micro, number)
        if not micro.training and virtual_stage == self.plan.last[self._stage]:
            if not self._late:
                micro.values.clear()
            self._completed.append(number)
            if len(self._completed) > self.plan.stages:
                self._complete_oldest()

    def backward_begins(self) -> None:
        """Begin the backward pass through a virtual stage."""
        micro, virtual_stage = self._open_microbatch(), self._virtual_stage
        targets = self.plan.list_targets(virtual_stage) if virtual_stage in self.plan.layers else []
        for stage in targets if self.request.gradients and micro.training else ():
            self._receive_gradients(micro, virtual_stage, stage)
        if not any(self.plan.is_late(virtual_stage, stage) for stage in targets):
            self._relay.release(self._identify(self.clock.microbatch, virtual_stage))
        if self._is_receiver() and self._late:
            for owner in self._late:
                self._receive(micro, self.clock.microbatch, owner)
            self._deliver(micro, self.clock.microbatch)

    def backward_ends(self) -> None:
        """End the backward pass through the virtual stage."""
        micro = self._open_microbatch()
        if self._is_receiver() and self.request.gradients and micro.training:
            for owner in self.plan.list_remote(self._stage):
                self._send_gradients(micro, owner)
        if self._virtual_stage == self.plan.first[self._stage]:
            self._micros.pop(self.clock.microbatch).values.clear()  # graphs refer to the microbatch

    def step_ends(self) -> None:
        """Receive what is still to come at the end of a step that has not failed on this rank."""
        while self._completed:
            self._complete_oldest()

    def settle(self) -> None:
        """Note that all ranks have completed the step, so that everything sent has been received."""
        self._relay.settle(self.clock.step)

    def _is_receiver(self) -> bool:
        return self._gathers and self._virtual_stage == self.plan.receivers[self._stage]

    def _complete_oldest(self) -> None:
        """Receive what later stages have sent of the oldest microbatch, and release what was sent of it.

        This rank is done with the microbatch, so that the later stages depend on it no more. Waiting for the
        last microbatch would stop the pipeline.
        """
        number = self._completed.popleft()
        micro = self._micros.pop(number)
        for owner in self._late:
            self._receive(micro, number, owner)
        if self._late:
            self._deliver(micro, number)
        for owner in self.plan.layers:
            if owner % self.plan.stages == self._stage:
                self._relay.release(self._identify(number, owner))

    # -- at a layer ------------------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        """Take this rank's tensor after all edits, and return the one that continues in the model.

        Collective over the ranks of the stage that hold the tensor, where they receive the full tensor.

        Raises:
            HookError: the layer has run before in this microbatch, or its rows are those of experts.
        """
        layer, micro = self._layers[key.site], self._open_microbatch()
        if self.clock.replaying():
            return self._join(micro, layer, local) if layer in micro.joined else local
        self._check(micro, layer, key, route)
        micro.taken.add(layer)
        in_graph = torch.is_grad_enabled()
        # In a microbatch that trains, gradients are off only in the first pass of a recomputed region.
        needs = local.requires_grad if in_graph else local.is_floating_point()
        wants = self.request.gradients and micro.training and needs
        direct = wants and in_graph and self._is_receiver()  # autograd needs no help in one graph
        if wants and not direct:
            micro.joined.add(layer)
        if self._gathers:
            value = local if direct else self._read(micro, layer, local.detach(), wants)
            micro.values[layer] = self._gather(value, layout)
        if self.plan.list_targets(self._virtual_stage):
            version = None if local.is_inference() else local._version
            micro.outgoing[layer] = TakenFeature(local.detach(), version, layout, wants)
        return self._join(micro, layer, local) if layer in micro.joined and in_graph else local

    def _check(self, micro: MicrobatchFeatures, layer: int, key: Key, route: Route | None) -> None:
        if route is not None:
            raise HookError(
                f"features of {key.site}: its rows are those of an expert's tokens; take a layer's output",
                site=key.site,
            )
        if layer in micro.taken:
            raise HookError(
                f"features of {key.site}: it ran again in microbatch {key.microbatch}, and there is one "
                "tensor for each layer; take a layer that runs once",
                site=key.site,
            )

    def _read(self, micro: MicrobatchFeatures, layer: int, tensor: Tensor, wants: bool) -> Tensor:
        """The tensor for its readers, whose gradients are summed in the microbatch if one is wanted."""
        if not wants:
            return tensor
        with torch.enable_grad():
            token = torch.empty(0, requires_grad=True)
            add = partial(micro.add_gradient, layer)
            read = DetachedRead.apply(token, [tensor], add)  # type: ignore[no-untyped-call]  # torch does not type it
        assert isinstance(read, Tensor)
        return read

    def _join(self, micro: MicrobatchFeatures, layer: int, local: Tensor) -> Tensor:
        """The tensor whose gradient becomes the sum of its own and that of its features."""
        if not local.requires_grad:
            return local
        hooks = GradientHooks(partial(micro.join_gradient, layer))
        joined = Enter.apply(local, hooks)  # type: ignore[no-untyped-call]  # torch does not type it
        assert isinstance(joined, Tensor)
        return joined

    def _gather(self, value: Tensor, layout: Layout) -> Tensor:
        """The full tensor where that is asked for; nothing is copied where this rank has it."""
        if not self.request.full or not (layout.permute or layout.active_axes(self.mesh.sizes)):
            return value
        with torch.set_grad_enabled(value.requires_grad):
            return gather_full(value, layout, self.mesh)

    # -- messages --------------------------------------------------------------------------------------

    def _identify(self, microbatch: int, owner: int, backward: bool = False) -> StageMessage:
        return StageMessage(self.clock.step, microbatch, owner, backward)

    def _send(self, micro: MicrobatchFeatures, owner: int) -> None:
        sent, micro.outgoing = micro.outgoing, {}
        headers = []
        for layer, (tensor, version, layout, wants) in sent.items():
            site = self.request.sites[layer]
            if version is not None and tensor._version != version:
                self._refuse(f"{site.name} was changed in place before it was sent; edit it by a hook")
            known = None if layout == site.layout else layout
            headers.append(_make_header(layer, tensor, known, wants))
        tensors = [taken.tensor for taken in sent.values()]
        for stage in self.plan.list_targets(owner):
            self._relay.send(_pack(headers), stage, self._identify(self.clock.microbatch, owner), tensors)

    def _receive(self, micro: MicrobatchFeatures, microbatch: int, owner: int) -> None:
        stage = owner % self.plan.stages
        for header, tensor in self._receive_tensors(stage, self._identify(microbatch, owner)):
            layout = header.layout or self.request.sites[header.layer].layout
            value = self._read(micro, header.layer, tensor, header.wants and micro.training)
            micro.values[header.layer] = self._gather(value, layout)

    def _send_gradients(self, micro: MicrobatchFeatures, owner: int) -> None:
        layers = [layer for layer in self.plan.layers[owner] if layer in micro.gradients]
        tensors = [micro.gradients.pop(layer).contiguous() for layer in layers]
        headers = [_make_header(layer, grad) for layer, grad in zip(layers, tensors, strict=True)]
        message = self._identify(self.clock.microbatch, owner, backward=True)
        self._relay.send(_pack(headers), owner % self.plan.stages, message, tensors)

    def _receive_gradients(self, micro: MicrobatchFeatures, owner: int, stage: int) -> None:
        message = self._identify(self.clock.microbatch, owner, backward=True)
        for header, grad in self._receive_tensors(stage, message):
            micro.add_gradient(header.layer, grad)

    def _receive_tensors(self, stage: int, message: StageMessage) -> list[tuple[FeatureHeader, Tensor]]:
        received: list[tuple[FeatureHeader, Tensor]] = []

        def allocate(package: Tensor) -> list[Tensor]:
            received[:] = [(h, torch.empty(h.shape, dtype=h.dtype)) for h in _unpack(package)]
            return [tensor for _, tensor in received]

        self._relay.receive(stage, message, allocate)
        return [(header, tensor.to(header.device)) for header, tensor in received]

    # -- what users have of it ---------------------------------------------------------------------------

    def _deliver(self, micro: MicrobatchFeatures, microbatch: int) -> None:
        missing = [layer for layer in self.request.sites if layer not in micro.values]
        if missing:
            name = self.request.sites[missing[0]].name
            self._refuse(f"{name} did not run in microbatch {microbatch}; take layers that run in each")
        elif self.receives and self._on_features is not None:
            values = {layer: micro.values[layer] for layer in self.request.sites}
            try:
                self._on_features(values, microbatch)
            except Exception as error:  # recorded: all ranks raise it at the end of the step
                self._note(f"on_features in microbatch {microbatch}: {describe_error(error)}", error)

    def _refuse(self, why: str) -> None:
        text = f"features in iteration {self.clock.iteration}: {why}"
        self._note(text, HookError(text))


def _make_header(
    layer: int, tensor: Tensor, layout: Layout | None = None, wants: bool = False
) -> FeatureHeader:
    return FeatureHeader(layer, tuple(tensor.shape), tensor.dtype, tensor.device.type, layout, wants)


def _pack(headers: list[FeatureHeader]) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps([tuple(h) for h in headers])), dtype=torch.uint8)


def _unpack(package: Tensor) -> list[FeatureHeader]:
    headers: list[Any] = pickle.loads(package.numpy().tobytes())  # noqa: S301  # a rank of this job pickled it
    return [FeatureHeader(*header) for header in headers]
