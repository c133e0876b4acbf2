"""Causes that one tensor shows by itself: another order, a factor, a bias, another mask, fewer digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_flex.alignment.axes import canonical_axes
from megatron_flex.alignment.evidence import Evidence
from megatron_flex.compare.block_sums import GRID_DTYPES, find_on_grid
from megatron_flex.compare.error_patterns import (
    MAX_MATCHED_COLUMNS,
    MAX_MATCHED_ROWS,
    MIN_ROWS,
    fit_common_vector,
    list_entries,
    match_rows,
)
from megatron_flex.compare.tensor_pairs import sum_tensors

TOKEN_AXES = ("b", "s", "t")
AXIS_WORDS = {
    "n": "attention heads",
    "g": "key/value heads",
    "d": "features of a head",
    "e": "experts",
    "v": "tokens of the vocabulary",
}


def match_columns(a: Tensor, b: Tensor, tolerance: float) -> list[int] | None:
    """For each column of `a` the equal column of `b`; None unless that is a permutation.

    Args:
        a: `[rows, columns]`.
        b: likewise.
        tolerance: relative to the norm of a column.
    """
    if a.shape != b.shape or not 1 < a.shape[1] <= MAX_MATCHED_ROWS:
        return None
    place, distance = match_rows(a.T, b.T)
    order: list[int] = place.tolist()
    if sorted(order) != list(range(len(order))) or order == sorted(order):
        return None
    norms = b[:MAX_MATCHED_COLUMNS, place].double().norm(dim=0)
    close = distance <= 4 * max(tolerance, 1e-6) * norms.clamp_min(1e-12)
    return order if bool(close.all()) else None


def other_order(e: Evidence) -> str:
    """The entries along one axis are in another order."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape or not pair[0].is_floating_point():
        return ""
    megatron, hf = pair
    axes = canonical_axes(e.match.row.megatron_axes)
    for dim, axis in enumerate(axes):
        if axis in TOKEN_AXES:
            continue
        flat = [t.movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (megatron, hf)]
        order = match_columns(flat[0], flat[1], e.tolerance)
        if order is not None:
            return (
                f"the {AXIS_WORDS.get(axis, f'entries of {axis}')} are in another order in Megatron: "
                f"{list_entries(order)}"
            )
    return ""


def scaled_embeddings(e: Evidence) -> str:
    """The embeddings are scaled in one of the models."""
    ratio = _ratio(e)
    if ratio is None:
        return ""
    root = math.sqrt(e.hf_model.config.hidden_size)
    if math.isclose(ratio * root, 1, rel_tol=1e-3):
        return (
            "the embeddings are not scaled in Megatron: Hugging Face multiplies them by "
            f"sqrt(hidden_size) = {root:.6g}"
        )
    if math.isclose(ratio, root, rel_tol=1e-3):
        return (
            f"the embeddings are scaled by sqrt(hidden_size) = {root:.6g} in Megatron, and not in "
            "Hugging Face"
        )
    return f"the scaling of embeddings differs: Megatron's are {ratio:.6g} times those of Hugging Face"


def _ratio(e: Evidence) -> float | None:
    """The factor between the two tensors, if that is all."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape or not pair[0].is_floating_point():
        return None
    megatron, hf = (t.double() for t in pair)
    ratio = sum_tensors(hf.cpu(), megatron.cpu()).factor
    if not abs(ratio - 1) > e.tolerance or not ratio:
        return None
    return ratio if e.equal(megatron, hf * ratio) else None


def constant_factor(e: Evidence) -> str:
    """One tensor is a multiple of the other."""
    ratio = _ratio(e)
    return "" if ratio is None else f"Megatron's tensor is that of Hugging Face times {ratio:.6g}"


def other_softmax_scale(e: Evidence) -> str:
    """The scores have another scale."""
    ratio = _ratio(e)
    if ratio is None:
        return ""
    return f"the softmax scale differs: Megatron's scores are {ratio:.6g} times those of Hugging Face"


def missing_bias(e: Evidence) -> str:
    """The difference is the same vector for all tokens."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape or pair[0].ndim < 2 or not pair[0].is_floating_point():
        return ""
    megatron, hf = pair
    tokens = [
        i for i, axis in enumerate(canonical_axes(e.match.row.megatron_axes)) if axis in (*TOKEN_AXES, "k")
    ]
    rows = math.prod(megatron.shape[i] for i in tokens)
    if rows < MIN_ROWS:
        return ""
    megatron, hf = (t.movedim(tokens, list(range(len(tokens)))).reshape(rows, -1) for t in pair)
    mean, _ = fit_common_vector(megatron - hf)
    if not e.equal(megatron, hf + mean):
        return ""
    path = e.match.row.other[0].partition(":")[0]
    for name, sign in ((f"{path}.bias", -1), (f"{path}.bias", 1)):
        bias = e.parameter(name)
        if bias is not None and _contains(bias, sign * mean, e):
            what = "is missing in Megatron" if sign < 0 else "is added twice in Megatron"
            return f"the bias {name} {what}"
    return "the difference is the same vector for all tokens: a bias that only one of the models has"


