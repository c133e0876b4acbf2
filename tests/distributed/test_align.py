"""`align`: equal weights agree at every hook point of both frameworks, and planted faults are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.alignment import align_dumps
from tests.support import aligned, alignment_faults, hugging_face
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pages import ROOT, mine
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

BOUND = 1e-5  # in fp32
ONE = Case("one", microbatches=1)
PIPELINE = Case("tp2 sp pp2", tp=2, sp=True, pp=2, microbatches=1)
TENSOR_SEQUENCE = Case("tp2 sp", tp=2, sp=True, microbatches=1)
TENSOR = Case("tp2 sp etp2", tp=2, etp=2, sp=True, microbatches=1)
EXPERTS = Case("tp2 ep2", tp=2, dp=2, ep=2, sp=True, microbatches=1)
LAYOUTS = {"gpt2": PIPELINE, "llama": PIPELINE, "qwen3_moe": EXPERTS, "deepseek_v3": EXPERTS}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")


def check_agreement(found: Any, family: str, bound: float | None) -> None:
    assert found.agrees, str(found)
    assert found.exit_status == 0
    if bound is not None:
        worst = max(found.sites, key=lambda s: max(s.accumulated.error, s.isolated.error))
        assert worst.accumulated.error < bound, worst
        assert worst.isolated.error < bound, worst
    points = {s.site.partition(":")[2] for s in found.sites}
    assert points >= {"input", "output", "mid", "q", "k", "v", "scores", "probs"}
    assert [layer.part for layer in found.layers] == ["embedding", "0", "1", "2", "3", "logits"]
    if family in WITH_EXPERTS:
        assert points >= {"logits", "map", "dispatched", "indices"}
        assert any("local_experts" in s.site for s in found.sites)


def all_families(dtype: torch.dtype) -> dict[str, Any]:
    return {family: aligned.aligned(family, ONE, dtype, isolate=True) for family in hugging_face.FAMILIES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_false_alarm_on_one_rank(dtype: torch.dtype) -> None:
    (found,) = run(1, all_families, dtype)
    for family, alignment in found.items():
        assert alignment.runs == 2
        check_agreement(alignment, family, BOUND if dtype == torch.float32 else None)


def in_layout(case: Case, families: list[str]) -> dict[str, Any]:
    return {family: aligned.aligned(family, case) for family in families}


@pytest.mark.parametrize("case", [PIPELINE, EXPERTS], ids=lambda c: c.name)
def test_every_mapped_site_is_equal_in_layouts(case: Case) -> None:
    families = [f for f, layout in LAYOUTS.items() if layout is case]
    ranks = run(case.world, in_layout, case, families)
    for family in families:
        assert len({str(found[family]) for found in ranks}) == 1, "every rank has the same result"
        check_agreement(ranks[0][family], family, BOUND)
        one = {s.site for s in run(1, in_layout, ONE, [family])[0][family].sites}
        assert {s.site for s in ranks[0][family].sites} == one, "a layout hides no site"


def with_fields(case: Case, names: list[str]) -> dict[str, Any]:
    """What `align` finds of models with other fields; their weights are written back bit by bit."""
    from megatron_flex.alignment import align
    from megatron_flex.conversion import load_hf, to_hf
    from megatron_flex.model import FlexModel

    out = {}
    for name in names:
        family = hugging_face.VARIANTS[name]
        hf_model, chunks = aligned.rank_models(family, case)
        assert load_hf(chunks, hf_model).differences == (), name
        with FlexModel(chunks) as flex:
            out[name] = align(hf_model, flex, hugging_face.tokens(), gradients=True)
        back = hugging_face.make_model(family)
        for tensor in back.state_dict().values():
            tensor.zero_()
        to_hf(chunks, back)
        written = back.state_dict()
        assert all(torch.equal(t, written[n]) for n, t in hf_model.state_dict().items()), name
    return out


@pytest.mark.parametrize(
    ("case", "names"),
    [(ONE, list(hugging_face.VARIANTS)), (TENSOR_SEQUENCE, ["llama, biases", "gpt2, untied"])],
    ids=["one", "tp2 sp"],
)
def test_fields_of_configurations_are_converted(case: Case, names: list[str]) -> None:
    found = run(case.world, with_fields, case, names)[0]
    for name, alignment in found.items():
        assert alignment.agrees, (name, str(alignment))
        assert max(s.accumulated.error for s in (*alignment.sites, *alignment.gradients)) < BOUND, name
    note = "\n".join(found["llama, biases"].notes)
    assert_names(note, 3, "pad_token_id")
    if case.tp > 1:
        assert_names("\n".join(found["gpt2, untied"].notes), 62, 1, 61)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_hybrid_model_is_aligned_by_the_names_of_a_gpt_model(family: str) -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    case = Case("hybrid tp2 sp pp2", tp=2, sp=True, pp=2, microbatches=1, hybrid=True)
    first, *others = (found[family] for found in run(case.world, in_layout, case, [family]))
    assert {str(found) for found in others} == {str(first)}
    check_agreement(first, family, BOUND)
    one = {s.site for s in run(1, in_layout, ONE, [family])[0][family].sites}
    assert {s.site for s in first.sites} == one, "every site of a GPTModel is compared"


def with_large_scores(case: Case, factor: float) -> tuple[Any, list[float]]:
    """Weights with which the softmax of most tokens is nearly a choice; and the greatest scores."""
    from megatron_flex.alignment import align
    from megatron_flex.conversion import load_hf
    from megatron_flex.model import FlexModel

    hf_model, chunks = aligned.rank_models("llama", case)
    greatest: list[float] = []
    with torch.no_grad():
        for layer in hf_model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                linear.weight.mul_(factor)
    load_hf(chunks, hf_model)
    with FlexModel(chunks) as flex:
        found = align(hf_model, flex, hugging_face.tokens())
        name = "decoder.layers.*.self_attention.core_attention:scores"
        cache = flex.interp.run_with_cache(hugging_face.tokens(), [name])[1]
        greatest += [float(t[t > -1000].abs().max()) for t in cache.values()]
    return found, greatest


@pytest.mark.parametrize("case", [ONE, TENSOR_SEQUENCE], ids=lambda c: c.name)
def test_large_scores_make_probabilities_differ_and_no_alarm(case: Case) -> None:
    found, greatest = run(case.world, with_large_scores, case, 16.0)[0]
    assert min(greatest) > 100
    assert found.agrees, str(found)
    probabilities = [s for s in found.sites if s.site.endswith("core_attention:probs")]
    ratios = [s.accumulated.excess for s in probabilities]
    assert len(ratios) == 4
    assert max(ratios) < 0.5
    if case.world > 1:
        assert max(s.accumulated.error for s in probabilities) > BOUND, "by more than in other models"
        others = [s.accumulated.tolerance for s in found.sites if s.site.endswith("linear_fc1:input")]
        assert max(others) < 100 * BOUND, "what follows is still compared closely"


def find_all(names: list[str], case: Case) -> dict[str, Any]:
    return {name: alignment_faults.find(name, case) for name in names}


def check_fault(name: str, found: Any) -> None:
    fault = alignment_faults.FAULTS[name]
    assert found.exit_status == 1, name
    assert found.first.site == fault.site, (name, str(found))
    assert any(fault.words in cause for cause in found.causes), (name, str(found))
    part = found.first.part
    assert part == next(layer.part for layer in found.layers if layer.isolated or layer.accumulated), name


def test_planted_faults_are_found_and_named() -> None:
    names = list(alignment_faults.FAULTS)
    assert len(names) >= 20
    for name, found in run(1, find_all, names, ONE)[0].items():
        check_fault(name, found)


def test_an_error_does_not_carry_over_when_isolated() -> None:
    found = run(1, find_all, ["gate and up swapped"], ONE)[0]["gate and up swapped"]
    layers = {layer.part: layer for layer in found.layers}
    assert not layers["1"].accumulated
    assert layers["2"].isolated == "decoder.layers.2.mlp.linear_fc1:gate"
    assert layers["3"].accumulated, "the error reaches the next layer"
    assert not layers["3"].isolated, "which computes as it should"
    assert layers["logits"].accumulated
    assert not layers["logits"].isolated


def counted_runs(case: Case, fault: str = "", isolate: bool = False) -> tuple[Any, int]:
    """What `align` finds, and how often the model of this rank was called."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    calls, forward = [], GPTModel.forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(GPTModel, "forward", count)
        find = alignment_faults.find(fault, case, isolate=isolate) if fault else None
        return find or aligned.aligned("llama", case, isolate=isolate), len(calls)


