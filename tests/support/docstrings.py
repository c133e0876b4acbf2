"""What docstrings of public callables leave out: arguments, results and examples; arguments that are none."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_flex
from tests.support import examples

PAGES = Path(__file__).parents[2] / "docs" / "api"
MIN_ARGUMENTS = 2  # one argument may be described in the summary
SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
RESULT = re.compile(r"^(Returns|Yields):$", re.MULTILINE)
SUMMARY_OF_A_RESULT = re.compile(r"(Return|Yield|Iterate)\b")
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)


# Methods that users neither call nor need an example for: the class has one.
CALLED_BY = {
    "the package calls what authors of edits write": re.compile(
        r"edits\.(Edit|Preset|LocalEdit|chain|patch)\.\w+"
    ),
    "the package calls it, and an error in it is one of the hook": re.compile(r"edits\.\w+\.(check|edit)"),
    "the trace itself calls it": re.compile(r"lens\.Trace\.(alias|handle|assign|finish|close)"),
    "Megatron-Bridge calls it": re.compile(r"launch\.megatron_bridge\.FlexCallback\.on_\w+"),
}


def public_callables() -> Iterator[tuple[str, Any]]:
    """The functions and classes of the top level, and the public methods of these classes."""
    for name in megatron_flex.__all__:
        value = getattr(megatron_flex, name)
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", ()):
                yield from _with_methods(f"{name}.{inner}", getattr(value, inner))
        elif callable(value):
            yield from _with_methods(name, value)


def documented() -> dict[str, Any]:
    """The callables of `public_callables` and of every page of the API reference, each once, by name."""
    found = dict(public_callables())
    known = {id(value) for value in found.values()}
    for page in sorted(PAGES.glob("*.md")):
        for path in re.findall(r"^::: megatron_flex\.(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            for name, value in _with_methods(path, _resolve(path)):
                if name not in found and id(value) not in known:
                    found[name] = value
                    known.add(id(value))
    return found


def _resolve(path: str) -> Any:
    """The object at a dotted path in the package, whose modules need not be imported yet."""
    value: Any = megatron_flex
    for step in path.split("."):
        if not hasattr(value, step):
            importlib.import_module(f"{value.__name__}.{step}")
        value = getattr(value, step)
    return value


def _with_methods(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not inspect.isclass(value) and not inspect.isroutine(value):  # data, and aliases of types
        return
    if getattr(value, "_is_protocol", False):
        return
    yield name, value
    if inspect.isclass(value):
        for member, found in vars(value).items():
            if inspect.isroutine(found) and not member.startswith("_"):
                yield f"{name}.{member}", getattr(value, member)


def described(value: Any) -> dict[str, str]:
    """The arguments that a docstring describes, with the section that does."""
    owners = (
        [c for c in value.__mro__ if c.__module__.startswith("megatron_flex")]
        if inspect.isclass(value)
        else [value]
    )
    return {
        name.lstrip("*"): section if owner is value else "Attributes"
        for owner in reversed(owners)
        for section, body in SECTION.findall((inspect.getdoc(owner) or "") + "\n")
        for names in ENTRY.findall(body)
        for name in names.split(", ")
    }


def arguments(value: Any) -> list[str]:
    """The arguments of a callable, without `self`."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.name not in ("self", "cls")]


def gaps(name: str, value: Any) -> list[str]:
    """What the docstring of a callable lacks, a line for each."""
    text = inspect.getdoc(value) or ""
    if text and not value.__doc__:
        return []  # it overrides a method, whose docstring holds
    if not text.strip() or text.startswith(f"{getattr(value, '__name__', '')}("):
        return [f"{name} has no docstring"]
    known, taken = described(value), arguments(value)
    out = [f"{name} has no argument {n}" for n, s in known.items() if s == "Args" and n not in taken]
    missing = [n for n in taken if n not in known and not re.search(rf"\b{n}\b", text)]
    if len(taken) >= MIN_ARGUMENTS or missing != taken:
        out += [f"{name}: {n} is not described" for n in missing]
    return out


def inherits_docstring(value: Any) -> bool:
    """Whether a method overrides one whose docstring is the description."""
    return not value.__doc__ and bool(inspect.getdoc(value))


def result_gap(name: str, value: Any) -> str:
    """The complaint about a callable that returns something and does not say what; empty if there is none."""
    if inspect.isclass(value) or isinstance(value, functools.cached_property) or inherits_docstring(value):
        return ""
    text = inspect.getdoc(value) or ""
    try:
        returned = inspect.signature(value).return_annotation
    except (TypeError, ValueError):
        return ""
    if returned in (None, "None") or RESULT.search(text) or SUMMARY_OF_A_RESULT.match(text):
        return ""
    return f"{name} returns {returned}: give it a Returns section, or a summary that begins with Return"


def example_gap(name: str, value: Any) -> str:
    """The complaint about a callable without an example; empty if it has one, or needs none."""
    if inherits_docstring(value) or any(who.fullmatch(name) for who in CALLED_BY.values()):
        return ""
    if ">>> " in examples.section(inspect.getdoc(value) or ""):
        return ""
    return f"{name} has no example: write Examples: with lines that begin with >>>"


RAISES = re.compile(r"^Raises:$", re.MULTILINE)
# Signals of Python itself: a method of derived classes, the end of an iterator, a broken invariant of ours.
PROTOCOL_ERRORS = {"AssertionError", "NotImplementedError", "StopIteration", "GeneratorExit"}


def raised(value: Any) -> set[str]:
    """The exceptions that a function, or the constructor of a class, raises in its own body, by name."""
    found: set[str] = set()
    bodies = [vars(value).get(n) for n in CONSTRUCTORS] if inspect.isclass(value) else [value]
    for body in bodies:
        function = inspect.unwrap(body) if inspect.isroutine(body) else None
        if function is None or not inspect.isfunction(getattr(function, "__func__", function)):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):  # made by dataclass
            continue
        found |= _raised_in(ast.parse(source).body[0])
    return found - PROTOCOL_ERRORS


def _raised_in(node: ast.AST) -> set[str]:
    """The names of exceptions that code raises, without functions inside it."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            found.add(ast.unparse(child.exc.func).rpartition(".")[2])
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            found |= _raised_in(child)
    return found


def raises_gap(name: str, value: Any) -> str:
    """Which exceptions a callable raises in its own body without a section on it; empty if there is one."""
    names = raised(value)
    if not names or RAISES.search(inspect.getdoc(value) or ""):
        return ""
    return f"{name} raises {', '.join(sorted(names))}, and has no section Raises"
