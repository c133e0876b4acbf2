"""A HybridModel by a GPTModel's names, against one process of a GPTModel: values, edits, dumps."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare.comparison import INDISTINGUISHABLE
from tests.distributed import matrix
from tests.distributed.matrix import BOUND, Cell, cells_of, judge, relative
from tests.support import dumped, gpt, moe, oracle, ranks, ssm, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")

SPREAD = Case("gpt names, tp2 sp pp2", tp=2, sp=True, pp=2, layers=2, hybrid=True)
CASES = [
    SPREAD,
    Case("gpt names, experts tp2 sp ep2", tp=2, sp=True, ep=2, layers=2, experts=4, pattern="*E*E"),
    Case(
        "gpt names, prediction tp2 sp",
        tp=2,
        sp=True,
        layers=2,
        pattern="*-*-/*-",
        extra={"mtp_num_layers": 1},
    ),
]
EDITS = [
    "decoder.layers.0:mid",
    "decoder.layers.1:input",
    "decoder.layers.0.self_attention.core_attention:probs",
    "decoder.layers.1.pre_mlp_layernorm:output",
    "decoder.final_layernorm:output",
]
PREDICTION_EDITS = [
    "mtp.layers.0.mtp_model_layer:mid",
    "mtp.layers.0.mtp_model_layer.self_attention.core_attention:probs",
    "mtp.layers.0.mtp_model_layer.mlp:output",
]


MLP = ("mlp", "pre_mlp")  # how the modules of the second layer of a pair begin


def transformer(case: Case) -> Case:
    """The GPTModel of a case, on one process."""
    return replace(case.single(), hybrid=False, pattern="")


def migrated(name: str) -> str:
    """The HybridModel's name of a GPTModel's parameter, worked out apart from the library."""
    if found := re.fullmatch(r"(mtp\.layers\.0\.mtp_model_layer)\.(.*)", name):
        return f"{found[1]}.layers.{int(found[2].startswith(MLP))}.{found[2]}"
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found is None:
        return name.replace("decoder.final_layernorm", "decoder.final_norm")
    return f"decoder.layers.{2 * int(found[1]) + found[2].startswith(MLP)}.{found[2]}"


def migrate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {migrated(name): tensor for name, tensor in state.items()}


def by_gpt_names(case: Case, state: dict[str, Tensor], sites: list[str], edits: list[str]) -> dict[str, Any]:
    """What one rank of the HybridModel reads and edits, with nothing but a GPTModel's names."""
    import megatron_flex as mf

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return oracle.edit(inputs)

    def gradients() -> dict[str, tuple[Any, Tensor]]:
        found = matrix._gradients(flex, chunks)
        return {name: found[migrated(name)] for name in state if migrated(name) in found}

    chunks = ranks.start(case)
    with mf.FlexModel(chunks) as flex:
        for name, tensor in state.items():
            flex.set_module_parameter(f"gpt:{name}", tensor)
        mesh = flex.session.mesh
        answer: dict[str, Any] = {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes)}
        answer |= {"dp": mesh["dp"].coord, "hidden": {}, "read": {}, "edited": {}}
        answer["plain"] = gpt.step(case, chunks, 0), gradients()
        full = flex.get_module_parameter("gpt:decoder.layers.1.mlp.router.weight" if case.experts else PROBED)
        answer["parameter"] = full
    for kind, ending in (("forward", ""), ("tensor", ".grad")):
        hooks = [mf.HookFunction(f"gpt:{site}", hook_type=kind) for site in sites]
        with mf.attach(chunks, hooks) as flex:
            assert gpt.step(case, chunks, 0) == answer["plain"][0], "reading changes nothing"
            if flex.is_leader:
                read = {f"{s}{ending}": list(flex.output_dict[f"gpt:{s}{ending}"]) for s in sites}
                answer["read"].update(read)
    for together in edits:
        hooks = [
            mf.HookFunction(f"gpt:{s}", editing_function=edit, save=False) for s in oracle.apart(together)
        ]
        with mf.attach(chunks, hooks) as flex:
            answer["edited"][together] = gpt.step(case, chunks, 0), gradients()
    return answer


