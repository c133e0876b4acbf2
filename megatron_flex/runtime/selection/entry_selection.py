"""`Select`: the entries of a tensor to capture, by the names of its dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple

from megatron_flex.errors import HookError
from megatron_flex.sites import HEAD_DIMS, PACKED_HEAD_DIMS

Indices = int | slice | Sequence[int]
DimReference = str | int  # a dim's name, or its index


class DimChoice(NamedTuple):
    """The selected entries of one dim.

    Attributes:
        dim: its index in the full tensor.
        what: the name of the entries.
        entries: a slice, or indices; negative ones count from the end.
        heads: the number of heads packed in the dim, if `entries` are heads; 0 otherwise.
    """

    dim: int
    what: str
    entries: slice | tuple[int, ...]
    heads: int = 0

    def of(self, length: int) -> list[int]:
        """The selected indices of a dim of that length, in the requested order.

        Raises:
            HookError: an index is out of range, or no entry is selected.
        """
        count = self.heads or length
        if isinstance(self.entries, slice):
            found = list(range(count)[self.entries])
        else:
            wrong = [i for i in self.entries if not -count <= i < count]
            if wrong:
                raise HookError(
                    f"{self.what}: {wrong[0]} is beyond a dim of {count}; name some from {-count} to "
                    f"{count - 1}"
                )
            found = [i % count for i in self.entries]
        if not found:
            raise HookError(f"{self.what}: {format_entries(self.entries)} chooses none of {count}; name some")
        if not self.heads:
            return found
        if length % count:
            raise HookError(f"heads: {length} features are not {count} heads; pass of=their number")
        width = length // count
        return [at for head in found for at in range(head * width, (head + 1) * width)]


@dataclass(frozen=True, slots=True)
class Select:
    """The entries to capture. Dims are kept, so that a single entry leaves a dim of length one.

    Each argument is an index, indices, or a slice; negative indices count from the end, and the order is
    kept.

    Attributes:
        positions: tokens, along the dim `s` (of attention scores: the queries).
        samples: samples of the microbatch, along `b`.
        heads: attention heads, along the dim of heads, or packed in the dim `nd`.
        neurons: entries of the last dim.
        dims: entries of other dims, by name or index: `{"e": 0}`.
        of: the number of packed heads, if the module does not provide the number.
    """

    positions: Indices | None = None
    samples: Indices | None = None
    heads: Indices | None = None
    neurons: Indices | None = None
    dims: Mapping[DimReference, Indices] = field(default_factory=dict, hash=False)
    of: int | None = None

    def __post_init__(self) -> None:
        for name in ("positions", "samples", "heads", "neurons"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _check_entries(value, name))
        object.__setattr__(self, "dims", {d: _check_entries(v, f"dims[{d!r}]") for d, v in self.dims.items()})
        if self.of is not None and (isinstance(self.of, bool) or self.of < 1):
            raise HookError(f"Select(of={self.of!r}): give the number of heads, at least 1")

    def choices(
        self, names: Sequence[str], heads: int | None = None, site: str = "the tensor"
    ) -> list[DimChoice]:
        """The selected entries of each dim.

        Args:
            names: the dims of the full tensor.
            heads: the module's number of heads, 0 if the module does not provide it; None if it is not known
                yet, which omits selections of packed heads.
            site: the name of the site.

        Raises:
            HookError: there is no such dim, or two arguments select entries of the same dim.
        """
        out: list[DimChoice] = []
        for what, dim in (("positions", "s"), ("samples", "b")):
            if (value := getattr(self, what)) is not None:
                out.append(DimChoice(locate_dim(dim, names, what, site), what, value))
        if self.heads is not None:
            at = _find_head_dim(names, site)
            packed = names[at] in PACKED_HEAD_DIMS
            count = self.of or heads
            if packed and count == 0:
                raise HookError(f"heads: their number at {site} is not known; pass of=their number")
            if not packed or count:
                out.append(
                    DimChoice(at, "heads", _normalize_entries(self.heads), (count or 0) if packed else 0)
                )
        if self.neurons is not None:
            out.append(DimChoice(len(names) - 1, "neurons", _normalize_entries(self.neurons)))
        out += [
            DimChoice(locate_dim(d, names, "dims", site), f"dims[{d!r}]", _normalize_entries(v))
            for d, v in self.dims.items()
        ]
        twice = [c.what for i, c in enumerate(out) if any(c.dim == other.dim for other in out[:i])]
        if twice:
            raise HookError(
                f"{self.describe()}: {twice[0]} selects along a dim of {site} that has a selection already; "
                "choose once along a dim"
            )
        return out

    def describe(self) -> str:
        """The selection as text: `positions -1, heads [0, 2]`."""
        words = [
            f"{n} {format_entries(getattr(self, n))}"
            for n in ("positions", "samples", "heads", "neurons")
            if getattr(self, n) is not None
        ]
        return ", ".join(words + [f"{d} {format_entries(v)}" for d, v in self.dims.items()]) or "everything"


def locate_dim(dim: DimReference, names: Sequence[str], what: str, site: str = "the tensor") -> int:
    """The index of a dim; the first one if two have the name.

    Raises:
        HookError: there is no such dim.
    """
    if isinstance(dim, int) and -len(names) <= dim < len(names):
        return dim % len(names)
    if isinstance(dim, str) and dim in names:
        return list(names).index(dim)
    raise HookError(f"{what}: {site} has dims [{', '.join(names)}], no {dim!r}; name one of those")


def format_entries(entries: Indices) -> str:
    """Format indices as a user writes them."""
    if isinstance(entries, slice):
        ends = ["" if v is None else str(v) for v in (entries.start, entries.stop)]
        return ":".join(ends) + ("" if entries.step is None else f":{entries.step}")
    many = [entries] if isinstance(entries, int) else list(entries)
    return str(many[0]) if len(many) == 1 else str(many)


def _check_entries(value: Indices, name: str) -> slice | tuple[int, ...]:
    if isinstance(value, slice):
        if value.step == 0:
            raise HookError(f"Select({name}={value!r}): a slice cannot have a step of 0")
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return tuple(index(i) for i in (value if isinstance(value, Sequence) else [value]))
    except TypeError:
        raise HookError(f"Select({name}={value!r}): give a number, numbers or a slice") from None


def _normalize_entries(value: Indices) -> slice | tuple[int, ...]:
    return value if isinstance(value, slice) else (value,) if isinstance(value, int) else tuple(value)


def _find_head_dim(names: Sequence[str], site: str) -> int:
    found = [i for i, n in enumerate(names) if n in (*HEAD_DIMS, *PACKED_HEAD_DIMS)]
    if not found:
        raise HookError(
            f"heads: {site} has dims [{', '.join(names)}], none of heads; take the points q, k, v, scores or "
            "probs, or core_attention:output"
        )
    return found[0]
