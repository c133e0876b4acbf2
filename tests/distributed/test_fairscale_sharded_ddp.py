"""Models in fairscale's ShardedDataParallel with its OSS optimizer, against one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.statistics import Statistics
from tests.distributed import test_fairscale_pipe
from tests.distributed.matrix import relative
from tests.support import gpt, llama, measuring, proof, ranks, sharded_ddp, uneven, wrapping
from tests.support import llama_fairscale as parallel
from tests.support.messages import any_names, assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("fairscale")

BOUND = 1e-5


def build(tp: int, options: dict[str, Any]) -> proof.Built:
    if tp == 1:
        return wrapping.built(sharded_ddp.wrapped(llama.single(), **options)[0])
    from fairscale.nn.model_parallel.initialize import get_data_parallel_group

    parallel.initialize(tp)
    return wrapping.built(sharded_ddp.wrapped(parallel.model(), get_data_parallel_group(), **options)[0])


CASES = {
    "ShardedDataParallel dp1": (1, 1, {}),
    "ShardedDataParallel dp2": (1, 2, {}),
    "ShardedDataParallel dp2, without buckets": (1, 2, {"reduce_buffer_size": 0}),
    "ShardedDataParallel dp4, some in buckets": (1, 4, {"reduce_buffer_size": 3000}),
    "mp2 dp2, ShardedDataParallel": (2, 2, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_matrix(case: str, cells: list[Any]) -> None:
    tp, dp, options = CASES[case]
    full = case in ("ShardedDataParallel dp2", "mp2 dp2, ShardedDataParallel")
    sites = llama.SITES if full else wrapping.FEW
    edits = llama.EDITED if full else wrapping.FEW[2:3]
    found = proof.compare("fairscale", case, tp * dp, build, tp, options, sites=sites, edits=edits)
    proof.judge(found, cells)


# -- training ------------------------------------------------------------------------------------------

STEPS, PARTS, LR = 5, 2, 0.02
FROZEN = ("layers.0.attention.wk.weight", "norm.weight")
WATCHED = "layers.1.feed_forward.w2.weight"


def parts_of(replica: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """The microbatches of one replica in a step."""
    return [llama.batch(100 * step + 10 * part + replica) for part in range(PARTS)]


def frozen(model: nn.Module) -> nn.Module:
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    return model


def one_process(replicas: int, freezes: bool, path: str) -> dict[str, Any]:
    """Gradients and weights of one process on the whole batch, step by step; and a dump of them."""
    model = frozen(llama.single()) if freezes else llama.single()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    out: dict[str, Any] = {"gradients": [], "weights": []}
    with mf.attach(model, dumps=mf.Dump(path, parameters="**", gradients=True)) as flex:
        for step in range(STEPS):
            optimizer.zero_grad()
            with flex.step():
                for part in range(PARTS):
                    mine = [parts_of(replica, step)[part] for replica in range(replicas)]
                    tokens, labels = (torch.cat(t) for t in zip(*mine, strict=True))
                    (llama.loss_of(model(tokens), labels) / PARTS).backward()
            named = dict(model.named_parameters())
            out["gradients"].append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
            optimizer.step()
            out["weights"].append({n: p.detach().clone() for n, p in named.items()})
    return out


def same(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 1


def trained(tp: int, options: dict[str, Any], freezes: bool, path: str, hooked: bool) -> dict[str, Any]:
    """The same on a rank; `hooked`: with hooks, an idle edit, a dump, statistics, verification."""
    group = None
    if tp > 1:
        from fairscale.nn.model_parallel.initialize import get_data_parallel_group

        parallel.initialize(tp)
        group = get_data_parallel_group()
    plain = llama.single() if tp == 1 else parallel.model()
    model, optimizer = sharded_ddp.wrapped(frozen(plain) if freezes else plain, group, LR, **options)
    flex = mf.FlexModel(model)
    replica = flex.session.mesh["dp"].coord
    came: list[Tensor] = []
    rows: list[Any] = []
    if hooked:
        flex.register_hook(mf.HookFunction(WATCHED, hook_type="tensor"))
        flex.register_forward_hook(mf.HookFunction("layers.1:output", editing_function=same, save=False))
        flex.register_dump(mf.Dump(path, parameters="**", gradients=True))
        statistics = Statistics("nowhere", "layers.2:output", parameters=["**"])
        flex.register_statistics(statistics, kept := measuring.Kept())
        flex.verify(STEPS)
        estimate = flex.estimate(sequence_length=llama.TOKENS, micro_batch_size=llama.SAMPLES)
        assert WATCHED in estimate.uncounted, "the gradient of a parameter is not one of tokens"
    out: dict[str, Any] = {"gradients": [], "weights": [], "replica": replica, "leader": flex.is_leader}
    for step in range(STEPS):
        model.zero_grad()
        with flex.step() if hooked else nullcontext():
            *first, last = parts_of(replica, step)
            with model.no_sync():
                for tokens, labels in first:
                    (llama.loss_of(model(tokens), labels) / PARTS).backward()
            (llama.loss_of(model(last[0]), last[1]) / PARTS).backward()
        if hooked and flex.is_leader:
            read = flex.output_dict[f"{WATCHED}.grad"]
            here = [i for i, key in enumerate(read.keys) if key.iteration == step]
            assert len(here) == PARTS
            came.append(torch.stack([read[i] for i in here]).sum(0))
        found = flex.named_full_parameters(gradients=True, everywhere=True)
        out["gradients"].append({n: t.clone() for n, t in found})
        optimizer.step()
        out["weights"].append({n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)})
    flex.restore()
    if hooked:
        rows = [kept.rows[i] for i in range(STEPS)]
    return {**out, "came": came, "rows": rows}


TRAINED = {
    "dp2": (1, 2, {}, False),
    "dp2, without buckets, frozen": (1, 2, {"reduce_buffer_size": 0, "auto_refresh_trainable": False}, True),
    "dp4, some in buckets": (1, 4, {"reduce_buffer_size": 3000}, False),
    "mp2 dp2, frozen": (2, 2, {}, True),
}


@pytest.mark.parametrize("case", TRAINED)
def test_five_steps_of_accumulated_gradients(case: str, tmp_path: Path) -> None:
    """Each way to ask for gradients has those of one process, and training with hooks is training without."""
    tp, dp, options, freezes = TRAINED[case]
    want = run(1, one_process, dp, freezes, str(tmp_path / "alone"))[0]
    told = {
        h: run(tp * dp, trained, tp, options, freezes, str(tmp_path / "spread"), h) for h in (False, True)
    }
    for hooked, answers in told.items():
        for answer in answers:
            for kind in ("gradients", "weights"):
                for step, (got, truth) in enumerate(zip(answer[kind], want[kind], strict=True)):
                    assert got.keys() == truth.keys()
                    for name, tensor in truth.items():
                        assert relative(got[name], tensor) < 10 * BOUND, (hooked, kind, step, name)
    for plain, hooked in zip(told[False], told[True], strict=True):
        for one, other in zip(plain["weights"], hooked["weights"], strict=True):
            assert all(torch.equal(one[n], other[n]) for n in one)
    leaders = [a for a in told[True] if a["leader"]]
    assert len(leaders) == dp
    for step in range(STEPS):
        own = torch.stack([a["came"][step] for a in leaders]).mean(0)
        assert relative(own, want["gradients"][step][WATCHED]) < 10 * BOUND
        rows = {r.site: r for r in leaders[0]["rows"][step]}
        for name, truth in want["gradients"][step].items():
            row = rows[f"{name}.grad"]
            assert row.count == truth.numel()
            assert row.norm == pytest.approx(float(truth.norm()), rel=1e-4)
            assert row.absmax == pytest.approx(float(truth.abs().max()), rel=1e-4)
    with mf.open_dump(tmp_path / "spread") as dump:
        for name in want["gradients"][0]:
            found = dump.parameter(name, gradient=True).torch()
            for step in range(STEPS):
                assert relative(found[step], want["gradients"][step][name]) < 10 * BOUND
    result = compare(tmp_path / "alone", tmp_path / "spread")
    assert result.exit_status == 0, str(result)


# -- what is set, what is frozen, buffers, half precision ----------------------------------------------


class Normed(nn.Module):
    """The small model that does not divide, with a buffer that each batch changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner, self.norm, self.unused = uneven.Uneven(), nn.BatchNorm1d(3, momentum=0.5), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


