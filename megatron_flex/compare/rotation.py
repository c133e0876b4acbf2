"""Whether queries or keys of one run are those of the other, rotated: other angles of a rotary embedding.

A rotation keeps the norm of each pair of features at each position, which no other fault does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_POSITIONS, MIN_PAIRS = 3, 2
SAME_NORM = 10.0  # times the noise, by which the norms of pairs may differ, and angles of all tokens
MIN_ANGLE = 1e-6


def find_rotation(a: Tensor, b: Tensor, noise: float) -> str:
    """What another rotation of B is, as one line; empty if B is not A rotated.

    Args:
        a: `[samples, positions, heads, features]`.
        b: likewise.
        noise: the relative difference that round-off makes.
    """
    if a.ndim != 4 or a.shape[1] < MIN_POSITIONS or not (a.isfinite() & b.isfinite()).all():
        return ""
    left, right = a.double(), b.double()
    changed = (
        (left - right).square().sum((0, 1, 2)) > (SAME_NORM * noise) ** 2 * left.square().mean(-1).sum()
    ).nonzero()
    if not len(changed):
        return ""
    # Multi-latent attention has features that are not rotated before those that are.
    size = left.shape[-1]
    for width in dict.fromkeys((size, *(w for w in range(2, size, 2) if size - w <= int(changed.min())))):
        for interleaved in (False, True):
            parts = [_pair(t[..., size - width :], interleaved) for t in (left, right)]
            text = _describe(parts[0], parts[1], max(noise, 1e-7))
            if text:
                return text
    return ""


def _pair(x: Tensor, interleaved: bool) -> Tensor:
    """Pairs of features as complex numbers."""
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def _describe(left: Tensor, right: Tensor, noise: float) -> str:
    if left.shape != right.shape or left.shape[-1] < MIN_PAIRS:
        return ""
    scale = float(left.abs().square().mean().sqrt())
    if not scale or float((left.abs() - right.abs()).abs().max()) > SAME_NORM * noise * max(
        scale, float(left.abs().max())
    ):
        return ""
    products = (left.conj() * right).sum((0, 2))  # `[positions, pairs]`
    angles = products.angle()
    turned = left * torch.exp(1j * angles)[:, None]
    if float((turned - right).norm()) > SAME_NORM * noise * float(left.norm()):
        return ""  # not one angle for all samples and heads
    known = angles.abs() > max(MIN_ANGLE, SAME_NORM * noise)
    if not known.any():
        return ""
    if not known[0].any():
        return (
            "the angles of the rotary embedding differ more at each position: another base, or another "
            "scaling of the frequencies"
        )
    if float((torch.exp(1j * (angles - angles[:1])) - 1).abs().max()) <= math.sqrt(SAME_NORM * noise):
        return "the angles of the rotary embedding differ alike at all positions: positions are shifted"
    return "the angles of the rotary embedding differ: other positions"
