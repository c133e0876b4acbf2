"""What was removed from a dump, or renamed, is an error or is told on every road on which it is read."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.dump.file_names import MANIFEST_NAME
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.dump.tools.dump_verification import DumpFinding, verify_dump
from megatron_flex.errors import DumpError, FlexWarning
from megatron_flex.page.dump_damage import open_readable
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dump_roads import FIXTURE
from tests.support.dumps import COLUMN, Given, random
from tests.support.messages import any_names, assert_names, raises, warns

SITE, MESH = "decoder.layers.0", {"tp": 2}
EXPORT = ("export", "d", "out.safetensors")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two runs: iterations 0 to 3, and 4 to 7."""
    write(tmp_path / "d", range(4))
    write(tmp_path / "d", range(4, 8))
    return tmp_path / "d"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def write(path: Path, iterations: range) -> None:
    sites = {SITE: Given(random(len(iterations), 2, 4, 8), COLUMN)}
    dumps.write(path, sites, mesh=MESH, iterations=iterations)


def opened(path: Path) -> tuple[list[int], list[str]]:
    """The iterations that are read, and the warnings of that."""
    with warnings.catch_warnings(record=True) as caught, mf.open_dump(path) as found:
        warnings.simplefilter("always", FlexWarning)
        iterations = found.iterations
    return iterations, [str(w.message) for w in caught]


def listed(path: Path) -> list[str]:
    with warnings.catch_warnings(), mf.open_dump(path) as found:
        warnings.simplefilter("ignore", FlexWarning)
        return found.missing


def errors(path: Path) -> list[DumpFinding]:
    return [f for f in verify_dump(path).findings if f.error]


def on_page(path: Path) -> str:
    return " ".join(note["text"] for note in open_readable(path).notes)


def damaged_roads(dump: Path, command: Command, text: str) -> None:
    """Reading is refused on each road, and what lists or shows damage names it."""
    write(dump.parent / "good", range(8))
    for road in (
        lambda: mf.open_dump(dump),
        lambda: compare(dump, dump.parent / "good"),
        lambda: compare(dump.parent / "good", dump),
    ):
        with raises(DumpError, text):
            road()
    for words in (("dump", "show", "d", SITE), ("dump", *EXPORT), ("compare", "d", "good")):
        done = command(*words)
        assert done.status == 2, words
        assert text in done.err, words
    assert any(text in f.text or text in f.where for f in errors(dump))
    assert text in command("dump", "verify", "d").out
    assert text in command("dump", "ls", "d").out
    assert text in on_page(dump)


def test_nothing_is_missing_of_a_dump_as_it_was_written(dump: Path, command: Command) -> None:
    assert opened(dump) == ([*range(8)], [])
    assert listed(dump) == []
    assert verify_dump(dump).findings == []
    assert list_dump_contents(dump).notes == []
    assert open_readable(dump).notes == []
    done = command("dump", "ls", "d")
    assert (done.status, done.err) == (0, "")


# -- manifests


def unlinked(manifest: Path) -> None:
    manifest.unlink()


def emptied(manifest: Path) -> None:
    manifest.write_bytes(b"")


def linked(manifest: Path) -> None:
    manifest.unlink()
    manifest.symlink_to("nowhere.json")


@pytest.mark.parametrize("change", [unlinked, emptied, linked])
@pytest.mark.parametrize("run", [0, 1])
def test_a_manifest_that_is_gone_or_empty_is_an_error_on_every_road(
    dump: Path, command: Command, run: int, change: Callable[[Path], None]
) -> None:
    change(dump / f"run-{run:04d}" / MANIFEST_NAME)
    damaged_roads(dump, command, f"run-{run:04d}/{MANIFEST_NAME}")
    told = list_dump_contents(dump)
    assert told.iterations == list(range(4, 8) if run == 0 else range(4)), "those that can be read"
    assert told.runs[run].incomplete == list(range(4) if run == 0 else range(4, 8))
    assert verify_dump(dump).complete == told.iterations


