"""The digest of a run's weights is the same in every layout, and that of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.launch import Settings, TrainingRun
from megatron_flex.weights import WeightsDigest, compare_weights, digest_run, digest_weights, read_digest
from tests.support import gpt, hugging_face
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")


LAYOUTS = {
    "one process": hugging_face.case("one process"),
    "tp2 pp2": hugging_face.case("tp2 pp2", tp=2, pp=2, sp=True),
    "tp2 ep2": hugging_face.case("tp2 ep2", tp=2, dp=2, ep=2, etp=1, sp=True),
    "hybrid": hugging_face.case("hybrid", tp=2, pp=2, sp=True, hybrid=True),
}
CASES = [
    ("one process", "qwen3_moe"),
    ("tp2 pp2", "gpt2"),
    ("tp2 pp2", "deepseek_v3"),
    ("tp2 ep2", "qwen3_moe"),
    ("hybrid", "llama"),
]
UP = "decoder.layers.3.mlp.linear_fc1.weight"


def saved(folder: Path, family: str) -> str:
    hugging_face.make_model(family).save_pretrained(folder)
    return str(folder)


def digest(case: Case, folder: str) -> WeightsDigest | None:
    """Load a folder, and digest the model."""
    chunks = hugging_face.build(case, mf.config_from_hf(folder, vocabulary_multiple=case.tp))
    mf.load_hf(chunks, folder)
    return digest_run(chunks)


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_the_digest_is_that_of_the_folder_in_every_layout(layout: str, family: str, tmp_path: Path) -> None:
    where, folder = LAYOUTS[layout], saved(tmp_path / family, family)
    found, *others = run(where.world, digest, where, folder)
    assert others == [None] * (where.world - 1)
    assert found is not None
    want = digest_weights(folder)
    if family != "gpt2":  # whose vocabulary is padded in this layout
        assert {n: d.checksum for n, d in found.parameters.items()} == {
            n: d.checksum for n, d in want.parameters.items()
        }
    of_run = compare_weights(found, folder)
    assert of_run.differences == ()
    assert of_run.compared == len(want.parameters)
    assert len(of_run.uncompared) == (family == "gpt2"), "rows in a block with padding"


def train(case: Case, folder: str, into: Path, at: int | None, change: str) -> None:
    """Two steps of a run with the flag, in which one rank changes its shard of a parameter."""
    chunks = hugging_face.build(case, mf.config_from_hf(folder))
    mf.load_hf(chunks, folder)
    running = TrainingRun(Settings(weights_digest=str(into), weights_digest_at=at))
    running.attach(chunks)
    parameter = dict(chunks[0].named_parameters()).get(change)
    for iteration in range(2):
        running.step_begins(iteration)
        if iteration == 0 and parameter is not None and torch.distributed.get_rank() == case.world - 1:
            parameter.data[-1].mul_(-1)
        running.step_ends()
    running.finish()


@pytest.mark.parametrize(("at", "names"), [(0, set()), (1, {f"{UP}[up]"}), (None, {f"{UP}[up]"})])
def test_the_flag_writes_the_digest_of_an_iteration(at: int | None, names: set[str], tmp_path: Path) -> None:
    where, folder = LAYOUTS["tp2 pp2"], saved(tmp_path / "llama", "llama")
    local = UP.replace("layers.3", "layers.1")  # of the last stage
    run(where.world, train, where, folder, tmp_path / "weights.json", at, local)
    found = compare_weights(folder, tmp_path / "weights.json")
    assert {d.name for d in found.differences} == names
    assert "iteration" in json.loads((tmp_path / "weights.json").read_text())["source"]
    assert read_digest(tmp_path / "weights.json").heads == (gpt.HEADS, gpt.GROUPS)


def refuse(case: Case, folder: str, into: Path) -> None:
    with raises(mf.FlexError, "--flex-weights-digest-at", 7):
        train(case, folder, into / "late.json", 7, "")
    (into / "file").touch()
    with raises(mf.FlexError, "--flex-weights-digest", into / "file" / "weights.json"):
        train(case, folder, into / "file" / "weights.json", None, "")


def test_an_iteration_that_never_comes_and_a_bad_path_are_errors_on_all_ranks(tmp_path: Path) -> None:
    where = hugging_face.case("tp2", tp=2)
    run(where.world, refuse, where, saved(tmp_path / "llama", "llama"), tmp_path)
