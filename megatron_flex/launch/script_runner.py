"""Runs a training script like `python SCRIPT`, without the `--flex-` flags, and with hooks."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from megatron_flex import cpu
from megatron_flex.errors import FlexError
from megatron_flex.launch import flags
from megatron_flex.launch.flags import describe_foreign_flags, format_help
from megatron_flex.launch.installation import Installation, install
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.rank_errors import ERROR_STATUS, current_rank, print_error, print_notice

USAGE = "python -m megatron_flex.launch SCRIPT [its flags] [--flex-...], or -m MODULE instead of SCRIPT"
WITHOUT_GPU = (
    "this machine has no GPU: add --flex-cpu, with --transformer-impl local --distributed-backend gloo "
    "--no-rope-fusion --no-gradient-accumulation-fusion (docs/start.md)"
)
OWN_PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
RUNNER_FILES = (__file__, runpy.__file__, os.path.join(os.path.dirname(__file__), "__main__.py"))


def run(argv: Sequence[str]) -> int:
    """Run a script with hooks, in this process.

    The script has the same environment as without this package: its own name and flags in `sys.argv`, byte
    for byte, its folder on the path, itself as `__main__`.

    Args:
        argv: the script and its flags, with `--flex-` flags anywhere among them.

    Returns:
        The exit status of the process: 2 for a FlexError, which is printed in one line; 1 for an exception of
        the script, whose traceback is printed.

    Raises:
        SystemExit: if the script raises it.
        KeyboardInterrupt: if the script raises it.
    """
    try:
        settings, words = parse_argv(argv)
        installed = install(settings, holds=True)
    except FlexError as error:
        print_error(error)
        return ERROR_STATUS
    status = 0
    try:
        _execute(words)
    except SystemExit as left:
        if left.code not in (None, 0):
            installed.running.abort()
            raise
    except Exception as error:  # the script's or a FlexError: both are reported below
        installed.running.abort()
        status = _report_exception(installed, error)
    except BaseException:
        installed.running.abort()
        raise
    return status or _finish(installed)


def parse_argv(argv: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings of a command line, and the script with its own flags.

    Raises:
        FlexError: no script is named, or it is not there; or as for `settings_from_argv`.
    """
    if list(argv[:1]) in (["-h"], ["--help"]):
        sys.stdout.write(format_help() if current_rank() == 0 else "")
        raise SystemExit(0)
    parsed, words = flags.settings_from_argv(argv)
    named = words[1:] if words[:1] == ["-m"] else words
    if not named or named[0].startswith("-"):
        what = f"{named[0]} is not a script" if named else "no script"
        raise FlexError(f"{what}: {USAGE}; our flags come after it")
    if named is words and not Path(named[0]).exists():
        raise FlexError(f"no script {named[0]}: {USAGE}; our flags come after it")
    print_notice(describe_foreign_flags(words))
    return parsed, words


def _execute(words: list[str]) -> None:
    """Run the script or module that the words name, like Python itself."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _finish(installed: Installation) -> int:
    """End the training after the script, unless the end was recorded already."""
    installed.finish()
    if installed.failure is None:
        return 0
    print_error(installed.failure)
    return ERROR_STATUS


def _report_exception(installed: Installation, error: Exception) -> int:
    """Report an exception: a FlexError in one line, others like Python."""
    if error is installed.failure:
        _print_cause(error)
        print_error(error)
        return ERROR_STATUS
    _print_traceback(error, _is_runner_file)
    if _lacks_gpu(error):
        print_notice(WITHOUT_GPU)
    return 1


def _lacks_gpu(error: Exception) -> bool:
    """Whether Megatron or torch failed because this machine has no GPU."""
    named = any(word in str(error) for word in ("CUDA", "NVIDIA"))
    return named and not torch.cuda.is_available() and not cpu.is_enabled()


def _print_cause(error: BaseException) -> None:
    """Print the traceback of an exception in a user's function, if that is the cause of the error."""
    while isinstance(error, FlexError) and error.__cause__ is not None:
        error = error.__cause__
    if (
        not isinstance(error, FlexError)
        and _trim_traceback(error.__traceback__, _is_package_file) is not None
    ):
        _print_traceback(error, _is_package_file)


def _print_traceback(error: BaseException, leave_out: Callable[[str], bool]) -> None:
    """Print a traceback from the first frame of the user's code."""
    trace = _trim_traceback(error.__traceback__, leave_out) or error.__traceback__
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(trace), trace)  # Python prints the error's own one


def _trim_traceback(trace: TracebackType | None, leave_out: Callable[[str], bool]) -> TracebackType | None:
    """A traceback without its leading frames in files that `leave_out` matches."""
    while trace is not None and leave_out(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_runner_file(file: str) -> bool:
    return file in RUNNER_FILES or file == "<frozen runpy>"


def _is_package_file(file: str) -> bool:
    return file.startswith((OWN_PACKAGE_FOLDER, "<frozen ")) or file == importlib.__file__
