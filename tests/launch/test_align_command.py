"""`megatron-flex align` on Megatron's own `pretrain()`: two ranks against a folder of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import MODEL, ROOT, SCRIPT, SECONDS, has_pretrain
from tests.support.messages import assert_names

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not has_pretrain(), reason="needs megatron.training of 0.19 or newer")


def align(out: Path, *words: object) -> subprocess.CompletedProcess[str]:
    flags = [*MODEL, "--tensor-model-parallel-size", "2", "--out", out, "--flex-cpu"]
    command = ["-m", "megatron_flex.cli", "align", *words, "--", "--nproc-per-node", "2", SCRIPT, *flags]
    return subprocess.run(
        [sys.executable, *(str(word) for word in command)],
        cwd=out,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_a_run_is_compared_instead_of_trained(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64}
    config = transformers.GPT2Config(
        vocab_size=64, bos_token_id=0, eos_token_id=0, activation_function="gelu", **sizes
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    (tmp_path / "tokens.json").write_text(json.dumps([list(range(16)), list(range(16, 32))]))
    done = align(tmp_path, tmp_path / "hf", "--tokens", tmp_path / "tokens.json", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["first"] == "embedding.word_embeddings:output", "the weights are others"
    assert [layer["part"] for layer in found["layers"]] == ["embedding", "0", "1", "logits"]
    compared = {site["site"]: site for site in found["sites"]}
    assert compared["decoder.layers.1:input"]["isolated"]["error"] == 0, "the layer input was put in"
    assert compared["decoder.layers.1:input"]["accumulated"]["error"] > 0.1
    assert not list(tmp_path.glob("made-*")), "nothing was trained"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = align(tmp_path, tmp_path / "nothing")
    assert done.returncode == 2
    assert_names(done.stderr.strip().splitlines()[-1], tmp_path / "nothing", "config.json", "save_pretrained")
