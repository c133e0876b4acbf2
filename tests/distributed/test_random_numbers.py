"""Random numbers of edits: those of one process with all microbatches, whatever the data parallel size."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

LAYERS = "decoder.layers"
WEIGHT = f"{LAYERS}.1.mlp.linear_fc2.weight"
Drawn = dict[str, list[Tensor]]  # what the edits drew in a step, by their name


@dataclass
class Draws:
    """Replaces the first entries of its tensor by random numbers of torch, numpy and Python; appends them."""

    seen: list[Tensor]

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        numbers = [
            *torch.randn(3).tolist(),
            *np.random.rand(3).tolist(),
            *(random.random() for _ in range(3)),
        ]
        self.seen.append(torch.tensor(numbers, dtype=inputs.dtype))
        return torch.cat([self.seen[-1], 0 * inputs.reshape(-1)[len(numbers) :]]).view(inputs.shape)


@dataclass
class Sees:
    """Appends what the edits before it have made."""

    seen: list[Tensor]

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        self.seen.append(inputs.detach().clone())
        return inputs


@dataclass(frozen=True, repr=False, eq=False)
class noise(mf.edits.noise):
    """The preset, on the gathered tensor; appends its result."""

    seen: Any = None

    def declare(self) -> mf.edits.EditTraits:
        return mf.edits.EditTraits(unsharded_dims="*", uses_random_numbers=True)

    def edit(self, inputs: Tensor, module: nn.Module | None, modules: nn.ModuleDict) -> Tensor:
        out = super().edit(inputs, module, modules)
        self.seen.append(out.detach().clone())
        return out


def ramp(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Distinct entries, so that the result of `resample` shows its permutation."""
    return torch.arange(inputs.numel(), dtype=inputs.dtype).view(inputs.shape) + 0 * inputs


def hooks(run_on: str) -> tuple[list[mf.HookFunction], Drawn]:
    seen: Drawn = {name: [] for name in ("noise", "resample", "user", "gradient", "weight")}

    def hook(place: str, function: Any, hook_type: Any = "forward", **more: Any) -> mf.HookFunction:
        place = place if place == WEIGHT else f"{LAYERS}.{place}"
        return mf.HookFunction(place, editing_function=function, hook_type=hook_type, save=False, **more)

    return [
        hook("0:mid", mf.edits.zero() | noise(0.1, seen=seen["noise"]), run=run_on),
        *(hook("0", f, run=run_on) for f in (ramp, mf.edits.resample("s"), Sees(seen["resample"]))),
        hook("1:mid", Draws(seen["user"]), run=run_on),
        hook("1", Draws(seen["gradient"]), "full_backward"),
        hook(WEIGHT, Draws(seen["weight"]), "tensor"),
    ], seen


def drawn(
    case: Case, iterations: list[int | None], run_on: str = "replicated", gathers: bool = False
) -> list[Drawn]:
    """What this rank's edits draw in steps of these iterations, after attaching to a new model."""
    chunks, out = ranks.start(case), []
    listed, seen = hooks(run_on)
    with mf.attach(chunks, listed, gather_data_parallel=gathers) as flex:
        for iteration in iterations:
            flex.session.clock.given_iteration = iteration
            gpt.step(case, chunks, ranks.mine(chunks), interleaved=True)
            out.append({name: [*tensors] for name, tensors in seen.items() if tensors})
            for tensors in seen.values():
                tensors.clear()
    return out


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def of_a_replica(case: Case, answers: list[list[Drawn]], replica: int) -> list[Drawn]:
    """What the ranks of a replica drew: the same, on those that run an edit."""
    merged: list[Drawn] = [{} for _ in answers[0]]
    for rank, answer in enumerate(answers):
        if rank // (case.tp * case.cp) % case.dp == replica:  # Megatron's order of ranks
            for step, more in zip(merged, answer, strict=True):
                for name, tensors in more.items():
                    assert equal(step.setdefault(name, tensors), tensors), name
    return merged


DP2 = Case("dp2", dp=2, layers=2)


