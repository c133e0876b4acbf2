"""The same weights in two layouts as a person compares them: one command, on the worked launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megatron_flex as mf
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from megatron_flex.launch.gradient_norm_file import read_norms
from tests.support.launching import SCRIPTS, environment, has_pretrain
from tests.support.messages import assert_names

pytestmark = pytest.mark.skipif(not has_pretrain(), reason="needs megatron.training of 0.19 or newer")
FLAGS = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 300 --micro-batch-size 4
--global-batch-size 8 --lr 1e-3 --train-iters 50 --lr-warmup-iters 5 --log-interval 1
--transformer-impl local --distributed-backend gloo --no-rope-fusion --no-gradient-accumulation-fusion
--num-workers 0 --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --hidden-dropout 0.1 --flex-cpu
"""


@pytest.mark.timeout(600)
def test_tensor_parallel_against_one_rank(tmp_path: Path) -> None:
    """Vocabulary padding, initialisation and dropout are made equal, and what is left is round-off."""
    pytest.importorskip("typer")
    layouts = ["--tensor-model-parallel-size", "2", "--against", "--tensor-model-parallel-size 1"]
    layouts += ["--html", "page.html"]
    program = [sys.executable, "-m", "megatron_flex.cli", "two-layouts", "--", SCRIPTS / "pretrain_tiny.py"]
    done = subprocess.run(
        [*program, *FLAGS.split(), *layouts],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert INDISTINGUISHABLE in done.stdout
    assert "megatron-flex two-layouts" not in done.stdout, "the weights do not differ"
    with (
        mf.open_dump(tmp_path / "two-layouts/first") as one,
        mf.open_dump(tmp_path / "two-layouts/second") as two,
    ):
        assert (one.describe_meshes(), two.describe_meshes()) == ("tp=2", "one rank")
        assert one.iterations == two.iterations == [0, 1]
        name = "embedding.word_embeddings.weight"
        mine, other = (dump.parameter(name)[0].torch() for dump in (one, two))
        assert mine.equal(other)
        assert len(mine) == 300, "without the padding, to 512 entries in both layouts, which the losses need"
    for layout in ("first", "second"):
        norms = list(read_norms(tmp_path / f"two-layouts/{layout}-norms.jsonl"))
        assert [n.iteration for n in norms] == [0, 1]
        assert all(n.reported == pytest.approx(n.full, rel=1e-5) and not n.finding for n in norms)
    text = (tmp_path / "two-layouts/report-to-paste.txt").read_text()
    assert_names(text, INDISTINGUISHABLE, "--tensor-model-parallel-size", "torch", "megatron-core")
    assert str(SCRIPTS / "pretrain_tiny.py") in text
    assert "two-layouts/first" in (tmp_path / "page.html").read_text()
