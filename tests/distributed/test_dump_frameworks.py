"""The same dump of one LLaMA-like model under every framework: values, gradients and parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.distributed import test_accelerate, test_deepspeed, test_dtensor, test_fairscale, test_pipelining
from tests.distributed.matrix import Cell, greatest, judge, relative
from tests.support import llama, proof, wrapping
from tests.support.pool import run

SECTION = "Dumps, framework by framework"
PARAMETERS = ("layers.1.attention.wq.weight", "layers.1.feed_forward.w2.weight", "norm.weight")
STEPS = 2


def plain() -> proof.Built:
    return wrapping.built(llama.single())


def ddp() -> proof.Built:
    return wrapping.built(DistributedDataParallel(llama.single()))


def fsdp1() -> proof.Built:
    return wrapping.built(wrapping.flat())


def fsdp2() -> proof.Built:
    return wrapping.built(wrapping.full((2,)))


def dtensor(tp: int, dp: int, sequence: bool = False) -> proof.Built:
    plan = test_dtensor.Plan(tp, dp, sequence, wrapper="FSDP2" if dp > 1 else "")
    return wrapping.built(test_dtensor.parallel(plan))


def write(build: proof.Build, args: Sequence[Any], path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What one rank's steps write."""
    built = build(*args)
    with mf.FlexModel(built.model, **built.options) as flex:
        replica = flex.session.mesh["dp"].coord
    clear = built.clear or (lambda: [c.zero_grad() for c in mf.adapters.opened(built.model)] and None)
    plain_loss = built.run(flex, llama.batch(replica))
    clear()
    sites = [built.name(s) for s in settings.pop("sites")]
    dump = mf.Dump(path, sites, gradients=True, order="blocks", **settings)
    with mf.attach(built.model, dumps=dump, **built.options) as flex:
        for _ in range(STEPS):
            loss = built.run(flex, llama.batch(replica))
            assert torch.equal(loss, plain_loss), "a dump changes nothing"
            clear()
    return {"replica": replica, "microbatches": built.microbatches, "averaged": built.averaged}