@pytest.mark.parametrize(
    ("case", "run_on"),
    [
        (DP2, "replicated"),
        (replace(DP2, name="dp2 tp2", tp=2), "replicated"),
        (replace(DP2, name="dp2 tp2, on one rank", tp=2), "once"),
        (replace(DP2, name="dp2 pp2", pp=2), "replicated"),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_replicas_draw_what_one_process_draws(case: Case, run_on: str) -> None:
    (want,) = run(1, drawn, case.single(), [None, None], run_on)
    answers = run(case.world, drawn, case, [None, None], run_on)
    for replica in range(2):
        for every, got in zip(want, of_a_replica(case, answers, replica), strict=True):
            assert got.keys() == every.keys()
            assert len(got) == 5
            for name, tensors in every.items():
                assert equal(got[name], tensors[replica::2]), name
    numbers = [tuple(t.flatten().tolist()) for name in want[0] for step in want for t in step[name]]
    assert len(set(numbers)) == len(numbers) == 5 * 2 * 4, "every microbatch of every step draws its own"


def test_context_parallel_ranks_and_recomputation_draw_alike() -> None:
    case = Case("dp2 cp2, recomputed", dp=2, cp=2, layers=2, recompute=("full",))
    (want,) = run(1, drawn, case.single(), [None])
    answers = run(case.world, drawn, case, [None])
    for replica in range(2):
        (got,) = of_a_replica(case, answers, replica)
        for name in ("resample", "user"):
            once, twice = want[0][name][replica::2], got[name]
            assert len(twice) == 2 * len(once), "recomputation runs the edit again"
            assert {tuple(t.flatten().tolist()) for t in twice} == {tuple(t.flatten().tolist()) for t in once}


def test_a_resumed_run_goes_on_with_other_numbers() -> None:
    before, again = (run(2, drawn, DP2, iterations) for iterations in ([0, 1], [1]))
    for rank in range(2):
        (first, second), (resumed,) = before[rank], again[rank]
        for name, tensors in resumed.items():
            assert equal(tensors, second[name]), name
            assert not any(torch.equal(a, b) for a, b in zip(tensors, first[name], strict=True)), name


def test_runs_of_the_same_iteration_draw_apart() -> None:
    """A loop that does not count, and evaluations between two steps of training."""
    (steps,) = run(1, drawn, Case("one", layers=2), [3, 3, 4, 3])
    first, again, _, back = steps
    for name, tensors in first.items():
        assert not any(torch.equal(a, b) for a, b in zip(tensors, again[name], strict=True)), name
        assert equal(tensors, back[name]), name


def test_gathered_samples_are_drawn_for_together() -> None:
    """With the samples of all replicas in the full tensor all ranks draw alike, as one process with joint
    microbatches does."""
    (want,) = run(1, drawn, Case("joint", layers=2, joint=2), [None])
    answers = run(2, drawn, DP2, [None], "replicated", True)
    for answer in answers:
        for name in ("resample", "user", "gradient"):
            assert equal(answer[0][name], want[0][name]), name
    assert not equal(answers[0][0]["weight"], answers[1][0]["weight"]), "no samples are gathered there"


def of_experts(case: Case) -> list[Tensor]:
    """What an edit of the experts' output draws."""
    chunks, seen = ranks.start(case), []
    hook = mf.HookFunction(f"{LAYERS}.0.mlp.experts:output", editing_function=Draws(seen), save=False)
    with mf.attach(chunks, [hook]):
        gpt.step(case, chunks, ranks.mine(chunks), interleaved=True)
    return seen


def test_rows_of_experts_are_drawn_for_by_the_replica_of_their_tokens() -> None:
    case = Case("dp2 ep2", dp=2, ep=2, layers=1, experts=2)
    (want,) = run(1, of_experts, case.single())
    for replica, seen in enumerate(run(2, of_experts, case)):
        assert equal(seen, want[replica::2])


# -- models without a schedule -------------------------------------------------------------------------


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model)
    return DistributedDataParallel(model) if kind == "DDP" else model


def called(kind: str) -> list[list[Tensor]]:
    """What is drawn in two steps: one process runs the two replicas' batches as microbatches."""
    model, seen, steps = build(kind), [], []
    hook = mf.HookFunction("0", editing_function=Draws(seen), save=False)
    with mf.attach(model, [hook]) as flex:
        for _ in range(2):
            if kind == "one process":
                with flex.step():
                    for _ in range(2):
                        model(torch.ones(3, 4)).sum().backward()
            else:
                model(torch.ones(3, 4)).sum().backward()
            steps.append([*seen])
            seen.clear()
    return steps


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_replica_of_a_plain_model_is_one_microbatch(kind: str) -> None:
    (want,) = run(1, called, "one process")
    for replica, steps in enumerate(run(2, called, kind)):
        for got, every in zip(steps, want, strict=True):
            assert equal(got, every[replica : replica + 1])
