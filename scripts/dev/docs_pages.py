"""MkDocs' hooks: pages from files outside docs/ and from code, and links that work on the site and on GitHub.

README.md is the home page; `PAGES` names the other files of the repository that are pages. The help of the
commands and of the launch flags, and the table of Megatron's arguments, are written when the site is built.
Markdown is GitHub's: a list or a table needs no empty line before it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "patches/README.md": "patches.md",
}
SOURCES = {"tests/data/arguments.toml": "arguments.md"}  # of pages that are written from data
EXAMPLES = "examples"  # the site has copies of the scripts
FENCE = re.compile(r" {0,3}(```+|~~~+)")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
DRAWING = re.compile(r"^!\[[^]]*\]\((\S+\.svg)\)$")
COMMENT = re.compile(r"<!--.*?-->\s*$")
STARTS = re.compile(r"([-*] |\d+\. |\|)")  # a list, a table
WIDTH = 100


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of docs/."""
    from mkdocs.structure.files import File

    from tests.support import argument_table

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    made |= {"commands.md": f"{commands()}\n{flags()}", "arguments.md": argument_table.page()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for script in sorted((ROOT / EXAMPLES).glob("*.py")):
        files.append(File.generated(config, f"{EXAMPLES}/{script.name}", content=script.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """GitHub's Markdown as MkDocs takes it."""
    here = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == here), f"docs/{here}")
    return rewritten(markdown, source, here)


def rewritten(markdown: str, source: str, page: str) -> str:
    """A page of the site.

    Args:
        markdown: what the file holds.
        source: the file's path in the repository, from which its links go.
        page: its path in the site.
    """
    out: list[str] = []
    fence = ""
    for line in markdown.splitlines():
        marked = FENCE.match(line)
        if fence:
            if marked and marked[1].startswith(fence) and line.strip() == marked[1]:
                fence = ""
        elif marked:
            fence = marked[1]
            if out and out[-1].strip():
                out.append("")
        elif COMMENT.match(line):
            continue
        elif drawn := DRAWING.match(line):
            line = inline(ROOT / posixpath.dirname(source) / drawn[1])
        else:
            line = LINK.sub(lambda found: moved(found[1], source, page), line)
            before = out[-1] if out else ""
            if STARTS.match(line) and before.strip() and not goes_on(before, line):
                out.append("")
        out.append(line)
    return "\n".join(out) + "\n"


def inline(drawing: Path) -> str:
    """A drawing in the page itself, where it takes the page's colours; alone it has its own."""
    text = re.sub(r"<style>.*?</style>", "", drawing.read_text(encoding="utf-8")).strip()
    return f"<div>{text}</div>"


def goes_on(before: str, line: str) -> bool:
    """Whether a line goes on with the list or the table of the line before it."""
    if before.startswith(" ") or not STARTS.match(before):
        return before.startswith(" ")
    return before.startswith("|") == line.startswith("|")


def moved(target: str, source: str, page: str) -> str:
    """Where a link leads in the site; as it is, if it leads to no file of the repository."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    is_file = path.startswith(("docs/", f"{EXAMPLES}/")) and (ROOT / path).is_file()
    if path not in PAGES and path not in SOURCES and not is_file:
        return target
    there = PAGES.get(path) or SOURCES.get(path) or path.removeprefix("docs/")
    return posixpath.relpath(there, posixpath.dirname(page) or ".")


def commands() -> str:
    """The help of each command, as a terminal has it."""
    import typer

    from megatron_flex.cli.app import app

    parts = [
        "# Commands, flags and YAML",
        "",
        "`pip install megatron-flex[cli]`. Each command has `--help`, which prints:",
        "",
    ]
    for words, text in helps(typer.main.get_command(app), "megatron-flex", None):
        parts += [f"## {words}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(parts)


def helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Each command's words and help, depth first."""
    size = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, **size)
    yield context.command_path, command.get_help(context)
    for each in sorted(getattr(command, "commands", {})):
        # A group of ours imports a command when it is asked for it.
        yield from helps(command.get_command(context, each), each, context)


def flags() -> str:
    """The help of the launchers' flags; the keys of YAML, with their defaults."""
    from megatron_flex.launch.flags import format_help
    from megatron_flex.launch.launch_settings import DumpSettings, EditSettings, Settings, StatisticsSettings

    parts = [
        "## Launch flags",
        "",
        "What flags do, with examples: [launch flags](launch.md). `--flex-help` prints:",
        "",
        "```text",
        format_help().rstrip(),
        "```",
        "",
        "## YAML",
        "",
    ]
    parts += ["Keys of `--flex-config FILE`, and fields of `megatron_flex.launch.Settings`.", ""]
    whole = {
        "The file": Settings,
        "`edits`": EditSettings,
        "`dumps`": DumpSettings,
        "`statistics`": StatisticsSettings,
    }
    for title, kind in whole.items():
        parts += [f"### {title}", "", "| key | default |", "|---|---|"]
        for name, field in kind.model_fields.items():
            default = (
                "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
            )
            parts.append(f"| `{name}` | {default} |")
        parts.append("")
    return "\n".join(parts)
