"""Verifying and pruning: each kind of damage is found and named; what is whole stays."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.dump import REPLICA, DumpWriter
from megatron_flex.dump.part_format import read_part
from megatron_flex.dump.reader import open_dump
from megatron_flex.dump.run_folders import list_runs
from megatron_flex.dump.tools.dump_cleanup import list_removals, prune_dump
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.dump.tools.dump_verification import DumpFinding, verify_dump
from megatron_flex.dump.writer.writers_lock import is_being_written
from megatron_flex.errors import DumpError
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import COLUMN, REPLICATED, Given, random
from tests.support.messages import assert_names, raises

MESH = {"pp": 2, "tp": 2}
FIRST, SECOND = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1"


def sites(count: int = 3) -> dict[str, Given]:
    return {
        FIRST: Given(random(count, 2, 4, 8, seed=1), COLUMN, random(count, 2, 4, 8, seed=2)),
        SECOND: Given(random(count, 2, 4, 8, seed=3), COLUMN, stage=1),
    }


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    write(tmp_path / "dump", [0, 10, 20])
    return tmp_path / "dump"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def write(path: Path, iterations: list[int], **more) -> None:
    dumps.write(path, sites(len(iterations)), mesh=MESH, iterations=iterations, **more)


def part(dump: Path, iteration: int, rank: int, run: int = 0) -> Path:
    (found,) = (dump / f"run-{run:04d}" / f"{iteration:010d}").glob(f"{rank:05d}-*.safetensors")
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def only(dump: Path, **more) -> DumpFinding:
    found = verify_dump(dump, **more)
    (finding,) = found.findings
    assert found.good is not finding.error
    return finding


def test_a_dump_as_it_was_written_is_good(dump):
    found = verify_dump(dump)
    assert found.good
    assert found.findings == []
    assert (found.files, found.tensors, found.complete) == (12, 3 * (2 * 2 + 2), [0, 10, 20])
    assert found.nbytes == sum(g.value.nbytes for g in sites().values()) * 3 // 2


@pytest.mark.parametrize("rank", [1, 3])
def test_a_flipped_byte_is_named_by_rank_and_site(dump, rank):
    path = part(dump, 10, rank)
    flip(path, path.stat().st_size - 1)
    finding = only(dump)
    assert (finding.kind, finding.rank, finding.iteration) == ("checksum", rank, 10)
    assert finding.sites == ((FIRST + ".grad",) if rank == 1 else (SECOND,))
    assert finding.where == str(path.relative_to(dump))


def test_a_flipped_byte_of_a_header_is_named_by_what_is_lost(dump):
    flip(part(dump, 10, 2), 100)
    finding = only(dump)
    assert (finding.kind, finding.rank, finding.sites) == ("header", 2, (SECOND,))


def test_a_truncated_file_is_named(dump):
    path = part(dump, 0, 0)
    path.write_bytes(path.read_bytes()[:-8])
    finding = only(dump)
    assert (finding.kind, finding.rank, finding.sites) == ("header", 0, (FIRST, FIRST + ".grad"))


def test_a_missing_part_is_named_by_rank_and_site(dump):
    part(dump, 10, 1).unlink()
    finding = only(dump)
    assert (finding.kind, finding.rank, finding.iteration) == ("missing", 1, 10)
    assert finding.sites == (FIRST, FIRST + ".grad")
    assert_names(finding.text, 0, 1)


def test_an_iteration_that_several_ranks_left_is_one_line(dump, command):
    """Whichever ranks stopped, and whichever lost a part."""
    for rank in (0, 1, 3):
        part(dump, 20, rank).unlink()
    part(dump, 10, 1).unlink()
    assert len(verify_dump(dump).findings) == 4, "a program gets one for each rank"
    told = command("dump", "verify", dump).out.splitlines()
    twenty, ten = ([line for line in told if f"00000000{n}" in line] for n in (20, 10))
    assert len(twenty) == len(ten) == 1
    assert_names(twenty[0], 20, "0, 1, 3", 3)
    assert_names(ten[0], 1, 0)
    assert_names(told[-1], 2)


def test_one_of_several_parts_that_is_missing_is_named_by_what_was_in_it(tmp_path):
    path = tmp_path / "dump"
    write(path, [0, 10], part_bytes=100)
    one = path / "run-0000" / f"{10:010d}" / "00000-000.safetensors"
    (entry,) = read_part(one).index.entries
    one.unlink()
    finding = only(path)
    assert (finding.kind, finding.rank, finding.sites) == ("missing", 0, (entry.site,))


def test_a_rank_that_stopped_leaves_a_torn_iteration(dump):
    part(dump, 20, 3).unlink()
    finding = only(dump)
    assert (finding.kind, finding.rank, finding.iteration) == ("incomplete", 3, 20)
    assert finding.error
    assert verify_dump(dump, live=True).findings == []


def test_what_another_run_has_whole_is_not_lost(dump):
    part(dump, 20, 3).unlink()
    write(dump, [0, 10, 20])
    finding = only(dump)
    assert finding.kind == "incomplete"
    assert not finding.error
    assert open_dump(dump).iterations == [0, 10, 20]


def test_a_manifest_that_is_gone_is_found_and_checksums_are_still_checked(dump):
    (dump / "run-0000" / "manifest.json").unlink()
    path = part(dump, 10, 1)
    flip(path, path.stat().st_size - 1)
    assert [f.kind for f in verify_dump(dump).findings] == ["manifest", "checksum"]


def test_a_part_under_another_name_contradicts_it(dump):
    path = part(dump, 10, 1)
    path.write_bytes(part(dump, 0, 1).read_bytes())
    finding = only(dump)
    assert (finding.kind, finding.rank) == ("contradiction", 1)
    assert_names(finding.text, 0, 1, 10)


def test_a_site_that_the_manifest_does_not_have_contradicts_it(dump):
    path = dump / "run-0000" / "manifest.json"
    path.write_bytes(dumps.sealed_again(path.read_bytes().replace(SECOND.encode(), b"decoder.layers.7")))
    found = verify_dump(dump)
    assert not found.good
    assert {f.rank for f in found.findings if f.error} == {2, 3}
    assert any("decoder.layers.7" in f.text and not f.error for f in found.findings)


def test_a_digit_of_a_manifest_that_changed_is_damage(dump):
    """Of the stage of a site: nothing would be found of it, as if nothing had passed there."""
    path = dump / "run-0000" / "manifest.json"
    text = path.read_bytes()
    at = text.index(b'"stage": 1')
    path.write_bytes(text[: at + 9] + b"0" + text[at + 10 :])
    assert only(dump).kind == "manifest"
    with raises(DumpError, path, path=str(path)):
        open_dump(dump)
    path.write_bytes(dumps.sealed_again(path.read_bytes()))
    found = [f for f in verify_dump(dump).findings if f.error]
    assert {(f.kind, f.rank) for f in found} == {("contradiction", 2), ("contradiction", 3)}
    assert_names(found[0].text, SECOND, 1, 0)


def test_strays_are_noted_and_are_no_error(dump):
    (dump / "run-0000" / f"{10:010d}" / ".00001-000.safetensors.tmp").write_bytes(b"x" * 9)
    assert only(dump).kind == "stray"
    assert verify_dump(dump).good


@pytest.mark.parametrize("wrong", [False, True])
def test_replicas_out_of_step_are_named(tmp_path, monkeypatch, wrong):
    path, put = tmp_path / "dump", DumpWriter.put
    whole = {"decoder.layers.0": Given(random(1, 2, 4, 8), REPLICATED)}
    monkeypatch.setattr("tests.support.dumps.Ownership.mine", lambda *_, **__: True)

    def copied(self, entry, layout, tensor):
        if self.coords["tp"] == 1:
            entry = replace(entry, kind=REPLICA)
            tensor = tensor + 1 if wrong else tensor
        put(self, entry, layout, tensor)

    monkeypatch.setattr(DumpWriter, "put", copied)
    dumps.write(path, whole, mesh={"tp": 2}, replicas=True)
    found = verify_dump(path)
    assert found.replicas == 1
    assert [(f.kind, f.rank, f.sites) for f in found.findings] == (
        [("replica", 1, ("decoder.layers.0",))] if wrong else []
    )


def test_findings_as_they_are_printed(command, dump):
    flip(part(dump, 10, 1), part(dump, 10, 1).stat().st_size - 1)
    part(dump, 0, 2).unlink()
    part(dump, 20, 3).unlink()
    (dump / "run-0000" / f"{20:010d}" / ".00003-000-of-001.safetensors.tmp").write_bytes(b"x" * 9)
    done = command("dump", "verify", "dump")
    assert (done.status, done.err) == (1, "")
    lost = "decoder.layers.1.mlp.linear_fc1"
    for values in (
        ("checksum", "00001-000-of-001.safetensors", "rank 1", "decoder.layers.0.mlp.linear_fc1.grad"),
        ("missing", "run-0000/0000000000", "rank 2", lost),
        ("incomplete", "run-0000/0000000020", "rank 3", lost),
        ("stray", ".00003-000-of-001.safetensors.tmp", "9 bytes"),
    ):
        assert any(all(v in line for v in values) for line in done.out.splitlines()), values
    told = json.loads(command("dump", "verify", "dump", "--json").out)
    assert not told["good"]
    assert [f["kind"] for f in told["findings"]] == ["checksum", "stray", "missing", "incomplete"]
    assert list_dump_contents(dump).iterations == [10]


@pytest.mark.parametrize("wrong", ["settings", "parts"])
def test_what_reading_refuses_is_an_error(dump, wrong):
    """Files whose checksums are right, and whose contents no reader accepts."""
    if wrong == "settings":
        path = dump / "run-0000" / "manifest.json"
        text = path.read_bytes().replace(b'"tokens": null', b'"tokens": {"slice": [0, 9, 0]}')
        path.write_bytes(dumps.sealed_again(text))
    else:
        path = part(dump, 10, 0)
        path.with_name(path.name.replace("000-of-001", "001-of-002")).write_bytes(path.read_bytes())
        path.rename(path.with_name(path.name.replace("000-of-001", "000")))
    with raises(DumpError, dump):
        open_dump(dump)[FIRST].at(10).torch()
    assert not verify_dump(dump).good


def test_an_iteration_between_others_is_refused_with_those_that_there_are(dump):
    with raises(DumpError, dump, 5, 0, 10, 20, path=str(dump)):
        open_dump(dump).stored_iteration((5, 0))


# -- pruning


def runs(dump: Path) -> dict[int, list[int]]:
    return {r.number: [number for number, _ in r.iteration_keys] for r in list_runs(dump)}


def test_prune_removes_what_is_torn_of_runs_that_are_over_and_nothing_that_is_whole(dump):
    part(dump, 20, 3).unlink()
    stray = dump / "run-0000" / f"{10:010d}" / ".00001-000.safetensors.tmp"
    stray.write_bytes(b"x" * 9)
    write(dump, [0, 10, 20, 30])
    torn = part(dump, 30, 0, run=1)
    torn.unlink()
    before = {n: open_dump(dump)[FIRST].at(n).torch() for n in (0, 10, 20)}
    found = list_removals(dump)
    assert [(r.why, r.iteration) for r in found] == [("temporary", 10), ("incomplete", 20)]
    assert prune_dump(dump, found) == sum(r.nbytes for r in found)
    assert runs(dump) == {0: [0, 10], 1: [0, 10, 20, 30]}
    assert not stray.exists()
    assert {n: open_dump(dump)[FIRST].at(n).torch() for n in (0, 10, 20)}.keys() == before.keys()
    assert all(torch.equal(open_dump(dump)[FIRST].at(n).torch(), v) for n, v in before.items())
    assert list_removals(dump) == []
    assert [(r.why, r.iteration, r.run) for r in list_removals(dump, force=True)] == [("incomplete", 30, 1)]


def test_prune_leaves_the_newest_run_alone_unless_told(dump):
    part(dump, 20, 3).unlink()
    assert list_removals(dump, keep_every=7, before=100) == []
    assert [r.iteration for r in list_removals(dump, force=True)] == [20]


def test_prune_spares_each_run_that_is_being_written(dump):
    """Two jobs write to one dump: the older one has an iteration open when the newer one begins."""
    writer = DumpWriter(dump / "run-0000", 1, {}, mf.Dump(dump, FIRST))
    part(dump, 20, 3).unlink()
    write(dump, [30])
    assert is_being_written(dump / "run-0000")
    assert list_removals(dump, before=100) == []
    assert [r.run for r in list_removals(dump, before=100, force=True)] == [1]
    assert not any(dump.glob("run-0001/.*")), "the last writer of a run removes the file"
    writer.close()
    assert not is_being_written(dump / "run-0000")
    assert [(r.why, r.iteration) for r in list_removals(dump)] == [("incomplete", 20)]


def test_the_lock_of_a_writer_goes_with_its_process(dump):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from megatron_flex.dump.writer.writers_lock import WritersLock\n"
        "lock = WritersLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(dump / "run-0000")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert is_being_written(dump / "run-0000")
        process.kill()
    assert not is_being_written(dump / "run-0000")
    assert verify_dump(dump).findings == []


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({"keep_every": 20}, [0, 20, 40]),
        ({"before": 20}, [20, 30, 40]),
        ({"keep_every": 20, "before": 20}, [0, 20, 30, 40]),
        ({}, [0, 10, 20, 30, 40]),
    ],
)
def test_prune_thins_whole_iterations_out_as_told(tmp_path, said, left):
    path = tmp_path / "dump"
    write(path, [0, 10, 20, 30, 40])
    prune_dump(path, list_removals(path, force=True, **said))
    assert open_dump(path).iterations == left
    assert verify_dump(path).good


def test_prune_leaves_what_is_damaged_to_a_person(dump):
    flip(part(dump, 10, 2), 100)
    write(dump, [30])
    (dump / "run-0001" / "manifest.json").unlink()
    write(dump, [40])
    assert list_removals(dump) == []


def test_prune_removes_the_folder_of_a_run_that_never_began(dump):
    (dump / "run-0001").mkdir()
    assert list_removals(dump) == []  # it may be beginning
    write(dump, [30])
    (removal,) = list_removals(dump)
    assert removal.why == "empty run"
    prune_dump(dump, [removal])
    assert runs(dump).keys() == {0, 2}


def test_a_prune_that_was_stopped_is_finished_by_the_next(dump, monkeypatch):
    part(dump, 20, 3).unlink()
    found = list_removals(dump, force=True)

    def stopped(path):
        raise OSError(5, "stopped", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("megatron_flex.dump.tools.dump_cleanup.shutil.rmtree", stopped)
        with raises(DumpError, dump, "stopped"):
            prune_dump(dump, found)
    assert runs(dump) == {0: [0, 10]}
    assert verify_dump(dump).good
    (left,) = list_removals(dump)
    assert left.why == "left over"
    prune_dump(dump, [left])
    assert [p.name for p in dump.iterdir()] == ["run-0000"]


def test_a_dry_run_removes_nothing(command, dump):
    part(dump, 20, 3).unlink()
    before = sorted(dump.rglob("*"))
    done = command("dump", "prune", "dump", "--force", "--keep-every", "20", "--dry-run")
    assert done.status == 0
    removed = ("run-0000/0000000010", "run-0000/0000000020")
    assert [item for item in removed if item not in done.out] == []
    assert sorted(dump.rglob("*")) == before
    pruned = command("dump", "prune", "dump", "--force", "--keep-every", "20")
    assert [item for item in removed if item not in pruned.out] == []
    assert open_dump(dump).iterations == [0]
    again = command("dump", "prune", "dump", "--force")
    assert [item for item in again.out.split() if "run-" in item] == []
