"""Law 1 for models beyond the dense GPT: multi-token prediction, and layers that are no attention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest

from tests.distributed.test_matrix import GPT, check
from tests.support import families, gpt, oracle, ranks, ssm
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])

ONE, TWO = {"mtp_num_layers": 1}, {"mtp_num_layers": 2}
PREDICTING = [
    Case("mtp tp2 sp", tp=2, sp=True, layers=2, extra=ONE),
    Case("mtp tp2 pp2, two depths", tp=2, pp=2, layers=2, extra=TWO),
    Case("mtp pp2 vpp2", pp=2, vpp=2, layers=4, extra=ONE),
]


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
@pytest.mark.parametrize("case", PREDICTING, ids=lambda c: c.name)
def test_prediction_of_several_tokens(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *PREDICTING])


def repeated() -> Case:
    return Case(
        "mtp tp2, one layer for two depths", tp=2, layers=2, extra=TWO | {"mtp_use_repeated_layer": True}
    )


@pytest.mark.skipif(VERSION < (0, 19), reason="mtp_use_repeated_layer came later")
def test_one_layer_for_two_depths(cells: list[Any]) -> None:
    case = repeated()
    check(case, cells, None, [s for s in oracle.edits_of(case) if s.startswith("mtp")])


MAMBA = [
    Case("M*- tp2 sp", tp=2, sp=True, pattern="M*-", extra=ssm.MAMBA),
    Case("M*|-M tp2 pp2", tp=2, pp=2, pattern="M*|-M", extra=ssm.MAMBA),
]
HYBRID = [
    Case("*E- tp2 sp ep2", tp=2, sp=True, ep=2, pattern="*E-", experts=4),
    Case("E|*E dp2 pp2 ep2", dp=2, pp=2, ep=2, pattern="E|*E", experts=4),
    # A last layer of Mamba's would make rounding errors in so small a model greater, in plain Megatron too.
    Case("M+- tp2 sp", tp=2, sp=True, pattern="M+-", mla="mended", extra=ssm.MAMBA),
    Case("M tp2 dp2", tp=2, dp=2, pattern="M", extra=ssm.MAMBA),
    Case("M*- tp2 sp, all recomputed", tp=2, sp=True, pattern="M*-", recompute=("full",), extra=ssm.MAMBA),
    Case("G- tp2 sp", tp=2, sp=True, pattern="G-", extra=ssm.DELTA),
    Case("G|*M tp2 pp2", tp=2, pp=2, pattern="G|*M", extra=ssm.MAMBA | ssm.DELTA),
    Case("M|-/*M tp2 pp2", tp=2, pp=2, pattern="M|-/*M", extra=ssm.MAMBA | ONE),
]


BERT: dict[str, Any] = {"bert": True, "gated": False, "rms": False, "rope": False, "bias": True, "layers": 2}
ENCODERS = [Case("bert tp2 sp", tp=2, sp=True, **BERT), Case("bert tp2 pp2", tp=2, pp=2, **BERT)]


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
@pytest.mark.parametrize("case", ENCODERS, ids=lambda c: c.name)
def test_bert(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *ENCODERS])


PLAINLY: dict[str, Any] = {"gated": False, "rms": False, "rope": False, "bias": True, "layers": 2}
FAMILIES = [
    Case("value head tp2 sp", tp=2, sp=True, layers=2, family=families.VALUE),
    Case("value head tp2 pp2", tp=2, pp=2, layers=2, family=families.VALUE),
    Case("reward head tp2 sp", tp=2, sp=True, layers=2, family=families.REWARD),
    Case("reward head tp2 pp2", tp=2, pp=2, layers=2, family=families.REWARD),
    Case("t5 tp2 sp", tp=2, sp=True, groups=gpt.HEADS, family=families.T5, **PLAINLY),
    Case("t5 tp2 dp2", tp=2, dp=2, groups=gpt.HEADS, family=families.T5, tied=True, **PLAINLY),
    Case("clip tp2", tp=2, groups=gpt.HEADS, family=families.CLIP, **PLAINLY),
    Case("radio tp2", tp=2, groups=gpt.HEADS, family=families.RADIO, **PLAINLY),
    Case("llava tp2", tp=2, layers=2, family=families.LLAVA),
    Case("llava tp2 pp2", tp=2, pp=2, layers=2, family=families.LLAVA),
    Case("mimo tp2 sp", tp=2, sp=True, layers=2, family=families.MIMO),
]


@pytest.mark.skipif(VERSION < (0, 19), reason=families.NEED)
@pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.name)
def test_families(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *ENCODERS, *FAMILIES])


@pytest.mark.versions
@pytest.mark.skipif(VERSION < (0, 16), reason="checked from megatron-core 0.16 on")
@pytest.mark.skipif(
    VERSION < (0, 19) and importlib.util.find_spec("triton") is None,
    reason="Mamba of megatron-core 0.16 imports triton, which is not installed here",
)
@pytest.mark.parametrize("case", MAMBA, ids=lambda c: c.name)
def test_mamba(case: Case, cells: list[Any]) -> None:
    """A HybridModel, or a MambaModel before 0.19."""
    check(case, cells, among=[*GPT, *MAMBA, *HYBRID])


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
@pytest.mark.parametrize("case", HYBRID, ids=lambda c: c.name)
def test_layers_without_attention(case: Case, cells: list[Any]) -> None:
    check(case, cells, among=[*GPT, *MAMBA, *HYBRID])


def refusal(case: Case) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    try:
        mf.FlexModel(chunks)
    except mf.FlexError as error:
        return str(error)
    return ""


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
def test_context_parallel_inside_mamba_is_refused() -> None:
    case = Case("M cp2", cp=2, pattern="M", extra=ssm.MAMBA)
    assert all("Mamba" in told for told in run(2, refusal, case))


def names_of(case: Case) -> list[str]:
    import megatron_flex as mf

    flex = mf.FlexModel(ranks.start(case))
    return [s.name for s in flex.sites() if not s.hidden]


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
@pytest.mark.parametrize(
    "case", [PREDICTING[1], MAMBA[1], *HYBRID[3:], ENCODERS[1], *FAMILIES], ids=lambda c: c.name
)
def test_every_site_is_compared(case: Case) -> None:
    assert sorted(run(case.world, names_of, case)[0]) == sorted(oracle.sites_of(case))


def shared_embedding(case: Case) -> list[str]:
    import megatron_flex as mf

    flex = mf.FlexModel(ranks.start(case))
    name = "embedding.word_embeddings.weight"
    try:
        flex.register_hook(mf.HookFunction(name))
    except mf.HookError as error:
        return [str(error), *(n for n, _ in flex.named_full_parameters() if n == name)]
    return []


def test_the_gradient_of_an_embedding_on_two_stages_is_refused() -> None:
    answer, *_ = run(2, shared_embedding, Case("mtp pp2", pp=2, layers=2, extra=ONE))
    assert_names(answer[0], "get_module_parameter(name, gradient=True)")
    assert answer[1:] == ["embedding.word_embeddings.weight"], "the whole parameters have it once"
