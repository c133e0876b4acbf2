"""Holds the layer diagram: imports point down, upstream packages stay behind their doors, rooms stay small.

The checks are functions over (path, source): the second half of this file shows that each of them can fail.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_flex"
UPSTREAM = ("megatron", "fairscale", "apex", "transformer_engine", "deepspeed")

# Top to bottom. A room is a file or a folder of megatron_flex.
ROWS = (
    ("cli",),
    ("launch",),
    ("compat",),
    ("alignment",),
    ("model", "compare"),
    ("page", "plot"),
    ("estimate", "figures"),
    ("edits", "lens", "view", "conversion"),
    ("runtime",),
    ("adapters", "dump", "statistics"),
    ("collectives",),
    ("sites",),
    ("layout", "mesh", "cpu", "progress", "gpt_names"),
    ("errors", "handles", "config", "notebook_html", "text_table", "points", "version"),
)
ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}
NOT_DRAWN = {"compat", "cpu", "version"}  # the diagram of CONTRIBUTING.md may leave these out
MAY_IMPORT_ANYTHING = {"__init__", "__main__"}  # files directly in megatron_flex
MAY_IMPORT_UPSTREAM = {"adapters", "launch", "cpu"}  # and the folder megatron_flex_patches/

MAX_FILE_LINES = 600  # docstrings not counted, whose examples and arguments help the reader of a file
MAX_LINES_WITH_DOCSTRINGS = 950
MAX_FUNCTION_LINES = 70
MAX_SESSION_NAMES = 2  # names after `session`, such as `session.mesh.sizes`
MAX_CHAIN_NAMES = 4  # names of any chain, `self` not counted
LIBRARIES = {"torch", "dist"}  # their modules are nested
INTERFACES = {"ABC", "Protocol"}  # classes that inherit from one of these directly are no implementation


class Import(NamedTuple):
    module: str  # absolute; `from a import b` gives a.b
    line: int
    deferred: bool  # inside a function or under TYPE_CHECKING: not run when the file is imported


# --- the checks


def room_of(path: str) -> str:
    """`megatron_flex/runtime/taps.py` and `megatron_flex/runtime/__init__.py` are in the room `runtime`."""
    return Path(path).parts[1].removesuffix(".py")


def imports_of(path: str, source: str) -> list[Import]:
    """Every import of a file, also those inside functions and those written `import_module("x")`."""
    folder = Path(path).parent.parts
    return list(_walk(ast.parse(source, path), folder, deferred=False))


def _walk(node: ast.AST, folder: tuple[str, ...], deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, deferred)
    elif isinstance(node, ast.ImportFrom):
        above = list(folder[: len(folder) + 1 - node.level]) if node.level else []
        for alias in node.names:
            yield Import(".".join([*above, *filter(None, [node.module]), alias.name]), node.lineno, deferred)
    elif isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            yield Import(str(first.value), node.lineno, deferred)

    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, folder, deferred=True)
        for child in node.orelse:
            yield from _walk(child, folder, deferred)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for child in (*node.decorator_list, node.args):  # these run when the file is imported
            yield from _walk(child, folder, deferred)
        for child in node.body:
            yield from _walk(child, folder, deferred=True)
    else:
        inside = deferred or isinstance(node, ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, folder, inside)


def check_rows(path: str, source: str) -> list[str]:
    """Imports inside the package that do not point down."""
    room = room_of(path)
    if len(Path(path).parts) == 2 and room in MAY_IMPORT_ANYTHING:
        return []
    if room not in ROW_OF:
        return [
            f"{path}: the room {room!r} is on no row: give it one in ROWS and in CONTRIBUTING.md's diagram"
        ]
    wrong = []
    for found in imports_of(path, source):
        package, _, rest = found.module.partition(".")
        if package != PACKAGE:
            continue
        where = f"{path}:{found.line}: {found.module}"
        other = rest.partition(".")[0]
        if other == room:
            continue
        if other not in ROW_OF:
            wrong.append(f"{where}: import from the room that holds it, not from {PACKAGE} itself")
        elif room == "cpu" and ROW_OF[other] != len(ROWS) - 1:
            wrong.append(f"{where}: cpu imports from the lowest row only")
        elif ROW_OF[other] == ROW_OF[room]:
            wrong.append(f"{where}: {room} and {other} are on one row and must not know each other")
        elif ROW_OF[other] < ROW_OF[room]:
            wrong.append(f"{where}: {other} is above {room}, and imports point down only")
    return wrong


def module_of(path: str) -> str:
    """`megatron_flex/runtime/__init__.py` is `megatron_flex.runtime`."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def find_cycle(sources: Mapping[str, str]) -> str:
    """A cycle of imports, deferred, type-checking and dynamic ones included; empty if there is none."""
    modules = {module_of(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        needs = graph.setdefault(module, set())
        for found in imports_of(path, sources[path]):
            named = found.module if found.module in modules else found.module.rpartition(".")[0]
            if named in modules and named != module:
                needs.add(named)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " needs ".join(reversed(error.args[1]))
    return ""


def check_upstream(path: str, source: str) -> list[str]:
    """Imports of upstream packages in the wrong room, or at the top of a file."""
    at_home = Path(path).parts[0] == "megatron_flex_patches" or room_of(path) in MAY_IMPORT_UPSTREAM
    wrong = []
    for found in imports_of(path, source):
        if found.module.partition(".")[0] not in UPSTREAM:
            continue
        where = f"{path}:{found.line}: {found.module}"
        if not at_home:
            homes = ", ".join([*sorted(MAY_IMPORT_UPSTREAM), "megatron_flex_patches"])
            wrong.append(f"{where}: upstream is imported only in {homes}")
        elif not found.deferred:
            wrong.append(f"{where}: upstream is imported only inside functions or under TYPE_CHECKING")
    return wrong


def check_sizes(path: str, source: str) -> list[str]:
    """Files and functions that have grown out of a tired person's head."""
    wrong = []
    tree = ast.parse(source, path)
    lines = len(source.splitlines())
    for what, counted, most in (
        ("lines without docstrings", lines - count_docstring_lines(tree), MAX_FILE_LINES),
        ("lines", lines, MAX_LINES_WITH_DOCSTRINGS),
    ):
        if counted > most:
            wrong.append(f"{path}: {counted} {what}, at most {most}: it holds a second idea")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                wrong.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                )
    return wrong


def count_docstring_lines(tree: ast.AST) -> int:
    """The lines of the docstrings of a file's module, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    holders = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    texts = [node.body[0] for node in holders if ast.get_docstring(node, clean=False) is not None]
    return sum(text.end_lineno - text.lineno + 1 for text in texts)


def classes_of(sources: Mapping[str, str]) -> dict[str, tuple[str, list[str]]]:
    """The classes of the package by full name: where each is defined, and the full names of its bases.

    A base that another package has keeps its last name alone.
    """
    out: dict[str, tuple[str, list[str]]] = {}
    for path, source in sources.items():
        tree = ast.parse(source, path)
        names = {found.module.rpartition(".")[2]: found.module for found in imports_of(path, source)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname: names[a.name] for a in node.names if a.asname and a.name in names}
        own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names |= {node.name: f"{module_of(path)}.{node.name}" for node in own}
        for node in own:
            bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
            written = [ast.unparse(b) for b in bases]
            full = [names.get(w.partition(".")[0], w) + w[len(w.partition(".")[0]) :] for w in written]
            out[names[node.name]] = f"{path}:{node.lineno}", full
    return out


def check_inheritance(sources: Mapping[str, str]) -> list[str]:
    """Classes that inherit from several classes of the package, interfaces not counted."""
    classes = classes_of(sources)
    last: dict[str, set[str]] = {}  # packages hand names on, so that a base is looked up by its last name
    for name in classes:
        last.setdefault(name.rpartition(".")[2], set()).add(name)
    interfaces = {
        n for n, (_, bases) in classes.items() if INTERFACES & {b.rpartition(".")[2] for b in bases}
    }
    wrong = []
    for name, (where, bases) in classes.items():
        inherited = []
        for base in bases:
            named = {base} if base in classes else set()
            if not named and base.startswith(f"{PACKAGE}."):
                named = last.get(base.rpartition(".")[2], set())
            if named - interfaces:
                inherited.append(base.rpartition(".")[2])
        if len(inherited) > 1:
            wrong.append(
                f"{where}: {name.rpartition('.')[2]} inherits from {', '.join(inherited)}: keep one at most, "
                "and make objects of the others"
            )
    return wrong


def check_chains(path: str, source: str) -> list[str]:
    """Attributes of attributes, of a session above all, which only the objects in between should know."""
    tree = ast.parse(source, path)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        names: list[str] = []
        left: ast.AST = node
        while isinstance(left, ast.Attribute):
            names.insert(0, left.attr)
            left = left.value
        names = [left.id, *names] if isinstance(left, ast.Name) and left.id not in ("self", "cls") else names
        at = next((n for n, name in enumerate(names) if name.lstrip("_") == "session"), None)
        if at is not None and len(names) - at - 1 > MAX_SESSION_NAMES:
            wrong.append(
                f"{path}:{node.lineno}: {'.'.join(names[at:])}: give the session, or what it has, a method "
                "that says what is wanted"
            )
        elif len(names) > MAX_CHAIN_NAMES and names[0] not in LIBRARIES:
            wrong.append(f"{path}:{node.lineno}: {'.'.join(names)}: ask the first object for what is wanted")
    return wrong


def check_diagram(page: str) -> list[str]:
    """Differences between ROWS and the layer diagram of CONTRIBUTING.md (which may leave out NOT_DRAWN)."""
    first = re.search(r"^```[^\n]*\n(cli/.*?)^```", page, re.MULTILINE | re.DOTALL)
    if first is None:
        return ["CONTRIBUTING.md has no layer diagram: a fenced block that starts with `cli/`"]
    drawn = []
    for line in first[1].splitlines():
        rooms = re.split(r"\s{2,}", line.strip())[0]
        drawn.append([room.strip().rstrip("/") for room in rooms.split("·") if room.strip()])
    expected = [
        [room for room in row if room not in NOT_DRAWN or room in drawn_row]
        for row, drawn_row in zip(ROWS, [*drawn, *([[]] * len(ROWS))], strict=False)
    ]
    drawn = [row for row in drawn if row]
    if drawn != expected:
        return [f"CONTRIBUTING.md draws the rows {drawn}, this test holds {expected}: make them agree"]
    return []


# --- what imports leave behind

IMPORT_PROBE = """
import importlib, json, sys
import torch, torch.distributed
import torch.nn.modules.module as modules

WATCHED = {
    "torch.nn.Module": torch.nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch.autograd.Function": torch.autograd.Function,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.cuda": torch.cuda,
}

def snapshot():
    seen = {"sys.excepthook": sys.excepthook}
    for owner, holder in WATCHED.items():
        seen |= {f"{owner}.{name}": value for name, value in list(vars(holder).items()) if callable(value)}
    return seen

def global_hooks():
    return {f"torch.nn.modules.module.{name}": dict(value) for name, value in vars(modules).items()
            if name.startswith("_global") and isinstance(value, dict)}

report = {}
for name in sys.argv[1:]:
    before, hooks, loaded = snapshot(), global_hooks(), set(sys.modules)
    importlib.import_module(name)
    after, hooks_after = snapshot(), global_hooks()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    changed += [key for key, value in hooks.items() if hooks_after.get(key) != value]
    report[name] = {"changed": changed, "loaded": sorted(set(sys.modules) - loaded)}
print(json.dumps(report))
"""


def import_report(*names: str, path: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """Import each name in one fresh interpreter; what each changed in torch and which modules it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, *names], cwd=path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def upstream_among(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] in UPSTREAM]


