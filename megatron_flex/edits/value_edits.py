"""Presets that change values in place: scale, zero, clamp, noise, heads, neurons, mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_flex.edits.edit_base import ENTRYWISE, LINEAR, Edit
from megatron_flex.edits.preset_base import split_dims
from megatron_flex.edits.tensors import DeviceConstant, Indices, read_tensor
from megatron_flex.errors import HookError
from megatron_flex.runtime.edit_traits import EditTraits
from megatron_flex.sites import Site


@dataclass(frozen=True, repr=False, eq=False)
class scale(Edit):
    """Multiply by a factor.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.scale(0.5))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.equal(after, before / 2)
        True
    """

    factor: float

    def declare(self) -> EditTraits:
        return LINEAR

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return inputs * self.factor


@dataclass(frozen=True, repr=False, eq=False)
class zero(Edit):
    """Replace by zeros.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.zero(positions=0))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> after[0].abs().max()
        tensor(0.)
    """

    def declare(self) -> EditTraits:
        return LINEAR

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return torch.zeros_like(inputs)


@dataclass(frozen=True, repr=False, eq=False)
class clamp(Edit):
    """Limit values to two bounds, of which one may be omitted.

    Attributes:
        low: the lower bound; None for none.
        high: the upper bound; None for none.

    Raises:
        HookError: there is no bound.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.clamp(-2.0, 2.0))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> before.abs().max() > 2, after.abs().max()
        (tensor(True), tensor(2.))
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise HookError("clamp() has no bound; give it low=, high= or both")

    def declare(self) -> EditTraits:
        return ENTRYWISE

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return inputs.clamp(self.low, self.high)


@dataclass(frozen=True, repr=False, eq=False)
class noise(Edit):
    """Add Gaussian noise: the same on all ranks of a replica, and again in recomputation.

    Attributes:
        std: the standard deviation of the noise.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.noise(0.1))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> 0.09 < (after - before).std() < 0.11
        tensor(True)
    """

    std: float

    def declare(self) -> EditTraits:
        return replace(ENTRYWISE, uses_random_numbers=True)

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        # Drawn for the full tensor also on a local shard, so that each entry gets the same number.
        shape, shard = self.shape(inputs), self._shard
        drawn = torch.randn(shape, dtype=inputs.dtype, device=inputs.device)
        return inputs + self.std * (drawn if shard is None else shard.part(drawn))


@dataclass(frozen=True, repr=False, eq=False)
class ablate_heads(Edit):
    """Zero attention heads; with `keep`, all others.

    At q, k, v, scores, probs and at the packed heads of `core_attention:output` and `linear_proj:input`. At
    keys and values heads are those of keys and values.

    Attributes:
        which: the heads.
        keep: zero the others instead.
        of: the number of heads that a dim concatenates, where the module's configuration does not have it.

    Examples:
        >>> attention = "decoder.layers.1.self_attention"
        >>> edit = HookFunction(f"{attention}.core_attention", edits.ablate_heads([0, 3]))
        >>> with attach(chunks, [edit, HookFunction(f"{attention}.linear_proj:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> after.unflatten(-1, (4, 8)).abs().amax((0, 1, 3)) > 0
        tensor([False,  True,  True, False])
    """

    which: Indices
    keep: bool = False
    of: int | None = field(default=None, kw_only=True)

    def named_dims(self) -> dict[str, str]:
        return {"*": "heads"}

    def uses_module(self, site: Site) -> bool:
        return self.of is None and self._packs_heads(len(site.dims)) and not self._head_count

    def declare(self) -> EditTraits:
        return LINEAR

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        chosen = self.head_mask(inputs, self.which, module, self.of)
        return torch.where(~chosen if self.keep else chosen, torch.zeros_like(inputs), inputs)


@dataclass(frozen=True, repr=False, eq=False)
class ablate_neurons(Edit):
    """Zero entries of the last dim; with `keep`, all others.

    Attributes:
        which: the entries, counted in the full tensor.
        keep: whether to zero the other entries instead.

    Examples:
        >>> edit = edits.ablate_neurons([7, 11])
        >>> hook = HookFunction("decoder.layers.1.mlp.linear_fc2:input", edit)
        >>> with attach(chunks, [hook]):
        ...     train_step(chunks)
    """

    which: Indices
    keep: bool = False

    def declare(self) -> EditTraits:
        return LINEAR

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        chosen = self.along(inputs, inputs.ndim - 1, self.which, "neurons")
        return torch.where(~chosen if self.keep else chosen, torch.zeros_like(inputs), inputs)


@dataclass(frozen=True, repr=False, eq=False)
class mean(Edit):
    """Replace by the mean over dims, or by a given mean.

    Attributes:
        over: names of dims; with `s b` the mean is one vector for the entire microbatch.
        value: a tensor, or a file of one; of the full tensor's shape or of its last dims.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.mean("s b"))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.allclose(after[3, 1], before.mean((0, 1)), atol=1e-5)
        True
    """

    over: str | Sequence[str] = ("s", "b")
    value: Tensor | str | Path | None = None
    _value: DeviceConstant | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        over = self.over.replace(",", " ").split() if isinstance(self.over, str) else self.over
        object.__setattr__(self, "over", tuple(over))
        if self.value is not None:
            given = self.value if isinstance(self.value, Tensor) else read_tensor(self.value)
            object.__setattr__(self, "_value", DeviceConstant(given))

    def named_dims(self) -> dict[str, str]:
        return dict.fromkeys(self.over if self._value is None else (), "over")

    def declare(self) -> EditTraits:
        return replace(ENTRYWISE, linear=self.value is None, sums=True)

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        if self._value is not None:
            return self.constant(self._value, inputs, "a mean").expand_as(inputs).clone()
        dims = [self.dim_index(d, "over") for d in self.over]
        if self._shard is None or not set(dims) & split_dims(self._shard):
            return inputs.mean(dims, keepdim=True).expand_as(inputs)
        half = inputs.dtype in (torch.bfloat16, torch.float16)
        local_sum = inputs.sum(dims, keepdim=True, dtype=torch.float32 if half else None)
        count = prod(self.length(inputs, d) for d in dims)
        return (self.total(local_sum, dims) / count).to(inputs.dtype).expand_as(inputs)
