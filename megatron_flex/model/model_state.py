"""The state dict of a model of several chunks, and of its trainable modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys


class ModelState:
    """Saves and loads the chunks of a model and its trainable modules as one state dict.

    Args:
        chunks: the modules of this rank.
        trainable: the trainable modules.
    """

    def __init__(self, chunks: nn.ModuleList, trainable: nn.ModuleDict) -> None:
        is_single = len(chunks) == 1
        named = [("" if is_single else f"model{n}.", chunk) for n, chunk in enumerate(chunks)]
        self._parts: list[tuple[str, nn.Module]] = [*named, ("trainable_modules.", trainable)]

    def save(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the state dict of all modules; `args` and `options` as for `nn.Module.state_dict`."""
        options = dict(options)
        prefix, out = options.pop("prefix", ""), options.pop("destination", None)
        for head, module in self._parts:
            out = module.state_dict(*args, destination=out, prefix=prefix + head, **options)
        return out

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> _IncompatibleKeys:
        """Load each module; arguments and result as for `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: names or shapes do not match.
        """
        missing: list[str] = []
        over: list[str] = []
        left = dict(state_dict)
        for head, module in reversed(self._parts):  # last the chunk whose prefix may be empty
            of_chunk = {n.removeprefix(head): left.pop(n) for n in list(left) if n.startswith(head)}
            # `load_state_dict` of Megatron's DDP and Float16Module has no `assign` and returns None.
            result = module.load_state_dict(of_chunk, strict=strict, **({"assign": True} if assign else {}))
            missing += [head + n for n in result.missing_keys] if result else []
            over += [head + n for n in result.unexpected_keys] if result else []
        if strict and left:
            raise RuntimeError(f"{next(iter(left))!r} belongs to no chunk; names begin with model0.")
        return _IncompatibleKeys(missing, [*over, *left])
