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
from megatron_flex.errors import FlexError, suggest_nearest

FILE_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[\w.]+)")
MODULE_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
FILE_MODULE_PREFIX = "_megatron_flex_file_"  # what modules of files are called, so that none is hidden by another


def load_function(reference: str) -> Any:
    """What an edit names: a function, or a preset, or several behind one another with `|`.

    A file is run under a name of its own, once, and only if it is named.

    Raises:
        FlexError: there is no such thing, a module or file cannot be imported, or it is not callable.
    """
    parts = [part.strip() for part in reference.split("|")]
    if len(parts) == 1:
        return _load_one(reference.strip())
    return edits.chain(*(_load_one(part) for part in parts))


def _load_one(reference: str) -> Any:
    in_file = FILE_FUNCTION.fullmatch(reference)
    found = in_file or MODULE_FUNCTION.fullmatch(reference)
    if found is None:
        _reject_missing_colon(reference)
        return edits.parse(reference)
    module = _import_file(found["file"]) if in_file else _import_named_module(found["module"])
    out = _find_attribute(module, found["name"], reference.rpartition(":")[0])
    if not callable(out):
        raise FlexError(f"{reference} is of type {type(out).__name__}, not a function; name what can be called")
    return out


def _reject_missing_colon(reference: str) -> None:
    """Raise for what was meant as a function, and is not written so."""
    if re.search(r"\.py(:.*)?$", reference) and "=" not in reference:
        raise FlexError(f"{reference}: name the function in a file behind a colon, file.py:function")
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", reference):
        module, _, name = reference.rpartition(".")
        raise FlexError(f"{reference}: name a function behind a colon, {module}:{name}")


def _find_attribute(module: ModuleType, name: str, where: str) -> Any:
    out: Any = module
    for step in name.split("."):
        if not hasattr(out, step):
            public = [n for n in vars(out) if not n.startswith("_")] if hasattr(out, "__dict__") else []
            raise FlexError(f"{where} has no {name!r}{suggest_nearest(step, public)}")
        out = getattr(out, step)
    return out


def _import_named_module(name: str) -> ModuleType:
    with _report_import_errors(name):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise FlexError(
                f"no module {error.name!r} on Python's path; install it, or name a file: file.py:function"
            ) from None


def _import_file(reference: str) -> ModuleType:
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        raise FlexError(f"no file {reference} on this rank; every rank reads it, from the working directory")
    name = f"{FILE_MODULE_PREFIX}{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        with _report_import_errors(reference):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _report_import_errors(what: str) -> Iterator[None]:
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
