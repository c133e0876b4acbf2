"""The line of user code that raised an error, and errors in the backward pass of user code."""

from __future__ import annotations

import sysconfig
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

PACKAGE_FOLDER = str(Path(__file__).parents[2])
TORCH_FOLDER = str(Path(torch.__file__).parent)
STDLIB_FOLDER = sysconfig.get_paths()["stdlib"]
SITE_PACKAGES = "site-packages"
MAX_NODES = 10_000  # bounds the visited nodes of an edit's graph


def find_user_line(error: BaseException) -> tuple[str, int] | None:
    """The file and line of the user code in which an error was raised, rather than of the code that it
    called.

    User code is the folder of the first file in the traceback that is not of torch, the standard library or
    this package, with its subfolders. Code without a file (`python -c`, `exec`, a prompt) counts separately.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [f for f in frames if not _is_library(f.filename)]
    if not user_frames:
        return None
    first = user_frames[0].filename
    home = _folder(first)
    near = [
        f for f in user_frames if f.filename == first or (home is not None and _is_below(f.filename, home))
    ]
    frame = [f for f in near if SITE_PACKAGES in first or SITE_PACKAGES not in f.filename][-1]
    return frame.filename, frame.lineno or 0


def _folder(file: str) -> Path | None:
    """The folder of a file; None for a name in angle brackets, which is not a file."""
    return None if file.startswith("<") else Path(file).absolute().parent


def _is_below(file: str, home: Path) -> bool:
    folder = _folder(file)
    return folder is not None and folder.is_relative_to(home)


def _is_library(file: str) -> bool:
    return file.startswith((PACKAGE_FOLDER, TORCH_FOLDER, "<frozen")) or (
        file.startswith(STDLIB_FOLDER) and SITE_PACKAGES not in file
    )


def format_user_line(error: BaseException) -> str:
    """The file and line as text; the line of this package, if no user code raised the error."""
    line = find_user_line(error)
    if line is None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = last.filename, last.lineno or 0
    return f"{line[0]}:{line[1]}"


def guard_backward(edited: Tensor, inputs: Tensor, keep: Callable[[BaseException], None]) -> None:
    """Record errors of a user's autograd Functions, as the other ranks would wait for a rank that raises.

    A backward pass that raises then returns no gradient, and the step continues to its end.

    Args:
        edited: the result of an editing function.
        inputs: the function's input, where the search of the graph ends.
        keep: called with each error.
    """
    stop, todo = inputs.grad_fn, deque([edited.grad_fn])
    visited: set[Any] = set()
    while todo and len(visited) < MAX_NODES:
        node: Any = todo.popleft()
        if node is stop or node in visited:
            continue
        visited.add(node)
        if isinstance(node, BackwardCFunction):
            if vars(type(node))["_forward_cls"].__module__.startswith("megatron_flex."):
                continue  # the package's node of another site: not this edit
            if "apply" not in vars(node):
                vars(node)["apply"] = partial(_apply_guarded, weakref.ref(node), keep)
        for following, _ in node.next_functions:
            if following is not None and following is not stop:
                todo.append(following)


def _apply_guarded(
    reference: weakref.ref[Any], keep: Callable[[BaseException], None], *gradients: Any
) -> Any:
    node = reference()
    assert node is not None
    try:
        return type(node).apply(node, *gradients)
    except Exception as error:  # recorded: all ranks raise it at the end of the step
        keep(error)
        return (None,) * len(node.needs_input_grad)
