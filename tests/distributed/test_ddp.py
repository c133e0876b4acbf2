"""Models in PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import gpt, llama, proof, ranks, truths, wrapping
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

BOUND = 1e-5
NAME = "layers.1.attention.wq.weight"


def build(options: dict[str, Any]) -> proof.Built:
    return wrapping.built(DistributedDataParallel(llama.single(), **options))


CASES = {
    "DDP dp2": {},
    "DDP dp2, static graph": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("case", CASES)
def test_replicas(case: str, cells: list[Any]) -> None:
    sites = llama.SITES if case == "DDP dp2" else wrapping.FEW
    found = proof.compare("PyTorch", case, 2, build, CASES[case], sites=sites, edits=wrapping.FEW[2:3])
    proof.judge(found, cells)


# -- what is averaged, and over whom -------------------------------------------------------------------


def frozen_for_a_while() -> list[bool]:
    """Whether the gradients of all replicas are the same, in a step behind one of a frozen model."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    flex = mf.FlexModel(model)
    same = []
    for freezes in (True, False):
        if freezes:
            flex.freeze()
        inputs = torch.full((3, 4), 1.0 + dist.get_rank(), requires_grad=True)
        model(inputs).sum().backward()
        if freezes:
            flex.unfreeze()
            continue
        found = [torch.empty_like(model.module.weight) for _ in range(2)]
        dist.all_gather(found, model.module.weight.grad)
        same.append(torch.equal(*found))
    return same


def test_gradients_are_averaged_again_behind_freezing() -> None:
    assert run(2, frozen_for_a_while) == [[True], [True]]


def said(call: Callable[[], Any]) -> str:
    """What an error says; empty if there is none."""
    try:
        call()
    except mf.FlexError as error:
        return str(error)
    return ""


def accumulated() -> dict[str, Any]:
    """What is known of gradients in and behind `no_sync()`."""
    model = DistributedDataParallel(llama.single())
    flex = mf.FlexModel(model)
    assert flex.session.mesh["dp"].group is model.process_group
    told: dict[str, Any] = {}

    def backward(replica: int) -> None:
        tokens, labels = llama.batch(replica)
        llama.loss_of(model(tokens), labels).backward()

    def read(reduced: bool | None = None) -> Tensor | None:
        return flex.get_module_parameter(NAME, gradient=True, reduced=reduced, everywhere=True)

    rank = dist.get_rank()
    with model.no_sync():
        backward(rank)
        told["inside"] = said(read)
    told["behind"] = said(read)
    told["promised"] = said(lambda: read(True))
    told["own"] = read(False)
    backward(2 + rank)
    told["both"] = read()
    told["own then"] = said(lambda: read(False))
    flex.restore()
    return told


def test_gradients_that_are_not_averaged_yet() -> None:
    wanted = [t["parameter gradients"][NAME] for t in llama.truth(4)]
    for rank, told in enumerate(run(2, accumulated)):
        assert "no_sync()" in told["inside"]
        assert_names(told["behind"], "reduced=True")
        assert_names(told["promised"], "finalize_model_grads()", "reduced=False")
        assert relative(told["own"], wanted[rank]) < BOUND
        assert relative(told["both"], torch.stack(wanted).sum(0) / 2) < BOUND
        assert_names(told["own then"], "reduced=False")


def over_some() -> dict[str, Any]:
    """A wrapper over two of four ranks, with and without word of the others."""
    first, second = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = first if dist.get_rank() % 2 == 0 else second
    model = DistributedDataParallel(llama.single(), process_group=mine)
    told = {"nothing": said(lambda: mf.FlexModel(model))}
    told["others"] = said(lambda: mf.FlexModel(model, pipeline_parallel_size=2))
    with mf.FlexModel(model, tensor_parallel_size=2) as flex:
        told["said"] = flex.session.mesh.describe()
    with mf.FlexModel(model, process_group=mine) as flex:
        told["group"] = flex.session.mesh.describe()
    return told


def test_a_wrapper_over_some_ranks() -> None:
    for rank, told in enumerate(run(4, over_some)):
        assert_names(told["nothing"], [rank % 2, rank % 2 + 2], "4")
        assert_names(told["nothing"], "tensor_parallel_size")
        assert_names(told["others"], "DistributedDataParallel", "pp=2 x dp=2")
        assert told["said"] == "dp=2 x tp=2"
        assert told["group"] == "dp=2"


def unheard() -> dict[str, str]:
    """Freezing before a static graph's first step, and a parameter that a wrapper leaves out."""
    static = DistributedDataParallel(llama.single(), static_graph=True)
    with mf.FlexModel(static) as flex:
        told = {"static": said(flex.freeze)}
    model = llama.single()
    model.norm = DistributedDataParallel(model.norm)  # type: ignore[assignment]
    tokens, labels = llama.batch(dist.get_rank())
    with mf.FlexModel(model) as flex:
        told["names"] = " ".join(s.name for s in flex.session.adapter.parameters())
        llama.loss_of(model(tokens), labels).backward()
        told["left out"] = said(lambda: flex.get_module_parameter(NAME, gradient=True))
    return told


def test_what_a_wrapper_does_not_do() -> None:
    told = run(2, unheard)[0]
    assert_names(told["static"], "DistributedDataParallel(static_graph=True)")
    assert_names(told["names"], "norm.weight")
    assert_names(told["left out"], "tok_embeddings.weight")


# -- communication hooks, sharded optimizers ---------------------------------------------------------


