"""Callers of a model and the notifications about calls, including parts compiled by torch.compile.

Compiled code keeps the hooks of the time of tracing and ignores later ones. So parts that have active hooks
are called uncompiled, while the others, and all parts if there are no hooks, run compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Listener, StepReport, Undo, is_recomputing
from megatron_flex.adapters.gradient_accumulation import GradientAccumulation
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.taps import intercept, join_undos
from megatron_flex.adapters.tensor_trees import tensors
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Tap, TapCallbacks

COMPILED_ATTRIBUTE = "_orig_mod"  # torch.compile's attribute for the wrapped module


class CompiledRegion:
    """A compiled module.

    Attributes:
        owner: the wrapper that `torch.compile` returned, or the module that `compile()` was called on.
        entrance: the attribute through which it is called.
        hooks: the number of hooks inside.
    """

    def __init__(self, owner: nn.Module) -> None:
        inner: nn.Module | None = owner._modules.get(COMPILED_ATTRIBUTE)
        self.owner, self.inner = owner, owner if inner is None else inner
        self.entrance = "_compiled_call_impl" if inner is None else "forward"
        self.hooks = 0

    def enter(self) -> None:
        """A hook is added inside."""
        self.hooks += 1

    def leave(self) -> None:
        """A hook is removed."""
        self.hooks -= 1

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is called from within it."""
        return any(m is module for m in self.owner.modules())

    def watch(self) -> Undo:
        """Call the uncompiled module, until that is undone."""
        return intercept(self.owner, self.entrance, self._call)

    def _call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.hooks:
            return compiled(*args, **kwargs)
        before: Callable[..., Any] = self.inner._call_impl if self.inner is self.owner else self.inner
        return before(*args, **kwargs)


class CompiledCaller:
    """Code that was compiled with a call of the model in it, and uses hooks only if the model looks new."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.hooks = root, 0
        self._undo: Undo | None = None

    def enter(self) -> None:
        """A hook is added to the model, whose `forward` changes, so that it is traced again."""
        self.hooks += 1
        if self._undo is None:
            self._undo = intercept(self.root, "forward", _call_unchanged)

    def leave(self) -> None:
        """A hook is removed; after the last one the model is as before."""
        self.hooks -= 1
        if not self.hooks and self._undo is not None:
            self._undo()
            self._undo = None

    def holds(self, module: nn.Module) -> bool:
        return True

    def watch(self) -> Undo:
        return lambda: None


def _call_unchanged(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def exclude_from_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is never inlined into compiled code."""
    compiler: Any = sys.modules.get("torch._dynamo")
    return function if compiler is None else cast(Callable[..., Any], compiler.disable(function))


def is_compiled(module: nn.Module) -> bool:
    """Whether calling it runs compiled code."""
    return COMPILED_ATTRIBUTE in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def compiled_regions(chunk: nn.Module, root: nn.Module) -> list[CompiledRegion | CompiledCaller]:
    """The compiled modules of a model, parents first, and the code that calls it."""
    callers: list[CompiledRegion | CompiledCaller] = (
        [CompiledCaller(root)] if "torch._dynamo" in sys.modules else []
    )
    return callers + [CompiledRegion(m) for m in chunk.modules() if is_compiled(m)]


def entrance_of(chunk: nn.Module, root: nn.Module) -> tuple[nn.Module, str]:
    """The object and its attribute through which each call of the model goes, outside of compiled code.

    Args:
        chunk: the model as it was given.
        root: the module inside all wrappers.
    """
    around = next(
        (m for m in chunk.modules() if is_compiled(m) and any(i is root for i in m.modules())), None
    )
    if around is None:
        return root, "_call_impl"
    region = CompiledRegion(around)
    return region.owner, region.entrance


def uncompiled(
    _: Any,
    callbacks: TapCallbacks,
    tap: Tap,
    regions: tuple[CompiledRegion | CompiledCaller, ...],
    leaf: int = 0,
) -> Undo:
    """A tap in compiled parts of a model, which run uncompiled until it is removed."""
    undo = tap.leaf(leaf).install(callbacks)
    for region in regions:
        region.enter()

    def remove() -> None:
        undo()
        for region in regions:
            region.leave()

    return remove


