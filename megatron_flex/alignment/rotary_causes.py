"""Causes in rotary position embedding: none, pairs instead of halves, other frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.alignment.evidence import Evidence

MAX_PLACES = 4  # significant digits of an estimated base


def rotate(x: Tensor, frequencies: Tensor, interleaved: bool, scale: float = 1.0) -> Tensor:
    """Rotary position embedding of `[b, s, n, d]`, in the last `2 * len(frequencies)` features.

    Args:
        x: queries or keys.
        frequencies: the angle per position of each pair of features.
        interleaved: whether a pair is two neighbours; else one feature of each half.
        scale: what sines and cosines are multiplied by.
    """
    size = 2 * len(frequencies)
    rest, turned = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
    angles = torch.arange(x.shape[1])[:, None, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([rest, out], -1)


def _state(e: Evidence) -> tuple[Tensor, Tensor, Tensor] | None:
    """Megatron's rotated tensor, the tensor before the rotation, and the frequencies of Hugging Face."""
    name = e.site[-1]
    megatron, before = e.megatron(e.site), e.hf(f"{e.layer}.self_attention:{name}")
    frequencies = next((b for n, b in e.hf_model.named_buffers() if n.endswith("rotary_emb.inv_freq")), None)
    if megatron is None or before is None or frequencies is None or megatron.shape != before.shape:
        return None
    return megatron, before, frequencies.detach().float().cpu()


def no_rotation(e: Evidence) -> str:
    """Megatron does not rotate."""
    state = _state(e)
    if state is None or not e.equal(state[0], state[1]):
        return ""
    return "rotary position embedding is missing in Megatron"


def interleaved_rotation(e: Evidence) -> str:
    """Megatron rotates pairs of neighbours, Hugging Face halves, or the other way round."""
    state = _state(e)
    if state is None:
        return ""
    megatron, before, frequencies = state
    # `pair` has brought an interleaved result into the order of halves already.
    turned = rotate(before, frequencies, True)
    in_halves = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
    if e.equal(megatron, turned) or e.equal(megatron, in_halves):
        return (
            "rotary interleaving: Megatron rotates neighbouring features "
            "(rotary_interleaved=True), Hugging Face the "
            "halves of a head"
        )
    return ""


def other_frequencies(e: Evidence) -> str:
    """Megatron rotates by other angles: another base, or frequencies that are not scaled."""
    state = _state(e)
    if state is None or state[0].shape[1] < 2 or getattr(e.config, "rotary_interleaved", False):
        return ""
    megatron, before, frequencies = state
    angles = _angles(megatron, before, len(frequencies))
    exponents = torch.arange(1, len(frequencies)) / len(frequencies)
    if len(exponents) == 0 or bool((angles[1:] <= 0).any()):
        return ""
    base = float(angles[1].double() ** (-1 / exponents[0].double()))
    hf_base = float(_base(e))
    for value in (hf_base, float(f"{base:.1e}"), float(f"{base:.{MAX_PLACES - 1}g}"), base):
        plain = value ** -(torch.arange(len(frequencies)) / len(frequencies))
        if e.equal(megatron, rotate(before, plain, False)):
            if value == hf_base:
                return (
                    f"the scaling of rotary frequencies is missing in Megatron ({_scaling(e)} in "
                    "Hugging Face)"
                )
            return f"the rotary base is {value:g} in Megatron and {hf_base:g} in Hugging Face"
    return "Megatron and Hugging Face rotate q and k differently: compare the rotary base and its scaling"


def _angles(rotated: Tensor, before: Tensor, count: int) -> Tensor:
    """The angle of each pair of features at position 1."""
    size = 2 * count
    a, b = before[:, 1, :, -size:].chunk(2, -1)
    c, d = rotated[:, 1, :, -size:].chunk(2, -1)
    real, imaginary = (a * c + b * d).sum((0, 1)), (a * d - b * c).sum((0, 1))
    return torch.atan2(imaginary, real)


def _base(e: Evidence) -> float:
    config = e.hf_model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


def _scaling(e: Evidence) -> str:
    return str((getattr(e.hf_model.config, "rope_parameters", None) or {}).get("rope_type", "default"))
