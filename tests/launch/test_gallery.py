"""The examples in one process and in four: each asserts its figure, and prints what docs/gallery.md shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.launching import Done, Server, has_pretrain

EXAMPLES = pages.ROOT / "examples"
PAGE = pages.ROOT / "docs" / "gallery.md"
NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "tiny"]
COLD = "read_and_steer"  # it starts its one process itself

for package in ("megatron.core", "transformers", "matplotlib", "tensorboard"):
    pytest.importorskip(package)


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
    lines = run.output.splitlines()  # of pretrain() with what Megatron prints
    assert [line for line in lines if line in shown.splitlines()] == shown.splitlines(), run.output
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
