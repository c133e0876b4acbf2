"""The flags of launchers: one table made of the declared settings, and one parser.

Each flag has two names, `--flex-NAME` and `--megatron-flex-NAME`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from types import UnionType
from typing import Any, Literal, NoReturn, Union, cast, get_args, get_origin

from megatron_flex.dump.dump_settings import Dump
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch import FLAG_PREFIX, LONG_PREFIX
from megatron_flex.settings import Setting, list_settings
from megatron_flex.statistics.statistics_settings import Statistics

try:
    from pydantic.fields import FieldInfo

    from megatron_flex.launch.launch_settings import (
        DUMP_GROUP,
        FLAG_KEY,
        RUN_GROUP,
        SITES_GROUP,
        STATISTICS_GROUP,
        Settings,
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
        name: without the prefix.
        field: where its value goes among the settings; `dump` is the one dump that flags can describe.
        group: of the help.
        help: what it does.
        metavar: what its values are called.
        takes: `none`; `one`, of which the last counts, or `once`; `optional`; `many`; an `edit`, which is
            one word or two, and may be repeated.
        value: what is meant where no value is given.
    """

    name: str
    field: tuple[str, ...]
    group: str
    help: str
    metavar: str = ""
    takes: FlagArity = "one"
    value: Any = True

    @property
    def option(self) -> str:
        """The flag as it is typed."""
        return FLAG_PREFIX + self.name

    @property
    def long_option(self) -> str:
        """The flag with the longer prefix, which no script uses."""
        return LONG_PREFIX + self.name

    @property
    def dest(self) -> str:
        """The attribute of its values in a namespace."""
        return f"flex_{self.name}".replace("-", "_")

    @property
    def usage(self) -> str:
        """The flag as help texts show it, such as `--flex-dump DIR`."""
        shown = {"none": "", "optional": f"[{self.metavar}]", "many": f"{self.metavar} ..."}
        return f"{self.option} {shown.get(self.takes, self.metavar)}".strip()


def _make_flag(
    name: str,
    field: tuple[str, ...],
    group: str,
    help: str,
    kind: type,
    words: tuple[str, ...],
    metavar: str,
    takes: str,
    value: Any,
) -> Flag:
    """A flag; what it takes follows from the type of its values unless `takes` says so."""
    value = True if value is None else value
    if len(words) == 1:
        kind, value, words = bool, words[0], ()
    arities: dict[type, str] = {bool: "none", tuple: "many"}
    arity = takes or arities.get(kind, "one")
    return Flag(name, field, group, help, metavar or "|".join(words), cast(FlagArity, arity), value)


def _flag_of_field(name: str, field: FieldInfo) -> Flag | None:
    """The flag of a field of `Settings`; None if it has none."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict) or FLAG_KEY not in extra:
        return None
    flag = cast(dict[str, Any], extra[FLAG_KEY])
    kind = _without_none(field.annotation)
    words = get_args(kind) if get_origin(kind) is Literal else ()
    kind = get_origin(kind) or kind
    return _make_flag(
        flag["name"],
        (name,),
        flag["group"],
        field.description or "",
        kind,
        words,
        flag["metavar"],
        flag["takes"],
        flag["value"],
    )


def _without_none(kind: Any) -> Any:
    """The type of an optional field, without what only validates it."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (k for k in get_args(kind) if k is not type(None))
    return kind.__origin__ if hasattr(kind, "__metadata__") else kind


def _flag_of_setting(part: str, group: str, setting: Setting[Any, Any]) -> Flag:
    """The flag of a setting of `Dump` or `Statistics`."""
    s = setting
    field = (part, s.name)
    return _make_flag(s.flag, field, group, s.help, s.kind.plain, s.kind.words, s.metavar, s.takes, s.value)


DECLARED_PARTS: dict[str, tuple[str, str, type]] = {
    "dumps": ("dump", DUMP_GROUP, Dump),
    "statistics": ("statistics", STATISTICS_GROUP, Statistics),
}


def _list_flags() -> Iterator[Flag]:
    """The table: the flags of all settings, in the order of their declarations."""
    text = "YAML with any of the settings; flags add to it and override it."
    yield Flag("config", (), SITES_GROUP, text, "FILE", takes="many")
    for name, field in Settings.model_fields.items():
        if name in DECLARED_PARTS:
            part, group, declared = DECLARED_PARTS[name]
            yield from (_flag_of_setting(part, group, s) for s in list_settings(declared) if s.flag)
        elif (flag := _flag_of_field(name, field)) is not None:
            yield flag
    yield Flag("help", (), RUN_GROUP, "Print this, and exit.", takes="none")


FLAGS = tuple(_list_flags())
FLAGS_BY_OPTION = {option: f for f in FLAGS for option in (f.option, f.long_option)}


