"""Presets that replace values: by those of another run, of other samples or positions, of a trainable module.

The module must be registered: an adapter, a sparse autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.edits.edit_base import ENTRYWISE, GATHERED, LINEAR, Edit
from megatron_flex.edits.tensors import DeviceConstant, group_by_pass, read_tensor_file
from megatron_flex.errors import HookError, SiteError, suggest_nearest
from megatron_flex.runtime import Readings
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_traits import ALL_DIMS, EditTraits
from megatron_flex.sites import Site
from megatron_flex.wording import count_words

PatchSource = Tensor | Sequence[Tensor] | Mapping[str, Any] | str | Path
# A module may draw random numbers, and do anything with its input.
MODULE = EditTraits(
    unsharded_dims=ALL_DIMS, pure=False, uses_modules=True, uses_random_numbers=True, sums=False
)


@dataclass(frozen=True, repr=False, eq=False)
class resample(Edit):
    """Replace each sample by another one, drawn at random; or each position, of any dim.

    None keeps its own values. All ranks of a replica draw the same permutation, also in recomputation.

    Attributes:
        over: the name of the dim.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.resample("b"))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.equal(after[:, 0], before[:, 1])
        True
    """

    over: str = "b"

    def declare(self) -> EditTraits:
        return replace(ENTRYWISE, unsharded_dims=(self.over,), uses_random_numbers=True)

    def named_dims(self) -> dict[str, str]:
        return {self.over: "over"}

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        dim = self.dim_index(self.over, "over")
        order = torch.randperm(inputs.shape[dim])
        source = torch.empty_like(order)
        source[order] = order.roll(1)
        # Drawn on the host, where all ranks draw the same; it does not wait until the device has it.
        return inputs.index_select(dim, source.to(inputs.device, non_blocking=True))


@dataclass(frozen=True, repr=False, eq=False)
class swap(Edit):
    """Exchange two samples of the microbatch.

    Attributes:
        first: index of the first sample.
        second: index of the second sample.

    Examples:
        >>> edit = HookFunction("decoder.layers.2", edits.swap(0, 1))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     before, after = (captures[0] for captures in flex.output_dict.values())
        >>> torch.equal(after[:, 0], before[:, 1])
        True
    """

    first: int
    second: int

    def declare(self) -> EditTraits:
        return replace(LINEAR, unsharded_dims=("b",))

    def named_dims(self) -> dict[str, str]:
        return {"b": "samples"}

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        dim = self.dim_index("b", "samples")
        size = inputs.shape[dim]
        if not all(-size <= i < size for i in (self.first, self.second)):
            raise HookError(f"{self!r}: the microbatch has {size} samples; name two of them, from 0")
        order = torch.arange(size)
        order[[self.first, self.second]] = order[[self.second, self.first]]
        return inputs.index_select(dim, order.to(inputs.device, non_blocking=True))


@dataclass(frozen=True, repr=False, eq=False)
class patch(Edit):
    """Replace by the values of another run.

    Attributes:
        source: a tensor for every microbatch; a list of one for each microbatch; the captures of a run
            (`flex.output_dict`, or the readings of one site); a mapping from sites to any of these; a
            file that `edits.write` wrote. Of the full tensor's shape, or of its last dims.

    Examples:
        >>> with attach(chunks, [HookFunction("decoder.layers.2")]) as flex:
        ...     train_step(chunks)
        ...     clean = flex.output_dict
        >>> edit = HookFunction("decoder.layers.2", edits.patch(clean, positions=-1))
        >>> with attach(chunks, [edit]):
        ...     train_step(chunks)  # with the last position's stream of the first run
    """

    source: PatchSource
    _tensors: Any = field(init=False)
    _now: DeviceConstant | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        source: Any = self.source
        if isinstance(source, (str, Path)):
            source = read_tensor_file(source)
        if isinstance(source, dict):
            source = group_by_pass(source)
        object.__setattr__(self, "_tensors", source)
        if isinstance(source, Tensor):
            object.__setattr__(self, "_now", DeviceConstant(source))

    def declare(self) -> EditTraits:
        # Of a trained tensor, a rank would have a partial gradient.
        trained = self._now is not None and self._now.tensor.requires_grad
        varies = not isinstance(self._tensors, Tensor)
        return replace(GATHERED if trained else ENTRYWISE, changes_by_pass=varies)

    def check(self, site: Site) -> None:
        if isinstance(self._tensors, dict):
            self._of(site.name)

    def for_pass(self, key: Key) -> patch:
        """Return the edit with the tensor of one call."""
        if isinstance(self._tensors, Tensor):
            return self
        of_site = self._of(key.site) if isinstance(self._tensors, Mapping) else self._tensors
        return self._with(_now=DeviceConstant(_select_pass(of_site, key)), _cut={})

    def _of(self, site: str) -> Any:
        """The source's tensors for a site."""
        for name in (site, site.partition(":")[0]):
            try:
                return self._tensors[name]
            except (KeyError, SiteError) as error:
                last = error
        raise HookError(
            f"{self!r}: nothing for {site} in the source{suggest_nearest(site, self._tensors)}; the "
            "captures of a run arrive on rank 0: write them to a file with edits.write() for all ranks"
        ) from last

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        if self._now is None:
            raise HookError(
                f"{self!r}: which of its tensors is meant is known in a hook only; pass one tensor"
            )
        return self.constant(self._now, inputs, "a patch").expand_as(inputs).clone()


