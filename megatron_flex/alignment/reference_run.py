"""One forward pass of a Hugging Face model on one process, and the tensors at its hook points.

Modules give their inputs and outputs. Queries, keys, scores and probabilities are inside of an attention
function, which transformers lets others register; what experts compute on is inside of one module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_flex.errors import FlexError

ATTENTION_NAME = "megatron_flex"  # of the attention function, while a model runs
Captures = dict[str, Tensor]  # tensors by the name of their point, on the CPU


class ReferenceRun:
    """Captures the tensors of a Hugging Face model at given points.

    Args:
        model: a causal language model of transformers.
        points: the names, `model.layers.0.mlp:output`.

    Attributes:
        captures: the tensors of the last run.
    """

    def __init__(self, model: nn.Module, points: Collection[str]) -> None:
        self.model, self.points = model, frozenset(points)
        self.captures: Captures = {}
        self._modules = dict(model.named_modules())
        self._paths = {module: path for path, module in self._modules.items()}
        self._samples = 1

    def run(self, tokens: Tensor) -> Captures:
        """The tensors of a forward pass without gradients.

        Args:
            tokens: `[batch, sequence]`, the padding at the end.
        """
        with torch.no_grad(), self.capturing(len(tokens)):
            self.model(input_ids=tokens.to(self.device), use_cache=False)
        return self.captures

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    @contextmanager
    def capturing(self, samples: int) -> Iterator[None]:
        """Capture in the runs inside the block.

        Args:
            samples: the number of samples in a batch.
        """
        self.captures, self._samples = {}, samples
        with ExitStack() as stack:
            for path in {point.partition(":")[0] for point in self.points}:
                module = self._modules.get(path)
                if module is not None:
                    handles = self._hooks(path, module)
                    for handle in handles:
                        stack.callback(handle.remove)
            stack.enter_context(_eager_experts(self.model))
            if any(p.endswith((":query", ":key", ":value", ":scores", ":probs")) for p in self.points):
                stack.enter_context(_attention_function(self.model, self._attention))
            yield

    def _record(self, point: str, value: Tensor) -> None:
        if point in self.points:
            self.captures[point] = value.detach().to("cpu", copy=True)

    def _hooks(self, path: str, module: nn.Module) -> list[Any]:
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            return self._hook_experts(path, module)

        def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states", kwargs.get("input"))
            if isinstance(given, Tensor):
                self._record(f"{path}:input", given)

        def leaves(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self._record(f"{path}:output", first)
            if isinstance(output, tuple) and f"{path}:map" in self.points:
                self._route(path, *output)

        return [
            module.register_forward_pre_hook(enters, with_kwargs=True),
            module.register_forward_hook(leaves),
        ]

    def _route(self, path: str, logits: Tensor, weights: Tensor, indices: Tensor) -> None:
        """The routing of a router, `[tokens, experts]`."""
        empty = torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device)
        self._record(f"{path}:probs", empty.scatter(1, indices, weights))
        self._record(f"{path}:map", empty.bool().scatter(1, indices, True))

    def _attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        path = self._paths[module]
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._record(f"{path}:{name}", tensor)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        with _Watch(nn.functional.softmax) as watch:
            output = eager(module, query, key, value, *args, **kwargs)
        for scores, probabilities in watch.calls:
            self._record(f"{path}:scores", scores)
            self._record(f"{path}:probs", probabilities.to(value.dtype))
        return output

    def _hook_experts(self, path: str, module: nn.Module) -> list[Any]:
        """Register hooks that record each expert's rows.

        The module calls two linears per expert, in order of experts.
        """
        watches: list[_Watch] = []

        def enters(_: nn.Module, args: tuple[Any, ...]) -> None:
            watches.append(_Watch(nn.functional.linear))
            watches[-1].start()

        def leaves(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch = watches.pop()
            watch.stop()
            if output is not None:  # None where the module raised
                self._experts(path, args, watch.calls)

        return [
            module.register_forward_pre_hook(enters),
            module.register_forward_hook(leaves, always_call=True),
        ]

    def _experts(self, path: str, args: tuple[Any, ...], calls: list[tuple[Tensor, Tensor]]) -> None:
        hidden, indices, weights = args[:3]
        order = indices.argsort(1)
        chosen, weights = indices.gather(1, order), weights.gather(1, order)  # in the order of the experts
        self._record(f"{path}:indices", chosen)
        self._record(f"{path}:weights", weights)
        self._record(f"{path}:dispatched", hidden[:, None].expand(-1, chosen.shape[1], -1))
        tokens = torch.arange(len(hidden), device=hidden.device)
        batch, length = self._samples, len(hidden) // self._samples
        time = tokens % length * batch + tokens // length  # Megatron's order of tokens: [s, b]
        slots: dict[str, Tensor] = {}
        for number, expert in enumerate(chosen.unique().tolist()):
            (entering, gate_up), (middle, leaving) = calls[2 * number : 2 * number + 2]
            # The module's rows are sorted by slot of the unsorted choice, then by token.
            rows = torch.where((indices == expert).T)[1]
            token = rows.argsort()
            rows, slot = rows[token], (chosen == expert).int().argmax(1)[rows[token]]
            scale = weights[rows, slot, None]
            gate, up = gate_up.chunk(2, -1)
            for name, value in (
                ("input", entering[token]),
                ("gate", gate[token]),
                ("up", up[token]),
                ("gate|up", gate_up[token]),
                ("middle", middle[token] * scale),
                ("output", leaving[token] * scale),
            ):
                self._record(f"{path}.{expert}:{name}", value[time[rows].argsort()])
                joint = {"output": "slots"}.get(name, name)
                if f"{path}:{joint}" in self.points:
                    place = slots.setdefault(joint, value.new_zeros(*chosen.shape, value.shape[-1]))
                    place[rows, slot] = value
        for name, value in slots.items():
            self._record(f"{path}:{name}", value)


class _Watch(TorchFunctionMode):
    """Records the first argument and the result of each call of one function of torch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.calls: list[tuple[Tensor, Tensor]] = []

    def start(self) -> None:
        """Begin to record."""
        # torch does not type the two methods of its modes
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End recording."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.function:
            self.calls.append((args[0], result))
        return result


@contextmanager
def _attention_function(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Let the model call `function` for its attention, with the mask of its eager attention."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise FlexError(
            f"transformers without attention functions ({error}); install 4.51 or newer"
        ) from error
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    # Masks are looked up in the mapping of all instances only.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        for config in configs:
            config._attn_implementation = ATTENTION_NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            del interface._global_mapping[ATTENTION_NAME]


@contextmanager
def _eager_experts(model: nn.Module) -> Iterator[None]:
    """Let modules of experts call one expert after the other."""
    configs = [c for c in _configs(model) if hasattr(c, "_experts_implementation")]
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation = name


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a model's modules, each once."""
    by_id = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in by_id.values() if hasattr(c, "model_type")]
