"""What commands print before a run, as it is kept: the tree of a configuration, sizes, estimates."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import Command, kept

pytest.importorskip("megatron_flex.cli", exc_type=ImportError)
pytest.importorskip("megatron.core")

GPT = [
    *("--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 128),
    *("--max-position-embeddings", 128, "--micro-batch-size", 1, "--global-batch-size", 16),
    *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
    *("--vocab-size", 1000, "--bf16"),
]  # fmt: skip
LARGE = ["--world-size", 16, "--", *GPT]
EVERY_100 = ["--iterations", 1000, "--every", 100]
FC1, LAYERS = "decoder.layers.*.mlp.linear_fc1", "decoder.layers.*"


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sites-config", ["sites", "-m", "decoder.layers.**"]),
        ("sites-stage", ["sites", "--stage", 1, "--all", "-m", f"{FC1}:*"]),
        (
            "estimate",
            ["estimate", "-s", LAYERS, "-s", FC1, "--gradients", *EVERY_100],
        ),
        ("estimate-read", ["estimate", "--read", LAYERS, "--read", f"{FC1}@gradient"]),
        ("estimate-edit", ["estimate", "--edit", f"{LAYERS}=general", "--edit", f"{FC1}=local"]),
        ("estimate-all", ["estimate", "-s", LAYERS, "--read", LAYERS, "--edit", f"{FC1}=scale=1.01"]),
    ],
)
def test_what_is_said_before_a_run(command: Command, name: str, words: list[object], width: int) -> None:
    command.width(width)
    done = command(*words, *LARGE)
    assert (done.status, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= width
    kept(f"{name}-{width}", done.out)


@pytest.mark.parametrize("width", [60, 80])
def test_layouts_are_never_folded(command: Command, width: int) -> None:
    command.width(width)
    words = ["sites", "-m", "decoder.layers.*.mlp.**", *LARGE[:3], "--swiglu", *GPT]
    layouts = {site["layout"] for site in json.loads(command(*words[:3], "--json", *words[3:]).out)}
    shown = command(*words).out
    assert "[s, b, gate|up/tp in 2 segments]" in layouts
    assert [layout for layout in layouts if layout not in shown] == []
    assert max(map(len, shown.splitlines()[1:])) <= width  # below the title


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)
