"""Edits that cut the graph: values, gradients of sites and of parameters, on one process and on many."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run
from tests.support.rank import changes
from tests.support.training import Trainer

LAYERS = [f"decoder.layers.{n}" for n in range(4)]


def detached(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.detach() * 0.5


def constant(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.zeros_like(inputs) + 0.1


def ungraphed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    with torch.no_grad():
        return inputs * 2


EDITS = {"detached": detached, "constant": constant, "ungraphed": ungraphed}


def by_torch(case: Case, place: str, name: str) -> Any:
    """One process of Megatron, by torch's own hooks."""
    (chunk,) = ranks.start(case)
    state = gpt.randomize(chunk)
    chunk.get_submodule(place).register_forward_hook(partial(_edited, EDITS[name]))
    grads: dict[str, list[Tensor]] = {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        chunk.get_submodule(layer).register_forward_hook(partial(_watched, grads[layer]))
    losses = gpt.step(case, [chunk], 0)
    return state, losses, grads, {n: p.grad for n, p in gpt.global_names(chunk)}


def _edited(edit: Any, module: nn.Module, args: Any, output: Any) -> Any:
    first = edit(None, output[0], None, None)
    return (first, *output[1:])


def _watched(grads: list[Tensor], module: nn.Module, args: Any, output: Any) -> Any:
    first = output[0].clone().requires_grad_()  # what leaves the edit has a gradient of its own
    first.register_hook(lambda g: grads.append(g.clone()))
    return (first, *output[1:])


def hooked(case: Case, state: dict[str, Tensor], place: str, name: str, how: str) -> Any:
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    flex = mf.attach(chunks, [mf.HookFunction(f"{layer}:output", hook_type="tensor") for layer in LAYERS])
    flex.register_forward_hook(mf.HookFunction(place, editing_function=EDITS[name], save=False, run=how))
    losses = gpt.step(case, chunks, 0)
    read = {n: list(r) for n, r in flex.output_dict.items()}
    grads = {n: p.grad for chunk in chunks for n, p in gpt.global_names(chunk)}
    flex.restore()
    return losses, read, grads


CASES = [
    Case("one"),
    Case("tp2", tp=2),
    Case("tp2 sp", tp=2, sp=True),
    Case("pp2", pp=2),
    Case("tp2 pp2", tp=2, pp=2),
    Case("pp2 vpp2", pp=2, vpp=2),
    Case("recomputed", recompute=("full",)),
]


@pytest.mark.parametrize("how", ["replicated", "once"])
@pytest.mark.parametrize("place", [LAYERS[1], LAYERS[2]])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_upstream_of_a_cut_are_zero(case: Case, place: str, how: str) -> None:
    """The last layer of a stage and the first one of the next; a stage before the cut has zeros for None."""
    name = list(EDITS)[(CASES.index(case) + LAYERS.index(place)) % len(EDITS)]
    ((state, losses, grads, parameters),) = run(
        1, by_torch, replace(case.single(), recompute=case.recompute), place, name
    )
    answers = run(case.world, hooked, case, state, place, name, how)
    last = next(a for a in answers if a[0])
    torch.testing.assert_close(last[0], losses, rtol=1e-5, atol=1e-5)
    (read,) = [a[1] for a in answers if a[1]]
    assert set(read) == {f"{layer}:output.grad" for layer in LAYERS}
    for layer in LAYERS:
        got = read[f"{layer}:output.grad"]
        assert len(got) == case.microbatches
        want = grads[layer] or [torch.zeros_like(g) for g in got]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert any(g is None for g in parameters.values())
    for _, _, found in answers:
        for parameter, grad in found.items():
            whole = parameters[parameter]
            if whole is None:
                zeros = grad is not None and not grad.any()
                assert grad is None or (zeros and (case.pp > 1 or how == "once")), parameter
            elif grad.shape == whole.shape and not case.sp:
                torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-5)


# -- what only some ranks or microbatches cut ----------------------------------------------------------


