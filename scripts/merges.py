"""Merge modules: imports united, definitions one after the other, importers changed."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from renames import ROOT, File, Origin, Renames, Tree, dotted, git, is_export, read_tree, tracked

IGNORED = re.compile(r"#\s*(noqa|type:)")


class Imported(NamedTuple):
    """One name of one import statement; `name` is empty for `import module`."""

    module: str
    name: str
    alias: str

    def text(self) -> str:
        """As a statement."""
        ending = f" as {self.alias}" if self.alias else ""
        return f"{f'from {self.module} ' if self.name else ''}import {self.name or self.module}{ending}"


def merge(renames: Renames) -> None:
    """Do all merges of a map in this repository."""
    texts = dict(tracked())
    tree = read_tree(texts)
    owners: dict[str, str] = {}
    for one in renames.merges:
        for source in one["sources"]:
            if source in owners:
                raise SystemExit(f"{source} is merged twice")
            if source not in tree.modules:
                raise SystemExit(f"there is no module {source}")
            owners[source] = one["target"]
    problems: list[str] = []
    new: dict[str, str] = {}
    for one in renames.merges:
        files = [tree.modules[s] for s in one["sources"]]
        problems += collisions(tree, files, owners)
        new[one["target"]] = united(tree, ordered(tree, files), one.get("doc", ""), owners)
    if problems:
        raise SystemExit("\n".join(["cannot be merged:", *problems]))
    moves = Renames(modules=owners)
    for file in tree.files.values():
        if file.module not in owners:
            change_importer(tree, file, owners)
    written = {}
    for path, file in tree.files.items():
        if file.module not in owners:
            written[path] = dotted(file.edited(), tree, moves)
    for path, text in texts.items():
        if not path.endswith(".py"):
            written[path] = dotted(text, tree, moves)
    for one in renames.merges:
        target = one["target"].replace(".", "/") + ".py"
        files = [tree.modules[s] for s in one["sources"]]
        largest = max(files, key=lambda f: len(f.data))
        (ROOT / target).parent.mkdir(parents=True, exist_ok=True)
        if target in tree.files and tree.files[target] not in files:
            raise SystemExit(f"{target} is there, and is no source of the merge")
        for file in files:
            if file.path != target and (file is not largest or target in {f.path for f in files}):
                git("rm", "-qf", file.path)
            elif file.path != target:
                git("mv", file.path, target)
        written[target] = dotted(new[one["target"]], tree, moves)
    for path, text in written.items():
        if texts.get(path) != text:
            (ROOT / path).write_text(text, encoding="utf-8")


def ordered(tree: Tree, files: Sequence[File]) -> list[File]:
    """Sources so that what one imports of another comes first."""
    names = {f.module: f for f in files}
    needs: dict[str, set[str]] = {m: set() for m in names}
    for file in files:
        for node in file.tree.body:
            for one in imported(file, node):
                origin = resolved(tree, one)
                if origin and origin[0] in names and origin[0] != file.module:
                    needs[file.module].add(origin[0])
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError:
        return list(files)
    out: list[File] = []
    waiting: set[str] = set()
    while sorter.is_active():
        waiting |= set(sorter.get_ready())
        first = next(m for m in names if m in waiting)
        waiting.discard(first)
        out.append(names[first])
        sorter.done(first)
    return out


def imported(file: File, node: ast.AST) -> Iterator[Imported]:
    """What a statement imports."""
    if isinstance(node, ast.Import):
        yield from (Imported(a.name, "", a.asname or "") for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (Imported(file.absolute(node), a.name, a.asname or "") for a in node.names)


def resolved(tree: Tree, one: Imported) -> Origin | None:
    """What it is, where it is of the tree."""
    if one.name:
        return tree.origin(one.module, one.name)
    return (one.module, "") if one.module in tree.modules else None


def for_types(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def defined(file: File) -> set[str]:
    """What a module has at its top of its own."""
    return {name for name in file.top.bound if name not in file.top.imports} - {"__all__", "annotations"}


def collisions(tree: Tree, files: Sequence[File], owners: dict[str, str]) -> list[str]:
    """Names that two sources give different meanings."""
    out: list[str] = []
    meaning: dict[str, tuple[Any, str]] = {}
    for file in files:
        for name in file.top.bound - {"__all__", "annotations"}:
            one = file.top.imports.get(name)
            what: Any = (file.module, name)
            if one:
                what = (tree.origin(*one) if one[1] else None) or one
            known = meaning.setdefault(name, (what, file.module))
            if known[0] != what:
                out.append(f"{name}: {known[1]} has {known[0]}, {file.module} has {what}")
    own = set().union(*(defined(f) for f in files))
    for file in files:
        names = [n for n in ast.walk(file.tree) if isinstance(n, ast.Name) and n in file.scopes]
        unbound = {n.id for n in names if file.scopes[n].of(n.id) is None}
        out += [
            f"{name}: {file.module} means Python's, and another source defines it"
            for name in unbound & own
            if hasattr(builtins, name)
        ]
    return out


def united(tree: Tree, files: Sequence[File], doc: str, owners: dict[str, str]) -> str:
    """The text of several modules as one."""
    members = {f.module for f in files}
    normal: dict[Imported, None] = {}
    typed: dict[Imported, None] = {}
    kept: list[str] = []
    bodies: list[str] = []
    exported: list[str] = []
    for file in files:
        body = file.tree.body
        gone: list[tuple[int, int]] = []
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            gone.append((file.start(body[0]), file.end(body[0])))
            doc = doc or str(body[0].value.value)
        for node in body:
            inside = node.body if for_types(node) else [node]  # type: ignore[attr-defined]
            if not all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in inside):
                if file.is_package and isinstance(node, ast.Assign):
                    gone.append((file.start(node), file.end(node)))  # the `__all__` of a package that ends
                elif is_export(node):
                    exported += [e.value for e in node.value.elts]  # type: ignore[attr-defined]
                    gone.append((file.start(node), file.end(node)))
                continue
            gone.append((file.start(node), file.end(node)))
            if file.is_package:
                continue
            for statement in inside:
                last = file.data.find(b"\n", file.end(statement))
                source = file.data[file.start(statement) : last].decode()
                if IGNORED.search(source):
                    kept.append(source)
                    gone[-1] = (gone[-1][0], last)
                    continue
                for one in imported(file, statement):
                    new = moved(tree, one, owners, file)
                    origin = resolved(tree, one)
                    if origin and origin[0] in members:
                        if one.alias not in ("", one.name):
                            raise SystemExit(f"{file.path}: {one.text()}: write the name itself")
                        continue
                    (typed if for_types(node) else normal)[new] = None
        change_inside(tree, file, members, owners, gone)
        bodies.append(file.edited().strip("\n"))
    normal.pop(Imported("__future__", "annotations", ""), None)
    only = [t for t in typed if t not in normal and t.text() not in {n.text() for n in normal}]
    doc = doc.strip() + ("\n" if "\n" in doc.strip() else "")
    head = [f'"""{doc}"""', "", "from __future__ import annotations", ""]
    lines = [n.text() for n in normal] + kept
    if only and Imported("typing", "TYPE_CHECKING", "") not in normal:
        lines.append("from typing import TYPE_CHECKING")
    if only:
        lines += ["", "if TYPE_CHECKING:", *(f"    {t.text()}" for t in only)]
    elif Imported("typing", "TYPE_CHECKING", "") in normal:
        lines.remove("from typing import TYPE_CHECKING")
    if exported:
        bodies.append("__all__ = [" + ", ".join(f'"{n}"' for n in sorted(set(exported))) + "]")
    return "\n".join([*head, *lines, "", "", "\n\n\n".join(b for b in bodies if b), ""])


def moved(tree: Tree, one: Imported, owners: dict[str, str], file: File) -> Imported:
    """An import as it reads when all merges are done."""
    origin = resolved(tree, one)
    if origin is None:
        return one
    module, name = origin
    if not name:  # a module itself
        if module not in owners:
            return one
        if not one.name:
            return one._replace(module=owners[module])
        package, _, own = owners[module].rpartition(".")
        return Imported(package, own, one.alias)
    if one.module in owners:
        return one._replace(module=owners.get(module, module))
    return one


def change_inside(
    tree: Tree, file: File, members: set[str], owners: dict[str, str], gone: list[tuple[int, int]]
) -> None:
    """Take out imports, and change those within functions, of a source of a merge."""
    for first, last in gone:
        file.edits.add((first, last, b""))
    top = {id(n) for node in file.tree.body for n in (node.body if for_types(node) else [node])}  # type: ignore[attr-defined]
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in top:
            change_statement(tree, file, node, owners, members)
    change_uses(tree, file, owners, members)


def change_importer(tree: Tree, file: File, owners: dict[str, str]) -> None:
    """Change the imports of a file that is in no merge."""
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            change_statement(tree, file, node, owners, set())
    change_uses(tree, file, owners, set())


def change_statement(tree: Tree, file: File, node: Any, owners: dict[str, str], members: set[str]) -> None:
    """Write one import statement anew, if a merge concerns it."""
    before = list(imported(file, node))
    after = []
    for one in before:
        origin = resolved(tree, one)
        if members and origin and origin[0] in members:
            if one.alias not in ("", one.name):
                raise SystemExit(f"{file.path}:{node.lineno}: {one.text()}: write the name itself")
            continue
        after.append(moved(tree, one, owners, file))
    if after == before:
        return
    first, last = file.start(node), file.end(node)
    indent = " " * node.col_offset
    rest = file.data[last : file.data.find(b"\n", last)].decode()
    if not after:
        start = file.data.rfind(b"\n", 0, first)
        file.edits.add((start, last, b""))
        return
    groups: dict[str, list[Imported]] = {}
    for one in after:
        groups.setdefault(one.module if one.name else one.text(), []).append(one)
    texts = []
    for group in groups.values():
        names = ", ".join(o.name + (f" as {o.alias}" if o.alias else "") for o in group)
        line = f"from {group[0].module} import {names}" if group[0].name else group[0].text()
        if len(indent) + len(line) + len(rest) > 108 and group[0].name:
            names = names.replace(", ", f",\n{indent}    ")
            line = f"from {group[0].module} import (\n{indent}    {names},\n{indent})"
        texts.append(line)
    file.edits.add((first, last, f"\n{indent}".join(texts).encode()))


def change_uses(tree: Tree, file: File, owners: dict[str, str], members: set[str]) -> None:
    """`module.name` where the module was imported by its own name."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Name):
            continue
        origin = tree.refers(file, node)
        if origin is None or origin[1] or origin[0] not in owners or node.id != origin[0].rsplit(".", 1)[-1]:
            continue
        if origin[0] in members:
            first = file.start(node)
            file.edits.add((first, file.end(node) + 1, b""))  # with the dot
        else:
            file.edits.add((file.start(node), file.end(node), owners[origin[0]].rsplit(".", 1)[-1].encode()))
