"""Named hook points called from patched source, which `scripts/patch_upstream` writes.

Patched source imports this file and nothing else of the package, so this file imports nothing above it. A
patched class declares its points in an attribute of the class. A module gets an attribute of the same name
only while a hook is registered at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

ATTRIBUTE = "flex_points"

PointCallback = Callable[..., Tensor]  # called with the local tensor, and the call's details by keyword


class Points:
    """The points that a patched class declares; its forward calls this where no hook is registered.

    Args:
        names: names of its points.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def stands(self, name: str) -> bool:
        """Whether a hook is registered at a point."""
        return False

    def __call__(self, name: str, local: Tensor, **details: Any) -> Tensor:
        """Return the local tensor of a point unchanged.

        Args:
            name: the point.
            local: the local tensor.
            details: details of this call that determine its layout.
        """
        return local


class HookedPoints(Points):
    """The points of one module that have hooks."""

    def __init__(self, declared: Points) -> None:
        super().__init__(*declared.names)
        self.callbacks: dict[str, list[PointCallback]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or one from a pickle, has no hooks."""
        return Points, self.names

    def stands(self, name: str) -> bool:
        """Whether a hook is registered at a point."""
        return name in self.callbacks

    def __call__(self, name: str, local: Tensor, **details: Any) -> Tensor:
        """Run the hooks of a point on the local tensor.

        An edit gathers, edits and scatters; a read keeps the local tensor.
        """
        for callback in self.callbacks.get(name, ()):
            local = callback(local, **details)
        return local


class Alone:
    """A parallel linear for one call of its GEMM, whose collectives on the input the caller has already run.

    Megatron's GEMM gathers its input, or reduces its input's gradient, internally, so that the full input is
    never available. Where a hook is registered there, patched source does the same outside the GEMM, with
    Megatron's functions.

    Args:
        module: the linear.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        impl = cast(Callable[..., Tensor], self.module._forward_impl)
        return impl(*args, **{**kwargs, "sequence_parallel": False, "allreduce_dgrad": False})


def declares(module: nn.Module, name: str) -> bool:
    """Whether the forward that a module runs is patched and calls the point.

    A class that derives from a patched class and overrides forward is not patched.
    """
    owner = next((c for c in type(module).__mro__ if "forward" in vars(c)), nn.Module)
    declared = vars(owner).get(ATTRIBUTE)
    return isinstance(declared, Points) and name in declared.names


def install(module: nn.Module, name: str, callback: PointCallback) -> Callable[[], None]:
    """Let a point of a module call `callback`, until the returned function is called.

    When the last one is removed, the attribute is deleted from the module.
    """
    attributes = vars(module)
    hooked = attributes.get(ATTRIBUTE)
    if not isinstance(hooked, HookedPoints):  # none, or the one that a copied module shares with its original
        hooked = attributes[ATTRIBUTE] = HookedPoints(getattr(type(module), ATTRIBUTE))
    hooked.callbacks.setdefault(name, []).append(callback)

    def undo() -> None:
        callbacks = hooked.callbacks.get(name, [])
        if callback not in callbacks:
            return
        callbacks.remove(callback)
        if not callbacks:
            del hooked.callbacks[name]
        if not hooked.callbacks:
            del attributes[ATTRIBUTE]

    return undo
