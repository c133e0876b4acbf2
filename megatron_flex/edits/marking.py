"""`@mf.local`: a person says that their function does the same on each rank's part as on the whole."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_flex.collectives import Shard
from megatron_flex.edits.preset import Local, Preset, split_dims
from megatron_flex.errors import HookError
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import EditingFunction, for_pass, for_site, describe_edit
from megatron_flex.runtime.local_edits import asks_modules
from megatron_flex.runtime.sharing.functions import uses_context
from megatron_flex.sites import Site

MAX_GRAPH_NODES = 10_000  # nodes of a graph that are looked at


def local(dims: str | Sequence[str] = "all") -> Callable[[EditingFunction], OnParts]:
    """Let an editing function run on each rank's part of the tensor, with nothing sent.

    It has to do the same slice by slice as on the whole: no sums, sorting or numbers of entries along these
    dims, and no random numbers. `flex.verify()` finds out where that is not so. Where another dim is cut it
    is given the whole, as it is if it uses `save_ctx`, or trainable modules are registered.

    Args:
        dims: names of the dims along which it may be applied so, as a site tells them (`"s b"`); `all`.

    Raises:
        HookError: there are no such names. Where it is registered: the site has no such dim.
    """
    if not isinstance(dims, str) and (callable(dims) or not all(isinstance(d, str) for d in dims)):
        raise HookError(f"mf.local(dims={dims!r}): give names of dims; all of them are @mf.local()")
    names = dims.split() if isinstance(dims, str) else dims
    if not names:
        raise HookError("mf.local() of no dims says nothing; name some, or leave the function as it is")
    return functools.partial(OnParts, "all" if dims == "all" else tuple(names))


class OnParts(Preset):
    """An editing function for which `local` was said; in all else it is that function."""

    pure = None  # as its source tells

    def __init__(
        self,
        dims: Local,
        function: EditingFunction,
        names: tuple[str, ...] = (),
        on_part: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.dims, self.function, self.names, self.on_part = dims, function, names, on_part
        self.asks_context = uses_context(function)
        self.asks_modules = asks_modules(function)

    @property
    def local(self) -> Local:
        return self.dims

    def __get__(self, owner: Any, kind: type | None = None) -> OnParts:
        """The method of an object, where a class has it."""
        bind = getattr(self.function, "__get__", None)
        return self if owner is None or bind is None else OnParts(self.dims, bind(owner, kind))

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        made = self.function(current_module, inputs, save_ctx, modules)
        if self.on_part and isinstance(made, Tensor) and _depends_on_parameter(made, inputs):
            raise HookError(
                f"{describe_edit(self.function)} is run on each rank's part, and depends on a parameter that wants "
                "a gradient, of which each rank would have a share; leave @mf.local away"
            )
        return made

    def for_site(self, site: Site) -> OnParts:
        """The same at a site.

        Raises:
            HookError: the site has no such dim.
        """
        missing = [] if self.dims == "all" else [d for d in self.dims if d not in site.dims]
        if missing:
            raise HookError(
                f"mf.local(dims={self.dims}) of {describe_edit(self.function)}: {site.name} has dims "
                f"[{', '.join(site.dims)}], no {missing[0]!r}"
            )
        return OnParts(self.dims, for_site(self.function, site), site.dims)

    def for_pass(self, key: Key) -> OnParts:
        """The same in one pass."""
        found = for_pass(self.function, key)
        return self if found is self.function else OnParts(self.dims, found, self.names)

    def on_shard(self, shard: Shard) -> OnParts | None:
        """The same for a rank's part, if that is cut along these dims alone."""
        names = self.names or tuple(d.name for d in shard.layout.dims)
        if shard.summed or (self.dims != "all" and any(names[i] not in self.dims for i in split_dims(shard))):
            return None
        return OnParts(self.dims, self.function, self.names, on_part=True)

    def __repr__(self) -> str:
        along = "all dims" if self.dims == "all" else ", ".join(self.dims)
        return f"{describe_edit(self.function)}, local along {along}"


def _depends_on_parameter(made: Tensor, inputs: Tensor) -> bool:
    """Whether what was made of a tensor depends on a parameter, too."""
    todo, seen = deque([made.grad_fn]), {inputs.grad_fn, None}
    while todo and len(seen) < MAX_GRAPH_NODES:
        node: Any = todo.popleft()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and node.variable is not inputs:
            return True
        todo.extend(n for n, _ in node.next_functions)
    return False
