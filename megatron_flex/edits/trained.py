"""Presets that run a module which the hook was registered with: adapters, sparse autoencoders."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatron_flex.edits.edit_base import Edit
from megatron_flex.errors import HookError, suggest_nearest


class LowRank(nn.Module):
    """`x + up(down(x))` on the last dim; `up` starts at zero, so that at first nothing changes.

    Args:
        features: the last dim.
        rank: how many numbers lie between.
    """

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the shape that it gets."""
        added: Tensor = self.up(self.down(inputs))
        return inputs + added


@dataclass(frozen=True, repr=False, eq=False)
class low_rank(Edit):
    """Replace by what a module makes of it, mostly a `LowRank`.

    Attributes:
        name: the module's name among those that editing functions are given.
    """

    name: str
    pure = False
    fresh = False  # a module may do anything
    asks_modules = True

    def mixes(self) -> set[str]:
        return {"*"}

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return _run_module(self, modules, self.name, inputs)


@dataclass(frozen=True, repr=False, eq=False)
class splice(Edit):
    """Replace by a module's reconstruction: a sparse autoencoder, a transcoder.

    Attributes:
        name: the module's name among those that editing functions are given; it returns the reconstruction,
            or a tuple that begins with it.
        keep_error: add what the reconstruction misses, without gradient: values stay as they were, and
            gradients pass through the module alone.
    """

    name: str
    keep_error: bool = False
    pure = False
    fresh = False  # a module may do anything
    asks_modules = True

    def mixes(self) -> set[str]:
        return {"*"}

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        made = _run_module(self, modules, self.name, inputs)
        return made + (inputs - made).detach() if self.keep_error else made


def _run_module(edit: Edit, modules: nn.ModuleDict, name: str, inputs: Tensor) -> Tensor:
    if name not in modules:
        known = f"; known: {', '.join(modules)}" if len(modules) else "; none is"
        raise HookError(
            f"{edit!r}: no trainable module {name!r} is registered{suggest_nearest(name, modules)}{known}"
        )
    made = modules[name](inputs)
    made = made[0] if isinstance(made, tuple) else made
    if not isinstance(made, Tensor) or made.shape != inputs.shape:
        returned = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise HookError(f"{edit!r}: the module returned {returned} for {tuple(inputs.shape)}; return that shape")
    return made
