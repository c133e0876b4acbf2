"""What FlexModel's demos did, on a small model like theirs: the scripts as tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# What the scripts change: `flex_model.core` before.
from megatron_flex.compat.core import DummyModule, FlexModel, HookFunction
from megatron_flex.compat.utils import setup_logger
from tests.distributed.test_compat_plain import sharding
from tests.support.pool import run

LAYERS, HEADS, HIDDEN, WORDS = 3, 4, 16, 32


@dataclass
class Output:
    """What transformers' models return."""

    logits: Tensor
    past_key_values: Any = None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dummy = DummyModule()

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, length, _width = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        maps = self.dummy(scores.softmax(-1))
        return self.o_proj((maps @ v).transpose(1, 2).reshape(batch, length, -1)), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU())
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        hidden = hidden + self.self_attn(hidden_states=hidden)[0]
        return hidden + self.down(self.mlp(hidden)), None


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, HIDDEN), nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = Body(), nn.Linear(HIDDEN, WORDS)

    def forward(self, input_ids: Tensor) -> Output:
        return Output(self.lm_head(self.model(input_ids)))


def prompt() -> Tensor:
    tokens = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    return tokens.repeat(1, 2)


def wrap(model: Causal) -> nn.Module:
    """As FSDP does it with a policy for layers."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = sharding(layer)
    return sharding(model)


def plainly(name: str) -> Tensor:
    """What torch's own hook sees on one process."""
    model, seen = Causal(), []

    def look(_module: Any, _args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    model.get_submodule(name).register_forward_hook(look)
    model(prompt())
    return seen[0].detach()


def test_single_gpu_example() -> None:
    activation_dict: dict[str, list[Tensor]] = {}
    model = FlexModel(Causal(), activation_dict)
    hook_function = HookFunction(
        module_name="model.layers.2", expected_shape=(None, None, None), editing_function=None
    )
    model.register_forward_hook(hook_function)
    _outputs = model(prompt())
    assert list(activation_dict) == ["model.layers.2"]
    assert torch.equal(activation_dict["model.layers.2"][0], plainly("model.layers.2"))


def fsdp_example() -> Any:
    setup_logger("debug")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    activation_dict: dict[str, list[Tensor]] = {}
    model = FlexModel(wrap(Causal()), activation_dict, data_parallel_size=world_size)
    module_name = "_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp"
    model.register_forward_hook(HookFunction(module_name, (None, None, None), None))
    dp_worker_inputs = prompt().chunk(world_size, dim=0)[rank]
    _outputs = model(dp_worker_inputs)
    return activation_dict[module_name][0]


def test_fsdp_example() -> None:
    for activation in run(2, fsdp_example):
        assert activation.shape == (4, 12, 2 * HIDDEN)
        assert torch.allclose(activation, plainly("model.layers.1.mlp"), atol=1e-6)


def induction() -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    output_dict: dict[str, list[Tensor]] = {}
    model = FlexModel(wrap(Causal()), output_dict, data_parallel_size=world_size)
    prefix, postfix = "_fsdp_wrapped_module.model.layers.", "._fsdp_wrapped_module.self_attn.dummy"
    module_names = [f"{prefix}{i}{postfix}" for i in range(LAYERS)]
    for module_name in module_names:
        model.register_forward_hook(HookFunction(module_name, (None, None, None, None)))
    out = model(prompt().chunk(world_size)[rank]).logits
    if rank:
        return out, None
    stripes = [output_dict[n][0].diagonal(dim1=-2, dim2=-1, offset=1 - 6) for n in module_names]
    return out, torch.stack([s.mean(dim=(0, 2)) for s in stripes])


def test_induction_heads_multigpu() -> None:
    (first, scores), (second, _) = run(2, induction)
    model = Causal()
    maps = [plainly(f"model.layers.{i}.self_attn.dummy") for i in range(LAYERS)]
    wanted = torch.stack([m.diagonal(dim1=-2, dim2=-1, offset=1 - 6).mean(dim=(0, 2)) for m in maps])
    assert scores.shape == (LAYERS, HEADS)
    assert torch.allclose(scores, wanted, atol=1e-6)
    assert torch.allclose(torch.cat([first, second]), model(prompt()).logits, atol=1e-5)


class Columns(nn.Module):
    """The layer of the script for tensor parallel models: each rank has some of the columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        size, rank = dist.get_world_size(), dist.get_rank()
        self.w3 = nn.Linear(HIDDEN, 2 * HIDDEN // size, bias=False)
        self.w3.weight.data.copy_(whole.weight.data.chunk(size)[rank])

    def forward(self, inputs: Tensor, start_pos: int) -> Tensor:
        return self.w3(inputs)


def megatron_example() -> Any:
    activation_dict: dict[str, list[Tensor]] = {}
    layers = nn.ModuleDict({"feed_forward": Columns()})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
            return self.layers["feed_forward"](tokens, start_pos=start_pos)

    model = FlexModel(Model(), activation_dict, tensor_parallel_size=dist.get_world_size())
    module_name = "layers.feed_forward.w3"
    model.register_forward_hook(
        HookFunction(module_name=module_name, expected_shape=(None, None, 2 * HIDDEN), editing_function=None)
    )
    inputs = torch.randn(4, 5, HIDDEN, generator=torch.Generator().manual_seed(2))
    _outputs = model(inputs, start_pos=0)
    return activation_dict.get(module_name)


def test_megatron_example() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
    want = whole(torch.randn(4, 5, HIDDEN, generator=torch.Generator().manual_seed(2)))
    for found in run(2, megatron_example):
        assert found[0].shape == (4, 5, 2 * HIDDEN)
        assert torch.allclose(found[0], want, atol=1e-6)
