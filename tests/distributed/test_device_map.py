"""Models of one process whose layers are on several devices, or whose weights are brought when they run.

Only the CPU is there: what is on the disk comes to it. That values move between devices is tested with the
`meta` device, which has shapes and no numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import Cell, judge, relative
from tests.support.messages import raises

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

SECTION = "Hugging Face"
LAYERS = 3
SITES = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp:input", "lm_head")
AWAY = "model.layers.1.mlp.down_proj.weight"
HERE = "model.layers.0.mlp.down_proj.weight"


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def dispatched(folder: Path) -> Any:
    """Layers 0 and 2 on the CPU, all else there too but layer 1, on the disk."""
    where: dict[str, str] = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    where |= {"model.rotary_emb": "cpu"}
    where |= {f"model.layers.{n}": "disk" if n == 1 else "cpu" for n in range(LAYERS)}
    return accelerate.dispatch_model(llama(), where, main_device="cpu", offload_dir=str(folder))


def tokens() -> Tensor:
    return torch.arange(16).view(2, 8)


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.early = inputs
    return inputs * 1.5


def late(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + save_ctx.early.flip(-1) + modules.probe(inputs)


def run(model: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    kinds = ("forward", "tensor")
    with mf.attach(model, [mf.HookFunction(s, hook_type=k) for s in SITES for k in kinds]) as flex:
        model(tokens()).logits.logsumexp(-1).sum().backward()
        out |= {name: read[0] for name, read in flex.output_dict.items()}
        out["whole"] = {n: t.clone() for n, t in flex.named_full_parameters()}
    with mf.FlexModel(model) as flex:
        torch.manual_seed(1)
        flex.register_trainable_module("probe", nn.Linear(32, 32))
        flex.freeze()
        flex.register_forward_hook(mf.HookFunction("model.embed_tokens", editing_function=edit, save=False))
        flex.register_forward_hook(mf.HookFunction("model.layers.1", editing_function=late, save=False))
        out["edited"] = model(tokens()).logits
        out["edited"].logsumexp(-1).sum().backward()
        out["trained"] = [p.grad.clone() for p in flex.trainable_modules["probe"].parameters()]
    return out


def test_weights_on_the_disk(tmp_path: Path, cells: list[Any]) -> None:
    model = dispatched(tmp_path)
    assert model.get_parameter(AWAY).is_meta
    got, want = run(model), run(llama())
    assert got.keys() == want.keys()
    pairs = [(n, "gradient" if n.endswith(".grad") else "value", got[n], want[n]) for n in got if ":" in n]
    pairs += [("(none)", "parameter", w, want["whole"][n]) for n, w in got["whole"].items()]
    pairs.append(("model.layers.1:output", "edited logits", got["edited"], want["edited"]))
    trained = zip(got["trained"], want["trained"], strict=True)
    pairs += [("model.layers.1:output", "trained gradient", g, w) for g, w in trained]
    found = [
        Cell("device_map, a layer on the disk", n.removesuffix(".grad"), check, relative(g, w), model=SECTION)
        for n, check, g, w in pairs
    ]
    judge(found, cells)
    assert all(p.requires_grad for p in model.parameters())
    assert model.get_parameter(AWAY).is_meta


def test_what_is_not_there_is_not_set_or_hooked(tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    with mf.FlexModel(model) as flex:
        whole = flex.get_module_parameter(HERE)
        flex.set_module_parameter(HERE, whole * 2)
        assert torch.equal(flex.get_module_parameter(HERE), whole * 2)
        with raises(mf.FlexError, "dispatch_model"):
            flex.set_module_parameter(AWAY, whole)
        with raises(mf.FlexError, "accelerate", "device_map"):
            flex.register_hook(mf.HookFunction(AWAY))


class TwoDevices(nn.Module):
    """Layers on two devices, as accelerate puts them, with a move between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to("meta"))


def test_what_edits_save_comes_to_the_layers_device() -> None:
    seen: dict[str, Any] = {}

    def save(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.parts = {"x": [inputs, 3]}
        save_ctx.run.kept = inputs.detach()
        return inputs

    def use(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        seen["devices"] = inputs.device, save_ctx.parts["x"][0].device, save_ctx.run.kept.device
        seen["rest"] = save_ctx.parts["x"][1], save_ctx.parts["x"][0].requires_grad
        return inputs + save_ctx.parts["x"][0] + save_ctx.run.kept

    model = TwoDevices()
    with mf.FlexModel(model) as flex:
        flex.register_forward_hook(mf.HookFunction("first", editing_function=save, save=False))
        flex.register_forward_hook(mf.HookFunction("second", editing_function=use, save=False))
        assert model(torch.ones(2, 4)).device.type == "meta"
    assert {d.type for d in seen["devices"]} == {"meta"}
    assert seen["rest"] == (3, True)
