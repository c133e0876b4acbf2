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
    name = hashlib.sha256(pickle.dumps((function.__module__, function.__qualname__, args))).hexdigest()[:32]
    path = _folder() / name
    if not path.exists():
        with FileLock(f"{path}.lock", timeout=600):
            if not path.exists():
                (answer,) = run(1, function, *args, timeout=timeout, alone=alone)
                draft = path.with_suffix(".draft")
                draft.write_bytes(pickle.dumps(answer))
                draft.rename(path)
    return pickle.loads(path.read_bytes())


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
    truth["edited"] = {s: once(oracle.edited, case, s, alone=alone) for s in edits}
    return truth


def is_alone(case: Case) -> bool:
    """Whether a case needs ranks of its own: what stands in for Transformer Engine stays in Megatron."""
    return case.te or bool(case.mla)


def _folder() -> Path:
    if FOLDER not in os.environ:  # a run without tests/conftest.py, such as a benchmark
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="truths-")
    return Path(os.environ[FOLDER])