PROBED = "gpt:decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_gradients_and_edits_are_those_of_a_gpt_model(case: Case, cells: list[Any]) -> None:
    one = transformer(case)
    sites = [s for s in oracle.sites_of(one) if not matrix.moe.read_only(s)]
    edits = [oracle.AND.join(EDITS[:3]), oracle.AND.join(EDITS[3:])]
    edits += [oracle.AND.join(PREDICTION_EDITS)] if "/" in case.pattern else []
    truth = truths.of(one, sites, edits)
    answers = run(case.world, by_gpt_names, case, truth["state"], sites, edits, timeout=300)
    judge(cells_of(case, sites, edits, truth, answers), cells)
    name = "decoder.layers.1.mlp.router.weight" if case.experts else PROBED.removeprefix("gpt:")
    assert relative(answers[0]["parameter"], truth["state"][name]) == 0.0


# -- names that nothing has ----------------------------------------------------------------------------


def messages(case: Case) -> list[str]:
    import megatron_flex as mf

    chunks, told = ranks.start(case), []
    with mf.FlexModel(chunks) as flex:
        for ask in (
            lambda: flex.register_forward_hook(mf.HookFunction("gpt:decoder.layers.9.mlp")),
            lambda: flex.sites("gpt:decoder.layers.1.mlp:gate"),
            lambda: flex.sites("gpt:decoder.layers.3"),
            lambda: flex.sites("gpt:blocks.1.hook_mlp_out"),
            lambda: flex.get_module_parameter("gpt:decoder.layers.5.mlp.linear_fc2.weight"),
            lambda: flex.interp.run_with_cache(batch(), "gpt:blocks.7.hook_mlp_out"),
        ):
            try:
                ask()
                told.append("")
            except mf.FlexError as error:
                told.append(str(error))
    return told


def test_a_name_that_a_gpt_model_would_not_have() -> None:
    case = replace(SPREAD, tp=1, sp=False)
    first, second = run(case.world, messages, case)
    assert first == second, "every rank raises the same"
    layer, point, own, lens, parameter, block = first
    assert_names(layer, "decoder.layers", "0-1")
    assert_names(point, "gate", "input", "output")
    assert_names(own, "decoder.layers", "0-1")  # layer 3 is the HybridModel's
    assert_names(lens, "decoder.layers.3.mlp:output")
    assert_names(parameter, "decoder.layers.11.mlp.linear_fc2.weight")
    assert "gpt:blocks.7.hook_mlp_out" in block
    assert not any("\n" in text for text in first)


def test_layers_that_are_no_pairs() -> None:
    case = Case("M*-", pattern="M*-", extra=ssm.MAMBA)
    (told,) = run(1, messages, case)
    assert len(told) == 6
    for text in told:
        assert_names(text, 0, "?*-")


# -- interpretability ----------------------------------------------------------------------------------

LENS = {  # TransformerLens' names by a GPTModel's numbers, and the sites of one process
    "gpt:blocks.0.hook_resid_pre": "decoder.layers.0:input",
    "gpt:blocks.0.hook_resid_mid": "decoder.layers.0:mid",
    "gpt:blocks.1.hook_attn_out": "decoder.layers.1.self_attention:output",
    "gpt:blocks.1.hook_mlp_out": "decoder.layers.1.mlp:output",
    "gpt:blocks.1.hook_resid_post": "decoder.layers.1:output",
    "gpt:blocks.1.mlp.hook_out": "decoder.layers.1.mlp:output",  # as the bridge of TransformerLens 4 has it
}


def batch() -> Tensor:
    return gpt.data(1)[0]["tokens"]


