"""Settings from YAML; an error is one line with the file, the line number and the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch.launch_settings import (
    DumpSettings,
    EditSettings,
    Settings,
    SettingsPart,
    StatisticsSettings,
)

SETTINGS_PARTS: dict[str, type[SettingsPart]] = {
    "edits": EditSettings,
    "dumps": DumpSettings,
    "statistics": StatisticsSettings,
}
KeyPath = tuple[str | int, ...]  # the keys and list indices that lead to a value
KeyLines = dict[KeyPath, int]  # the line number of each value's key
MAX_FILE_VALUES = 10_000  # values in a file; nested aliases can expand to billions
YAML_TAG_PREFIX = "tag:yaml.org,2002:"
SCALAR_TAGS = {"null", "bool", "int", "float", "str", "timestamp", "value", "merge"}
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def read_settings_file(path: str | PathLike[str]) -> dict[str, Any]:
    """The settings in a YAML file, as plain values; relative paths remain relative.

    Raises:
        FlexError: the file cannot be read, is not YAML, or has an invalid key or value.
    """
    name = fspath(path)
    lines: KeyLines = {}
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise FlexError(f"{name}: {error.strerror}; --flex-config takes a YAML file") from error
    except UnicodeDecodeError as error:
        raise FlexError(f"{name}: byte {error.start} is not text in UTF-8; write it as YAML") from error
    except yaml.reader.ReaderError as error:
        raise FlexError(f"{name}: {error.reason} at {error.position}; write it as YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name}:{mark.line + 1}"
        raise FlexError(f"{place}: no YAML: {error.problem or error.context}") from error
    if root is None:
        raise FlexError(f"{name} is empty; write keys such as `sites:`, or leave --flex-config out")
    if not isinstance(root, yaml.MappingNode):
        raise FlexError(
            f"{name}:{_line_number(root)}: must map keys to values, such as `sites: [decoder.layers.*]`"
        )
    values = _NodeReader(name, lines).value(root, ())

    def where(at: KeyPath) -> str:
        line = next(lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in lines)
        return ":".join([name, str(line), f" {_dotted_path(at)}"])

    return validate_settings(values, where, lambda at: lines.get(at, 0)).model_dump(exclude_unset=True)


class _NodeReader:
    """Converts the YAML nodes of a file to plain values.

    Numbers are decimal, and `1:30` is a string, whereas YAML 1.1 would read it as a base 60 number.
    """

    def __init__(self, name: str, lines: KeyLines) -> None:
        self.name, self.lines = name, lines
        self.inside: list[yaml.Node] = []
        self.count = 0

    def value(self, node: yaml.Node, at: KeyPath) -> Any:
        self.lines.setdefault(at, _line_number(node))
        self.count += 1
        if self.count > MAX_FILE_VALUES:
            raise self.wrong(node, at, f"there are more than {MAX_FILE_VALUES} values")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, at)
        if any(node is outer for outer in self.inside):
            raise self.wrong(node, at, "holds itself")
        self.inside.append(node)
        out = self.mapping(node, at) if isinstance(node, yaml.MappingNode) else self.items(node, at)
        self.inside.pop()
        return out

    def items(self, node: Any, at: KeyPath) -> list[Any]:
        if node.tag != f"{YAML_TAG_PREFIX}seq":
            raise self.wrong(node, at, f"the tag {node.tag} is not read")
        return [self.value(item, (*at, n)) for n, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        if node.tag != f"{YAML_TAG_PREFIX}map":
            raise self.wrong(node, at, f"the tag {node.tag} is not read")
        out: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.wrong(key, at, "a key must be a name")
            path = (*at, key.value)
            if key.value in out:
                raise self.wrong(key, path, f"occurs twice, first on line {self.lines[path]}")
            self.lines[path] = _line_number(key)
            out[key.value] = self.value(value, path)
        return out

    def scalar(self, node: yaml.ScalarNode, at: KeyPath) -> Any:
        kind, text = node.tag.removeprefix(YAML_TAG_PREFIX), node.value
        if kind not in SCALAR_TAGS:
            raise self.wrong(node, at, f"the tag {node.tag} is not read")
        if kind == "null":
            return None
        if kind == "bool":
            return BOOLEAN_WORDS.get(text.lower(), text)
        if kind == "int" and text.isdecimal() and str(int(text)) == text:
            return int(text)
        return text

    def wrong(self, node: yaml.Node, at: KeyPath, rule: str) -> FlexError:
        return FlexError(
            ": ".join(filter(None, [f"{self.name}:{_line_number(node)}", _dotted_path(at), rule]))
        )


def validate_settings(
    values: Mapping[str, Any], where: Callable[[KeyPath], str], order: Callable[[KeyPath], int] = lambda _: 0
) -> Settings:
    """Validate plain values and build the settings.

    Args:
        values: the values by field name.
        where: returns the description of a key path for an error message.
        order: sort key of key paths; of several errors the first is reported.

    Raises:
        FlexError: a field does not exist, or its value is invalid.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first: Any = min(error.errors(include_url=False), key=lambda e: order(e["loc"]))
        raise FlexError(f"{where(first['loc'])}: {_describe_validation_error(first)}") from None


def _describe_validation_error(error: Mapping[str, Any]) -> str:
    kind, shown = error["type"], " ".join(repr(error["input"]).split())
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if kind == "extra_forbidden":
        known = _known_keys(error["loc"])
        return f"no such key{suggest_nearest(str(error['loc'][-1]), known) or '; known: ' + ', '.join(known)}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "literal_error":
        return f"{shown} is not one of {error['ctx']['expected']}"
    words = {
        "missing": "is required",
        "greater_than_equal": f"{shown} is less than {error.get('ctx', {}).get('ge')}",
        "int_type": f"{shown} is not a whole number",
        "int_parsing": f"{shown} is not a whole number",
        "int_from_float": f"{shown} is not a whole number",
        "bool_type": f"{shown} is neither true nor false",
        "bool_parsing": f"{shown} is neither true nor false",
        "string_type": f"{shown} is not text",
        "path_type": f"{shown} is not a path",
        "tuple_type": f"{shown} is not a list",
        "model_type": f"{shown} must map keys to values",
        "dict_type": f"{shown} must map keys to values",
    }
    return words.get(kind, str(error["msg"]))


def _known_keys(at: KeyPath) -> list[str]:
    """The valid keys at the location of an unknown key."""
    part: type[SettingsPart] = SETTINGS_PARTS[str(at[0])] if len(at) > 1 else Settings
    return list(part.model_fields)


def _dotted_path(at: KeyPath) -> str:
    return ".".join(map(str, at))


def _line_number(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
