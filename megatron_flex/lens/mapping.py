"""Tensors by TransformerLens' names, full or short, and by ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeVar

import torch
from torch import Tensor

from megatron_flex.errors import FlexError, SiteError, suggest_nearest
from megatron_flex.layout import Sizes
from megatron_flex.lens.lens_names import Names, expand_shorthand
from megatron_flex.lens.full_weights import WholeWeights
from megatron_flex.sites import Site

FetchedT = TypeVar("FetchedT")
DimSlice = int | slice | Sequence[int] | Tensor | None
CacheKey = str | tuple[str | int | None, ...]


class NamedTensors(Mapping[str, Tensor]):
    """What a run read, and the weights of the model that ran.

    Attributes:
        has_batch_dim: whether the tensors have a dim for sequences.
    """

    def __init__(self, tensors: Mapping[str, Tensor], weights: WholeWeights, spread: bool = True) -> None:
        self._tensors = dict(tensors)
        self._fetch, self._spread = weights, spread
        self.has_batch_dim = True

    def __getitem__(self, key: CacheKey) -> Tensor:
        name = self._full(key)
        if name not in self._tensors:
            raise SiteError(f"{name!r} is not in this cache{suggest_nearest(name, self._tensors)}")
        return self._tensors[name]

    def _full(self, key: CacheKey) -> str:
        if isinstance(key, str):
            if key in self._tensors or ":" in key:
                return key
            points = [n for n in self._tensors if n.partition(":")[0] == key and ":" in n]
            return points[0] if len(points) == 1 else expand_shorthand(key)
        name, layer, kind = (*key, None, None)[:3]
        if not isinstance(name, str) or isinstance(layer, str) or isinstance(kind, int):
            raise SiteError(f"{key!r} is no (name, layer, kind of part); write it in that order")
        return expand_shorthand(name, layer if layer is None or layer >= 0 else layer + self._layers, kind)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, tuple)) and self._full(key) in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__} with keys {list(self._tensors)}"

    def to(self, device: str | torch.device) -> Self:
        """The same object, its tensors on a device."""
        self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return self

    def remove_batch_dim(self) -> Self:
        """The same object, its tensors without the first dim, of a run over one sequence.

        Raises:
            FlexError: there are more.
        """
        if self.has_batch_dim:
            wrong = next((n for n, t in self._tensors.items() if t.shape[0] != 1), None)
            if wrong is not None:
                raise FlexError(
                    f"{wrong} has {len(self._tensors[wrong])} sequences; only a batch of one can lose its dim"
                )
            self._tensors = {name: tensor[0] for name, tensor in self._tensors.items()}
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: DimSlice) -> Self:
        """These sequences alone; with one number, without the dim for them. This cache stays as it is.

        Raises:
            FlexError: the tensors have no such dim.
        """
        if not self.has_batch_dim:
            raise FlexError("the batch dim is removed; take sequences before that")
        kept = {name: slice_dim(tensor, batch_slice, 0) for name, tensor in self._tensors.items()}
        out = type(self)(kept, self._fetch, self._spread)
        out.has_batch_dim = not isinstance(batch_slice, int)
        return out

    @property
    def lens_names(self) -> Names:
        """TransformerLens' names that the model has, as `aliases`."""
        return self._fetch.names

    @property
    def sizes(self) -> Sizes:
        """How many ranks each axis of the mesh had."""
        return self._fetch.sizes

    def site(self, key: CacheKey) -> Site | None:
        """The site that a tensor was read at; None where it was computed from several."""
        name, names = self._full(key), self._fetch.names
        name = names.aliases[name].site if name in names.aliases else name
        return next((site for site in names.sites if site.name == name), None)

    @property
    def _layers(self) -> int:
        return self._fetch.names.layers

    def _number(self, layer: int | None) -> int:
        last = self._layers if layer is None or layer == -1 else layer
        if not 0 <= last <= self._layers:
            raise FlexError(
                f"layer {layer} is none of 0 to {self._layers}; -1 is what enters the unembedding"
            )
        return last

    def _weight(self, fetch: Callable[[], FetchedT]) -> FetchedT:
        """A weight; refused where other ranks, which have no cache, would not ask for it."""
        if not self._spread:
            raise FlexError("this needs weights, which all ranks must fetch; run_with_cache(everywhere=True)")
        return fetch()


def slice_dim(tensor: Tensor, which: DimSlice, dim: int) -> Tensor:
    """Some places along a dim: all (None), one (which removes the dim), a stretch (a slice), or those listed.

    A tuple or list of one to three numbers is a slice's arguments, as for TransformerLens.
    """
    if which is None:
        return tensor
    if isinstance(which, int):
        return tensor.select(dim, which)
    if isinstance(which, (tuple, list)):
        which = slice(*which) if isinstance(which, tuple) else torch.as_tensor(which)
    if isinstance(which, slice):
        return tensor.movedim(dim, 0)[which].movedim(0, dim)
    return tensor.index_select(dim, torch.as_tensor(which, device=tensor.device))
