"""How many bytes a hook copies on each rank, exactly: a step with it, less a step without.

W is the whole tensor, of which each of two ranks has a half L.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import gpt, ranks
from tests.support.copying import copies, more
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

FC1, STREAM = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0"
TOKENS = gpt.SEQUENCE * gpt.BATCH
PASSES = 2  # microbatches
LEAST = 128  # bytes: samples of tensors, by which passes are known again, have less


def whole(module: Any, inputs: torch.Tensor, save_ctx: Any, modules: Any) -> torch.Tensor:
    """Nothing says that it would do with a part."""
    return inputs * 1.01


def hooks() -> dict[str, Callable[[], Any]]:
    import megatron_flex as mf
    from megatron_flex import HookFunction, edits

    direction = torch.ones(2 * gpt.FFN)
    return {
        "read": lambda: HookFunction(FC1),
        "read of a gradient": lambda: HookFunction(FC1, hook_type="full_backward_pre"),
        "read of one position": lambda: HookFunction(FC1, select=mf.Select(positions=-1)),
        "local edit": lambda: HookFunction(FC1, editing_function=edits.scale(1.01), save=False),
        "local edit of some": lambda: HookFunction(
            FC1, editing_function=edits.scale(1.01, positions=0), save=False
        ),
        "linear edit": lambda: HookFunction(FC1, editing_function=edits.project_out(direction), save=False),
        "general edit": lambda: HookFunction(FC1, editing_function=whole, save=False),
        "general edit, saved": lambda: HookFunction(FC1, editing_function=whole),
        "general edit, cut by the sequence": lambda: HookFunction(STREAM, editing_function=whole, save=False),
    }


def counted(case: Case) -> dict[str, int]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.step(case, chunks, 0)
    with copies(LEAST) as plain:
        gpt.step(case, chunks, 0)
    out = {}
    for name, make in hooks().items():
        with mf.attach(chunks, [make()]) as flex:
            gpt.step(case, chunks, 0)  # whatever is set up, is set up in this one
            flex.output_dict.clear()
            with copies(LEAST) as found:
                gpt.step(case, chunks, 0)
            out[name] = more(found, plain)
    return out


def test_what_each_hook_copies() -> None:
    case = Case("tp2 sp", tp=2, sp=True, layers=1, microbatches=PASSES)
    fc1, stream = TOKENS * 2 * gpt.FFN * 4, TOKENS * gpt.HIDDEN * 4
    for answer in run(case.world, counted, case):
        each = {name: nbytes / PASSES for name, nbytes in answer.items()}
        assert each["read"] == fc1 / 2, "each rank its part, once"
        assert each["read of a gradient"] == fc1 / 2
        assert each["read of one position"] == fc1 / 2 / gpt.SEQUENCE
        assert each["local edit"] == each["local edit of some"] == 0
        assert each["linear edit"] == 2 * TOKENS * 4, "the sums alone, forward and backward"
        # Put together once and taken apart once, forward and backward.
        assert each["general edit"] == 2 * (fc1 + fc1 / 2)
        assert each["general edit, saved"] == each["general edit"] + each["read"]
        # Shards that lie behind each other are gathered straight to their place, and gradients are views.
        assert each["general edit, cut by the sequence"] == stream / 2
