"""Several runs with the same iterations, as after a rollback: the last complete one is read, and is named."""

import warnings
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.dump.reader import open_damaged_dump
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.errors import FlexWarning
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import SEQUENCE, Given, random
from tests.support.messages import assert_names, warns

SITE = "decoder.layers.0"


def write(path: Path, iterations: list[int], seed: int) -> torch.Tensor:
    values = random(len(iterations), 2, 8, 4, seed=seed)
    dumps.write(path, {SITE: Given(values, SEQUENCE)}, mesh={"tp": 2}, iterations=iterations, gradients=False)
    return values


@pytest.fixture
def runs(tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Iterations 0 to 4, and from a checkpoint again 3 to 6."""
    return write(tmp_path / "d", [0, 1, 2, 3, 4], 1), write(tmp_path / "d", [3, 4, 5, 6], 2)


def read(path: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlexWarning)
        return mf.open_dump(path)[SITE].torch()


def test_the_last_run_of_an_iteration_is_read_and_named(tmp_path, runs, monkeypatch, capsys) -> None:
    before, after = runs
    with warns(FlexWarning, "3 to 4", "run-0000", "run-0001"), mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == list(range(7))
        assert torch.equal(dump[SITE].torch(), torch.cat([before[:3], after]))
        (text,) = dump.replaced
    assert_names(text, "iterations 3 to 4", "run-0000", "run-0001")
    assert text in list_dump_contents(tmp_path / "d").notes
    assert "run-0001" in dump._repr_html_()
    assert torch.equal(open_damaged_dump(tmp_path / "d")[SITE].torch(), torch.cat([before[:3], after]))
    done = Command(monkeypatch, capsys, tmp_path)("dump", "ls", "d")
    assert_names(done.out, "iterations 3 to 4", "run-0001")


def test_an_iteration_that_the_last_run_did_not_complete_is_read_from_the_run_before(tmp_path, runs) -> None:
    before, after = runs
    (part,) = (tmp_path / "d" / "run-0001" / f"{3:010d}").glob("00001-*")
    part.unlink()
    assert torch.equal(read(tmp_path / "d"), torch.cat([before[:4], after[1:]]))


def test_runs_without_a_common_iteration_have_no_warning(tmp_path) -> None:
    write(tmp_path / "d", [0, 1], 1)
    write(tmp_path / "d", [2], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mf.open_dump(tmp_path / "d") as dump:
            assert dump.iterations == [0, 1, 2]
            assert dump.replaced == []


def test_a_writer_says_at_its_end_which_run_is_read(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for again in (False, True):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            with mf.attach(model, dumps=mf.Dump(tmp_path / "d", "0")):
                for _ in range(2):
                    model(torch.ones(2, 4) * (1 + again))
        texts = [
            str(w.message)
            for w in record
            if issubclass(w.category, FlexWarning) and "run-0000" in str(w.message)
        ]
        assert len(texts) == again
        for text in texts:
            assert_names(text, tmp_path / "d", "iterations 0 to 1", "run-0000", "run-0001")
