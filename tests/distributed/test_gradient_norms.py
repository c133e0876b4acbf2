"""verify() holds the reported gradient norm against the full gradients, and names what is counted wrongly."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import test_deepspeed
from tests.support import llama, llama_fairscale, proof, ranks, wrapped
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

Spoil = Callable[[list[nn.Module]], None]
TP = Case("tp2 sp", tp=2, sp=True, layers=2)


def verified(case: Case, settings: dict[str, Any], spoil: Spoil) -> list[str]:
    """What verify() says of the norms of two steps of Megatron's optimizer, and of those after `spoil`."""
    chunks = wrapped.ddp(ranks.start(case), **settings)
    distributed = bool(settings.get("use_distributed_optimizer"))
    out = []
    for act in (nothing, spoil):
        act(chunks)
        out.append(wrapped.verify_steps(case, chunks, distributed))
    return out


def nothing(chunks: list[nn.Module]) -> None:
    pass


DISTRIBUTED = {"use_distributed_optimizer": True}
CASES = [
    pytest.param(TP, {}, id="tp2 sp"),
    pytest.param(
        Case("tp2 dp2", tp=2, dp=2, layers=2, microbatches=1), DISTRIBUTED, id="tp2 dp2 distributed"
    ),
    pytest.param(Case("tied, vpp", tp=2, pp=2, vpp=2, tied=True, layers=4), {}, id="tied tp2 pp2 vpp2"),
    pytest.param(
        Case("experts", tp=2, sp=True, dp=2, ep=2, etp=2, experts=4, layers=2), {}, id="tp2 sp dp2 ep2 etp2"
    ),
    pytest.param(
        Case("experts cp", cp=2, dp=2, ep=2, experts=4, layers=2), DISTRIBUTED, id="cp2 dp2 ep2 distributed"
    ),
    pytest.param(Case("tp4 of 2 groups", tp=4, groups=2, layers=2), {}, id="tp4 of 2 key heads"),
]


def test_an_attention_sink_is_counted_on_one_rank() -> None:
    """Megatron 0.19 shards the sinks by head, and marks them as copies; their share of the norm is small."""
    case = Case("sinks tp2", tp=2, layers=2, extra={"softmax_type": "learnable"})
    for clean, again in run(2, verified, case, {}, nothing):
        for text in (clean, again):
            assert_names(text, "decoder.layers.0.self_attention.core_attention.softmax_offset", 0.5)


def count_norms_twice(chunks: list[nn.Module]) -> None:
    """Norm weights that every tensor parallel rank counts: Megatron takes them for shards."""
    for name, parameter in (found for chunk in chunks for found in chunk.named_parameters()):
        if "layernorm" in name:
            vars(parameter)["tensor_model_parallel"] = True


def count_first_rank_only(chunks: list[nn.Module]) -> None:
    """Weights of fc1 that Megatron takes for copies."""
    for name, parameter in (found for chunk in chunks for found in chunk.named_parameters()):
        if "linear_fc1.weight" in name:
            vars(parameter)["tensor_model_parallel"] = False


def count_not(chunks: list[nn.Module]) -> None:
    """A layer norm that Megatron takes for the copy of a weight on another stage."""
    for name, parameter in (found for chunk in chunks for found in chunk.named_parameters()):
        if "final_layernorm" in name:
            vars(parameter)["shared"] = True


@pytest.mark.parametrize(
    ("spoil", "settings", "words"),
    [
        (count_norms_twice, {}, ["decoder.layers.0.input_layernorm.weight", 2]),
        (count_norms_twice, DISTRIBUTED, ["decoder.layers.0.input_layernorm.weight", 2]),
        (count_first_rank_only, {}, ["decoder.layers.0.mlp.linear_fc1.weight", 0.5]),
    ],
    ids=["copies counted twice", "the same, distributed", "shards of one rank"],
)
def test_a_parameter_that_is_counted_wrongly_is_named(
    spoil: Spoil, settings: dict[str, Any], words: list[Any]
) -> None:
    for clean, text in run(2, verified, TP, settings, spoil):
        assert clean == ""
        assert_names(text, *words)


@pytest.mark.parametrize(("case", "settings"), CASES)
def test_only_a_wrong_norm_has_a_finding(case: Case, settings: dict[str, Any]) -> None:
    for clean, text in run(case.world, verified, case, settings, count_not):
        assert clean == ""
        assert_names(text, "decoder.final_layernorm.weight")


# -- torch and DeepSpeed -------------------------------------------------------------------------------


def clipped(build: Callable[[], proof.Built]) -> str:
    """What verify() says of the norm by which a loop clips its gradients."""
    import megatron_flex as mf

    built = build()
    try:
        with mf.FlexModel(built.model, **built.options) as flex:
            flex.verify()
            built.run(flex, llama.batch(flex.session.mesh["dp"].coord))
            if hasattr(built.model, "get_global_grad_norm"):
                built.model.step()
            else:
                torch.nn.utils.clip_grad_norm_(built.model.parameters(), 1e-3)
    except mf.VerifyError as error:
        return str(error)
    return ""


def of_sharded_replicas() -> proof.Built:
    model = llama.single()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return proof.Built(
        model, lambda tokens, labels: _backward(llama.loss_of(model(tokens), labels)), averaged=True
    )


def of_fairscale() -> proof.Built:
    """Clipped by torch's function, which sees the shards of one rank."""
    llama_fairscale.initialize(2)
    model = llama_fairscale.model()
    llama_fairscale.load(model, llama.single().state_dict())
    return proof.Built(model, lambda tokens, labels: _backward(llama.loss_of(model(tokens), labels)))


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def of_replicas() -> proof.Built:
    model = DistributedDataParallel(llama.single())
    return proof.Built(
        model, lambda tokens, labels: _backward(llama.loss_of(model(tokens), labels)), averaged=True
    )


def of_zero() -> proof.Built:
    return test_deepspeed.build(2)


@pytest.mark.parametrize("build", [of_replicas, of_sharded_replicas], ids=["DDP", "FSDP2"])
def test_a_norm_of_torch(build: Callable[[], proof.Built]) -> None:
    assert run(2, clipped, build) == [""] * 2


# DeepSpeed is not imported in this process, as it replaces functions of torch: importorskip would.
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_norm_of_deepspeed() -> None:
    assert run(2, clipped, of_zero, alone=True) == [""] * 2


def test_a_loop_that_clips_its_shards_alone_is_told() -> None:
    """Each rank clips by another norm, so that copies of weights drift apart."""
    pytest.importorskip("fairscale")
    for text in run(2, clipped, of_fairscale):
        assert_names(text, "rank 0", "rank 1")