def interpreted(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, migrate(state))
    with mf.FlexModel(chunks) as flex:
        names = [*LENS, "gpt:decoder.layers.*:mid", "gpt:blocks.1.attn.hook_pattern"]
        _, cache = flex.interp.run_with_cache(batch(), names)
        out = {name: cache[name] for name in LENS}
        out["mid"] = cache["gpt:decoder.layers.1:mid"]
        out["pattern"] = cache["gpt:blocks.1.attn.hook_pattern"]
        every = list(flex.interp.run_with_cache(batch())[1])
        fixed = flex.interp.run_with_hooks(
            batch(), [("gpt:blocks.0.hook_resid_mid", lambda t, hook: 0.5 * t)]
        )
        with flex.interp.trace(batch()) as trace:
            trace["gpt:decoder.layers.0:mid"].output = lambda t: 0.5 * t
            mlp = trace["gpt:blocks.1.mlp"].output
            entering = trace["gpt:decoder.layers.1.mlp"].input
            logits = trace.logits
    return out | {
        "every": every,
        "edited": fixed,
        "traced": logits.value,
        "traced mlp": mlp.value,
        "entering": entering.value,
    }


def halved(case: Case, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One process of a GPTModel with half of the stream between attention and MLP of its first layer."""
    seen: dict[str, Tensor] = {}
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    oracle.install(chunks[0], "decoder.layers.0:mid", lambda t: 0.5 * t)
    for site in ("decoder.layers.1.mlp:input", "decoder.layers.1.mlp:output"):
        oracle.install(chunks[0], site, lambda t, site=site: seen.setdefault(site, t))
    with torch.no_grad():
        tokens = batch()
        seen["logits"] = chunks[0](tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1), None)
    return seen


def test_names_of_transformer_lens(cells: list[Any]) -> None:
    one = transformer(SPREAD)
    sites = [*LENS.values(), "decoder.layers.1:mid", "decoder.layers.1.self_attention.core_attention:probs"]
    truth = truths.of(one, oracle.sites_of(one), [])
    edited = truths.once(halved, one, truth["state"])
    found = []
    for answer in run(SPREAD.world, interpreted, SPREAD, truth["state"]):
        wanted = {name: truth["values"][site][0].transpose(0, 1) for name, site in LENS.items()}
        wanted["mid"] = truth["values"][sites[-2]][0].transpose(0, 1)
        wanted["pattern"] = truth["values"][sites[-1]][0]
        wanted |= {"edited": edited["logits"], "traced": edited["logits"]}
        wanted["traced mlp"] = edited["decoder.layers.1.mlp:output"].transpose(0, 1)
        wanted["entering"] = edited["decoder.layers.1.mlp:input"].transpose(0, 1)
        found += [
            Cell(
                SPREAD.name, name, "by TransformerLens' names", relative(answer[name], w), model=SPREAD.model
            )
            for name, w in wanted.items()
        ]
        assert not [n for n in answer["every"] if n.startswith("gpt:")], "each tensor once"
    judge(found, cells)


# -- dumps and statistics ------------------------------------------------------------------------------


def record(case: Case, state: dict[str, Tensor], folder: str) -> None:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dump = mf.Dump(f"{folder}/dump", dumped.ALL, gradients=True, parameters="**", replicas=True)
    some = mf.Dump(f"{folder}/some", ["gpt:decoder.layers.*:*", "gpt:decoder.final_layernorm"])
    statistics = mf.Statistics(
        f"{folder}/statistics", ["gpt:decoder.layers.**", "gpt:decoder.layers.*:mid"], gradients=True
    )
    with mf.attach(chunks, dumps=[dump, some], statistics=statistics):
        gpt.step(case, chunks, 0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GPTModel on one process, its migration on four ranks, and one of these with another weight."""
    one, folder = transformer(SPREAD), tmp_path_factory.mktemp("migration")
    state: dict[str, Tensor] = truths.of(one, oracle.sites_of(one), [])["state"]
    changed = {n: 1.01 * t if n == "decoder.layers.1.mlp.linear_fc1.weight" else t for n, t in state.items()}
    run(1, record, one, state, str(folder / "gpt"))
    run(SPREAD.world, record, SPREAD, migrate(state), str(folder / "hybrid"))
    run(SPREAD.world, record, SPREAD, migrate(changed), str(folder / "changed"))
    return {name: folder / name for name in ("gpt", "hybrid", "changed")}


def test_a_dump_is_compared_with_that_of_its_migration(recorded: dict[str, Path]) -> None:
    from megatron_flex.compare import compare

    one = transformer(SPREAD)
    for a, b in (("gpt", "hybrid"), ("hybrid", "gpt")):
        found = compare(recorded[a] / "dump", recorded[b] / "dump", tolerance=BOUND)
        assert found.verdict == INDISTINGUISHABLE, found.summary()
        assert (list(found.missing), found.exit_status) == ([], 0)
        assert compare(recorded[a] / "dump", recorded[b] / "dump").exit_status == 0
        names = {(r.kind, r.name) for r in found.rows}
        sites, parameters = oracle.sites_of(one), truths.of(one, oracle.sites_of(one), [])["state"]
        gradients = {f"{s}.grad" for s in sites if not moe.read_only(s)}
        assert {("value", s) for s in sites} | {("gradient", g) for g in gradients} <= names
        assert {("parameter", n) for n in parameters} <= names
        assert {("parameter_gradient", f"{n}.grad") for n in parameters} <= names
        (note,) = (n for n in found.notes if "GPTModel" in n)
        assert_names(note, "decoder.layers.1:input, decoder.layers.3:input")
        assert_names(found.a + found.b, "*-*-")


def test_what_differs_is_named_as_in_a_gpt_model(recorded: dict[str, Path]) -> None:
    from megatron_flex.compare import compare

    found = compare(recorded["gpt"] / "dump", recorded["changed"] / "dump")
    ill = [r.name for r in found.rows if r.diverges and r.kind in ("parameter", "value")]
    assert ill[:2] == ["decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1:output"]
    between = compare(recorded["hybrid"] / "dump", recorded["changed"] / "dump")
    assert between.first is not None
    assert between.first.name == "decoder.layers.3.mlp.linear_fc1.weight", "two of a kind keep their names"


def test_dumps_and_statistics_are_read_by_these_names(recorded: dict[str, Path]) -> None:
    import megatron_flex as mf
    from megatron_flex.compare import compare
    from megatron_flex.statistics.statistics_reader import open_statistics

    name = "gpt:decoder.layers.1.mlp.linear_fc1"
    with mf.open_dump(recorded["hybrid"] / "dump") as dump, mf.open_dump(recorded["gpt"] / "dump") as plain:
        assert (dump.gpt_names.pattern, plain.gpt_names.pattern) == ("*-*-", "TT")
        assert torch.equal(dump[name].torch(), dump["decoder.layers.3.mlp.linear_fc1:output"].torch())
        assert relative(dump[f"{name}.grad"].torch(), plain[f"{name}.grad"].torch()) <= BOUND
        assert torch.equal(
            dump.parameter(f"{name}.weight").torch(), plain.parameter(f"{name}.weight").torch()
        )
        assert "gpt:decoder.layers.1:mid" in dump
        assert "gpt:decoder.layers.2:mid" not in dump
        with raises(mf.DumpError, "gpt:decoder.layers.2:mid"):
            dump["gpt:decoder.layers.2:mid"]
    with mf.open_dump(recorded["hybrid"] / "some") as some, mf.open_dump(recorded["gpt"] / "some") as plain:
        assert some.gpt_names.pattern == "*-*-", "whichever sites are dumped"
        assert len(some) == len(plain) == 7
    found = [open_statistics(recorded[n] / "statistics") for n in ("gpt", "hybrid")]
    assert found[1]["gpt:decoder.layers.1:mid"].site == "decoder.layers.2:output"
    result = compare(*found)
    assert (result.first, list(result.missing)) == (None, []), result.summary()
    assert "decoder.layers.1:mid.grad" in {r.name for r in result.rows}
    mixed = compare(recorded["gpt"] / "statistics", recorded["hybrid"] / "dump", allow_missing=True)
    assert mixed.first is None
    assert "decoder.layers.1:mid" in {r.name for r in mixed.rows}