# --- on this repository


def python_files(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py"))


def problems(check, paths: list[str]) -> str:
    return "\n".join(
        line for path in paths for line in check(path, (ROOT / path).read_text(encoding="utf-8"))
    )


def test_there_is_something_to_check():
    assert f"{PACKAGE}/__init__.py" in python_files(PACKAGE)
    assert len(python_files(PACKAGE)) > len(ROWS)


def test_imports_point_down():
    assert problems(check_rows, python_files(PACKAGE)) == ""


def test_upstream_stays_behind_its_doors():
    assert problems(check_upstream, python_files(PACKAGE) + python_files("megatron_flex_patches")) == ""


def test_rooms_are_small():
    assert problems(check_sizes, python_files(PACKAGE)) == ""


def test_no_class_is_put_together_by_inheritance():
    sources = {p: (ROOT / p).read_text(encoding="utf-8") for p in python_files(PACKAGE)}
    assert len(classes_of(sources)) > 100
    assert "\n".join(check_inheritance(sources)) == ""


def test_nobody_reaches_far_into_objects():
    assert problems(check_chains, python_files(PACKAGE)) == ""


def test_modules_import_each_other_in_no_cycle():
    root = {f"{PACKAGE}/__init__.py"}  # has the public names, of all rooms
    sources = {p: (ROOT / p).read_text(encoding="utf-8") for p in python_files(PACKAGE) if p not in root}
    assert len(sources) > 100
    assert find_cycle(sources) == ""


@pytest.mark.parametrize(
    "back",
    [
        "from megatron_flex.b import y",
        "from megatron_flex import b",
        "from . import b",
        "def f():\n    from megatron_flex.b import y",
        "if TYPE_CHECKING:\n    from megatron_flex.b import y",
        "import importlib\nimportlib.import_module('megatron_flex.b')",
        "import megatron_flex.b",
    ],
)
def test_cycles_are_found(back: str):
    files = {"megatron_flex/a.py": "from megatron_flex.c import x", "megatron_flex/c.py": back}
    assert find_cycle({**files, "megatron_flex/b.py": ""}) == ""
    assert "megatron_flex.a" in find_cycle({**files, "megatron_flex/b.py": "from megatron_flex.a import z"})


def test_the_diagram_draws_the_same_rows():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "\n".join(check_diagram(text)) == ""


@pytest.mark.versions
def test_import_loads_no_upstream_and_patches_nothing():
    report = import_report(PACKAGE)[PACKAGE]
    assert PACKAGE in report["loaded"]
    assert upstream_among(report["loaded"]) == []
    assert report["changed"] == []


# --- on code that is wrong


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("megatron_flex/layout/algebra.py", "from megatron_flex.mesh import Mesh", "on one row"),
        ("megatron_flex/layout/algebra.py", "from megatron_flex import mesh", "on one row"),
        ("megatron_flex/layout/algebra.py", "from ..mesh import Mesh", "on one row"),
        ("megatron_flex/layout/algebra.py", "def f():\n    import megatron_flex.runtime.taps", "above"),
        ("megatron_flex/errors.py", "from . import collectives", "above"),
        (
            "megatron_flex/dump/part_format.py",
            "from megatron_flex.adapters.adapter_base import Adapter",
            "on one row",
        ),
        ("megatron_flex/runtime/__init__.py", "from megatron_flex.model import FlexModel", "above"),
        (
            "megatron_flex/runtime/taps.py",
            "import importlib\nimportlib.import_module('megatron_flex.cli')",
            "above",
        ),
        (
            "megatron_flex/runtime/taps.py",
            "from megatron_flex import FlexModel",
            "from the room that holds it",
        ),
        ("megatron_flex/runtime/taps.py", "import megatron_flex", "from the room that holds it"),
        (
            "megatron_flex/cpu/cuda.py",
            "from megatron_flex.cpu import x\nfrom megatron_flex.mesh import y",
            "lowest",
        ),
        ("megatron_flex/attic.py", "", "on no row"),
        ("megatron_flex/attic/__init__.py", "", "on no row"),
    ],
)
def test_rows_check_can_fail(path: str, source: str, said: str):
    (message,) = check_rows(path, source)
    assert said in message


