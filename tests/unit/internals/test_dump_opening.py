"""Opening a dump to write: what is there already, who else opens it, and folders that are none."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.dump import (
    VALUE,
    Dump,
    DumpWriter,
    Manifest,
    RunMade,
    ShardEntry,
    create_run,
    find_access_problem,
    layout_to_json,
)
from megatron_flex.dump.file_names import MANIFEST_NAME, format_part_name, format_run_folder
from megatron_flex.dump.schema import SiteRecord
from megatron_flex.dump.writer.run_creation import find_earlier_runs, list_begun_runs
from megatron_flex.errors import DumpError
from megatron_flex.layout import replicated
from tests.support.dumps import complete_parts
from tests.support.messages import assert_names


def manifest(ranks: int = 2, **more: Any) -> Manifest:
    told = {
        "run": 0,
        "created": "2025-01-01T00:00:00+00:00",
        "versions": {},
        "framework": "plain",
        "axes": {"dp": ranks},
        "experts": {},
        "ranks": tuple((r, {"dp": r}) for r in range(ranks)),
        "model": {},
        "identity": "abc",
        "sites": (SiteRecord("x", layout_to_json(replicated("h")), (30,)),),
        "parameters": (),
        "settings": Dump("x", "x").to_json(),
    }
    return Manifest(**{**told, **more})


def write(folder: Path, rank: int, iterations: range) -> None:
    at = DumpWriter(folder, rank, {"dp": rank}, Dump(folder, "x", part_bytes=100))
    for number in iterations:
        at.begin(number, 0, True, 1)
        for n in range(3):
            at.put(ShardEntry(f"x{n}", VALUE, 0, 0, 0, (30,), ""), replicated("h"), torch.ones(30))
        at.finish()
    at.close()


def opened(path: Path, **more: Any) -> Manifest:
    return create_run(path, manifest(**more))


def refused(path: Path, **more: Any) -> str:
    with pytest.raises(DumpError) as found:
        opened(path, **more)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_run_writes_again_what_earlier_runs_have(tmp_path: Path) -> None:
    path = tmp_path / "some" / "dump"
    first = opened(path)
    assert (first.run, first.skipped) == (0, ())
    write(path / "run-0000", 0, range(5))
    write(path / "run-0000", 1, range(3))
    second = opened(path, ranks=1)
    assert (second.run, second.skipped) == (1, ())
    keys = [(n, 0) for n in range(6)]
    assert find_earlier_runs(path, 0, keys) == {}
    assert find_earlier_runs(path, 1, keys) == {"run-0000": keys[:3]}
    write(path / "run-0001", 0, range(2, 5))
    assert find_earlier_runs(path, 2, keys[2:]) == {"run-0000": keys[2:3], "run-0001": keys[2:5]}
    (path / "run-0000" / MANIFEST_NAME).write_text("{")
    assert find_earlier_runs(path, 2, keys) == {"run-0001": keys[2:5]}
    assert find_earlier_runs(path / "removed", 2, keys) == {}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_iteration_without_one_of_its_parts_is_not_whole(tmp_path: Path, lost: int) -> None:
    opened(tmp_path, ranks=1)
    write(tmp_path / "run-0000", 0, range(2))
    (tmp_path / "run-0000" / "0000000001" / format_part_name(0, lost, 3 * (lost == 2))).unlink()
    assert find_earlier_runs(tmp_path, 1, [(0, 0), (1, 0)]) == {"run-0000": [(0, 0)]}
    assert complete_parts(tmp_path / "run-0000" / "0000000001", [0]) is None


def test_what_is_whole_is_told_by_names(tmp_path: Path) -> None:
    def told(*names: str) -> list[str] | None:
        for file in tmp_path.iterdir():
            file.unlink()
        for name in names:
            (tmp_path / f"{name}.safetensors").touch()
        found = complete_parts(tmp_path, [0, 3])
        return (
            None
            if found is None
            else [p.name.removesuffix(".safetensors") for rank in (0, 3) for p in found[rank]]
        )

    one, first, second = "00000-000-of-001", "00003-000", "00003-001-of-002"
    assert told(one, first, second) == [one, first, second]
    assert told(one, first, second, "00007-000", ".00003-002") == [one, first, second]  # no rank of the run's
    for less in (
        (one, first),
        (one, second),
        (first, second),
        (one, "00003-001", second),
        (one, first, "00003-002-of-003"),
        (one, first, second, "00003-002"),
        (),
    ):
        assert told(*less) is None, less


def test_numbers_go_on_behind_the_last_run(tmp_path: Path) -> None:
    for _ in range(3):
        opened(tmp_path)
    for number in (0, 1):
        (tmp_path / format_run_folder(number) / MANIFEST_NAME).unlink()
        (tmp_path / format_run_folder(number)).rmdir()
    assert opened(tmp_path).run == 3
    assert [r.folder.name for r in list_begun_runs(tmp_path)] == ["run-0002", "run-0003"]


def test_leaders_that_open_at_once_get_runs_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda n: opened(tmp_path, created=str(n)), range(40)))
    assert sorted(m.run for m in told) == list(range(40))
    for one in told:
        assert Manifest.read(tmp_path / format_run_folder(one.run)).created == one.created
    assert not list(tmp_path.glob(".run-*"))


def test_what_killed_runs_leave_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".run-17-0a0b0c0d.tmp").mkdir()
    (tmp_path / ".run-17-0a0b0c0d.tmp" / (MANIFEST_NAME + ".tmp")).write_text("{")
    (tmp_path / "run-0000").mkdir()
    folder = tmp_path / "run-0001" / "0000000000"
    folder.mkdir(parents=True)
    (folder / ".00000-000-of-001.safetensors.tmp").write_text("half")
    told = opened(tmp_path, ranks=1)
    assert told.run == 2
    write(tmp_path / "run-0002", 0, range(1))
    assert opened(tmp_path).run == 3


def test_other_dumps_and_other_folders_are_refused(tmp_path: Path) -> None:
    opened(tmp_path / "dump")
    assert_names(refused(tmp_path / "dump", identity="other"), tmp_path / "dump", "plain")
    other = Dump("x", "x", tokens=slice(None, None, 2)).to_json()
    assert "tokens=None" in refused(tmp_path / "dump", settings=other)
    opened(tmp_path / "dump", settings=Dump("x", "x", every=3, iterations=range(5)).to_json())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("words")
    assert_names(refused(tmp_path / "full"), tmp_path / "full", "'thesis.tex'")
    assert (tmp_path / "full" / "thesis.tex").exists()
    (tmp_path / "file").write_text("")
    assert_names(refused(tmp_path / "file"), tmp_path / "file", os.strerror(errno.EEXIST))
    assert_names(refused(tmp_path / "file" / "below"), os.strerror(errno.ENOTDIR))
    assert_names(refused(Path("/proc/dump")), "/proc/dump")
    assert "null" in refused(Path("a\0b"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', "\0\1"])
def test_a_damaged_manifest_is_told(tmp_path: Path, content: str) -> None:
    opened(tmp_path)
    (tmp_path / "run-0000" / MANIFEST_NAME).write_text(content)
    assert "run-0000/manifest.json" in refused(tmp_path)


def test_nothing_is_left_of_a_run_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "JSON" in refused(tmp_path, model={"a": object()})

    def full(self: Manifest, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Manifest, "write", full)
    assert_names(refused(tmp_path), os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_sees_another_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = opened(tmp_path)
    run_made = RunMade(manifest.run, manifest.created, 0)
    assert find_access_problem(tmp_path, run_made) == ""
    other = find_access_problem(tmp_path, run_made._replace(created="later"))
    absent = find_access_problem(tmp_path, run_made._replace(run=7), 0.0)
    assert find_access_problem(tmp_path / "elsewhere", run_made, 0.0) == absent
    monkeypatch.setattr(os, "access", lambda *args: False)  # which root always has
    closed = find_access_problem(tmp_path, run_made)
    assert len({"", other, absent, closed}) == 4


def test_a_folder_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    manifest, hidden = opened(tmp_path), tmp_path / "run.hidden"
    folder = tmp_path / format_run_folder(manifest.run)
    folder.rename(hidden)
    appears = threading.Timer(0.5, hidden.rename, [folder])
    appears.start()
    assert find_access_problem(tmp_path, RunMade(manifest.run, manifest.created, 0)) == ""
    appears.join()
