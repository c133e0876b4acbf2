"""verify() finds copies of parameters and buffers that differ between ranks, whoever calls the model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.distributed.test_deepspeed import initialize
from tests.distributed.test_pipelining import schedule_of, stepping
from tests.support import gpt, handmade, llama, ranks, wrapping
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.training import Trainer


class Model(nn.Module):
    """A layer, a norm with statistics of a rank's own samples, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)) * self.table


def spoil(model: nn.Module, what: str) -> None:
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    with torch.no_grad():
        if what == "all":
            for parameter in model.parameters():
                parameter.add_(0.25 * rank)
        elif what == "one" and last:
            model.get_parameter("fc.bias")[-1] += 1e-6
        elif what == "buffer" and last:
            model.get_buffer("table")[0] = 1.0
        elif what == "own":
            model.get_buffer("scratch").fill_(rank)
            model.get_buffer("norm.running_mean").fill_(rank)


def wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    model = Model()
    if how == "DDP":
        return model, DistributedDataParallel(model, broadcast_buffers=False)
    if how.startswith("ZeRO"):
        return model, initialize(model, int(how[-1]))
    return model, model


def told(how: str, what: str) -> list[str]:
    """The errors of a verified call, by itself or in a scope, and of one behind it."""
    model, outside = wrapped(how)
    spoil(model, what)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    out = []
    for scope in (False, True):
        with mf.FlexModel(outside) as flex:
            flex.verify()
            for _ in range(2):
                try:
                    if scope:
                        with flex.step():
                            flex(x)
                    else:
                        flex(x)
                    out.append("")
                except mf.VerifyError as error:
                    out.append(str(error))
    return out


WORDS = {
    "all": (
        "4 findings: ",
        *(f"parameter {n} is not the same on all ranks along dp" for n in ("fc.weight", "norm.bias")),
        "(rank 0 and rank 1 and rank 2 differ)",
    ),
    "one": ("1 finding: parameter fc.bias", "along dp (ranks 0-1 and rank 2 differ)"),
    "buffer": ("1 finding: buffer table", "along dp (ranks 0-1 and rank 2 differ)"),
}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        *((how, what) for how in ("plain", "DDP") for what in ("none", "own", *WORDS)),
        *(("ZeRO-1", "all"), ("ZeRO-2", "one"), ("ZeRO-2", "own")),
    ],
)
def test_copies_over_data_parallel_ranks(how: str, what: str) -> None:
    if how.startswith("ZeRO") and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    for answer in run(3, told, how, what, alone=how.startswith("ZeRO")):
        for first, second in (answer[:2], answer[2:]):
            assert second == "", "verifying is over after a step"
            assert bool(first) is (what in WORDS)
            for word in WORDS.get(what, ()):
                assert word in first, first


def sharded(how: str, spoiled: bool) -> list[str]:
    """Two replicas of two shards each; what one rank holds of one parameter differs, or nothing."""
    model = wrapping.hybrid() if how == "FSDP1" else wrapping.full((2, 2))
    if spoiled and dist.get_rank() == 3:
        with torch.no_grad():
            for parameter in model.parameters():
                held: Any = parameter.to_local() if how == "FSDP2" else parameter
                held.view(-1)[:1].add_(1)
    out = []
    with mf.FlexModel(model) as flex:
        flex.verify()
        for _ in range(2):
            try:
                flex(llama.batch(0)[0])
                out.append("")
            except mf.VerifyError as error:
                out.append(str(error))
    return out


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("how", ["FSDP1", "FSDP2"])
def test_shards_of_which_replicas_have_copies(how: str, spoiled: bool) -> None:
    for first, second in run(4, sharded, how, spoiled):
        assert second == ""
        assert bool(first) is spoiled
        if spoiled:
            assert "tok_embeddings.weight" in first
            assert_names(first, "rank 1", "rank 3")


