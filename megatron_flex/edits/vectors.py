"""Presets that add or remove directions: steer, project_out, project."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_flex.edits.base import Edit
from megatron_flex.edits.files import read_one
from megatron_flex.edits.tensors import Held, fits
from megatron_flex.errors import HookError
from megatron_flex.sites import Site

Vector = Tensor | str | Path


def held(vector: Vector) -> Held:
    """A tensor, or the one of a file."""
    return Held(vector if isinstance(vector, Tensor) else read_one(vector))


@dataclass(frozen=True, repr=False, eq=False)
class steer(Edit):
    """Add a vector times a coefficient. `add` is another name of it.

    Attributes:
        vector: of the tensor's last dims, mostly `[h]`; or a file of one. A parameter is trained.
        coefficient: what it is multiplied by.
    """

    vector: Vector
    coefficient: float = 1.0
    _held: Held = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_held", held(self.vector))

    def mixes(self) -> set[str]:
        shape = self._held.tensor.shape
        dims = self.dims[len(self.dims) - len(shape) :] if len(self.dims) >= len(shape) else ("*",)
        return {d for d, n in zip(dims, shape, strict=False) if n != 1}

    def check(self, site: Site) -> None:
        width, wanted = self._held.tensor.shape[-1:], site.shape[-1] if site.shape else None
        if isinstance(wanted, int) and width and width[0] not in (1, wanted):
            raise HookError(f"{self!r}: {site.name} has {wanted} features; give a vector of as many")

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return inputs + self.coefficient * fits(self._held.like(inputs), inputs, "a vector")


@dataclass(frozen=True, repr=False, eq=False)
class project_out(Edit):
    """Take a direction out of the last dim, or the space of several.

    Attributes:
        direction: `[h]`, or `[k, h]` of k directions; or a file of one tensor. Of any length but zero.
    """

    direction: Vector
    _basis: Held = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = held(self.direction).tensor.detach()
        if given.ndim not in (1, 2) or not bool(given.any()):
            raise HookError(f"{self!r}: directions are [h] or [k, h] and not all zero")
        columns = given.double().reshape(-1, given.shape[-1]).T
        basis, _ = torch.linalg.qr(columns)
        if columns.shape[1] > min(columns.shape[0], int(torch.linalg.matrix_rank(columns))):
            raise HookError(f"{self!r}: the directions depend on each other; give independent ones")
        object.__setattr__(self, "_basis", Held(basis.to(given.dtype if given.is_floating_point() else None)))

    @property
    def linear(self) -> bool:
        return True

    def mixes(self) -> set[str]:
        return {self._last}

    def check(self, site: Site) -> None:
        width, wanted = self._basis.tensor.shape[0], site.shape[-1] if site.shape else None
        if isinstance(wanted, int) and width != wanted:
            raise HookError(f"{self!r}: {site.name} has {wanted} features; give a direction of as many")

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return inputs - self._component(inputs)

    def _component(self, inputs: Tensor) -> Tensor:
        basis = self._basis.like(inputs)
        if basis.shape[0] != inputs.shape[-1]:
            raise HookError(
                f"{self!r}: the tensor has {inputs.shape[-1]} features; give a direction of as many"
            )
        return (inputs @ basis) @ basis.T


@dataclass(frozen=True, repr=False, eq=False)
class project(project_out):
    """Keep of the last dim only a direction, or the space of several."""

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return self._component(inputs)