def test_a_second_run_only_where_layers_may_differ() -> None:
    for found, calls in run(PIPELINE.world, counted_runs, PIPELINE):
        assert (found.runs, calls, found.agrees) == (1, 1, True)
        assert all(s.isolated.error == s.accumulated.error for s in found.sites)
        assert not any(s.diverges_alone for s in found.sites)
    for found, calls in run(1, counted_runs, ONE, "", True):
        assert (found.runs, calls, found.agrees) == (2, 2, True)
        inputs = [s for s in found.sites if s.site == "decoder.layers.2:input"]
        assert inputs[0].isolated.error == 0 < inputs[0].accumulated.error
    for found, calls in run(1, counted_runs, ONE, "weight rounded to bf16"):
        assert (found.runs, calls, found.agrees) == (2, 2, False)


@pytest.mark.parametrize(
    ("name", "case"),
    [("qkv concatenated", PIPELINE), ("experts exchanged", EXPERTS)],
    ids=["pipeline", "experts"],
)
def test_faults_are_found_in_layouts(name: str, case: Case) -> None:
    for found in run(case.world, find_all, [name], case):
        check_fault(name, found[name])


def padded(case: Case) -> Any:
    tokens = hugging_face.tokens()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0  # as a tokenizer pads on the left
    mask[1, 11:] = 0
    ids = torch.where(mask.bool(), tokens, 63)
    return aligned.aligned("llama", case, batch={"input_ids": ids[:, :15], "attention_mask": mask[:, :15]})


