"""Hook points that share a tensor are passed in the order of the data flow, however they were registered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megatron_flex as mf
from tests.distributed import matrix
from tests.support import gpt, llama, oracle, truths
from tests.support import llama_fairscale as fairscaled
from tests.support.gpt import Case
from tests.support.pool import run

ORDERS = ("forwards", "backwards", "mixed")
L0, L1 = "decoder.layers.0", "decoder.layers.1"
ATTENTION = [
    *(f"input_layernorm:{p}" for p in ("input", "output")),
    "self_attention:input",
    *(f"self_attention.linear_qkv:{p}" for p in ("input", "gemm_input", "output", "q", "k", "v")),
    *(f"self_attention:{p}" for p in ("q", "k", "v")),
    "self_attention.core_attention:output",
    *(f"self_attention.linear_proj:{p}" for p in ("input", "partial", "output")),
    *("self_attention:output", "mid"),
]
MLP = [
    *(f"pre_mlp_layernorm:{p}" for p in ("input", "output")),
    "mlp:input",
    *(f"mlp.linear_fc1:{p}" for p in ("input", "gemm_input", "output", "gate", "up")),
    *(f"mlp.linear_fc2:{p}" for p in ("input", "partial", "output")),
    "mlp:output",
]
EXPERTS = [
    "mlp:input",
    *(f"mlp.router:{p}" for p in ("input", "logits", "probs")),
    *(f"mlp.experts:{p}" for p in ("weights", "dispatched")),
    *(f"mlp.experts.local_experts.1:{p}" for p in ("input",)),
    *(f"mlp.experts.local_experts.1.linear_fc1:{p}" for p in ("input", "output", "gate", "up")),
    *(f"mlp.experts.local_experts.1.linear_fc2:{p}" for p in ("input", "output")),
    "mlp.experts.local_experts.1:output",
    *("mlp.experts:output", "mlp:output"),
]
# Written down by hand in the order in which one process passes them.
BEFORE = ["embedding.word_embeddings:partial", "embedding.word_embeddings:output", "embedding:output"]


def of(layer: str, points: Sequence[str]) -> list[str]:
    return [f"{layer}:input", *(f"{layer}{':' if p == 'mid' else '.'}{p}" for p in points), f"{layer}:output"]


DENSE = [*BEFORE, *of(L0, ATTENTION + MLP), *of(L1, ATTENTION + MLP), "decoder.final_layernorm:input"]
SPARSE = [*BEFORE, *of(L0, EXPERTS), f"{L1}:input"]


@dataclass(frozen=True)
class Own:
    """An edit of one site, which commutes with no other's."""

    number: int

    def of(self, tensor: Tensor) -> Tensor:
        return oracle.edit(tensor) * (1 + 0.03 * (self.number % 7)) + 0.02 * (1 + self.number % 5)

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return self.of(inputs)


def ordered(sites: Sequence[str], order: str) -> list[str]:
    if order == "mixed":
        return random.Random(3).sample(list(sites), len(sites))
    return list(sites) if order == "forwards" else list(reversed(sites))


def hooks(sites: Sequence[str], order: str) -> list[mf.HookFunction]:
    """An edit and a gradient hook of each site."""
    return [
        hook
        for site in ordered(sites, order)
        for hook in (
            mf.HookFunction(site, editing_function=Own(sites.index(site))),
            mf.HookFunction(site, hook_type="tensor"),
        )
    ]


def visit(number: int, site: str, seen: dict[str, list[Tensor]]) -> Any:
    """What the hooks of a site do, on one process."""

    def at(tensor: Tensor) -> Tensor:
        seen.setdefault(site, []).append(tensor.detach().clone())
        out = Own(number).of(tensor)
        if out.requires_grad:
            out.register_hook(lambda g: seen.setdefault(f"{site}.grad", []).append(g.clone()))
        return out

    return at


# -- Megatron ------------------------------------------------------------------------------------------


def by_hand(case: Case, sites: list[str]) -> Any:
    """A random model's state, and what plain hooks see and do, installed in the order of the data flow."""
    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    state = gpt.randomize(chunks[0])
    seen: dict[str, list[Tensor]] = {}
    for number, site in enumerate(sites):
        oracle.install(chunks[0], site, visit(number, site, seen))
    losses = gpt.step(case, chunks, 0)
    return state, seen, losses, {n: p.grad for n, p in gpt.global_names(chunks[0]) if p.grad is not None}


def by_hooks(case: Case, state: Any, sites: list[str], order: str) -> dict[str, Any]:
    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    with mf.attach(chunks, hooks=hooks(sites, order)) as flex:
        losses = gpt.step(case, chunks, flex.session.mesh["dp"].coord)
        mesh = flex.session.mesh
        return {
            "dp": mesh["dp"].coord,
            "coords": dict(mesh.coords),
            "sizes": dict(mesh.sizes),
            "losses": losses,
            "read": {n: list(t) for n, t in flex.output_dict.items()},
            "found": matrix._gradients(flex, chunks),
        }


def check(case: Case, sites: list[str], order: str) -> None:
    state, seen, losses, gradients = truths.once(by_hand, case.single(), sites)
    answers = run(case.world, by_hooks, case, state, sites, order)
    read = next(a["read"] for a in answers if a["read"])
    assert set(read) == set(seen), set(read) ^ set(seen)
    for name, want in seen.items():
        for got, true in zip(read[name], want, strict=True):
            assert matrix.relative(got, true) <= 10 * matrix.BOUND, name
    got = next(a["losses"] for a in answers if a["losses"])
    for one, true in zip(got, losses, strict=True):
        assert abs(one - true) <= matrix.BOUND * abs(true)
    whole = matrix.whole_gradients(answers, lambda a: a["found"])
    assert set(whole) == set(gradients)
    for name, want in gradients.items():
        assert matrix.relative(whole[name], want) <= 10 * matrix.BOUND, name