def on_one_rank(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.detach() * 0.5 if dist.get_rank() == 1 else inputs * 0.5


def fails_on_one(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    if dist.get_rank() == 1:
        raise RuntimeError("only here")
    return inputs.detach()


class OnOneMicrobatch:
    """Cuts in the second microbatch."""

    def for_pass(self, key: Any) -> Any:
        return detached if key.microbatch == 1 else halved

    def __call__(self, *args: Any) -> Tensor:
        raise AssertionError("never called")


def halved(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5


def ends(case: Case, place: str, edit: Any) -> str:
    """What a step of many ranks ends with."""
    chunks = ranks.start(case)
    hooks = [mf.HookFunction(f"{layer}:output", hook_type="tensor") for layer in LAYERS[:2]]
    flex = mf.attach(chunks, [*hooks, mf.HookFunction(place, editing_function=edit, save=False)])
    try:
        gpt.step(case, chunks, 0)
    except mf.HookError as error:
        return str(error)
    finally:
        flex.session.close(failed=True)
    return ""


PLACES = (LAYERS[1], f"{LAYERS[1]}.mlp.linear_fc1", f"{LAYERS[1]}.self_attention.linear_proj:partial")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sp", [False, True])
def test_one_rank_that_cuts_does_not_leave_others_waiting(place: str, sp: bool) -> None:
    case = Case("tp2 sp" if sp else "tp2", tp=2, sp=sp)
    assert run(2, ends, case, place, on_one_rank) == ["", ""]
    for text in run(2, ends, case, place, fails_on_one):
        assert "only here" in text
        assert_names(text, "rank 1")


def test_one_rank_that_cuts_among_experts() -> None:
    case = Case("ep2", ep=2, dp=2, experts=4, layers=2)
    place = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1"
    assert run(2, ends, case, place, on_one_rank) == ["", ""]
    assert all("only here" in text for text in run(2, ends, case, place, fails_on_one))


def in_one_microbatch(case: Case) -> Any:
    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction(f"{layer}:output", hook_type="tensor") for layer in LAYERS])
    flex.register_forward_hook(mf.HookFunction(LAYERS[2], editing_function=OnOneMicrobatch(), save=False))
    gpt.step(case, chunks, 0)
    keys = [(k.site, k.microbatch) for r in flex.output_dict.values() for k in r.keys]
    zero = [not t.any() for r in flex.output_dict.values() for t in r]
    return dict(zip(keys, zero, strict=True))


@pytest.mark.parametrize("case", [Case("one"), Case("tp2 pp2", tp=2, pp=2)], ids=lambda c: c.name)
def test_a_cut_in_one_microbatch(case: Case) -> None:
    found = run(case.world, in_one_microbatch, case)[0]
    upstream = (f"{LAYERS[0]}:output.grad", f"{LAYERS[1]}:output.grad")
    names = [f"{layer}:output.grad" for layer in LAYERS]
    assert found == {(name, m): name in upstream and m == 1 for name in names for m in (0, 1)}


# -- a gradient whose entries are zero -----------------------------------------------------------------


def trained_on_few_tokens(case: Case, state: dict[str, Tensor] | None) -> Any:
    """Gradients and parameters after a step with tokens of the vocabulary's first half alone.

    Without a state by torch's own hook, on one process.
    """
    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
        chunks[0].get_submodule(CUT).register_forward_hook(partial(_edited, detached))
    else:
        gpt.load(chunks, state)
        mf.attach(chunks, [mf.HookFunction(CUT, editing_function=detached, save=False)])
    samples = gpt.data(case.microbatches)
    for sample in samples:
        sample["tokens"] %= gpt.VOCABULARY // 2
    changes.setattr(gpt, "data", lambda count: samples)
    parameters = [p for _, p in gpt.global_names(chunks[0])]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
    gpt.step(case, chunks, ranks.mine(chunks))
    table = chunks[0].embedding.word_embeddings.weight
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in gpt.global_names(chunks[0])}
    optimizer.step()
    return state, gradients, table.detach().clone()


CUT = f"{LAYERS[1]}.mlp"


