"""Taps inside the layers of transformers' models: the attention function, and the residual stream between
attention and MLP.

An attention module asks `ALL_ATTENTION_FUNCTIONS` for the function that its configuration names, and calls it
with queries and keys. The eager function calls torch's softmax and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_flex.adapters.adapter_base import Undo, with_leaf
from megatron_flex.adapters.taps import add_hook, intercept
from megatron_flex.adapters.tensor_trees import tensors
from megatron_flex.sites import TapCallbacks

ARGUMENTS = {"query": 0, "key": 1, "value": 2}  # the position of a tensor in the arguments after the module
AttentionTaps = list[tuple[str, TapCallbacks]]  # names of points, and what to call there
# The taps of all models. One interception serves all of them: a chain of one for each layer would be as deep
# as the model.
_taps: dict[nn.Module, AttentionTaps] = {}
_interceptions: list[Undo] = []


def attention_point(module: nn.Module, callbacks: TapCallbacks, name: str, leaf: int = 0) -> Undo:
    """A tensor of the attention function that a module calls.

    Args:
        name: `query`, `key` and `value`, `[b, n, s, d]`, after the rotary embedding; `scores` and `probs`,
            `[b, n, s, s]`, the argument of the softmax, masked, and its result in the dtype of the values.
    """
    if not _taps:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        _interceptions.append(intercept(ALL_ATTENTION_FUNCTIONS, "get_interface", _find_function))
    tap = (name, callbacks)
    _taps.setdefault(module, []).append(tap)

    def undo() -> None:
        remaining = [other for other in _taps.pop(module, []) if other is not tap]
        if remaining:
            _taps[module] = remaining
        elif not _taps and _interceptions:
            _interceptions.pop()()

    return undo


def _find_function(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return partial(_attend, original(*args, **kwargs))


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call an attention function with the taps of the module."""
    taps = _taps.get(module, [])
    for name, callbacks in taps:
        if name in ARGUMENTS:
            index = ARGUMENTS[name]
            args = with_leaf(args, index, callbacks.run(args[index]))
    inside = [tap for tap in taps if tap[0] not in ARGUMENTS]
    if not inside:
        return function(module, *args, **kwargs)
    with _SoftmaxTaps(inside):
        return function(module, *args, **kwargs)


class _SoftmaxTaps(TorchFunctionMode):
    """Calls taps on the argument of the softmax, and on its result when that goes into the dropout."""

    def __init__(self, taps: AttentionTaps) -> None:
        super().__init__()
        self._taps = taps

    def _run(self, name: str, tensor: Tensor) -> Tensor:
        for tapped, callbacks in self._taps:
            if tapped == name:
                tensor = callbacks.run(tensor)
        return tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.softmax:
            args = (self._run("scores", args[0]), *args[1:])
        elif func is nn.functional.dropout:
            args = (self._run("probs", args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def residual_stream(module: nn.Module, callbacks: TapCallbacks, leaf: int = 0) -> Undo:
    """The residual stream that a module reads first after attention.

    The layer adds the same tensor to the output of the MLP later, so an edit is written into it. With
    gradients hooks get a copy: what they save for the backward pass must not change.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream: Tensor = tensors((args, kwargs))[0]
        local = stream.clone() if torch.is_grad_enabled() and stream.requires_grad else stream
        new = callbacks.run(local)
        if new is not stream:
            stream.copy_(new)
        return None

    return add_hook(module, hook, pre=True, with_kwargs=True)
