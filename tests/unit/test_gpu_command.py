"""scripts/gpu without its parts: what is kept and run again, time limits, exit status, checks, the page."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.messages import any_names, assert_names, raises

ROOT = Path(__file__).parents[2]
Load = Callable[[str], Any]
KEY = {"device": "cuda", "sources": "a"}
GOOD = {"what": "a thing", "found": 0.0, "bound": 0.0, "good": True}
BAD = {"what": "another thing", "found": 2.0, "bound": 1.0, "good": False}
HERE = {"device": "cuda", "name": "A GPU", "torch": "2.13.0", "megatron-core": "0.19.2", "sources": "abc"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module of the scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "measure"))
    return importlib.import_module


def found(*checks: dict[str, Any]) -> dict[str, Any]:
    return {"checks": list(checks), "tables": [], "notes": ["A note."], "figures": {}}


def command(target: Path, what: dict[str, Any], code: int = 0) -> list[str]:
    """A part that writes that, and exits so."""
    source = (
        "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); print('words'); sys.exit(int(sys.argv[3]))"
    )
    return [sys.executable, "-c", source, str(target), json.dumps(what), str(code)]


# --- results


def test_a_result_holds_for_its_key_alone(script: Load, tmp_path: Path) -> None:
    gpu = script("gpu")
    gpu.Store(tmp_path, KEY).put("values", {"status": "passed"})
    assert gpu.Store(tmp_path, KEY).get("values")["status"] == "passed"
    assert gpu.Store(tmp_path, KEY | {"sources": "b"}).get("values") is None
    assert gpu.Store(tmp_path, None).get("values") is not None
    (tmp_path / "values.json").write_text('{"key": {"dev')
    assert gpu.Store(tmp_path, KEY).all() == {}


def test_what_did_not_come_to_its_end_is_run_again(script: Load) -> None:
    gpu = script("gpu")
    statuses = gpu.PASSED, gpu.FAILED, gpu.LATE, gpu.CRASHED
    assert [gpu.finished({"status": status}) for status in statuses] == [True, True, False, False]
    assert not gpu.finished(None)


@pytest.mark.parametrize(
    ("checks", "code", "status"),
    [([GOOD], 0, "passed"), ([GOOD, BAD], 0, "failed"), ([], 0, "failed"), ([GOOD], 3, "crashed")],
)
def test_how_a_part_went(script: Load, tmp_path: Path, checks: list[Any], code: int, status: str) -> None:
    target = tmp_path / "part.found"
    result = script("gpu").run_part(command(target, found(*checks), code), target, 60)
    assert result["status"] == status
    assert bool(result["error"]) is bool(code)
    if code:
        assert_names(result["error"], code, "words")


def test_a_part_that_is_late_is_ended_with_all_that_it_started(script: Load, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starts = ["bash", "-c", f"sleep 300 & echo $! >{pid}; wait"]
    began = time.monotonic()
    gpu = script("gpu")
    result = gpu.run_part(starts, tmp_path / "part.found", 3)
    assert result["status"] == gpu.LATE
    assert time.monotonic() - began < 60
    stat = Path("/proc", pid.read_text().strip(), "stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what the part started is still there")


def test_no_part_stops_the_next_and_the_exit_status_says_so(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu, ran = script("gpu"), []
    ends: dict[str, tuple[dict[str, Any], int]] = {
        "machine": (HERE, 0),
        "values": (found(GOOD), 1),
        "bf16": (found(BAD), 0),
        "hooks": (found(GOOD), 0),
    }

    def part(_: str, name: str, __: str, target: Path) -> list[str]:
        ran.append(name)
        return command(target, *ends[name])

    monkeypatch.setattr(gpu, "_command", part)
    words = ["--out", str(tmp_path), "--write", str(tmp_path / "page.md"), "--part", *list(ends)[1:]]
    assert gpu.run(gpu.flags(words), sys.executable) == 1
    assert ran == list(ends)
    assert any_names(capfd.readouterr().out.splitlines(), "another thing", 2, 1)
    ran.clear()
    ends["values"] = found(GOOD), 0
    assert gpu.run(gpu.flags(words), sys.executable) == 1
    assert ran == ["machine", "values"], "the others have finished"
    ran.clear()
    assert gpu.run(gpu.flags([*words[:4], "--part", "values", "hooks"]), sys.executable) == 0
    assert ran == ["machine"]
    assert gpu.run(gpu.flags([*words[:4], "--part", "hooks", "--fresh"]), sys.executable) == 0
    assert ran == ["machine", "machine", "hooks"]
    page = (tmp_path / "page.md").read_text()
    assert page == gpu.text(json.loads((tmp_path / "page.json").read_text()))
    assert any_names(page.splitlines(), "`bf16`", "failed", "0 of 1")
    assert any_names(page.splitlines(), "another thing", 2, 1)


def test_a_defect_names_a_test_that_there_is(script: Load) -> None:
    defects = script("gpu_defects")
    for defect in defects.DEFECTS:
        file, name = defect.test.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), defect.test
    named = re.findall(r"`(test_\w+)`", " ".join(defects.DECIDED))
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert named
    for name in named:
        assert any(f"\ndef {name}(" in source for source in sources), name


def test_the_page_among_the_documents_is_of_the_figures_beside_it(script: Load) -> None:
    page = ROOT / "docs" / "contributing" / "gpu.md"
    assert page.read_text() == script("gpu").text(json.loads(page.with_suffix(".json").read_text()))


# --- checks


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([1.0, 2.0, 3.0000002]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0, float("nan")]),
    ],
)
def test_a_wrong_tensor_fails(script: Load, wrong: torch.Tensor) -> None:
    findings = script("gpu_checks").Findings()
    want = torch.tensor([1.0, 2.0, 3.0])
    findings.same("right", want.clone(), want)
    findings.same("wrong", wrong, want)
    assert [c.good for c in findings.checks] == [True, False]


def test_no_number_is_no_agreement(script: Load) -> None:
    findings = script("gpu_checks").Findings()
    for number in (1.0, 1.5, float("nan"), float("inf")):
        findings.at_most("a number", number, 1.0)
    assert [c.good for c in findings.checks] == [True, False, False, False]
    json.dumps(findings.as_json(), allow_nan=False)


def test_a_wrong_value_of_a_site_fails_and_is_named(script: Load) -> None:
    pytest.importorskip("megatron.core")
    from tests.distributed.matrix import Cell, relative
    from tests.support.gpt import Case

    want = torch.arange(1.0, 5.0)
    off = relative(want + torch.tensor([0.0, 0.0, 0.0, 1e-6]), want)
    assert 0 < off < 1e-5
    cells = [Cell("a", site, check, off) for site in ("one", "two") for check in ("value", "gradient")]
    findings = script("gpu_checks").Findings()
    script("gpu_values").judge(findings, Case("a"), cells, 0.0, 1e-5)
    values, gradients, _ = findings.checks
    assert not values.good
    assert "one, two" in values.what
    assert gradients.good
    empty = script("gpu_checks").Findings()
    script("gpu_values").judge(empty, Case("a"), [], 0.0, 1e-5)
    assert [c.good for c in empty.checks] == [False]


# --- files


def test_figures_of_a_cpu_do_not_go_among_the_documents(
    script: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = script("gpu")
    assert gpu.flags([]).write == ROOT / "docs" / "contributing" / "gpu.md"
    assert not gpu.flags(["--device", "cpu"]).write.is_relative_to(ROOT / "docs")
    with pytest.raises(SystemExit):
        gpu.flags(["--device", "cpu", "--write", str(ROOT / "docs" / "contributing" / "gpu.md")])
    assert_names(capsys.readouterr().err, "--write")


# --- without a network


def test_an_environment_that_cannot_be(script: Load, tmp_path: Path) -> None:
    wheels = script("gpu_wheels")
    with raises(SystemExit, tmp_path):
        wheels.environment(tmp_path, None)
    with raises(SystemExit, tmp_path):
        wheels.environment(tmp_path / "venv", tmp_path)


def test_carried_wheels_replace_other_versions_of_themselves_alone(script: Load, tmp_path: Path) -> None:
    downloaded, folder = tmp_path / "downloaded", tmp_path / "folder"
    for name in ("downloaded/numpy-2.0-cp312.whl", "folder/numpy-1.0-cp312.whl", "folder/mine-1.0-cp312.whl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    script("gpu_wheels").replace_wheels(downloaded, folder)
    assert sorted(f.name for f in folder.iterdir()) == ["mine-1.0-cp312.whl", "numpy-2.0-cp312.whl"]


def test_an_environment_sees_the_torch_of_the_one_that_makes_it(
    script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.whl").touch()
    wheels, words = script("gpu_wheels"), []
    monkeypatch.setattr(wheels, "_pip", lambda python, more: words.append((python, more)))
    python = wheels.environment(tmp_path / "venv", tmp_path)
    assert python == str(tmp_path / "venv" / "bin" / "python")
    assert all("--no-index" in more and "--isolated" in more for _, more in words)
    assert {where for where, _ in words} == {python}
    import subprocess

    ask = [python, "-c", "import torch, pip; print(torch.__version__)"]
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() == torch.__version__
