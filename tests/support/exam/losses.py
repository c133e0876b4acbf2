"""Reported bugs of losses: masked tokens, the cross entropy, the prediction of further tokens."""

from __future__ import annotations

from tests.support.exam.row import Row
from tests.support.gpt import Case

ROWS = [
    Row(
        "masked loss under context parallelism",
        ("NVIDIA/Megatron-LM#7452 (9)", "NVIDIA/Megatron-LM#7513"),
        "Each context parallel rank divides its loss by its own number of tokens that count.",
        "GPT, `cp=2`, a loss function that returns a sum and a number of tokens; prompts do not count",
        Case("cp2", cp=2, layers=2),
        "loss:output",
        r"cp rank|factor",
        "gradient",
        setting="masked",
        clean=Case("cp2 per token", cp=2, layers=2, extra={"calculate_per_token_loss": True}),
    ),
]
