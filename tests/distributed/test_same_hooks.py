"""The same hook code, unchanged, on one LLaMA-like model under every framework: the same `output_dict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.distributed import test_dtensor
from tests.distributed.matrix import Cell, judge, relative
from tests.support import llama, llama_fairscale, proof, same, sharded_ddp, wrapping
from tests.support.pool import run_alone as run  # frameworks with groups of their own

SECTION = "The same hooks, framework by framework"
SITES = tuple(s for s in llama.SITES if not s.endswith("act:output"))  # which Megatron has fused away
EDITED = ("layers.0:output", "layers.1.feed_forward.w2:input")
PROBED = "layers.1:output"


def stir(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """An edit that no shard can do by itself: features see each other, and the mean of all."""
    return inputs + 0.1 * inputs.flip(-1) * inputs.mean()


def steer(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


def hooks(name: Callable[[str], str]) -> list[mf.HookFunction]:
    """What every framework's model gets; `name` is the name map."""
    return [
        *(mf.HookFunction(name(site)) for site in SITES),
        *(mf.HookFunction(name(site), hook_type="tensor") for site in SITES),
        *(mf.HookFunction(name(site), editing_function=stir, save=False) for site in EDITED),
        mf.HookFunction(name(PROBED), editing_function=steer, save=False),
    ]


def single() -> proof.Built:
    return wrapping.built(llama.single())


def ddp() -> proof.Built:
    return wrapping.built(DistributedDataParallel(llama.single()))


def fsdp1() -> proof.Built:
    return wrapping.built(wrapping.flat())


def fsdp2() -> proof.Built:
    return wrapping.built(wrapping.full((2,)))


def dtensor(tp: int, dp: int) -> proof.Built:
    plan = test_dtensor.Plan(tp, dp, wrapper="FSDP2" if dp > 1 else "")
    return wrapping.built(test_dtensor.parallel(plan))


def fairscale() -> proof.Built:
    llama_fairscale.initialize(2)
    return wrapping.built(llama_fairscale.model())


def fairscale_replicas() -> proof.Built:
    return wrapping.built(sharded_ddp.wrapped(llama.single())[0])


def megatron(case: str) -> proof.Built:
    chunks = same.build(case)
    return proof.Built(
        chunks, lambda *data: same.step(chunks, *data), name=same.megatron, whole=same.batch_first
    )


def read(build: proof.Build, *args: Any) -> dict[str, Any]:
    """One rank's `output_dict` after one step on the same batch, and the trained module's gradients."""
    built = build(*args)
    with mf.attach(built.model, hooks(built.name), **built.options) as flex:
        flex.register_trainable_module("probe", proof.probe())
        built.step(*llama.batch(0))
        names = {built.name(site): site for site in SITES}
        found = {}
        for name, tensors in flex.output_dict.items():
            (tensor,) = tensors
            path, grad = (name[: -len(".grad")], ".grad") if name.endswith(".grad") else (name, "")
            found[names[path] + grad] = built.whole(names[path], tensor)
        trained = {f"probe.{n}": p.grad for n, p in flex.trainable_modules["probe"].named_parameters()}
        return {"leader": flex.is_leader, "read": found, "trained": trained}


def truth() -> dict[str, Tensor]:
    """The same in one process by torch's own hooks: values before edits, gradients of what leaves them."""
    model, probe, out = llama.single(), proof.probe(), {}

    def keep(site: str, tensor: Tensor) -> Tensor:
        out[site] = tensor.detach().clone()
        return tensor

    def follow(site: str, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.register_hook(lambda g: out.update({f"{site}.grad": g.clone()}))
        return tensor

    for site in SITES:
        llama.install(model, site, lambda t, s=site: keep(s, t))
    for site in EDITED:
        llama.install(model, site, lambda t: stir(None, t, None, None))
    llama.install(model, PROBED, lambda t: t + probe(t))
    for site in SITES:
        llama.install(model, site, lambda t, s=site: follow(s, t))
    tokens, labels = llama.batch(0)
    llama.loss_of(model(tokens), labels).backward()
    out.update({f"probe.{n}": p.grad for n, p in probe.named_parameters()})
    return out


FRAMEWORKS: dict[str, tuple[int, proof.Build, tuple[Any, ...], tuple[str, ...]]] = {
    "one process": (1, single, (), ()),
    "Megatron tp2": (2, megatron, ("tp2",), ("megatron.core",)),
    "Megatron tp2 pp2": (4, megatron, ("tp2 pp2",), ("megatron.core",)),
    "fairscale mp2": (2, fairscale, (), ("fairscale",)),
    "fairscale ShardedDataParallel dp2": (2, fairscale_replicas, (), ("fairscale",)),
    "DTensor tp2": (2, dtensor, (2, 1), ()),
    "DTensor tp2, FSDP2 dp2": (4, dtensor, (2, 2), ()),
    "DDP dp2": (2, ddp, (), ()),
    "FSDP1 dp2": (2, fsdp1, (), ()),
    "FSDP2 dp2": (2, fsdp2, (), ()),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_output_dict_is_that_of_one_process(framework: str, cells: list[Any]) -> None:
    world, build, args, packages = FRAMEWORKS[framework]
    for package in packages:
        pytest.importorskip(package)
    answers = run(world, read, build, *args, timeout=240)
    wanted = truth()
    found: list[Cell] = []
    leaders = [a for a in answers if a["leader"]]
    assert leaders
    for answer in answers:
        assert answer["read"].keys() == ({k for k in wanted if ":" in k} if answer["leader"] else set())
        for name, got in {**answer["read"], **answer["trained"]}.items():
            gradient = name.endswith(".grad") or name.startswith("probe.")
            error = relative(got.detach(), wanted[name].detach())
            site, check = name.removesuffix(".grad"), "gradient" if gradient else "value"
            found.append(Cell(framework, site, check, error, model=SECTION))
    judge(found, cells)