def test_a_vocabulary_shard_without_a_token_is_decayed() -> None:
    """Its gradient is zeros, on one rank alone, and it is reached beside the cut."""
    case = Case("tp2", tp=2)
    ((state, gradients, table),) = run(1, trained_on_few_tokens, case.single(), None)
    answers = run(2, trained_on_few_tokens, case, state)
    torch.testing.assert_close(torch.cat([own for _, _, own in answers]), table)
    for _, found, _ in answers:
        assert {n for n, g in found.items() if g is None} == {n for n, g in gradients.items() if g is None}
    assert not answers[1][1]["embedding.word_embeddings.weight"].any()


# -- Megatron's DistributedDataParallel, which keeps gradients in main_grad ----------------------------


def read_main_gradients(chunks: list[nn.Module]) -> dict[str, Tensor]:
    """What the buffers hold once the schedule has ended; autograd's own gradients are gone."""
    named = [pair for chunk in chunks for pair in gpt.global_names(chunk)]
    assert all(parameter.grad is None for _, parameter in named)
    return {name: getattr(parameter, "main_grad").clone() for name, parameter in named}  # noqa: B009


def run_schedule(trainer: Trainer) -> list[float]:
    for model in trainer.models:
        model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    return gpt.step(trainer.case, trainer.models, trainer.rank)


