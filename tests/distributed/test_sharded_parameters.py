"""Parameters under PyTorch's wrappers: set, trained on, frozen, asked at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import llama, uneven, wrapping
from tests.support.messages import assert_names
from tests.support.pool import run

BOUND = 1e-5


def full(over: tuple[int, ...], model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("dp_replicate", "dp_shard")[-len(over) :]
    mesh = init_device_mesh("cpu", over, mesh_dim_names=names)
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(original: bool, model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.first = wrapped(model.first, original)
    if original:
        return wrapped(model, True)
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=False, ignored_modules=[model.frozen]
    )


def wrapped(module: nn.Module, original: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original)


def cut(dp: int, tp: int, wrapper: str, model: nn.Module) -> nn.Module:
    """Tensor parallel, and in a wrapper over data parallel ranks; five rows do not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    over = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, over["tp"], {"first": whole, "last": whole})
    if wrapper == "DDP":
        return DistributedDataParallel(model, device_mesh=over["dp"])
    return fully_shard(model, mesh=over["dp"]) if wrapper else model


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    over = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return replicate(model, mesh=over)


def averaged(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


WRAPPERS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {
    "DDP, gradients in buckets": (2, averaged),
    "FSDP1": (2, partial(flat, True)),
    "FSDP1, flat parameters only": (2, partial(flat, False)),
    "FSDP2, more ranks than rows": (4, partial(full, (4,))),
    "HSDP": (4, partial(full, (2, 2))),
    "replicate() of FSDP2": (2, replicated),
    "tp2": (2, partial(cut, 1, 2, "")),
    "FSDP2 dp2 x tp2": (4, partial(cut, 2, 2, "FSDP2")),
    "DDP dp2 x tp2": (4, partial(cut, 2, 2, "DDP")),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_training_goes_on(case: str) -> None:
    """What is set is what the optimizer goes on from, with the state that it has."""
    world, wrap = WRAPPERS[case]
    wanted = uneven.truth(world // 2 if "tp2" in case else world)
    for found in run(world, uneven.answer, wrap):
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert relative(tensor, wanted[name]) < BOUND, name


# -- the wrong moment ----------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """What an error says; empty if there is none."""
    try:
        call()
    except mf.FlexError as error:
        return str(error)
    return ""


def moments(kind: str) -> dict[str, str]:
    """What is said when parameters or gradients cannot be had."""
    model = wrapping.full((2,)) if kind == "FSDP2" else wrapping.flat(original=kind == "FSDP1")
    flex = mf.FlexModel(model)
    tokens, labels = llama.batch(dist.get_rank())
    name = "layers.1.attention.wq.weight"
    told = {"hook": said(lambda: flex.register_hook(mf.HookFunction(name, hook_type="tensor")))}
    told["names"] = " ".join(k.name for k in flex.session.adapter.parameters())
    inside: list[str] = []

    def ask(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        inside.append(said(flex.session.adapter.storage.wait_until_ready))
        return inputs

    hook = mf.HookFunction("layers.1.attention:output", editing_function=ask, save=False)
    flex.register_forward_hook(hook)
    if kind == "FSDP2":
        model.set_requires_gradient_sync(False)
        llama.loss_of(model(tokens), labels).backward()
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            llama.loss_of(model(tokens), labels).backward()
    told["inside"] = inside[0]
    told["not reduced"] = said(lambda: flex.get_module_parameter(name, gradient=True))
    llama.loss_of(model(tokens), labels).backward()
    told["reduced"] = said(lambda: flex.get_module_parameter(name, gradient=True))
    told["own"] = said(lambda: flex.get_module_parameter(name, gradient=True, reduced=False))
    flex.restore()
    return told


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP1, flat", "FSDP2"])
def test_at_the_wrong_moment(kind: str) -> None:
    told = run(2, moments, kind)[0]
    assert_names(told["hook"], "get_module_parameter(name, gradient=True)")
    assert "_fsdp" not in told["names"]
    assert "_flat" not in told["names"]
    assert_names(told["inside"], "fully_shard" if kind == "FSDP2" else "FullyShardedDataParallel")
    assert_names(told["not reduced"], "layers.1.attention.wq.weight")
    assert told["reduced"] == ""
    assert_names(told["own"], "reduced=False")


# -- freezing ------------------------------------------------------------------------------------------


def frozen(kind: str) -> dict[str, Any]:
    """A probe trained on a frozen model, before the model is trained again."""
    if kind == "FSDP2":
        model = wrapping.full((2,))
    elif kind.startswith("FSDP1"):
        model = wrapping.flat(original=kind == "FSDP1")
    else:
        model = DistributedDataParallel(llama.single(), find_unused_parameters=kind.endswith("unused"))
    tokens, labels = llama.batch(dist.get_rank())

    def step() -> None:
        llama.loss_of(model(tokens), labels).backward()

    with mf.FlexModel(model) as flex:
        step()
        model.zero_grad()
        flex.register_trainable_module("probe", nn.Linear(llama.HIDDEN, llama.HIDDEN))
        hook = mf.HookFunction("layers.1:output", editing_function=probed, save=False)
        flex.register_forward_hook(hook)
        flex.freeze()
        for _ in range(3):
            step()
        out: dict[str, Any] = {"frozen": dict(flex.named_full_parameters(gradients=True, everywhere=True))}
        out["probe"] = all(p.grad is not None for p in flex.trainable_modules["probe"].parameters())
        flex.unfreeze()
        flex.remove_hook(hook)
        for _ in range(2):
            model.zero_grad()
            step()
        out["thawed"] = dict(flex.named_full_parameters(gradients=True, everywhere=True))
    return out


def probed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


@pytest.mark.parametrize("kind", ["DDP", "DDP, unused", "FSDP1", "FSDP1, flat", "FSDP2"])
def test_freezing(kind: str) -> None:
    truth = llama.truth(2)
    for told in run(2, frozen, kind):
        assert not told["frozen"]
        assert told["probe"]
        for name, got in told["thawed"].items():
            want = torch.stack([t["parameter gradients"][name] for t in truth]).mean(0)
            assert relative(got, want) < BOUND, name
        assert told["thawed"].keys() == truth[0]["parameters"].keys()
