"""Functions marked as local: the result is the same on each rank's shard as on the full tensor."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from megatron_flex.collectives import Shard
from megatron_flex.edits.preset_base import Preset, split_dims
from megatron_flex.errors import HookError
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_traits import EditTraits, changes_by_pass, needs_dim_names, traits_of
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hooks import EditingFunction, describe_edit, for_pass, for_site
from megatron_flex.runtime.local_edits import uses_modules
from megatron_flex.sites import Site

Local = Literal["all"] | tuple[str, ...]
MAX_GRAPH_NODES = 10_000  # maximum number of autograd nodes to visit


def local(dims: str | Sequence[str] = "all") -> Callable[[EditingFunction], LocalEdit]:
    """Let an editing function run on each rank's local shard, without communication.

    The function must give the same result slice by slice as on the full tensor: no sums, sorting or counts of
    entries along these dims, and no random numbers. `flex.verify()` detects a violation. Where another dim is
    sharded, it gets the full tensor; also if it uses `save_ctx`, or trainable modules are registered.

    Args:
        dims: names of the dims along which this holds, as the site names them (`"s b"`), or `all`.

    Returns:
        A decorator of editing functions.

    Raises:
        HookError: there are no such names. At registration: the site has no such dim.

    Examples:
        >>> @local("s b")
        ... def normalize(current_module, inputs, save_ctx, modules):
        ...     return inputs / inputs.norm(dim=-1, keepdim=True)
        >>> edit = HookFunction("decoder.layers.2", normalize)
        >>> handle = flex.register_forward_hook(edit)
        >>> print(flex.explain(edit))
        hook: forward on decoder.layers.2 editing by normalize, local along s, b
        ...
          edit: normalize, local along s, b, on the shard of each rank, nothing sent
        ...
    """
    if not isinstance(dims, str) and (callable(dims) or not all(isinstance(d, str) for d in dims)):
        raise HookError(f"mf.local(dims={dims!r}): give names of dims; all of them are @mf.local()")
    names = dims.split() if isinstance(dims, str) else dims
    if not names:
        raise HookError("mf.local() of no dims has no effect; name some, or leave the function as it is")
    return functools.partial(LocalEdit, "all" if dims == "all" else tuple(names))


class LocalEdit(Preset):
    """An editing function that was marked by `local`; otherwise it behaves as that function.

    Args:
        dims: the dims along which the function may run on shards, as for `local`.
        function: the editing function.
        names: the names of the dims of its tensor.
        on_part: whether the function is bound to the local shard of a rank.

    Examples:
        >>> @edits.local("s b")
        ... def normalize(current_module, inputs, save_ctx, modules):
        ...     return inputs / inputs.norm(dim=-1, keepdim=True)
        >>> isinstance(normalize, edits.LocalEdit)
        True
    """

    def __init__(
        self,
        dims: Local,
        function: EditingFunction,
        names: tuple[str, ...] = (),
        on_part: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.dims, self.function, self.names, self.on_part = dims, function, names, on_part
        self.edit_traits = EditTraits(
            sums=False,
            uses_random_numbers=traits_of(function).uses_random_numbers,
            uses_context=uses_context(function),
            uses_modules=uses_modules(function),
            needs_dim_names=needs_dim_names(function) or (dims != "all" and not names),
            changes_by_pass=changes_by_pass(function),
            user_functions=(function,),
        )

    def __get__(self, owner: Any, kind: type | None = None) -> LocalEdit:
        """The method of an object, where a class has it."""
        bind = getattr(self.function, "__get__", None)
        return self if owner is None or bind is None else LocalEdit(self.dims, bind(owner, kind))

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        edited = self.function(current_module, inputs, save_ctx, modules)
        if self.on_part and isinstance(edited, Tensor) and _depends_on_parameter(edited, inputs):
            raise HookError(
                f"{describe_edit(self.function)} runs on each rank's local shard, and depends on a parameter "
                "that requires a gradient, of which each rank would have a partial sum; remove @mf.local"
            )
        return edited

    def for_site(self, site: Site) -> LocalEdit:
        """Return the edit bound to a site.

        Raises:
            HookError: the site has no such dim.
        """
        missing = [] if self.dims == "all" else [d for d in self.dims if d not in site.dims]
        if missing and not site.dims and site.names_dims:  # the call of the model tells them
            return LocalEdit(self.dims, for_site(self.function, site))
        if missing:
            raise HookError(
                f"mf.local(dims={self.dims}) of {describe_edit(self.function)}: {site.name} has dims "
                f"[{', '.join(site.dims)}], no {missing[0]!r}"
            )
        return LocalEdit(self.dims, for_site(self.function, site), site.dims)

    def for_pass(self, key: Key) -> LocalEdit:
        """Return the edit bound to one call."""
        bound = for_pass(self.function, key)
        return self if bound is self.function else LocalEdit(self.dims, bound, self.names)

    def on_shard(self, shard: Shard) -> LocalEdit | None:
        """Return the edit for a local shard, if that is sharded along these dims alone."""
        names = self.names or tuple(d.name for d in shard.layout.dims)
        if shard.summed or (self.dims != "all" and any(names[i] not in self.dims for i in split_dims(shard))):
            return None
        return LocalEdit(self.dims, self.function, self.names, on_part=True)

    def __repr__(self) -> str:
        along = "all dims" if self.dims == "all" else ", ".join(self.dims)
        return f"{describe_edit(self.function)}, local along {along}"


def _depends_on_parameter(edited: Tensor, inputs: Tensor) -> bool:
    """Whether a result depends on a parameter besides the tensor."""
    todo, visited = deque([edited.grad_fn]), {inputs.grad_fn, None}
    while todo and len(visited) < MAX_GRAPH_NODES:
        node: Any = todo.popleft()
        if node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable") and node.variable is not inputs:
            return True
        todo.extend(n for n, _ in node.next_functions)
    return False
