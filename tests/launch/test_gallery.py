"""The examples in one process and in four: each asserts its figure, and prints what docs/gallery.md shows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import pages
from tests.support.launching import Done, Server, has_pretrain

EXAMPLES = pages.ROOT / "examples"
PAGE = pages.ROOT / "docs" / "gallery.md"
NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "tiny"]
COLD = "read_and_steer"  # it starts its one process itself

for package in ("megatron.core", "transformers", "matplotlib", "tensorboard"):
    pytest.importorskip(package)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
NOTEBOOKS = [path.stem for path in sorted(EXAMPLES.glob("*.ipynb"))]


class Run:
    """An example that has been run in a folder."""

    def __init__(self, server: Server, folder: Path, name: str) -> None:
        self.server, self.folder, self.name = server, folder, name
        if name != COLD:
            self.on(1)
        self.output = self.on(4).out[0]

    def on(self, processes: int) -> Done:
        done = self.launch(processes)
        assert done.status == [0] * processes, "".join(done.err)[-6000:]
        return done

    def launch(self, processes: int) -> Done:
        return self.server(processes, self.folder, EXAMPLES / f"{self.name}.py", plain=True)


@pytest.fixture(scope="module")
def example(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Run an example, once for all tests of this file."""
    runs: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name == "statistics_tensorboard" and not has_pretrain():
            pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
        if name not in runs:
            runs[name] = Run(server, tmp_path_factory.mktemp(name), name)
        return runs[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_and_draws_what_the_page_shows(name: str, example: Callable[[str], Run]) -> None:
    command = f"$ torchrun --nproc-per-node 4 examples/{name}.py\n"
    (shown,) = [block.removeprefix(command) for block in pages.mine(PAGE, "console") if command in block]
    run = example(name)
    lines = iter(run.output.splitlines())  # of pretrain() with what Megatron prints in between
    for line in shown.splitlines():
        assert any(is_alike(printed, line) for printed in lines), f"{line}\nis not in\n{run.output}"
    drawn = {path.name for path in (run.folder / "out" / name).glob("*.png")}
    on_the_page = set(re.findall(r"]\(gallery/(\S+\.png)\)", PAGE.read_text(encoding="utf-8")))
    assert drawn
    assert drawn <= on_the_page


def test_a_figure_that_is_not_that_of_one_process(example: Callable[[str], Run]) -> None:
    run = example(COLD)
    file = run.folder / "out" / COLD / "one_process.json"
    file.write_text(json.dumps(1.001 * json.loads(file.read_text())))
    done = run.launch(2)
    assert done.status[0] != 0
    assert "AssertionError" in done.err[0]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_it_is_kept_with(name: str, example: Callable[[str], Run]) -> None:
    """With `FLEX_KEEP=1` the notebook is written anew, with its output."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    file = EXAMPLES / f"{name}.ipynb"
    book = nbformat.read(file, 4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    kept = [text_of(cell) for cell in cells]
    path = [str(pages.ROOT), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = nbclient.NotebookClient(
        book,
        timeout=120,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(example(name).folder)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
    shown = [text_of(cell) for cell in cells]
    if os.environ.get("FLEX_KEEP"):
        nbformat.write(book, file)
        return
    for now, before in zip(shown, kept, strict=True):
        assert is_alike(now, before), f"{now}\n\nis not\n{before}"


def text_of(cell: Any) -> str:
    """What a cell shows, as text, without warnings, which are deleted; of a picture its size and axes."""
    cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return "\n".join(o["text"] if "text" in o else o["data"]["text/plain"] for o in cell.outputs)


def is_alike(text: str, other: str) -> bool:
    """Whether two texts have the same words, and numbers that round-off explains."""
    if NUMBER.sub("#", text) != NUMBER.sub("#", other):
        return False
    numbers = ([float(number) for number in NUMBER.findall(each)] for each in (text, other))
    return next(numbers) == pytest.approx(next(numbers), rel=0.01, abs=1e-5)
