"""The digest that a training writes, and that of the checkpoint that it saves, in two layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.weights import compare_weights, read_digest
from tests.support.launching import MODEL, SCRIPTS, has_pretrain, torchrun

pytestmark = pytest.mark.skipif(not has_pretrain(), reason="needs megatron.training")

HEADS, GROUPS, EXPERTS, LAYERS = 4, 2, 4, 2
ARCHITECTURE = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 256 "
    f"--group-query-attention --num-query-groups {GROUPS} "
    f"--untie-embeddings-and-output-weights --position-embedding-type rope --num-experts {EXPERTS} "
    "--moe-router-topk 2 --train-iters 2 --save checkpoint --save-interval 2"
)
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1"
)


@pytest.mark.timeout(300)
def test_the_checkpoint_of_a_training_has_the_digest_of_the_training(tmp_path: Path) -> None:
    words = [
        *MODEL,
        *ARCHITECTURE.split(),
        *LAYOUT.split(),
        "--flex-cpu",
        "--flex-weights-digest",
        "end.json",
    ]
    done = torchrun(2, tmp_path, "-m", "megatron_flex.launch", str(SCRIPTS / "pretrain_tiny.py"), *words)
    assert done.status == [0], done.err[0][-3000:]
    digest = read_digest(tmp_path / "end.json")
    assert digest.heads == (HEADS, GROUPS)
    found = compare_weights(digest, tmp_path / "checkpoint")
    assert found.differences == ()
    assert found.compared == len(digest.parameters) == LAYERS * (7 + 3 * EXPERTS) + 3
