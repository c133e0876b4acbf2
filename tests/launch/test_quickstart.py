"""The quick start runs from end to end with few iterations, and its comparison fails on a wrong tensor."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_flex import open_dump
from tests.browser.conftest import Open
from tests.launch import test_analyses
from tests.support import pages, wheels
from tests.support.launching import SCRIPTS, Server, has_pretrain, launch_forked
from tests.support.messages import any_names, assert_names, raises

SITES = [
    *(f"decoder.layers.{n}:output" for n in range(4)),
    *(f"decoder.layers.{n}.mlp.linear_fc1:output" for n in range(4)),
    "output_layer:output",
    "loss:output",
]
LOSSES = ["unedited", "MLP of layer 1 zeroed", "steered after layer 2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One run of three iterations with the wheel, outside the checkout: what it printed, and its folder."""
    if not has_pretrain():
        pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
    folder, apart = tmp_path_factory.mktemp("quickstart"), tmp_path_factory.mktemp("apart")
    python = wheels.install(wheels.build(apart)[1], apart / "environment")
    (apart / "scripts").mkdir()
    for script in SCRIPTS.glob("quickstart*.py"):  # they put the folder above theirs first on the path
        shutil.copy(script, apart / "scripts")
    command = [python, apart / "scripts" / "quickstart.py", "--iterations", "3", "--folder", folder]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=apart, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout, folder


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The comparison's module, imported as the scripts import each other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("quickstart_compare")


@pytest.mark.timeout(600)
def test_training_is_dumped(run: tuple[str, Path]) -> None:
    output, folder = run
    assert any_names(output.splitlines(), 30, 0)
    shape = "[iteration 1, sample 8, token 128, h 128], bfloat16"
    assert any_names(output.splitlines(), "decoder.layers.0", shape)
    with open_dump(folder / "dump") as dump:
        loss = dump["loss"].torch().float()
        assert loss.shape == (1, 8, 128)
        assert 4 < loss.mean() < 7  # of 256 bytes, untrained: their logarithm is 5.5
        assert dump["decoder.layers.3:output.grad"].torch().abs().sum() > 0


@pytest.mark.timeout(600)
def test_a_row_and_the_dump_agree_on_an_iteration(run: tuple[str, Path]) -> None:
    output, folder = run
    (row,) = [line.split() for line in output.splitlines() if line.split()[:1] == ["0"]]
    with open_dump(folder / "dump") as dump:
        for layer in range(4):
            value = dump[f"decoder.layers.{layer}"].at(0).torch().double()
            assert float(row[2 + layer]) == pytest.approx(value.square().mean().sqrt().item(), abs=2e-3)


@pytest.mark.timeout(600)
def test_the_commands_to_try_read_the_dump(run: tuple[str, Path]) -> None:
    output, folder = run
    commands = [
        line.strip()
        for line in output.splitlines()
        if line.endswith(str(folder / "dump")) or "-i" in line.split()
    ]
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_names(commands[1], "-i 0")


