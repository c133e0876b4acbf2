"""What presets need of tensors: chosen entries as masks, constants at hand on a device, shapes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_flex.errors import HookError

Indices = int | slice | Sequence[int]


def mask_along(
    inputs: Tensor, dim: int, indices: Indices, what: str, width: int = 1, length: int | None = None
) -> Tensor:
    """Which entries of a dim are chosen, as booleans that broadcast to the tensor.

    Args:
        inputs: the tensor.
        dim: its dim.
        indices: the entries; negative ones count from the end.
        what: what they are called.
        width: how many entries make one that is counted.
        length: of the dim, where `inputs` has only a part of it.

    Raises:
        HookError: one is beyond the dim.
    """
    size = (inputs.shape[dim] if length is None else length) // width
    if isinstance(indices, slice):
        chosen = tuple(range(*indices.indices(size)))
    else:
        given = (indices,) if isinstance(indices, int) else tuple(indices)
        wrong = [i for i in given if not -size <= i < size]
        if wrong:
            raise HookError(
                f"{what}: {wrong[0]} is beyond a dim of {size}; name some from {-size} to {size - 1}"
            )
        chosen = tuple(i % size for i in given)
    mask = _make_mask(size, chosen, width, inputs.device)
    return mask.view([-1 if i == dim else 1 for i in range(inputs.ndim)])


@lru_cache(maxsize=256)
def _make_mask(size: int, chosen: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[list(chosen)] = True
        return mask.repeat_interleave(width).to(device)


def inside(indices: Indices, size: int | str) -> bool:
    """Whether indices are surely within a dim, whose length may be known by its name only."""
    if isinstance(indices, slice):
        return True
    many = (indices,) if isinstance(indices, int) else indices
    return isinstance(size, int) and all(-size <= i < size for i in many)


class DeviceConstant:
    """A constant tensor that is wanted on the device and in the dtype of another; moved there once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._moved: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, inputs: Tensor) -> Tensor:
        """The tensor on the device and in the dtype of `inputs`."""
        if self.tensor.requires_grad:  # then it is no constant, and what it becomes has a graph
            return self.tensor.to(inputs.device, inputs.dtype)
        at = inputs.device, inputs.dtype
        if at not in self._moved:
            with torch.inference_mode(False):
                self._moved[at] = self.tensor.detach().to(*at)
        return self._moved[at]


def check_broadcast(tensor: Tensor, full: Tensor | Sequence[int], what: str) -> Tensor:
    """The tensor, which must have the shape of a whole, or stand for one of that shape by broadcasting.

    Raises:
        HookError: it does not.
    """
    shape = tuple(full.shape if isinstance(full, Tensor) else full)
    try:
        good = torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        good = False
    if not good:
        raise HookError(
            f"{what} of shape {tuple(tensor.shape)} does not fit a tensor of shape {shape}; "
            "give one of that shape, or of its last dims"
        )
    return tensor
