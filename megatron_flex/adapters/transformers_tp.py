"""Hugging Face transformers' tensor parallel styles (`tp_plan="auto"`): rules for the modules that have them.

A style stands about a module's forward and makes DTensors of what goes in; parameters are DTensors. So a hook
at the module sees local tensors, which lie as the style says.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from megatron_flex.adapters.rules import Rule
from megatron_flex.adapters.spread import WHOLE, Spread

TRANSFORMERS_PACKAGE = "transformers.distributed"
PROPAGATED_STYLES = (  # nothing is cut by them: what comes in goes on as it is
    "TensorParallelLayer",
    "ReplicatedWithGradAllReduce",
    "LocalParamsParallel",
    "PackedRowwiseParallel",
)
FULL_TENSOR_STYLES = ("EmbeddingParallel", "MoeExpertsParallel")  # each rank gets and returns the whole


def transformers_style_of(module: nn.Module) -> tuple[Any, Any] | None:
    """The style about a module's forward and the DeviceMesh that it was made with; None if there is none."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__code__", None)
    if (
        forward is None
        or code is None
        or f"{TRANSFORMERS_PACKAGE}.tensor_parallel" not in sys.modules
        or forward.__closure__ is None
    ):
        return None
    held = dict(zip(code.co_freevars, (c.cell_contents for c in forward.__closure__), strict=True))
    style, device_mesh = held.get("self"), held.get("mesh")
    if style is None or device_mesh is None or not hasattr(style, "install_forward"):
        return None
    return style, device_mesh


def sums_gradients(module: nn.Module) -> bool:
    """Whether a style sums the gradients of a module's parameters over the ranks behind the backward pass.

    `ReplicatedWithGradAllReduce` does, of norms over the heads of a rank: each rank's gradient comes as a
    share, and what is left in `.grad` is the sum.
    """
    forward = vars(module).get("forward")
    made = getattr(forward, "__qualname__", "").partition(".")[0]
    ours = getattr(forward, "__module__", "") == f"{TRANSFORMERS_PACKAGE}.tensor_parallel"
    return ours and made == "ReplicatedWithGradAllReduce"


def transformers_rule_of(module: nn.Module, tell: Any) -> Rule | None:
    """What a module's style says; None if tensors pass the module as they came.

    Args:
        module: the module.
        tell: from a placement to how a tensor lies, None if nothing tells that.
    """
    found = transformers_style_of(module)
    if found is None:
        return None
    style, kind = found[0], type(found[0]).__name__
    local = getattr(style, "use_local_output", True)
    if kind in PROPAGATED_STYLES:
        return None
    if kind in FULL_TENSOR_STYLES:
        return Rule(WHOLE, WHOLE)
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        outputs = tell(style.output_layouts, module.out_features) if local else None
        gets = tell(style.input_layouts, module.in_features)
        return Rule(gets, outputs)
    if kind == "SequenceParallel":
        cut = Spread(((style.sequence_dim, "tp"),))
        return Rule(cut, cut if local else None)
    if kind == "AllReduceParallel":
        return Rule(None, WHOLE)
    if kind == "MoeIdentityParallel":
        return Rule(WHOLE, Spread(partial=("tp",)))
    return Rule(
        hidden=f"its tensor parallel style {kind} has no rule for how its tensors lie on the ranks; hook the "
        "modules before and behind it",
    )
