"""Taps on what experts compute on: rows that a token dispatcher brought from other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.inert import before
from megatron_flex.adapters.taps import intercept
from megatron_flex.collectives import Dispatch, Route
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import TapCallback, Tap

DISPATCH_METHODS = ("dispatch_preprocess", "token_permutation")  # the second before megatron-core 0.14


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """A tensor of experts, led home to its tokens.

    Attributes:
        tap: how to get at the tensor, whose dim 0 has the rows of this rank's experts.
        layer: the layer of experts.
        layout: of the tensor over `etp`.
        home: of the tensor when its rows are with their tokens.
        stream: of the tokens.
        mesh: the run's axes.
        expert: if given, the tensor has the rows of one expert only, here of this one or of another.
        owned: whether that is this one.
    """

    tap: Tap
    layer: nn.Module
    layout: Layout
    home: Layout
    stream: Layout
    mesh: Mesh
    expert: int | None = None
    owned: bool = True

    @property
    def module(self) -> Any:
        """The module that the tensor belongs to."""
        return getattr(self.tap, "module", None)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire`, on ranks without the expert too: they take part with no rows."""
        watch = _DispatchWatch.on(self.layer)
        unwatch = watch.add(self)

        def routed(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            assert watch.dispatch is not None, "experts run behind their dispatcher"
            route = Route(watch.dispatch, self.layout, self.home, self.expert)
            if self.owned:
                return fire(local, None, route)
            no_rows = local[:0]
            passed = fire(no_rows, None, route)
            return local if passed is no_rows else torch.cat([local, passed])

        restore = self.tap.install(routed)

        def undo() -> None:
            restore()
            unwatch()

        return undo


@dataclass(frozen=True, eq=False)
class ExpertIndices:
    """The numbers of the experts that each token goes to, in ascending order; -1 where there are fewer.

    Attributes:
        module: the layer of experts.
        stream: the layout of the tokens.
        mesh: the run's axes.
    """

    module: nn.Module
    stream: Layout
    mesh: Mesh

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` before the dispatcher; what it returns is not used."""
        watch = _DispatchWatch.on(self.module)
        return watch.add(self, lambda dispatch: fire(dispatch.indices))


@dataclass(frozen=True, eq=False)
class RouterTokens:
    """A tensor of a router with one row for each token, seen as `[s, b, ...]`.

    Attributes:
        module: the router.
        tap: how to get at the tensor.
    """

    module: nn.Module
    tap: Tap

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire`."""
        seen: list[tuple[int, int]] = []

        def measure(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = args[0] if args else kwargs["input"]
            seen[:] = [tuple(tokens.shape[:2])]

        def shaped(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            dense = local.view(*seen[0], *local.shape[1:])
            passed = fire(dense)
            return local if passed is dense else passed.reshape(local.shape)

        unwatch = before(self.module, measure, with_kwargs=True)
        restore = self.tap.install(shaped)

        def undo() -> None:
            restore()
            unwatch()

        return undo


class _DispatchWatch:
    """What taps of one layer share: the dispatch of its current call."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.dispatch: Dispatch | None = None
        # By a key for each call of `add`: a hook and `verify()` may both install the same tap.
        self._users: dict[object, tuple[ExpertRows | ExpertIndices, Callable[[Dispatch], Any] | None]] = {}
        dispatcher = layer.token_dispatcher
        method = next(m for m in DISPATCH_METHODS if hasattr(dispatcher, m))
        self._signature = inspect.signature(getattr(dispatcher, method))
        self._restore = intercept(dispatcher, method, self._around)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @staticmethod
    def on(layer: nn.Module) -> _DispatchWatch:
        """The layer's; made where it has none yet."""
        own = vars(layer)
        if own.get("_flex_watch") is None:  # a copy of a watched layer has None
            own["_flex_watch"] = _DispatchWatch(layer)
        return own["_flex_watch"]  # type: ignore[no-any-return]

    def add(self, tap: ExpertRows | ExpertIndices, tell: Callable[[Dispatch], Any] | None = None) -> Undo:
        """Keep watching for `tap`, and tell it of each dispatch."""
        user = object()
        self._users[user] = tap, tell

        def undo() -> None:
            del self._users[user]
            if not self._users:
                self._restore()
                del vars(self.layer)["_flex_watch"]

        return undo

    def _around(self, dispatch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind(*args, **kwargs).arguments
        tokens, chosen = next(iter(given.values())), given["routing_map"]
        tap, _ = next(iter(self._users.values()))
        self.dispatch = Dispatch(
            chosen.detach(),
            (int(tokens.shape[0]), int(tokens.shape[1])),
            self.layer.config.moe_router_topk,
            tap.stream,
            "AlltoAll" in type(self.layer.token_dispatcher).__name__,
            tap.mesh,
        )
        for _, tell in self._users.values():
            if tell is not None:
                tell(self.dispatch)
        return dispatch(*args, **kwargs)
