"""Models that the schedules of torch.distributed.pipelining run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from megatron_flex.adapters.pipelining import StageModules
from tests.support import llama, proof
from tests.support.messages import assert_names
from tests.support.pool import run

CPU = torch.device("cpu")


def stage_of(model: llama.Llama, index: int, stages: int) -> llama.Llama:
    """A part of the model, whose modules have the names that they have in the whole."""
    layers = list(model.layers)
    per = [layers[len(layers) * i // stages : len(layers) * (i + 1) // stages] for i in range(stages)]
    for name in layers:
        if name not in per[index]:
            del model.layers[name]
    if index > 0:
        model.tok_embeddings = None
    if index < stages - 1:
        model.norm = model.output = None
    return model


def schedule_of(
    kind: str,
    microbatches: int,
    chunks: int,
    group: Any = None,
    scale_grads: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Any:
    """This rank's schedule of the model in as many stages as ranks times chunks."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = ranks * chunks
    mine = [rank + i * ranks for i in range(chunks)]
    if kind in ("ZBVZeroBubble", "DualPipeV"):
        mine = [rank, count - 1 - rank]
    stages = [
        pipelining.PipelineStage(wrap(stage_of(llama.single(), i, count)), i, count, CPU, group=group)
        for i in mine
    ]
    made = get_schedule_class(kind)
    return made(stages if chunks > 1 else stages[0], microbatches, llama.loss_of, scale_grads=scale_grads)


def build(kind: str, microbatches: int = 2, chunks: int = 1) -> proof.Built:
    schedule = schedule_of(kind, microbatches, chunks)
    return proof.Built(schedule, stepping(schedule), microbatches=microbatches)


def stepping(schedule: Any, group: Any = None) -> Any:
    """A step of a schedule, whose loss the last stage's rank tells all."""
    stages = StageModules(schedule).stages

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = any(s.is_last for s in stages)
        first = any(s.is_first for s in stages)
        schedule.step(
            *([tokens] if first else []), target=labels if last else None, losses=losses if last else None
        )
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss, group=group)
        return loss

    return step


