"""The record of what an editing function declares about itself, and the one way to read it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megatron_flex.errors import HookError

ALL_DIMS = "*"  # in place of the names of dims


@dataclass(frozen=True, kw_only=True)
class EditTraits:
    """What an editing function declares: its attribute `edit_traits`, or what `Edit.declare` returns.

    A plain function declares nothing, and is given the full tensor. None means that the answer is read from
    the function's code.

    Attributes:
        unsharded_dims: for a class of `Edit`, the names of the dims that must not be sharded: `()` for an
            edit that treats every entry separately, `"*"` for one that is always given the full tensor. A
            text of names is split at spaces.
        linear: whether it is a linear function of the tensor, which may act on partial sums.
        returns_new_tensor: whether it leaves its input unchanged, and returns a tensor that nothing else
            references.
        sums: whether it may sum over ranks on a shard.
        pure: whether it depends on the tensor alone, and changes nothing: then registration tries it.
        uses_random_numbers: whether it draws random numbers.
        uses_context: whether it uses `save_ctx`.
        uses_modules: whether it uses trainable modules.
        needs_dim_names: whether it depends on `site.dims`. Where a model's inputs tell them, `for_site` is
            called again in the first call. None: if it has a method `for_site`.
        changes_by_pass: whether calls differ in their function. None: if it has a method `for_pass`.
        user_functions: the user's functions in it, which ranks compare. None: the object itself.

    Raises:
        HookError: `unsharded_dims` are not names.

    Examples:
        >>> def halve(current_module, inputs, save_ctx, modules):
        ...     return inputs / 2
        >>> halve.edit_traits = edits.EditTraits(uses_random_numbers=False, returns_new_tensor=True)
        >>> edits.scale(2.0).edit_traits.linear, edits.clamp(0.0).edit_traits.linear
        (True, False)
    """

    unsharded_dims: Collection[str] | None = None
    linear: bool = False
    returns_new_tensor: bool = False
    sums: bool = True
    pure: bool | None = None
    uses_random_numbers: bool | None = None
    uses_context: bool | None = None
    uses_modules: bool | None = None
    needs_dim_names: bool | None = None
    changes_by_pass: bool | None = None
    user_functions: tuple[Callable[..., Any], ...] | None = None

    def __post_init__(self) -> None:
        dims = self.unsharded_dims
        if dims is None:
            return
        names = dims.split() if isinstance(dims, str) else dims
        if not all(isinstance(n, str) for n in names):
            raise HookError(f"EditTraits(unsharded_dims={dims!r}): give names of dims, () for none, or '*'")
        object.__setattr__(self, "unsharded_dims", frozenset(names))


UNDECLARED = EditTraits()


def traits_of(edit: Any) -> EditTraits:
    """Return what an editing function declares.

    Raises:
        HookError: its attribute `edit_traits` is something else.
    """
    traits = getattr(edit, "edit_traits", UNDECLARED)
    if not isinstance(traits, EditTraits):
        name = getattr(edit, "__name__", repr(edit))
        kind = type(traits).__name__
        raise HookError(f"edit_traits of {name} is of type {kind}; set it to an edits.EditTraits")
    return traits


def needs_dim_names(edit: Any) -> bool:
    """Whether an editing function depends on the names of the dims."""
    declared = traits_of(edit).needs_dim_names
    return hasattr(edit, "for_site") if declared is None else declared


def changes_by_pass(edit: Any) -> bool:
    """Whether an editing function has another function for each pass."""
    declared = traits_of(edit).changes_by_pass
    return hasattr(edit, "for_pass") if declared is None else declared