def test_padding_is_moved_and_shown() -> None:
    for found in run(PIPELINE.world, padded, PIPELINE):
        check_agreement(found, "llama", BOUND)
        text = "\n".join(found.notes)
        moved, added, padding = text.splitlines()
        assert_names(moved, 1)
        assert_names(added, 1, 2)
        assert_names(padding, 11, 32)


def with_gradients(case: Case, family: str, fault: str = "", wrap: dict[str, Any] | None = None) -> Any:
    if fault:
        return alignment_faults.find(fault, case, gradients=True)
    more = {"calculate_per_token_loss": True} if wrap and wrap.pop("per_token", False) else {}
    return aligned.aligned(family, case, gradients=True, wrap=wrap, **more)


CONTEXT = Case("tp2 sp cp2", tp=2, cp=2, sp=True, microbatches=1)
INTERLEAVED = Case("pp2 vpp2", pp=2, vpp=2, microbatches=1)
REPLICATED = Case("dp2 cp2", dp=2, cp=2, microbatches=1)
EXPERT_PIPELINE = Case("pp2 ep2", pp=2, dp=2, ep=2, microbatches=1)
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
GRADIENT_CASES: dict[str, tuple[str, Case, dict[str, Any] | None]] = {
    "pipeline": ("llama", PIPELINE, None),
    "tied": ("qwen2", PIPELINE, None),
    "expert tensor": ("mixtral", TENSOR, None),
    "experts": ("qwen3_moe", EXPERTS, None),
    "context": ("llama", CONTEXT, None),
    "replicas": ("qwen2", REPLICATED, None),
    "interleaved": ("llama", INTERLEAVED, None),
    "experts, stages": ("mixtral", EXPERT_PIPELINE, None),
    "wrapped": ("qwen2", PIPELINE, {}),
    "wrapped experts": ("qwen3_moe", EXPERTS, DISTRIBUTED),
    "wrapped context": ("llama", CONTEXT, {}),
    "wrapped, by tokens": ("llama", REPLICATED, {"per_token": True}),
    "wrapped, interleaved": ("llama", INTERLEAVED, DISTRIBUTED),
}


