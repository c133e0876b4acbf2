"""Every preset on a sharded model equals plain formulas on one process: losses and parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed import matrix
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run

pytest.importorskip("megatron.core")

MID = "decoder.layers.0:mid"
FC1 = "decoder.layers.1.mlp.linear_fc2:input"
ATTENTION = "decoder.layers.0.self_attention"
VECTOR = torch.linspace(-1, 1, gpt.HIDDEN)
WIDTH = gpt.HIDDEN // gpt.HEADS
Formula = Callable[[Tensor], Tensor]
Row = tuple[str, Callable[[], Any], Formula]


def donor(shape: tuple[int, ...] = (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN), seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            parameter.copy_(0.1 * donor(tuple(parameter.shape), 20 + n))
    return module


class Coder(nn.Module):
    """An autoencoder whose reconstruction comes with its code."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(gpt.HIDDEN, 8), nn.Linear(8, gpt.HIDDEN)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        code = self.into(inputs).relu()
        return self.out(code), code


def modules() -> nn.ModuleDict:
    from megatron_flex import edits

    return nn.ModuleDict({"adapter": weights(edits.LowRank(gpt.HIDDEN, 4)), "coder": weights(Coder())})


def part(x: Tensor, where: Any, new: Tensor) -> Tensor:
    out = x.clone()
    out[where] = new[where]
    return out


def unit() -> Tensor:
    return VECTOR / VECTOR.norm()


def exchanged(x: Tensor) -> Tensor:
    return x[:, torch.tensor([1, 0])]


