"""The flags of launchers: made of the settings' fields, parsed from a command line, and put into settings."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch.flag_prefix import (
    FLAG_PREFIX,
    LONG_PREFIX,
    PREFIX_VARIABLE,
    flag_prefix,
    option_dest,
    to_standard_option,
    with_prefix,
)

try:
    from pydantic.fields import FieldInfo

    from megatron_flex.launch.launch_settings import (
        FLAG_KEY,
        RUN_GROUP,
        SITES_GROUP,
        DumpSettings,
        Settings,
        SettingsPart,
        StatisticsSettings,
        merge_values,
    )
    from megatron_flex.launch.settings_file import read_settings_file, validate_settings
except ModuleNotFoundError as error:
    raise FlexError(
        f"flags need pydantic and pyyaml ({error}): pip install 'megatron-flex[launch]'"
    ) from error


FLAGS_VARIABLE = "MEGATRON_FLEX_FLAGS"  # flags in the environment, as they would be typed
HELP_WIDTH = 98

FlagArity = Literal["none", "one", "once", "optional", "many", "edit"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag.

    Attributes:
        name: without `--flex-`.
        field: where its value goes among the settings; `dump` is the one dump that flags can describe.
        group: of the help.
        words: the help.
        metavar: what its values are called.
        takes: `none`; `one`, of which the last counts, or `once`; `optional`; `many`; an `edit`, which is
            one word or two, and may be repeated.
        value: what is meant where no value is given.
    """

    name: str
    field: tuple[str, ...]
    group: str
    words: str
    metavar: str = ""
    takes: FlagArity = "one"
    value: Any = True

    @property
    def option(self) -> str:
        """As it is typed."""
        return flag_prefix() + self.name

    @property
    def long_option(self) -> str:
        """With the longer prefix, which no script uses."""
        return LONG_PREFIX + self.name

    @property
    def dest(self) -> str:
        """Its name in a namespace of argparse."""
        return option_dest(self.name)

    @property
    def usage(self) -> str:
        """With what it takes."""
        shown = {"none": "", "optional": f"[{self.metavar}]", "many": f"{self.metavar} ..."}
        return f"{self.option} {shown.get(self.takes, self.metavar)}".strip()


def _flag_of_field(path: tuple[str, ...], field: FieldInfo) -> Flag | None:
    """The flag of a field; None if it has none."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or FLAG_KEY not in extra:
        return None
    flag = cast(dict[str, Any], extra[FLAG_KEY])
    kind = _without_none(field.annotation)
    words = get_args(kind) if get_origin(kind) is Literal else ()
    takes, value = flag["takes"], True if flag["value"] is None else flag["value"]
    if not takes:
        takes = "none" if kind is bool or len(words) == 1 else "many" if get_origin(kind) is tuple else "one"
    if len(words) == 1:
        value, words = words[0], ()
    name, group, metavar = flag["name"], flag["group"], flag["metavar"] or "|".join(words)
    return Flag(name, path, group, field.description or "", metavar, takes, value)


def _without_none(kind: Any) -> Any:
    """The type of an optional field, without what only validates it."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (k for k in get_args(kind) if k is not type(None))
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


PARTS_WITH_FLAGS: dict[str, tuple[str, type[SettingsPart]]] = {
    "dumps": ("dump", DumpSettings),
    "statistics": ("statistics", StatisticsSettings),
}


def _flags_of_settings() -> Iterator[Flag]:
    """The flags of all fields, in the order of the fields."""
    for name, field in Settings.model_fields.items():
        part, kind = PARTS_WITH_FLAGS.get(name, (name, None))
        fields = {(part,): field} if kind is None else {(part, n): f for n, f in kind.model_fields.items()}
        for path, one in fields.items():
            flag = _flag_of_field(path, one)
            if flag is not None:
                yield flag


FLAGS = (
    Flag(
        "config",
        (),
        SITES_GROUP,
        "YAML with any of the settings; flags add to it and override it.",
        "FILE",
        takes="many",
    ),
    *_flags_of_settings(),
    Flag("help", (), RUN_GROUP, "Print this, and exit.", takes="none"),
)
FLAGS_BY_OPTION = {FLAG_PREFIX + f.name: f for f in FLAGS}  # by their standard options
FLAGS_BY_LONG_OPTION = {f.long_option: f for f in FLAGS}