def train_by_hand(case: Case, place: str, name: str) -> dict[str, Any]:
    """One process of Megatron, its graph cut by a hook of torch's."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    trainer = Trainer(case, chunks, 0)
    chunks[0].get_submodule(place).register_forward_hook(partial(_edited, EDITS[name]))
    losses = run_schedule(trainer)
    gradients = read_main_gradients(chunks)
    good, norm, _ = trainer.optimizer.step()
    assert good
    after = {n: p.detach().clone() for n, p in gpt.global_names(chunks[0])}
    return {"state": state, "losses": losses, "gradients": gradients, "norm": float(norm), "after": after}


def train_hooked(
    case: Case, ddp: dict[str, Any], state: dict[str, Tensor], place: str, name: str
) -> dict[str, Any]:
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    rank = ranks.mine(chunks)
    trainer = Trainer(case, chunks, rank, **ddp)
    hooks = [mf.HookFunction(f"{layer}:output", hook_type="tensor") for layer in LAYERS]
    hooks.append(mf.HookFunction(place, editing_function=EDITS[name], save=False))
    with mf.attach(trainer.models, hooks) as flex:
        losses = run_schedule(trainer)
        own = read_main_gradients(chunks)
        gradients = dict(flex.named_full_parameters(gradients=True, everywhere=True))
        good, norm, _ = trainer.optimizer.step()
        assert good
        trainer.settle()
        after = dict(flex.named_full_parameters(everywhere=True))
        read = {n: [bool(t.any()) for t in r] for n, r in flex.output_dict.items()}
    return {
        "losses": losses,
        "own": {n: bool(t.any()) for n, t in own.items()},
        "gradients": gradients,
        "norm": float(norm),
        "after": after,
        "read": read,
    }


SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TRAINED = [
    (Case("dp2", dp=2), {}, LAYERS[1], "detached"),
    (Case("dp2 distributed optimizer", dp=2), SHARDED, LAYERS[2], "constant"),
    (Case("dp2 overlapped", dp=2), OVERLAPPED, LAYERS[1], "ungraphed"),
    (Case("tp2 sp pp2", tp=2, sp=True, pp=2), SHARDED, LAYERS[2], "detached"),
    (Case("pp2 dp2", pp=2, dp=2), SHARDED, LAYERS[1], "constant"),
]


@pytest.mark.parametrize(("case", "ddp", "place", "name"), TRAINED, ids=[c[0].name for c in TRAINED])
def test_main_gradients_of_a_cut_graph(case: Case, ddp: dict[str, Any], place: str, name: str) -> None:
    """What a detach() that is written into the model gives: zeros upstream, which the optimizer sees."""
    (truth,) = run(1, train_by_hand, case.single(), place, name)
    upstream = {n for n, g in truth["gradients"].items() if not g.any()}
    assert f"{LAYERS[0]}.mlp.linear_fc1.weight" in upstream
    assert f"{LAYERS[3]}.mlp.linear_fc1.weight" not in upstream
    zeros = LAYERS[: LAYERS.index(place)]
    for answer in run(case.world, train_hooked, case, ddp, truth["state"], place, name):
        assert answer["gradients"].keys() == truth["gradients"].keys()
        for parameter, gradient in answer["gradients"].items():
            want = truth["gradients"][parameter]
            torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5, msg=parameter)
            assert bool(gradient.any()) == (parameter not in upstream), parameter
        assert all(parameter not in upstream for parameter, any_ in answer["own"].items() if any_)
        assert answer["norm"] == pytest.approx(truth["norm"], rel=1e-4)
        for parameter, value in answer["after"].items():
            torch.testing.assert_close(value, truth["after"][parameter], rtol=1e-4, atol=1e-5, msg=parameter)
        for site, entries in answer["read"].items():
            layer = site.removesuffix(":output.grad")
            assert entries == [layer not in zeros] * case.microbatches, site


# -- trainable modules, statistics, dumps --------------------------------------------------------------


def trained_before(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return modules.probe(inputs.detach())


def trained_behind(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return modules.probe(inputs).detach()


def weights(case: Case) -> dict[str, Tensor]:
    return gpt.randomize(ranks.start(case)[0])


def measured(case: Case, folder: str, state: dict[str, Tensor]) -> Any:
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    site = f"{LAYERS[0]}:output"
    dump = mf.Dump(f"{folder}/{case.name}", [site], gradients=True)
    statistics = mf.Statistics(f"{folder}/{case.name} statistics", [site], gradients=True)
    out = {}
    for edit in (trained_before, trained_behind):
        flex = mf.attach(chunks, [mf.HookFunction(site, hook_type="tensor")])
        if edit is trained_before:
            flex.register_dump(dump)
            flex.register_statistics(statistics)
        torch.manual_seed(3)
        flex.register_trainable_module("probe", nn.Linear(gpt.HIDDEN, gpt.HIDDEN))
        flex.register_forward_hook(mf.HookFunction(LAYERS[2], editing_function=edit, save=False))
        gpt.step(case, chunks, 0)
        grads = [p.grad for p in flex.trainable_modules.parameters()]
        out[edit.__name__] = grads, {n: [bool(t.any()) for t in r] for n, r in flex.output_dict.items()}
        flex.restore()
    return out


def test_trainable_modules_and_what_is_written(tmp_path: Path) -> None:
    cases = [Case("one"), Case("tp2", tp=2), Case("tp2 sp pp2", tp=2, sp=True, pp=2)]
    (state,) = run(1, weights, cases[0])
    answers = [run(c.world, measured, c, str(tmp_path), state) for c in cases]
    want = answers[0][0]["trained_before"][0]
    assert all(g.any() for g in want)
    for case, answer in zip(cases, answers, strict=True):
        for found in answer:
            torch.testing.assert_close(found["trained_before"][0], want, rtol=1e-4, atol=1e-5)
            assert found["trained_behind"][0] == [None, None], "no gradient comes to it"
        for name in answer[0]:
            assert answer[0][name][1] == {f"{LAYERS[0]}:output.grad": [False, False]}
        written = mf.open_dump(tmp_path / case.name)[f"{LAYERS[0]}:output.grad"]
        assert not written.torch().any()
        statistics = mf.open_statistics(tmp_path / f"{case.name} statistics")
        assert list(statistics[f"{LAYERS[0]}:output.grad"].absmax) == [0.0]


# -- one process of plain torch ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replicated", "once"])
@pytest.mark.parametrize("name", EDITS)
def test_plain_modules(name: str, how: Any) -> None:
    """Parameters upstream have no gradient, as in plain torch; what is reached beside it has its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))) + model[0](x))  # type: ignore[method-assign]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    handle = model[2].register_forward_hook(lambda m, a, out: EDITS[name](m, out, None, None))
    model(x).sum().backward()
    want = [p.grad for p in model.parameters()]
    handle.remove()
    model.zero_grad()
    seen = []
    edit = mf.HookFunction("2", editing_function=EDITS[name], save=False, run=how)
    hooks = [edit, mf.HookFunction("1", hook_type="tensor"), mf.HookFunction("2.weight", hook_type="tensor")]
    with mf.attach(model, hooks) as flex:
        model(x).sum().backward()
        seen = {n: bool(t.any()) for n, r in flex.output_dict.items() for t in r}
    assert seen == {"1:output.grad": False, "2.weight.grad": False}
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]
    torch.testing.assert_close(
        [p.grad for p in model.parameters() if p.grad is not None], [w for w in want if w is not None]
    )


