"""Parallel styles of `parallelize_module`, as the hooks that they left on a module tell them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ParallelStyle:
    """What the hooks of a parallel style on a module were made with.

    Attributes:
        name: the style's class.
        device_mesh: of the tensors that it makes.
        inputs: the placement of the first tensor that the module gets as a local one; None if it gets that
            as a DTensor, or as it came.
        outputs: likewise of what it returns.
        known: whether it is one of torch's own.
        passes: whether it only prepares what goes in or comes out.
    """

    name: str
    device_mesh: Any
    inputs: Any = None
    outputs: Any = None
    known: bool = True
    passes: bool = False


def parallel_styles_of(module: nn.Module) -> Iterator[ParallelStyle]:
    """What the hooks of `parallelize_module`'s styles, or of `distribute_module`, on a module say."""
    sequence = None
    for before, hook in _hooks_with_closures(module):
        held = dict(zip(hook.__code__.co_freevars, (c.cell_contents for c in hook.__closure__), strict=True))
        device_mesh = held.get("device_mesh")
        if device_mesh is None:
            continue
        style, made = held.get("self"), held.get("input_fn" if before else "output_fn")
        if style is not None:  # PrepareModuleInput and PrepareModuleOutput are kept whole
            name = type(style).__name__
            theirs = type(style).__module__.startswith("torch.distributed.")
            layouts: Any = getattr(
                style, "desired_input_layouts" if before else "desired_output_layouts", None
            )
            local = bool(layouts) and bool(style.use_local_output)
            placement = layouts[0] if local and theirs else None
            yield ParallelStyle(
                name, device_mesh, **{"inputs" if before else "outputs": placement}, known=theirs, passes=True
            )
        elif isinstance(made, partial) and made.func.__module__.startswith("torch.distributed."):
            name = made.func.__qualname__.partition(".")[0]
            args = made.args
            if before:
                sequence = args[0][0] if name == "SequenceParallel" else None
                yield ParallelStyle(name, device_mesh)
            elif args[-1]:  # the output is a local tensor
                yield ParallelStyle(name, device_mesh, outputs=args[0][0] if len(args) > 1 else sequence)
            else:
                yield ParallelStyle(name, device_mesh)
        elif made is not None:
            name = getattr(made, "__qualname__", repr(made)).partition(".")[0]
            yield ParallelStyle(name, device_mesh, known=False)


def _hooks_with_closures(module: nn.Module) -> Iterator[tuple[bool, Any]]:
    for before, hooks in ((True, module._forward_pre_hooks), (False, module._forward_hooks)):
        for hook in hooks.values():
            if getattr(hook, "__closure__", None) and hasattr(hook, "__code__"):
                yield before, hook
