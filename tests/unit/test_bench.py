"""What scripts/bench makes of its measurements: tables, verdicts, the plot, the page."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import run_alone as run

SCRIPTS = Path(__file__).parents[2] / "scripts" / "measure"
Load = Callable[[str], Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module of the scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def made(tp: int, mib: float, **added: float) -> dict[str, Any]:
    """A run of two hooks and seven rounds: the model takes 10 ms and more from round to round."""
    steps = [10.0 + n for n in range(7)]
    ms = {"none": steps} | {
        n.replace("_", " "): [s + 2 * a + 0.02 * i for i, s in enumerate(steps)] for n, a in added.items()
    }
    sent = {name: {"calls": {}, "nbytes": 0.0, "wire": None} for name in ms}
    return {"tp": tp, "mib": mib, "layers": 2, "ms": ms, "sent": sent, "others": [0.0, 0.5]}


def result(*runs: dict[str, Any]) -> dict[str, Any]:
    steps = {"none": [100.0] * 7, "idle": [101.0] * 3 + [99.0] * 4, "statistics": [106.0] * 7}
    return {
        "command": "scripts/bench --hooks",
        "date": "2026-01-01",
        "versions": {"torch": "2"},
        "cores": 2,
        "chip": "a chip",
        "load": [0.5, 2.0],
        "hooks": list(runs),
        "steps": [{"tp": 2, "what": "a GPT", "ms": steps, "others": [0.0]}],
    }


def test_a_step_takes_as_long_as_on_its_slowest_rank_and_a_round_has_the_median(script: Load) -> None:
    ranks = [{"read": [[1.0, 9.0, 3.0], [5.0]]}, {"read": [[2.0, 1.0, 1.0], [7.0]]}]
    assert script("bench_hooks_report").steps_of(ranks, max) == {"read": [3.0, 7.0]}


def test_cpu_time_is_that_of_all_ranks(script: Load) -> None:
    ranks = [{"read": [[1.0, 9.0, 3.0], [5.0]]}, {"read": [[2.0, 1.0, 1.0], [7.0]]}]
    assert script("bench_hooks_report").steps_of(ranks, sum) == {"read": [4.0, 12.0]}


def test_targets_are_judged_by_cpu_time_too_where_it_was_taken(script: Load) -> None:
    run = made(2, 8, read=1.0, clone=1.0)
    report = script("bench_hooks_report")
    assert "CPU" not in report.section(result(run))
    run["cpu"] = {"none": [20.0] * 7, "read": [26.0] * 7, "clone": [21.0] * 7}
    text = report.section(result(run))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert ["read", "3.00 [3.00, 3.00]"] in rows
    assert ["nothing attached", "step 20.0"] in rows
    first = rows.index([f"read <= 1.5 x {report.LABELS['clone']}", "1.00: met"])
    assert rows[first + 1] == ["the same of CPU time", "6.00: missed"]


def test_what_is_sent_is_beyond_the_model_and_of_all_ranks(script: Load) -> None:
    def of(calls: int, nbytes: float, wire: int | None) -> dict[str, Any]:
        return {"calls": {"all_reduce": 3, "gather": calls}, "nbytes": nbytes, "wire": wire}

    ranks = [{"none": of(0, 10, 1), "read": of(1, 10, 9)}, {"none": of(0, 10, None), "read": of(1, 26, 9)}]
    found = script("bench_hooks_report").sent_by(ranks)
    assert found["read"] == {"calls": {"gather": 1}, "nbytes": 16, "wire": 8}
    assert found["none"] == {"calls": {}, "nbytes": 0, "wire": 0}


@pytest.mark.parametrize(
    ("ours", "floor", "said"),
    [(1.4, 1.0, "1.39: met"), (1.6, 1.0, "1.58: missed"), (-1.0, 1.0, "below the noise: met")],
)
def test_a_target_is_judged_within_rounds(script: Load, ours: float, floor: float, said: str) -> None:
    report = script("bench_hooks_report")
    assert report.judged(made(2, 8, read=ours, clone=floor), "read", "clone", 1.5) == said


def test_a_verdict_that_noise_allows_both_ways_is_undecided(script: Load) -> None:
    run = made(2, 8, read=1.0, clone=1.0)
    run["ms"]["read"] = [t + (4 if n % 2 else -4) for n, t in enumerate(run["ms"]["read"])]
    assert script("bench_hooks_report").judged(run, "read", "clone", 1.0).endswith("undecided")


def test_a_way_that_was_not_measured_is_told(script: Load) -> None:
    assert script("bench_hooks_report").judged(made(2, 8), "selected", "clone of one", 1.1) == "not measured"
    assert script("bench_hooks_report").targets_table(result(made(2, 8))).count("not measured") == 6


def test_the_report_has_sizes_bytes_and_targets(script: Load) -> None:
    runs = [made(2, 1, read=0.5, clone=0.4, local=1.0), made(2, 8, read=4.0, clone=2.0, local=1.0)]
    for one in runs:
        one["sent"]["read"] = {"calls": {"gather": 1}, "nbytes": one["mib"] * 2**20, "wire": 0}
        one["sent"]["local"] = {"calls": {"all_gather": 4}, "nbytes": 64.0, "wire": 0}
    report = script("bench_hooks_report")
    text = report.report(result(*runs))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    cells = [cell.strip() for cell in rows["read"].split("|")]
    assert cells[2:6] == ["0.53 [0.50, 0.56]", "4.03 [4.00, 4.06]", "0.50", "1 gather a step"]
    assert "2 all_gather " in rows["local edit, `scale`"]
    target = rows[f"read <= 1.5 x {report.LABELS['clone']}"]
    assert [cell.strip() for cell in target.split("|")][2:4] == ["1.23: met", "1.99: missed"]
    assert rows["local edit, `scale`: 0 bytes"].count("32: missed") == 2
    assert "1.00: met within noise" in rows["FlexModel attached, no hook"]
    assert rows["statistics"].rstrip(" |").endswith("1.05: missed")
    assert "load 0.5 before and 2.0 after" in text


def test_runs_of_one_machine_stand_in_one_table(script: Load) -> None:
    joined = script("bench_hooks").joined
    both = joined([result(made(2, 8, read=1.0)), result(made(4, 8, read=2.0)) | {"load": [7.0, 9.0]}])
    assert [run["tp"] for run in both["hooks"]] == [2, 4]
    assert (both["load"], len(both["steps"])) == ([0.5, 9.0], 2)
    with pytest.raises(SystemExit, match="cores 64 beside 2: tell them apart"):
        joined([result(), result() | {"cores": 64}])


def test_a_command_is_told_without_where_its_figures_are_kept(script: Load) -> None:
    words = ["--hooks", "--json", "here", "--tp", "2", "--plot=there", "--folder", "somewhere"]
    assert script("bench_hooks")._told_of(words) == ["--hooks", "--tp", "2"]


def test_a_page_gets_what_is_between_its_comments(script: Load) -> None:
    put = script("bench_results").put
    page = "above\n<!-- hooks: written by scripts/bench -->\nold\n<!-- hooks: end -->\nbelow\n"
    new = put(page, "hooks", "new")
    assert new == page.replace("old", "new")
    assert put(new, "hooks", "new") == new
    with pytest.raises(ValueError, match="has no lines '<!-- idle: written by"):
        put(page, "idle", "new")


def test_the_page_of_performance_can_be_written(script: Load) -> None:
    docs = SCRIPTS.parents[1] / "docs"
    pages = {"hooks": "performance_raw.md", "idle": "performance_raw.md", "hook-cost": "performance.md"}
    for section, name in pages.items():
        page = (docs / name).read_text(encoding="utf-8")
        assert "all new" in script("bench_results").put(page, section, "all new")


def test_the_plot_has_a_line_for_each_way_and_a_size_for_each_run(script: Load, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = script("bench_plot")
    runs = [made(2, 8, read=4.0, clone=2.0), made(2, 1, read=0.5, clone=-1.0), made(4, 1, read=0.7)]
    found = plot.lines(runs[:2])
    assert list(found) == ["clone", "read"]
    assert found["read"][0] == [1, 8]
    assert [s["median"] for s in found["read"][1]] == pytest.approx([0.53, 4.03])
    assert plot.COLORS.keys() <= script("bench_hooks_report").LABELS.keys()
    plot.draw(result(*runs), tmp_path / "hooks.png")
    assert (tmp_path / "hooks.png").read_bytes().startswith(b"\x89PNG")


def test_callgrinds_files_become_instructions_in_the_order_of_the_steps(script: Load) -> None:
    def dump(part: int, way: str, count: int) -> str:
        return (
            f"part: {part}\n\ndesc: Trigger: Client Request: {way}\n\nsummary: {count}\ntotals: {count + 9}\n"
        )

    idle = script("bench_idle")
    texts = [dump(2, "none", 20), dump(3, "idle", 31), dump(1, "none", 10), dump(4, "detached", 15)]
    found = idle.counts([*texts, "part: 5\nsummary: 7\n"])
    assert found == {"none": [10, 20], "idle": [31], "detached": [15]}
    assert "2.0667" in idle.table(found)


def test_the_loopback_interface_is_found_among_others(script: Load) -> None:
    head = "Inter-|   Receive  |  Transmit\n face |bytes packets|bytes packets\n"
    counted = " lo: 11 2 0 0 0 0 0 0 12 4 0 0 0 0 0 0\n eth0: 5 6 0 0 0 0 0 0 7 8 0 0 0 0 0 0\n"
    assert script("bench_sent").on_loopback(head + counted) == 12
    assert script("bench_sent").on_loopback(head) is None


def sends() -> tuple[dict[str, int], float]:
    """A rank of three calls each collective with 12 or 4 bytes."""
    import torch.distributed as dist

    sys.path.insert(0, str(SCRIPTS))
    from bench_sent import counting

    three, one = torch.zeros(3), torch.zeros(1)
    with counting() as sent:
        dist.all_reduce(three)
        dist.all_gather([torch.zeros(1) for _ in range(3)], one)
        dist.gather(one, [torch.zeros(1) for _ in range(3)] if dist.get_rank() == 0 else None, dst=0)
        dist.broadcast(three, src=1)
        dist.barrier()
    dist.all_reduce(three)  # no one counts any more
    return dict(sent.calls), sent.nbytes


def test_bytes_are_counted_where_they_leave() -> None:
    (calls, first), (_, second), (_, third) = run(3, sends)
    assert calls == {"all_reduce": 1, "all_gather": 1, "gather": 1, "broadcast": 1, "barrier": 1}
    each = 12 * 2 * 2 / 3 + 4 * 2
    assert (first, second, third) == (each, each + 4 + 24, each + 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hooks", "--tp", "3"], "--tp 3: --hidden must be a multiple of 48"),
        (["--hooks", "--mib", "0.5"], "--mib 0.5: must be a multiple of 1"),
        (["--hooks", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--hooks", "--device", "cuda"], "error: no CUDA device: leave out --device cuda"),
        (["--idle", "--steps", "0"], "--steps 0: must be at least 1"),
    ],
)
def test_bad_flags_are_told(words: list[str], said: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / "bench.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())