def cut() -> str:
    """Two replicas of two tensor parallel ranks each; one parameter of one rank differs."""
    model = handmade.parallel(2)
    if dist.get_rank() == 3:
        model.up.weight.data[0] += 1
    with mf.FlexModel(model, tensor_parallel_size=2) as flex:
        flex.verify()
        try:
            flex(handmade.batch(0))
        except mf.VerifyError as error:
            return str(error)
    return ""


def test_shards_are_compared_with_those_of_the_same_place() -> None:
    for said in run(4, cut):
        assert_names(said, "1 finding", "up.weight", "dp", "rank 1", "rank 3")


def uneven() -> list[str]:
    """Replicas that call the model unequally often, after the step that is verified."""
    with mf.FlexModel(Model()) as flex:
        flex.verify()
        return [str(flex(torch.ones(2, 4)).shape) for _ in range(1 + dist.get_rank())]


def test_replicas_need_not_be_called_equally_often() -> None:
    assert [len(a) for a in run(2, uneven)] == [1, 2]


# -- buffers of stages, and of Megatron's routers ------------------------------------------------------


def train(flex: mf.FlexModel, step: Callable[[], Any]) -> list[str]:
    """The errors of a verified step, and of one behind it."""
    flex.verify()
    out = []
    for _ in range(2):
        try:
            step()
            out.append("")
        except mf.VerifyError as error:
            out.append(str(error))
    return out


def staged(spoiled: bool) -> tuple[list[str], list[str]]:
    """Two stages of two replicas, each with a buffer; the errors and the buffer's name in the last stage."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    names: list[str] = []

    def wrap(module: nn.Module) -> nn.Module:
        layers = module.get_submodule("layers")
        name, layer = next(iter(layers.named_children()))
        layer.register_buffer("table", torch.arange(4.0))
        if spoiled and dist.get_rank() == 3:
            layer.get_buffer("table")[0] = 1.0
        names.append(f"layers.{name}.table")
        return DistributedDataParallel(
            module,
            process_group=mesh["dp"].get_group(),
            broadcast_buffers=False,
            find_unused_parameters=True,  # without which torch 2.13 stops after one microbatch
        )

    schedule = schedule_of("GPipe", 2, 1, mesh["pp"].get_group(), wrap=wrap)
    step, data = stepping(schedule, mesh["pp"].get_group()), llama.batch(0)
    with mf.FlexModel(schedule) as flex:
        return train(flex, lambda: step(*data)), names


@pytest.mark.parametrize("spoiled", [False, True])
def test_buffers_of_stages(spoiled: bool) -> None:
    answers = run(4, staged, spoiled)
    (name,) = answers[3][1]
    for (first, second), _ in answers:
        assert second == ""
        assert bool(first) is spoiled, first
        if spoiled:
            assert_names(first, "1 finding", name, "dp")
            assert_names(first, "rank 2", "rank 3")


def routed(case: gpt.Case, spoiled: bool) -> tuple[list[str], list[list[float]]]:
    """Errors of a step whose routers' biases differ, or not, behind one that has updated them; and these."""
    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    trainer = Trainer(case, chunks, rank)
    with mf.FlexModel(trainer.models) as flex:
        biases = {n: b for n, b in chunks[0].named_buffers() if n.endswith("expert_bias")}
        trainer.step()
        updated = [b.tolist() for b in biases.values()]
        unchanged = train(flex, trainer.step)
        if spoiled and rank == 1:
            biases["decoder.layers.1.mlp.router.expert_bias"][-1] += 1e-6
        return [*unchanged, *train(flex, trainer.step)], updated


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
def test_biases_of_routers(ep: int, spoiled: bool) -> None:
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    case = gpt.Case(f"bias ep{ep}", dp=2, ep=ep, experts=4, layers=2, extra=bias)
    for (*unchanged, first, second), updated in run(2, routed, case, spoiled):
        assert unchanged == ["", ""]
        assert len(updated) == 2
        assert all(any(values) for values in updated), "training has updated them"
        assert second == ""
        assert bool(first) is spoiled, first
        if spoiled:
            name = "decoder.layers.1.mlp.router.expert_bias"
            assert_names(first, "1 finding", name, "dp")
            assert_names(first, "rank 0", "rank 1")
