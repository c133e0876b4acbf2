"""The same dump of one LLaMA-like model under every framework: values, gradients and parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed import (
    test_accelerate,
    test_deepspeed,
    test_dtensor,
    test_fairscale,
    test_fairscale_pipe,
    test_pipelining,
)
from tests.distributed.matrix import Cell, greatest, judge, relative
from tests.distributed.test_same_hooks import ddp, fairscale_replicas, fsdp1, fsdp2, single
from tests.support import llama, proof, wrapping
from tests.support.pool import run

SECTION = "Dumps, framework by framework"
PARAMETERS = ("layers.1.attention.wq.weight", "layers.1.feed_forward.w2.weight", "norm.weight")
STEPS = 2


def dtensor(tp: int, dp: int, sequence: bool = False) -> proof.Built:
    plan = test_dtensor.Plan(tp, dp, sequence, wrapper="FSDP2" if dp > 1 else "")
    return wrapping.built(test_dtensor.parallel(plan))


def write(
    build: proof.Build, args: Sequence[Any], path: str, sites: Sequence[str], parameters: Sequence[str]
) -> dict[str, Any]:
    """What one rank's steps write."""
    built = build(*args)
    with mf.FlexModel(built.model, **built.options) as flex:
        replica = flex.session.mesh["dp"].coord
    data, scope = llama.batch(replica), built.microbatches == 1  # a schedule is a step as it is
    dump = mf.Dump(
        path, [built.name(s) for s in sites], gradients=True, parameters=list(parameters), order="blocks"
    )
    losses = []
    with mf.attach(built.model, dumps=dump, **built.options) as flex:
        for _ in range(STEPS):
            with flex.step() if scope else nullcontext():
                losses.append(built.step(*data).detach())
            proof.clear(built)
    losses.append(built.step(*data).detach())
    assert torch.equal(losses[0], losses[-1]), "a dump changes nothing"
    return {"replica": replica, "microbatches": built.microbatches, "averaged": built.averaged}


def compare(
    case: str,
    world: int,
    build: proof.Build,
    *args: Any,
    sites: Sequence[str] = llama.SITES,
    parameters: Sequence[str] = PARAMETERS,
    name: Callable[[str], str] = lambda site: site,
    alone: bool = False,
) -> list[Cell]:
    """All cells of one framework's dump; `alone` for one whose own state cannot be put back."""
    with tempfile.TemporaryDirectory() as path:
        given = build, args, path, list(sites), list(parameters)
        answers = run(world, write, *given, timeout=240, alone=alone)
        replicas = 1 + max(a["replica"] for a in answers)
        microbatches, averaged = answers[0]["microbatches"], answers[0]["averaged"]
        truth = llama.truth(replicas, sites, (), microbatches)
        found: list[Cell] = []

        def cell(site: str, check: str, got: Tensor, want: Tensor) -> None:
            assert len(got) == STEPS
            assert want.numel()
            error = greatest(relative(step, want.detach()) for step in got)
            found.append(Cell(case, site, check, error, model=SECTION))

        with mf.open_dump(path) as dump:
            assert dump.iterations == list(range(STEPS))
            for site in sites:
                array, back = dump[name(site)], dump[name(site) + ".grad"]
                assert array.dims[:2] == ("iteration", "sample")
                assert array.samples is not None
                assert array.samples.tolist() == list(range(replicas * llama.SAMPLES))
                cell(site, "dump", array.torch(), torch.cat([t["values"][site] for t in truth]))
                want = torch.cat([t["gradients"][site] for t in truth])  # of each microbatch's own loss
                cell(site, "dump of gradients", back.torch(), want)
            for parameter in parameters:
                got = dump.parameter(parameter).torch()
                cell(parameter, "dump of parameters", got, truth[0]["parameters"][parameter])
                theirs = torch.stack([t["parameter gradients"][parameter] for t in truth])
                want = theirs.mean(0) if averaged else theirs[0]
                cell(
                    parameter,
                    "dump of parameter gradients",
                    dump.parameter(parameter, gradient=True).torch(),
                    want,
                )
    return found


PIPED = ("tok_embeddings:output", "layers.0.attention.wq:output", "layers.1:output", "output:output")
FRAMEWORKS: dict[str, tuple[int, proof.Build, tuple[Any, ...], str]] = {
    "one process": (1, single, (), "torch"),
    "DDP dp2": (2, ddp, (), "torch"),
    "FSDP1 dp2": (2, fsdp1, (), "torch"),
    "FSDP2 dp2": (2, fsdp2, (), "torch"),
    "DTensor tp2 sp": (2, dtensor, (2, 1, True), "torch"),
    "DTensor tp2, FSDP2 dp2": (4, dtensor, (2, 2), "torch"),
    "fairscale mp2 dp2, DDP": (4, test_fairscale.build, (2, True), "fairscale"),
    "fairscale ShardedDataParallel dp2": (2, fairscale_replicas, (), "fairscale"),
    "pipelining pp2 GPipe": (2, test_pipelining.build, ("GPipe",), "torch"),
    "pipelining pp2 1F1B dp2, FSDP2": (4, test_pipelining.replicated, ("FSDP2", "1F1B"), "torch"),
    "DeepSpeed ZeRO-1 dp2": (2, test_deepspeed.build, (1,), "deepspeed"),
    "DeepSpeed ZeRO-3 dp2": (2, test_deepspeed.build, (3,), "deepspeed"),
    "accelerate, DDP dp2": (2, test_accelerate.build, ("DDP",), "accelerate"),
    "accelerate, FSDP2 dp2": (2, test_accelerate.build, ("FSDP2",), "accelerate"),
}


@pytest.mark.parametrize("case", FRAMEWORKS)
def test_the_dump_is_that_of_one_process(case: str, cells: list[Any]) -> None:
    world, build, args, package = FRAMEWORKS[case]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    judge(compare(case, world, build, *args, alone=package in ("accelerate", "deepspeed")), cells)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_fairscales_pipe(checkpoint: str, cells: list[Any], tmp_path: Path) -> None:
    """Microbatches of one process, whose samples come back in their order."""
    pytest.importorskip("fairscale")
    from fairscale.nn import Pipe

    chunks, places = test_fairscale_pipe.CHUNKS, test_fairscale_pipe.PLACES
    model = Pipe(
        test_fairscale_pipe.plain(), balance=[2, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint
    )
    values, gradients, _ = test_fairscale_pipe.truth(False)
    batch = test_fairscale_pipe.batch()
    dump = mf.Dump(tmp_path, list(places), gradients=True)
    with mf.attach(model, dumps=dump) as flex, flex.step():  # backward passes of recomputed parts are several
        model(batch).pow(2).sum().backward()
    found = []
    with mf.open_dump(tmp_path) as read:
        for place in places:
            for name, check, want in (
                (place, "dump", values[place]),
                (f"{place}.grad", "dump of gradients", gradients[place]),
            ):
                array = read[name]
                assert array.dims[:2] == ("iteration", "sample")
                error = relative(array.torch()[0], want)
                found.append(Cell(f"Pipe, {checkpoint} recomputed", place, check, error, model=SECTION))
    judge(found, cells)
