"""The interface of presets, which `|` joins, and the chain of edits that it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from typing import Any

from torch import Tensor, nn

from megatron_flex.collectives import Shard
from megatron_flex.errors import HookError
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_traits import EditTraits, changes_by_pass, needs_dim_names, traits_of
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hooks import EditingFunction, describe_edit, for_pass, for_site
from megatron_flex.runtime.local_edits import on_shard, uses_modules
from megatron_flex.sites import Site


def split_dims(shard: Shard) -> set[int]:
    """The dims in which a shard differs from the full tensor: they are sharded, or padded."""
    padded = {i for i, (n, w) in enumerate(zip(shard.shape, shard.full_size, strict=True)) if n != w}
    return padded | set(shard.cut)


class Preset(ABC):
    """An editing function with an attribute `edit_traits`, that `|` joins to others."""

    @abstractmethod
    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        """Edit a tensor."""

    def on_shard(self, shard: Shard) -> EditingFunction | None:
        """The callable to run on a local shard, dims in the full tensor's order, for the same result.

        Called once for each layout and shape, with the same answer on all ranks.

        Returns:
            None if it needs the full tensor.
        """
        return None

    def __or__(self, other: EditingFunction) -> chain:
        return chain(self, other)

    def __ror__(self, other: EditingFunction) -> chain:
        return chain(other, self)

    def agreement_text(self) -> str:
        """Return the text that ranks compare to check that they hold the same edit."""
        return repr(self)


class chain(Preset):
    """One edit after the other: `chain(a, b)`, or `a | b` if one of them is a preset.

    Raises:
        HookError: there are no edits.

    Examples:
        >>> edits.chain(edits.scale(0.5), edits.clamp(-2.0, 2.0))
        scale(0.5) | clamp(-2.0, 2.0)
        >>> edits.scale(0.5) | edits.clamp(-2.0, 2.0)
        scale(0.5) | clamp(-2.0, 2.0)
    """

    def __init__(self, *edits: EditingFunction) -> None:
        if not edits:
            raise HookError("chain() of no edits; name at least one")
        self.edits: tuple[EditingFunction, ...] = tuple(
            inner for e in edits for inner in (e.edits if isinstance(e, chain) else (e,))
        )
        declared = [traits_of(e) for e in self.edits]
        self.edit_traits = EditTraits(
            linear=all(t.linear for t in declared),
            returns_new_tensor=all(t.returns_new_tensor for t in declared),
            sums=any(t.sums for t in declared),
            pure=all(t.pure for t in declared),
            uses_random_numbers=any(t.uses_random_numbers is not False for t in declared),
            uses_context=any(uses_context(e) for e in self.edits),
            uses_modules=any(uses_modules(e) for e in self.edits),
            needs_dim_names=any(needs_dim_names(e) for e in self.edits),
            changes_by_pass=any(changes_by_pass(e) for e in self.edits),
            user_functions=self.edits,
        )

    def for_site(self, site: Site) -> chain:
        """Return the chain bound to a site."""
        return chain(*(for_site(e, site) for e in self.edits))

    def for_pass(self, key: Key) -> chain:
        """Return the chain bound to one call."""
        bound = [for_pass(e, key) for e in self.edits]
        same = all(new is old for new, old in zip(bound, self.edits, strict=True))
        return self if same else chain(*bound)

    def on_shard(self, shard: Shard) -> chain | None:
        """Return the chain on a local shard, if all of it can run there."""
        bound_edits: list[EditingFunction] = []
        for edit in self.edits:
            bound = on_shard(edit, shard)
            if bound is None:
                return None
            bound_edits.append(bound)
        return chain(*bound_edits)

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        for edit in self.edits:
            inputs = edit(current_module, inputs, save_ctx, modules)
            if not isinstance(inputs, Tensor):
                raise HookError(
                    f"{describe_edit(edit)} in a chain returned {type(inputs).__name__}; return a tensor"
                )
        return inputs

    def __repr__(self) -> str:
        return " | ".join(describe_edit(e) for e in self.edits)
