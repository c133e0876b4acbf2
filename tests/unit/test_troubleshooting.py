"""The messages that docs/troubleshooting.md explains are messages of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CELLS = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]


def read_text(node: ast.AST) -> str:
    """The text of a string in the source; what is formatted into it is a blank."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(read_text(v) if isinstance(v, ast.Constant) else " " for v in node.values)
    return ""


@pytest.fixture(scope="module")
def messages() -> list[str]:
    files = (ROOT / "megatron_flex").rglob("*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return [found for tree in trees for node in ast.walk(tree) if (found := read_text(node))]


@pytest.mark.parametrize("cell", CELLS)
def test_a_message_of_the_page_is_one_of_the_package(cell: str, messages: list[str]) -> None:
    parts = [re.findall(r"`([^`]+)`", group) for group in re.split(r"(?<=`) or (?=`)", cell)]
    assert all(parts)
    for fragments in parts:
        pattern = re.compile(".*".join(map(re.escape, fragments)), re.DOTALL)
        assert any(pattern.search(message) for message in messages), f"no message has {fragments}"


def test_the_page_has_messages() -> None:
    assert len(CELLS) > 20