def _select_pass(source: Any, key: Key) -> Tensor:
    """The tensor of a microbatch and call."""
    if isinstance(source, Tensor):
        return source
    passes: dict[tuple[int, int], Tensor]
    if isinstance(source, Readings):
        last = max((k.step for k in source.keys), default=0)
        keyed = zip(source.keys, source, strict=True)
        passes = {(k.microbatch, k.call): t for k, t in keyed if k.step == last}
    elif isinstance(source, dict):
        passes = source
    else:
        passes = {(n, 0): t for n, t in enumerate(source)}
    if (key.microbatch, key.call) not in passes:
        raise HookError(
            f"the source of a patch has {count_words(len(passes), 'tensor')} and none of microbatch "
            f"{key.microbatch}, call {key.call}; give one for each, or one tensor for all"
        )
    return passes[key.microbatch, key.call]


class LowRank(nn.Module):
    """`x + up(down(x))` on the last dim; `up` starts at zero, so that the initial edit changes nothing.

    Args:
        features: the last dim.
        rank: the inner dimension.

    Examples:
        >>> edits.LowRank(32, 4)
        LowRank(
          (down): Linear(in_features=32, out_features=4, bias=False)
          (up): Linear(in_features=4, out_features=32, bias=False)
        )
    """

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the edited tensor, of the input's shape.

        Examples:
            >>> edits.LowRank(32, 4)(torch.ones(16, 2, 32)).shape
            torch.Size([16, 2, 32])
        """
        added: Tensor = self.up(self.down(inputs))
        return inputs + added


@dataclass(frozen=True, repr=False, eq=False)
class low_rank(Edit):
    """Replace by the output of a module, usually a `LowRank`.

    Attributes:
        name: the name under which the module was registered.

    Examples:
        >>> handle = flex.register_trainable_module("adapter", edits.LowRank(32, 4))
        >>> edit = HookFunction("decoder.layers.2.mlp", edits.low_rank("adapter"))
        >>> handle = flex.register_forward_hook(edit)
        >>> train_step(chunks)
        >>> optimizer = torch.optim.AdamW(flex.trainable_parameters())
        >>> optimizer.step()
    """

    name: str

    def declare(self) -> EditTraits:
        return MODULE

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        return _run_module(self, modules, self.name, inputs)


@dataclass(frozen=True, repr=False, eq=False)
class splice(Edit):
    """Replace by a module's reconstruction: a sparse autoencoder, a transcoder.

    Attributes:
        name: the name under which the module was registered; it returns the reconstruction, or a tuple that
            begins with it.
        keep_error: add the reconstruction error, without gradient: values are unchanged, and gradients pass
            through the module alone.

    Examples:
        >>> from torch import nn
        >>> autoencoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
        >>> handle = flex.register_trainable_module("sae", autoencoder)
        >>> edit = HookFunction("decoder.layers.2", edits.splice("sae", keep_error=True))
        >>> handle = flex.register_forward_hook(edit)
        >>> train_step(chunks)
    """

    name: str
    keep_error: bool = False

    def declare(self) -> EditTraits:
        return MODULE

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        edited = _run_module(self, modules, self.name, inputs)
        return edited + (inputs - edited).detach() if self.keep_error else edited


def _run_module(edit: Edit, modules: nn.ModuleDict, name: str, inputs: Tensor) -> Tensor:
    if name not in modules:
        known = f"; known: {', '.join(modules)}" if len(modules) else "; none is"
        raise HookError(
            f"{edit!r}: no trainable module {name!r} is registered{suggest_nearest(name, modules)}{known}"
        )
    edited = modules[name](inputs)
    edited = edited[0] if isinstance(edited, tuple) else edited
    if not isinstance(edited, Tensor) or edited.shape != inputs.shape:
        returned = tuple(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
        raise HookError(
            f"{edit!r}: the module returned {returned} for {tuple(inputs.shape)}; return that shape"
        )
    return edited
