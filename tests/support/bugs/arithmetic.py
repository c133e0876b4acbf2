"""Bugs of the arithmetic of a layer: scales, masks, positions, precisions, parts of a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.bugs.bug import (
    ATTENTION,
    BIAS,
    CORE,
    DROPOUT,
    FACTOR,
    FC2,
    LAYER,
    LEARNED,
    MLP,
    PERMUTED,
    PRECISION,
    TP2,
    VECTOR,
    Bug,
    State,
    attribute,
    output,
    parameter,
    rounded,
    scaled,
    shifted,
    unwrapped,
)


def seen(shift: int) -> Callable[[Any, float], Any]:
    """A causal mask that is shifted: so many tokens of the future are seen."""

    def value(core: Any, magnitude: float) -> Callable[..., Any]:
        real = core.forward

        def forward(query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
            other = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1 + shift)
            return real(query, key, value, other.expand_as(mask), *args, **kwargs)

        return forward

    return value


def rotary(change: Callable[[Any, Tensor, float], Tensor], on: str = "") -> Any:
    """Change the angles of the rotary embedding, `[s, 1, 1, width]`."""

    def value(module: Any, magnitude: float) -> Callable[..., Tensor]:
        real = module.get_emb
        return lambda *args, **kwargs: change(module, real(*args, **kwargs), magnitude)

    return attribute("rotary_pos_emb", "get_emb", value, on)


def other_base(module: Any, angles: Tensor, magnitude: float) -> Tensor:
    """As of a base that is `1 + magnitude` times the right one."""
    half = angles.shape[-1] // 2
    factors = (1 + magnitude) ** (-torch.arange(half) / half)
    return angles * torch.cat([factors, factors])


def of_another_config(**fields: Any) -> Callable[[Any, float], Any]:
    """A copy of a module's config with other values."""

    def value(module: Any, magnitude: float) -> Any:
        config = copy.copy(module.config)
        for name, field in fields.items():
            setattr(config, name, field)
        return config

    return value


def other_activation(module: Any, magnitude: float) -> Any:
    """SiLU with a slope of `1 + magnitude`."""
    return of_another_config(activation_func=lambda x: x * torch.sigmoid((1 + magnitude) * x))(module, 0)


def second_head(tensor: Tensor, magnitude: float) -> Tensor:
    """Only the second of this rank's heads is scaled."""
    factors = torch.ones(tensor.shape[-1], dtype=tensor.dtype)
    width = tensor.shape[-1] // 2
    factors[width:] += magnitude
    return tensor * factors


def last_tokens(tensor: Tensor, magnitude: float) -> Tensor:
    """Only the last two tokens are scaled."""
    factors = torch.ones(len(tensor), 1, 1, dtype=tensor.dtype)
    factors[-2:] += magnitude
    return tensor * factors