def test_what_only_a_run_without_a_manifest_has_whole_is_lost(dump: Path) -> None:
    shutil.copytree(dump / "run-0000" / "0000000003", dump / "run-0001" / "0000000003")
    next((dump / "run-0001" / "0000000003").iterdir()).unlink()
    assert errors(dump) == []
    (dump / "run-0000" / MANIFEST_NAME).unlink()
    assert {f.kind for f in errors(dump)} == {"manifest", "missing"}


def test_the_only_manifest_that_is_gone_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE / "dump", tmp_path / "d")
    iterations, told = opened(tmp_path / "d")
    assert iterations
    assert told == []
    for path in sorted((tmp_path / "d").glob(f"run-*/{MANIFEST_NAME}")):
        text = path.read_bytes()
        path.unlink()
        with pytest.raises(DumpError, match=f"{path.parent.name}/{MANIFEST_NAME}"):
            mf.open_dump(tmp_path / "d")
        path.write_bytes(text)
    assert opened(tmp_path / "d") == (iterations, [])


# -- a run that is being opened, or never was


def test_drafts_of_a_run_that_is_being_opened_are_nothing_to_tell(dump: Path) -> None:
    """A run's folder has its name once its manifest is in it."""
    draft = dump / ".run-17-0a0b0c0d.tmp"
    draft.mkdir()
    (draft / f"{MANIFEST_NAME}.tmp").write_text("{")
    (dump / "run-0001" / "0000000008").mkdir()
    (dump / "run-0001" / "0000000008" / ".00000-000.safetensors.tmp").write_bytes(b"half")
    assert opened(dump) == ([*range(8)], [])
    assert list_dump_contents(dump).notes == []
    assert [f.kind for f in verify_dump(dump, live=True).findings if f.error] == []


def test_what_the_newest_run_writes_is_listed_and_not_warned_of(dump: Path) -> None:
    """Also where a rank is an iteration ahead of another."""
    for number, rank in ((6, 1), (7, 1)):
        next((dump / "run-0001" / f"{number:010d}").glob(f"{rank:05d}-*")).unlink()
    assert opened(dump) == ([*range(6)], [])
    for line, number in zip(listed(dump), (6, 7), strict=True):
        assert_names(line, number, "run-0001", 1)
    assert list_dump_contents(dump).runs[1].incomplete == [6, 7]
    assert [f.kind for f in errors(dump)] == ["incomplete", "incomplete"]


@pytest.mark.parametrize("inside", ["", f"{MANIFEST_NAME}.tmp", "0000000008/.00000-000.safetensors.tmp"])
def test_an_empty_folder_of_a_run_is_told(dump: Path, command: Command, inside: str) -> None:
    folder = dump / "run-0002"
    folder.mkdir()
    if inside:
        (folder / inside).parent.mkdir(exist_ok=True)
        (folder / inside).write_text("{")
    iterations, (told,) = opened(dump)
    assert iterations == [*range(8)]
    assert_names(told, "run-0002")
    assert any_names(listed(dump), "run-0002")
    done = command("dump", "show", "d", SITE)
    assert done.status == 0
    assert done.err.startswith("megatron-flex: warning: ")
    assert_names(done.err, "run-0002")
    assert [(f.kind, f.where) for f in errors(dump)] == [("manifest", f"run-0002/{MANIFEST_NAME}")]
    assert f"run-0002/{MANIFEST_NAME}" in command("dump", "ls", "d").out
    assert_names(on_page(dump), 2)
    write(dump.parent / "good", range(8))
    with warns(FlexWarning, "run-0002"):
        found = compare(dump, dump.parent / "good")
    assert any_names(found.notes, "A", "run-0002")