@pytest.mark.parametrize(("family", "case", "wrap"), GRADIENT_CASES.values(), ids=GRADIENT_CASES)
def test_loss_and_gradients_are_equal(family: str, case: Case, wrap: dict[str, Any] | None) -> None:
    ranks = run(case.world, with_gradients, case, family, "", wrap)
    first = ranks[0]
    assert {str(found) for found in ranks} == {str(first)}
    assert first.agrees, str(first)
    names = {g.other for g in first.gradients}
    assert {"loss:output", "model.embed_tokens.weight", "model.norm.weight"} <= names
    assert max(g.accumulated.error for g in first.gradients) < BOUND
    model = hugging_face.make_model(family)
    assert names == {n for n, _ in model.named_parameters()} | {"loss:output"}


def biases_kept(wrap: dict[str, Any] | None) -> tuple[bool, bool, bool]:
    """Whether routers have correction biases, and keep them; and whether the settings of the chunks stay."""
    from megatron_flex.alignment import align
    from megatron_flex.model import FlexModel

    hf_model, chunks = aligned.rank_models("deepseek_v3", ONE)
    if wrap is not None:
        chunks = aligned.wrapped(chunks, **wrap)
    config: Any = vars(chunks[0])["config"]  # torch types the attributes of a module as modules or tensors
    config.moe_router_bias_update_rate = 0.1
    config.grad_scale_func = scale = lambda loss: loss * 8
    before = {n: b.clone() for n, b in chunks[0].named_buffers()}
    with FlexModel(chunks) as flex:
        found = align(hf_model, flex, hugging_face.tokens(), gradients=True)
    assert found.agrees, str(found)
    after = dict(chunks[0].named_buffers())
    return (
        any(n.endswith("expert_bias") for n in before),
        all(torch.equal(b, after[n]) for n, b in before.items()),
        config.grad_scale_func is scale and config.finalize_model_grads_func is None,
    )


@pytest.mark.parametrize("wrap", [None, {}], ids=["bare", "wrapped"])
def test_a_step_for_gradients_leaves_biases_and_settings(wrap: dict[str, Any] | None) -> None:
    assert run(1, biases_kept, wrap)[0] == (True, True, True)


def test_a_difference_in_the_loss_shows_in_gradients() -> None:
    found = run(1, with_gradients, ONE, "llama", "weight rounded to bf16")[0]
    wrong = [g.other for g in found.gradients if g.diverges]
    assert "model.layers.2.mlp.down_proj.weight" in wrong or "model.layers.2.mlp.up_proj.weight" in wrong


def dumped(folder: str) -> None:
    import megatron_flex as mf

    _, chunks = aligned.rank_models("qwen2", TENSOR)
    with mf.attach(chunks, dumps=mf.Dump(f"{folder}/megatron", sites="**:*", parameters="**.bias")):
        hugging_face.run_logits(TENSOR, chunks)


def dumped_reference(folder: str, factor: float) -> None:
    import megatron_flex as mf

    model = hugging_face.make_model("qwen2")
    model.get_parameter("model.layers.2.mlp.up_proj.weight").data.mul_(factor)
    with (
        mf.attach(model, dumps=mf.Dump(f"{folder}/hf {factor:g}", sites="**:*")) as flex,
        flex.step(),
        torch.no_grad(),
    ):
        model(hugging_face.tokens(), use_cache=False)


