"""Causes in linears: swapped, concatenated or permuted projections, another activation, other weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron_flex.alignment.evidence import Evidence
from megatron_flex.alignment.site_pairs import reference_tensor
from megatron_flex.alignment.tensor_causes import match_columns

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu (tanh)": partial(nn.functional.gelu, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": nn.functional.relu,
    "squared relu": lambda x: nn.functional.relu(x).square(),
}


def swapped_projections(e: Evidence) -> str:
    """Queries, keys and values are exchanged."""
    path, role = e.site.rpartition(":")[::2]
    megatron = e.megatron(e.site)
    for other in "qkv":
        if other != role and e.equal(megatron, e.hf(f"{path}:{other}")):
            return f"q, k and v are in another order: Megatron's {role} is the {other} of Hugging Face"
    return ""


def concatenated_projections(e: Evidence) -> str:
    """The fused weight has all queries, all keys, all values, where Megatron reads them group by group."""
    path = e.site.rpartition(":")[0]
    pairs = [e.pair(f"{path}:{part}") for part in "qkv"]
    if any(p is None for p in pairs):
        return ""
    megatron, hf = zip(*(p for p in pairs if p is not None), strict=True)
    groups, size = hf[1].shape[2:]
    each = hf[0].shape[2] // groups
    joined = torch.cat([t.flatten(2) for t in hf], -1)
    read = joined.unflatten(-1, (groups, each + 2, size))
    parts = (read[..., :each, :].flatten(2, 3), read[..., each, :], read[..., each + 1, :])
    if all(e.equal(h, p) for h, p in zip(megatron, parts, strict=True)):
        return (
            "q, k and v are concatenated in linear_qkv: Megatron reads them group by group, [queries "
            "of a group, key, value]"
        )
    return ""


def rotary_row_order(e: Evidence) -> str:
    """The features of each head are in the order of the other rotary form."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape or pair[0].ndim != 4:
        return ""
    megatron, hf = pair
    pairs = torch.stack(hf.chunk(2, -1), -1).flatten(-2)
    halves = torch.cat([hf[..., 0::2], hf[..., 1::2]], -1)
    for order, name in ((pairs, "interleaved pairs"), (halves, "two halves")):
        if e.equal(megatron, order):
            return (
                f"the features of each head are in the order of {name}: the rows of q and k are permuted for "
                "the other rotary form (rotary interleaving)"
            )
    return ""


def swapped_gate(e: Evidence) -> str:
    """Gate and up are exchanged, also in each tensor parallel shard."""
    path = e.site.rpartition(":")[0]
    gate, up = e.pair(f"{path}:gate"), e.pair(f"{path}:up")
    if gate is None or up is None:
        return ""
    if e.equal(gate[0], up[1]) and e.equal(up[0], gate[1]):
        return "gate and up are swapped in linear_fc1"
    joined = torch.cat([gate[1], up[1]], -1)
    halves = (torch.cat([joined[..., 0::2]], -1), joined[..., 1::2])
    if e.equal(torch.cat([gate[0][..., None], up[0][..., None]], -1).flatten(-2), joined) or (
        e.equal(gate[0], halves[0]) and e.equal(up[0], halves[1])
    ):
        return "gate and up are interleaved in linear_fc1: Megatron has all rows of gate, then all of up"
    return ""


def other_activation(e: Evidence) -> str:
    """Another activation function, or the factors of a gated one exchanged."""
    path = e.site.rpartition(".")[0]
    megatron = e.megatron(e.site)
    gate, up, plain = (e.hf(f"{path}.linear_fc1:{point}") for point in ("gate", "up", "output"))
    hf_name = getattr(
        e.hf_model.config, "hidden_act", getattr(e.hf_model.config, "activation_function", "its own")
    )
    for name, function in ACTIVATIONS.items():
        if gate is not None and up is not None:
            if e.equal(megatron, function(gate) * up):
                return f"the activation of Megatron is {name}, that of Hugging Face {hf_name}"
            if e.equal(megatron, function(up) * gate):
                return f"gate and up are swapped: Megatron computes {name}(up) * gate"
        elif plain is not None and e.equal(megatron, function(plain)):
            return f"the activation of Megatron is {name}, that of Hugging Face {hf_name}"
    return ""