SET = "inner.last.weight"


def set_on_one_process(replicas: int) -> dict[str, Tensor]:
    """A value and a gradient are set between steps of AdamW; each replica normalizes its own samples."""
    model = Normed()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    parameter = model.get_parameter(SET)

    def backward() -> None:
        optimizer.zero_grad()
        kept = {n: b.clone() for n, b in model.named_buffers()}
        for replica in reversed(range(replicas)):  # the first one's buffers are those that are broadcast
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
            (model(uneven.batch(replica)).pow(3).mean() / replicas).backward()

    backward()
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(uneven.new(parameter))
    backward()
    assert parameter.grad is not None
    parameter.grad.copy_(uneven.new(parameter.grad))
    optimizer.step()
    backward()
    optimizer.step()
    out = {n: p.detach() for n, p in model.named_parameters() if "unused" not in n}
    return out | {f"buffer {n}": b for n, b in model.named_buffers()}


def set_between_steps(options: dict[str, Any]) -> dict[str, Any]:
    """The same on a rank, with a frozen stretch in it."""
    model, optimizer = sharded_ddp.wrapped(Normed(), lr=LR, **options)
    flex = mf.FlexModel(model)
    mine, out = uneven.batch(dist.get_rank()), {}

    def backward() -> None:
        model.zero_grad()
        model(mine).pow(3).mean().backward()

    def read(gradient: bool) -> Tensor:
        whole = flex.get_module_parameter(SET, gradient=gradient, everywhere=True)
        assert whole is not None
        return whole

    backward()
    optimizer.step()
    flex.set_module_parameter(SET, uneven.new(read(False)))
    owners = dict(optimizer._param_to_rank)
    flex.freeze()
    buffers = {n: b.clone() for n, b in model.module.named_buffers()}
    inputs = mine.clone().requires_grad_()
    model(inputs).sum().backward()
    flex.unfreeze()
    for name, buffer in model.module.named_buffers():
        buffer.copy_(buffers[name])
    assert owners == optimizer._param_to_rank
    backward()
    flex.set_module_parameter(SET, uneven.new(read(True)), gradient=True)
    out["gradient"] = read(True).clone()
    optimizer.step()
    backward()
    optimizer.step()
    flex.verify()
    with torch.no_grad():
        model.eval()(mine)
    found = flex.named_full_parameters(everywhere=True)
    out |= {n: t.clone() for n, t in found if "unused" not in n}
    out |= {f"buffer {n}": b.clone() for n, b in model.module.named_buffers()}
    flex.restore()
    return out


