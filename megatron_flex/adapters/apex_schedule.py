"""The pipeline schedules of `apex.transformer`, which run one chunk of the model or several on each rank.

Each schedule looks up its two helpers in its own module at each call, so replacing them there is enough.
A schedule numbers no microbatches: each chunk runs them in order. A stage gets its input by a call of its
`set_input_tensor`, so the input is not among the arguments of its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Listener, StepReport, Undo
from megatron_flex.adapters.model_calls import UserLoop
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.pipeline_stages import StageLayouts, UnscheduledCalls
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.taps import intercept, join_undos
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh

PACKAGE = "apex.transformer.pipeline_parallel"
SCHEDULES = {  # each schedule with the module that defines it
    "forward_backward_no_pipelining": "fwd_bwd_no_pipelining",
    "forward_backward_pipelining_without_interleaving": "fwd_bwd_pipelining_without_interleaving",
    "_forward_backward_pipelining_with_interleaving": "fwd_bwd_pipelining_with_interleaving",
}

FETCHED_BEFORE = (
    "the apex schedule that runs was fetched before the hooks were attached and cannot be followed; call "
    "get_forward_backward_func() after attaching"
)
NO_RUN = (
    "an apex model on {size} pipeline stages cannot be run on tokens alone: only your forward_step_func "
    "knows what a stage takes; run your schedule in `with flex.interp.trace():`"
)


class ApexSchedule:
    """What runs this rank's chunks: apex's schedules, or the user's own calls.

    Args:
        chunks: this rank's chunks as they were given, with wrappers.
        stages: the number of each in the pipeline.
        mesh: the axes of the run.

    Attributes:
        frozen: whether all parameters are frozen; apex's stages send gradients in any case.
        layouts: of the tensors that stages send each other.
    """

    name, why = "apex's schedules", "apex.transformer.pipeline_parallel calls the model"
    length_multiple = 1
    trying = False  # apex's schedules are given the shapes

    def __init__(self, chunks: list[nn.Module], stages: list[int], mesh: Mesh) -> None:
        self.mesh, self.stages, self.frozen = mesh, stages, False
        self.roots = [unwrap(chunk) for chunk in chunks]
        self.layouts = StageLayouts(mesh)
        self._calls = [
            UserLoop(chunk, mesh, turn=turn, accumulates=False) for turn, chunk in enumerate(chunks)
        ]
        self._listener: Listener | None = None
        self._running = False
        self._forwards: list[int] = []  # of each chunk in this step

    @property
    def busy(self) -> bool:
        return self._running

    def watch(self, listener: Listener) -> Undo:
        """Wrap the schedules, their helpers, and calls of the chunks outside of a schedule."""
        self._listener = listener
        self.layouts.begin()
        package = import_module(f"{PACKAGE}.schedules")
        undos: list[Undo] = []
        for name, file in SCHEDULES.items():
            module = import_module(f"{PACKAGE}.schedules.{file}")
            undos += [intercept(owner, name, self._step) for owner in (package, module)]
            undos.append(intercept(module, "forward_step", self._forward))
            undos.append(intercept(module, "backward_step", self._backward))
        outside = cast(Listener, UnscheduledCalls(listener, self))
        undos += [calls.watch(outside) for calls in self._calls]
        return join_undos(undos)

    def _chunk(self, model: Any) -> int | None:
        """The index of a chunk of this model; None for another model."""
        root = unwrap(model)
        return next((turn for turn, chunk_root in enumerate(self.roots) if chunk_root is root), None)

    def _step(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listener = self._listener
        assert listener is not None
        given = kwargs["model"] if "model" in kwargs else args[2]
        models = given if isinstance(given, list) else [given]
        if self._running or all(self._chunk(model) is None for model in models):
            return schedule(*args, **kwargs)
        microbatches = int(import_module(f"{PACKAGE}.utils").get_num_microbatches())
        factor = partial(_gradient_factor, microbatches, kwargs.get("grad_scaler"))
        self._forwards = [0] * len(self.roots)
        with StepReport(listener, None, factor, microbatches):
            self._running = True
            try:
                return schedule(*args, **kwargs)
            finally:
                self._running = False

    def _forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called as `step(forward_step_func, batch, model, input_tensor, ...)`."""
        listener, chunk = self._listener, self._chunk(args[2])
        assert listener is not None
        if chunk is None:
            return step(*args, **kwargs)
        if not self._running:
            raise FlexError(FETCHED_BEFORE)
        stage = self.stages[chunk]
        listener.forward_begins(self._forwards[chunk], chunk)
        self._forwards[chunk] += 1
        exchange = listener.hooked() and self.mesh["pp"].size > 1 and self.layouts.due(stage)
        if exchange:
            self.layouts.receive(stage)
        propagator = self.layouts.propagators.get(stage)
        if propagator is not None:
            propagator.handed = _received(args[3])
        try:
            output = step(*args, **kwargs)
        finally:
            if propagator is not None:
                propagator.handed = []
        if exchange:
            self.layouts.send(stage)
        listener.forward_ends(output)
        return output

    def _backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called as `step(input_tensor, output_tensor, output_tensor_grad, ...)`."""
        listener = self._listener
        assert listener is not None
        if not self._running:
            return step(*args, **kwargs)
        listener.backward_begins(args[1])
        result = step(*args, **kwargs)
        listener.backward_ends()
        return result

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """Call a model of one stage with prompts as its input.

        Raises:
            FlexError: the model is on several stages.
        """
        if self.mesh["pp"].size > 1 or len(self.roots) > 1:
            raise FlexError(NO_RUN.format(size=self.mesh["pp"].size * len(self.roots)))
        self._calls[0].run(prompts, microbatch_size)


def _received(given: Any) -> list[Tensor]:
    """The tensors that a stage is handed; a receive that still runs is waited for, as the schedule does."""
    each = given if isinstance(given, list) else [given]
    received = [tensor.get() if hasattr(tensor, "waitfunc") else tensor for tensor in each]
    return [tensor for tensor in received if isinstance(tensor, Tensor)]


def _gradient_factor(microbatches: int, scaler: Any) -> float:
    """The factor between apex's gradients and those of one microbatch's own loss."""
    return (1.0 if scaler is None else float(scaler.get_scale())) / microbatches
