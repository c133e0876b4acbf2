"""No block of a page is there that nothing answers for; links lead somewhere."""

from __future__ import annotations

import posixpath
import re

import pytest

from megatron_flex.errors import FlexError
from tests.support import pages, typed
from tests.support.pages import ROOT, Block

BLOCKS = [block for page in pages.pages() for block in pages.blocks_of(page)]
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_something_answers_for_a_block(block: Block) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("typer")
    pages.account(block)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nls\n```", "no language"),
        ("```py\n1\n```", "a block of py"),
        ("```python\n1\n```", "say which test runs it"),
        ("<!-- checked: tests/unit/test_pages.py::test_a -->\n```python\n1\n```", "has no test_a"),
        ("<!-- runs: tests/unit/test_pages.py -->\n```python\n1\n```", "has no test that is named"),
        ("<!-- runs: tests/unit/test_nothing.py::test_a -->\n```python\n1\n```", "there is no tests/unit"),
        (
            "<!-- runs: tests/unit/test_idle.py::test_a -->\n\n```python\n1\n```",
            "say which test runs it",
        ),  # the comment is not beside it
        ("```text\n1\n```", "say what it is"),
        ("<!-- output -->\n```text\n1\n```", "say what it is"),
        ("  ```text\n  1\n  ```", "say what it is"),
        ("```bash\n# only words\n```", "no command"),
        ("```bash\nscripts/tset\n```", "there is no scripts/tset"),
        ("```bash\nscripts/test --nolint\n```", "has no --nolint"),
        ("```bash\nscripts/test tests/nothing\n```", "there is no tests/nothing"),
        ("```bash\npython -m pip install '.[clii]'\n```", "no extra {'clii'}"),
        ("```bash\npython -m megatron_flex.launch a.py $FLAGS\n```", "wants nothing"),
    ],
)
def test_a_block_that_nothing_answers_for(text: str, said: str) -> None:
    (block,) = pages.blocks_in(text, "docs/new.md")
    with pytest.raises(AssertionError, match=re.escape(said)):
        pages.account(block)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("megatron-flex dump lss DIR", Exception),
        ("megatron-flex dump ls DIR --jsn", Exception),
        ("megatron-flex run a.py $FLAGS --flex-dmup x", AssertionError),
        ("torchrun --nproc-per-pod 8 -m megatron_flex.launch a.py $FLAGS --flex-stats", SystemExit),
        ("torchrun -m megatron_flex.launch a.py $FLAGS --flex-dmup x", AssertionError),
        (
            "MEGATRON_FLEX_PREFIX=--hooks- torchrun -m megatron_flex.launch a.py $FLAGS --flex-stats",
            AssertionError,
        ),
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
    with pytest.raises(FlexError, match="evry"):
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


# --- what pages show of errors and files


def test_the_error_of_the_launchers() -> None:
    pytest.importorskip("pydantic")
    from megatron_flex.launch.flags import settings_from_argv

    (shown,) = pages.mine(ROOT / "docs" / "launch.md", "text")
    with pytest.raises(FlexError) as raised:
        settings_from_argv([], {"MEGATRON_FLEX_FLAGS": "--flex-site a"})
    assert shown == f"megatron-flex: {raised.value}\n"


def test_blocks_of_yaml_name_their_file() -> None:
    """A reader sees which file it is, and needs no other file that the page does not have."""
    found = [block for block in BLOCKS if block.language == "yaml"]
    assert found
    for block in found:
        assert re.match(r"# [\w/-]+\.yaml, for \S", block.text), f"{block}: name the file in its first line"
        assert not re.search(r"\w\.(py|safetensors|pt)\b", block.text), f"{block} needs another file"


def test_the_words_of_a_control_file() -> None:
    from megatron_flex.launch.hook_control import parse_control_words

    (shown,) = pages.mine(ROOT / "docs" / "switching.md", "text")
    assert parse_control_words(shown.encode()) == ("none", "+steer", "-dump")


def test_the_file_of_the_slurm_example_is_good() -> None:
    pytest.importorskip("yaml")
    from megatron_flex.launch.flags import settings_from_argv

    found, _ = settings_from_argv(["--flex-config", "scripts/slurm/pretrain_tiny.yaml"], {})
    assert found.edits
    assert not found.edits[0].enabled
    assert found.statistics
    assert found.dumps[0].every == 10


# --- links, as GitHub follows them


def prose(page: str) -> list[str]:
    """The lines of a page that are in no fence."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()


def anchors(page: str) -> set[str]:
    titles = [line.lstrip("# ") for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages.pages())
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose(page)))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert (ROOT / there).is_file(), f"{page}: there is no {target}"
        assert not anchor or anchor in anchors(there), f"{page}: {there} has no #{anchor}"