@pytest.mark.parametrize(
    ("bases", "wrong"),
    [
        ("A", 0),
        ("A, nn.Module", 0),
        ("A, Shape", 0),
        ("A, Shape[int]", 0),
        ("A, base.Shape", 0),
        ("A, B", 1),
        ("base.A, B", 1),
        ("A, Again", 1),
        ("A, Renamed", 1),
        ("A, Here", 1),
        ("A, B, nn.Module", 1),
        ("G[int], B", 1),
    ],
)
def test_inheritance_check_can_fail(bases: str, wrong: int):
    base = """
class A: ...
class B: ...
class C: ...
class G(Generic[T]): ...
class Shape(Protocol[T]): ...
"""
    head = """
from torch import nn
from megatron_flex.layout import Again, base
from megatron_flex.layout.base import A, B, G, Shape
from megatron_flex.layout.base import C as Renamed

class Here: ...
"""
    sources = {
        "megatron_flex/layout/__init__.py": "from megatron_flex.layout.again import Again",
        "megatron_flex/layout/again.py": "class Again: ...",
        "megatron_flex/layout/base.py": base,
        "megatron_flex/model.py": f"{head}class Made({bases}): ...\n",
    }
    found = check_inheritance(sources)
    assert len(found) == wrong
    assert all("model.py:8: Made inherits from " in line for line in found)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("session.mesh.sizes", 0),
        ("self.session.sites.match('**')", 0),
        ("self._session.mesh['dp'].coord", 0),
        ("session.parameter_index.sites.items()", 1),
        ("self.session.edit_runner.skipping.skipped", 1),
        ("flex._session.sinks.dumping.dumps[0]", 1),
        ("del session.a.b.c", 1),
        ("session.a.b.c = session.d.e.f.g", 2),
        ("get().session.a.b.c", 1),
        ("sessions.a.b.c", 0),
        ("self.a.b.c.d", 0),
        ("self.a.b.c.d.e", 1),
        ("a.b.c.d.e()", 1),
        ("torch.a.b.c.d", 0),
    ],
)
def test_chain_check_can_fail(source: str, wrong: int):
    assert len(check_chains("megatron_flex/model/x.py", source)) == wrong


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megatron_flex/__init__.py", "from megatron_flex.model import FlexModel"),
        ("megatron_flex/runtime/taps.py", "from megatron_flex.runtime.clock import Clock"),
        ("megatron_flex/runtime/taps.py", "from .clock import Clock"),
        ("megatron_flex/runtime/taps.py", "from ..layout import Layout"),
        ("megatron_flex/runtime/taps.py", "from megatron_flex import layout"),
        ("megatron_flex/cpu/cuda.py", "from megatron_flex.errors import FlexError"),
        (
            "megatron_flex/cli.py",
            "import torch\nimport megatron_flexible\nfrom megatron_flex.model import FlexModel",
        ),
    ],
)
def test_rows_check_can_pass(path: str, source: str):
    assert check_rows(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        (
            "megatron_flex/model.py",
            "def f():\n    from megatron.core import parallel_state",
            "only in adapters",
        ),
        ("megatron_flex/model.py", "import megatron", "only in adapters"),
        ("megatron_flex/adapters/fairscale.py", "import fairscale.nn", "only inside functions"),
        ("megatron_flex/adapters/megatron.py", "class A:\n    import apex", "only inside functions"),
        (
            "megatron_flex/adapters/megatron.py",
            "try:\n    import apex\nexcept ImportError:\n    pass",
            "only inside",
        ),
        (
            "megatron_flex/launch/run.py",
            "import importlib as i\ni.import_module('megatron.core')",
            "only inside",
        ),
        ("megatron_flex/launch/run.py", "def f(x=__import__('megatron')): ...", "only inside"),
        ("megatron_flex_patches/fc1.py", "import transformer_engine.pytorch as te", "only inside functions"),
    ],
)
def test_upstream_check_can_fail(path: str, source: str, said: str):
    (message,) = check_upstream(path, source)
    assert said in message


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megatron_flex/adapters/megatron.py", "def f():\n    from megatron.core import parallel_state"),
        (
            "megatron_flex/launch/run.py",
            "if TYPE_CHECKING:\n    from megatron.core import ModelParallelConfig",
        ),
        ("megatron_flex/model.py", "from megatron_flex.runtime import taps"),
        ("megatron_flex/adapters/megatron.py", "from megatron_flex.adapters.megatron import mesh"),
        ("megatron_flex_patches/fc1.py", "async def f():\n    import fairscale"),
    ],
)
def test_upstream_check_can_pass(path: str, source: str):
    assert check_upstream(path, source) == []


