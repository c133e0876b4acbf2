"""Causes in norms: another epsilon, the weight of another norm, another kind of norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_flex.alignment.evidence import Evidence
from megatron_flex.lens.tensor_views import normalize_stream


def _norm_of(e: Evidence) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float] | None:
    """Megatron's output, the common input, and the weight, bias and epsilon of the Hugging Face norm."""
    path = e.match.row.other[0].partition(":")[0]
    megatron, entering, weight = (
        e.megatron(e.site),
        e.hf(e.site.replace(":output", ":input")),
        e.parameter(f"{path}.weight"),
    )
    if megatron is None or entering is None or weight is None:
        return None
    module = e.module()
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return megatron, entering, weight, e.parameter(f"{path}.bias"), float(epsilon)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, rms: bool) -> Tensor:
    out = normalize_stream(x, rms, epsilon) * weight
    return out if bias is None else out + bias


def _rms(e: Evidence) -> bool:
    """Whether the Hugging Face norm is an RMSNorm."""
    return not isinstance(e.module(), torch.nn.LayerNorm)


def other_epsilon(e: Evidence) -> str:
    """The epsilon that explains Megatron's output."""
    norm = _norm_of(e)
    if norm is None:
        return ""
    megatron, x, weight, bias, hf_epsilon = norm
    rms = _rms(e)
    centred = x if rms else x - x.mean(-1, keepdim=True)
    square = centred.square().mean(-1, keepdim=True)
    scaled = megatron if bias is None else megatron - bias
    # The factor of each token by least squares; the smallest tokens show epsilon best.
    product = centred * weight
    factor = (scaled * product).sum(-1, keepdim=True) / product.square().sum(-1, keepdim=True)
    epsilons = (factor.double().pow(-2) - square.double()).flatten()
    small = square.flatten().argsort()[: max(1, square.numel() // 4)]
    fitted = float(epsilons[small].median())
    if fitted <= 0:
        return ""
    for epsilon in (float(f"{fitted:.0e}"), float(f"{fitted:.2e}")):
        if epsilon != hf_epsilon and e.equal(megatron, _apply(x, weight, bias, epsilon, rms)):
            return f"the epsilon of the norm is {epsilon:g} in Megatron and {hf_epsilon:g} in Hugging Face"
    return ""


def other_weight(e: Evidence) -> str:
    """The norm has the weight of another norm."""
    norm = _norm_of(e)
    if norm is None:
        return ""
    megatron, x, weight, bias, epsilon = norm
    own_path = e.match.row.other[0].partition(":")[0]
    for path, other, other_bias in _norms(e, weight.shape):
        if path != own_path and e.equal(
            megatron, _apply(x, other, other_bias if bias is not None else None, epsilon, _rms(e))
        ):
            return f"the norm has the weight of {path}: a wrong post-norm or pre-norm"
    return ""


def _norms(e: Evidence, shape: torch.Size) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """All norms of the Hugging Face model of that width."""
    for name, parameter in e.hf_model.named_parameters():
        path, _, last = name.rpartition(".")
        if last == "weight" and parameter.shape == shape:
            yield path, parameter.detach().float().cpu(), e.parameter(f"{path}.bias")


def other_form(e: Evidence) -> str:
    """RMSNorm instead of LayerNorm, weights around zero, or no weight."""
    norm = _norm_of(e)
    if norm is None:
        return ""
    megatron, x, weight, bias, epsilon = norm
    rms = _rms(e)
    forms = (
        (
            _apply(x, weight + 1, bias, epsilon, rms),
            "the weight of the norm is stored minus one in one model only",
        ),
        (
            _apply(x, weight - 1, bias, epsilon, rms),
            "the weight of the norm is stored minus one in one model only",
        ),
        (_apply(x, weight, None, epsilon, rms), "the bias of the norm is missing in Megatron"),
        (
            _apply(x, weight, bias, epsilon, not rms),
            f"the norm is {'a LayerNorm' if rms else 'an RMSNorm'} in Megatron and "
            f"{'an RMSNorm' if rms else 'a LayerNorm'} "
            "in Hugging Face",
        ),
        (
            _apply(x, torch.ones_like(weight), None, epsilon, rms),
            "the norm has no weight in Megatron: it is all ones",
        ),
        (x, "the norm is missing in Megatron"),
    )
    return next((text for value, text in forms if e.equal(megatron, value)), "")
