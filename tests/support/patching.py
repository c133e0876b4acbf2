"""Copies of what is installed, patched, and ranks that import them."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import oracle, pool
from tests.support.elsewhere import Elsewhere


def copy(package: str, folder: Path) -> Path:
    """Copy an installed package, with what is compiled of it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    here = Path(next(iter(spec.submodule_search_locations)))
    shutil.copytree(here, folder / package, copy_function=shutil.copy2)
    return folder / package


def same(left: Any, right: Any) -> bool:
    """Whether two answers of ranks are the same, tensors bit for bit."""
    if isinstance(left, Tensor):
        alike = isinstance(right, Tensor) and left.dtype == right.dtype and left.shape == right.shape
        return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(v, right[k]) for k, v in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """The places in two answers of ranks that are not the same."""
    if same(left, right):
        return []
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [d for k, v in left.items() for d in differences(v, right[k], f"{path}/{k}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [
            d
            for i, pair in enumerate(zip(left, right, strict=True))
            for d in differences(*pair, f"{path}/{i}")
        ]
    return [path]


def both(elsewhere: Elsewhere) -> Callable[..., list[Any]]:
    """As `pool.run`, on what is installed and on the patched copy, which must answer the same bit for bit.

    The single-process truth is asked of what is installed only.
    """

    def run(
        world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, alone: bool = True
    ) -> list[Any]:
        here = pool.run(world, function, *args, timeout=timeout, alone=alone)
        if function is oracle.run:
            return here
        there = elsewhere.run(world, function, *args, timeout=timeout)
        assert differences(here, there) == [], "the patched source does not do what the runtime taps do"
        return there

    return run