def format_help() -> str:
    """All flags by group, in lines of at most 100 columns."""
    out = [
        "usage: python -m megatron_flex.launch SCRIPT [flags of the script] [flags of megatron_flex]",
        "",
        *wrap(
            "Hooks for a training script as it is. These flags are removed from the command line; the script "
            f"gets the others as they are. {LONG_PREFIX}NAME is the same as {flag_prefix()}NAME. "
            f"{FLAGS_VARIABLE} may hold flags, too. "
            f"{PREFIX_VARIABLE}=--hooks- replaces {FLAG_PREFIX} by --hooks-.",
            HELP_WIDTH,
        ),
    ]
    for group in dict.fromkeys(f.group for f in FLAGS):
        out += ["", f"{group}:"]
        for flag in (f for f in FLAGS if f.group == group):
            lines = wrap(with_prefix(flag.words), HELP_WIDTH - 38)
            out.append(f"  {flag.usage:35} {lines[0]}")
            out += [" " * 38 + line for line in lines[1:]]
    return "\n".join(out) + "\n"


ParsedFlags = list[tuple[Flag, list[str]]]  # flags as they were given, each with its words


def split_argv(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take our flags out of a command line.

    `--flex-x=y` has that value, `--flex-x` those that follow it, up to a word that begins with a dash and is
    no number. `--megatron-flex-x` is the same flag. Arguments after `--` are not ours, nor are words that
    begin with `--flex-` and are no flag of ours: Megatron's elastic models have such flags.

    Returns:
        The values, as `collect_flag_values` puts them, and all other words as they were.

    Raises:
        FlexError: `--megatron-flex-` with a name that there is not, or a flag with too few or too many
            values.
    """
    parsed: ParsedFlags = []
    rest: list[str] = []
    words = WordStream(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif is_own_flag(word):
            parsed.append(_parse_flag(word, words))
        else:
            rest.append(word)
    return collect_flag_values(parsed), rest


def is_own_flag(word: str) -> bool:
    """Whether a word of a command line is a flag of ours: a full name, or anything with the longer prefix."""
    return word.startswith(LONG_PREFIX) or to_standard_option(word.partition("=")[0]) in FLAGS_BY_OPTION


def describe_foreign_flags(words: Sequence[str]) -> str:
    """The flags of a script that begin like ours, as a line; empty if there are none.

    Args:
        words: what `split_argv` left.
    """
    before = words[: list(words).index("--")] if "--" in words else words
    names = dict.fromkeys(w.partition("=")[0] for w in before if w.startswith(flag_prefix()))
    if not names:
        return ""
    known = [flag.option for flag in FLAGS]
    nearest = {name: suggest_nearest(name, known, 1).removeprefix("; ") for name in names}
    told = ", ".join(f"{name} ({near})" if near else name for name, near in nearest.items())
    return f"passed on to the script, as no flag of megatron_flex has this name: {told}"


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
    flag = FLAGS_BY_OPTION.get(to_standard_option(option), FLAGS_BY_LONG_OPTION.get(option))
    if flag is None:
        raise _make_unknown_error(option, FLAGS_BY_LONG_OPTION)
    if glued:
        if flag.takes == "none":
            raise FlexError(f"{word}: {option} takes no value")
        return flag, [value]
    most = {"none": 0, "one": 1, "once": 1, "optional": 1}
    return flag, words.values(most.get(flag.takes, len(words.left)))


def _make_unknown_error(option: str, known: Mapping[str, Flag]) -> FlexError:
    return FlexError(f"no flag {option}{suggest_nearest(option, known)}; --flex-help lists them")


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
                f"{flag.option} is given twice, {into[name]} and {words[0]}; --flex-config can have several"
            )
        else:
            into[name] = words[0] if words else flag.value
    return out


def _parse_edit_words(words: list[str]) -> dict[str, str]:
    """`SITE EDIT` in one word or two, or an edit alone, in which there may be blanks around a `|`."""
    if len(words) == 1:
        words = "|".join(part.strip() for part in words[0].split("|")).split(maxsplit=1)
    if len(words) > 2:
        raise FlexError(f"--flex-edit {shlex.join(words)}: give SITE and EDIT, and nothing after them")
    return {"site": words[0], "edit": words[1]} if len(words) == 2 else {"edit": words[0]}


def settings_from_argv(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[Settings, list[str]]:
    """What a command line wants of us: files of --flex-config, then MEGATRON_FLEX_FLAGS, then flags.

    With --flex-help the first rank prints the help, and all end.

    Args:
        argv: the arguments after the script's name.
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
        raise FlexError(
            f"{_first_given_option('dump', dump)} says how to dump, and --flex-dump DIR is not there"
        )
    statistics = found.get("statistics")
    if statistics is not None and "path" not in statistics and not out.get("statistics"):
        raise FlexError(
            f"{_first_given_option('statistics', statistics)} says how to measure, and --flex-stats is "
            "not there"
        )
    settings = validate_settings(
        merge_values(out, found if dump is None else {**found, "dumps": [dump]}), _option_of_field
    )
    settings.check_sites()
    return settings


def load_settings(*files: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Return settings without a command line: of YAML files, then of MEGATRON_FLEX_FLAGS.

    For processes that no launcher starts with flags: an actor of Ray, a notebook. `sys.argv` is not read.

    Args:
        files: files as for --flex-config; of several the later ones add to the earlier ones.
        environment: variables; those of the process if None.

    Raises:
        FlexError: a file or the variable has something that there is not, or cannot be.

    Examples:
        >>> from megatron_flex.launch import install, load_settings
        >>> from pathlib import Path
        >>> length = Path("hooks.yaml").write_text("sites: [decoder.layers.*]")
        >>> installation = install(load_settings("hooks.yaml"))
        >>> installation.uninstall()
    """
    environment = os.environ if environment is None else environment
    found = _read_environment(environment)
    files_first = [*(os.fspath(file) for file in files), *found.pop("config", [])]
    return settings_from_values({**found, "config": files_first}, {})


def settings_of(namespace: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings that a namespace holds, on top of those in files and the environment.

    Returns:
        The settings.

    Raises:
        FlexError: its parser did not have our flags, or as for `settings_from_values`.

    Examples:
        >>> import argparse
        >>> from megatron_flex.launch import settings_of
        >>> parser = add_flex_args(argparse.ArgumentParser())
        >>> settings_of(parser.parse_args(["--flex-sites", "decoder.layers.*"]), {}).sites
        ('decoder.layers.*',)
    """
    if not has_flags(namespace):
        raise FlexError("the namespace has no flags of megatron_flex; call mf.add_flex_args(parser) first")
    parsed: ParsedFlags = []
    for flag in FLAGS:
        value = getattr(namespace, flag.dest, None)
        if value is None or value is False:
            continue
        if flag.takes in ("edit", "once"):
            parsed += [(flag, [v] if isinstance(v, str) else list(v)) for v in value]
        elif flag.takes == "none":
            parsed.append((flag, []))
        else:
            parsed.append((flag, [value] if isinstance(value, str) else list(value)))
    return settings_from_values(collect_flag_values(parsed), environment)


def has_flags(namespace: argparse.Namespace) -> bool:
    """Whether the parser that made the namespace has our flags."""
    return hasattr(namespace, FLAGS[0].dest)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        words = shlex.split(environment.get(FLAGS_VARIABLE, ""))
    except ValueError as error:
        raise FlexError(
            f"{FLAGS_VARIABLE}={environment[FLAGS_VARIABLE]!r}: {error}; write it as in a shell"
        ) from None
    prefix = flag_prefix()
    words = [prefix + w.removeprefix(FLAG_PREFIX) if w.startswith(FLAG_PREFIX) else w for w in words]
    try:
        found, rest = split_argv(words)
    except FlexError as error:
        raise FlexError(f"{FLAGS_VARIABLE}: {error}") from None
    if rest and rest[0].startswith(prefix):
        raise FlexError(
            f"{FLAGS_VARIABLE}: {_make_unknown_error(rest[0].partition('=')[0], FLAGS_BY_OPTION)}"
        )
    if rest:
        raise FlexError(f"{FLAGS_VARIABLE}: {rest[0]!r} is not one of our flags, which begin with {prefix}")
    return found


def _first_given_option(part: str, found: Mapping[str, Any]) -> str:
    return next(f.option for f in FLAGS if f.field[:1] == (part,) and f.field[1] in found)


def _option_of_field(field: tuple[str | int, ...]) -> str:
    """The flag that sets a field, or what it is called in YAML."""
    names = [str(f) for f in field if isinstance(f, str)]
    names[0] = "dump" if names[0] == "dumps" else names[0]
    found = [f.option for f in FLAGS if f.field and list(f.field) == names[: len(f.field)]]
    return found[0] if found else ".".join(names)


__all__ = [
    "FLAGS",
    "FLAGS_VARIABLE",
    "collect_flag_values",
    "format_help",
    "load_settings",
    "settings_from_argv",
    "settings_from_values",
    "split_argv",
]