def test_sizes_check_can_fail():
    longest = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert check_sizes("megatron_flex/a.py", longest) == []
    (message,) = check_sizes("megatron_flex/a.py", "class A:\n" + indent(longest + "    x = 1\n", "    "))
    assert f"f has {MAX_FUNCTION_LINES + 1} lines" in message

    assert check_sizes("megatron_flex/a.py", "x = 1\n" * MAX_FILE_LINES) == []
    (message,) = check_sizes("megatron_flex/a.py", "x = 1\n" * (MAX_FILE_LINES + 1))
    assert f"{MAX_FILE_LINES + 1} lines without docstrings" in message

    rest = MAX_LINES_WITH_DOCSTRINGS - MAX_FILE_LINES
    described = '"""Six\nlines.\n\n\n\n"""\n' + "x = 1\n" * MAX_FILE_LINES
    assert check_sizes("megatron_flex/a.py", described) == []
    (message,) = check_sizes("megatron_flex/a.py", described + '"""No docstring."""\n')
    assert f"{MAX_FILE_LINES + 1} lines without docstrings" in message
    assert (
        check_sizes("megatron_flex/a.py", '"""' + "\n" * (rest - 1) + '"""\n' + "x = 1\n" * MAX_FILE_LINES)
        == []
    )
    (message,) = check_sizes("megatron_flex/a.py", '"""' + "\n" * rest + '"""\n' + "x = 1\n" * MAX_FILE_LINES)
    assert f"{MAX_LINES_WITH_DOCSTRINGS + 1} lines," in message


