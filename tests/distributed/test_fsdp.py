"""Models in PyTorch's FullyShardedDataParallel and under its `fully_shard`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import llama, proof, uneven, wrapping
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

BOUND = 1e-5


def flat(original: bool) -> proof.Built:
    return wrapping.built(wrapping.flat(original=original))


def hybrid() -> proof.Built:
    return wrapping.built(wrapping.hybrid())


def full(shape: tuple[int, ...], options: dict[str, Any]) -> proof.Built:
    return wrapping.built(wrapping.full(shape, **options))


def recomputed(kind: str) -> proof.Built:
    """Recomputation inside FSDP1's wrappers, and inside modules that FSDP2 shards."""
    if kind == "FSDP1":
        return wrapping.built(wrapping.recomputed(wrapping.flat()))
    return wrapping.built(wrapping.full((2,), wrapping.recomputed(llama.single())))


CASES = {
    "FSDP1 dp2": (2, flat, True),
    "FSDP1 dp2, flat parameters only": (2, flat, False),
    "FSDP1 hybrid 2x2": (4, hybrid),
    "FSDP2 dp2": (2, full, (2,), {}),
    "FSDP2 dp4, not resharded after forward": (4, full, (4,), {"reshard_after_forward": False}),
    "HSDP 2x2": (4, full, (2, 2), {}),
    "FSDP1 dp2, recomputed": (2, recomputed, "FSDP1"),
    "FSDP2 dp2, recomputed": (2, recomputed, "FSDP2"),
}


@pytest.mark.parametrize("case", CASES)
def test_against_one_process(case: str, cells: list[Any]) -> None:
    world, build, *args = CASES[case]
    proof.judge(
        proof.compare("PyTorch", case, world, build, *args, sites=wrapping.FEW, edits=wrapping.FEW[2:3]),
        cells,
    )


# -- all replicas' samples together --------------------------------------------------------------------

SITE = "layers.1:output"


def mixed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return llama.mixed(inputs)


def together() -> dict[str, Any]:
    """A site of both replicas' samples, read and edited."""
    model = wrapping.full((2,))
    tokens, labels = llama.batch(dist.get_rank())
    out: dict[str, Any] = {}
    with mf.FlexModel(model, gather_data_parallel=True) as flex:
        flex.register_forward_hook(mf.HookFunction(SITE, editing_function=mixed))
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        out["read"] = flex.output_dict[SITE][0] if flex.is_leader else None
        out["loss"] = loss.detach()
        out["gradients"] = dict(flex.named_full_parameters(gradients=True, everywhere=True))
    return out


