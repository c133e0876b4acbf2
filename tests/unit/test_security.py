"""What the page on security says of the source: what listens, what is unpickled, how files are made."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_flex"
# Of process groups alone: what a rank of the job sends is trusted as torch trusts it.
UNPICKLES = {"megatron_flex/collectives/pipeline_relay.py"}
# What has sockets: the page names each. A host's name is no socket.
SOCKETS = {
    "megatron_flex/collectives/transport/node_sockets.py",
    "megatron_flex/runtime/debug/edit_debugger.py",
    "megatron_flex/collectives/transport/shared_memory.py",
}
LISTENS = SOCKETS - {"megatron_flex/collectives/transport/shared_memory.py"}
# Files in a folder that was made anew for them.
WRITES = {
    "megatron_flex/statistics/statistics_files.py": "write_bytes",
    "megatron_flex/dump/export.py": "write_text, open wb",
    "megatron_flex/conversion/checkpoints.py": "write_text",
    # And files that the user names.
    "megatron_flex/cli/two_layouts_command.py": "open wb",
    "megatron_flex/launch/model_alignment.py": "write_text",
    "megatron_flex/launch/run_report.py": "open a",
}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Each call in the package: the file, what is called, and the call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def test_nothing_is_unpickled_but_what_process_groups_bring() -> None:
    found = {f for f, name, _ in calls() if name.split(".")[0] in ("pickle", "dill", "marshal", "shelve")}
    assert found == UNPICKLES
    for path in PACKAGE.rglob("*.py"):
        imported = {
            n.name
            for i in ast.walk(ast.parse(path.read_text()))
            if isinstance(i, ast.Import)
            for n in i.names
        }
        assert not imported & {"dill", "marshal", "shelve", "cloudpickle"}, path
    pickled = [n for f, name, n in calls() if name == "pickle.loads"]
    assert len(pickled) == 1


def test_files_of_tensors_run_no_code() -> None:
    loads = [(f, node) for f, name, node in calls() if name == "torch.load"]
    assert loads
    for file, node in loads:
        said = {k.arg: ast.unparse(k.value) for k in node.keywords}
        assert said.get("weights_only") == "True", file
    assert not [f for f, name, _ in calls() if name in ("yaml.load", "yaml.unsafe_load", "eval", "os.system")]


def test_what_listens_is_on_the_page() -> None:
    page = (ROOT / "docs/security.md").read_text()
    using: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [n.name for n in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(n.split(".")[0] in ("socket", "socketserver", "http", "asyncio", "xmlrpc") for n in names):
                using.add(path.relative_to(ROOT).as_posix())
            assert "multiprocessing.connection" not in names, path
            assert "multiprocessing.managers" not in names, path
    assert using == SOCKETS
    listening = {f for f, name, _ in calls() if name.endswith((".listen", "create_server", ".accept"))}
    assert listening == LISTENS
    from megatron_flex.collectives.transport import node_sockets
    from megatron_flex.runtime.debug import edit_debugger

    for seconds in (node_sockets.GREETING, node_sockets.JOINING, edit_debugger.TYPING):
        assert f"{seconds:g} s" in page
    assert f"After {node_sockets.WAITING} that wait" in page
    assert f"After {edit_debugger.WAITING} that wait" in page


def test_drafts_follow_no_link() -> None:
    """Files are opened for writing by a mode that makes them anew, but in folders that were made for them."""
    loose: dict[str, list[str]] = {}
    for file, name, node in calls():
        method = name.rpartition(".")[2]
        mode = next(
            (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), "r"
        )
        if method in ("write_text", "write_bytes") and not name.startswith("super()."):
            loose.setdefault(file, []).append(method)
        elif method in ("open", "fdopen") and mode[:1] in ("w", "a") and name != "os.fdopen":
            loose.setdefault(file, []).append(f"open {mode}")
    assert {f: ", ".join(sorted(set(n), reverse=True)) for f, n in loose.items()} == WRITES


def test_a_draft_is_made_anew(tmp_path: Path) -> None:
    from megatron_flex.dump.schema import MANIFEST_NAME, Manifest

    aim = tmp_path / "aim"
    aim.write_text("mine")
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / (MANIFEST_NAME + ".tmp")).symlink_to(aim)
    mappings = {"axes", "experts", "model", "settings"}
    made: dict[str, Any] = {n: {} if n in mappings else () for n in Manifest.__dataclass_fields__}
    Manifest(**made).write(folder)
    assert aim.read_text() == "mine"
    assert not (folder / MANIFEST_NAME).is_symlink()


def test_a_draft_of_a_page_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flex.page import html_page

    aim = tmp_path / "aim"
    aim.write_text("mine")
    (tmp_path / f".page.html.{os.getpid()}.tmp").symlink_to(aim)
    monkeypatch.setattr(html_page, "html", lambda page: "<p>")
    unknown: Any = None
    html_page.write(unknown, tmp_path / "page.html")
    assert aim.read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == "<p>"
