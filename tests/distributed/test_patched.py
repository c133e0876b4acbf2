"""Patched copies of what is installed: bit for bit what the runtime taps give, and what one process has."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed import matrix
from tests.support import gpt, oracle, patching, pool, proof, ranks
from tests.support.elsewhere import Elsewhere
from tests.support.gpt import Case

pytest.importorskip("megatron.core")
pytest.importorskip("libcst", reason="the patches are made with it: pip install megatron-flex[patches]")

LAYERS = {
    "megatron": "megatron.core.tensor_parallel.layers",
    "fairscale": "fairscale.nn.model_parallel.layers",
}
CASES = [
    Case("tp2, tied", tp=2, tied=True, layers=2),
    Case("tp2 dp2, bias, learned positions", tp=2, dp=2, bias=True, rope=False, gated=False, layers=2),
    Case("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, microbatches=2),
    Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=2, recompute=("full",)),
    Case("moe tp2 sp ep2", tp=2, sp=True, ep=2, experts=4, layers=2),
    Case("moe tp2 etp2, shared experts", tp=2, sp=True, etp=2, experts=4, shared_experts=True, layers=1),
]
ANYWHERE = Case("tp2 sp", tp=2, sp=True, layers=2)


def where(names: list[str]) -> list[tuple[str, bool]]:
    """The files that were imported, and whether they are patched."""
    modules = [importlib.import_module(name) for name in names]
    return [(str(m.__file__), hasattr(m.RowParallelLinear, "flex_points")) for m in modules]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """Ranks that import patched copies."""
    from megatron_flex_patches.command import main

    folder = tmp_path_factory.mktemp("patched")
    packages = [p for p in LAYERS if importlib.util.find_spec(p)]
    for package in packages:
        patching.copy(package, folder)
    assert main(["--apply", str(folder)]) == 0
    with Elsewhere(folder) as there:
        names = [LAYERS[p] for p in packages]
        assert [patched for _, patched in pool.run(1, where, names)[0]] == [False] * len(names)
        for file, patched in there.run(1, where, names)[0]:
            assert Path(file).is_relative_to(folder), "the copy was not what was imported"
            assert patched
        yield there


def at_points(case: Case) -> tuple[list[str], list[str]]:
    """The sites that a patched class has, some beside them; and those that are edited, of the last layer."""
    kinds = "(gemm_input|partial|output)"
    place = re.compile(rf".*(linear_\w+|output_layer|embeddings):{kinds}|.*(:mid|mlp:output)")
    sites = [s for s in oracle.sites_of(case) if place.fullmatch(s)]
    ends = ("fc1:gemm_input", "fc2:partial", "fc2:output", "qkv:output", "proj:partial")
    ends += ("embeddings:partial", "output_layer:gemm_input", "output_layer:output")
    return sites, [s for s in oracle.edits_of(case) if s in sites and s.endswith(ends)]


def compare(case: Case, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "run", patching.both(elsewhere))
    sites, edits = at_points(case)
    assert len(edits) >= 4
    found = matrix.compare(case, sites, edits)
    matrix.judge(found, [])
    assert {c.check for c in found} >= {"value", "gradient", "edited parameter gradients"}


@pytest.mark.versions
def test_on_every_version(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(ANYWHERE, elsewhere, monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpt(case: Case, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(case, elsewhere, monkeypatch)


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return oracle.edit(inputs)


def logits(
    case: Case, state: dict[str, Tensor] | None, always: bool
) -> tuple[Any, Tensor, list[Tensor], Any]:
    """The logits that a model returns, gathered by the linear, with an edit of them; what it read of them."""
    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, state)
    told: dict[str, Any] = {"runtime_gather_output": True}
    if always:
        chunks[0].output_layer.gather_output = True
        told = {}
    batch = gpt.data(1)[0]
    positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
    hooks = [mf.HookFunction("output_layer:output", editing_function=edit)]
    with mf.attach(chunks, hooks) as flex:
        out = chunks[0](batch["tokens"], positions, mask, **told)
        read = list(flex.output_dict.get("output_layer:output", [])) if flex.is_leader else []
    out.square().mean().backward()
    return state, out.detach(), read, chunks[0].embedding.word_embeddings.weight.grad


@pytest.mark.parametrize("always", [False, True], ids=["in this call", "always"])
def test_gathered_logits(elsewhere: Elsewhere, always: bool) -> None:
    case = Case("tp2, gathered", tp=2, sp=True, layers=1)
    state, whole, (read,), _ = pool.run(1, logits, case.single(), None, always)[0]
    answers = patching.both(elsewhere)(2, logits, case, state, always)
    for _, out, _, _ in answers:
        assert matrix.relative(out, whole) < matrix.BOUND
    assert matrix.relative(answers[0][2][0], read) < matrix.BOUND


def standing(case: Case) -> dict[str, Any]:
    """What stands in the model while hooks do, and what is left behind; how much is sent for reading."""
    from megatron_flex import points

    chunks = ranks.start(case)
    plain = gpt.step(case, chunks, 0)
    before = ranks.fingerprint(chunks)
    with ranks.counting() as unhooked:
        gpt.step(case, chunks, 0)
    place = "decoder.layers.0.mlp.linear_"
    names = [f"{place}fc1:gemm_input", f"{place}fc2:partial", f"{place}fc2:output"]
    layer = chunks[0].decoder.layers[0].mlp
    linears = {"fc1": layer.linear_fc1, "fc2": layer.linear_fc2}
    kinds = {n: type(m) for n, m in linears.items()}
    with mf.attach(chunks, [mf.HookFunction(n, save=False, editing_function=nothing) for n in names]):
        ours = {
            n: sorted(vars(m)[points.ATTRIBUTE].callbacks)
            for n, m in linears.items()
            if points.ATTRIBUTE in vars(m)
        }
        hooked = {n: len(m._forward_hooks) for n, m in linears.items()}
        kept = all(type(m) is kinds[n] for n, m in linears.items())
    again = gpt.step(case, chunks, 0)
    gone = ranks.fingerprint(chunks)
    counts = {}
    for name in names[:2]:
        with mf.attach(chunks, [mf.HookFunction(name)]), ranks.counting() as counted:
            gpt.step(case, chunks, 0)
            counts[name] = dict(counted - unhooked)
    return {
        "ours": ours,
        "hooks": hooked,
        "kept": kept,
        "left": sorted(k for k in before.keys() | gone.keys() if before.get(k) != gone.get(k)),
        "same": plain == again,
        "counts": counts,
    }


def nothing(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs


def test_points_are_what_stands_and_nothing_stays(elsewhere: Elsewhere) -> None:
    (there, _), (here, _) = (run(2, standing, ANYWHERE) for run in (elsewhere.run, pool.run))
    assert there["ours"] == {"fc1": ["gemm_input"], "fc2": ["output", "partial"]}
    assert here["ours"] == {}
    assert there["hooks"] == {"fc1": 0, "fc2": 0}
    assert here["hooks"] == {"fc1": 0, "fc2": 1}
    assert there["kept"]
    assert not here["kept"], "a runtime tap gives the linear a class of its own"
    assert there["left"] == []
    assert there["same"]
    assert there["counts"] == here["counts"]


FAIRSCALE = {
    "mp2 dp2, width": {"gather": True, "vocabulary": False},
    "mp2, vocabulary": {"gather": True, "vocabulary": True},
}


@pytest.mark.parametrize("case", FAIRSCALE)
def test_fairscale(case: str, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fairscale")
    from tests.distributed.test_fairscale import INNER, inside

    monkeypatch.setattr(proof, "run", patching.both(elsewhere))
    switches = FAIRSCALE[case]
    dp = 2 if "dp2" in case else 1
    args = (2, dp == 2, switches)
    found = proof.compare("fairscale", case, 2 * dp, inside, *args, sites=list(INNER), edits=list(INNER))
    proof.judge(found, [])
