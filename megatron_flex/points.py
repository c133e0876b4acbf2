"""Named hook points that somebody's own source calls, put into it by `scripts/patch_upstream`.

Patched source imports this file and nothing else of the package, so it knows nothing above it. A patched
class declares its points in an attribute of the class; a module gets an attribute of its own of the same name
only while a hook stands at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

ATTRIBUTE = "flex_points"

Fire = Callable[..., Tensor]  # called with the local tensor and what the source says of the call, by keyword


class Points:
    """What a patched class declares, and what its forward calls where no hook stands.

    Args:
        names: of its points.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def stands(self, name: str) -> bool:
        """Whether a hook stands at a point."""
        return False

    def __call__(self, name: str, local: Tensor, **said: Any) -> Tensor:
        """Hand on the rank's own tensor of a point.

        Args:
            name: the point.
            local: the tensor, as it lies on this rank.
            said: what decides about its layout in this call.
        """
        return local


class Standing(Points):
    """The points of one module at which hooks stand."""

    def __init__(self, declared: Points) -> None:
        super().__init__(*declared.names)
        self.fires: dict[str, list[Fire]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of the module, or one from a pickle, no hook stands."""
        return Points, self.names

    def stands(self, name: str) -> bool:
        """Whether a hook stands at a point."""
        return name in self.fires

    def __call__(self, name: str, local: Tensor, **said: Any) -> Tensor:
        """Pass the rank's own tensor of a point through what stands there.

        That gathers, edits and scatters; where something is only read, it keeps the local tensor.
        """
        for fire in self.fires.get(name, ()):
            local = fire(local, **said)
        return local


class Alone:
    """A parallel linear for one call of its GEMM, whose collectives on the input the caller has made already.

    Megatron's GEMM gathers its input, or sums its input's gradient, by itself, so that the whole input is
    nowhere to be had. Where a hook stands at it, patched source does the same outside, with Megatron's
    functions.

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


def has(module: nn.Module, name: str) -> bool:
    """Whether the forward that a module runs was patched and calls the point.

    A class that derives from a patched one and has a forward of its own is not patched.
    """
    owner = next((c for c in type(module).__mro__ if "forward" in vars(c)), nn.Module)
    declared = vars(owner).get(ATTRIBUTE)
    return isinstance(declared, Points) and name in declared.names


def place(module: nn.Module, name: str, fire: Fire) -> Callable[[], None]:
    """Let a point of a module call `fire`, until the returned function is called.

    With the last one the module has no attribute of ours any more.
    """
    own = vars(module)
    standing = own.get(ATTRIBUTE)
    if not isinstance(standing, Standing):  # none, or what a copy has of the one of its original
        standing = own[ATTRIBUTE] = Standing(getattr(type(module), ATTRIBUTE))
    standing.fires.setdefault(name, []).append(fire)

    def undo() -> None:
        fires = standing.fires.get(name, [])
        if fire not in fires:
            return
        fires.remove(fire)
        if not fires:
            del standing.fires[name]
        if not standing.fires:
            del own[ATTRIBUTE]

    return undo
