"""Where a rollout engine and a training run part, token by token and layer by layer."""

from megatron_flex.rollout.rollout_comparison import (
    HiddenDifference,
    RolloutComparison,
    TokenDifference,
    compare_rollout,
)
from megatron_flex.rollout.token_causes import Cause

__all__ = ["Cause", "HiddenDifference", "RolloutComparison", "TokenDifference", "compare_rollout"]
