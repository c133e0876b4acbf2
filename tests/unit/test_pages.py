"""Each fenced block of a page is run or compared by a test, or can be typed as it stands."""

from __future__ import annotations

import re

import pytest

from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout, PackedSequences
from tests.support import pages, typed
from tests.support.messages import raises
from tests.support.pages import ROOT, Block

BLOCKS = [block for page in pages.pages() for block in pages.blocks_of(page)]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_something_answers_for_a_block(block: Block) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("typer")
    pages.account(block)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("megatron-flex dump lss DIR", Exception),
        ("megatron-flex dump ls DIR --jsn", Exception),
        ("megatron-flex run a.py $FLAGS --flex-dmup x", AssertionError),
        ("torchrun --nproc-per-pod 8 -m megatron_flex.launch a.py $FLAGS --flex-stats", SystemExit),
        ("torchrun -m megatron_flex.launch a.py $FLAGS --flex-dmup x", AssertionError),
        ("scripts/quickstart --iteration-s 3", SystemExit),
        ("echo 'quiet' > out/control", FlexError),
        ("ls", AssertionError),
    ],
)
def test_a_command_that_cannot_be_typed(command: str, error: type[BaseException]) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("typer")
    with pytest.raises(error):
        typed.check(command)


def test_settings_that_cannot_be() -> None:
    pytest.importorskip("pydantic")
    with raises(FlexError, "evry", "every"):
        pages.account(Block("docs/new.md", 1, "yaml", "evry: 3\n"))


def test_a_fence_that_is_not_closed() -> None:
    with pytest.raises(ValueError, match=r"new.md:2: a fence"):
        pages.blocks_in("a\n```python\n1\n", "new.md")


def test_the_commands_are_found() -> None:
    said = [c for b in BLOCKS if b.language == "bash" for c in typed.commands(b.text)]
    assert sum(c.startswith("torchrun") for c in said) >= 4
    assert any(c.startswith("megatron-flex stats") for c in said)
    assert any("MEGATRON_FLEX_FLAGS=" in c for c in said)
    assert typed.commands("a b  # what\n  # more\nc \\\n  d  words\n") == ["a b", "c d"]
    assert typed.commands("$ a\nb\n$ c  words\n", console=True) == ["a", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```",
        "```python\n1\n```",
        "<!-- runs: tests/unit/test_pages.py::test_gone -->\n```python\n1\n```",
        "```text\n1\n```",
    ],
)
def test_a_block_that_nothing_answers_for(text: str) -> None:
    (block,) = pages.blocks_in(text, "docs/new.md")
    with pytest.raises(AssertionError, match=r"docs/new.md:\d"):
        pages.account(block)


def test_pages_that_the_package_names_exist() -> None:
    sources = "".join(path.read_text("utf-8") for path in sorted((ROOT / "megatron_flex").rglob("*.py")))
    named = set(re.findall(r"\bdocs/[\w/-]+\.md", sources))
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


# --- what pages show of layouts and files


def test_the_notation_of_layouts() -> None:
    (shown,) = pages.mine(ROOT / "docs" / "sites.md", "text")
    printed = [re.split(r" {2,}", line)[0] for line in shown.splitlines()]
    s, b, h, zigzag, tp = Dim("s"), Dim("b"), Dim("h"), Cut("cp", "zigzag"), Cut("tp")
    layouts = (
        Layout((s, b, h)),
        Layout((Dim("s", (tp,)), b, h)),
        Layout((Dim("s", (zigzag,)), b, h)),
        Layout((Dim("s", (zigzag, tp)), b, h)),
        PackedSequences.from_ends([0, 8, 16]).layout_of(Layout((Dim("s", (zigzag,)), b, h))),
        Layout((s, b, Dim("gate|up", (tp,), segments=(1, 1)))),
        Layout((s, b, Dim("g", (Cut("tp", copies=2),)), Dim("d"))),
        Layout((s, b, h), partial=("tp",)),
    )
    assert printed == [layout.describe() for layout in layouts]


def test_the_words_of_a_control_file() -> None:
    from megatron_flex.launch.hook_control import parse_control_words

    (shown,) = pages.mine(ROOT / "docs" / "launch.md", "text")
    assert parse_control_words(shown.encode()) == ("none", "+steer", "-dump")


def test_the_file_of_the_slurm_example_is_good() -> None:
    pytest.importorskip("yaml")
    from megatron_flex.launch.flags import settings_from_argv

    found, _ = settings_from_argv(["--flex-config", "scripts/slurm/pretrain_tiny.yaml"], {})
    assert found.edits
    assert not found.edits[0].enabled
    assert found.statistics
    assert found.dumps[0].every == 10
