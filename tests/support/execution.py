"""Which modules of the package a test run executes: one is executed once any of its functions is called.

Every process of a run appends the modules that it executes to a file of its own in the folder that the
variable `FLEX_EXECUTED` names. A function is noted at its first call and costs nothing afterwards
(`sys.monitoring`, from Python 3.12 on; nothing is recorded on older ones).
"""

from __future__ import annotations

import ast
import atexit
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = "FLEX_EXECUTED"
ADAPTERS = {"adapters/apex": "apex"}  # how paths begin, and packages that cannot be had without a GPU
PACKAGE = Path(__file__).parents[2] / "megatron_flex"
IS_FUNCTION = 0x1  # of a code object's flags (CO_OPTIMIZED): bodies of modules and classes have it not


class Recorder:
    """The modules of the package that this process executes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._new: set[str] = set()
        self._known: set[str] = set()
        self._root = f"{PACKAGE}{os.sep}"
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "megatron_flex tests")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, self._started)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)
        atexit.register(monitoring.set_events, monitoring.COVERAGE_ID, 0)  # before this module is taken apart

    def _started(self, code: CodeType, offset: int) -> Any:
        if code.co_flags & IS_FUNCTION and code.co_filename.startswith(self._root):
            self._new.add(code.co_filename.removeprefix(self._root))
        return sys.monitoring.DISABLE

    def write(self) -> None:
        """Append what is new to this process's file."""
        new = self._new - self._known
        if new:
            self._known |= new
            with open(self._folder / f"{os.getpid()}", "a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in sorted(new))


def start() -> Recorder | None:
    """Begin to record in this process, if a folder is named and this Python can."""
    folder = os.environ.get(FOLDER)
    if not folder or not hasattr(sys, "monitoring"):
        return None
    if sys.monitoring.get_tool(sys.monitoring.COVERAGE_ID) is not None:  # forked from one that records
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
    return Recorder(Path(folder))


def missing(folder: Path) -> list[str]:
    """The modules with functions of which none was called by any process of a run."""
    seen = {line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    every = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if _has_functions(path)}
    return sorted(path for path in every - seen if not path.startswith(_list_absent_adapters()))


def _list_absent_adapters() -> tuple[str, ...]:
    """How the paths of adapters begin whose packages are not installed here."""
    return tuple(path for path, package in ADAPTERS.items() if find_spec(package) is None)


def _has_functions(path: Path) -> bool:
    """Whether a module has a function that does something: a protocol's methods, say, do nothing."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and not all(_is_empty(s) for s in node.body):
            return True
    return False


def _is_empty(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Pass | ast.Raise)
