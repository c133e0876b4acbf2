"""The table of hook points of Hugging Face and Megatron, and the axes in it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import megatron_flex as mf
from megatron_flex.alignment.axes import canonical_axes, parse_axes, rearrange
from megatron_flex.alignment.counterparts import FAMILIES, family_of
from megatron_flex.alignment.site_pairs import axis_sizes
from megatron_flex.errors import FlexError, LayoutError
from tests.support.messages import assert_names, raises


def test_axes_are_rearranged() -> None:
    x = torch.arange(2 * 3 * 8).reshape(2, 3, 8)
    found = rearrange(x, "b s (n d)", ("s", "n", "b", "d"), {"n": 4})
    assert torch.equal(found, x.view(2, 3, 4, 2).permute(1, 2, 0, 3))
    assert torch.equal(rearrange(x[:, None], "b 1 s h", ("b", "s", "h"), {}), x)
    flat = x.flatten(0, 1)
    assert torch.equal(rearrange(flat, "(b s) h", ("s", "b", "h"), {"b": 2}), x.transpose(0, 1))


@pytest.mark.parametrize(
    ("axes", "named"), [("b s", "'b s'"), ("b s (n d) e", "'b s (n d) e'"), ("b (n s) h", "(n s)")]
)
def test_other_axes_are_refused(axes: str, named: str) -> None:
    with raises(LayoutError, named):
        rearrange(torch.zeros(2, 3, 8), axes, ("b", "s", "n", "d"), {"n": 4})
    with raises(LayoutError, 8, "(n d)", "n=3"):
        rearrange(torch.zeros(2, 3, 8), "b s (n d)", ("b", "s", "n", "d"), {"n": 3})


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_axes_on_both_sides(family: str) -> None:
    for row in family_of(family).counterparts:
        hf_axes = [axis for dim in parse_axes(row.hf_axes) for axis in dim if axis != "1"]
        assert sorted(canonical_axes(row.megatron_axes)) == sorted(hf_axes), row
        assert "{" not in row.megatron_axes + row.hf_axes, row
        assert not [
            role for role in ("attn", "norm1", "mlp", "block") if f"{{{role}}}" in " ".join(row.other)
        ]


def test_the_printed_table() -> None:
    text = str(mf.site_names("llama"))
    assert "decoder.layers.{layer}.self_attention.linear_qkv:q" in text
    assert "b s (n d) -> s b n d" in text
    assert_names(text, "loss:output", "Hugging Face")
    (row,) = mf.site_names("gpt2", ["decoder.layers.7.self_attention.linear_qkv:k"])
    assert row == (
        "decoder.layers.7.self_attention.linear_qkv:k",
        "transformer.h.7.attn.c_attn:output",
        "b s (g d) (part 1 of 3) -> s b g d",
    )
    ((_, point, why),) = mf.site_names("llama", ["decoder.layers.0.mlp.router:logits"])
    assert point == ""
    assert_names(why, "llama")


def test_norms_inside_a_linear_change_what_enters_it() -> None:
    family = family_of("llama")
    site = "decoder.layers.0.mlp.linear_fc1:input"
    outside = family.find(site)
    inside = family.find(site, {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight"})
    assert outside is not None
    assert inside is not None
    assert outside.row.other == ("model.layers.0.post_attention_layernorm:output",)
    assert inside.row.other == ("model.layers.0.post_attention_layernorm:input",)


def test_an_unknown_architecture_is_named() -> None:
    with raises(FlexError, "'lama'", "llama"):
        mf.site_names("lama")


def test_the_heads_of_a_configuration_are_read_by_both_of_its_names() -> None:
    assert axis_sizes(SimpleNamespace(n_head=4), 2) == {"b": 2, "n": 4, "g": 4}
    grouped = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    assert axis_sizes(grouped, 2) == {"b": 2, "n": 4, "g": 2}
    with raises(FlexError, "num_attention_heads"):
        axis_sizes(SimpleNamespace(), 2)
