"""Weights of Hugging Face in Megatron models of every layout, against transformers on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import hugging_face
from tests.support.gpt import Case
from tests.support.hugging_face import FAMILIES
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

BOUND = 1e-5  # of the greatest logit
DENSE, SPARSE = (
    ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3"),
    ("qwen3_moe", "mixtral", "deepseek_v3"),
)


def case(name: str, **sizes: Any) -> Case:
    return Case(name, microbatches=1, layers=hugging_face.LAYERS, **sizes)


ONE = case("one process")
LAYOUTS = {
    "tp2 pp2": case("tp2 pp2", tp=2, pp=2, sp=True),
    "tp2 ep2": case("tp2 ep2", tp=2, dp=2, ep=2, etp=1, sp=True),
    "pp2 vpp2": case("pp2 vpp2", pp=2, vpp=2),
    "tp4": case("tp4", tp=4, sp=True),
}
CASES = [
    *(("tp2 pp2", family) for family in FAMILIES),
    *(("tp2 ep2", family) for family in SPARSE),
    *(("pp2 vpp2", family) for family in ("gpt2", "llama3", "deepseek_v3")),
    *(("tp4", family) for family in ("llama", "qwen3_moe")),  # fewer key and value heads than ranks
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Tensor]]:
    """For each family the folder that save_pretrained wrote, and the logits of the model."""
    out = {}
    for family in FAMILIES:
        model: Any = hugging_face.make_model(family)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        out[family] = str(folder), hugging_face.logits_of(model)
    return out


def there_and_back(case: Case, folder: str, into: str) -> tuple[Tensor | None, int, list[str]]:
    """Load a folder, run the model, and write its weights; logits on the leader."""
    chunks = hugging_face.build(case, mf.config_from_hf(folder))
    loaded = mf.load_hf(chunks, folder)
    mf.to_hf(chunks, into, config=folder)
    return hugging_face.run_logits(case, chunks), loaded.bytes_read, list(loaded.differences)


def same_files(folder: str, other: str) -> bool:
    """Whether two folders have the same tensors, bit by bit."""
    from safetensors.torch import load_file

    first, second = (load_file(Path(f) / "model.safetensors") for f in (folder, other))
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_logits_and_bits(layout: str, family: str, folders: Any, tmp_path: Path) -> None:
    folder, want = folders[family]
    results = run(LAYOUTS[layout].world, there_and_back, LAYOUTS[layout], folder, str(tmp_path / "back"))
    logits = results[0][0]
    assert relative(logits, want) < BOUND
    assert all(differences == [] for _, _, differences in results)
    assert same_files(folder, str(tmp_path / "back"))