class ModelRunner(Protocol):
    """The caller of a model.

    Attributes:
        name: the caller, such as `a pipeline schedule`.
        why: the evidence in the model, as text.
    """

    name: str
    why: str

    @property
    def length_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""

    def watch(self, listener: Listener) -> Undo:
        """Notify `listener` of steps and calls, until the returned function is called."""

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """Run it forward over full sequences, as a step of its own. Every rank calls it.

        Nothing is differentiated, and random states are restored. If a schedule needs more microbatches
        than the prompts provide, copies of the last one are added.

        Args:
            prompts: what the model takes, the same on all ranks of a model replica.
            microbatch_size: sequences in a microbatch; all of them if None.

        Raises:
            FlexError: before anything runs, on all ranks: this model cannot take these prompts.
        """


class UserLoop:
    """A module that the user's own loop calls, or accelerate's, or transformers' Trainer.

    Args:
        chunk: the module, with wrappers.
        mesh: the axes of the run.
        factor: returns the factor between its gradients and those of a call's own loss; None: 1.
        turn: the index of the chunk on this rank.
        accumulates: whether accelerate may delimit steps; false for the stages of a schedule.
    """

    name = "your own loop"
    length_multiple = 1
    why = "no schedule of a framework calls the model"

    def __init__(
        self,
        chunk: nn.Module,
        mesh: Mesh,
        factor: Callable[[], float] | None = None,
        turn: int = 0,
        accumulates: bool = True,
    ) -> None:
        self.chunk, self.root, self.mesh, self.factor, self.turn = chunk, unwrap(chunk), mesh, factor, turn
        self.accumulates = accumulates
        self._listener: Listener | None = None

    def watch(self, listener: Listener) -> Undo:
        """Report each call of the module, but not its recomputation, and steps of gradient accumulation."""
        self._listener = listener
        running: list[bool] = []
        accumulation = GradientAccumulation(listener, self.accumulates)

        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if running or is_recomputing():
                return call(*args, **kwargs)
            microbatch, factor = None, self.factor
            if "accelerate" in sys.modules:  # without it a call costs nothing more
                microbatch = accumulation.call_begins()
                factor = factor or (accumulation.factor if accumulation.divides_loss else None)
            listener.call_begins(factor, self.turn, microbatch)
            running.append(True)
            try:
                output = call(*args, **kwargs)
            except BaseException:
                running.clear()
                listener.call_ends(True)
                accumulation.fail()
                raise
            running.clear()
            listener.call_ends(False)
            return output

        # Around all hooks, including later ones: their tensors belong to the call.
        uncalled = intercept(*entrance_of(self.chunk, self.root), exclude_from_compilation(around))
        return join_undos([uncalled, accumulation.watch()])

    def run(self, prompts: Prompts, microbatch_size: int | None, gradient: Tensor | None = None) -> None:
        """Call the module with tokens as its first argument; microbatches along their first dim.

        Args:
            prompts: what the module takes.
            microbatch_size: sequences in a microbatch; all of them if None.
            gradient: of the first tensor of the output, from which a backward pass begins; None for none.
        """
        if self.mesh["pp"].size > 1:
            raise FlexError(
                "a module on several pipeline stages cannot be run from here, since only your loop knows "
                "what they send to each other; run that in `with flex.interp.trace(), flex.step():`"
            )
        assert self._listener is not None
        ignored = find_ignored_inputs(self.root, prompts)
        differentiated = gradient is not None
        with StepReport(self._listener, None, microbatches=0), torch.set_grad_enabled(differentiated):
            done = 0
            for part in prompts.split(microbatch_size):
                keywords = {name: v for name, v in part.keywords().items() if name not in ignored}
                output = self.chunk(part.tokens, **keywords)
                if gradient is not None:
                    _run_backward(tensors(output)[0], gradient[done : done + len(part.tokens)])
                done += len(part.tokens)


def _run_backward(logits: Tensor, gradient: Tensor) -> None:
    if logits.shape != gradient.shape:
        raise FlexError(
            f"incl_bwd=True: the model's output has the shape {tuple(logits.shape)} on this rank and "
            f"{tuple(gradient.shape)} in full; let it return full logits"
        )
    torch.autograd.backward(logits, gradient.to(logits))


def find_ignored_inputs(root: nn.Module, prompts: Prompts) -> list[str]:
    """The keywords that a module does not take and can do without: a mask that masks nothing.

    Raises:
        FlexError: the module does not take another one.
    """
    taken = inspect.signature(root.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    untaken = [name for name in prompts.keywords() if name not in taken]
    needed = [name for name in untaken if name != "attention_mask" or prompts.padded]
    if needed:
        raise FlexError(
            f"the forward of {type(root).__name__} takes {', '.join(taken)}, and here is "
            f"{', '.join(needed)}; leave that out, or run your own step in `with flex.interp.trace()`"
        )
    return untaken
