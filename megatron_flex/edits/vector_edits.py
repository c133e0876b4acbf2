"""Presets that add or remove directions: steer, project_out, project."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_flex.edits.edit_base import ENTRYWISE, GATHERED, LINEAR, Edit
from megatron_flex.edits.tensors import DeviceConstant, read_tensor
from megatron_flex.errors import HookError
from megatron_flex.runtime.edit_traits import ALL_DIMS, EditTraits
from megatron_flex.sites import Site

VectorSource = Tensor | str | Path
SUMMED = replace(LINEAR, sums=True)


def load_constant(vector: VectorSource) -> DeviceConstant:
    """A tensor, or the one in a file."""
    return DeviceConstant(vector if isinstance(vector, Tensor) else read_tensor(vector))


@dataclass(frozen=True, repr=False, eq=False)
class steer(Edit):
    """Add a vector times a coefficient. `add` is another name of it.

    Attributes:
        vector: of the tensor's last dims, usually `[h]`; or a file of one. A parameter is trained.
        coefficient: the factor of the vector.

    Examples:
        >>> direction = torch.nn.functional.normalize(torch.randn(32), dim=0)
        >>> steer = edits.steer(direction, 0.5, positions=-1)
        >>> edit = HookFunction("decoder.layers.2", steer)
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> (after - before)[-1].norm(dim=-1)
        tensor([0.5000, 0.5000])
    """

    vector: VectorSource
    coefficient: float = 1.0
    _held: DeviceConstant = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_held", load_constant(self.vector))

    def check(self, site: Site) -> None:
        width, features = self._held.tensor.shape[-1:], site.shape[-1] if site.shape else None
        if isinstance(features, int) and width and width[0] not in (1, features):
            raise HookError(f"{self!r}: {site.name} has {features} features; give a vector of as many")

    def declare(self) -> EditTraits:
        # Of a trained vector, a rank would have a partial gradient.
        return GATHERED if self._held.tensor.requires_grad else ENTRYWISE

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return inputs + self.coefficient * self.constant(self._held, inputs, "a vector")


@dataclass(frozen=True, repr=False, eq=False)
class LinearEdit(Edit):
    """A preset that multiplies the last dim by matrices."""

    def through(self, inputs: Tensor, down: Tensor, up: Tensor | None, onto: float | None = None) -> Tensor:
        """`inputs @ down @ up`, matrices of the full last dim; with `onto`, `inputs + onto * (...)`.

        Where that dim is sharded, each rank multiplies its shard, and the `[..., k]` are summed over ranks:
        collective over the axes that shard it, forward and backward. Half precision is summed in fp32.
        """
        shard = self._shard
        if shard is None or up is None:
            product = inputs @ down
            product = product if up is None else product @ up
            return product if onto is None else inputs.add(product, alpha=onto)
        known = inputs.device, inputs.dtype
        if known not in self._cut:
            half = inputs.dtype in (torch.bfloat16, torch.float16)
            dtype = torch.float32 if half and shard.axes([-1]) else inputs.dtype
            with torch.inference_mode(False):
                parts = shard.rows(down).to(dtype), shard.rows(up.T).T.to(dtype)
            self._cut[known] = *parts, dtype, shard.plan_sum([-1])
        local_down, local_up, dtype, total = self._cut[known]
        if onto is not None and inputs.dtype in (torch.float32, torch.float64):
            return shard.add_low_rank(inputs, local_down, local_up, onto, total)
        product = (self.total(inputs.to(dtype) @ local_down, [-1]) @ local_up).to(inputs.dtype)
        return product if onto is None else inputs.add(product, alpha=onto)


@dataclass(frozen=True, repr=False, eq=False)
class project_out(LinearEdit):
    """Remove a direction from the last dim, or a subspace.

    Attributes:
        direction: `[h]`, or `[k, h]` for k directions; or a file of one tensor. Any length except zero.

    Raises:
        HookError: a direction has another shape, all are zero, or they depend on each other.

    Examples:
        >>> direction = torch.randn(32)
        >>> edit = HookFunction("decoder.layers.2", edits.project_out(direction))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> (after @ direction).abs().max() < 1e-4
        tensor(True)
    """

    direction: VectorSource
    _basis: DeviceConstant = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = load_constant(self.direction).tensor.detach()
        if given.ndim not in (1, 2) or not bool(given.any()):
            raise HookError(f"{self!r}: directions are [h] or [k, h] and not all zero")
        columns = given.double().reshape(-1, given.shape[-1]).T
        basis, _ = torch.linalg.qr(columns)
        if columns.shape[1] > min(columns.shape[0], int(torch.linalg.matrix_rank(columns))):
            raise HookError(f"{self!r}: the directions depend on each other; give independent ones")
        object.__setattr__(
            self, "_basis", DeviceConstant(basis.to(given.dtype if given.is_floating_point() else None))
        )

    def check(self, site: Site) -> None:
        width, features = self._basis.tensor.shape[0], site.shape[-1] if site.shape else None
        if isinstance(features, int) and width != features:
            raise HookError(f"{self!r}: {site.name} has {features} features; give a direction of as many")

    def declare(self) -> EditTraits:
        return SUMMED

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return self._component(inputs, -1.0)

    def _component(self, inputs: Tensor, onto: float | None = None) -> Tensor:
        features, basis = self.length(inputs, -1), self._basis.like(inputs)
        if basis.shape[0] != features:
            raise HookError(f"{self!r}: the tensor has {features} features; give a direction of as many")
        return self.through(inputs, basis, basis.T, onto)


@dataclass(frozen=True, repr=False, eq=False)
class project(project_out):
    """Project the last dim onto a direction, or a subspace.

    Examples:
        >>> direction = torch.randn(32)
        >>> edit = HookFunction("decoder.layers.2", edits.project(direction))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.linalg.matrix_rank(after.flatten(0, 1), atol=1e-3)
        tensor(1)
    """

    def declare(self) -> EditTraits:
        return SUMMED

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return self._component(inputs)


@dataclass(frozen=True, repr=False, eq=False)
class linear_map(LinearEdit):
    """Multiply the last dim by a matrix, `x @ down @ up`; with `add`, `x + x @ down @ up`.

    Attributes:
        down: `[h, k]`, or a file of it. A parameter is trained.
        up: `[k, h]` likewise; None where `down` is `[h, h]`.
        add: whether to add the product to the input.

    Raises:
        HookError: the matrices are not `[h, h]`, or `[h, k]` and `[k, h]`.

    Examples:
        >>> rotation = torch.linalg.qr(torch.randn(32, 32)).Q
        >>> edit = HookFunction("decoder.layers.2", edits.linear_map(rotation))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.allclose(after.norm(dim=-1), before.norm(dim=-1), rtol=1e-4)
        True
    """

    down: VectorSource
    up: VectorSource | None = None
    add: bool = False
    _down: DeviceConstant = field(init=False)
    _up: DeviceConstant | None = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        down, up = load_constant(self.down), None if self.up is None else load_constant(self.up)
        object.__setattr__(self, "_down", down)
        object.__setattr__(self, "_up", up)
        last = (down if up is None else up).tensor
        chained = up is None or down.tensor.shape[1:] == up.tensor.shape[:1]
        if down.tensor.ndim != 2 or last.ndim != 2 or not chained or down.tensor.shape[0] != last.shape[1]:
            raise HookError(f"{self!r}: give a matrix [h, h], or two of [h, k] and [k, h]")

    def declare(self) -> EditTraits:
        if any(h.tensor.requires_grad for h in (self._down, self._up) if h is not None):
            return replace(SUMMED, unsharded_dims=ALL_DIMS)
        # For a matrix [h, h] the sums over ranks would be as large as the gathered tensor.
        return replace(SUMMED, unsharded_dims=(self._last,)) if self._up is None else SUMMED

    def check(self, site: Site) -> None:
        width, features = self._down.tensor.shape[0], site.shape[-1] if site.shape else None
        if isinstance(features, int) and width != features:
            raise HookError(f"{self!r}: {site.name} has {features} features; give matrices of as many")

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        features, down = self.length(inputs, -1), self._down.like(inputs)
        if down.shape[0] != features:
            raise HookError(f"{self!r}: the tensor has {features} features; give matrices of as many")
        up = None if self._up is None else self._up.like(inputs)
        return self.through(inputs, down, up, 1.0 if self.add else None)
