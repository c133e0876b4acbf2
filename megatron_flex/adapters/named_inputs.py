"""What is known of the dims of a model's inputs: those of transformers begin with the batch dim.

Its documentation of every model gives the shapes of the arguments of `forward` in these words. Of other
modules nothing is known.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

# The arguments of transformers' models; other tensors, and further dims, are unknown.
INPUT_DIMS: Mapping[str, tuple[str, ...]] = {
    "input_ids": ("b", "s"),
    "decoder_input_ids": ("b", "s"),
    "inputs_embeds": ("b", "s", "h"),
    "decoder_inputs_embeds": ("b", "s", "h"),
    "token_type_ids": ("b", "s"),
}
CACHES = ("past_key_values", "cache_params", "past_key_value", "layer_past")  # arguments with earlier tokens


def find_named_models(root: nn.Module) -> list[nn.Module]:
    """The outermost models of transformers in a module, whose inputs have names."""
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    models: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in () if base is None else root.modules():
        if module not in inner and isinstance(module, base):
            models.append(module)
            inner.update(module.modules())
    return models


def _list_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    try:
        by_place = inspect.signature(module.forward).bind_partial(*args).arguments
    except (TypeError, ValueError):
        by_place = {}
    return {**by_place, **kwargs}


def name_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    """The tensors among the arguments of a model of transformers whose dims are known."""
    for name, value in _list_arguments(module, args, kwargs).items():
        dims = INPUT_DIMS.get(name)
        if dims is not None and isinstance(value, Tensor) and value.ndim == len(dims):
            yield value, dims


def count_cached_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The number of tokens of the text that came in earlier calls; -1 if their cache does not tell it.

    Args:
        module: the model.
        args: the positional arguments of its call.
        kwargs: the keyword arguments.
    """
    given = _list_arguments(module, args, kwargs)
    caches = [given[name] for name in CACHES if given.get(name) is not None]
    if not caches:
        return 0
    ask = getattr(caches[0], "get_seq_length", None)
    try:
        return -1 if ask is None else int(ask())
    except Exception:  # a cache that does not count tokens
        return -1


def list_head_sizes(models: Sequence[nn.Module], parts: int) -> dict[tuple[int, int], str]:
    """From the number of heads on a rank and their width to the name of the dim of heads.

    Args:
        models: models of transformers, whose configurations have the numbers.
        parts: the number of tensor parallel ranks.
    """
    out: dict[tuple[int, int], str] = {}
    for model in models:
        for module in model.modules():
            config = getattr(module, "config", None)
            heads, width = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
            groups, hidden = (
                getattr(config, "num_key_value_heads", None),
                getattr(config, "hidden_size", None),
            )
            if isinstance(heads, int) and heads and width is None and isinstance(hidden, int):
                width = hidden // heads
            if not isinstance(width, int):
                continue
            for count, name in ((groups, "g"), (heads, "n")):
                if isinstance(count, int):
                    out |= {(n, width): name for n in {count, max(count // parts, 1)}}
    return out
