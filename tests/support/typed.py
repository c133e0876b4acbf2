"""Commands as pages show them, held against the parsers that would take them."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Scripts of Python whose parser can be asked; of the others the text must have the flag.
PARSERS = {
    "scripts/quickstart": ("quickstart", "arguments"),
    "scripts/analyses": ("analyses", "arguments"),
    "scripts/bench": ("bench", "flags"),
    "scripts/gpu": ("gpu", "flags"),
    "scripts/dev/mutate": ("mutate", "flags"),
}


def commands(text: str, console: bool = False) -> list[str]:
    """The commands of a block, without what is said of them behind two spaces or `#`.

    Args:
        text: the block.
        console: whether commands begin with `$ `, and other lines are what they print.
    """
    found = []
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        if console and not line.startswith("$ "):
            continue
        command = re.split(r"\s{2,}|\s#\s", line.removeprefix("$ ").strip())[0]
        if command and not command.startswith("#"):
            found.append(command)
    return found


def check(command: str) -> None:
    """Take a command as a shell would, up to running it.

    Raises:
        AssertionError, SystemExit, or what the parser raises: it cannot be typed.
    """
    if "[-" in command:  # what may be left out
        command = command.replace("[", "").replace("]", "")
    first, *words = [word for word in shlex.split(command) if word != "..."]
    with pytest.MonkeyPatch.context() as changes:
        while variable := re.fullmatch(r"(FLEX_\w+)=(\S*)", first):
            check_read(variable[1])
            changes.setenv(variable[1], variable[2])
            first, *words = words
        _check_words(first, words)


def _check_words(first: str, words: list[str]) -> None:
    if first == "torchrun":
        check_torchrun(words)
    elif first == "python":
        check_python(words)
    elif first == "megatron-flex":
        check_command(words)
    elif first == "export":
        check_variables(words)
    elif first == "echo":
        check_control(words)
    elif first == "sbatch":
        check_script(words[0], [])
    else:
        check_script(first, words)


def check_read(variable: str) -> None:
    """A variable before a command: something of ours reads it."""
    files = (f for folder in ("megatron_flex", "scripts", "tests") for f in (ROOT / folder).rglob("*.*"))
    readers = [f for f in files if f.suffix in (".py", ".sh") and f != Path(__file__)]
    assert any(f'"{variable}"' in f.read_text(encoding="utf-8") for f in readers), f"nothing reads {variable}"


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    said = get_args_parser().parse_args(words)
    if said.module:
        check_launch([said.training_script, *said.training_script_args])
    else:
        assert said.training_script.endswith(".py"), said.training_script


def check_python(words: list[str]) -> None:
    if words[:3] == ["-m", "pip", "install"]:
        return check_extras(words[3:])
    assert words[0] == "-m", words
    return check_launch(words[1:])


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    (what,) = [word for word in words if not word.startswith("-")]
    found = re.fullmatch(r"(\.|megatron-flex)(?:\[(.*)\])?", what)
    assert found, f"{what} is not this package"
    unknown = {*(found[2] or "").split(",")} - {*known, ""}
    assert not unknown, f"pyproject.toml has no extra {unknown}"


def check_launch(words: list[str]) -> None:
    from megatron_flex.launch.flags import settings_from_argv

    module, script, *flags = words
    assert module == "megatron_flex.launch", module
    assert script.endswith(".py"), script
    found, rest = settings_from_argv(flags, {})
    assert found != settings_from_argv([], {})[0], "the example wants nothing"
    assert rest == ["$FLAGS"], rest


def check_variables(words: list[str]) -> None:
    from megatron_flex.launch.flags import FLAGS_VARIABLE, settings_from_argv

    variables = dict(word.split("=", 1) for word in words)
    assert settings_from_argv([], variables)[0] != settings_from_argv([], {})[0], (
        f"{FLAGS_VARIABLE} says nothing"
    )


def check_two_layouts(context: Any) -> None:
    from megatron_flex.launch.two_layouts import plan_two_layouts

    plan = plan_two_layouts(context.args, context.params["against"], Path("out"))
    assert len({run.words for run in plan.runs[1:]}) == 2, "both layouts are the same"


def check_control(words: list[str]) -> None:
    """`echo 'WORDS' > FILE`, of a control file."""
    import torch

    import megatron_flex as mf

    said, arrow, _ = words
    assert arrow == ">"
    groups = [word[1:] for word in said.split() if word not in ("all", "none")]
    with mf.attach(torch.nn.Linear(1, 1), [mf.HookFunction("root", groups=groups)]) as flex:
        flex.select(*said.split())


def check_command(words: list[str]) -> None:
    import typer

    from megatron_flex.cli.app import app

    command: Any = typer.main.get_command(app)
    context = None
    name = "megatron-flex"
    while hasattr(command, "resolve_command"):
        context = command.make_context("megatron-flex", [], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        assert command is not None, name
    if name == "run":
        script = next(n for n, word in enumerate(words) if word.endswith(".py"))
        return check_launch(["megatron_flex.launch", *words[script:]])
    with command.make_context(name, words, parent=context) as parsed:
        return check_two_layouts(parsed) if name == "two-layouts" else None


def check_script(script: str, words: list[str]) -> None:
    file = ROOT / script
    assert file.is_file(), f"there is no {script}"
    assert file.stat().st_mode & 0o111, f"{script} cannot be executed"
    if script in PARSERS:
        folders = [str(ROOT / "scripts" / name) for name in (".", "measure", "dev")]
        sys.path[:0] = folders
        try:
            module, function = PARSERS[script]
            getattr(importlib.import_module(module), function)(words)
        finally:
            for folder in folders:
                sys.path.remove(folder)
    elif script.startswith("scripts/slurm/"):
        check_megatron(words)
    else:
        known = file.read_text(encoding="utf-8")
        if script == "scripts/test":
            known += " -k -m -s -x "  # pytest's
        for flag in (word.partition("=")[0] for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known), f"{script} has no {flag}"
        for path in (word for word in words if word.startswith("tests/")):
            assert (ROOT / path).exists(), f"there is no {path}"


def check_megatron(words: list[str]) -> None:
    """Flags of Megatron's training, where it is installed."""
    import argparse

    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError:
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = {word for word in words if word.startswith("--")} - known
    assert not unknown, f"Megatron has no {unknown}"
