"""What one process says, computed once for all tests that compare with it, in whichever process they run."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.support import oracle
from tests.support.gpt import Case
from tests.support.pool import run

FOLDER = "FLEX_TRUTHS"  # the variable that names the run's folder: pytest's processes share it


def once(function: Callable[..., Any], *args: Any, timeout: float = 120.0, alone: bool = True) -> Any:
    """What `function(*args)` returns on one process; run by the first who asks, of all processes of a run.

    Args:
        function: of a module; its answer depends on nothing but its arguments.
        args: what pickles to the same bytes wherever it is the same.
        timeout: seconds that it may take.
        alone: whether it runs in a process of its own, which ends with it.

    Returns:
        A copy of the answer, so that a test may change it.
    """
    path = _path(function, *args)
    if not path.exists():
        with FileLock(f"{path}.lock", timeout=600):
            if not path.exists():
                (answer,) = run(1, function, *args, timeout=timeout, alone=alone)
                _keep(path, answer)
    return pickle.loads(path.read_bytes())


def each(
    function: Callable[..., Any], case: Case, items: list[str], timeout: float = 120.0, alone: bool = True
) -> dict[str, Any]:
    """What `function(case, items)` returns, which has an answer for each item; each item is computed once.

    Args:
        function: of a module; its answer for an item depends on the case and on that item only.
        case: a case of one process.
        items: the items, such as sites.
        timeout: seconds that all items may take together.
        alone: whether it runs in a process of its own, which ends with it.

    Returns:
        A copy of the answers, by item.
    """
    paths = {item: _path(function, case, item) for item in items}
    if not all(p.exists() for p in paths.values()):
        with FileLock(f"{_path(function, case)}.lock", timeout=600):
            missing = [item for item, path in paths.items() if not path.exists()]
            if missing:
                (answers,) = run(1, function, case, missing, timeout=timeout, alone=alone)
                for item in missing:
                    _keep(paths[item], answers[item])
    return {item: pickle.loads(path.read_bytes()) for item, path in paths.items()}


def of(case: Case, sites: list[str], edits: list[str]) -> oracle.Truth:
    """The truth of a case: as `oracle.run` gives it, put together from what was computed before.

    Weights, losses, values and gradients are computed once for all sites of a model, and the effect of each
    edit by itself, so that topologies of the same model share them whatever sites and edits they ask for.

    Args:
        case: a case of one process.
        sites: the sites whose values and gradients are wanted.
        edits: the sites where the effect of `oracle.edit` is wanted.
    """
    alone = is_alone(case)
    known = oracle.sites_of(case)
    more = sorted(set(sites) - set(known))
    truth: oracle.Truth = once(oracle.run, case, [*known, *more], [], alone=alone)
    for what in ("values", "gradients"):
        truth[what] = {s: t for s, t in truth[what].items() if s in sites}
    truth["edited"] = each(oracle.edited, case, edits, timeout=300, alone=alone)
    return truth


def is_alone(case: Case) -> bool:
    """Whether a case needs ranks of its own: what stands in for Transformer Engine stays in Megatron."""
    return case.te or bool(case.mla)


def _path(function: Callable[..., Any], *args: Any) -> Path:
    """Where an answer is kept."""
    name = hashlib.sha256(pickle.dumps((function.__module__, function.__qualname__, args))).hexdigest()[:32]
    return _folder() / name


def _keep(path: Path, answer: Any) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(answer))
    draft.rename(path)


def _folder() -> Path:
    if FOLDER not in os.environ:  # a run without tests/conftest.py, such as a benchmark
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="truths-")
    return Path(os.environ[FOLDER])
