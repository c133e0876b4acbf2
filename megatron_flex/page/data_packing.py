"""Numbers as the page carries them: quantised pictures, packed floats, and choices out of too many."""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAN_CODE, POSITIVE_CODE, NEGATIVE_CODE, STEPS = 255, 254, 253, 252  # codes of what is no number, and of the highest one
T = TypeVar("T")


def quantise(values: NDArray[Any] | Tensor) -> dict[str, Any]:
    """Values in 8 bits each, row by row: `lo + code * (hi - lo) / 252`; NaN and infinities have own codes.

    Args:
        values: of any shape.

    Returns:
        `lo` and `hi`, the ends of the finite values (0 and 0 of none), and `q`, the codes in base64. A finite
        value comes back within `(hi - lo) / 504`.
    """
    table = torch.as_tensor(values).double()
    good = table.isfinite()
    finite = table[good]
    lo, hi = (float(v) for v in finite.aminmax()) if finite.numel() else (0.0, 0.0)
    scale = STEPS / (hi - lo) if hi > lo and math.isfinite(hi - lo) else 0.0
    codes = ((table - lo) * scale).round().where(good, torch.zeros_like(table)).clamp(0, STEPS)
    codes[table.isnan()] = NAN_CODE
    codes[table == math.inf] = POSITIVE_CODE
    codes[table == -math.inf] = NEGATIVE_CODE
    return {"lo": lo, "hi": hi, "q": encode_bytes(codes.to(torch.uint8).flatten().tolist())}


def encode_bytes(codes: Iterable[int]) -> str:
    """Bytes as text."""
    return b64encode(bytes(codes)).decode("ascii")


def encode_floats(values: Sequence[float | None]) -> str:
    """Numbers in 4 bytes each, little endian, in base64; 0 where there is none or it is not finite."""
    most = torch.finfo(torch.float32).max
    plain = [0.0 if v is None or not math.isfinite(v) else max(-most, min(most, v)) for v in values]
    return b64encode(struct.pack(f"<{len(plain)}f", *plain)).decode("ascii")


def json_number(value: float | None, digits: int = 5) -> float | None:
    """A number for JSON, rounded to so many digits; None where it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def nonfinite_flag(value: float) -> str:
    """What a number is that JSON does not have: `NaN`, `inf`, `-inf`; empty of others."""
    if math.isnan(value):
        return "NaN"
    return "" if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def choose_evenly(several: Sequence[T], most: int) -> list[T]:
    """So many of several, the first and the last among them, evenly spread; all if they are no more."""
    if len(several) <= most:
        return list(several)
    if most < 2:
        return [several[-1]][:most]
    return [several[round(i * (len(several) - 1) / (most - 1))] for i in range(most)]


def shrink(values: NDArray[Any], most: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Means over blocks of the last two dims, so that no more than `most` entries are left of each.

    Returns:
        `[..., rows, columns]`, and the entries of a block; `(1, 1)` where nothing was to be done.
    """
    table = torch.as_tensor(values).float()
    block = ceil(table.shape[-2] / most[0]), ceil(table.shape[-1] / most[1])
    for dim, size in ((-2, block[0]), (-1, block[1])):
        if size > 1:
            table = torch.stack([part.mean(dim) for part in table.split(size, dim)], dim)
    return table, block


def encode_labels(labels: Sequence[int]) -> list[int] | dict[str, int]:
    """Labels of rows or columns: first, step and count where they are evenly spread, else a list."""
    found = [int(n) for n in labels]
    step = found[1] - found[0] if len(found) > 1 else 1
    if found and all(b - a == step for a, b in pairwise(found)):
        return {"first": found[0], "step": step, "count": len(found)}
    return found
