"""Presets and selections find positions, samples and heads by what is known of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from megatron_flex import edits
from tests.support import hf_llama, llama, llama_fairscale, same
from tests.support.messages import raises
from tests.support.pool import run, run_alone

SAMPLES, TOKENS = 3, 8
PLAIN = "b s h"  # what a user passes where nothing names the dims
VECTOR = torch.linspace(-1, 1, llama.HIDDEN)
DIRECTION = torch.nn.functional.normalize(VECTOR, dim=0)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, llama.VOCABULARY, (SAMPLES, TOKENS), generator=generator)


def at(x: Tensor, new: Tensor, samples: Any = slice(None), positions: Any = slice(None)) -> Tensor:
    """`x` with the values of `new` for some samples and positions."""
    out = x.clone()
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    rows = torch.arange(x.shape[0])[samples].reshape(-1, 1)
    mask[rows, torch.arange(x.shape[1])[positions].reshape(1, -1)] = True
    out[mask] = new[mask]
    return out


def other(x: Tensor, dim: int) -> Callable[[Tensor], bool]:
    """Whether a tensor has the slices of `x` along a dim in an order in which none keeps its place."""

    def check(found: Tensor) -> bool:
        one, two = x.transpose(0, dim), found.transpose(0, dim)
        near = torch.stack([torch.stack([(a - b).abs().max() < 1e-4 for b in one]) for a in two])
        return bool((near.sum(0) == 1).all() and (near.sum(1) == 1).all() and not near.diagonal().any())

    return check


def rows(x: Tensor) -> Tensor:
    return x - (x @ DIRECTION)[..., None] * DIRECTION


# Each preset, and what it makes of `[b, s, h]` on one process.
PRESETS: Mapping[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "last position": (
        lambda **k: edits.steer(VECTOR, 2.0, positions=-1, **k),
        lambda x: at(x, x + 2 * VECTOR, positions=[-1]),
    ),
    "positions": (
        lambda **k: edits.scale(3.0, positions=slice(2, 4), **k),
        lambda x: at(x, 3 * x, positions=slice(2, 4)),
    ),
    "samples": (lambda **k: edits.scale(3.0, samples=[0, -1], **k), lambda x: at(x, 3 * x, samples=[0, -1])),
    "both": (lambda **k: edits.zero(samples=1, positions=[0, 5], **k), lambda x: at(x, 0 * x, [1], [0, 5])),
    "clamp": (
        lambda **k: edits.clamp(-0.1, 0.1, positions=0, **k),
        lambda x: at(x, x.clamp(-0.1, 0.1), positions=[0]),
    ),
    "patch": (
        lambda **k: edits.patch(VECTOR, positions=2, **k),
        lambda x: at(x, VECTOR.expand_as(x), positions=[2]),
    ),
    "project out": (
        lambda **k: edits.project_out(VECTOR, samples=2, **k),
        lambda x: at(x, rows(x), samples=[2]),
    ),
    "linear map": (
        lambda **k: edits.linear_map(2 * torch.eye(llama.HIDDEN), positions=1, **k),
        lambda x: at(x, 2 * x, positions=[1]),
    ),
    "neurons": (
        lambda **k: edits.ablate_neurons(slice(2, None), samples=0, **k),
        lambda x: at(x, x * (torch.arange(llama.HIDDEN) < 2), samples=[0]),
    ),
    "swap": (lambda **k: edits.swap(0, 2, **k), lambda x: x[[2, 1, 0]]),
    "mean of positions": (lambda **k: edits.mean("s", **k), lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "mean of all": (
        lambda **k: edits.mean(samples=0, **k),
        lambda x: at(x, x.mean((0, 1)).expand_as(x), samples=[0]),
    ),
    "resample": (lambda **k: edits.resample(**k), lambda x: other(x, 0)),
    "resample positions": (lambda **k: edits.resample("s", **k), lambda x: other(x, 1)),
    "chain": (
        lambda **k: edits.scale(2.0, positions=3, **k) | edits.swap(0, 1, **k),
        lambda x: at(x, 2 * x, positions=[3])[[1, 0, 2]],
    ),
}
SELECTIONS: Mapping[str, tuple[Callable[..., dict[str, Any]], Callable[[Tensor], Tensor]]] = {
    "last position": (lambda **k: {"select": mf.Select(positions=-1, **k)}, lambda x: x[:, -1:]),
    "samples": (
        lambda **k: {"select": mf.Select(samples=[2, 0], positions=slice(1, 3), **k)},
        lambda x: x[[2, 0], 1:3],
    ),
    "mean": (lambda **k: {"select": mf.Select(**k), "reduce": mf.reduce.mean("s")}, lambda x: x.mean(1)),
}
# Around the same modules: other wrappers and frameworks get these.
FEW = ("last position", "samples", "swap", "mean of all")
HEAD_PRESETS: Mapping[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "ablated": (lambda: edits.ablate_heads([0, 3]), lambda x: only(x, [0, 3], 0.0)),
    "scaled": (
        lambda: edits.scale(2.0, heads=-1, positions=1),
        lambda x: at(x, only(x, [-1], 2.0), positions=[1]),
    ),
}


def only(x: Tensor, heads: list[int], factor: float) -> Tensor:
    out = x.unflatten(-1, (llama.HEADS, llama.HEAD)).clone()
    out[..., heads, :] *= factor
    return out.flatten(-2)


def turned(tensor: Tensor, sequence_first: bool) -> Tensor:
    return tensor.transpose(0, 1) if sequence_first else tensor


def wrong_changes(
    model: Any,
    call: Callable[[], Any],
    edited: str,
    seen: str,
    presets: Iterable[str] = FEW,
    sequence_first: bool = False,
    **dims: str,
) -> list[str]:
    """The presets and selections whose result is another one than on one process; only on rank 0.

    Args:
        model: what is attached to.
        call: calls the model.
        edited: the hook point.
        seen: the one after it.
        presets: the names of the presets.
        sequence_first: whether tensors are `[s, b, h]`.
        dims: what a user passes to presets and selections.
    """

    def read(*hooks: mf.HookFunction, name: str = seen) -> Tensor | None:
        with mf.attach(model, [*hooks, mf.HookFunction(name, keep_as="read")]) as flex:
            call()
            found = flex.output_dict.get(f"{name}.read")
        return None if found is None else turned(found[0], sequence_first)

    wrong = []
    clean = read()
    for name, (make, formula) in ((n, PRESETS[n]) for n in presets):
        found = read(mf.HookFunction(edited, editing_function=make(**dims), save=False))
        if found is None or clean is None:
            continue
        want = formula(clean)
        good = want(found) if callable(want) else torch.allclose(found, want, atol=1e-5)
        wrong += [] if good else [name]
    for name, (choose, formula) in SELECTIONS.items():
        with mf.attach(model, [mf.HookFunction(seen, **choose(**dims))]) as flex:
            call()
            found = next((r[0] for r in flex.output_dict.values()), None)
        if found is not None and clean is not None:
            shape = formula(clean)
            good = torch.allclose(turned(found, sequence_first and found.ndim == 3), shape, atol=1e-5)
            wrong += [] if good else [f"selection: {name}"]
    return wrong


def wrong_heads(model: Any, call: Callable[[], Any], layer: str, weight: Tensor) -> list[str]:
    """The presets that edit other heads than on one process, at the input of a projection."""

    def read(name: str, *hooks: mf.HookFunction) -> Tensor | None:
        with mf.attach(model, [*hooks, mf.HookFunction(name)]) as flex:
            call()
            return flex.output_dict[name][0] if flex.is_leader else None

    clean, wrong = read(f"{layer}:input"), []
    for name, (make, formula) in HEAD_PRESETS.items():
        hook = mf.HookFunction(f"{layer}:input", editing_function=make(), save=False)
        found = read(f"{layer}:output", hook)
        if clean is not None and found is not None:
            good = torch.allclose(found, formula(clean) @ weight.T, atol=1e-5)
            wrong += [] if good else [f"heads: {name}"]
    return wrong


def _of_transformers(folder: str) -> dict[str, list[str]]:
    """Every framework around a model of transformers, which names the dims."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    layer, seen, project = "model.layers.0", "model.layers.1:input", "model.layers.1.self_attn.o_proj"
    load = LlamaForCausalLM.from_pretrained
    weight = dict(load(folder).named_parameters())[f"{project}.weight"].detach().clone()

    def sharded() -> nn.Module:
        model, over = load(folder), init_device_mesh("cpu", (2,))
        for block in model.model.layers:
            fully_shard(block, mesh=over)
        return fully_shard(model, mesh=over)

    builds: dict[str, Callable[[], Any]] = {
        "plain": lambda: load(folder),
        "tp_plan": lambda: load(folder, tp_plan="auto"),
        "DDP": lambda: DistributedDataParallel(load(folder)),
        "FSDP2": sharded,
    }
    if find_spec("deepspeed") is not None:
        from tests.distributed import test_deepspeed

        builds["DeepSpeed ZeRO-3"] = lambda: test_deepspeed.initialize(load(folder), 3)
    out = {}
    for name, build in builds.items():
        model = build()

        def call(model: Any = model) -> None:
            with torch.no_grad():
                model(tokens())

        presets = PRESETS if name == "plain" else FEW
        out[name] = wrong_changes(model, call, layer, seen, presets) + wrong_heads(
            model, call, project, weight
        )
    eager = load(folder, attn_implementation="eager")
    out["eager attention"] = wrong_heads(eager, lambda: eager(tokens()), project, weight)
    out["generation"] = wrong_texts(load(folder), layer)
    return out