def format_help() -> str:
    """All flags by group, in lines of at most 100 columns."""
    out = [
        "usage: python -m megatron_flex.launch SCRIPT [flags of the script] [flags of megatron_flex]",
        "",
        *wrap(
            "Hooks for a training script as it is. These flags are removed from the command line; the script "
            f"receives the others as they are. {LONG_PREFIX}NAME is the same as {FLAG_PREFIX}NAME. "
            f"{FLAGS_VARIABLE} may hold flags, too.",
            HELP_WIDTH,
        ),
    ]
    for group in dict.fromkeys(f.group for f in FLAGS):
        out += ["", f"{group}:"]
        for flag in (f for f in FLAGS if f.group == group):
            lines = wrap(flag.help, HELP_WIDTH - 38)
            out.append(f"  {flag.usage:35} {lines[0]}")
            out += [" " * 38 + line for line in lines[1:]]
    return "\n".join(out) + "\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, by groups; of a name that it has already, only the longer one."""
    groups: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(f"megatron_flex: {flag.group}")
        existing = parser._option_string_actions  # a flag of the script's own keeps its name
        names = [n for n in (flag.option, flag.long_option) if n not in existing]
        groups[flag.group].add_argument(*names, dest=flag.dest, **_argparse_arguments(flag))


def _argparse_arguments(flag: Flag) -> dict[str, Any]:
    out: dict[str, Any] = {"help": flag.help.replace("%", "%%")}
    if flag.name == "help":
        return {**out, "action": _HelpAction}
    if flag.takes == "none":
        return {**out, "action": "store_true"}
    out["metavar"] = flag.metavar
    more: dict[str, dict[str, Any]] = {
        "optional": {"nargs": "?", "const": flag.value},
        "many": {"nargs": "+", "action": "extend"},
        "once": {"action": "append"},
        "edit": {"nargs": "+", "action": "append", "metavar": "EDIT"},
    }
    return {**out, **more.get(flag.takes, {})}


