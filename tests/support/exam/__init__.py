"""Silent bugs of parallel training that were reported in public, each in a small model of its own.

A row of the table names the thread and has the thread's configuration. The bug is that of the installed
Megatron as it stands, or is planted again by a patch of a few lines; beside it is a clean run, with the bug
mended or its trigger removed.
"""

from tests.support.exam import experts, losses, tensors
from tests.support.exam.row import Row

ROWS = [*tensors.ROWS, *losses.ROWS, *experts.ROWS]
PATCHES = {name: p for row in ROWS for name, p in ((row.name, row.patch), (f"{row.name}, clean", row.mend))}

__all__ = ["PATCHES", "ROWS", "Row"]