CASES = [
    Case("one", layers=2, microbatches=1),
    Case("tp2", tp=2, layers=2, microbatches=1),
    Case("tp2 sp", tp=2, sp=True, layers=2, microbatches=1),
    Case("tp2 sp pp2", tp=2, pp=2, sp=True, layers=2, microbatches=1),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sites_of_a_dense_model(case: Case, order: str) -> None:
    pytest.importorskip("megatron.core")
    check(case, DENSE, order)


EXPERTS_CASES = [
    Case("experts", experts=4, layers=2, microbatches=1),
    Case("experts tp2 ep2", tp=2, dp=1, ep=2, sp=True, experts=4, layers=2, microbatches=1),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", EXPERTS_CASES, ids=lambda c: c.name)
def test_sites_of_experts(case: Case, order: str) -> None:
    pytest.importorskip("megatron.core")
    check(case, SPARSE, order)


# -- other frameworks ----------------------------------------------------------------------------------

LLAMA = [
    "tok_embeddings:output",
    *(f"layers.0.attention_norm:{p}" for p in ("input", "output")),
    "layers.0.attention:input",
    *(f"layers.0.attention.wq:{p}" for p in ("input", "gemm_input", "output")),
    *(f"layers.0.attention.wo:{p}" for p in ("input", "gemm_input", "partial", "output")),
    *("layers.0.attention:output", "layers.0.ffn_norm:input", "layers.0.feed_forward:input"),
    *(f"layers.0.feed_forward.w1:{p}" for p in ("input", "gemm_input", "local", "output")),
    *(f"layers.0.feed_forward.w2:{p}" for p in ("input", "gemm_input", "partial", "output")),
    *("layers.0.feed_forward:output", "layers.0:output", "layers.1:input"),
    *(f"output:{p}" for p in ("input", "gemm_input", "local", "output")),
]


def plainly(sites: list[str]) -> Any:
    """What plain hooks see and do in one process's model, installed in the order of the data flow."""
    model, seen = llama.single(), {}
    for number, site in enumerate(sites):
        path, _, point = site.partition(":")
        at, module = visit(number, site, seen), model.get_submodule(path)
        if point in ("input", "gemm_input"):
            module.register_forward_pre_hook(lambda _, args, at=at: (at(args[0]), *args[1:]))
        else:
            module.register_forward_hook(lambda _, args, out, at=at: at(out))
    tokens, labels = llama.batch(0)
    loss = llama.loss_of(model(tokens), labels)
    loss.backward()
    return seen, loss.detach()


def hooked(framework: str, tp: int, order: str) -> Any:
    if framework.startswith("fairscale"):
        fairscaled.initialize(tp)
        model: nn.Module = fairscaled.model(gather="gathered" in framework)
    else:
        model = distributed(tp, sequence=False)
    with mf.FlexModel(model) as flex:
        there = {s.name for s in flex.sites()}
        sites = [s for s in LLAMA if s in there]
        for hook in hooks(sites, order):
            flex.session.hooks.add(hook)
        tokens, labels = llama.batch(0)
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return sites, {n: t for n, (t,) in flex.output_dict.items()}, loss.detach()


def distributed(tp: int, sequence: bool) -> nn.Module:
    """The model in torch's parallel styles."""
    styles: dict[str, Any] = {}
    for n in range(llama.LAYERS):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            styles[f"layers.{n}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            styles[f"layers.{n}.{name}"] = RowwiseParallel()
    return parallelize_module(llama.single(), init_device_mesh("cpu", (tp,)), styles)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("framework", ["fairscale", "fairscale gathered", "DTensor"])
def test_sites_of_other_frameworks(framework: str, tp: int, order: str) -> None:
    if framework != "DTensor":
        pytest.importorskip("fairscale")
    sites, read, loss = run(tp, hooked, framework, tp, order)[0]
    for point in ("partial", "gemm_input"):
        assert any(s.endswith(f":{point}") for s in sites)
    seen, true = plainly(sites)
    torch.testing.assert_close(loss, true, rtol=1e-5, atol=1e-6)
    assert set(read) == set(seen)
    for name, (want,) in seen.items():
        assert matrix.relative(read[name], want) <= 10 * matrix.BOUND, name


class Pair(nn.Module):
    """Two tensors, the second of which is the first and the last but one from the end."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


def counted(order: str) -> tuple[Tensor, ...]:
    model = Pair()
    edits = {
        i: mf.HookFunction("root", unpack_idx=i, editing_function=lambda m, t, c, s, n=n: t * (n + 2) + n)
        for n, i in enumerate((0, 1, -2, -1))
    }
    with mf.attach(model, [edits[i] for i in ordered((0, 1, -2, -1), order)]):  # type: ignore[arg-type]
        found: tuple[Tensor, ...] = model(torch.arange(3.0))
        return found


@pytest.mark.parametrize("order", ORDERS)
def test_a_tensor_counted_from_both_ends(order: str) -> None:
    x = torch.arange(3.0)
    first, second = (x + 1) * 2, (x * 2) * 3 + 1
    first, second = first * 4 + 2, second * 5 + 3
    (found,) = run(1, counted, order)
    torch.testing.assert_close(found, (first, second))