def test_an_empty_folder_of_an_iteration_is_told(dump: Path) -> None:
    (dump / "run-0001" / "0000000008").mkdir()
    (line,) = listed(dump)
    assert_names(line, 8, "run-0001", "0, 1")
    assert list_dump_contents(dump).runs[1].incomplete == [8]
    assert {f.kind for f in errors(dump)} == {"incomplete"}
    shutil.rmtree(dump / "run-0000" / "0000000001")
    (dump / "run-0000" / "0000000001").mkdir()
    assert any_names(listed(dump), 1, "run-0000")


# -- parts and iterations


@pytest.mark.parametrize(("run", "iteration"), [(0, 0), (0, 2), (1, 6)])
def test_a_part_that_is_gone_is_told_on_every_road(
    dump: Path, command: Command, run: int, iteration: int
) -> None:
    next((dump / f"run-{run:04d}" / f"{iteration:010d}").glob("00001-*")).unlink()
    named = iteration, f"run-{run:04d}", 1
    left = [n for n in range(8) if n != iteration]
    iterations, (told,) = opened(dump)
    assert iterations == left
    assert_names(told, *named)
    (line,) = listed(dump)
    assert_names(line, *named)
    for words in (("dump", "show", "d", SITE), ("dump", *EXPORT)):
        done = command(*words)
        assert done.status == 0
        assert_names(done.err, *named)
    assert [(f.kind, f.iteration) for f in errors(dump)] == [("missing", iteration)]
    assert list_dump_contents(dump).runs[run].incomplete == [iteration]
    assert command("dump", "ls", "d").err == ""
    assert_names(on_page(dump), iteration)
    with warns(FlexWarning, *named):
        found = compare(dump, dump)
    assert any_names(found.notes, "A", *named)


def test_many_iterations_that_lost_parts_are_one_warning(dump: Path) -> None:
    for path in [*dump.glob("run-000?/*/00001-*")][:]:
        if path.parent.name not in ("0000000003", "0000000007"):
            path.unlink()
    iterations, told = opened(dump)
    assert iterations == [3, 7]
    assert len(told) == 1
    assert all(f"iteration {n} of" in told[0] for n in (0, 1, 2, 4, 5, 6))


@pytest.mark.parametrize(("run", "iteration"), [(0, 1), (0, 3), (1, 4), (1, 5)])
def test_a_folder_of_an_iteration_that_is_gone_is_told(
    dump: Path, command: Command, run: int, iteration: int
) -> None:
    """Between others, of its run or of two runs: nothing says where the first began or the last ended."""
    shutil.rmtree(dump / f"run-{run:04d}" / f"{iteration:010d}")
    assert opened(dump) == ([n for n in range(8) if n != iteration], [])
    with mf.open_dump(dump) as found, raises(DumpError, f"({iteration}, 0)", path=str(dump)):
        found.stored_iteration((iteration, 0))
    (told,) = listed(dump)
    assert_names(told, iteration)
    (finding,) = verify_dump(dump).findings
    assert (finding.kind, finding.error) == ("gap", False), "it may have been dropped, or pruned"
    for shown in (command("dump", "verify", "d").out, command("dump", "ls", "d").out, on_page(dump)):
        assert told in shown
    assert any(told in note for note in compare(dump, dump).notes)


@pytest.mark.parametrize(
    ("settings", "there", "gone"),
    [
        ({}, [0, 1, 2, 3], []),
        ({}, [0, 10, 20], []),
        ({}, [0, 10, 30], [20]),
        ({}, [5], []),
        ({}, [], []),
        ({"every": 2}, [0, 4], [2]),
        ({"every": 2}, [2, 4, 8, 10], [6]),
        ({"iterations": [1, 5, 6, 9]}, [1, 6, 9], [5]),
        ({"iterations": [1, 5, 6, 9]}, [5, 6], []),
        ({"every": 3, "iterations": [1, 3, 5, 6, 9]}, [3, 9], [6]),
        ({"every": 2, "iterations": {"slice": [0, 0, 3]}}, [0, 6, 18], [12]),
        ({"every": "x", "iterations": "x"}, [0, 1, 3], [2]),
    ],
)
def test_which_iterations_are_gone_is_known_by_settings_and_steps(
    dump: Path, settings: dict[str, object], there: list[int], gone: list[int]
) -> None:
    from dataclasses import replace

    from megatron_flex.dump.reader.missing_parts import gaps
    from megatron_flex.dump.schema import Manifest

    manifest = replace(Manifest.read(dump / "run-0000"), settings=settings)
    assert gaps([(manifest, there)]) == gone


