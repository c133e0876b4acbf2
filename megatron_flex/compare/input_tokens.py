"""Whether two runs read other tokens: then their tensors cannot be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedDump, ComparedTensor
from megatron_flex.compare.tensor_pairs import TensorPair
from megatron_flex.dump import VALUE

EMBEDDING = "embedding"
MAX_SAMPLES = 8  # that are looked at
MAX_FEATURES = 32  # of each token's vector
MAX_SHIFT = 4  # positions by which a fault may have moved the tokens


def holds_token_ids(pair: TensorPair) -> bool:
    """Whether a tensor has token ids: the integers that go into a module."""
    is_input = pair.item.kind == VALUE and pair.item.site.endswith(":input")
    return is_input and not pair.a.dtype.is_floating_point


def find_other_tokens(pair: TensorPair, weights: ComparedTensor | None, b: ComparedDump) -> str:
    """Why ids, or an embedding's outputs, are those of other data; empty if they are not or it is unknown.

    Each vector of B must be one that the embedding has, bit for bit: of A's tokens, or a row of the
    weights; ids are taken as they are. No sample of B that differs may have the tokens of a sample of A, in
    this or another order, or shifted: that would be a fault of the run. So this finds other data, and no
    fault of the embedding.

    Args:
        pair: the first divergence, of ids `[sample, token]` or vectors `[sample, token, feature]`.
        weights: the embedding's weights, if both dumps have them.
        b: the second dump.
    """
    if pair.dims[:2] != (SAMPLE_AXIS, TOKEN_AXIS) or len(pair.dims) > 3:
        return ""
    samples = min(pair.shape[0], MAX_SAMPLES)
    ids = len(pair.dims) == 2
    features = 1 if ids else min(pair.shape[2], MAX_FEATURES)
    block = (slice(0, samples), slice(0, pair.shape[1]), *(() if ids else (slice(0, features),)))
    hashes_a, hashes_b = ([_hash_rows(s.reshape(len(s), -1)) for s in t] for t in pair.read(block))
    known = {row for sample in hashes_a for row in sample}
    if weights is not None and pair.iteration in (table := b.array(weights)).iterations:
        known |= set(_hash_rows(table.at(pair.iteration)[0][:, :features].torch()))
    other = [at for at in range(samples) if hashes_a[at] != hashes_b[at]]
    is_unknown = not ids and any(row not in known for at in other for row in hashes_b[at])
    if not other or is_unknown:
        return ""
    had = {_count(sample) for sample in hashes_a}
    if any(_count(hashes_b[at]) in had or _is_shifted(hashes_a[at], hashes_b[at]) for at in other):
        return ""
    numbers = ", ".join(str(pair.numbers[0][at]) for at in other[:4])
    return (
        f"{len(other)} of {samples} samples have different tokens in the two runs (sample {numbers}): give "
        "both runs the same data"
    )


def _hash_rows(rows: Tensor) -> list[Hashable]:
    """A key for each row's bits."""
    return [row.tobytes() for row in rows.contiguous().view(torch.uint8).numpy()]


def _count(sample: Iterable[Hashable]) -> frozenset[tuple[Hashable, int]]:
    return frozenset(Counter(sample).items())


def _is_shifted(a: Sequence[Hashable], b: Sequence[Hashable]) -> bool:
    """Whether two sequences are the same but for a shift of a few positions."""
    return any(a[by:] == b[:-by] or a[:-by] == b[by:] for by in range(1, min(MAX_SHIFT, len(a) - 1) + 1))
