"""Presets from text, for command lines: `scale=2`, `steer=vector.safetensors@4.0@positions=-1`, `a | b`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from typing import Any

from megatron_flex.edits import replacement_edits, value_edits, vector_edits
from megatron_flex.edits.edit_base import Edit
from megatron_flex.edits.preset_base import Preset, chain
from megatron_flex.errors import HookError, suggest_nearest
from megatron_flex.ranges import parse_numbers

# A new preset: its class in a `*_edits` module, an entry here, and its name in `edits/__init__`.
PRESETS: dict[str, type[Edit]] = {
    "scale": value_edits.scale,
    "steer": vector_edits.steer,
    "zero": value_edits.zero,
    "mean": value_edits.mean,
    "resample": replacement_edits.resample,
    "ablate_heads": value_edits.ablate_heads,
    "ablate_neurons": value_edits.ablate_neurons,
    "project_out": vector_edits.project_out,
    "project": vector_edits.project,
    "linear_map": vector_edits.linear_map,
    "clamp": value_edits.clamp,
    "noise": value_edits.noise,
    "patch": replacement_edits.patch,
    "swap": replacement_edits.swap,
    "low_rank": replacement_edits.low_rank,
    "splice": replacement_edits.splice,
}


def parse(text: str) -> Preset:
    """Parse a preset.

    `name`, or `name=value`, followed by `@value` for each further argument or `@argument=value`; `|`
    between presets that run one after the other. Indices are `3`, `0,3`, `-2` or `0:4`; tensors are files.

    Returns:
        The preset, or a `chain` of presets.

    Raises:
        HookError: there is no such preset or argument, or the value is not valid.

    Examples:
        >>> edits.parse("scale=0.5@positions=-1 | clamp=-2@2")
        scale(0.5, positions=-1) | clamp(-2.0, 2.0)
    """
    presets = [_parse_preset(part.strip()) for part in text.split("|")]
    return presets[0] if len(presets) == 1 else chain(*presets)


def _parse_preset(text: str) -> Preset:
    head, *rest = text.split("@")
    name, given, first = head.partition("=")
    name = name.strip()
    if name not in PRESETS:
        raise HookError(f"no preset {name!r}{suggest_nearest(name, PRESETS)}; known: {', '.join(PRESETS)}")
    kind = PRESETS[name]
    takes = {f.name: f for f in fields(kind) if f.init}
    by_place = [f for f in takes.values() if not f.kw_only]
    arguments: dict[str, Any] = {}
    for value in [first, *rest] if given else rest:
        named = re.match(r"(\w+)=(.*)", value)
        if named:
            field, value = takes.get(named[1]), named[2]
        else:
            field = next((f for f in by_place if f.name not in arguments), None)
        if field is None or field.name in arguments:
            what = f"argument {named[1]!r}" if named else f"place for {value!r}"
            raise HookError(f"{name} has no {what}; it takes {', '.join(takes)}")
        arguments[field.name] = _convert_argument(name, field, value.strip())
    try:
        return kind(**arguments)
    except TypeError:
        missing = [f.name for f in by_place if f.name not in arguments]
        raise HookError(f"{name} needs {', '.join(missing)}: {name}=...") from None


def _convert_argument(name: str, field: Field[Any], text: str) -> Any:
    kind = str(field.type).partition(" ")[0]
    try:
        return ARGUMENT_CONVERTERS.get(kind, str)(text)
    except ValueError:
        raise HookError(f"{name}: {field.name}={text!r} is not {ARGUMENT_DESCRIPTIONS[kind]}") from None


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError
    return text.lower() in ("true", "yes", "1")


ARGUMENT_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "int": int,
    "bool": _parse_bool,
    "Indices": partial(parse_numbers, flag="indices", from_end=True),
}
ARGUMENT_DESCRIPTIONS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "Indices": "indices: 3, or 0,3, or 0:4",
}