@pytest.mark.parametrize(
    "options", [{}, {"reduce_buffer_size": 0}, {"auto_refresh_trainable": False}], ids=str
)
def test_training_goes_on_from_what_is_set(options: dict[str, Any]) -> None:
    want = set_on_one_process(2)
    for found in run(2, set_between_steps, options):
        found.pop("gradient")
        # Buffers are broadcast when a forward pass begins: each rank's own from the evaluation on.
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            assert relative(found[name].double(), tensor.double()) < 10 * BOUND, name


def halved(scales: bool) -> dict[str, Any]:
    """Gradients that are reduced in half precision, or those of a scaled loss under autocast.

    Its ShardedGradScaler does nothing without a GPU: the loss is multiplied as it would do.
    """
    model, _ = sharded_ddp.wrapped(llama.single(), reduce_buffer_size=0, reduce_fp16=not scales)
    scale = 1024.0 if scales else 1.0
    with mf.FlexModel(model) as flex:
        tokens, labels = llama.batch(dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16, enabled=scales):
            loss = llama.loss_of(model(tokens), labels)
        (loss * scale).backward()
        found = {n: t.clone() for n, t in flex.named_full_parameters(gradients=True, everywhere=True)}
        assert all(t.dtype == torch.float32 for t in found.values())
        owned = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
        assert all(torch.equal(found[n], g) for n, g in owned.items()), "the owner has what is given"
        return {n: t / scale for n, t in found.items()}


