"""Which tokens and samples of a tensor are kept: the same answer when a rank writes and when it is read back.

Positions and samples are those of the whole: a rank keeps what of them it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import FlexError
from megatron_flex.layout import Coords, Dim, Layout, Sizes, parts, spans

TOKEN, SAMPLE = "s", "b"  # the names of the dims that tokens and samples are counted along


@dataclass(frozen=True, slots=True)
class Sampled:
    """So many positions of each sample, drawn at random: always the same, whatever the layout.

    Attributes:
        count: how many; all of them where a sample has fewer.
        seed: another one gives other positions.
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise FlexError(f"sampled({self.count}): keep at least one token of each sample")

    def positions(self, length: int, iteration: int, sample: int) -> list[int]:
        """The positions of one sample, in ascending order."""
        told = f"{self.seed}/{iteration}/{sample}".encode()
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little") >> 1
        )
        return sorted(torch.randperm(length, generator=generator)[: self.count].tolist())


Tokens = slice | tuple[int, ...] | Sampled | None


def tokens_of(said: Any) -> Tokens:
    """What a person says of tokens, as plain data.

    Raises:
        FlexError: it is none of what can be said.
    """
    if said is None or isinstance(said, (slice, Sampled)):
        return said
    if isinstance(said, int) and not isinstance(said, bool):
        return (said,)
    try:
        return tuple(int(p) for p in said)
    except (TypeError, ValueError):
        raise FlexError(
            f"tokens={said!r} is no position, list of positions, slice or sampled(count); say which to keep"
        ) from None


def tokens_to_json(tokens: Tokens) -> Any:
    """In plain values."""
    if isinstance(tokens, slice):
        return {"slice": [tokens.start, tokens.stop, tokens.step]}
    if isinstance(tokens, Sampled):
        return {"sampled": tokens.count, "seed": tokens.seed}
    return None if tokens is None else list(tokens)


def tokens_from_json(told: Any) -> Tokens:
    """What `tokens_to_json` told."""
    if isinstance(told, dict):
        if "slice" in told:
            return slice(*told["slice"])
        return Sampled(int(told["sampled"]), int(told["seed"]))
    return None if told is None else tuple(int(p) for p in told)


def positions_of(tokens: Tokens, length: int, iteration: int, sample: int) -> list[int]:
    """The kept positions of a sample of `length` tokens, in ascending order."""
    if tokens is None:
        return list(range(length))
    if isinstance(tokens, slice):
        return sorted(range(length)[tokens])
    if isinstance(tokens, Sampled):
        return tokens.positions(length, iteration, sample)
    return sorted({p + length if p < 0 else p for p in tokens if -length <= p < length})


class Picked(NamedTuple):
    """What of a local tensor is kept, entry by entry in this order.

    Attributes:
        sample: index along the local tensor's dim of samples; None where it has none.
        token: index along its dim of tokens; None where it has none.
        position: the position in the whole of each; None where it has no dim of tokens.
    """

    sample: Tensor | None
    token: Tensor | None
    position: Tensor | None

    def of(self, local: Tensor, layout: Layout) -> Tensor:
        """The kept entries, `[kept, ...]`: other dims as they were, in their order."""
        at = [(dim_of(layout, SAMPLE), self.sample), (dim_of(layout, TOKEN), self.token)]
        found = [(d, i) for d, i in at if d is not None and i is not None]
        front = local.movedim([d for d, _ in found], list(range(len(found))))
        return front[tuple(i.to(local.device) for _, i in found)]


def dim_of(layout: Layout, name: str) -> int | None:
    """The first dim of that name."""
    return next((i for i, d in enumerate(layout.dims) if d.name == name), None)


def pick(
    tokens: Tokens,
    samples: frozenset[int] | None,
    layout: Layout,
    shape: Sequence[int],
    sizes: Sizes,
    coords: Coords,
    iteration: int,
    numbers: Sequence[int] | None,
) -> Picked | None:
    """Which entries of a rank's tensor are kept.

    Args:
        tokens: the positions wanted.
        samples: the samples wanted, by number in the global batch; None for all.
        layout: of the tensor.
        shape: of the local tensor.
        sizes: the mesh.
        coords: the rank's.
        iteration: of the run.
        numbers: the numbers of the local samples; None where they are not known.

    Returns:
        None where nothing is left out, or it cannot be known here which entries are meant: then all is kept.
    """
    token, sample = dim_of(layout, TOKEN), dim_of(layout, SAMPLE)
    wants = tokens is not None and token is not None, samples is not None and sample is not None
    if not any(wants) or any(layout.dims[d].uneven for d in (token, sample) if d is not None):
        return None
    per_sample = isinstance(tokens, Sampled) and wants[0]
    if numbers is None and (wants[1] or per_sample):
        return None
    if per_sample and sample is None:
        return None
    own, length = [0], 1
    if token is not None:
        dim = layout.dims[token]
        length = shape[token] * parts(dim, sizes)
        own = [p for a, b in spans(dim, length, coords, sizes) for p in range(a, b)]
    index = {p: i for i, p in enumerate(own)}
    rows: list[tuple[int, int, int]] = []
    for b in range(shape[sample] if sample is not None else 1):
        number = b if numbers is None else numbers[b]
        if wants[1] and samples is not None and number not in samples:
            continue
        kept = positions_of(tokens, length, iteration, number) if token is not None else [0]
        rows += [(b, index[p], p) for p in kept if p in index]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    return Picked(
        table[:, 0] if sample is not None else None,
        table[:, 1] if token is not None else None,
        table[:, 2] if token is not None else None,
    )


def mean_layout(layout: Layout) -> Layout:
    """The layout of the mean over the sequence: ranks that cut it hold summands."""
    token = dim_of(layout, TOKEN)
    if token is None or layout.permute is not None:
        raise FlexError(f"layout {layout.describe()} has no dim of tokens to take a mean over")
    gone = tuple(c.axis for c in layout.dims[token].cuts)
    dims: list[Dim] = [d for i, d in enumerate(layout.dims) if i != token]
    return replace(layout, dims=tuple(dims), partial=(*layout.partial, *gone))


def mean(
    local: Tensor, layout: Layout, sizes: Sizes, coords: Coords, tokens: Tokens, iteration: int, numbers: Any
) -> Tensor:
    """This rank's summand of the mean over the kept positions, in fp32; in `mean_layout`."""
    token, sample = dim_of(layout, TOKEN), dim_of(layout, SAMPLE)
    assert token is not None
    dim = layout.dims[token]
    length = local.shape[token] * parts(dim, sizes)
    if tokens is None:
        return local.sum(token, dtype=torch.float32) / length
    picked = pick(tokens, None, layout, local.shape, sizes, coords, iteration, numbers)
    if picked is None or picked.token is None:
        raise FlexError(
            f"the mean over tokens={tokens} needs to know which sample is which; take the mean over all"
        )
    weight = torch.zeros([n if i in (token, sample) else 1 for i, n in enumerate(local.shape)])
    where: list[Any] = [0] * local.ndim
    where[token] = picked.token
    if sample is not None:
        where[sample] = picked.sample
    kept = len(positions_of(tokens, length, iteration, 0))
    weight[tuple(where)] = 1.0 / max(kept, 1)
    return (local.float() * weight.to(local.device)).sum(token)
