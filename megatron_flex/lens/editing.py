"""TransformerLens' hook functions at our sites: `fn(tensor, hook)` on its names and shapes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_flex.errors import HookError
from megatron_flex.lens.lens_names import Alias, Filter
from megatron_flex.lens.reading import match_sites
from megatron_flex.lens.full_weights import WholeWeights
from megatron_flex.runtime import HookFunction, Session


class HookPoint:
    """What a hook function is told about its place.

    Attributes:
        name: the name under which it was asked for, in full.
        ctx: for the function to keep things in, of its own at each place.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ctx: dict[str, Any] = {}

    def layer(self) -> int:
        """The layer's number.

        Raises:
            HookError: the place is in no layer.
        """
        numbers = [part for part in self.name.replace(":", ".").split(".") if part.isdigit()]
        if not numbers:
            raise HookError(f"{self.name} is in no layer; hook.layer() is for names of blocks")
        return int(numbers[0])

    def __repr__(self) -> str:
        return f"HookPoint({self.name!r})"


LensFunction = Callable[[Tensor, HookPoint], Tensor | None]
Hooks = Sequence[tuple[Filter, LensFunction]]


class Edits:
    """Hook functions, put in and taken out together. Every rank does both alike."""

    def __init__(self, session: Session, weights: WholeWeights) -> None:
        self.session, self.weights = session, weights
        self._hooks: list[HookFunction] = []

    def add(self, alias: Alias, function: LensFunction) -> None:
        """Put one function at one place. Collective, if the view there needs weights.

        Raises:
            HookError: nothing can be edited there.
        """
        site, view = alias.edited
        if view.fixed:
            raise HookError(f"{alias.name} can be read and not edited: {view.fixed}")
        if not callable(function):
            raise HookError(f"the function for {alias.name} is {function!r}; give fn(tensor, hook)")
        weights, point = self.weights.of(view.weights), HookPoint(alias.name)

        def edit(
            module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict
        ) -> Tensor:
            count = self.session.probing
            if count is not None and self.session.clock.microbatch >= count:
                return inputs  # a copy, which the schedule needed
            seen = view.theirs(inputs, weights)
            version = seen._version
            made = function(seen, point)
            if made is None:
                if seen._version == version:
                    return inputs
                made = seen  # changed in place
            if not isinstance(made, Tensor) or made.shape != seen.shape:
                got = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
                raise HookError(f"{alias.name} has shape {tuple(seen.shape)}; the function returned {got}")
            return view.ours(made, inputs, weights)

        edit.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        hook = HookFunction(match_sites([site]), editing_function=edit, save=False)
        self.session.add(hook, always=True)
        self._hooks.append(hook)

    def clear(self) -> None:
        """Take all out."""
        for hook in self._hooks:
            self.session.remove(hook)
        self._hooks = []


@contextmanager
def edits(session: Session, weights: WholeWeights, hooks: Hooks) -> Iterator[Edits]:
    """Hook functions for the time of a scope.

    Args:
        session: where they go.
        weights: of the model.
        hooks: pairs of a name, or names, or a function of names, and what runs there.

    Raises:
        SiteError: a name stands for nothing, or a filter matches nothing.
    """
    out = Edits(session, weights)
    try:
        for wanted, function in hooks:
            found = weights.names.matching(wanted)
            if not found:
                described = getattr(wanted, "__qualname__", repr(wanted))
                raise HookError(f"the filter {described} matches none of {len(weights.names.aliases)} names")
            for alias in found:
                out.add(alias, function)
        yield out
    finally:
        out.clear()
