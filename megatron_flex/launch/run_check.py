"""`megatron-flex run --dry`: the checks of a run that need neither its processes nor its model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_flex.dump.writer.run_creation import list_begun_runs
from megatron_flex.errors import FlexError
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.script_runner import parse_argv
from megatron_flex.launch.settings_resolver import ResolvedSettings, resolve_settings
from megatron_flex.sites import check_pattern
from megatron_flex.wording import count_words


def check_run(words: Sequence[str]) -> list[str]:
    """Check the script and our flags: whether they exist, can be parsed and are consistent.

    Editing functions are imported, as the run does it before the model is built. The script is not run, and
    its own flags are not checked, but for a layer that `--num-layers` does not have.

    Args:
        words: the script or `-m MODULE`, its flags, and ours among them.

    Returns:
        What was checked, in lines.

    Raises:
        FlexError: the run would end with this error.
    """
    settings, rest = parse_argv(words)
    lines = [_check_script(rest)]
    for pattern in dict.fromkeys(_list_patterns(settings)):
        check_pattern(pattern)
        _check_layer(pattern, rest)
    if settings.idle:
        return [*lines, "flags: no flag of megatron_flex; the script would run without hooks"]
    return [*lines, *_describe_settings(settings, resolve_settings(settings))]


def _check_script(words: Sequence[str]) -> str:
    if words[0] == "-m":
        name = words[1].partition(".")[0]
        if find_spec(name) is None:
            raise FlexError(f"no module {name!r} on Python's path; install it, or run from its folder")
        return f"module {words[1]}: there"
    path = Path(words[0])
    if path.is_dir():
        return f"script {path}: a folder, which Python runs by its __main__.py"
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise FlexError(f"{path}, line {error.lineno}: {error.msg}; Python would not start it") from None
    except (OSError, ValueError) as error:
        raise FlexError(f"{path} cannot be read as Python: {error}") from None
    return f"script {path}: can be parsed"


def _list_patterns(settings: Settings) -> Iterator[str]:
    yield from settings.sites
    yield from (edit.site for edit in settings.edits if edit.site)
    for dump in settings.dumps:
        yield from (*dump.sites, *dump.parameters)
    if settings.statistics is not None:
        yield from (*settings.statistics.sites, *settings.statistics.parameters)
    if settings.list_sites is not None:
        yield settings.list_sites


def _check_layer(pattern: str, words: Sequence[str]) -> None:
    """Refuse a layer beyond the number that the script's flags give."""
    matched = re.match(r"decoder\.layers\.(\d+)(?=[.:]|$)", pattern)
    given = [
        after if word == "--num-layers" else word.partition("=")[2]
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == "--num-layers"
    ]
    if matched and given and given[-1].isdecimal() and int(matched[1]) >= int(given[-1]):
        raise FlexError(
            f"{pattern!r} names layer {matched[1]}, and --num-layers is {given[-1]}; of decoder.layers there "
            f"are 0-{int(given[-1]) - 1}"
        )


def _describe_settings(settings: Settings, resolved: ResolvedSettings) -> Iterator[str]:
    """A line for each edit, dump and statistics."""
    for hook in resolved.edits:
        yield f"edit: {hook.describe()}"
    for dump in resolved.dumps:
        runs = len(list_begun_runs(Path(dump.path))) if Path(dump.path).is_dir() else 0
        more = f"; continues the {count_words(runs, 'run')} in it" if runs else ""
        yield f"dump: {count_words(len(dump.sites), 'pattern')} to {dump.path}{more}"
    for one in resolved.statistics:
        yield f"statistics: {count_words(len(one.sites), 'pattern')} to {one.path}"
    if resolved.nonfinite is not None:
        yield f"values that are not finite: {resolved.nonfinite.mode}"
    if not (resolved.edits or resolved.dumps or resolved.statistics or resolved.nonfinite):
        checks = ("list_sites", "estimate", "verify", "gradient_norms", "weights_digest", "align")
        names = [name.replace("_", "-") for name in checks if getattr(settings, name)]
        yield f"checks before training: {', '.join(names)}"
