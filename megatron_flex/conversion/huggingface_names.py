"""Which module of a Megatron model has the parameters of a module of Hugging Face, by the names of both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from megatron_flex.conversion.architectures import ARCHITECTURES

_FIELD = re.compile(r"\\{(layer|expert)\\}")  # a field in a module's name after re.escape: \{layer\}


def translate_module(name: str) -> list[str]:
    """The Megatron modules that a module of a Hugging Face architecture corresponds to; likely ones first.

    Args:
        name: the module's name, with or without the architecture's prefix, and with numbers or `*` for layers
            and experts.

    Examples:
        >>> from megatron_flex.conversion.huggingface_names import translate_module
        >>> translate_module("model.layers.1.mlp.up_proj")
        ['decoder.layers.1.mlp.linear_fc1']
        >>> translate_module("model.layers.*.self_attn")
        ['decoder.layers.*.self_attention']
    """
    modules = (
        module.format_map({"layer": "*", "expert": "*"} | match.groupdict())
        for pattern, module in _list_modules()
        if (match := pattern.fullmatch(name))
    )
    return list(dict.fromkeys(modules))


@cache
def _list_modules() -> list[tuple[re.Pattern[str], str]]:
    """Patterns of names of Hugging Face, and Megatron's names; modules with parameters, then those around."""
    levels: list[dict[tuple[str, str], None]] = []
    for prefix, hf_name, name in _list_parameters():
        depth = 0
        while "." in hf_name and "." in name:
            hf_name, name = hf_name.rpartition(".")[0], name.rpartition(".")[0]
            if len(levels) == depth:
                levels.append({})
            hf_pattern = (
                f"(?:{re.escape(prefix)})?{_FIELD.sub(_match_field, re.escape(hf_name.removeprefix(prefix)))}"
            )
            levels[depth][hf_pattern, name] = None
            depth += 1
    return [(re.compile(hf_pattern), name) for level in levels for hf_pattern, name in level]


def _list_parameters() -> Iterator[tuple[str, str, str]]:
    """The prefix of an architecture, and the names of a parameter of its own and of Megatron's."""
    for architecture in ARCHITECTURES.values():
        for rule in architecture.rules:
            for hf_name in rule.theirs:
                yield architecture.prefix, hf_name, rule.ours


def _match_field(field: re.Match[str]) -> str:
    return rf"(?P<{field[1]}>\d+|\*)"
