"""Dumps of Hugging Face models under `tp_plan`, FSDP2 and DeepSpeed, against dumps of Megatron."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import megatron_flex as mf
from megatron_flex.alignment import align_dumps
from tests.support import aligned, hugging_face
from tests.support.gpt import Case
from tests.support.pool import run, run_alone

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

BOUND = 1e-5  # in fp32
MEGATRON = Case("tp2 sp etp2", tp=2, etp=2, sp=True, microbatches=1)
HYBRID = Case("hybrid tp2 sp pp2", tp=2, sp=True, pp=2, microbatches=1, hybrid=True)
FAMILIES = ("gpt2", "qwen2", "qwen3_moe", "deepseek_v3")
BIASED = ("gpt2", "qwen2")  # they have linears with a bias, which Megatron adds later
WRONG = {  # by family, a parameter that is changed, and the site that it shows at
    "gpt2": ("transformer.h.2.mlp.c_fc.weight", "decoder.layers.2.mlp.linear_fc1:output"),
    "qwen2": ("model.layers.2.mlp.up_proj.weight", "decoder.layers.2.mlp.linear_fc1:up"),
    "qwen3_moe": ("model.layers.2.mlp.gate.weight", "decoder.layers.2.mlp.router:logits"),
    "deepseek_v3": (
        "model.layers.2.self_attn.q_b_proj.weight",
        "decoder.layers.2.self_attention.linear_q_up_proj:output",
    ),
}


def load(folder: str, family: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    path = f"{folder}/{family}"
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options).eval()


def plain(model: Any) -> Any:
    return model


def fsdp2(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def zero3(model: Any) -> Any:
    from tests.distributed.test_deepspeed import initialize

    return initialize(model, 3)


WAYS = {"plain": (1, plain), "tp_plan": (2, plain), "FSDP2": (2, fsdp2), "DeepSpeed ZeRO-3": (2, zero3)}
NO_PLAN = ("gpt2",)  # transformers has no tp_plan for it


def families(way: str) -> list[str]:
    return [family for family in FAMILIES if way != "tp_plan" or family not in NO_PLAN]


def dump_reference(folder: str, way: str, wrong: bool) -> None:
    """Dump each family in one step; data parallel replicas have a sample each."""
    _, wrap = WAYS[way]
    for family in families(way):
        model = load(folder, family, **({"tp_plan": "auto"} if way == "tp_plan" else {}))
        if wrong:
            with torch.no_grad():
                model.get_parameter(WRONG[family][0]).mul_(1.5)
        model = wrap(model)
        with mf.attach(model, dumps=mf.Dump(f"{folder}/{way} {family} {wrong}", sites="**:*")) as flex:
            axis = flex.session.mesh["dp"]
            with flex.step(), torch.no_grad():
                model(hugging_face.tokens().chunk(axis.size)[axis.coord], use_cache=False)


def dump_megatron(folder: str, case: Case = MEGATRON, families: tuple[str, ...] = FAMILIES) -> None:
    kind = "hybrid" if case.hybrid else "megatron"
    for family in families:
        _, chunks = aligned.rank_models(family, case)
        biased: dict[str, Any] = {"parameters": "**.bias"} if family in BIASED else {}
        dump = mf.Dump(f"{folder}/{kind} {family}", sites="**:*", **biased)
        with mf.attach(chunks, dumps=dump):
            hugging_face.run_logits(case, chunks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each family in a folder, its dump by Megatron, and that of one process of transformers."""
    made = str(tmp_path_factory.mktemp("dumps"))
    for family in FAMILIES:
        hugging_face.make_model(family).save_pretrained(f"{made}/{family}")
    run(MEGATRON.world, dump_megatron, made)
    run_alone(1, dump_reference, made, "plain", False, timeout=240)
    return made


@pytest.mark.parametrize("way", ["tp_plan", "FSDP2", "DeepSpeed ZeRO-3"])
@pytest.mark.parametrize("wrong", [False, True], ids=["equal", "different"])
def test_a_dump_of_many_ranks_is_aligned_as_that_of_one_process(folder: str, way: str, wrong: bool) -> None:
    if "DeepSpeed" in way and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    run_alone(WAYS[way][0], dump_reference, folder, way, wrong, timeout=240)
    for family in families(way):
        megatron = f"{folder}/megatron {family}"
        found = align_dumps(f"{folder}/{way} {family} {wrong}", megatron)
        if wrong:
            assert found.first is not None, family
            assert found.first.site == WRONG[family][1], str(found)
            continue
        assert found.agrees, str(found)
        assert max(site.accumulated.error for site in found.sites) < BOUND
        plain_sites = {site.site for site in align_dumps(f"{folder}/plain {family} False", megatron).sites}
        assert {site.site for site in found.sites} == plain_sites, "sharding hides no hook point"


def test_a_dump_of_a_hybrid_model_is_aligned_by_the_names_of_a_gpt_model(folder: str) -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    families = ("gpt2", "qwen2")
    run(HYBRID.world, dump_megatron, folder, HYBRID, families)
    run_alone(1, dump_reference, folder, "plain", True, timeout=240)
    for family in families:
        found = align_dumps(f"{folder}/plain {family} False", f"{folder}/hybrid {family}")
        assert found.agrees, str(found)
        assert max(site.accumulated.error for site in found.sites) < BOUND
        gpt = align_dumps(f"{folder}/plain {family} False", f"{folder}/megatron {family}")
        assert {site.site for site in found.sites} == {site.site for site in gpt.sites}
        wrong = align_dumps(f"{folder}/plain {family} True", f"{folder}/hybrid {family}")
        assert wrong.first is not None, family
        assert wrong.first.site == WRONG[family][1], str(wrong)
