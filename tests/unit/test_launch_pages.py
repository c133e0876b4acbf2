"""Every command that the pages on launchers show can be typed: flags, sub-commands, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/launch.md", "docs/switching.md", "patches/README.md")
FIRST = re.compile(r"(torchrun|python|megatron-flex|scripts/\S+|sbatch|export) ")


def commands() -> list[str]:
    """Lines of blocks without a language that begin as a command does; tables of commands are left out."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            lines = re.sub(r" *\\\n *", " ", block).splitlines()
            found |= {line: None for line in lines if not language and FIRST.match(line) and "  " not in line}
    return list(found)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("line", commands())
def test_a_command_can_be_typed(line: str) -> None:
    pytest.importorskip("pydantic")
    first, *words = shlex.split(line)
    if first in ("torchrun", "python"):
        check_launch(words[words.index("-m") + 1 :])
    elif first == "megatron-flex":
        check_command(words)
    elif first == "export":
        check_variables(words)
    else:
        script = words[0] if first == "sbatch" else first
        assert (ROOT / script).is_file()
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} cannot be executed"


def check_launch(words: list[str]) -> None:
    from megatron_flex.launch.flags import settings

    module, script, *flags = words
    assert module == "megatron_flex.launch"
    assert script.endswith(".py")
    found, rest = settings(flags, {})
    assert found != settings([], {})[0], "the example wants nothing"
    assert rest == ["$FLAGS"]


def check_variables(words: list[str]) -> None:
    from megatron_flex.launch.flags import VARIABLE, settings

    variables = dict(word.split("=", 1) for word in words)
    assert settings([], variables)[0] != settings([], {})[0], f"{VARIABLE} says nothing"


def check_command(words: list[str]) -> None:
    typer = pytest.importorskip("typer")
    from megatron_flex.cli.app import app

    command: Any = typer.main.get_command(app)
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context("megatron-flex", [], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, name
    if name == "run":
        check_run(words)
        return
    with command.make_context(name, words, parent=context):
        pass


def check_run(words: list[str]) -> None:
    script = next(n for n, word in enumerate(words) if word.endswith(".py"))
    check_launch(["megatron_flex.launch", *words[script:]])


def test_the_commands_are_found() -> None:
    said = commands()
    assert sum(line.startswith("torchrun") for line in said) >= 4
    assert any(line.startswith("megatron-flex stats") for line in said)
    assert any(
        line.startswith("export MEGATRON_FLEX_FLAGS") or "MEGATRON_FLEX_FLAGS=" in line for line in said
    )


def test_the_file_of_the_slurm_example_is_good() -> None:
    pytest.importorskip("yaml")
    from megatron_flex.launch.flags import settings

    found, _ = settings(["--flex-config", "scripts/slurm/pretrain_tiny.yaml"], {})
    assert found.edits
    assert not found.edits[0].enabled
    assert found.statistics
    assert found.dumps[0].every == 10