def test_dumps_are_compared_across_frameworks(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from megatron_flex.cli.app import app

    run(TENSOR.world, dumped, str(tmp_path))
    for factor in (1.0, 1.5):
        run(1, dumped_reference, str(tmp_path), factor)
    found = align_dumps(tmp_path / "hf 1", tmp_path / "megatron")
    assert found.agrees, str(found)
    assert max(s.accumulated.error for s in found.sites) < BOUND
    assert {s.site for s in found.sites} >= {
        "decoder.layers.3.self_attention.linear_qkv:k",
        "decoder.layers.0.mlp.linear_fc1:gate",
        "decoder.layers.1:mid",
        "output_layer:output",
    }
    wrong = CliRunner().invoke(
        app, ["compare", str(tmp_path / "megatron"), str(tmp_path / "hf 1.5"), "--json"]
    )
    assert wrong.exit_code == 1, wrong.output
    assert json.loads(wrong.stdout)["first"] == "decoder.layers.2.mlp.linear_fc1:up"
    right = CliRunner().invoke(app, ["compare", str(tmp_path / "hf 1"), str(tmp_path / "megatron")])
    assert right.exit_code == 0, right.output
    assert "agrees" in right.stdout


def bad_input(case: Case) -> list[str]:
    import megatron_flex as mf
    from megatron_flex.launch.model_alignment import align_with_folder

    hf_model, chunks = aligned.rank_models("llama", case)
    tokens, out = hugging_face.tokens(), []
    first = torch.distributed.get_rank() == 0
    unknown = torch.nn.Linear(2, 2)
    gap = torch.ones_like(tokens)
    gap[:, 3] = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory left")

    broken = hugging_face.make_model("llama")
    broken.forward = fail
    with mf.FlexModel(chunks) as flex:
        for model, batch in (
            (None, tokens),
            (unknown, tokens),
            (hf_model, {"attention_mask": gap}),
            (hf_model, {"input_ids": tokens, "attention_mask": gap}),
            (hf_model, tokens.float()),
            (broken, tokens),
        ):
            with pytest.raises(mf.FlexError) as refused:
                mf.align(model if first else None, flex, batch)
            out.append(str(refused.value))
        with pytest.raises(mf.FlexError) as refused:
            align_with_folder(flex, "no/such/folder", None, None)
        out.append(str(refused.value))
        assert mf.align(hf_model if first else None, flex, tokens).agrees, "and the model is as it was"
    return out


def test_bad_input_is_one_line_on_all_ranks() -> None:
    first, second = run(TENSOR.world, bad_input, TENSOR)
    assert first == second
    words = (
        "no Hugging Face model",
        "no config.model_type",
        "give input_ids",
        "padding between tokens",
        "dtype torch.float32",
        "no memory left",
        "--flex-align no/such/folder: ",
    )
    for text, word in zip(first, words, strict=True):
        assert word in text
        assert "\n" not in text


def page(code: str) -> list[str]:
    hf_model, chunks = aligned.rank_models("qwen3", TENSOR)
    printed: list[str] = []

    def collect(*words: Any) -> None:
        printed.append(" ".join(map(str, words)))

    exec(code, {"hf_model": hf_model, "chunks": chunks, "print": collect})
    return printed


def test_the_page_runs() -> None:
    code = "\n".join(mine(ROOT / "docs" / "huggingface.md"))
    first, second = run(TENSOR.world, page, code)
    assert first == second
    assert_names(first[0].splitlines()[0], 151)
    assert float(first[1]) < BOUND
    assert first[2] == (
        "decoder.layers.1.self_attention.core_attention:q model.layers.1.self_attn:query b n s d -> s b n d"
    )
    assert_names(first[3], "loss:output", "Hugging Face")