@pytest.mark.parametrize(("scales", "bound"), [(False, 1e-3), (True, BOUND)])
def test_gradients_in_half_precision(scales: bool, bound: float) -> None:
    model = llama.single()
    for replica in range(2):
        tokens, labels = llama.batch(replica)
        with torch.autocast("cpu", torch.bfloat16, enabled=scales):
            loss = llama.loss_of(model(tokens), labels)
        (loss / 2).backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    for found in run(2, halved, scales):
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            assert relative(tensor, want[name]) < bound, name


# -- the wrong moment ----------------------------------------------------------------------------------


def said(call: Callable[[], Any]) -> str:
    """What an error says; empty if there is none."""
    try:
        call()
    except mf.FlexError as error:
        return str(error)
    return ""


def moments(options: dict[str, Any]) -> dict[str, Any]:
    """What is known of gradients in each state of the wrapper."""
    model, optimizer = sharded_ddp.wrapped(llama.single(), **options)
    flex = mf.FlexModel(model)
    rank, told = dist.get_rank(), {}

    def backward(replica: int) -> None:
        tokens, labels = llama.batch(replica)
        llama.loss_of(model(tokens), labels).backward()

    def read(reduced: bool | None = None) -> Tensor | None:
        return flex.get_module_parameter(WATCHED, gradient=True, reduced=reduced, everywhere=True)

    def ask(moment: str) -> None:
        told[moment] = said(read)

    ask("nothing yet")
    with model.no_sync():
        backward(rank)
        ask("inside")
    ask("behind")
    told["own"] = read(False)
    model.reduce()
    ask("reduced by hand")
    told["by hand"] = read()
    told["own then"] = said(lambda: read(False))
    model.zero_grad()
    backward(rank)
    with torch.no_grad():
        model(llama.batch(rank)[0])
    ask("another forward")
    told["promised"] = read(True)
    model.zero_grad()
    backward(rank)  # averaged, after which no parameter waits for it
    model.zero_grad()
    model.eval()
    backward(rank)
    ask("evaluation")
    told["own in evaluation"] = read(False)
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.grad = None
    model.train()
    backward(rank)
    optimizer.zero_grad()
    backward(rank)
    ask("out of the bucket")
    if told["out of the bucket"]:
        told["own out"] = read(False)
    flex.restore()
    return told


@pytest.mark.parametrize("buffer", [2**23, 0])
def test_gradients_that_are_not_averaged(buffer: int) -> None:
    wanted = [t["parameter gradients"][WATCHED] for t in llama.truth(2, (), ())]
    mean = torch.stack(wanted).mean(0)
    for rank, told in enumerate(run(2, moments, {"reduce_buffer_size": buffer})):
        assert any_names([told["nothing yet"]], WATCHED) or any_names([told["nothing yet"]], "reduced=True")
        assert "no_sync()" in told["inside"]
        assert_names(told["behind"], "reduced=True")
        assert relative(told["own"], wanted[rank]) < BOUND
        assert told["reduced by hand"] == ""
        assert relative(told["by hand"], mean) < BOUND
        assert_names(told["own then"], "reduced=False")
        assert_names(told["another forward"], "ShardedDataParallel")
        assert relative(told["promised"], mean) < BOUND
        assert_names(told["evaluation"], "ShardedDataParallel")
        assert relative(told["own in evaluation"], wanted[rank]) < BOUND
        assert ("set_to_none=False" in told["out of the bucket"]) == bool(buffer)
        if buffer:
            assert relative(told["own out"], wanted[rank]) < BOUND


