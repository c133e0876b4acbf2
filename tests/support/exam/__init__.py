"""Silent bugs of parallel training that were reported in public, each in a small model of its own.

A row of the table names the thread and has the thread's configuration. The bug is that of the installed
Megatron as it stands, or is planted again by a patch of a few lines; beside it is a clean run, with the bug
mended or its trigger removed.
"""

from tests.support.exam import experts, losses, tensors
from tests.support.exam.row import Row
from tests.support.gpt import Case

ROWS = [*tensors.ROWS, *losses.ROWS, *experts.ROWS]
PATCHES = {name: p for row in ROWS for name, p in ((row.name, row.patch), (f"{row.name}, clean", row.mend))}

# Correct runs, each of one axis or of two.
PAIRS = [
    Case("tp2", tp=2, sp=True, layers=2),
    Case("pp2", pp=2, layers=2),
    Case("dp2", dp=2, layers=2),
    Case("cp2", cp=2, layers=2),
    Case("ep2", dp=2, ep=2, experts=4, layers=2),
    Case("tp2 x pp2", tp=2, sp=True, pp=2, layers=2),
    Case("tp2 x cp2", tp=2, sp=True, cp=2, layers=2),
    Case("tp2 x ep2", tp=2, sp=True, ep=2, experts=4, layers=2),
    # Layouts of the pipeline whose losses people compared: NVIDIA/Megatron-LM#1304, #1852, #5318.
    Case(
        "pp2, the embedding counted as a layer",
        pp=2,
        layers=3,
        split={"account_for_embedding_in_pipeline_split": True},
    ),
    Case(
        "pp4, embedding and output layer alone",
        pp=4,
        layers=3,
        split={"pipeline_model_parallel_layout": "E|t*2|t|L"},
    ),
]
STEPS = 5  # of Adam, in these runs

__all__ = ["PAIRS", "PATCHES", "ROWS", "STEPS", "Row"]