class Branched(nn.Module):
    """What the edit cuts comes from three uses of one tensor; `side` reaches the loss without it."""

    def __init__(self, side: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first, self.second, self.cut, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.side = side

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        mixed = self.second(hidden + hidden) * hidden.tanh()
        cut = self.cut(mixed) + self.cut(mixed.sin())  # two cuts
        return self.last(cut if self.side is None else cut + self.side(hidden))


SIDES: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "zero at the start": lambda hidden: hidden * 0.0,
    "dead relu": lambda hidden: (hidden - 100).relu(),
}


def train_branched(side: str, hooks: list[mf.HookFunction], cut: bool) -> list[Tensor | None]:
    """The gradients of two microbatches, then the parameters after a step that decays weights."""
    torch.manual_seed(3)
    model = Branched(SIDES[side])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if cut:
        model.cut.register_forward_hook(lambda m, a, out: detached(m, out, None, None))
    with mf.attach(model, hooks) if hooks else nullcontext():
        for _ in range(2):
            model(torch.linspace(-1, 1, 12).view(3, 4)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return [*gradients, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("run_where", ["replicated", "once"])
@pytest.mark.parametrize("side", SIDES)
def test_zeros_that_are_a_gradient_are_kept(side: str, run_where: Any) -> None:
    """A parameter that takes part with a gradient of zeros is decayed; one that does not, is not."""
    want = train_branched(side, [], cut=True)
    assert [g is None for g in want[:4]] == [side == "none"] * 2 + [True] * 2
    hooks = [
        mf.HookFunction("cut", editing_function=detached, save=False, run=run_where),
        mf.HookFunction("second", hook_type="tensor"),
        mf.HookFunction("first.weight", hook_type="tensor", editing_function=halved),
    ]
    torch.testing.assert_close(train_branched(side, hooks, cut=False), want, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["replicated", "once"])
def test_an_edit_that_depends_on_another_parameter_alone(how: Any) -> None:
    """The result requires a gradient and has no path to the input: upstream hooks see zeros all the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    own = nn.Parameter(torch.linspace(-1, 1, 4))

    def replaced(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return own * torch.ones_like(inputs)

    edit = mf.HookFunction("2", editing_function=replaced, save=False, run=how)
    with mf.attach(model, [edit, mf.HookFunction("1", hook_type="tensor")]) as flex:
        model(torch.ones(3, 4)).sum().backward()
        assert {n: [bool(t.any()) for t in r] for n, r in flex.output_dict.items()} == {
            "1:output.grad": [False]
        }
    torch.testing.assert_close(own.grad, 3 * model[3].weight.detach().sum(0))
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 2


def test_a_gradient_that_comes_never() -> None:
    """Of a frozen part, and of what is no number: an error that says why, as restore() has it."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    flex = mf.attach(model, [mf.HookFunction("0", hook_type="tensor")])
    model(torch.tensor([[1, 2]])).sum().backward()
    with raises(mf.HookError, "0"):
        flex.restore()


SILENT = {"1:output.grad": "1", "0.weight.grad": "0.weight"}  # what is read, by the name of the hook point


@pytest.mark.parametrize("read", [("1:output.grad", "0.weight.grad"), ("1:output.grad",), ("0.weight.grad",)])
def test_a_function_of_the_models_own_that_gives_no_gradient(read: tuple[str, ...]) -> None:
    """torch then hands hooks None; ours see zeros, alone and together."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.forward = lambda x: model[2](_Blocked.apply(model[1](model[0](x))))  # type: ignore[method-assign]
    hooks = [mf.HookFunction(SILENT[name], hook_type="tensor") for name in read]
    with mf.attach(model, hooks) as flex:
        model(torch.ones(3, 4)).sum().backward()
        found = {n: [t.any().item() for t in r] for n, r in flex.output_dict.items()}
    assert found == {name: [False] for name in read}


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None
