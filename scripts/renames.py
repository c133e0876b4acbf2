"""Rename modules and names by a map, merge modules, and prove that a renaming did nothing else.

    python scripts/renames.py apply MAP              rename in this repository; files are moved with git
    python scripts/renames.py check MAP --base REF   apply the inverse map, compare each syntax tree with REF
    python scripts/renames.py merge MAP              write the sources of each merge into one module
    python scripts/renames.py fork MAP PATH ...      rename what other code imports of this package

`--only PREFIX` takes the modules of a map whose path begins so. A map is TOML:

- `[modules]`: old dotted path = new one;
- `[names]`: "module:name" (the module's old path) = new name, of a class, function or constant at top level;
- `[exports]`: "package:name" = new name, of what a package imports from its modules; for `fork`;
- `[identifiers]`: old = new, wherever the identifier occurs;
- `[methods]`: "class:name" = new access, of what moved to an object that instances have; `fork` prints where
  it may be used;
- `[locals."module"]`: old = new, of variables and parameters in one module;
- `[[merge]]`: `target`, `sources`, and `doc`, the docstring of the target;
- `[public]`: what changed after all of these; for `fork`: `modules` and `names` as above, `arguments`,
  `values` and `methods` by "module:name.member", `settings` for people.

What a name refers to is resolved through scopes, imports and re-exports: a name that only looks the same
stays.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megatron_flex", "tests", "megatron_flex_patches", "scripts")
TEXTS = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".cfg", ""}
LEFT = ("tests/data/", "tests/browser/kept/", "tests/unit/kept/", "docs/renames.toml", "tests/surface/")
Origin = tuple[str, str]  # a module, and a name in it; the name is empty where the module itself is meant
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Renames:
    """A map, as the head of this file describes it."""

    modules: dict[str, str] = field(default_factory=dict)
    names: dict[Origin, str] = field(default_factory=dict)
    identifiers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    merges: list[dict[str, Any]] = field(default_factory=list)
    exports: dict[Origin, str] = field(default_factory=dict)
    public: dict[str, dict[str, str]] = field(default_factory=dict)
    methods: dict[Origin, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, only: str = "") -> Renames:
        """Read a map; with `only`, what concerns modules whose path begins so."""
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        pairs = dict(_pair(k, v) for k, v in text.get("names", {}).items())
        return cls(
            {k: v for k, v in text.get("modules", {}).items() if k.startswith(only) and k != v},
            {(m, n): v for (m, n), v in pairs.items() if m.startswith(only) and n != v},
            dict(text.get("identifiers", {})),
            {k: v for k, v in text.get("locals", {}).items() if k.startswith(only)},
            [m for m in text.get("merge", []) if m["target"].startswith(only)],
            dict(_pair(k, v) for k, v in text.get("exports", {}).items()),
            text.get("public", {}),
            dict(_pair(k, v) for k, v in text.get("methods", {}).items()),
        )

    def for_importers(self) -> Renames:
        """All that concerns code which imports this package: merges and exports as well."""
        merged = {source: one["target"] for one in self.merges for source in one["sources"]}
        names = {**self.names, **self.exports}
        return Renames(
            {**self.modules, **merged}, names, self.identifiers, public=self.public, methods=self.methods
        )

    def later(self) -> Renames:
        """The modules and names that changed after all others."""
        names = dict(_pair(k, v) for k, v in self.public.get("names", {}).items())
        return Renames(dict(self.public.get("modules", {})), names)

    def inverse(self) -> Renames:
        """The map back; merges have none."""
        for what, pairs in (("modules", self.modules), ("identifiers", self.identifiers)):
            if len(set(pairs.values())) != len(pairs):
                raise SystemExit(f"two of the {what} get one name")
        at = self.modules
        return Renames(
            {v: k for k, v in at.items()},
            {(at.get(m, m), v): n for (m, n), v in self.names.items()},
            {v: k for k, v in self.identifiers.items()},
            {at.get(m, m): {v: k for k, v in pairs.items()} for m, pairs in self.variables.items()},
        )


def _pair(key: str, new: str) -> tuple[Origin, str]:
    module, _, name = key.partition(":")
    return (module, name), new


class Scope:
    """The names that one scope binds, with what they were imported as."""

    def __init__(self, outer: Scope | None, is_class: bool = False) -> None:
        self.outer, self.is_class = outer, is_class
        self.bound: set[str] = set()
        self.imports: dict[str, Origin] = {}
        self.elsewhere: set[str] = set()  # declared global

    def of(self, name: str) -> Scope | None:
        """The scope that a name is bound in, seen from here."""
        scope: Scope | None = self
        while scope is not None:
            seen = scope is self or not scope.is_class
            if seen and name in scope.bound and name not in scope.elsewhere:
                return scope
            scope = scope.outer
        return None


def module_of(path: str) -> str:
    """The dotted path of a file."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class File:
    """One Python file, with the edits that are to be made in it."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.module, self.data = path, module_of(path), text.encode()
        self.tree = ast.parse(text)
        self.is_package = path.endswith("__init__.py")
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: set[tuple[int, int, bytes]] = set()
        self.top = Scope(None)
        self.scopes: dict[ast.AST, Scope] = {}
        self._bind(self.tree.body, self.top)

    def at(self, line: int, column: int) -> int:
        """The byte at a place of the syntax tree."""
        return self.starts[line - 1] + column

    def start(self, node: Any) -> int:
        """The byte where a node starts."""
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        """The byte behind a node."""
        return self.at(node.end_lineno, node.end_col_offset)

    def replace(self, first: int, old: str, new: str) -> None:
        """Plan to put a word in the place of another."""
        found = self.data[first : first + len(old.encode())].decode()
        assert found == old, (self.path, first, old, found)
        self.edits.add((first, first + len(old.encode()), new.encode()))

    def edited(self) -> str:
        """The text with all edits made."""
        out, last = [], 0
        for first, end, new in sorted(self.edits):
            assert first >= last, (self.path, self.data[first:end], new)
            out += [self.data[last:first], new]
            last = end
        return b"".join([*out, self.data[last:]]).decode()

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _bind(self, body: Sequence[ast.AST], scope: Scope) -> None:
        for node in body:
            self._bind_one(node, scope)

    def _bind_one(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = scope
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                scope.bound.add(name)
                scope.imports[name] = (alias.name if alias.asname else name, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                scope.bound.add(alias.asname or alias.name)
                scope.imports[alias.asname or alias.name] = (self.absolute(node), alias.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.elsewhere.update(node.names if isinstance(node, ast.Global) else ())
        elif isinstance(node, SCOPES):
            self._bind_function(node, scope)
            return
        elif isinstance(node, ast.ClassDef):
            scope.bound.add(node.name)
            self._bind([*node.decorator_list, *node.bases, *node.keywords], scope)
            inner = Scope(scope, is_class=True)
            self._bind(node.body, inner)
            return
        elif isinstance(node, COMPREHENSIONS):
            inner = Scope(scope)
            self._bind_one(node.generators[0].iter, scope)
            for child in ast.iter_child_nodes(node):
                self._bind_one(child, inner)
            first = node.generators[0].iter  # evaluated outside
            self.scopes.update((n, scope) for n in ast.walk(first) if isinstance(n, ast.Name))
            return
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.bound.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            scope.bound.add(node.name)
        self._bind(list(ast.iter_child_nodes(node)), scope)

    def _bind_function(self, node: Any, scope: Scope) -> None:
        inner = Scope(scope)
        if not isinstance(node, ast.Lambda):
            scope.bound.add(node.name)
            self._bind(node.decorator_list, scope)
            if node.returns is not None:
                self._bind_one(node.returns, scope)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [a for a in (arguments.vararg, arguments.kwarg) if a]
        for argument in every:
            inner.bound.add(argument.arg)
            self.scopes[argument] = inner
            if argument.annotation is not None:
                self._bind_one(argument.annotation, scope)
        self._bind([d for d in (*arguments.defaults, *arguments.kw_defaults) if d], scope)
        self._bind(node.body if isinstance(node.body, list) else [node.body], inner)


class Tree:
    """All Python files, and what their names refer to.

    Args:
        texts: by path.
        foreign: modules that are not among the files, and may be imported by them.
    """

    def __init__(self, texts: Mapping[str, str], foreign: frozenset[str] = frozenset()) -> None:
        self.foreign = foreign
        self.files = {path: File(path, text) for path, text in texts.items()}
        self.modules = {file.module: file for file in self.files.values()}

    def origin(self, module: str, name: str) -> Origin | None:
        """Where a name of a module comes from; None where it is not of this tree."""
        for _ in range(20):
            file = self.modules.get(module)
            if file is None and f"{module}.{name}" in self.foreign:
                return f"{module}.{name}", ""
            if file is None:
                return (module, name) if module in self.foreign else None
            if name in file.top.imports:
                found = file.top.imports[name]
                if not found[1]:
                    return found if found[0] in self.modules else None
                module, name = found
                continue
            if name in file.top.bound:
                return module, name
            inside = f"{module}.{name}"
            return (inside, "") if inside in self.modules else None
        return None

    def refers(self, file: File, node: ast.Name) -> Origin | None:
        """What a name in a file means, if it is at the top level of a module of the tree."""
        here = file.scopes.get(node)
        scope = here.of(node.id) if here else None
        if scope is None:
            return None
        if node.id in scope.imports:
            module, name = scope.imports[node.id]
            if not name:
                return (module, "") if module in {*self.modules, *self.foreign} else None
            return self.origin(module, name)
        return (file.module, node.id) if scope is file.top else None


def renamed(tree: Tree, renames: Renames) -> dict[str, tuple[str, str]]:
    """The files with their new paths and texts."""
    out = {}
    for path, file in tree.files.items():
        _Pass(tree, file, renames).run()
        text = prose(dotted(file.edited(), tree, renames), words(tree, file, renames))
        out[path] = (new_path(path, renames), text)
    return out


def words(tree: Tree, file: File, renames: Renames) -> dict[str, str]:
    """The names that a file sees, at its top, and that get another one."""
    found = {}
    for name in file.top.bound:
        origin = tree.origin(file.module, name)
        if origin and origin[1] == name and origin in renames.names:
            found[name] = renames.names[origin]
    return found


def prose(text: str, new: Mapping[str, str]) -> str:
    """A text with names in backticks replaced."""
    if not new:
        return text
    return re.sub(r"`(\w+)((?:\.\w+)*(?:\(\))?)`", lambda m: f"`{new.get(m[1], m[1])}{m[2]}`", text)


def _replaced(new: Mapping[str, str], found: re.Match[str]) -> str:
    return new.get(found[0], found[0])


def fragments(text: str, tree: Tree, renames: Renames) -> str:
    """The list of faults, with the fragments of code in it as they read afterwards."""
    out, new = [], {}
    for line in text.split("\n"):
        found = re.match(r'file = "([^"]+)"', line)
        if found:
            file = tree.files[found[1]]
            variables = renames.variables.get(file.module, {})
            new = {**renames.identifiers, **variables, **words(tree, file, renames)}
        if re.match(r"(\[\[|(name|fault|tests|file) =|#|\s*\"tests/)", line):
            out.append(line)
            continue
        line = re.sub(r"(?<!\.)\b\w+", partial(_replaced, new), line)
        out.append(re.sub(r"(?<=\.)\w+", partial(_replaced, renames.identifiers), line))
    return "\n".join(out)


class _Pass:
    """The edits of one file."""

    def __init__(self, tree: Tree, file: File, renames: Renames) -> None:
        self.tree, self.file, self.renames = tree, file, renames
        self.variables = renames.variables.get(file.module, {})

    def run(self) -> None:
        for node in ast.walk(self.file.tree):
            method = getattr(self, f"_{type(node).__name__}", None)
            if method is not None:
                method(node)

    def _word(self, name: str, origin: Origin | None) -> str:
        if origin is not None and origin[1]:
            new = self.renames.names.get(origin)
            if new is not None and name == origin[1]:
                return new
        elif origin is not None and name == origin[0].rsplit(".", 1)[-1]:
            return self.renames.modules.get(origin[0], origin[0]).rsplit(".", 1)[-1]
        return self.renames.identifiers.get(name, name)

    def _put(self, first: int, old: str, new: str) -> None:
        if new != old:
            self.file.replace(first, old, new)

    def _Name(self, node: ast.Name) -> None:
        new = self._word(node.id, self.tree.refers(self.file, node))
        self._put(self.file.start(node), node.id, self.variables.get(node.id, new) if new == node.id else new)

    def _Attribute(self, node: ast.Attribute) -> None:
        new = self.renames.identifiers.get(node.attr, node.attr)
        module = self._module(node.value)
        if module:
            new = self._word(node.attr, self.tree.origin(module, node.attr))
        self._put(self.file.end(node) - len(node.attr.encode()), node.attr, new)

    def _module(self, node: ast.AST) -> str:
        """The module that an expression means, or nothing."""
        if isinstance(node, ast.Name):
            origin = self.tree.refers(self.file, node)
            return origin[0] if origin and not origin[1] else ""
        if isinstance(node, ast.Attribute):
            inside = f"{self._module(node.value)}.{node.attr}"
            return inside if inside in {*self.tree.modules, *self.tree.foreign} else ""
        return ""

    def _definition(self, node: Any) -> None:
        scope = self.file.scopes[node]
        outer = scope.of(node.name) or scope
        new = self._word(node.name, (self.file.module, node.name) if outer is self.file.top else None)
        if scope is not self.file.top and scope.is_class:
            new = self.renames.identifiers.get(node.name, node.name)
        if new == node.name:
            new = self.variables.get(node.name, new) if not scope.is_class else new
        first = self.file.start(node)
        found = re.match(rb"(async\s+def|def|class)\s+", self.file.data[first:])
        assert found, (self.file.path, node.name)
        self._put(first + found.end(), node.name, new)

    _FunctionDef = _AsyncFunctionDef = _ClassDef = _definition

    def _arg(self, node: ast.arg) -> None:
        self._put(self.file.start(node), node.arg, self._variable(node.arg))

    def _variable(self, name: str) -> str:
        return self.variables.get(name, self.renames.identifiers.get(name, name))

    def _keyword(self, node: ast.keyword) -> None:
        if node.arg is not None:
            new = self.renames.identifiers.get(node.arg, node.arg)
            self._put(self.file.start(node), node.arg, new)

    def _ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name and self._variable(node.name) != node.name:
            first = self.file.end(node.type) if node.type else self.file.start(node)
            place = self.file.data.index(b" as ", first) + 4
            self._put(place, node.name, self._variable(node.name))

    def _Import(self, node: ast.Import) -> None:
        """Dotted paths are replaced in the text."""

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.file.absolute(node)
        origins = [self.tree.origin(module, a.name) for a in node.names]
        moved = [o[0] for o in origins if o and not o[1] and o[0] in self.renames.modules]
        parents = {self.renames.modules[m].rpartition(".")[0] for m in moved}
        if parents - {module}:
            if len(moved) < len(node.names) or len(parents) > 1:
                raise SystemExit(f"{self.file.path}:{node.lineno}: write one import a line there first")
            place = self.file.data.index(module.encode(), self.file.start(node))
            self._put(place, module, parents.pop())
        for alias in node.names:
            new = self._word(alias.name, self.tree.origin(module, alias.name))
            self._put(self.file.start(alias), alias.name, new)
            if alias.asname == alias.name:  # a re-export
                self._put(self.file.end(alias) - len(alias.name), alias.name, new)
            elif alias.asname and alias.asname in self.variables:
                place = self.file.end(alias) - len(alias.asname)
                self._put(place, alias.asname, self.variables[alias.asname])

    def _Call(self, node: ast.Call) -> None:
        """`setattr(module, "name", ...)` and the like."""
        second = node.args[1] if len(node.args) > 1 else None
        if not isinstance(second, ast.Constant) or not isinstance(second.value, str):
            return
        name, module = second.value, self._module(node.args[0])
        new = self.renames.identifiers.get(name, name)
        if module:
            new = self._word(name, self.tree.origin(module, name))
        if name.isidentifier() and new != name:
            self._put(self.file.start(second) + 1, name, new)

    def _Assign(self, node: ast.Assign) -> None:
        """`__all__`, the names of slots, and `T = TypeVar("T")`."""
        targets = {t.id for t in node.targets if isinstance(t, ast.Name)}
        call = node.value if isinstance(node.value, ast.Call) else None
        first = call.args[0] if call and call.args and isinstance(call.func, ast.Name) else None
        if isinstance(first, ast.Constant) and first.value in targets:
            name = str(first.value)
            self._put(self.file.start(first) + 1, name, self._word(name, (self.file.module, name)))
        if targets & {"__all__", "__slots__"} and isinstance(node.value, (ast.List, ast.Tuple)):
            for item in node.value.elts:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    name = item.value
                    exported = "__all__" in targets
                    origin = self.tree.origin(self.file.module, name) if exported else None
                    new = self._word(name, origin)
                    self._put(self.file.start(item) + 1, name, new)

    def _Global(self, node: ast.Global) -> None:
        first, last = self.file.start(node), self.file.end(node)
        for name in node.names:
            found = re.search(rb"\b" + name.encode() + rb"\b", self.file.data[first:last])
            assert found
            self._put(first + found.start(), name, self._word(name, (self.file.module, name)))


CHAIN = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
PATH = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:/\w+)+\.py\b")


def dotted(text: str, tree: Tree | None, renames: Renames) -> str:
    """A text with the dotted paths and the file paths in it replaced."""

    def chain(found: re.Match[str]) -> str:
        parts = found[0].split(".")
        for count in range(len(parts), 1, -1):
            old = ".".join(parts[:count])
            rest = parts[count:]
            known = tree is not None and old in {*tree.modules, *tree.foreign}
            if old in renames.modules or known:
                if rest and tree is not None and known:
                    origin = tree.origin(old, rest[0])
                    if origin and origin[1] == rest[0]:
                        rest[0] = renames.names.get(origin, rest[0])
                return ".".join([renames.modules.get(old, old), *rest])
        return found[0]

    def path(found: re.Match[str]) -> str:
        return new_path(found[0], renames)

    return PATH.sub(path, CHAIN.sub(chain, text))


def new_path(path: str, renames: Renames) -> str:
    """Where a file lies afterwards."""
    new = renames.modules.get(module_of(path))
    if new is None or not path.endswith(".py"):
        return path
    return new.replace(".", "/") + ("/__init__.py" if path.endswith("__init__.py") else ".py")


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def tracked() -> Iterator[tuple[str, str]]:
    """The text files of this repository, with their texts."""
    for path in git("ls-files", "--cached", "--others", "--exclude-standard").split("\n"):
        file = ROOT / path
        if not path or path.startswith(LEFT) or file.suffix not in TEXTS or file.is_symlink():
            continue
        if file.is_file():
            with contextlib.suppress(UnicodeDecodeError):
                yield path, file.read_text(encoding="utf-8")


def read_tree(texts: Mapping[str, str]) -> Tree:
    """The Python files among them."""
    return Tree({path: text for path, text in texts.items() if path.endswith(".py")})


def apply(renames: Renames) -> None:
    """Rename in this repository."""
    texts = dict(tracked())
    tree = read_tree(texts)
    strangers(tree, renames)
    results = renamed(tree, renames)
    for path, text in texts.items():
        if path == "tests/faults.toml":
            text = fragments(text, tree, renames)
        new, body = results.get(path) or (path, dotted(text, tree, renames))
        if new != path:
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            git("mv", path, new)
        if body != texts[path]:
            (ROOT / new).write_text(body, encoding="utf-8")


def strangers(tree: Tree, renames: Renames) -> None:
    """Refuse names that are not there, and names that are there already."""
    wrong = [m for m in renames.modules if m not in tree.modules]
    wrong += [m for m in renames.modules.values() if m in tree.modules and m not in renames.modules]
    for new in renames.modules.values():
        package, _, name = new.rpartition(".")
        if package in tree.modules and name in tree.modules[package].top.bound:
            wrong.append(f"{new}: the package has another {name}")
    wrong += [":".join(origin) for origin in renames.names if tree.origin(*origin) != origin]
    for file in tree.files.values():
        if clash := clashes(tree, file, renames):
            wrong.append(f"{file.path}: {', '.join(sorted(clash))} is there already")
    if wrong:
        raise SystemExit("\n".join(["cannot be renamed:", *wrong]))


def clashes(tree: Tree, file: File, renames: Renames) -> set[str]:
    """New names that something else in a file has."""
    scopes = {*file.scopes.values(), file.top}
    present = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}
    present |= {a.arg for a in ast.walk(file.tree) if isinstance(a, ast.arg)}
    present |= {name for scope in scopes for name in scope.bound}
    coming: dict[str, set[str]] = {}
    for scope in scopes:
        for name in scope.bound if scope is file.top else scope.imports:
            where = scope.imports.get(name, (file.module, name))
            origin = tree.origin(*where) if where[1] else where
            if origin and origin[1] == name and origin in renames.names:
                coming.setdefault(renames.names[origin], set()).add(name)
            elif origin and not origin[1] and origin[0].endswith(f".{name}") and origin[0] in renames.modules:
                coming.setdefault(renames.modules[origin[0]].rsplit(".", 1)[-1], set()).add(name)
    for old, new in renames.variables.get(file.module, {}).items():
        coming.setdefault(new, set()).add(old)
    leaving = {old for olds in coming.values() for old in olds}
    return {new for new, olds in coming.items() if (new in present and new not in leaving) or len(olds) > 1}


def check(renames: Renames, base: str) -> int:
    """Compare what the inverse map makes of the tree with a commit: the number of files that differ."""
    inverse = renames.inverse()
    texts = dict(tracked())
    tree = read_tree(texts)
    back = dict(renamed(tree, inverse).values())
    names = git("ls-tree", "-r", "--name-only", base).split("\n")
    before = {p for p in names if p.endswith(".py") and not p.startswith(LEFT)}
    different = sorted(before ^ set(back))
    for path in sorted(before & set(back)):
        if normal(git("show", f"{base}:{path}")) != normal(back[path]):
            different.append(path)
    for path in different:
        print(f"differs: {path}")
    print(f"{len(before)} files, {len(different)} with another syntax tree")
    return len(different)


def normal(text: str) -> str:
    """A syntax tree as text, with neighbouring imports and the names of `__all__` in one order."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, sorted_imports(body))
        if isinstance(node, ast.ImportFrom):
            node.names.sort(key=lambda a: a.name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = re.sub(r"\s+", " ", str(node.value.value))  # a long line may be broken anew
        if is_export(node):
            vars(node)["value"].elts.sort(key=lambda e: e.value)
    return ast.dump(tree)


def is_export(node: Any) -> bool:
    """Whether a statement sets `__all__` to a list."""
    targets = node.targets if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) else []
    return any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets)


