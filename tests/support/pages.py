"""The fenced blocks of every page, and the comment above each that says who answers for it.

`<!-- runs: FILE::TEST -->` a test executes it; `<!-- checked: FILE::TEST -->` a test compares it with what
is; `<!-- output: of ... -->` shown as an example; `<!-- drawing -->` no code.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import typed

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- (runs|checked|output|drawing)(?:: (.+?))? -->")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its path in the repository.
        line: where it begins.
        language: what stands behind the fence.
        text: what is in it.
        kind: `runs`, `checked`, `output`, `drawing`, or nothing.
        said: what stands behind the kind.
        follows: whether another block of the page is above it.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str = ""
    said: str = ""
    follows: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page that people read, by its path in the repository."""
    names = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "patches/README")
    files = [*(ROOT / f"{name}.md" for name in names), *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in files]


def blocks_in(text: str, page: str) -> list[Block]:
    """The fenced blocks of a page's text, indented ones too.

    Raises:
        ValueError: a fence is not closed.
    """
    found: list[Block] = []
    lines = text.splitlines()
    fence, begin = "", 0
    for n, line in enumerate(lines):
        marked = re.match(r"\s*(`{3,}|~{3,})(.*)", line)
        if not marked:
            continue
        if not fence:
            fence, begin = marked[1], n
        elif line.strip().startswith(fence) and not marked[2].strip("`~ "):
            mark = MARK.fullmatch(lines[begin - 1].strip()) if begin else None
            kind, said = (mark[1], mark[2] or "") if mark else ("", "")
            language = lines[begin].strip().lstrip("`~").strip()
            body = "".join(f"{x}\n" for x in lines[begin + 1 : n])
            found.append(Block(page, begin + 1, language, body, kind, said, bool(found)))
            fence = ""
    if fence:
        raise ValueError(f"{page}:{begin + 1}: a fence that is not closed")
    return found


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """The fenced blocks of a page."""
    return tuple(blocks_in((ROOT / page).read_text(encoding="utf-8"), page))


def mine(path: Path, language: str = "python") -> list[str]:
    """The blocks of a page that the test which is running is said to answer for."""
    test = re.sub(r"\[.*", "", os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
    page = path.relative_to(ROOT).as_posix()
    return [b.text for b in blocks_of(page) if b.said == test and b.language == language]


# --- who answers for a block


def account(block: Block) -> None:
    """Hold a block against what answers for it.

    Raises:
        AssertionError: nothing does, or it cannot be as it stands.
    """
    if block.kind in ("runs", "checked"):
        answers(block)
    if block.language == "python":
        assert block.kind == "runs", f"{block}: say which test runs it: <!-- runs: FILE::TEST -->"
    elif block.language in ("bash", "console"):
        commands = typed.commands(block.text, block.language == "console")
        assert commands, f"{block}: no command is in it"
        for command in commands:
            typed.check(command)
    elif block.language == "yaml":
        valid_settings(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        assert block.language == "text", (
            f"{block}: no test knows a block of {block.language or 'no language'}"
        )
        told = block.kind in ("checked", "drawing") or (
            block.kind == "output" and (block.said or block.follows)
        )
        assert told, f"{block}: say what it is: <!-- checked: FILE::TEST -->, output: of ..., or drawing"


def answers(block: Block) -> None:
    """The test is there, in a file that speaks of the page."""
    file, _, test = block.said.partition("::")
    assert (ROOT / file).is_file(), f"{block}: there is no {file}"
    source = (ROOT / file).read_text(encoding="utf-8")
    assert test in functions(file), f"{block}: {file} has no {test or 'test that is named'}"
    assert Path(block.page).name in source, f"{block}: {file} does not speak of {block.page}"


@cache
def functions(file: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def valid_settings(text: str) -> Any:
    """YAML, as `--flex-config` takes it."""
    import tempfile

    from megatron_flex.launch.launch_settings import Settings
    from megatron_flex.launch.settings_file import read_settings_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "block.yaml"
        file.write_text(text, encoding="utf-8")
        return Settings.model_validate(read_settings_file(file))