def under(kind: str) -> dict[str, Any]:
    """What is said of gradients behind a step whose communication hook reduces them, and these."""
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    model, power = DistributedDataParallel(llama.single()), powerSGD_hook.PowerSGDState
    local = PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    registered: dict[str, tuple[Any, Any]] = {
        "averages": (None, default_hooks.allreduce_hook),
        "compresses": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),  # type: ignore[arg-type]
        "compresses by rank": (power(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
        "does nothing": (None, debugging_hooks.noop_hook),
        "averages in subgroups": (local, post_localSGD_hook),
    }
    model.register_comm_hook(*registered[kind])
    rank = dist.get_rank()
    told: dict[str, Any] = {}
    with mf.FlexModel(model) as flex:

        def read(reduced: bool | None = None) -> Tensor | None:
            return flex.get_module_parameter(NAME, gradient=True, reduced=reduced, everywhere=True)

        for step in range(3):
            model.zero_grad()
            tokens, labels = llama.batch(rank)
            llama.loss_of(model(tokens), labels).backward()
            told[f"error {step}"] = said(read)
            if told[f"error {step}"]:
                told[f"promised {step}"], told[f"own {step}"] = said(lambda: read(True)), read(False)
            else:
                told[f"mean {step}"] = read()
    return told


@pytest.mark.parametrize(
    ("kind", "bound", "knows"),
    [
        ("averages", BOUND, True),
        ("compresses", 1e-2, True),
        ("compresses by rank", 2.0, True),
        ("does nothing", 0.0, False),
        ("averages in subgroups", BOUND, False),
    ],
)
def test_gradients_that_a_communication_hook_reduces(kind: str, bound: float, knows: bool) -> None:
    """Only of hooks that are known to average, gradients are given as averages."""
    wanted = [t["parameter gradients"][NAME] for t in llama.truth(2, (), ())]
    for rank, told in enumerate(run(2, under, kind)):
        for step in (0, 2):  # between these post_localSGD_hook changes over
            if knows or (step == 0 and kind == "averages in subgroups"):
                assert relative(told[f"mean {step}"], torch.stack(wanted).mean(0)) < bound
                continue
            assert "_hook" in told[f"error {step}"]
            assert_names(told[f"error {step}"], "reduced=True")
            assert_names(told[f"promised {step}"], "finalize_model_grads()", "reduced=False")
            assert relative(told[f"own {step}"], wanted[rank]) < BOUND


def sharded_steps(kind: str, hooked: bool) -> dict[str, Tensor]:
    """Five steps of an optimizer whose state is sharded over the replicas, with hooks and without."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(llama.single())
    optimizer: Any
    if kind == "OSS":
        oss: Any = pytest.importorskip("fairscale.optim").OSS
        changes.setattr(oss, "step", oss.step)  # into which torch puts a profiler's record when one is made
        optimizer = oss(model.parameters(), optim=torch.optim.AdamW, lr=0.02)
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.02, parameters_as_bucket_view=kind.endswith("views")
        )
    flex = mf.FlexModel(model)
    if hooked:
        flex.register_forward_hook(mf.HookFunction("layers.1:output"))
        flex.verify(5)
    out = {}
    for step in range(5):
        optimizer.zero_grad()
        tokens, labels = llama.batch(10 * step + dist.get_rank())
        llama.loss_of(model(tokens), labels).backward()
        whole = flex.get_module_parameter(NAME, gradient=True, everywhere=True)
        assert whole is not None
        out[f"gradient {step}"] = whole.clone()
        optimizer.step()
    out |= {n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)}
    flex.restore()
    return out


def one_steps() -> dict[str, Tensor]:
    """The same on one process."""
    model = llama.single()
    optimizer, out = torch.optim.AdamW(model.parameters(), lr=0.02), {}
    for step in range(5):
        optimizer.zero_grad()
        for replica in range(2):
            tokens, labels = llama.batch(10 * step + replica)
            (llama.loss_of(model(tokens), labels) / 2).backward()
        out[f"gradient {step}"] = model.get_parameter(NAME).grad.clone()  # type: ignore[union-attr]
        optimizer.step()
    return out | {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["ZeRO", "ZeRO, views", "OSS"])
def test_optimizers_whose_state_is_sharded(kind: str) -> None:
    wanted = one_steps()
    for hooked in (False, True):
        for found in run(2, sharded_steps, kind, hooked):
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert relative(found[name], tensor) < 10 * BOUND, name


# -- Megatron's model in it ----------------------------------------------------------------------------


def megatron(case: gpt.Case, state: dict[str, Tensor]) -> dict[str, Any]:
    """Gradients of a step of Megatron's schedule over a model in torch's wrapper."""
    from megatron.core import parallel_state

    chunks = ranks.start(case)
    group = parallel_state.get_data_parallel_group()
    wrapped = [DistributedDataParallel(c, process_group=group) for c in chunks]
    for wrapper, chunk in zip(wrapped, chunks, strict=True):
        wrapper.config = chunk.config
    with mf.FlexModel(wrapped) as flex:
        for name, value in state.items():
            flex.set_module_parameter(name, value)
        gpt.step(case, wrapped, flex.session.mesh["dp"].coord)
        return dict(flex.named_full_parameters(gradients=True, everywhere=True))


def one(case: gpt.Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and gradients of one process."""
    chunks = ranks.start(case.single())
    state = gpt.randomize(chunks[0])
    gpt.step(case.single(), chunks, 0)
    return state, {n: p.grad for n, p in gpt.global_names(chunks[0]) if p.grad is not None}


def test_a_model_of_megatrons_in_torchs_wrapper() -> None:
    case = gpt.Case("torch's DDP", tp=2, dp=2, layers=1)
    state, wanted = truths.once(one, case)
    for found in run(4, megatron, case, state):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert relative(tensor, wanted[name]) < BOUND, name
