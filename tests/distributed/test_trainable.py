"""Modules trained inside hooks of a sharded run become what one process makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import matrix
from tests.distributed.matrix import Cell, greatest, relative
from tests.support import gpt, oracle, probes, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.training import Trainer

pytest.importorskip("megatron.core")

BOUND = 1e-4
ALL = Case("tp2 sp pp2 dp2", tp=2, sp=True, pp=2, dp=2, layers=2)
CASES: list[Any] = [
    (ALL, {}),
    (replace(ALL, name="tp2 sp pp2 dp2, frozen"), {"frozen": True}),
    (Case("tp2 sp cp2", tp=2, sp=True, cp=2, layers=2, microbatches=3), {}),
    pytest.param(
        Case("pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=4), {"frozen": True}, marks=pytest.mark.versions
    ),
    pytest.param(
        Case("tp2 sp, recompute full", tp=2, sp=True, layers=2, recompute=("full",)),
        {"frozen": True},
        marks=pytest.mark.versions,
    ),
    (Case("cp2 dp2, each token", cp=2, dp=2, layers=2), {"per_token": True}),
    (Case("moe tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, layers=2), {}),
    (Case("tp2 dp2, samples together", tp=2, dp=2, layers=2), {"together": True}),
    (Case("tp2 sp pp2, once", tp=2, sp=True, pp=2, layers=2), {"run_on": "once"}),
]


Gradients = dict[str, Tensor]


def compared(case: Case, truth: dict[str, Any], answers: list[dict[str, Any]]) -> list[Cell]:
    """Gradients of all steps, and weights behind them, by parameter; ranks have the same bits."""
    first, last = truth["first"], truth["after"]
    for answer in answers:
        assert answer["after"].keys() == last.keys()
        for name, value in answer["after"].items():
            assert torch.equal(value, answers[0]["after"][name]), name
    trained = list(truth["gradients"][0])
    moved = [relative(last[n], first[n]) for n in trained]
    assert min(moved) > 100 * BOUND, "every parameter has moved, far more than the bound"
    after = answers[0]["after"]
    assert all(torch.equal(after[n], last[n]) for n in last if n not in trained)
    found = [Cell(case.name, n, "trained value", relative(after[n], last[n]), BOUND) for n in trained]
    by_step = [[a["gradients"][step] for a in answers] for step in range(len(truth["gradients"]))]
    assert all(len(a["gradients"]) == len(by_step) for a in answers)
    return [*found, *of_gradients(case.name, zip(by_step, truth["gradients"], strict=True))]


def of_gradients(case: str, steps: Iterable[tuple[list[Gradients], Gradients]]) -> list[Cell]:
    """The gradient of each parameter: of all ranks, in all steps."""
    errors: dict[str, list[float]] = {}
    for answers, wanted in steps:
        for found in answers:
            assert found.keys() == wanted.keys()
            for name in wanted:
                errors.setdefault(name, []).append(relative(found[name], wanted[name]))
    return [Cell(case, n, "trained gradient", greatest(found), BOUND) for n, found in errors.items()]


def judge(found: list[Cell], cells: list[Any]) -> None:
    matrix.judge([replace(c, model="GPT, modules trained in hooks") for c in found], cells)


@pytest.mark.parametrize(("case", "how"), CASES, ids=lambda x: getattr(x, "name", None))
def test_training_equals_one_process(case: Case, how: dict[str, Any], cells: list[Any]) -> None:
    per_token = how.get("per_token", False)
    single = case.single()
    if how.get("together"):
        single = replace(single, microbatches=case.microbatches, joint=case.dp)
    truth = truths.once(probes.alone, single, per_token)
    answers = run(case.world, _spread, case, truth["weights"], how, timeout=200)
    judge(compared(case, truth, answers), cells)
    trained = {n.partition(".")[0] for n in truth["gradients"][0]}
    assert trained == {"lens", "sparse", "low", "shared", *(["expert"] if case.experts else [])}
    assert all(a["restored"] for a in answers)


def _spread(case: Case, weights: dict[str, Tensor], how: dict[str, Any]) -> dict[str, Any]:
    return probes.spread(case, weights, **how)


def gradients(flex: Any) -> Gradients:
    return {n: p.grad.clone() for n, p in flex.trainable_modules.named_parameters() if p.grad is not None}


def attached(case: Case, weights: dict[str, Tensor] | None = None, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A model with all edits."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    if weights is not None:
        gpt.load(chunks, weights)
    places = probes.edits(case).items()
    hooks = [mf.HookFunction(s, editing_function=e, save=False, **kwargs) for s, e in places]
    flex = mf.attach(chunks, hooks)
    torch.manual_seed(5)
    for name, module in probes.modules().items():
        flex.register_trainable_module(name, module)
    flex.save_ctx.weight = 1.0
    return flex, chunks


def evaluated(case: Case, weights: dict[str, Tensor]) -> Gradients:
    flex, chunks = attached(case, weights)
    gpt.step(case, chunks, 0, forward_only=True)
    return gradients(flex)


def test_losses_of_editing_functions_count_where_nothing_goes_backward(cells: list[Any]) -> None:
    case = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2)
    truth = truths.once(probes.alone, case.single())
    wanted = {n: g for n, g in truth["gradients"][0].items() if n.startswith(("lens", "sparse"))}
    answers = run(4, evaluated, case, truth["weights"])
    judge(of_gradients(f"{case.name}, evaluation", [(answers, wanted)]), cells)


def called(case: Case, weights: dict[str, Tensor], run_on: str) -> Gradients:
    """The model is called by itself, each data parallel rank with its own microbatch."""
    flex, chunks = attached(case, weights, run=run_on)
    batch = gpt.data(2)[ranks.mine(chunks)]
    output, _ = gpt.forward_step(iter([batch]), flex)
    early = {n.partition(".")[0] for n in gradients(flex)}
    assert early == {"lens", "sparse"}
    output.mean().backward()
    return gradients(flex)


@pytest.mark.parametrize("run_on", ["replicated", "once"])
def test_a_model_that_is_called_by_itself(run_on: str, cells: list[Any]) -> None:
    case = Case("tp2 sp dp2", tp=2, sp=True, dp=2, layers=2, microbatches=1)
    truth = truths.once(probes.alone, case.single())
    wanted = truth["gradients"][0]
    first, *others = run(4, called, case, truth["weights"], run_on)
    where = "" if run_on == "replicated" else f", {run_on}"
    judge(of_gradients(f"{case.name}, called by itself{where}", [([first], wanted)]), cells)
    for other in others:
        assert all(torch.equal(other[n], first[n]) for n in wanted)


def kept(case: Case) -> dict[str, Any]:
    """What a person may do with gradients besides."""
    flex, chunks = attached(case)
    out: dict[str, Any] = {}
    gpt.step(case, chunks, 0)
    first = gradients(flex)
    gpt.step(case, chunks, 0)
    out["added"] = all(torch.equal(g, first[n] + first[n]) for n, g in gradients(flex).items())
    weight = flex.trainable_modules["lens"].weight
    (asked,) = torch.autograd.grad((3 * weight).sum(), [weight])
    out["asked"] = float(asked.mean())
    out["untouched"] = torch.equal(weight.grad, first["lens.weight"] + first["lens.weight"])
    weight.grad = None
    weight.square().sum().backward()
    out["penalty"] = torch.equal(weight.grad, 2 * weight.detach())
    out["state"] = [n for n in flex.state_dict() if n.startswith("trainable_modules.lens")]
    flex.session.close()
    weight.grad = None
    weight.sum().backward()
    out["after"] = float(weight.grad.mean())
    return out


@pytest.mark.versions
def test_gradients_are_the_persons_own() -> None:
    for found in run(2, kept, Case("tp2 sp", tp=2, sp=True, layers=2)):
        assert found["added"]
        assert found["asked"] == 3.0
        assert found["untouched"]
        assert found["penalty"]
        assert found["state"] == ["trainable_modules.lens.weight", "trainable_modules.lens.bias"]
        assert found["after"] == 1.0


def counted(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of a step with edits, and by how many they are more with trainable modules."""
    import megatron_flex as mf

    def same(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * 1.0

    chunks = ranks.start(case)
    with mf.attach(chunks, [mf.HookFunction("decoder.layers.0:mid", editing_function=same)]) as flex:
        found = []
        for _ in range(2):
            gpt.step(case, chunks, ranks.mine(chunks))
            with ranks.counting() as counts:
                gpt.step(case, chunks, ranks.mine(chunks))
            found.append(dict(counts))
            for name, module in probes.modules().items():
                flex.register_trainable_module(f"{name}{len(found)}", module)
    plain, more = found
    return plain, {n: c - plain.get(n, 0) for n, c in more.items() if c != plain.get(n, 0)}


def test_one_collective_for_each_axis() -> None:
    answers = [more for _, more in run(8, counted, ALL, timeout=200)]
    assert answers[0] == {"reduce": 1, "all_reduce": 1, "broadcast": 2}
    assert all(sum(more.values()) <= 4 for more in answers)


def noisy(case: Case) -> dict[str, Tensor]:
    """Dropout and running statistics in modules."""
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        flat = modules["norm"](modules["drop"](inputs).flatten(0, 1))
        return inputs + 0.1 * flat.view(inputs.shape)

    chunks = ranks.start(case)
    with mf.attach(chunks, [mf.HookFunction("decoder.layers.1", editing_function=edit)]) as flex:
        flex.register_trainable_module("norm", nn.BatchNorm1d(gpt.HIDDEN))
        flex.register_trainable_module("drop", nn.Sequential(nn.Linear(gpt.HIDDEN, gpt.HIDDEN), nn.Dropout()))
        flex.verify(2)
        for _ in range(2):
            gpt.step(case, chunks, ranks.mine(chunks))
        return {**dict(flex.trainable_modules.named_buffers()), **gradients(flex)}


@pytest.mark.parametrize(
    "case",
    [
        Case("tp2 sp pp2, recompute full", tp=2, sp=True, pp=2, layers=2, recompute=("full",)),
        Case("pp2 dp2", pp=2, dp=2, layers=2),
    ],
    ids=lambda c: c.name,
)
def test_replicas_stay_equal(case: Case) -> None:
    first, *others = run(case.world, noisy, case)
    assert first["norm.num_batches_tracked"] == 2 * case.microbatches
    assert float(first["norm.running_mean"].abs().max()) > 0
    for other in others:
        assert all(torch.equal(other[n], first[n]) for n in first)


def test_an_edit_that_runs_again_leaves_statistics_alone() -> None:
    case = Case("tp2 sp", tp=2, sp=True, layers=2)
    plain, again = run(2, noisy, case)[0], run(2, noisy, replace(case, recompute=("full",)))[0]
    assert max(relative(again[n], plain[n]) for n in plain) <= BOUND


def one_sided(case: Case, site: str, weights: dict[str, Tensor]) -> Gradients:
    """A frozen model with one edit, through which the model's loss reaches a module."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, weights)
    torch.manual_seed(5)
    hook = mf.HookFunction(site, editing_function=probes.shared, save=False)
    with mf.attach(chunks, [hook]) as flex:
        flex.register_trainable_module("shared", probes.Low(gpt.HIDDEN))
        flex.freeze()
        gpt.step(case, chunks, ranks.mine(chunks))
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        flex.unfreeze()
        assert all(p.requires_grad for chunk in chunks for p in chunk.parameters())
        return gradients(flex)


def one_sided_alone(case: Case, site: str) -> tuple[Gradients, dict[str, Tensor]]:
    chunks = ranks.start(case)
    weights = gpt.randomize(chunks[0])
    torch.manual_seed(5)
    module = probes.Low(gpt.HIDDEN)
    oracle.install(chunks[0], site, module)
    gpt.step(case, chunks, 0)
    return {f"shared.{n}": p.grad for n, p in module.named_parameters()}, weights


FROZEN = [
    (Case("pp2", pp=2, layers=2), "decoder.layers.0:mid"),
    (Case("pp2", pp=2, layers=2), "decoder.layers.1:mid"),
    (Case("pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=4), "decoder.layers.0:mid"),
    (Case("pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=4), "decoder.layers.2:mid"),
    (Case("pp2, recompute full", pp=2, layers=2, recompute=("full",)), "decoder.layers.0:mid"),
    (Case("one rank, core_attn and mlp", layers=2, recompute=("core_attn", "mlp")), "decoder.layers.0:mid"),
]


@pytest.mark.versions
@pytest.mark.parametrize(("case", "site"), FROZEN, ids=lambda x: getattr(x, "name", x))
def test_a_frozen_model_passes_gradients_on(case: Case, site: str, cells: list[Any]) -> None:
    wanted, weights = truths.once(one_sided_alone, case.single(), site)
    answers = run(case.world, one_sided, case, site, weights)
    layer = site.split(".")[2].partition(":")[0]
    judge(of_gradients(f"{case.name}, frozen, edited in layer {layer}", [(answers, wanted)]), cells)


OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 4000}
WRAPPED: list[tuple[Case, dict[str, Any]]] = [
    (Case("dp2", dp=2, layers=2), {"use_distributed_optimizer": True}),
    (Case("dp2, overlapped", dp=2, layers=2), OVERLAPPED),
    (Case("pp2 vpp2 dp2, overlapped", pp=2, vpp=2, dp=2, layers=4), OVERLAPPED),
    (
        Case("pp2 dp2, overlapped, distributed", pp=2, dp=2, layers=2),
        {**OVERLAPPED, "use_distributed_optimizer": True, "overlap_param_gather": True},
    ),
]


def thawed(case: Case, ddp: dict[str, Any], frozen: bool) -> tuple[list[Tensor], Gradients]:
    """Steps of training, with steps of a frozen model between them or without."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    trainer = Trainer(case, chunks, ranks.mine(chunks), **ddp)
    found: Gradients = {}
    for number in range(4):
        if frozen and number in (0, 2):
            hook = mf.HookFunction("decoder.layers.0:mid", editing_function=probes.shared, save=False)
            with mf.attach(trainer.models, [hook]) as flex:
                torch.manual_seed(5)
                flex.register_trainable_module("shared", probes.Low(gpt.HIDDEN))
                flex.freeze()
                for _ in range(2):
                    for model in trainer.models:
                        model.zero_grad_buffer()
                    gpt.step(case, trainer.models, trainer.rank)
                found = gradients(flex)
        trainer.step()
    trainer.settle()
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()], found