@pytest.mark.parametrize(
    ("earlier", "later", "gone"),
    [
        (({}, [0, 1, 2]), ({}, [4, 5]), [3]),
        (({}, [0, 1, 2]), ({}, [2, 3]), []),
        (({}, [0]), ({}, [4, 6]), [2]),
        (({}, [0]), ({}, [4]), []),
        (({}, [0, 10]), ({}, [40, 41]), [20, 30]),
        (({}, [0, 10]), ({}, [15, 25]), []),
        (({"every": 2}, [0]), ({"every": 2}, [4]), [2]),
        (({"every": 2}, [0]), ({"every": 3}, [9]), []),
        (({"iterations": [1, 5, 6, 9]}, [1]), ({"iterations": [1, 5, 6, 9]}, [9]), [5, 6]),
    ],
)
def test_iterations_that_are_gone_between_two_runs(
    dump: Path, earlier: tuple[Any, list[int]], later: tuple[Any, list[int]], gone: list[int]
) -> None:
    """A run that was killed before its last iteration was written, and one that continued after it."""
    from dataclasses import replace

    from megatron_flex.dump.reader.missing_parts import gaps
    from megatron_flex.dump.schema import Manifest

    manifest = Manifest.read(dump / "run-0000")
    assert gaps((replace(manifest, settings=s), there) for s, there in (earlier, later)) == gone


def test_numbers_that_cannot_be_are_not_counted_one_by_one(dump: Path) -> None:
    """A folder's name is anybody's: finding what is not there takes no longer for it."""
    (dump / "run-0001" / f"{10**17:010d}").mkdir()
    assert any_names(listed(dump), "8, 9, 10")


# -- folders under other names


@pytest.mark.parametrize("name", ["run-0007", "run-0001-old", "run-1", "run-00001", "before"])
def test_a_run_that_was_renamed_is_an_error_on_every_road(dump: Path, command: Command, name: str) -> None:
    (dump / "run-0001").rename(dump / name)
    damaged_roads(dump, command, name)


@pytest.mark.parametrize("name", ["run-0000-old", "before"])
def test_the_only_run_under_another_name_is_an_error_on_every_road(
    tmp_path: Path, command: Command, name: str
) -> None:
    write(tmp_path / "d", range(2))
    (tmp_path / "d" / "run-0000").rename(tmp_path / "d" / name)
    for words in (("ls", "d"), ("verify", "d"), ("show", "d", SITE), EXPORT):
        done = command("dump", *words)
        assert done.status == 2
        assert_names(done.err, name, 0)
    for road in (mf.open_dump, open_readable):
        with raises(DumpError, name, 0, "run-0000"):
            road(tmp_path / "d")


def test_a_copy_of_a_run_is_told_and_not_read(dump: Path, command: Command) -> None:
    shutil.copytree(dump / "run-0000", dump / "run-0000-copy")
    assert opened(dump) == ([*range(8)], [])
    (text,) = listed(dump)
    assert_names(text, "run-0000-copy", 0, "run-0000")
    (finding,) = verify_dump(dump).findings
    assert (finding.kind, finding.error, finding.text) == ("stray", False, text)
    assert text in " ".join(command("dump", "ls", "d").out.split()), "in lines that fit the terminal"
    assert list_dump_contents(dump).notes == [text]


def test_folders_of_others_beside_the_runs_are_theirs(dump: Path) -> None:
    (dump / "notes").mkdir()
    (dump / "notes" / MANIFEST_NAME).write_text(json.dumps({"format": "of somebody else"}))
    assert opened(dump) == ([*range(8)], [])
    assert listed(dump) == []
