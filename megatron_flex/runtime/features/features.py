"""`Features`, what a user reads, and the features of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from megatron_flex.errors import HookError
from megatron_flex.handles import Handle
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_environment import BACKWARD_PASS, FORWARD_PASS, EditEnvironment
from megatron_flex.runtime.features.feature_exchange import FeatureExchange, OnFeatures
from megatron_flex.runtime.features.feature_plan import FeaturePlan, FeatureRequest
from megatron_flex.runtime.features.receiving_ranks import gather_receiving_ranks, is_group
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import FeatureHook
from megatron_flex.runtime.session_hooks import SessionHooks
from megatron_flex.sites import SiteTable


class Features(Mapping[int, Tensor]):
    """Hidden states of the running microbatch, by the number of the layer; empty on other ranks.

    Attributes:
        receives: whether this rank has the tensors.

    Examples:
        >>> with attach(chunks) as flex, flex.features(layers=[0, 2]) as features:
        ...     features, features.receives
        (<Features of layers 0, 2 to last_stage>, True)
    """

    def __init__(self, exchange: FeatureExchange, handle: Handle) -> None:
        self._exchange, self._handle = exchange, handle

    @property
    def receives(self) -> bool:
        return self._exchange.receives

    def __getitem__(self, layer: int) -> Tensor:
        exchange = self._exchange
        known = exchange.request.sites
        if layer not in known:
            raise HookError(f"features have no layer {layer!r}, but {', '.join(map(str, known))}; name one")
        if not exchange.receives:
            raise HookError(
                f"features[{layer}]: this rank does not receive them, but "
                f"{exchange.request.describe_receivers()}; read them where features.receives is True"
            )
        if layer not in exchange.values:
            raise HookError(
                f"features[{layer}]: nothing has arrived in microbatch {exchange.clock.microbatch}; read it "
                "after the layer in the forward pass, such as in the loss function, or in on_features"
            )
        return exchange.values[layer]

    def __iter__(self) -> Iterator[int]:
        values = self._exchange.values if self.receives else {}
        return (layer for layer in self._exchange.request.sites if layer in values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def remove(self) -> None:
        """Take features no longer. Every rank calls it, between steps."""
        self._handle.remove()

    def __enter__(self) -> Features:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        request = self._exchange.request
        layers = ", ".join(map(str, request.sites))
        return f"<Features of layers {layers} to {request.describe_receivers()}>"


class SessionFeatures:
    """The features of a session, which follow its steps.

    Args:
        registry: the session's hooks.
        hooks: registers hooks.
        sites: those of all stages.
        mesh: the run's axes.
        clock: the current microbatch.
        editing: records errors.
        name: the session's name, the same on all ranks.

    Attributes:
        exchanges: the features, by their hooks.
        active: those that are taken in this step.
    """

    def __init__(
        self,
        registry: HookRegistry,
        hooks: SessionHooks,
        sites: SiteTable,
        mesh: Mesh,
        clock: Clock,
        editing: EditEnvironment,
        name: str,
    ) -> None:
        self._registry, self._hooks, self._sites = registry, hooks, sites
        self._mesh, self._clock, self._editing, self._name = mesh, clock, editing, name
        self.exchanges: dict[FeatureHook, FeatureExchange] = {}
        self.active: list[FeatureExchange] = []
        self._count = 0  # of all that were ever registered

    def add(
        self, request: FeatureRequest, on_features: OnFeatures | None, compare: Callable[[str], None]
    ) -> Features:
        """Register features. Collective.

        Args:
            request: what is asked for.
            on_features: called with the features of each microbatch.
            compare: compares a text on all ranks.

        Raises:
            HookError: on all ranks: they ask for different features, or the receivers are invalid.
        """
        compare(request.describe())
        if is_group(request.to):
            request = replace(request, to=gather_receiving_ranks(request.to, self._mesh))
        plan = FeaturePlan.from_request(request, self._sites, self._mesh["pp"].size)
        name = f"{self._name}/features{self._count}"
        note = self._editing.record_error
        exchange = FeatureExchange(request, plan, self._mesh, self._clock, note, name, on_features)
        hook = FeatureHook(
            exchange, request.describe(), frozenset(site.name for site in request.sites.values())
        )
        handle = self._hooks.register(hook, "forward")
        exchange.open()
        self._count += 1
        self.exchanges[hook] = exchange

        def remove() -> None:
            handle.remove()
            self.exchanges.pop(hook).close()

        return Features(exchange, Handle(remove, repr(hook), lambda: hook in self.exchanges))

    def begin(self) -> None:
        """Begin a step, in which features are taken whose hooks are active."""
        hooks = {entry.hook for entry in self._registry.active}
        self.active = [exchange for hook, exchange in self.exchanges.items() if hook in hooks]
        for exchange in self.exchanges.values():
            exchange.begin()

    def end(self) -> None:
        """End a step."""
        for exchange in self.active:
            exchange.begin()
        self.active = []

    def forget_values(self) -> None:
        """Forget the features of earlier microbatches, where no backward pass is reported."""
        for exchange in self.active:
            exchange.forget_values()

    def forward_begins(self) -> None:
        """Begin a microbatch's forward pass through a virtual stage."""
        self._call(FORWARD_PASS, FeatureExchange.forward_begins)

    def forward_ends(self) -> None:
        """End the forward pass."""
        self._call(FORWARD_PASS, FeatureExchange.forward_ends)

    def backward_begins(self) -> None:
        """Begin a microbatch's backward pass through a virtual stage."""
        self._call(BACKWARD_PASS, FeatureExchange.backward_begins)

    def backward_ends(self) -> None:
        """End the backward pass."""
        self._call(BACKWARD_PASS, FeatureExchange.backward_ends)

    def step_ends(self) -> None:
        """End a step that has not failed on this rank."""
        self._call(FORWARD_PASS, FeatureExchange.step_ends)

    def settle(self) -> None:
        """Note that all ranks have completed the step."""
        self._call(FORWARD_PASS, FeatureExchange.settle)

    def close(self) -> None:
        """Forget all features. Does not wait for any rank."""
        for exchange in self.exchanges.values():
            exchange.close()
        self.exchanges.clear()
        self.active = []

    def _call(self, place: str, method: Callable[[FeatureExchange], None]) -> None:
        for exchange in self.active:
            self._editing.record_errors_of(place, method, exchange)
