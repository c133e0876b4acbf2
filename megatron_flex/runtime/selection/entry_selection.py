"""`Select`: the entries of a tensor to capture, by the names of its dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from megatron_flex.errors import FlexError, HookError
from megatron_flex.layout import Span
from megatron_flex.ranges import check_count, normalize_numbers
from megatron_flex.sites import HEAD_DIMS, PACKED_HEAD_DIMS

Indices = int | slice | Sequence[int]
EACH = "each"  # instead of sequences: each of them, under a name of its own
UNKNOWN_TEXT = (
    "the call continues a text, and its cache does not tell how many tokens came before; call the model "
    "without the cache (use_cache=False), or leave out positions"
)
DimReference = str | int  # a dim's name, or its index


class DimChoice(NamedTuple):
    """The selected entries of one dim.

    Attributes:
        dim: its index in the full tensor.
        what: the name of the entries.
        entries: a slice, or indices; negative ones count from the end.
        heads: the number of heads packed in the dim, if `entries` are heads; 0 otherwise.
        sequences: the packed sequences in which `entries` are counted; None to count them in the dim.
        first: the position of the dim's first entry, where earlier ones came in other calls; -1 if unknown.
    """

    dim: int
    what: str
    entries: slice | tuple[int, ...]
    heads: int = 0
    sequences: slice | tuple[int, ...] | None = None
    first: int = 0

    def find_indices(self, length: int, packed: Sequence[Span] = ()) -> list[int]:
        """The selected indices of a dim of that length, in the requested order.

        Args:
            length: the number of entries of the dim.
            packed: the first token and the end of each packed sequence of the dim.

        Raises:
            HookError: an index is out of range, or no entry is selected.
        """
        if self.sequences is not None:
            if not packed:
                raise HookError(
                    f"sequences: {format_entries(self.sequences)} of a microbatch that is not packed; select "
                    "samples there, or call the model with packed_seq_params"
                )
            which = _find_entries(self.sequences, len(packed), "sequences", f"a pack of {len(packed)}")
            indices = []
            for number in which:
                start, stop = packed[number]
                where = f"sequence {number} of {stop - start} tokens"
                indices += [start + i for i in _find_entries(self.entries, stop - start, self.what, where)]
            return indices
        if self.first:
            return self._in_call(length)
        count = self.heads or length
        indices = _find_entries(self.entries, count, self.what, f"a dim of {count}")
        if not self.heads:
            return indices
        if length % count:
            raise HookError(f"heads: {length} features are not {count} heads; pass of=their number")
        width = length // count
        return [at for head in indices for at in range(head * width, (head + 1) * width)]

    def _in_call(self, length: int) -> list[int]:
        """The selected indices of a call that continues a text."""
        if self.first < 0:
            raise HookError(f"{self.what}: {UNKNOWN_TEXT}")
        end = self.first + length
        indices = _find_entries(self.entries, end, self.what, f"a text of {end}")
        in_call = [at - self.first for at in indices if at >= self.first]
        if not in_call:
            raise HookError(
                f"{self.what}: {format_entries(self.entries)} is not in this call, which has the tokens "
                f"{self.first} to {end - 1} of its text, as earlier ones are cached; select from the end, or "
                "hook the first call only"
            )
        return in_call


@dataclass(frozen=True, slots=True)
class Select:
    """The entries to capture. Dims are kept, so that a single entry leaves a dim of length one.

    Each argument is an index, indices, or a slice; negative indices count from the end, and the order is
    kept.

    Attributes:
        positions: tokens, along the dim `s` (of attention scores: the queries). Of packed sequences: tokens
            of the row, or with `sequences` of each of them.
        sequences: packed sequences, without their padding, one after the other. `"each"` captures each under
            a name of its own, `...:output.sequence0`, so that a reduction measures them one by one.
        samples: samples of the microbatch, along `b`.
        heads: attention heads, along the dim of heads, or packed in the dim `n*d`.
        neurons: entries of the last dim.
        dims: entries of other dims, by name or index: `{"e": 0}`; or the names of all dims, `"b s h"`, at a
            hook point where nothing names them.
        of: the number of packed heads, if the module does not provide the number.
        names: the names of all dims, if `dims` gives them.

    Raises:
        HookError: an entry is not a number, or `of` is below 1.

    Examples:
        >>> hook = HookFunction("decoder.layers.*", select=Select(positions=-1, neurons=slice(0, 4)))
        >>> with attach(chunks, [hook]) as flex:
        ...     train_step(chunks)
        ...     flex.output_dict["decoder.layers.3"][0].shape
        torch.Size([1, 2, 4])
    """

    positions: Indices | None = None
    samples: Indices | None = None
    heads: Indices | None = None
    neurons: Indices | None = None
    dims: Mapping[DimReference, Indices] | str = field(default_factory=dict, hash=False)
    of: int | None = None
    sequences: Indices | Literal["each"] | None = None
    names: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.sequences is not None and not (isinstance(self.sequences, str) and self.sequences == EACH):
            sequences = _check_entries(cast(Indices, self.sequences), "sequences")
            object.__setattr__(self, "sequences", sequences)
        for name in ("positions", "samples", "heads", "neurons"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _check_entries(value, name))
        if isinstance(self.dims, str):
            object.__setattr__(self, "names", tuple(self.dims.split()))
        given = {} if isinstance(self.dims, str) else self.dims
        object.__setattr__(self, "dims", {d: _check_entries(v, f"dims[{d!r}]") for d, v in given.items()})
        try:
            if self.of is not None:
                check_count("of", self.of)
        except FlexError as error:
            raise HookError(f"Select: {error}, the number of heads") from None

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ("positions", "samples", "heads", "neurons")}
        values["dims"] = " ".join(self.names) or self.dims or None
        values |= {"of": self.of, "sequences": self.sequences}
        return f"Select({', '.join(f'{name}={v!r}' for name, v in values.items() if v is not None)})"

    @property
    def entries(self) -> Mapping[DimReference, Indices]:
        """The entries of other dims, by name or index."""
        return {} if isinstance(self.dims, str) else self.dims

    @property
    def needs_dim_names(self) -> bool:
        """Whether the selection depends on which dim is which."""
        named = (self.positions, self.samples, self.heads, self.sequences)
        return any(x is not None for x in named) or any(isinstance(d, str) for d in self.entries)

    def choices(
        self, names: Sequence[str], heads: int | None = None, site: str = "the tensor", first: int = 0
    ) -> list[DimChoice]:
        """The selected entries of each dim.

        Args:
            names: the dims of the full tensor.
            heads: the module's number of heads, 0 if the module does not provide it; None if it is not known
                yet, which omits selections of packed heads.
            site: the name of the site.
            first: the position of the first token, in a call that continues a text.

        Returns:
            For each dim that is selected from, its index and entries.

        Raises:
            HookError: there is no such dim, or two arguments select entries of the same dim.

        Examples:
            >>> for choice in Select(positions=-1, dims={"h": [0, 5]}).choices(["s", "b", "h"]):
            ...     print(choice.dim, choice.what, choice.entries)
            0 positions (-1,)
            2 dims['h'] (0, 5)
        """
        out: list[DimChoice] = []
        for what, dim in (("positions", "s"), ("samples", "b")):
            packed = self.sequences if dim == "s" else None
            value = getattr(self, what)
            if value is None and packed is None:
                continue
            at = locate_dim(dim, names, what if packed is None else "sequences", site)
            within = None
            if packed is not None:
                within = _normalize_entries(slice(None) if packed == EACH else cast(Indices, packed))
            entries = slice(None) if value is None else value
            out.append(DimChoice(at, what, entries, 0, within, first if dim == "s" else 0))
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
            for d, v in self.entries.items()
        ]
        twice = [c.what for i, c in enumerate(out) if any(c.dim == other.dim for other in out[:i])]
        if twice:
            raise HookError(
                f"{self.describe()}: {twice[0]} selects along a dim of {site} that has a selection already; "
                "choose once along a dim"
            )
        return out

    def describe(self) -> str:
        """Return the selection as text: `positions -1, heads [0, 2]`.

        Examples:
            >>> Select(positions=-1, heads=[0, 2]).describe()
            'positions -1, heads [0, 2]'
        """
        words = [
            f"{n} {format_entries(getattr(self, n))}"
            for n in ("sequences", "positions", "samples", "heads", "neurons")
            if getattr(self, n) is not None
        ]
        words += [f"{d} {format_entries(v)}" for d, v in self.entries.items()]
        words += [f"of [{', '.join(self.names)}]"] if self.names else []
        return ", ".join(words) or "everything"


def locate_dim(dim: DimReference, names: Sequence[str], what: str, site: str = "the tensor") -> int:
    """The index of a dim; the first one if two have the name.

    Raises:
        HookError: there is no such dim.
    """
    if isinstance(dim, int) and -len(names) <= dim < len(names):
        return dim % len(names)
    if isinstance(dim, str) and dim in names:
        return list(names).index(dim)
    raise HookError(f"{what}: {describe_missing_dim(dim, names, site)}")


def describe_missing_dim(dim: DimReference, names: Sequence[str], site: str) -> str:
    """Why a dim is not found, and what to do."""
    if all(names):
        return f"{site} has dims [{', '.join(names)}], no {dim!r}; name one of those"
    shown = ", ".join(n or "?" for n in names)
    return (
        f"which dim of {site} is {dim!r} is not known ([{shown}]: names follow from the inputs of a model of "
        "transformers); pass the names of all dims, such as dims='b s h'"
    )


def _find_entries(entries: slice | tuple[int, ...], count: int, what: str, where: str) -> list[int]:
    """The selected indices of `count` entries, which `where` describes."""
    if isinstance(entries, slice):
        indices = list(range(count)[entries])
    else:
        wrong = [i for i in entries if not -count <= i < count]
        if wrong:
            raise HookError(f"{what}: {wrong[0]} is beyond {where}; name some from {-count} to {count - 1}")
        indices = [i % count for i in entries]
    if not indices:
        raise HookError(f"{what}: {format_entries(entries)} selects none of {count}; name some")
    return indices


def format_entries(entries: Indices | str) -> str:
    """Format indices as a user writes them."""
    if isinstance(entries, str):
        return entries
    if isinstance(entries, slice):
        ends = ["" if v is None else str(v) for v in (entries.start, entries.stop)]
        return ":".join(ends) + ("" if entries.step is None else f":{entries.step}")
    many = [entries] if isinstance(entries, int) else list(entries)
    return str(many[0]) if len(many) == 1 else str(many)


def _check_entries(value: Indices, name: str) -> slice | tuple[int, ...]:
    try:
        return normalize_numbers(name, value, from_end=True, in_order=True)
    except FlexError as error:
        raise HookError(f"Select: {error}") from None


def _normalize_entries(value: Indices) -> slice | tuple[int, ...]:
    return value if isinstance(value, slice) else (value,) if isinstance(value, int) else tuple(value)


def _find_head_dim(names: Sequence[str], site: str) -> int:
    head_dims = [i for i, n in enumerate(names) if n in (*HEAD_DIMS, *PACKED_HEAD_DIMS)]
    if not head_dims and not all(names):
        raise HookError(f"heads: {describe_missing_dim('n*d', names, site)}")
    if not head_dims:
        raise HookError(
            f"heads: {site} has dims [{', '.join(names)}], no dim of heads; use the points q, k, v, "
            "scores or probs, or core_attention:output"
        )
    return head_dims[0]
