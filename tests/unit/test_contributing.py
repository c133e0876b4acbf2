"""The files and names that CONTRIBUTING.md sends people to are there."""

import re

import pytest

from tests.support.pages import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
WALKS = PAGE.partition("## Where things are\n")[2].partition("\n## ")[0]
TASKS = re.split(r"^### ", WALKS, flags=re.MULTILINE)[1:]
FILE = re.compile(r"`((?:megatron_flex|tests|docs|scripts)/[\w/-]+\.(?:py|md|toml))`")


def test_files_are_there() -> None:
    found = FILE.findall(PAGE)
    assert len(found) > 20
    assert [f for f in found if not (ROOT / f).is_file()] == []


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.partition("\n")[0])
def test_a_task_opens_few_files_that_have_what_it_names(task: str) -> None:
    steps = [s.replace("\n", " ") for s in re.split(r"^\d\. ", task, flags=re.MULTILINE)[1:]]
    opened = {FILE.findall(s)[0] for s in steps if FILE.search(s)}
    assert 2 <= len(opened) <= 4
    for step in steps:
        files = FILE.findall(step)
        text = "".join((ROOT / f).read_text("utf-8") for f in files)
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", step):
            last = name.rpartition(".")[2]
            if last == "py":  # another file beside the first
                assert ((ROOT / files[0]).parent / name).is_file(), name
                continue
            assert re.search(rf"\b{last}\b", text), f"{name} is in none of {files}"


def test_there_are_five() -> None:
    assert len(TASKS) == 5