@pytest.mark.timeout(600)
def test_a_page_is_written_and_named(run: tuple[str, Path]) -> None:
    output, folder = run
    assert_names(output.splitlines()[-1], folder / "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "decoder.layers.3.mlp.linear_fc1:output" in page


@pytest.mark.timeout(600)
def test_no_pane_of_its_page_is_empty_and_a_recorded_site_is_chosen(
    run: tuple[str, Path], show: Open
) -> None:
    _, folder = run
    window = show(folder / "page.html")
    (site,) = window.chosen("site")
    assert "recorded" in window.text("#chosen")
    assert "experts" not in window.text("#about"), "it has none"
    with open_dump(folder / "dump") as dump:
        assert site in dump.sites
    for tab in ("site", "norms", "attention", "lens", "parameters"):
        window.page.locator(f"#data-tab-{tab}").click()
        assert window.page.locator("#data-body .data-lacks").count() == 0, window.text("#data-body")
        drawn = window.page.locator("#data-body").locator("canvas, svg.data-chart, table.data-lens")
        assert drawn.count() >= 1, tab


@pytest.mark.timeout(600)
def test_a_site_a_rank_and_a_layer_of_its_page_are_shown(run: tuple[str, Path], show: Open) -> None:
    _, folder = run
    window = show(folder / "page.html")
    site = "decoder.layers.1.mlp.linear_fc1:output"
    window.pick("site", site)
    with open_dump(folder / "dump") as dump:
        value = dump[site.removesuffix(":output")].torch()[-1].double()
    shown = re.search(r"\brms ([\d.e-]+)", window.text("#data"))
    assert shown is not None
    assert float(shown[1]) == pytest.approx(value.square().mean().sqrt().item(), rel=2e-3)
    window.pick("rank", 1)
    assert "2 of 2" in window.text("#mesh")
    window.pick("layer", 3)
    assert window.chosen("site") == [site.replace("layers.1", "layers.3")]
    assert "rank 1: pp 0 tp 1" in window.text("#chosen").replace(",", "").replace("·", "").replace("  ", " ")


@pytest.mark.timeout(600)
def test_every_site_and_loss_agrees(run: tuple[str, Path]) -> None:
    output, _ = run
    table = [line.split()[0] for line in output.splitlines() if " × " in line]
    assert sorted(table) == sorted(SITES)
    for label in LOSSES:
        assert any(line.startswith(label) for line in output.splitlines()), label
    (shown,) = pages.mine(SCRIPTS.parent / "docs" / "start.md", "text")
    assert f"{shown.strip()}" in output


@pytest.mark.timeout(600)
def test_a_hybrid_model_is_trained_and_compared_likewise(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_pretrain():
        pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
    flags = ["--model", "hybrid", "--iterations", "1", "--folder", str(tmp_path)]
    monkeypatch.syspath_prepend(str(SCRIPTS))
    quickstart = importlib.import_module("quickstart")
    monkeypatch.setattr(quickstart, "launch", launch_forked(server, tmp_path, quickstart.MARK))
    monkeypatch.setattr(sys, "argv", ["quickstart", *flags])
    assert quickstart.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any_names(lines, "HybridModel", 4)
    mlps = [f"decoder.layers.{n}" for n in (1, 3, 5, 7)]
    sites = [f"{layer}{module}:output" for layer in mlps for module in ("", ".mlp.linear_fc1")]
    table = [line.split()[0] for line in lines if " × " in line]
    assert sorted(table) == sorted([*sites, "output_layer:output", "loss:output"])
    assert any_names(lines, 10, 3, "1e-05")
    with open_dump(tmp_path / "dump") as dump:
        assert dump["gpt:decoder.layers.3:output.grad"].torch().abs().sum() > 0


@pytest.mark.timeout(600)
def test_loss_falls_and_edits_change_it(run: tuple[str, Path], comparison: ModuleType) -> None:
    output, folder = run
    losses = [float(line.split()[1]) for line in output.splitlines() if line.split()[:1] in (["0"], ["2"])]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    results = comparison.load(folder / "parallel")
    assert len({results[label].item() for label in LOSSES}) == 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["decoder.layers.2.mlp.linear_fc1:output", "steered after layer 2"])
def test_a_wrong_tensor_fails_the_comparison(
    run: tuple[str, Path],
    comparison: ModuleType,
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, kept = run
    shutil.copy(kept / "single", tmp_path)
    results = comparison.load(kept / "parallel")
    results[name].view(-1)[-1] += 1e-3 * results[name].abs().max()
    importlib.import_module("quickstart_data").save(tmp_path / "parallel", results)
    assert comparison.main(tmp_path) == 1
    assert_names(capsys.readouterr().out.splitlines()[-1], "1 of 13", "1e-05", name)


@pytest.mark.timeout(600)
def test_analyses_of_its_weights_say_what_they_found(
    run: tuple[str, Path],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, folder = run
    monkeypatch.syspath_prepend(str(SCRIPTS))
    analyses, mark = importlib.import_module("analyses"), importlib.import_module("quickstart").MARK
    monkeypatch.setattr(analyses, "launch", launch_forked(server, tmp_path, mark))
    monkeypatch.setattr(sys, "argv", ["analyses", "--weights", str(folder), *test_analyses.SHORT])
    assert analyses.main() == 0
    test_analyses.check(capsys.readouterr().out)


def tensors(loss: float = 2.0, entry: float = 1.0) -> dict[str, Tensor]:
    """A run's results in small."""
    return {"a:output": torch.tensor([[0.5, entry]]), "unedited": torch.tensor(loss)}


@pytest.mark.parametrize(
    "wrong",
    [tensors(entry=1.0001), tensors(entry=float("nan")), tensors(loss=2.001), tensors(loss=float("inf"))],
    ids=["tensor off", "not a number", "loss off", "infinite loss"],
)
@pytest.mark.parametrize("swap", [False, True])
def test_report_refuses(comparison: ModuleType, wrong: dict[str, Tensor], swap: bool) -> None:
    pair = (tensors(), wrong) if swap else (wrong, tensors())
    assert not comparison.report(comparison.compare(*pair))


def test_nothing_is_like_a_number_where_zero_is_right(comparison: ModuleType) -> None:
    zero, wrong = {"a": torch.zeros(2)}, {"a": torch.tensor([0.0, float("nan")])}
    assert not comparison.report(comparison.compare(wrong, zero))


def test_report_accepts_what_rounding_leaves(comparison: ModuleType) -> None:
    assert comparison.report(comparison.compare(tensors(entry=1 + 1e-6), tensors()))


@pytest.mark.parametrize(
    ("other", "values"),
    [
        ({"unedited": torch.tensor(2.0)}, ["a:output"]),
        (tensors() | {"a:output": torch.zeros(2, 1)}, ["a:output", "torch.float32[2, 1]"]),
        (tensors() | {"b": torch.ones(1)}, ["b"]),
    ],
)
def test_compare_refuses_different_names_and_shapes(
    comparison: ModuleType, other: dict[str, Tensor], values: list[str]
) -> None:
    with raises(ValueError, *values):
        comparison.compare(tensors(), other)


def test_a_failure_shows_the_rank_that_raised_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    complaint = importlib.import_module("quickstart").complaint
    summary = ["E1 torch/distributed/elastic/multiprocessing/api.py:1] failed", "Root Cause: rank 0"]
    mine, theirs = (
        ["[rank3]: Traceback", "[rank3]: ValueError"],
        ["[rank0]: Traceback", "[rank0]: closed by peer"],
    )
    assert complaint(["chatter", mine[0], theirs[0], mine[1], theirs[1], *summary]) == mine
    assert complaint(["usage: ...", "error: no such flag", *summary]) == ["usage: ...", "error: no such flag"]