def rerolled(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    out = torch.empty_like(x)
    out[order[:1]], out[order[1:]] = x[order[-1:]], x[order[:-1]]
    return out


def of_modules(name: str) -> Formula:
    def formula(x: Tensor) -> Tensor:
        m = modules()
        if name == "adapter":
            return x + x @ m["adapter"].down.weight.T @ m["adapter"].up.weight.T
        made = m["coder"](x)[0]
        return made if name == "coder" else x.detach() + made - made.detach()

    return formula


def presets() -> dict[str, Row]:
    """Name to site, the preset, and what it is."""
    from megatron_flex import edits as e

    heads = slice(0, 1), slice(3, 4)

    def silent(x: Tensor, dim: int) -> Tensor:
        out = x.clone()
        for chosen in heads:
            out[(*[slice(None)] * dim, chosen)] = 0
        return out

    packed = (gpt.SEQUENCE, gpt.BATCH, gpt.HEADS, WIDTH)
    return {
        "scale": (MID, lambda: e.scale(1.5), lambda x: 1.5 * x),
        "scale of positions": (
            MID,
            lambda: e.scale(2.0, positions=[0, -1, 5]),
            lambda x: part(x, [0, 15, 5], 2 * x),
        ),
        "zero": (
            FC1,
            lambda: e.zero(features=slice(None, None, 2)),
            lambda x: x * (torch.arange(gpt.FFN) % 2),
        ),
        "steer": (
            MID,
            lambda: e.steer(VECTOR, 4.0, positions=slice(-4, None)),
            lambda x: part(x, slice(12, 16), x + 4 * VECTOR),
        ),
        "mean": (MID, lambda: e.mean(), lambda x: x.mean((0, 1)).expand_as(x)),
        "a given mean": (
            MID,
            lambda: e.mean(value=VECTOR, samples=1),
            lambda x: part(x, (slice(None), 1), VECTOR.expand_as(x)),
        ),
        "resample": (MID, lambda: e.resample("s"), rerolled),
        "heads of the output": (
            f"{ATTENTION}.core_attention:output",
            lambda: e.ablate_heads([0, 3]),
            lambda x: silent(x.view(packed), 2).view(x.shape),
        ),
        "heads of queries": (f"{ATTENTION}:q", lambda: e.ablate_heads([0, 3]), lambda x: silent(x, 2)),
        "heads kept": (f"{ATTENTION}:q", lambda: e.ablate_heads([1, 2], keep=True), lambda x: silent(x, 2)),
        "heads of scores": (
            f"{ATTENTION}.core_attention:scores",
            lambda: e.ablate_heads([0, 3]),
            lambda x: silent(x, 1),
        ),
        "heads of probabilities": (
            f"{ATTENTION}.core_attention:probs",
            lambda: e.scale(0.5, heads=[0, 3], positions=-1),
            lambda x: part(x, (slice(None), [0, 3], -1), 0.5 * x),
        ),
        "neurons": (
            FC1,
            lambda: e.ablate_neurons([0, 7, -1]),
            lambda x: part(x, (..., [0, 7, gpt.FFN - 1]), 0 * x),
        ),
        "project out": (MID, lambda: e.project_out(VECTOR), lambda x: x - (x @ unit())[..., None] * unit()),
        "project": (  # not of all the stream: a norm behind it would leave the direction no gradient
            f"{ATTENTION}:output",
            lambda: e.project(VECTOR),
            lambda x: (x @ unit())[..., None] * unit(),
        ),
        "clamp": (MID, lambda: e.clamp(-0.2, 0.3), lambda x: x.clamp(-0.2, 0.3)),
        "noise": (MID, lambda: e.noise(0.1), lambda x: x + 0.1 * torch.randn(x.shape)),
        "patch": (MID, lambda: e.patch(donor(), positions=3), lambda x: part(x, 3, donor())),
        "swap": (MID, lambda: e.swap(0, 1), exchanged),
        "low rank": (MID, lambda: e.low_rank("adapter"), of_modules("adapter")),
        "splice": (MID, lambda: e.splice("coder"), of_modules("coder")),
        "splice with its error": (MID, lambda: e.splice("coder", keep_error=True), of_modules("error")),
        "a chain": (
            MID,
            lambda: e.swap(0, 1) | e.steer(VECTOR) | e.clamp(-0.5, 0.5),
            lambda x: (exchanged(x) + VECTOR).clamp(-0.5, 0.5),
        ),
    }


def states_in_edits(case: Case, site: str) -> list[Tensor]:
    """The random states that an edit of one process meets in the microbatches of its first step."""
    states: list[Tensor] = []

    def noted(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        states.append(torch.get_rng_state())
        torch.rand(1)
        return inputs

    chunks = gpt.build(case)
    with mf.attach(chunks, [mf.HookFunction(site, editing_function=noted, save=False)]):
        states.clear()
        gpt.step(case, chunks, 0)
    assert len(states) == case.microbatches
    return states


def truth(case: Case, names: list[str]) -> dict[str, Any]:
    """Each preset's formula on one process of plain Megatron."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    out: dict[str, Any] = {"state": state, "edited": {}}
    random_states: dict[str, list[Tensor]] = {}
    for name in names:
        site, _, formula = presets()[name]
        if site not in random_states:
            random_states[site] = states_in_edits(case, site)
        fresh, states = gpt.build(case), iter(random_states[site])
        gpt.load(fresh, state)

        def visit(x: Tensor, formula: Formula = formula, states: Iterator[Tensor] = states) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(next(states))
                return formula(x)

        oracle.install(fresh[0], site, visit)
        out["edited"][name] = oracle._step(case, fresh)
    return out


def sharded(case: Case, state: dict[str, Tensor], names: list[str], run_on: str) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    answer: dict[str, Any] = {"edited": {}}
    for name in names:
        site, make, _ = presets()[name]
        hook = mf.HookFunction(site, editing_function=make(), save=False, run=run_on)
        with mf.attach(chunks, [hook]) as flex:
            flex.session.editing.modules.update(modules())
            mesh = flex.session.mesh
            answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": dp}
            answer["edited"][name] = gpt.step(case, chunks, dp), matrix._gradients(flex, chunks)
            answer["plain"] = answer["edited"][name]
    return answer


SOME = ["scale of positions", "steer", "mean", "resample", "heads of the output", "heads of scores"]
SOME += ["heads of probabilities", "neurons", "noise", "patch", "splice", "a chain"]


@pytest.mark.parametrize(
    ("case", "some", "run_on"),
    [
        (Case("tp2 sp", tp=2, sp=True, layers=2), False, "replicated"),
        (Case("tp2 sp, on one rank", tp=2, sp=True, layers=2), True, "once"),
        pytest.param(Case("pp2", pp=2, layers=2), True, "replicated", marks=pytest.mark.versions),
        (Case("cp2", cp=2, layers=2), True, "replicated"),
        (Case("tp2, all recomputed", tp=2, layers=2, recompute=("full",)), True, "replicated"),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_presets_equal_their_formulas_on_one_process(
    case: Case, some: bool, run_on: str, cells: list[Any]
) -> None:
    names = SOME if some else list(presets())
    want = truths.once(truth, case.single(), names)
    answers = run(case.world, sharded, case, want["state"], names, run_on)
    want |= {"losses": want["edited"][names[-1]][0], "parameters": want["edited"][names[-1]][1]}
    found = [c for c in matrix._effects(case, names, want, answers) if c.site != "(none)"]
    assert len(found) == 2 * len(names)
    matrix.judge([replace(c, model="GPT, ready-made edits") for c in found], cells)
    losses = {round(want["edited"][n][0][0], 6) for n in names}
    assert len(losses) > len(names) - 4, "presets do something"


def refused(case: Case) -> list[str]:
    import megatron_flex as mf
    from megatron_flex import edits as e

    chunks = ranks.start(case)
    out = []
    for place, edit in (
        (MID, e.ablate_heads(0)),
        (MID, e.steer(torch.ones(7))),
        ("loss", e.mean("h")),
        ("decoder.layers.1:mid", e.patch({MID: donor()})),
    ):
        try:
            mf.attach(chunks, [mf.HookFunction(place, editing_function=edit)])
        except mf.HookError as error:
            out.append(str(error))
    flex = mf.attach(chunks, [mf.HookFunction(MID, editing_function=e.low_rank("adapter"))])
    out.append(ranks.step_says(case, chunks, flex))
    mine = VECTOR * (1 + torch.distributed.get_rank())
    flex = mf.attach(chunks, [mf.HookFunction(MID, editing_function=e.steer(mine))])
    out.append(ranks.step_says(case, chunks, flex))
    return out


@pytest.mark.versions
def test_a_preset_that_cannot_stand_somewhere_is_refused_at_once_on_all_ranks() -> None:
    first, second = run(2, refused, Case("pp2", pp=2, layers=2))
    assert first == second
    expected: list[tuple[object, ...]] = [
        ("ablate_heads", MID, "[s, b, h]", "core_attention:output"),
        ("steer", MID, 32),
        ("mean", "loss:output", "[b, s]", "'h'"),
        ("patch", "decoder.layers.1:mid", "decoder.layers", "edits.write()"),
        ("low_rank('adapter')", MID, "rank 0"),
        ("rank 0", "rank 1", MID, "steer"),
    ]
    assert len(first) == len(expected)
    for said, values in zip(first, expected, strict=True):
        assert_names(said, *values)
        assert "\n" not in said


def across(case: Case, path: str) -> tuple[list[float], list[float], list[float]]:
    """A run's values put into a step with other weights by a file, and into itself."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    layer = "decoder.layers.1"
    with mf.attach(chunks, [mf.HookFunction(layer)]) as flex:
        plain = gpt.step(case, chunks, 0)
        mf.edits.write(flex.output_dict, path)
    torch.distributed.barrier()
    with torch.no_grad():
        for name, parameter in gpt.global_names(chunks[-1]):
            if name.startswith("decoder.layers"):
                parameter.mul_(1.5)
    other = gpt.step(case, chunks, 0)
    with mf.attach(chunks, [mf.HookFunction(layer, editing_function=mf.edits.patch(path), save=False)]):
        patched = gpt.step(case, chunks, 0)
    return plain, other, patched


@pytest.mark.versions
def test_what_one_run_had_is_put_into_another(tmp_path: Any) -> None:
    *_, (plain, other, patched) = run(4, across, Case("tp2 pp2", tp=2, pp=2, layers=2), f"{tmp_path}/run.pt")
    assert plain != other
    assert patched == pytest.approx(plain, rel=1e-5)


def on_plain_modules() -> tuple[Tensor, Tensor, str]:
    import megatron_flex as mf

    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), donor((5, 2, 4))
    plain = model[0](x).detach()
    edit = mf.edits.scale(3.0, features=-1) | mf.edits.steer(torch.ones(6), positions=[0], dims="s b h")
    hook = mf.HookFunction("0", editing_function=edit)
    with mf.attach(model, [hook]) as flex:
        flex.debug()
        got = model(x)
        got.sum().backward()
        told = flex.explain(hook)
    plain[..., -1] *= 3
    plain[0] += 1
    return got.detach(), plain.tanh(), told


def test_presets_on_plain_modules() -> None:
    """Nothing names the dims there but the user."""
    ((got, want, told),) = run(1, on_plain_modules)
    assert torch.allclose(got, want)
    assert_names(told, "0:output")


@pytest.mark.parametrize(
    "edit",
    [
        mf.edits.scale(2.0, positions=-1),
        mf.edits.scale(2.0, samples=0),
        mf.edits.scale(2.0, heads=0),
        mf.edits.swap(0, 1),
        mf.edits.resample("b"),
        mf.edits.mean("s"),
        mf.edits.ablate_heads(0),
        mf.edits.clamp(0.0, 1.0) | mf.edits.zero(positions=0),
    ],
    ids=repr,
)
def test_presets_on_plain_modules_are_refused_without_names(edit: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    hook = mf.HookFunction("0", editing_function=edit)
    with raises(mf.HookError, "0:output", "dims="), mf.attach(model, [hook]):
        pass
    with raises(mf.HookError, "dims="):
        edit(None, torch.zeros(2, 3, 6), None, nn.ModuleDict())