def sorted_imports(body: list[Any]) -> list[Any]:
    """Statements, with those imports sorted that stand one after the other."""
    out: list[Any] = []
    run: list[Any] = []
    for node in [*body, None]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            run.append(node)
            continue
        out += sorted(run, key=ast.dump)
        run = []
        if node is not None:
            out.append(node)
    return out


def find_moved_methods(text: str, renames: Renames) -> Iterator[tuple[int, str, str]]:
    """Where a file that imports this package may use a method that moved: line, old and new access."""
    tree = ast.parse(text)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    if not any("megatron_flex" in ast.unparse(n) for n in imports):
        return
    moved = {name: (owner.rpartition(".")[2], access) for (owner, name), access in renames.methods.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in moved:
            owner, access = moved[node.attr]
            if not ast.unparse(node).endswith(f".{access}"):
                yield node.lineno, f"{owner}.{node.attr}", f"{owner}.{access}"


def fork(renames: Renames, paths: Sequence[Path]) -> None:
    """Rename in files that import this package; folders are searched for Python files."""
    from public_renames import rename_calls

    later = renames.later()
    named = [*renames.modules, *renames.modules.values(), *(module for module, _ in renames.names)]
    named += [*later.modules, *(module for module, _ in later.names)]
    foreign = frozenset(".".join(m.split(".")[:n]) for m in named for n in range(1, m.count(".") + 2))
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = new = file.read_text(encoding="utf-8")
            ((_, new),) = renamed(Tree({file.name: new}, foreign), renames).values()
            new = rename_calls(new, renames.public, foreign)
            ((_, new),) = renamed(Tree({file.name: new}, foreign), later).values()
            if new != text:
                file.write_text(new, encoding="utf-8")
                print(file)
            for line, old_access, new_access in find_moved_methods(new, renames):
                print(f"{file}:{line}: {old_access} is {new_access} now, if this is one")


def main() -> int:
    """Do what is asked."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("action", choices=["apply", "check", "merge", "fork"])
    parser.add_argument("map", type=Path)
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--only", default="", help="a prefix of module paths")
    parser.add_argument("--base", default="HEAD")
    options = parser.parse_args()
    renames = Renames.read(options.map, options.only)
    if options.action == "check":
        return 1 if check(renames, options.base) else 0
    if options.action == "apply":
        apply(renames)
    elif options.action == "fork":
        fork(renames.for_importers(), options.paths)
    else:
        from merges import merge

        merge(renames)
    return 0


if __name__ == "__main__":
    sys.exit(main())