class _HelpAction(argparse.Action):
    """Prints the help of the `--flex-` flags only, on the first rank, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(format_help())
        raise SystemExit(0)


class _FlagParser(argparse.ArgumentParser):
    """Parses our flags alone; a value may be a number below 0, or numbers of which the first is."""

    def __init__(self) -> None:
        super().__init__(prog="megatron_flex", allow_abbrev=False, add_help=False)
        self._negative_number_matcher = re.compile(r"-[0-9]")  # argparse's own does not know `-1,5`
        add_flags(self)

    def error(self, message: str) -> NoReturn:
        option, _, what = message.removeprefix("argument ").partition(": ")
        flag = FLAGS_BY_OPTION.get(option.partition("/")[0])
        raise FlexError(f"{message}" if flag is None else f"{flag.usage}: {what}")


def split_argv(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take our flags out of a command line.

    Arguments after `--` are not ours, nor are words that begin with `--flex-` and are not a flag of ours:
    Megatron's elastic models have such flags.

    Returns:
        The namespace of our flags, and all other words as they were.

    Raises:
        FlexError: `--megatron-flex-` with an unknown name, or a flag with too few or too many values.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    namespace, rest = _FlagParser().parse_known_args(words[:end])
    for word in rest:
        if word.startswith(LONG_PREFIX):
            raise _make_unknown_error(word.partition("=")[0])
    return namespace, rest + words[end:]


def is_own_flag(word: str) -> bool:
    """Whether a word of a command line is a flag of ours: a full name, or anything with the longer prefix."""
    return word.startswith(LONG_PREFIX) or word.partition("=")[0] in FLAGS_BY_OPTION


def describe_foreign_flags(words: Sequence[str]) -> str:
    """The flags of a script that begin like ours, as a line; empty if there are none.

    Args:
        words: what `split_argv` left.
    """
    script_words = words[: list(words).index("--")] if "--" in words else words
    names = dict.fromkeys(w.partition("=")[0] for w in script_words if w.startswith(FLAG_PREFIX))
    if not names:
        return ""
    known = [flag.option for flag in FLAGS]
    nearest = {name: suggest_nearest(name, known, 1).removeprefix("; ") for name in names}
    listed = ", ".join(f"{name} ({near})" if near else name for name, near in nearest.items())
    return f"passed on to the script, as no flag of megatron_flex has this name: {listed}"


def _make_unknown_error(option: str) -> FlexError:
    prefix = LONG_PREFIX if option.startswith(LONG_PREFIX) else FLAG_PREFIX
    known = [name for name in FLAGS_BY_OPTION if name.startswith(prefix)]
    return FlexError(f"no flag {option}{suggest_nearest(option, known)}; --flex-help lists them")


def has_flags(namespace: argparse.Namespace) -> bool:
    """Whether the parser that made the namespace has our flags."""
    return hasattr(namespace, FLAGS[0].dest)


def values_of(namespace: argparse.Namespace) -> dict[str, Any]:
    """Plain values of flags: those of `Settings`, with `dump` for a dump, and `config` if given.

    Raises:
        FlexError: the parser of the namespace did not have our flags; a value is empty, or is one of two
            where one is allowed.
    """
    if not has_flags(namespace):
        raise FlexError("the namespace has no flags of megatron_flex; call mf.add_flex_args(parser) first")
    out: dict[str, Any] = {}
    for flag in FLAGS:
        value = getattr(namespace, flag.dest, None)
        if value is None or value is False:
            continue
        *outer, name = flag.field or (flag.name,)
        into = out
        for key in outer:
            into = into.setdefault(key, {})
        into[name] = _value_of_flag(flag, value)
    return out


def _value_of_flag(flag: Flag, value: Any) -> Any:
    """A value of a namespace as `Settings` takes it."""
    if flag.takes == "none":
        return flag.value
    lists = value if isinstance(value, list) else [value]
    words = [w for v in lists for w in (v if isinstance(v, list) else [v])]
    if any(not word.strip() for word in words):
        raise FlexError(f"{flag.option}: an empty word is not a {flag.metavar}")
    if flag.takes == "edit":
        return [_parse_edit_words(words) for words in lists]
    if flag.takes == "once":
        if len(set(words)) > 1:
            raise FlexError(
                f"{flag.option} occurs twice, with {words[0]} and {words[1]}; use --flex-config for several"
            )
        return words[0]
    return value


def _parse_edit_words(words: list[str]) -> dict[str, str]:
    """`SITE EDIT` in one word or two, or an edit alone, in which there may be blanks around a `|`."""
    if len(words) == 1:
        words = "|".join(part.strip() for part in words[0].split("|")).split(maxsplit=1)
    if len(words) > 2:
        raise FlexError(f"--flex-edit {shlex.join(words)}: give SITE and EDIT only")
    return {"site": words[0], "edit": words[1]} if len(words) == 2 else {"edit": words[0]}


def settings_from_argv(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[Settings, list[str]]:
    """The settings of a command line: files of --flex-config, then MEGATRON_FLEX_FLAGS, then flags.

    With --flex-help the first rank prints the help, and all exit.

    Args:
        argv: the arguments after the script's name.
        environment: variables; those of the process if None.

    Returns:
        The settings, and the words that are not ours.

    Raises:
        FlexError: something that there is not, or cannot be.
    """
    namespace, rest = split_argv(argv)
    return settings_of(namespace, environment), rest


def settings_from_values(values: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of values as `values_of` returns them, on top of files and the environment."""
    environment = os.environ if environment is None else environment
    values = merge_values(_read_environment(environment), values)
    out: dict[str, Any] = {}
    for path in values.pop("config", []):
        out = merge_values(out, read_settings_file(path))
    dump = values.pop("dump", None)
    if dump is not None and "path" not in dump:
        raise FlexError(f"{_first_given_option('dump', dump)} needs --flex-dump DIR")
    statistics = values.get("statistics")
    if statistics is not None and "path" not in statistics and not out.get("statistics"):
        raise FlexError(f"{_first_given_option('statistics', statistics)} needs --flex-stats")
    settings = validate_settings(
        merge_values(out, values if dump is None else {**values, "dumps": [dump]}), _option_of_field
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
    values = _read_environment(environment)
    files_first = [*(os.fspath(file) for file in files), *values.pop("config", [])]
    return settings_from_values({**values, "config": files_first}, {})


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
    return settings_from_values(values_of(namespace), environment)


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        words = shlex.split(environment.get(FLAGS_VARIABLE, ""))
    except ValueError as error:
        raise FlexError(
            f"{FLAGS_VARIABLE}={environment[FLAGS_VARIABLE]!r}: {error}; write it as in a shell"
        ) from None
    try:
        namespace, rest = split_argv(words)
        values = values_of(namespace)
    except FlexError as error:
        raise FlexError(f"{FLAGS_VARIABLE}: {error}") from None
    if rest and rest[0].startswith(FLAG_PREFIX):
        raise FlexError(f"{FLAGS_VARIABLE}: {_make_unknown_error(rest[0].partition('=')[0])}")
    if rest:
        raise FlexError(
            f"{FLAGS_VARIABLE}: {rest[0]!r} is not one of our flags, which begin with {FLAG_PREFIX}"
        )
    return values


def _first_given_option(part: str, values: Mapping[str, Any]) -> str:
    return next(f.option for f in FLAGS if f.field[:1] == (part,) and f.field[1] in values)


def _option_of_field(field: tuple[str | int, ...]) -> str:
    """The flag that sets a field, or what it is called in YAML."""
    names = [str(f) for f in field if isinstance(f, str)]
    names[0] = "dump" if names[0] == "dumps" else names[0]
    options = [f.option for f in FLAGS if f.field and list(f.field) == names[: len(f.field)]]
    return options[0] if options else ".".join(names)


__all__ = [
    "FLAGS",
    "FLAGS_VARIABLE",
    "format_help",
    "load_settings",
    "settings_from_argv",
    "settings_from_values",
    "settings_of",
    "split_argv",
    "values_of",
]