def replicated(wrapper: str, kind: str) -> proof.Built:
    """Two stages of two replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def wrap(module: nn.Module) -> nn.Module:
        if wrapper == "DDP":
            # Without looking for unused parameters torch 2.13 counts those of each microbatch, and stops.
            group = mesh["dp"].get_group()
            return DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
        from torch.distributed.fsdp import fully_shard

        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(module, mesh=mesh["dp"])

    schedule = schedule_of(kind, 2, 1, mesh["pp"].get_group(), wrap=wrap)
    step = stepping(schedule, mesh["pp"].get_group())
    return proof.Built(schedule, step, averaged=True, microbatches=2)


CASES = [
    ("pp2 GPipe", 2, "GPipe", 2, 1),
    ("pp2 1F1B", 2, "1F1B", 2, 1),
    ("pp2 interleaved (vpp2)", 2, "Interleaved1F1B", 2, 2),
]


@pytest.mark.parametrize(("case", "world", "kind", "microbatches", "chunks"), CASES)
def test_schedules(
    case: str, world: int, kind: str, microbatches: int, chunks: int, cells: list[Any]
) -> None:
    proof.judge(proof.compare("PyTorch", case, world, build, kind, microbatches, chunks), cells)


@pytest.mark.parametrize(("wrapper", "kind"), [("DDP", "GPipe"), ("FSDP2", "1F1B")])
def test_replicas_of_stages(wrapper: str, kind: str, cells: list[Any]) -> None:
    case = f"pp2 {kind} dp2 {wrapper}"
    proof.judge(proof.compare("PyTorch", case, 4, replicated, wrapper, kind), cells)


# -- what edits share, running without a loss ----------------------------------------------------------


def _save(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.early = inputs
    return inputs * 1.5


def _use(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.3 * save_ctx.early.flip(-1) + modules.probe(save_ctx.early)


FIRST, LAST = "tok_embeddings:output", "layers.2:output"


def shared(kind: str, chunks: int, scale_grads: bool) -> dict[str, Any]:
    schedule = schedule_of(kind, 2, chunks, scale_grads=scale_grads)
    step, data, out = stepping(schedule), llama.batch(0), {}
    hooks = [
        mf.HookFunction(FIRST, editing_function=_save, save=False),
        mf.HookFunction(LAST, editing_function=_use, save=False),
        mf.HookFunction("layers.1:output", hook_type="full_backward_pre", gradient_scale="loss"),
        mf.HookFunction("layers.0.attention.wq.weight", hook_type="tensor"),
    ]
    with mf.FlexModel(schedule) as flex:
        flex.register_trainable_module("probe", proof.probe())
        for hook in hooks:
            flex.session.hooks.add(hook)
        out["loss"] = step(*data)
        out["gradients"] = {n: t.clone() for n, t in flex.named_full_parameters(True, everywhere=True)}
        out["trained"] = {n: p.grad.clone() for n, p in flex.trainable_modules["probe"].named_parameters()}
        if flex.is_leader:
            keys = [(k.step, k.microbatch) for k in flex.output_dict["layers.1:output.grad"].keys]
            out["keys"] = keys
            out["read"] = {n: list(read) for n, read in flex.output_dict.items()}
    return out


@pytest.mark.parametrize(
    ("kind", "chunks", "scale_grads"),
    [("GPipe", 1, False), ("InterleavedZeroBubble", 2, True), ("ZBVZeroBubble", 2, True)],
)
def test_what_edits_share_goes_from_stage_to_stage(kind: str, chunks: int, scale_grads: bool) -> None:
    model, probe, data = llama.single(), proof.probe(), llama.batch(0)
    kept: dict[str, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        kept["early"] = tensor
        return tensor * 1.5

    llama.install(model, FIRST, save)
    llama.install(model, LAST, lambda t: t + 0.3 * kept["early"].flip(-1) + probe(kept["early"]))
    losses, seen, weights = [], [], []
    llama.install(model, "layers.1:output", lambda t: (t.register_hook(seen.append), t)[1])
    model.layers["0"].attention.wq.weight.register_hook(weights.append)
    for tokens, labels in zip(*(t.chunk(2) for t in data), strict=True):
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        losses.append(loss.detach())
    scale = 0.5 if scale_grads else 1.0
    for answer in run(2, shared, kind, chunks, scale_grads, timeout=60):
        torch.testing.assert_close(answer["loss"], torch.stack(losses).mean())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(answer["gradients"][name], parameter.grad * scale)
        for name, parameter in probe.named_parameters():
            torch.testing.assert_close(answer["trained"][name], parameter.grad * scale)
        if "keys" in answer:
            assert answer["keys"] == [(0, 0), (0, 1)]
            torch.testing.assert_close(answer["read"]["layers.1:output.grad"], seen)
            torch.testing.assert_close(answer["read"]["layers.0.attention.wq.weight.grad"], weights)


def running(kind: str, chunks: int) -> Any:
    schedule = schedule_of(kind, 2, chunks)
    step, data = stepping(schedule), llama.batch(0)
    before = step(*data)
    named = {id(stage): dict(vars(stage)) for stage in StageModules(schedule).stages}
    flex = mf.FlexModel(schedule)
    _, cache = flex.interp.run_with_cache(data[0], ["layers.1", "output"], microbatch_size=1)
    _, joint = flex.interp.run_with_cache(data[0], "layers.1")
    assert torch.equal(step(*data), before)
    assert flex.restore() is schedule
    assert all(vars(s).keys() == named[id(s)].keys() for s in StageModules(schedule).stages)
    assert "step" not in vars(schedule)
    return {n: cache[n] for n in cache}, joint["layers.1"], [s.name for s in mf.FlexModel(schedule).sites()]


@pytest.mark.parametrize(("kind", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_tokens_run_without_a_loss(kind: str, chunks: int) -> None:
    truth = llama.truth()[0]["values"]
    for cache, joint, names in run(2, running, kind, chunks, timeout=60):
        assert cache.keys() == {"layers.1:output", "output:output"}
        for name in cache:
            torch.testing.assert_close(cache[name], truth[name])
        torch.testing.assert_close(joint, truth["layers.1:output"])
        assert [n for n in names if n in llama.SITES] == sorted(llama.SITES, key=names.index)
        order = [n[7] for n in names if n.startswith("layers.")]
        assert order == sorted(order), "stages of all chunks are in the model's order"


def wrong() -> list[str]:
    from torch.distributed import pipelining

    said: list[str] = []

    def refused(what: Any, **options: Any) -> None:
        with pytest.raises(mf.FlexError) as caught:
            mf.FlexModel(what, **options)
        said.append(str(caught.value))

    schedule = schedule_of("GPipe", 2, 1)
    stages = StageModules(schedule).stages
    refused(stages[0])
    refused(stages)
    refused(schedule, pipeline_parallel_size=3)
    same = pipelining.PipelineStage(llama.single(), dist.get_rank(), 2, CPU)
    refused(pipelining.ScheduleGPipe(same, 2))
    for stage in stages:
        stage.submod.requires_grad_(False)
    with mf.FlexModel(schedule) as flex:
        flex.register_trainable_module("probe", proof.probe())
        flex.register_forward_hook(mf.HookFunction("layers.0", editing_function=proof._bias, save=False))
        with pytest.raises(mf.HookError) as caught:
            stepping(schedule)(*llama.batch(0))
    said.append(str(caught.value))
    return said


def test_what_cannot_be_followed_is_an_error() -> None:
    for said in run(2, wrong, timeout=60):
        assert_names(said[0], "PipelineStage")
        assert_names(said[1], "PipelineStages")
        assert "pipeline_parallel_size=3" in said[2]
        assert_names(said[3], "tok_embeddings")
        assert_names(said[4], 0, "freeze()")


def frozen(early: bool) -> dict[str, Tensor]:
    schedule = schedule_of("1F1B", 2, 1)
    step, data = stepping(schedule), llama.batch(0)
    if not early:
        step(*data)
    with mf.FlexModel(schedule) as flex:
        flex.freeze()
        flex.register_trainable_module("probe", proof.probe())
        flex.register_forward_hook(mf.HookFunction("layers.0", editing_function=proof._bias, save=False))
        step(*data)
        return {n: p.grad.clone() for n, p in flex.trainable_modules["probe"].named_parameters()}


@pytest.mark.parametrize("early", [True, False])
def test_a_module_is_trained_in_a_frozen_model(early: bool) -> None:
    model, probe = llama.single(), proof.probe()
    llama.install(model, "layers.0:output", lambda t: t + probe(t))
    tokens, labels = llama.batch(0)
    llama.loss_of(model(tokens), labels).backward()
    for answer in run(2, frozen, early, timeout=60):
        for name, parameter in probe.named_parameters():
            torch.testing.assert_close(answer[name], parameter.grad)


def traced() -> proof.Built:
    """Split by torch's tracer, which keeps names."""
    from torch.distributed import pipelining

    points = {"layers.1": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(llama.single(), (llama.batch(0)[0][:1],), split_spec=points)
    stage = pipe.build_stage(dist.get_rank(), CPU)
    schedule = pipelining.ScheduleGPipe(stage, 2, llama.loss_of)
    return proof.Built(schedule, stepping(schedule), microbatches=2)


def test_a_traced_model(cells: list[Any]) -> None:
    proof.judge(proof.compare("PyTorch", "pp2 GPipe, traced", 2, traced, alone=True), cells)


# -- three dims -----------------------------------------------------------------------------------------


def threefold(sequence: bool) -> proof.Built:
    """Two stages of two replicas of two tensor parallel shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.distributed.test_dtensor import Plan, styles

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))

    def wrap(module: Any) -> nn.Module:
        have = {name for name, _ in module.named_modules()}
        plan = {n: s for n, s in styles(Plan(dp=2, sequence=sequence)).items() if n in have}
        parallelize_module(module, mesh["tp"], plan)
        for layer in module.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(module, mesh=mesh["dp"])

    schedule = schedule_of("1F1B", 2, 1, mesh["pp"].get_group(), wrap=wrap)
    step = stepping(schedule, mesh["pp"].get_group())
    return proof.Built(schedule, step, averaged=True, microbatches=2)


@pytest.mark.parametrize("sequence", [False, True])
def test_three_dims(sequence: bool, cells: list[Any]) -> None:
    case = "pp2 1F1B x FSDP2 dp2 x DTensor tp2" + (" sp" if sequence else "")
    proof.judge(proof.compare("PyTorch", case, 8, threefold, sequence), cells)
