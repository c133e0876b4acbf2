"""Functions that a person names: `package.module:function`, `file.py:function`, presets in words."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_flex import edits
from megatron_flex.errors import FlexError, nearest

IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[\w.]+)")
IN_MODULE = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
PRIVATE = "_megatron_flex_file_"  # what modules of files are called, so that none is hidden by another


def function(said: str) -> Any:
    """What an edit names: a function, or a preset, or several behind one another with `|`.

    A file is run under a name of its own, once, and only if it is named.

    Raises:
        FlexError: there is no such thing, a module or file cannot be imported, or it is not callable.
    """
    parts = [part.strip() for part in said.split("|")]
    if len(parts) == 1:
        return _one(said.strip())
    return edits.chain(*(_one(part) for part in parts))


def _one(said: str) -> Any:
    in_file = IN_FILE.fullmatch(said)
    found = in_file or IN_MODULE.fullmatch(said)
    if found is None:
        _hint(said)
        return edits.parse(said)
    module = _of_file(found["file"]) if in_file else _of_module(found["module"])
    out = _attribute(module, found["name"], said.rpartition(":")[0])
    if not callable(out):
        raise FlexError(f"{said} is of type {type(out).__name__}, not a function; name what can be called")
    return out


def _hint(said: str) -> None:
    """Raise for what was meant as a function, and is not written so."""
    if re.search(r"\.py(:.*)?$", said) and "=" not in said:
        raise FlexError(f"{said}: name the function in a file behind a colon, file.py:function")
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", said):
        module, _, name = said.rpartition(".")
        raise FlexError(f"{said}: name a function behind a colon, {module}:{name}")


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    out: Any = module
    for step in name.split("."):
        if not hasattr(out, step):
            public = [n for n in vars(out) if not n.startswith("_")] if hasattr(out, "__dict__") else []
            raise FlexError(f"{where} has no {name!r}{nearest(step, public)}")
        out = getattr(out, step)
    return out


def _of_module(name: str) -> ModuleType:
    with _told(name):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise FlexError(
                f"no module {error.name!r} on Python's path; install it, or name a file: file.py:function"
            ) from None


def _of_file(said: str) -> ModuleType:
    path = Path(said).expanduser().resolve()
    if not path.is_file():
        raise FlexError(f"no file {said} on this rank; every rank reads it, from the working directory")
    name = f"{PRIVATE}{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        with _told(said):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Let what goes wrong in a person's module be told in one line, with file and line."""
    try:
        yield
    except FlexError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything, or be a script that exits
        frames = traceback.extract_tb(error.__traceback__)
        file, line = frames[-1].filename, frames[-1].lineno
        if isinstance(error, SyntaxError) and error.filename:
            file, line = error.filename, error.lineno
        words = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
        raise FlexError(
            f"{what} cannot be imported: {type(error).__name__}: {words} ({file}, line {line})"
        ) from error