DIAGRAM = """
```
cli/                           the command line
launch/                        the doors
compat/                        another interface
alignment/                     two frameworks
model · compare                FlexModel and HookFunction
page · plot                    pictures
estimate · figures             their numbers
edits · lens · view · conversion  ready-made
runtime/                       taps · hooks
adapters/ · dump/ · statistics/  one file per framework │ manifest
collectives                    gather and scatter
sites                          names
layout · mesh · progress · gpt_names       pure
errors · handles · config · notebook_html · text_table · points
```
"""


@pytest.mark.parametrize(
    ("old", "new", "agrees"),
    [
        ("", "", True),
        ("· points", "· points · version", True),
        ("mesh · progress ", "mesh · cpu · progress ", True),
        ("collectives  ", "collectives · cpu  ", False),
        ("layout · mesh", "mesh · layout", False),
        ("runtime/", "running/", False),
        ("errors · handles · config · notebook_html · text_table · points\n", "", False),
        ("· points\n", "· points\nattic\n", False),
        ("cli/ ", "launch/ ", False),
    ],
)
def test_diagram_check(old: str, new: str, agrees: bool):
    assert (check_diagram("# Title\n" + DIAGRAM.replace(old, new, 1) + "text\n") == []) is agrees


def test_import_probe_can_fail(tmp_path: Path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    sources = {
        "patches_call": "import torch; torch.nn.Module.__call__ = lambda self: None",
        "patches_collective": "import torch.distributed as d; d.all_reduce = lambda t: None",
        "patches_excepthook": "import sys; sys.excepthook = print",
        "adds_global_hook": "from torch.nn.modules.module import *; register_module_forward_hook(print)",
        "loads_upstream": "import megatron",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)

    report = import_report(*sources, path=tmp_path)

    assert report["patches_call"]["changed"] == ["torch.nn.Module.__call__"]
    assert report["patches_collective"]["changed"] == ["torch.distributed.all_reduce"]
    assert report["patches_excepthook"]["changed"] == ["sys.excepthook"]
    assert report["adds_global_hook"]["changed"] == ["torch.nn.modules.module._global_forward_hooks"]
    assert upstream_among(report["loads_upstream"]["loaded"]) == ["megatron"]
