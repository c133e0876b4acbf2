"""The flags of launchers: what takes them out of a command line, and makes settings of them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch.table import FLAGS_BY_OPTION, FLAGS, FLAG_PREFIX, FLAGS_VARIABLE, Flag, format_help

if TYPE_CHECKING:
    from megatron_flex.launch.launch_settings import Settings

__all__ = ["FLAGS", "FLAGS_VARIABLE", "format_help", "settings_from_argv", "settings_from_values", "split_argv", "collect_flag_values"]

ParsedFlags = list[tuple[Flag, list[str]]]  # flags as they were given, each with its words


def split_argv(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take our flags out of a command line.

    `--flex-x=y` has that value, `--flex-x` those that follow it, up to a word that begins with a dash and is
    no number. What is behind `--` is not ours.

    Returns:
        The values, as `collect_flag_values` puts them, and all other words as they were.

    Raises:
        FlexError: a flag that there is not, or one with too few or too many values.
    """
    parsed: ParsedFlags = []
    rest: list[str] = []
    words = WordStream(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif not word.startswith(FLAG_PREFIX):
            rest.append(word)
        else:
            parsed.append(_parse_flag(word, words))
    return collect_flag_values(parsed), rest


class WordStream(Iterator[str]):
    """Words one after the other, of which the next can be looked at."""

    def __init__(self, words: Sequence[str]) -> None:
        self.left = list(words)[::-1]

    def __next__(self) -> str:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def values(self, most: int) -> list[str]:
        """As many as there are, at most so many, before the next flag."""
        out: list[str] = []
        while self.left and len(out) < most and not _is_flag(self.left[-1]):
            out.append(self.left.pop())
        return out


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _parse_flag(word: str, words: WordStream) -> tuple[Flag, list[str]]:
    option, glued, value = word.partition("=")
    flag = FLAGS_BY_OPTION.get(option)
    if flag is None:
        raise FlexError(f"no flag {option}{suggest_nearest(option, FLAGS_BY_OPTION)}; --flex-help lists them")
    if glued:
        if flag.takes == "none":
            raise FlexError(f"{word}: {option} takes no value")
        return flag, [value]
    most = {"none": 0, "one": 1, "once": 1, "optional": 1}
    return flag, words.values(most.get(flag.takes, len(words.left)))


def collect_flag_values(parsed: ParsedFlags) -> dict[str, Any]:
    """Plain values of flags: those of `Settings`, with `dump` for a dump, and `config` and `help` if given.

    Raises:
        FlexError: a flag has too few or too many values.
    """
    out: dict[str, Any] = {}
    for flag, words in parsed:
        if any(not w.strip() for w in words):
            raise FlexError(f"{flag.option}: an empty word is no {flag.metavar}")
        if not words and flag.takes not in ("none", "optional"):
            raise FlexError(f"{flag.option} needs a value: {flag.usage}")
        *outer, name = flag.field or (flag.name,)
        into = out
        for key in outer:
            into = into.setdefault(key, {})
        if flag.takes == "many":
            into.setdefault(name, []).extend(words)
        elif flag.takes == "edit":
            into.setdefault(name, []).append(_parse_edit_words(words))
        elif flag.takes == "once" and into.get(name, *words) not in words:
            raise FlexError(
                f"{flag.option} is given twice, {into[name]} and {words[0]}; --flex-config can say several"
            )
        else:
            into[name] = words[0] if words else flag.value
    return out


def _parse_edit_words(words: list[str]) -> dict[str, str]:
    """`SITE EDIT` in one word or two, or an edit alone, in which there may be blanks around a `|`."""
    if len(words) == 1:
        words = "|".join(part.strip() for part in words[0].split("|")).split(maxsplit=1)
    if len(words) > 2:
        raise FlexError(f"--flex-edit {shlex.join(words)}: say SITE and EDIT, and nothing behind them")
    return {"site": words[0], "edit": words[1]} if len(words) == 2 else {"edit": words[0]}


def settings_from_argv(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[Settings, list[str]]:
    """What a command line wants of us: files of --flex-config, then MEGATRON_FLEX_FLAGS, then flags.

    With --flex-help the first rank prints the help, and all end.

    Args:
        argv: words behind the script's name.
        environment: variables; those of the process if None.

    Returns:
        The settings, and the words that are not ours.

    Raises:
        FlexError: something that there is not, or cannot be.
    """
    found, rest = split_argv(argv)
    return settings_from_values(found, environment), rest


def settings_from_values(found: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of values as `split_argv` gives them, on top of files and the environment."""
    try:
        from megatron_flex.launch.settings_file import validate_settings, read_settings_file
        from megatron_flex.launch.launch_settings import merge_values
    except ModuleNotFoundError as error:
        raise FlexError(
            f"flags need pydantic and pyyaml ({error}): pip install 'megatron-flex[launch]'"
        ) from error
    environment = os.environ if environment is None else environment
    found = merge_values(_read_environment(environment), found)
    if found.pop("help", False):
        if environment.get("RANK", "0") == "0":
            sys.stdout.write(format_help())
        raise SystemExit(0)
    out: dict[str, Any] = {}
    for path in found.pop("config", []):
        out = merge_values(out, read_settings_file(path))
    dump = found.pop("dump", None)
    if dump is not None and "path" not in dump:
        raise FlexError(f"{_first_given_option('dump', dump)} says how to dump, and --flex-dump DIR is not there")
    statistics = found.get("statistics")
    if statistics is not None and "path" not in statistics and not out.get("statistics"):
        raise FlexError(
            f"{_first_given_option('statistics', statistics)} says how to measure, and --flex-stats is not there"
        )
    return validate_settings(merge_values(out, found if dump is None else {**found, "dumps": [dump]}), _option_of_field)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        words = shlex.split(environment.get(FLAGS_VARIABLE, ""))
    except ValueError as error:
        raise FlexError(f"{FLAGS_VARIABLE}: {str(error).lower()}; write it as in a shell") from None
    try:
        found, rest = split_argv(words)
    except FlexError as error:
        raise FlexError(f"{FLAGS_VARIABLE}: {error}") from None
    if rest:
        raise FlexError(f"{FLAGS_VARIABLE}: {rest[0]!r} is no flag of ours, which begin with {FLAG_PREFIX}")
    return found


def _first_given_option(part: str, found: Mapping[str, Any]) -> str:
    return next(f.option for f in FLAGS if f.field[:1] == (part,) and f.field[1] in found)


def _option_of_field(field: tuple[str | int, ...]) -> str:
    """The flag that sets a field, or what it is called in YAML."""
    names = [str(f) for f in field if isinstance(f, str)]
    names[0] = "dump" if names[0] == "dumps" else names[0]
    found = [f.option for f in FLAGS if f.field and list(f.field) == names[: len(f.field)]]
    return found[0] if found else ".".join(names)
