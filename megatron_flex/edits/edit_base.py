"""The base of presets that take parameters: a readable name, and the restriction to a part of the tensor.

What these have in common with chains and functions marked as local is in `preset_base`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from megatron_flex.collectives import Shard, checksum
from megatron_flex.edits.preset_base import Preset, split_dims
from megatron_flex.edits.tensors import DeviceConstant, Indices, check_broadcast, find_in_call, mask_along
from megatron_flex.errors import FlexError, HookError
from megatron_flex.ranges import normalize_numbers
from megatron_flex.runtime.edit_traits import ALL_DIMS, EditTraits
from megatron_flex.sites import HEAD_DIMS as HEAD_DIMS
from megatron_flex.sites import PACKED_HEAD_DIMS as PACKED_HEAD_DIMS
from megatron_flex.sites import DimNames, Site

# What presets declare: an edit of every entry by itself, one that is also linear, one of the full tensor.
ENTRYWISE = EditTraits(unsharded_dims=(), returns_new_tensor=True, sums=False, uses_random_numbers=False)
LINEAR = replace(ENTRYWISE, linear=True)
GATHERED = replace(ENTRYWISE, unsharded_dims=ALL_DIMS)


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Edit(Preset):
    """A preset for a full tensor, or for a selected part of it; the rest is unchanged.

    It is written for the full tensor. It gets values that depend on an entry's position from `mask_along` and
    `constant`, and sums over dims from `total`: these take into account that the input may be a local shard.
    Indices may be negative, lists, and slices.

    Attributes:
        positions: tokens, along the dim `s` (of attention scores: the queries). In a call that continues a
            text from a cache they count in the text: a token that came earlier is not edited again.
        samples: samples of the microbatch, along `b`.
        heads: attention heads, on a dim of heads or on a dim that concatenates them (`n*d`).
        features: entries of the last dim.
        dims: the names of the dims, `"s b n d"`: for a tensor without a hook point, and for a hook point
            where nothing names them.

    Raises:
        HookError: an index is neither a number, nor numbers, nor a slice.

    Examples:
        A preset of your own: `edit` is written for the full tensor, and `declare` names the dims that must
        not be sharded (none here, since every entry is edited by itself).

        >>> class round_to(edits.Edit):
        ...     def __init__(self, step, **where):
        ...         super().__init__(**where)
        ...         self.step = step
        ...     def declare(self):
        ...         return edits.EditTraits(unsharded_dims=())
        ...     def edit(self, inputs, module, modules):
        ...         return (inputs / self.step).round() * self.step
        >>> edit = HookFunction("decoder.layers.2", round_to(0.25, positions=0))
        >>> with attach(chunks, [edit, HookFunction("decoder.layers.3:input")]) as flex:
        ...     train_step(chunks)
        ...     (flex.output_dict["decoder.layers.3:input"][0][0] % 0.25).any()
        tensor(False)
    """

    positions: Indices | None = None
    samples: Indices | None = None
    heads: Indices | None = None
    features: Indices | None = None
    dims: str | tuple[str, ...] = ()
    _unbatched: bool = field(default=False, init=False)  # the site's tensors may lack the batch dim
    _known: DimNames | None = field(default=None, init=False)  # what the current call tells of the dims
    _declared: bool = field(default=False, init=False)  # the user has given `dims`
    _shard: Shard | None = field(default=None, init=False)  # set if it is for a local shard
    _cut: dict[Any, Any] = field(default_factory=dict, init=False)  # its constants, sliced for that shard
    _unrestricted: bool = field(default=False, init=False)  # it applies to the entire tensor
    _uses_module: bool = field(default=False, init=False)  # it reads the number of heads from the module
    _traits: EditTraits | None = field(default=None, init=False)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "edit" in vars(cls) and "declare" not in vars(cls):
            raise HookError(
                f"{cls.__name__} defines edit() without declare(), which names the dims that must not be "
                "sharded: return edits.EditTraits(unsharded_dims=()) if it edits every entry by itself, "
                "EditTraits(unsharded_dims='*') if it needs the full tensor"
            )

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "dims", tuple(self.dims.split()) if isinstance(self.dims, str) else tuple(self.dims)
        )
        object.__setattr__(self, "_declared", bool(self.dims))
        for name in ("positions", "samples", "heads", "features"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, self._normalize_indices(name, value))
        restrictions = self.positions, self.samples, self.heads, self.features
        object.__setattr__(self, "_unrestricted", all(r is None for r in restrictions))

    def _normalize_indices(self, name: str, value: Indices) -> slice | tuple[int, ...]:
        try:
            return normalize_numbers(name, value, from_end=True, in_order=True)
        except FlexError as error:
            raise HookError(f"{type(self).__name__}: {error}") from None

    # -- what a preset declares ------------------------------------------------------------------------------

    @abstractmethod
    def edit(self, inputs: Tensor, module: nn.Module | None, modules: Any) -> Tensor:
        """Return the edited tensor, ignoring any restriction to a part.

        Args:
            inputs: the full tensor, or this rank's shard of it where the edit is local.
            module: the module at the hook point; None where there is none.
            modules: the trainable modules, by name.
        """

    @abstractmethod
    def declare(self) -> EditTraits:
        """Return what holds for `edit`, at least `unsharded_dims`.

        Along the other dims it must be correct on a local shard, with the helpers below. `uses_context`,
        `uses_modules`, `needs_dim_names` and `pure` need not be given.
        """

    def named_dims(self) -> dict[str, str]:
        """Return the dims that it finds by name, each with the argument that needs it."""
        return {}

    # -- helpers for presets, for a full tensor and for a local shard alike ---------------------------------

    def shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Return the full tensor's shape."""
        return tuple(inputs.shape) if self._shard is None else self._shard.full_size

    def length(self, inputs: Tensor, dim: int) -> int:
        """Return the length of a dim of the full tensor; `inputs` is that tensor or the local shard."""
        return self.shape(inputs)[dim]

    def along(self, inputs: Tensor, dim: int, indices: Indices, what: str, width: int = 1) -> Tensor:
        """Return which entries of a dim of the full tensor are chosen: booleans that broadcast to `inputs`.

        Args:
            inputs: the full tensor, or the local shard.
            dim: the index of the dim.
            indices: the chosen entries, or the chosen blocks of `width` entries each.
            what: the argument's name, for errors.
            width: the number of neighbouring entries that an index selects, such as those of a head.

        Raises:
            HookError: an index is out of range.
        """
        shard = self._shard
        if shard is None:
            return mask_along(inputs, dim, indices, what, width)
        known = (dim, width, repr(indices), inputs.device)
        if known not in self._cut:
            mask = mask_along(inputs, dim, indices, what, width, shard.full_size[dim])
            with torch.inference_mode(False):
                self._cut[known] = shard.part(mask)
        mask_of_shard: Tensor = self._cut[known]
        return mask_of_shard

    def constant(self, held: DeviceConstant, inputs: Tensor, what: str) -> Tensor:
        """Return a constant on the device and in the dtype of `inputs`, which broadcasts to their shape.

        Args:
            held: the constant for the full tensor.
            inputs: the full tensor, or the local shard, for which the constant is sliced.
            what: the constant's name, for errors.

        Raises:
            HookError: it does not fit the full tensor.
        """
        shard = self._shard
        if shard is None:
            return check_broadcast(held.like(inputs), inputs, what)
        known = (id(held), inputs.device, inputs.dtype)
        if known not in self._cut:
            full = check_broadcast(held.like(inputs), shard.full_size, what)
            if full.requires_grad:
                return shard.part(full)
            with torch.inference_mode(False):
                self._cut[known] = shard.part(full)
        part: Tensor = self._cut[known]
        return part

    def total(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """Return the sum over dims; `tensor` is the contribution of `inputs`. Sums a sharded dim over ranks.

        Collective over the axes that shard them, forward and backward; `tensor` has length one there, or not
        these dims at all.
        """
        return tensor if self._shard is None else self._shard.sum(tensor, dims)

    def on_shard(self, shard: Shard) -> Self | None:
        """Return the same edit for a local shard; None if it needs the full tensor."""
        traits = self.edit_traits
        needs = traits.unsharded_dims
        if needs is None or ALL_DIMS in needs or (shard.summed and not traits.linear):
            return None
        cut, bound = split_dims(shard) if needs else set(), self._in_dims(len(shard.full_size))
        if cut and (len(bound.dims) != len(shard.full_size) or any(bound.dims[i] in needs for i in cut)):
            return None
        return bound._with(_shard=shard, _cut={})

    # -- derived ------------------------------------------------------------------------------------

    def __call__(
        self, current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: Any
    ) -> Tensor:
        if self._unrestricted and (not self.dims or len(self.dims) == inputs.ndim):
            return self.edit(inputs, current_module, modules)
        bound = self._in_dims(inputs.ndim)
        if bound.dims and len(bound.dims) != inputs.ndim:
            raise HookError(f"{self!r}: a tensor of {inputs.ndim} dims is not [{', '.join(self.dims)}]")
        mask = bound._mask(inputs, current_module)
        edited = bound.edit(inputs, current_module, modules)
        return edited if mask is None else torch.where(mask, edited, inputs)

    def _in_dims(self, count: int) -> Self:
        """The same for a tensor of `count` dims: where sequences are packed it may lack the batch dim."""
        dims = tuple(d for d in self.dims if d != "b")
        fits = self._unbatched and count == len(dims) == len(self.dims) - 1
        return self._with(dims=dims) if fits else self

    @property
    def edit_traits(self) -> EditTraits:
        """What it declares, completed by what follows from its arguments."""
        if self._traits is None:
            declared, kind = self.declare(), type(self)
            if declared.unsharded_dims is None:
                raise HookError(
                    f"{kind.__name__}.declare() returns no unsharded_dims; return () if each entry is "
                    "edited on its own, '*' if the edit needs the full tensor"
                )
            ours = kind.__module__.startswith("megatron_flex.")
            context, modules = declared.uses_context, declared.uses_modules
            traits = replace(
                declared,
                pure=declared.pure is not False and not self._uses_module,
                uses_context=kind.__call__ is not Edit.__call__ if context is None else context,
                uses_modules=bool(modules),
                # `dims` does not tell which tokens came in other calls
                needs_dim_names=bool(self._find_by_name()) or bool(declared.needs_dim_names),
                user_functions=() if ours else declared.user_functions,
            )
            object.__setattr__(self, "_traits", traits)
            return traits
        return self._traits

    def _find_by_name(self) -> dict[str, str]:
        """The dims that it finds by name, with arguments: `*` for a dim of heads."""
        chosen = {"s": "positions", "b": "samples", "*": "heads"}
        return {d: what for d, what in chosen.items() if getattr(self, what) is not None} | self.named_dims()

    def for_site(self, site: Site) -> Self:
        """Return the edit bound to a site, whose dims have names.

        Raises:
            HookError: the site lacks a dim that the preset needs, its dims have no names, or other ones than
                `dims`.
        """
        if self._declared:
            self._check_declared(site)
            return self if site.known is None else self._with(_known=site.known)
        asked = self._find_by_name()
        if not site.dims:
            if asked and not site.names_dims:
                raise HookError(self._describe_unknown(asked, ("?",) * 3, site.name))
            return self
        bound = self._with(dims=site.dims, _unbatched=site.unbatched, _known=site.known)
        for dim, what in asked.items():
            if dim == "*":
                bound.head_dim(len(site.dims), site.name)
            else:
                bound.dim_index(dim, what, site.name)
        bound.check(site)
        return bound._with(_uses_module=True) if bound.uses_module(site) else bound

    def _check_declared(self, site: Site) -> None:
        """Refuse dims that the user has given, and that are not those of the site."""
        places = {name: at for at, name in enumerate(site.dims) if name and site.dims.count(name) == 1}
        wrong = [d for at, d in enumerate(self.dims) if places.get(d, at) != at]
        if wrong:
            raise HookError(
                f"{self!r}: {site.name} has dims [{', '.join(n or '?' for n in site.dims)}], where "
                f"{wrong[0]!r} is another dim; leave out dims="
            )

    def _describe_unknown(self, asked: Iterable[str], dims: Iterable[str], site: str) -> str:
        asked_names = " and ".join("the dim of heads" if d == "*" else repr(d) for d in asked)
        shown = ", ".join(name or "?" for name in dims)
        return (
            f"{self!r}: which dim of {site} is {asked_names} is not known ([{shown}]: names follow from the "
            "inputs of a model of transformers, and from the layouts of a framework); pass the names of all "
            "dims, such as dims='b s h'"
        )

    def uses_module(self, site: Site) -> bool:
        """Return whether it needs the module's number of heads, because a dim concatenates them."""
        return self.heads is not None and self._packs_heads(len(site.dims)) and not self._head_count

    def _packs_heads(self, count: int) -> bool:
        return self.dims[self.head_dim(count)] in PACKED_HEAD_DIMS

    @property
    def _head_count(self) -> int:
        """The number of heads, if the current call tells it; 0 otherwise."""
        return 0 if self._known is None else self._known.heads

    def check(self, site: Site) -> None:
        """Raise a HookError if the preset cannot be used at this site; `dims` are the site's."""

    @property
    def _last(self) -> str:
        return self.dims[-1] if self.dims else "*"

    def dim_index(self, dim: str, what: str, site: str = "the tensor") -> int:
        """Return the index of the dim of that name; the first if there are two.

        Args:
            dim: the name.
            what: the argument that needs the dim, for errors.
            site: the hook point, for errors.

        Raises:
            HookError: there is none.
        """
        if dim not in self.dims:
            if not all(self.dims) or not self.dims:
                raise HookError(self._describe_unknown([dim], self.dims or ("?",), site))
            raise HookError(
                f"{what} of {type(self).__name__}: {site} has dims [{', '.join(self.dims)}], no {dim!r}"
            )
        return self.dims.index(dim)

    def head_dim(self, count: int, site: str = "the tensor") -> int:
        """Return the index of the dim of heads, or of the dim that concatenates them.

        Args:
            count: the number of dims of the tensor.
            site: the hook point, for errors.

        Raises:
            HookError: there is none.
        """
        head_dims = [i for i, d in enumerate(self.dims) if d in (*HEAD_DIMS, *PACKED_HEAD_DIMS)]
        if not head_dims and (not self.dims or not all(self.dims)):
            raise HookError(self._describe_unknown("*", self.dims or ("?",), site))
        if not head_dims:
            raise HookError(
                f"heads of {type(self).__name__}: {site} has dims [{', '.join(self.dims)}], no dim of heads; "
                "use the points q, k, v, scores or probs, or core_attention:output"
            )
        return head_dims[0]

    def _mask(self, inputs: Tensor, module: nn.Module | None) -> Tensor | None:
        masks: list[Tensor] = []
        for what, dim in (("positions", "s"), ("samples", "b")):
            if (indices := getattr(self, what)) is not None:
                if dim == "s" and self._known is not None and self._known.first:
                    length = self.length(inputs, self.dim_index(dim, what))
                    indices = find_in_call(indices, self._known.first, length)
                masks.append(self.along(inputs, self.dim_index(dim, what), indices, what))
        if self.heads is not None:
            masks.append(self.head_mask(inputs, self.heads, module))
        if self.features is not None:
            masks.append(self.along(inputs, inputs.ndim - 1, self.features, "features"))
        out: Tensor | None = None
        for mask in masks:
            out = mask if out is None else out & mask
        return out

    def head_mask(
        self, inputs: Tensor, which: Indices, module: nn.Module | None, of: int | None = None
    ) -> Tensor:
        """Return which entries of `inputs` belong to these heads, as booleans that broadcast.

        Args:
            inputs: the full tensor, or the local shard.
            which: the heads, counted in the full tensor.
            module: the module at the hook point, whose config has the number of heads.
            of: the number of heads, if the config does not have it.

        Raises:
            HookError: a dim concatenates the heads, and their number is not known.
        """
        at = self.head_dim(inputs.ndim)
        if self.dims[at] not in PACKED_HEAD_DIMS:
            return self.along(inputs, at, which, "heads")
        count = (
            of or self._head_count or getattr(getattr(module, "config", None), "num_attention_heads", None)
        )
        size = self.length(inputs, at)
        if not isinstance(count, int) or size % count:
            raise HookError(
                f"{self!r}: {size} features are not {count} heads; take heads(..., of=their number)"
            )
        return self.along(inputs, at, which, "heads", size // count)

    def _with(self, **changed: Any) -> Self:
        """A copy with other attributes, which keeps prepared state."""
        new = copy.copy(self)
        object.__setattr__(new, "_traits", None)
        for name, value in changed.items():
            object.__setattr__(new, name, value)
        return new

    def __repr__(self) -> str:
        arguments, named = [], False
        for f in sorted(fields(self), key=lambda f: bool(f.kw_only)):
            if not f.init or (f.name == "dims" and not self._declared):
                continue
            value = " ".join(self.dims) if f.name == "dims" else getattr(self, f.name)
            if f.default is not MISSING and value is f.default:
                named = True  # later arguments are no longer positional
            else:
                arguments.append((f"{f.name}=" if named or f.kw_only else "") + _format_argument(value))
        return f"{type(self).__name__}({', '.join(arguments)})"


def _format_argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<tensor {'x'.join(map(str, value.shape))} #{checksum(value) % 0xFFFFFB:06x}>"
    if isinstance(value, slice):
        ends = ["" if v is None else str(v) for v in (value.start, value.stop)]
        return ":".join(ends) + ("" if value.step is None else f":{value.step}")
    if isinstance(value, tuple) and len(value) == 1:
        return _format_argument(value[0])
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_format_argument(v) for v in value)}]"
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)
    return f"<{type(value).__name__} of {len(value)}>" if hasattr(value, "__len__") else str(value)
