"""The names of TransformerLens' TransformerBridge are resolved as its own components declare them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flex.lens.lens_names import resolve_bridge_name


def declared(component: Any) -> dict[str, str]:
    """What a component of the bridge calls each name of HookedTransformer."""
    return {old: new for old, new in component.hook_aliases.items() if isinstance(new, str)}


def test_names_are_those_of_the_bridge() -> None:
    bridge = pytest.importorskip("transformer_lens.model_bridge.generalized_components")
    asked = 0
    for component, prefix, gated in (
        (bridge.BlockBridge, "", True),
        (bridge.AttentionBridge, "attn.", True),
        (bridge.GatedMLPBridge, "mlp.", True),
        (bridge.MLPBridge, "mlp.", False),
    ):
        for old, new in declared(component).items():
            if old.endswith(("_input", "_attn_in")):  # copies of the residual stream, which Megatron has not
                continue
            name = f"blocks.3.{prefix}{new}"
            assert resolve_bridge_name(name, gated) == f"blocks.3.{prefix}{old}", component
            asked += 1
    assert asked >= 12


@pytest.mark.parametrize(
    "name", ["blocks.0.hook_resid_pre", "hook_embed", "decoder.layers.0:input", "ln_final.hook_scale"]
)
def test_other_names_stay(name: str) -> None:
    assert resolve_bridge_name(name, True) == name