def wrong_texts(model: Any, layer: str) -> list[str]:
    """What is wrong in calls that continue a text whose earlier tokens are cached."""
    rules = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generate(*hooks: mf.HookFunction, **more: Any) -> tuple[Tensor, list[Tensor]]:
        with mf.attach(model, [*hooks, mf.HookFunction("lm_head:input", keep_as="read")]) as flex:
            text = model.generate(tokens(), **rules, **more)
            return text, list(flex.output_dict["lm_head:input.read"])

    wrong = []
    for name, more in {"greedy": {}, "beams": {"num_beams": 2}}.items():
        for dims in ({}, {"dims": PLAIN}):
            edit = edits.steer(VECTOR, 3.0, positions=[0, 5], **dims)
            hook = mf.HookFunction(layer, editing_function=edit, save=False)
            cached, one = generate(hook, use_cache=True, **more)
            full, other_ = generate(hook, use_cache=False, **more)
            good = torch.equal(cached, full) and all(
                torch.allclose(a[:, -1], b[:, -1], atol=1e-4) for a, b in zip(one, other_, strict=True)
            )
            wrong += [] if good else [f"positions, {name} {dims}"]
    with mf.attach(model, [mf.HookFunction(layer, select=mf.Select(positions=-1, samples=[0, 2]))]) as flex:
        model.generate(tokens(), use_cache=True, **rules)
        found = [tuple(t.shape) for t in flex.output_dict[f"{layer}:output"]]
    wrong += [] if found == [(2, 1, llama.HIDDEN)] * 3 else ["selection of the last position"]
    with (
        raises(mf.HookError, f"{layer}:output", "positions", TOKENS),
        mf.attach(model, [mf.HookFunction(layer, select=mf.Select(positions=0))]),
    ):
        model.generate(tokens(), use_cache=True, **rules)
    return wrong


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_models_of_transformers_name_their_dims(tmp_path: Path) -> None:
    first, _ = run_alone(2, _of_transformers, hf_llama.save(tmp_path), timeout=300)
    assert first == {name: [] for name in first}
    assert len(first) >= 6


