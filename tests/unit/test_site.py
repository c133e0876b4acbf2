"""The site of the documents: built strictly, whole, and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import megatron_flex as mf
from tests.support.pages import ROOT

ROOMS = ("edits", "figures", "plot")  # with names of their own
ALIASES = ("PRESETS", "Indices", "Source")  # other names, and types
OF_ROOMS = {
    f"megatron_flex.{room}.{name}"
    for room in ROOMS
    for name in import_module(f"megatron_flex.{room}").__all__
    if name not in ALIASES
}
PUBLIC = {f"megatron_flex.{name}" for name in mf.__all__ if name not in (*ROOMS, "__version__", "local")}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """MkDocs' hooks."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "dev"))
    return import_module("docs_pages")


def documented() -> list[str]:
    """The names that the page of the API documents."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    return [n for p in pages for n in re.findall(r"^::: (\S+)$", p.read_text("utf-8"), re.MULTILINE)]


def test_all_that_is_public_is_in_the_reference_once() -> None:
    found = documented()
    assert len(found) == len(set(found))
    assert {*found} >= PUBLIC | OF_ROOMS


class Page(HTMLParser):
    """What a page loads, its anchors, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.ids.add(said.get("id") or "")
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(said.get("src") or "")
        if tag == "link" and said.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(said.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as scripts/docs builds it, in another folder."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_the_site_is_whole(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for page in ("index", "contributing/index", "security", "patches", "commands", "arguments"):
        assert (site / f"{page}.html").is_file(), page
    ids = {i for page in (site / "api").glob("*.html") for i in Page(page.read_text("utf-8")).ids}
    assert ids >= {*documented()}
    methods = ("register_forward_hook", "sites", "interp", "report", "verify", "explain", "step")
    names = (*methods, "get_module_parameter", "register_trainable_module", "select", "restore")
    assert ids >= {f"megatron_flex.FlexModel.{name}" for name in names}
    spaces = {"Interp": ("trace", "run_with_cache", "hooks", "names"), "Report": ("show", "tree", "to_html")}
    assert ids >= {f"megatron_flex.model.{space}.{name}" for space, names in spaces.items() for name in names}
    assert "megatron-flex dump ls" in (site / "commands.html").read_text("utf-8")
    assert "--flex-sites" in (site / "commands.html").read_text("utf-8")
    assert "--tensor-model-parallel-size" in (site / "arguments.html").read_text("utf-8")
    assert "index.html" not in re.findall(
        r'href="[^"]*README[^"]*"', (site / "moving.html").read_text("utf-8")
    )


@pytest.mark.slow
def test_the_api_shows_arguments_as_a_user_passes_them(site: Path) -> None:
    """A setting is shown with the type and the default of its argument, and private fields are not shown."""
    pages = [(site / "api" / f"{name}.html").read_text("utf-8") for name in ("hooks", "data")]
    texts = [" ".join(re.sub(r"<[^>]+>", "", page).split()) for page in pages]
    assert "Dump( path: str | PathLike[str], sites: Sequence[Pattern] | Pattern = ()," in texts[1]
    assert "every: int = 1," in texts[1]
    assert "histogram: bool = True," in texts[1]
    assert not [word for text in texts for word in ("Setting(", "Setting[") if word in text]
    assert not [i for page in pages for i in Page(page).ids if re.search(r"\._[a-z]", i)]


@pytest.mark.slow
def test_no_page_needs_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for target in Page(page.read_text("utf-8")).loaded:
            assert not re.match(r"(https?:)?//", target), f"{page.name} loads {target}"
            if target and not target.startswith("data:") and page.name != "404.html":
                assert (page.parent / target.partition("?")[0]).resolve().is_file(), (
                    f"{page.name}: no {target}"
                )
    assert (site / "search" / "search_index.js").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["[a](nothing.md)", "[a](start.md#nothing)"])
def test_a_link_that_leads_nowhere_is_an_error(wrong: str, tmp_path: Path) -> None:
    """Strictness itself: a small site with the settings of ours."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    kept = (ROOT / "mkdocs.yml").read_text("utf-8")
    validation = kept[kept.index("validation:") : kept.index("nav:\n")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: a\n{validation}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n{wrong} [b](start.md#b)\n")
    (tmp_path / "docs" / "start.md").write_text("# B\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert "nothing" in done.stderr
    assert "Aborted with 1 warnings" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "page", "text", "out"),
    [
        ("README.md", "index.md", "[a](docs/launch.md#b)", "[a](launch.md#b)"),
        (
            "README.md",
            "index.md",
            "[a](CONTRIBUTING.md), [b](patches/README.md)",
            "[a](contributing/index.md), [b](patches.md)",
        ),
        ("README.md", "index.md", "![a](docs/view.png)", "![a](view.png)"),
        ("patches/README.md", "patches.md", "[a](../docs/launch.md)", "[a](launch.md)"),
        ("docs/moving.md", "moving.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/api/hooks.md", "api/hooks.md", "[a](../captures.md)", "[a](../captures.md)"),
        ("docs/api/hooks.md", "api/hooks.md", "[a](../../README.md)", "[a](../index.md)"),
        (
            "docs/a.md",
            "a.md",
            "[a](https://b.c/d.md), [e](nothing.md)",
            "[a](https://b.c/d.md), [e](nothing.md)",
        ),
        ("docs/a.md", "a.md", "a:\n- b\n- c", "a:\n\n- b\n- c"),
        ("docs/a.md", "a.md", "a\n|b|\n|-|", "a\n\n|b|\n|-|"),
        ("docs/a.md", "a.md", "- a\n  b\n- c", "- a\n  b\n- c"),
        ("docs/a.md", "a.md", "a\n<!-- runs: b -->\n```c\n[d](../README.md)\n- e\n```", None),
    ],
)
def test_github_markdown_becomes_the_sites(
    script: ModuleType, source: str, page: str, text: str, out: str | None
) -> None:
    wanted = "a\n\n```c\n[d](../README.md)\n- e\n```" if out is None else out
    assert script.rewritten(text, source, page) == f"{wanted}\n"
