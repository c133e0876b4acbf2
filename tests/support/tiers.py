"""Which tests are in which tier.

- `scripts/test` (pytest --quick): every kind of claim, and every module of the package executed.
- `scripts/test --all`: everything but what is marked `product`.
- `scripts/coverage_matrix` (pytest --product): the full product of configurations and edits besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Tests of --product alone, by file: minutes for which a shorter test beside them stands (200 kills of
# Megatron's own ranks).
PRODUCT = {
    "test_dump_crash.py": ("test_killed_ranks_leave_no_torn_iteration_and_lose_none",),
}

# Of tests/distributed, tests/launch and tests/browser; all of tests/unit and tests/contract are quick. A file
# with no names is quick as a whole; a name without brackets stands for all its parameters.
QUICK: dict[str, tuple[str, ...]] = {}

# Files that take more than a minute, longest first: they begin first. Then by folder.
LONG: tuple[str, ...] = (
    *("test_compare_bugs.py", "test_costs.py", "test_context.py", "test_parameters.py", "test_matrix.py"),
    *("test_models.py", "test_trainable.py", "test_moe.py", "test_gpu_command.py", "test_cpu_megatron.py"),
)
FOLDERS = ("launch", "distributed", "browser", "contract", "unit")


def is_product(file: str, name: str) -> bool:
    """Whether a test is run in the full product only."""
    return name in PRODUCT.get(file, ())


def is_quick(item: Any) -> bool:
    """Whether a test is in the selection of scripts/test."""
    folder, file = item.path.parent.name, item.path.name
    if folder in ("unit", "contract"):
        return True
    names = QUICK.get(file)
    return names is not None and (not names or item.name in names or item.name.partition("[")[0] in names)


def place(path: Path) -> int:
    """Where a file comes in a run."""
    if path.name in LONG:
        return LONG.index(path.name)
    folder = path.parent.name
    return len(LONG) + (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS))