def test_replicas_gathered() -> None:
    tokens, labels = zip(llama.batch(0), llama.batch(1), strict=True)
    model, seen = llama.single(), []

    def visit(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return llama.mixed(tensor)

    llama.install(model, SITE, visit)
    logits = model(torch.cat(tokens)).chunk(2)
    losses = [llama.loss_of(out, label) for out, label in zip(logits, labels, strict=True)]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    for rank, told in enumerate(run(2, together)):
        assert (told["read"] is not None) == (rank == 0)
        if rank == 0:
            assert relative(told["read"], seen[0]) < BOUND
        assert relative(told["loss"], losses[rank].detach()) < BOUND
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(told["gradients"][name], parameter.grad) < BOUND, name


# -- mixed precision -----------------------------------------------------------------------------------


def half() -> dict[str, Any]:
    """bfloat16 while it runs, fp32 where parameters are kept and gradients averaged."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrapping.full((2,), uneven.Uneven(), mp_policy=policy)
    with mf.FlexModel(model) as flex:
        flex.register_forward_hook(mf.HookFunction("frozen:output"))
        model(uneven.batch(dist.get_rank())).float().square().mean().backward()
        out: dict[str, Any] = {"read": flex.output_dict["frozen:output"][0]}
        out["gradients"] = dict(flex.named_full_parameters(gradients=True, everywhere=True))
        out["parameters"] = dict(flex.named_full_parameters(everywhere=True))
    return out


def test_mixed_precision() -> None:
    seen: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {}
    for replica in range(2):
        model = uneven.Uneven().bfloat16()
        llama.install(model, "frozen:output", lambda t: seen.append(t.detach()) or t)  # type: ignore[func-returns-value]
        model(uneven.batch(replica).bfloat16()).float().square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(name, []).append(parameter.grad.float())
    kept = dict(uneven.Uneven().named_parameters())
    for rank, told in enumerate(run(2, half)):
        assert torch.equal(told["read"], seen[rank])
        assert told["gradients"].keys() == gradients.keys()
        for name, found in told["gradients"].items():
            assert found.dtype == torch.float32
            assert relative(found, torch.stack(gradients[name]).mean(0)) < BOUND, name
        assert all(torch.equal(t, kept[n]) for n, t in told["parameters"].items())


# -- communication hooks -------------------------------------------------------------------------------

NAME = "layers.1.attention.wq.weight"


def first_shard(state: Any, grad: Tensor, output: Tensor) -> None:
    """A communication hook that sends nothing: each rank keeps what it has of its own shard."""
    output.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


def nothing(state: Any, grad: Tensor) -> None:
    """Likewise where gradients are not sharded."""


def under(kind: str, sharded: bool) -> dict[str, Any]:
    """What is said of gradients behind a step whose communication hook reduces them, and these."""
    from torch.distributed.algorithms._comm_hooks import default_hooks
    from torch.distributed.fsdp import ShardingStrategy

    strategy = ShardingStrategy.FULL_SHARD if sharded else ShardingStrategy.NO_SHARD
    model: Any = wrapping.flat(sharding_strategy=strategy)
    everyone, alone = dist.group.WORLD, dist.new_subgroups(1)[0]
    average: Any = default_hooks.reduce_scatter_hook if sharded else default_hooks.allreduce_hook
    registered: dict[str, tuple[Any, Any]] = {
        "averages": (default_hooks.DefaultState(everyone), average),
        "averages, bound": (default_hooks.DefaultState(everyone), partial(average)),
        "compresses": (default_hooks.LowPrecisionState(everyone), default_hooks.bf16_compress_hook),
        "does nothing": (None, first_shard if sharded else nothing),
        "averages in subgroups": (default_hooks.DefaultState(alone), average),
    }
    changes.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)  # which needs a GPU
    model.register_comm_hook(*registered[kind])
    told: dict[str, Any] = {}
    with mf.FlexModel(model) as flex:

        def read(name: str, reduced: bool | None = None) -> None:
            try:
                told[name] = flex.get_module_parameter(NAME, gradient=True, reduced=reduced, everywhere=True)
            except mf.FlexError as error:
                told[f"{name} error"] = str(error)

        tokens, labels = llama.batch(dist.get_rank())
        llama.loss_of(model(tokens), labels).backward()
        read("unsaid")
        read("promised", True)
        read("own", False)
    return told


@pytest.mark.parametrize(
    ("kind", "sharded", "bound", "why"),
    [
        *(("averages", sharded, BOUND, "") for sharded in (True, False)),
        ("averages, bound", True, BOUND, ""),
        ("compresses", True, 1e-2, ""),
        ("does nothing", True, 0.0, "first_shard"),
        ("does nothing", False, 0.0, "nothing"),
        ("averages in subgroups", False, 0.0, "allreduce_hook"),
    ],
)
def test_gradients_that_a_communication_hook_reduces(
    kind: str, sharded: bool, bound: float, why: str
) -> None:
    """Only of hooks that are known to average, gradients are given as averages."""
    wanted = [t["parameter gradients"][NAME] for t in llama.truth(2, (), ())]
    for rank, told in enumerate(run(2, under, kind, sharded)):
        if not why:
            for name in ("unsaid", "promised"):
                assert relative(told[name], torch.stack(wanted).mean(0)) < bound, name
            continue
        assert_names(told["unsaid error"], why)
        assert_names(told["unsaid error"], "reduced=True")
        if sharded:
            assert relative(told["promised"], torch.stack(wanted).mean(0)) > 0.1, "as the person promised"
            assert_names(told["own error"], "FullyShardedDataParallel", "reduced=True")
        else:
            assert_names(told["promised error"], "finalize_model_grads()", "reduced=False")
            assert relative(told["own"], wanted[rank]) < BOUND