def other_layer(e: Evidence) -> str:
    """The weights are those of another layer."""
    row = e.match.row
    if e.match.layer is None or len(row.other) > 1 or not row.other[0].endswith(":output"):
        return ""
    path = row.other[0].partition(":")[0]
    module = e.module()
    entering = e.hf_captures.get(f"{path}:input")
    if entering is None or not isinstance(getattr(module, "weight", None), Tensor):
        entering = _entering(e)
    if entering is None or module is None or not isinstance(getattr(module, "weight", None), Tensor):
        return ""
    for layer in range(int(e.hf_model.config.num_hidden_layers)):
        if layer == e.match.layer:
            continue
        other = e.module(re.sub(r"\.\d+\.", f".{layer}.", path, count=1))
        if other is None or getattr(other, "weight", entering[:0]).shape != module.weight.shape:
            continue
        with torch.no_grad():
            value = other(entering.to(next(other.parameters()))).cpu()
        point = row.other[0]
        expected = reference_tensor(row, {**e.hf_captures, point: value}, e.sizes)
        if expected is not None and e.equal(e.megatron(e.site), expected.float()):
            return f"the weights are those of layer {layer}: the layers are in another order"
    return ""


def _entering(e: Evidence) -> Tensor | None:
    """The input of the site's Hugging Face module, as the table names it at another site."""
    path = e.site.partition(":")[0]
    for site in (f"{path}:input", f"{path}.linear_qkv:input"):
        match = e.matches.get(site)
        if match is not None and match.row.other[0] in e.hf_captures:
            return e.hf_captures[match.row.other[0]]
    return None


def input_order(e: Evidence) -> str:
    """The columns of a weight are in another order, or the weight is transposed."""
    path = e.site.partition(":")[0]
    megatron = e.weights.get(f"{path}.weight")
    hf = e.parameter(f"{e.match.row.other[0].partition(':')[0]}.weight")
    if megatron is None or hf is None or megatron.ndim != 2:
        return ""
    megatron = megatron.float()
    if type(e.module()).__name__ == "Conv1D":
        hf = hf.T  # transformers stores it as [in, out]
    if megatron.shape == hf.shape[::-1] and torch.equal(megatron, hf.T) and not torch.equal(megatron, hf):
        return f"{path}.weight is transposed"
    order = match_columns(megatron, hf, e.tolerance)
    if order is None:
        return ""
    heads = e.sizes["n"]
    size = len(order) // heads
    blocks = [order[i : i + size] for i in range(0, len(order), size)]
    if len(order) % heads == 0 and all(all(b - a == 1 for a, b in pairwise(block)) for block in blocks):
        return (
            f"the attention heads are in another order in the columns of {path}.weight: "
            f"{[b[0] // size for b in blocks]}"
        )
    return f"the columns of {path}.weight are in another order"


def untied_output(e: Evidence) -> str:
    """The output layer is tied to the embedding in one of the models only."""
    entering, logits = e.hf("output_layer:input"), e.megatron(e.site)
    table = e.parameter(
        e.matches["embedding.word_embeddings:output"].row.other[0].replace(":output", ".weight")
    )
    if entering is None or logits is None or table is None:
        return ""
    tied = bool(getattr(e.hf_model.config, "tie_word_embeddings", False))
    from_embedding = e.equal(logits, (entering @ table.T)[..., : logits.shape[-1]])
    if tied and not from_embedding:
        return "tied weights are not tied in Megatron: output_layer.weight differs from the word embeddings"
    if not tied and from_embedding:
        return (
            "the output layer is tied to the word embeddings in Megatron, and has a weight of its "
            "own in Hugging Face"
        )
    return ""
