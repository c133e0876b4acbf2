"""What docstrings of public callables leave out: arguments, results, or names that are no argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import megatron_flex

MIN_ARGUMENTS = 2  # one argument may be described in the summary
SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)


def public_callables() -> Iterator[tuple[str, Any]]:
    """The functions and classes of the top level, and the public methods of these classes."""
    for name in megatron_flex.__all__:
        value = getattr(megatron_flex, name)
        if inspect.ismodule(value):
            for inner in getattr(value, "__all__", ()):
                yield from _with_methods(f"{name}.{inner}", getattr(value, inner))
        elif callable(value):
            yield from _with_methods(name, value)


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