@pytest.mark.versions
@pytest.mark.parametrize(("case", "ddp"), WRAPPED, ids=lambda x: getattr(x, "name", None))
def test_freezing_under_megatrons_wrappers(case: Case, ddp: dict[str, Any]) -> None:
    plain, between = run(case.world, thawed, case, ddp, False), run(case.world, thawed, case, ddp, True)
    for (wanted, _), (got, found) in zip(plain, between, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
        assert min(float(g.abs().max()) for g in found.values()) > 0


def refused(case: Case) -> dict[str, str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out: dict[str, str] = {}

    def told(name: str, do: Any) -> None:
        try:
            do()
        except mf.FlexError as error:
            out[name] = str(error)

    flex = mf.attach(chunks)
    lens = nn.Linear(2, 2)
    flex.register_trainable_module("lens", lens)
    for name in ("lens", "", "a.b", "keys"):
        told(name, lambda name=name: flex.register_trainable_module(name, lens))
    told("none", lambda: flex.register_trainable_module("none", 3))
    told("complex", lambda: flex.register_trainable_module("c", nn.Linear(2, 2, dtype=torch.complex64)))
    told("part", lambda: flex.register_trainable_module("part", chunks[0].decoder.layers[0].mlp))
    width = 2 + torch.distributed.get_rank()
    told("differs", lambda: flex.register_trainable_module("other", nn.Linear(2, width)))
    flex.verify()
    if torch.distributed.get_rank() == 1:
        lens.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    told("loaded", lambda: gpt.step(case, chunks, 0))
    flex.session.close()
    return out


@pytest.mark.versions
def test_what_is_refused() -> None:
    for said in run(2, refused, Case("tp2 sp", tp=2, sp=True, layers=2)):
        assert_names(said["lens"], "lens")
        assert_names(said[""], "''")
        assert_names(said["a.b"], "a.b")
        assert_names(said["keys"], "keys", "nn.ModuleDict")
        assert_names(said["none"], "none", "nn.Module")
        assert_names(said["complex"], "c")
        assert_names(said["part"], "'part'")
        assert_names(said["differs"], "rank 0", "other")
        assert_names(said["loaded"], "trainable_modules.lens.weight", "tp")
        assert "lens.bias" in said["loaded"]


def beyond(case: Case, run_on: str) -> tuple[str, bool]:
    """A loss that is not computed from detached inputs."""
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        (saliency,) = torch.autograd.grad(modules["lens"](inputs).sum(), inputs)  # ends where it began
        assert saliency.shape == inputs.shape
        modules["lens"](inputs).square().mean().backward()
        return inputs

    chunks = ranks.start(case)
    flex = mf.attach(
        chunks, [mf.HookFunction("decoder.layers.0", editing_function=edit, run=run_on, save=False)]
    )
    flex.register_trainable_module("lens", nn.Linear(gpt.HIDDEN, gpt.HIDDEN))
    said = ranks.step_says(case, chunks, flex)
    return said, any(p.grad is not None for p in flex.trainable_parameters())


@pytest.mark.versions
@pytest.mark.parametrize("run_on", ["replicated", "once"])
def test_a_loss_that_reaches_into_the_model(run_on: str) -> None:
    said = run(4, beyond, Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2), run_on)
    assert len({text for text, _ in said}) == 1
    assert "inputs.detach()" in said[0][0]
    assert not any(got for _, got in said), "a step that failed leaves no gradient"


def by_gradients(case: Case) -> Gradients:
    """A loss of its own in an editing function of a gradient, and of an edit under no_grad()."""
    import megatron_flex as mf

    def predict(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        modules["probe"](inputs / inputs.norm()).square().mean().backward()
        return inputs

    chunks = ranks.start(case)
    torch.manual_seed(5)
    place = "decoder.layers.1"
    hook = mf.HookFunction(
        place, editing_function=predict, hook_type="full_backward_pre", gradient_scale="loss", save=False
    )
    with mf.attach(chunks, [hook]) as flex:
        flex.register_trainable_module("probe", nn.Linear(gpt.HIDDEN, gpt.HIDDEN))
        gpt.step(case, chunks, 0)
        return gradients(flex)


def test_a_loss_of_gradients_counts_once() -> None:
    case = Case("pp2", pp=2, layers=2)
    plain, again = run(2, by_gradients, case), run(2, by_gradients, replace(case, recompute=("full",)))
    assert plain[0].keys() == {"probe.weight", "probe.bias"}
    for found in (*plain, *again):
        assert max(relative(found[n], plain[0][n]) for n in found) <= BOUND


def outside(case: Case) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.attach(chunks)
    flex.register_trainable_module("lens", nn.Linear(2, 2))
    try:
        flex.trainable_modules["lens"].weight.sum().backward()
    except mf.HookError as error:
        return str(error)
    finally:
        flex.session.close()
    return ""


def alone_outside(case: Case) -> str:
    from megatron_flex.config import flex_config

    flex_config.agree_seconds = 2.0
    return outside(case) if torch.distributed.get_rank() == 0 else "absent" + str(_registered(case))


def _registered(case: Case) -> int:
    import megatron_flex as mf

    flex = mf.attach(ranks.start(case))
    flex.register_trainable_module("lens", nn.Linear(2, 2))
    return len(flex.trainable_modules)


def test_gradients_outside_the_schedule() -> None:
    said = run(2, outside, Case("pp2", pp=2, layers=2))
    for text in said:
        assert_names(text, "lens.weight", 2)
    first, second = run(2, alone_outside, Case("tp2", tp=2, layers=2))
    assert_names(first, "rank 1", "2 s")
    assert second == "absent1"
