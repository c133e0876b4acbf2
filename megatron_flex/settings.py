"""Declarations of settings: one line in a class is an argument, a YAML key, and where it says so a flag.

`Dump` and `Statistics` are dataclasses whose fields are `Setting`s. The constructor converts and checks each
argument by its kind; `launch` derives flags and YAML, manifests record the values, and estimates take them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic, TypeVar, overload

from megatron_flex.ranges import check_choice, check_count, normalize_path
from megatron_flex.sites import Pattern, describe_pattern

Given = TypeVar("Given")
Value = TypeVar("Value")
REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Kind(Generic[Given, Value]):
    """What a setting holds, in Python, as text and in JSON.

    Attributes:
        convert: from the name of the setting and the argument to the value.
        plain: the type in YAML: str, bool, int, or tuple for names.
        words: the words of a text, if there are only these.
        parse: from a text and the name of the setting to the argument, where they differ.
        record: from the value to JSON.
    """

    convert: Callable[[str, Given], Value]
    plain: type = str
    words: tuple[str, ...] = ()
    parse: Callable[[str, str], Given] | None = None
    record: Callable[[Value], Any] = lambda value: value


def choice(*words: str, optional: bool = False) -> Kind[Any, Any]:
    """One of the words, or None if that is allowed."""

    def convert(name: str, given: Any) -> Any:
        check_choice(name, given, (None, *words) if optional else words)
        return given

    return Kind(convert, words=words)


def _list_patterns(name: str, given: Sequence[Pattern] | Pattern) -> list[Pattern]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


PATH: Kind[str | PathLike[str], str] = Kind(normalize_path)
OPTIONAL_PATH: Kind[str | PathLike[str] | None, str | None] = Kind(
    lambda name, given: None if given is None else normalize_path(name, given)
)
PATTERNS: Kind[Sequence[Pattern] | Pattern, list[Pattern]] = Kind(
    _list_patterns, tuple, record=lambda patterns: [describe_pattern(p) for p in patterns]
)
NAMES: Kind[Iterable[str], tuple[str, ...]] = Kind(lambda _, given: tuple(given), tuple)
COUNT: Kind[int, int] = Kind(check_count, int)
SWITCH: Kind[bool, bool] = Kind(lambda _, given: given, bool)


class Setting(Generic[Given, Value]):
    """A field of a class of settings: `Setting[type of the argument, type of the value]`.

    Args:
        kind: what it holds.
        default: the default of the argument.
        flag: the name of the flag, without `--flex-`; "" if it has none.
        help: the help of the flag.
        metavar: what the flag's values are called; the words of the kind if empty.
        takes: as in `launch.flags.Flag`, if it does not follow from the kind.
        value: what is meant by the flag without a value.
        shared: whether `Settings` has a setting of this name, which counts in YAML where this is absent.
        recorded: whether the manifest has it.
        estimated: whether `megatron-flex estimate` has an option for it; that needs a help.
    """

    def __init__(
        self,
        kind: Kind[Given, Value],
        default: Given | Any = REQUIRED,
        *,
        flag: str = "",
        help: str = "",
        metavar: str = "",
        takes: str = "",
        value: Any = None,
        shared: bool = False,
        recorded: bool = True,
        estimated: bool = True,
    ) -> None:
        self.kind, self.default, self.name = kind, default, ""
        self.flag, self.help, self.metavar, self.takes, self.value = flag, help, metavar, takes, value
        self.shared, self.recorded, self.estimated = shared, recorded, estimated and bool(help)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        declared = ast.parse(owner.__annotations__[name], mode="eval").body
        if isinstance(declared, ast.Subscript) and isinstance(declared.slice, ast.Tuple):
            # The dataclass puts it into the signature of `__init__`, which help() shows.
            owner.__annotations__[name] = ast.unparse(declared.slice.elts[0])

    @overload
    def __get__(self, obj: None, owner: type) -> Given: ...

    @overload
    def __get__(self, obj: object, owner: type) -> Value: ...

    def __get__(self, obj: object | None, owner: type) -> Given | Value:
        if obj is not None:
            value: Value = obj.__dict__[self.name]
            return value
        if self.default is REQUIRED:
            raise AttributeError(self.name)  # dataclass then knows of no default
        default: Given = self.default
        return default

    def __set__(self, obj: object, given: Given) -> None:
        obj.__dict__[self.name] = self.kind.convert(self.name, given)

    def read(self, plain: Any) -> Any:
        """The argument for a value in YAML or of a flag."""
        return plain if plain is None or self.kind.parse is None else self.kind.parse(plain, self.name)


def list_settings(kind: type) -> list[Setting[Any, Any]]:
    """The settings that a class declares, in the order of their declaration."""
    attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return [value for value in attributes.values() if isinstance(value, Setting)]


def record_settings(settings: object) -> dict[str, Any]:
    """The settings that a manifest has, as plain values."""
    return {
        s.name: s.kind.record(getattr(settings, s.name)) for s in list_settings(type(settings)) if s.recorded
    }