def misfits() -> dict[str, str]:
    """Wrappers that do not fit their groups, optimizers or each other."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    told, rank = {}, dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    model, _ = sharded_ddp.wrapped(llama.single(), mine, reduce_buffer_size=0)
    told["others"] = said(lambda: mf.FlexModel(model))
    tokens, labels = llama.batch(rank)
    with mf.FlexModel(model, tensor_parallel_size=2) as flex:
        told["mesh"] = flex.session.mesh.describe()
        llama.loss_of(model(tokens), labels).backward()
        told["dropped"] = said(lambda: flex.get_module_parameter(WATCHED, gradient=True))
    inner = llama.single()
    changes.setattr(OSS, "step", OSS.step)
    optimizer = OSS(inner.parameters(), lr=0.1, group=mine)
    told["optimizer"] = said(lambda: mf.FlexModel(ShardedDataParallel(inner, optimizer)))
    both, _ = sharded_ddp.wrapped(llama.single())
    told["both"] = said(lambda: mf.FlexModel(DistributedDataParallel(both)))
    parallel.initialize(2)
    wrong, _ = sharded_ddp.wrapped(parallel.model())
    told["ranks"] = said(lambda: mf.FlexModel(wrong))
    part = llama.single()
    part.norm, _ = sharded_ddp.wrapped(part.norm)
    with mf.FlexModel(part) as flex:
        told["names"] = " ".join(s.name for s in flex.session.adapter.parameters())
        llama.loss_of(part(tokens), labels).backward()
        told["left out"] = said(lambda: flex.get_module_parameter(WATCHED, gradient=True))
        told["why"] = mf.detect(part).why
    return told


def test_wrappers_that_do_not_fit() -> None:
    for told in run(4, misfits):
        assert "of 4" in told["others"]
        assert told["mesh"] == "dp=2 x tp=2"
        assert_names(told["dropped"], "reduce_buffer_size")
        assert_names(told["optimizer"], "ShardedDataParallel", "OSS")
        assert_names(told["both"], "DistributedDataParallel", "ShardedDataParallel")
        assert_names(told["ranks"], "process_group")
        assert_names(told["names"], "norm.weight")
        assert_names(told["left out"], "tok_embeddings.weight")
        assert_names(told["why"], "ShardedDataParallel")


def piped(checkpoint: str) -> dict[str, Any]:
    """Gradients of a Pipe in the wrapper; what is said where it recomputes."""
    from fairscale.nn import Pipe

    model = Pipe(
        test_fairscale_pipe.plain(), balance=[2, 2], devices=["cpu", "cpu"], chunks=3, checkpoint=checkpoint
    )
    wrapped, _ = sharded_ddp.wrapped(model)
    told: dict[str, Any] = {"said": said(lambda: mf.FlexModel(wrapped).restore())}
    if not told["said"]:
        with mf.attach(wrapped, [mf.HookFunction("1:output")]) as flex:
            wrapped(test_fairscale_pipe.batch() * (1 + dist.get_rank())).pow(2).sum().backward()
            told["gradients"] = dict(flex.named_full_parameters(gradients=True, everywhere=True))
    return told


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_pipe_in_it(checkpoint: str) -> None:
    model = test_fairscale_pipe.plain()
    for replica in range(2):
        (model(test_fairscale_pipe.batch() * (1 + replica)).pow(2).sum() / 2).backward()
    for told in run(2, piped, checkpoint, alone=True):
        if checkpoint != "never":
            assert_names(told["said"], "checkpoint='never'")
            continue
        assert told["gradients"].keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(told["gradients"][name], parameter.grad) < BOUND, name


def of_others() -> dict[str, str]:
    """What is said of stages of torch's pipelining, and of Megatron's models, in the wrapper."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    group = dist.new_subgroups(1)[0]
    part, _ = sharded_ddp.wrapped(nn.Linear(4, 4), group)
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    told = {"stage": said(lambda: mf.FlexModel(ScheduleGPipe(stage, n_microbatches=2)))}
    pytest.importorskip("megatron.core")
    chunk = ranks.start(gpt.Case("in ShardedDataParallel", dp=2, layers=1))[0]
    wrapped, _ = sharded_ddp.wrapped(chunk, sync_models_at_startup=False)
    told["Megatron"] = said(lambda: mf.FlexModel(wrapped))
    return told


def test_what_it_is_refused_around() -> None:
    for told in run(2, of_others):
        assert_names(told["stage"], "ShardedDataParallel", "DistributedDataParallel", "fully_shard")
        assert "use_distributed_optimizer=True" in told["Megatron"]


def engine() -> str:
    """What is said of the wrapper in DeepSpeed's engine, of which the class is enough."""
    from deepspeed import DeepSpeedEngine

    model = DeepSpeedEngine.__new__(DeepSpeedEngine)
    nn.Module.__init__(model)
    model.module, _ = sharded_ddp.wrapped(nn.Linear(4, 4))
    return said(lambda: mf.FlexModel(model))


def test_an_engine_around_it() -> None:
    pytest.importorskip("deepspeed")
    for text in run(2, engine, alone=True):
        assert_names(text, "DeepSpeedEngine", "ShardedDataParallel")