def _named_by_the_user() -> dict[str, list[str]]:
    """Modules of which nothing is known, with `dims`."""
    from tests.support import wrapping

    layer, seen = "layers.0", "layers.1:input"
    llama_fairscale.initialize(2)
    builds: dict[str, Callable[[], Any]] = {
        "plain": llama.single,
        "fairscale": llama_fairscale.model,
        "DDP": lambda: DistributedDataParallel(llama.single()),
        "FSDP2": lambda: wrapping.full((2,)),
    }
    out = {}
    for name, build in builds.items():
        model = build()

        def call(model: Any = model) -> None:
            with torch.no_grad():
                model(tokens())

        presets = PRESETS if name == "plain" else FEW
        out[name] = wrong_changes(model, call, layer, seen, presets, dims=PLAIN)
        for kind in ({"editing_function": edits.swap(0, 1)}, {"select": mf.Select(samples=0)}):
            with raises(mf.HookError, f"{layer}:output", "dims="):
                mf.attach(model, [mf.HookFunction(layer, **kind)]).__enter__()
    return out


def test_other_modules_need_the_names() -> None:
    first, _ = run_alone(2, _named_by_the_user, timeout=240)
    assert first == {name: [] for name in ("plain", "fairscale", "DDP", "FSDP2")}


class Mixer(nn.Module):
    """A module of torch's own that knows whether samples come first, and a linear after it."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.mix = nn.Module()
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(WIDE, 2, 16, dropout=0.0, batch_first=batch_first)
            self.mix = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        elif kind == "attention":
            self.mix = nn.MultiheadAttention(WIDE, 2, batch_first=batch_first)
        else:
            self.mix = nn.LSTM(WIDE, WIDE, batch_first=batch_first)
        self.out = nn.Linear(WIDE, WIDE)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed = (
            self.mix(inputs, inputs, inputs)
            if isinstance(self.mix, nn.MultiheadAttention)
            else self.mix(inputs)
        )
        return self.out(mixed[0] if isinstance(mixed, tuple) else mixed)


WIDE = 8
BY_INDEX: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "position": (lambda **k: edits.zero(positions=-1, **k), lambda x: at(x, x * 0, positions=[-1])),
    "sample": (lambda **k: edits.zero(samples=[0], **k), lambda x: at(x, x * 0, samples=[0])),
    "mean": (lambda **k: edits.mean("s", **k), lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "samples exchanged": (lambda **k: edits.swap(0, 1, **k), lambda x: x[[1, 0, 2]]),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "attention", "lstm"])
def test_modules_of_torch_with_batch_first_name_no_dims(kind: str, batch_first: bool) -> None:
    """What follows such a module may have permuted its tensors: refused by name, and right with the names."""
    torch.manual_seed(1)
    model, sequence_first = Mixer(kind, batch_first), not batch_first
    inputs = torch.randn(SAMPLES, TOKENS, WIDE)
    plain = model(turned(inputs, sequence_first))
    dims = "b s h" if batch_first else "s b h"
    for make, formula in BY_INDEX.values():
        with raises(mf.HookError, "out:output", "dims="):
            mf.attach(model, [mf.HookFunction("out", editing_function=make())]).__enter__()
        with mf.attach(model, [mf.HookFunction("out", editing_function=make(dims=dims), save=False)]):
            edited = model(turned(inputs, sequence_first))
        torch.testing.assert_close(turned(edited, sequence_first), formula(turned(plain, sequence_first)))
    with raises(mf.HookError, "out:output", "dims="):
        mf.attach(model, [mf.HookFunction("out", select=mf.Select(samples=0))]).__enter__()


def _of_megatron() -> list[str]:
    chunks = same.build("tp2")
    return wrong_changes(
        chunks,
        lambda: same.step(chunks, tokens(), tokens()),
        "decoder.layers.0",
        "decoder.layers.1:input",
        PRESETS,
        sequence_first=True,
    )


def test_layouts_of_megatron_name_the_dims() -> None:
    assert run(2, _of_megatron)[0] == []
