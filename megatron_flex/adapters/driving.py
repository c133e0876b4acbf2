"""Who calls a model, and what the runtime is told of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import Listener, Undo, replaying
from megatron_flex.adapters.compiled import exclude_from_compilation, entrance_of
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh


class Driving(Protocol):
    """How a model is run.

    Attributes:
        name: who runs it, `a pipeline schedule`.
        why: what in the model shows it, in words.
    """

    name: str
    why: str

    def watch(self, listener: Listener) -> Undo:
        """Tell `listener` of steps and calls, until the returned function is called."""

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Run it over whole tokens, as a step of its own, without differentiating."""


class UserLoop:
    """A module that a person's own loop calls.

    Args:
        chunk: the module, with wrappers.
        mesh: the axes of the run.
        factor: tells by how much gradients are greater than those of a call's own loss; None: not at all.
    """

    name = "a loop of one's own"
    why = "no schedule of a framework's is there to call it"

    def __init__(self, chunk: nn.Module, mesh: Mesh, factor: Callable[[], float] | None = None) -> None:
        self.chunk, self.root, self.mesh, self.factor = chunk, unwrap(chunk), mesh, factor
        self._listener: Listener | None = None

    def watch(self, listener: Listener) -> Undo:
        """Tell each call of the module, but not its recomputation."""
        self._listener = listener
        running: list[bool] = []

        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if running or replaying():
                return call(*args, **kwargs)
            listener.call_begins(self.factor)
            running.append(True)
            try:
                output = call(*args, **kwargs)
            except BaseException:
                running.clear()
                listener.call_ends(True)
                raise
            running.clear()
            listener.call_ends(False)
            return output

        # About all hooks, also those that are put on later: what they see belongs to the call.
        return intercept(*entrance_of(self.chunk, self.root), exclude_from_compilation(around))

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Call the module with tokens, whatever they are to it; microbatches along their first dim."""
        if self.mesh["pp"].size > 1:
            raise FlexError(
                "a module on several pipeline stages cannot be run from here, since only your loop knows "
                "what they hand on; run that in `with flex.trace(), flex.step():`"
            )
        assert self._listener is not None
        self._listener.step_begins(None, microbatches=0)
        failed = True
        try:
            with torch.no_grad():
                for part in tokens.split(microbatch_size or max(len(tokens), 1)):
                    self.chunk(part)
            failed = False
        finally:
            if failed:
                self._listener.step_ends(True)
        self._listener.step_ends(False)