def second_microbatch(module: Any, magnitude: float) -> Callable[..., Any]:
    """Only the second microbatch is scaled."""
    real, calls = module.forward, [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        calls[0] += 1
        return (found[0] * (1 + magnitude), *found[1:]) if calls[0] == 2 else found

    return forward


@contextmanager
def swapped_layers(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Two layers are loaded with each other's weights."""
    from tests.support.gpt import global_names

    found = {n: p for m in models for n, p in global_names(unwrapped(m)) if n.startswith("decoder.layers.")}
    kept = {n: p.detach().clone() for n, p in found.items()}
    other = {"0": "1", "1": "0"}
    for name, weight in found.items():
        parts = name.split(".")
        weight.data.copy_(kept[".".join([*parts[:2], other[parts[2]], *parts[3:]])])
    yield


ARITHMETIC = [
    Bug(
        "softmax scale",
        "arithmetic",
        TP2,
        attribute(CORE, "softmax_scale", lambda c, m: c.softmax_scale * (1 - m)),
        f"{CORE}:scores",
        hint=FACTOR,
        sweep=(1e-7, 0.05),
    ),
    Bug(
        "attention mask shifted",
        "arithmetic",
        TP2,
        attribute(CORE, "forward", seen(1)),
        CORE,
        hint="mask|shift|zero wherever|position",
    ),
    Bug(
        "epsilon of a norm",
        "arithmetic",
        TP2,
        attribute(f"{LAYER}.pre_mlp_layernorm", "eps", lambda n, m: n.eps + m),
        f"{LAYER}.pre_mlp_layernorm:output",
        hint="factor",
        sweep=(1e-8, 1e-2),
        measure="added to 1e-5",
    ),
    Bug(
        "rotary base",
        "arithmetic",
        TP2,
        rotary(other_base),
        "decoder.layers.0.self_attention.core_attention",
        hint="token|position|rotat",
        sweep=(1e-6, 0.5),
    ),
    Bug(
        "rotary positions of one rank off by one",
        "TP",
        TP2,
        rotary(lambda module, angles, m: angles.roll(-1, 0), "tp"),
        "decoder.layers.0.self_attention.core_attention",
        hint=r"tp rank 1",
    ),
    Bug(
        "rotary pairs interleaved",
        "arithmetic",
        TP2,
        attribute(ATTENTION, "config", of_another_config(rotary_interleaved=True)),
        CORE,
        hint="token|position|rotat",
    ),
    Bug(
        "slope of the activation",
        "arithmetic",
        TP2,
        attribute(MLP, "config", other_activation),
        f"{FC2}:input",
        hint="",
        sweep=(1e-6, 0.5),
    ),
    Bug(
        "approximate activation",
        "arithmetic",
        BIAS,
        attribute(MLP, "activation_func", lambda *_: lambda x: nn.functional.gelu(x, approximate="tanh")),
        f"{FC2}:input",
        hint="",
    ),
    Bug(
        "activations in a narrower dtype",
        "arithmetic",
        TP2,
        output("decoder.layers.0", rounded),
        ("decoder.layers.0:output", f"{LAYER}:input"),
        hint=PRECISION,
        sweep=(2.0**-22, 2.0**-4),
        measure="unit roundoff",
    ),
    Bug(
        "output of a linear off by a factor",
        "arithmetic",
        TP2,
        output(FC2, scaled),
        f"{FC2}:output",
        hint=FACTOR,
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "one head off by a factor",
        "arithmetic",
        TP2,
        output(CORE, second_head, "tp"),
        f"{CORE}:output",
        hint="head|tp rank 1|entries",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "one microbatch off by a factor",
        "arithmetic",
        TP2,
        attribute(MLP, "forward", second_microbatch),
        f"{MLP}:output",
        hint="sample|microbatch",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "some positions off by a factor",
        "arithmetic",
        TP2,
        output(MLP, last_tokens),
        f"{MLP}:output",
        hint="token",
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "constant offset",
        "arithmetic",
        TP2,
        output(FC2, shifted),
        f"{FC2}:output",
        hint=VECTOR,
        sweep=(1e-7, 0.1),
    ),
    Bug(
        "dropout probability",
        "arithmetic",
        DROPOUT,
        attribute(LAYER, "hidden_dropout", lambda layer, m: layer.hidden_dropout * (1 - m)),
        f"{LAYER}:mid",
        hint="factor|entries",
        sweep=(1e-5, 0.5),
    ),
    Bug(
        "two layers swapped",
        "weights",
        TP2,
        swapped_layers,
        "decoder.layers.0.input_layernorm.weight",
        "parameter",
        PERMUTED,
    ),
    Bug(
        "learned positions off by one",
        "arithmetic",
        LEARNED,
        parameter("embedding.position_embeddings.weight", lambda w, m: w.roll(1, 0)),
        "embedding.position_embeddings.weight",
        "parameter",
        f"{PERMUTED}|shift",
    ),
]