def _contains(bias: Tensor, vector: Tensor, e: Evidence) -> bool:
    """Whether a vector is the bias, or an equal part of it."""
    bound = 10 * e.tolerance * float(vector.abs().max()) + 1e-6 * float(bias.abs().max())
    parts = bias.reshape(-1, len(vector)) if len(bias) % len(vector) == 0 else bias[None, :0]
    return any(
        part.shape == vector.shape and float((part - vector).abs().max()) <= max(bound, 1e-5)
        for part in parts
    )


def bf16_values(e: Evidence) -> str:
    """A tensor or a weight has only the digits of bf16, where both models compute in fp32."""
    if e.first.dtypes != ("float32", "float32"):
        return ""
    module = e.site.partition(":")[0]
    for name, weight in e.weights.items():
        if name.startswith(f"{module}.") and bool(weight.any()) and _is_bf16(weight):
            hf_weights = [p for p in e.hf_model.parameters() if p.shape == weight.shape]
            if not any(_is_bf16(p.detach()) for p in hf_weights):
                return f"every value of {name} is a bf16 number: the weight was rounded to bf16"
    pair = e.pair(e.site)
    if pair is not None and _is_bf16(pair[0]) and not _is_bf16(pair[1]):
        return (
            "every value of Megatron's tensor is a bf16 number: it is computed in bf16, and in fp32 "
            "by Hugging Face"
        )
    return ""


def _is_bf16(tensor: Tensor) -> bool:
    return bool(find_on_grid(tensor.float(), GRID_DTYPES[torch.float32]["bf16"]).all())


def other_mask(e: Evidence) -> str:
    """Other positions are masked."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape:
        return ""
    megatron, hf = ((t > 0).sum(-1)[:, -1].flatten() for t in pair)
    if bool((megatron == hf).all()):
        return ""
    window = getattr(e.hf_model.config, "sliding_window", None)
    name = f" (sliding_window={window} in Hugging Face)" if window else ""
    return (
        f"attention sees {int(megatron.max())} positions in Megatron and {int(hf.max())} in Hugging "
        f"Face{name}"
    )


def shifted_vocabulary(e: Evidence) -> str:
    """The rows of the vocabulary are elsewhere."""
    megatron, table = e.megatron(e.site), e.parameter(e.match.row.other[0].replace(":output", ".weight"))
    if megatron is None or table is None:
        return ""
    tokens = e.batch.tokens.reshape(-1)
    ids = tokens.unique()
    rows = torch.stack([megatron.reshape(-1, megatron.shape[-1])[(tokens == i).int().argmax()] for i in ids])
    nearest, distance = match_rows(rows, table)
    greatest = float(table[:, :MAX_MATCHED_COLUMNS].norm(dim=1).max())
    if float(distance.max()) > max(e.tolerance, 1e-6) * 4 * greatest:
        return ""
    shifts = ((nearest - ids) % len(table)).unique().tolist()
    if len(shifts) == 1 and shifts[0]:
        shift = min(shifts[0], shifts[0] - len(table), key=abs)
        return (
            f"the rows of the vocabulary are shifted by {shift}: padding of the vocabulary, or "
            "special tokens, are elsewhere"
        )
    moved = ids[nearest != ids].tolist()
    return (
        f"the rows of the vocabulary are in another order; tokens {list_entries(moved)} have the rows of "
        "other tokens"
        if moved
        else ""
    )


def wrong_positions(e: Evidence) -> str:
    """The position embeddings are missing or of other positions."""
    sums, words = e.megatron(e.site), e.hf("embedding.word_embeddings:output")
    table = e.parameter("transformer.wpe.weight")
    if sums is None or words is None or table is None:
        return ""
    if e.equal(sums, words):
        return "the position embeddings are missing in Megatron"
    length = sums.shape[1]
    for shift in (-2, -1, 1, 2):
        positions = torch.arange(length) + shift
        inside = (positions >= 0) & (positions < len(table))
        if e.equal(sums[:, inside], words[:, inside] + table[positions[inside]]):
            return f"the position embeddings are those of the positions {shift:+d}"
    return ""
