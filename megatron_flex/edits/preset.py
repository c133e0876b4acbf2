"""What a ready-made editing function says of itself, and one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from typing import Any, Literal

from torch import Tensor, nn

from megatron_flex.collectives import Shard
from megatron_flex.errors import HookError
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import EditingFunction, for_pass, for_site, describe_edit
from megatron_flex.runtime.local_edits import asks_modules, on_shard
from megatron_flex.runtime.sharing.functions import uses_context
from megatron_flex.sites import Site

Local = Literal["all"] | tuple[str, ...]


def split_dims(shard: Shard) -> set[int]:
    """The dims of which a rank has not just what the whole has: they are cut, or padded."""
    padded = {i for i, (n, w) in enumerate(zip(shard.shape, shard.whole, strict=True)) if n != w}
    return padded | set(shard.cut)


class Preset(ABC):
    """An editing function that says what it is.

    Attributes:
        pure: whether it depends on nothing but the tensor, and changes nothing; None if its source tells.
        local: the dims along which it may be applied slice by slice with the same result; `all`, or names,
            which are known once the site is.
        linear: whether it is a linear function of the tensor.
        draws: whether it draws random numbers.
        fresh: whether it leaves what it gets as it is, and returns a tensor that nobody else keeps.
        asks_context: whether it uses `save_ctx`.
        asks_modules: whether it uses trainable modules.
        sure: whether no tensor can make it fail, so that ranks need not ask; known once the site is.
    """

    pure: bool | None = True
    draws = True
    fresh = False
    asks_context = True
    asks_modules = True
    sure = False

    @property
    def local(self) -> Local:
        return ()

    @property
    def linear(self) -> bool:
        return False

    @abstractmethod
    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        """Edit a tensor."""

    def on_shard(self, shard: Shard) -> EditingFunction | None:
        """What to run on a rank's part, its dims in the whole's order, so that the parts make the same.

        Asked once for each layout and shape, and answered alike on all ranks.

        Returns:
            None if it must have the whole.
        """
        return None

    def __or__(self, other: EditingFunction) -> chain:
        return chain(self, other)

    def __ror__(self, other: EditingFunction) -> chain:
        return chain(other, self)

    def in_words(self) -> str:
        """What ranks compare to see that they hold the same edit."""
        return repr(self)


class chain(Preset):
    """One edit after the other: `chain(a, b)`, or `a | b` where one of them is a preset."""

    def __init__(self, *edits: EditingFunction) -> None:
        if not edits:
            raise HookError("chain() of no edits; name at least one")
        self.edits: tuple[EditingFunction, ...] = tuple(
            inner for e in edits for inner in (e.edits if isinstance(e, chain) else (e,))
        )
        self.pure = all(getattr(e, "pure", False) for e in self.edits)
        self.draws = any(getattr(e, "draws", True) for e in self.edits)
        self.fresh = all(getattr(e, "fresh", False) for e in self.edits)
        self.asks_context = any(uses_context(e) for e in self.edits)
        self.asks_modules = any(asks_modules(e) for e in self.edits)
        self.sure = all(getattr(e, "sure", False) for e in self.edits)

    @property
    def local(self) -> Local:
        found = [getattr(e, "local", ()) for e in self.edits]
        named = [f for f in found if f != "all"]
        return tuple(d for d in named[0] if all(d in f for f in named)) if named else "all"

    @property
    def linear(self) -> bool:
        return all(getattr(e, "linear", False) for e in self.edits)

    def for_site(self, site: Site) -> chain:
        """The chain at a site."""
        return chain(*(for_site(e, site) for e in self.edits))

    def for_pass(self, key: Key) -> chain:
        """The chain in one pass."""
        found = [for_pass(e, key) for e in self.edits]
        same = all(new is old for new, old in zip(found, self.edits, strict=True))
        return self if same else chain(*found)

    def on_shard(self, shard: Shard) -> chain | None:
        """The chain on a rank's part, if all of it can run there."""
        found: list[EditingFunction] = []
        for edit in self.edits:
            bound = on_shard(edit, shard)
            if bound is None:
                return None
            found.append(bound)
        return chain(*found)

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
