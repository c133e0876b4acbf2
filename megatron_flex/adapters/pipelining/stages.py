"""The modules that a schedule runs on this rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron_flex.errors import FlexError


class StageModules(list[nn.Module]):
    """The modules of a schedule's stages on this rank.

    Attributes:
        schedule: the schedule.
        stages: its stages here, in the order of the modules.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        one = getattr(schedule, "_stage", None)
        self.stages: list[Any] = list(schedule._stages) if one is None else [one]
        self.stages.sort(key=lambda stage: int(stage.stage_index))
        super().__init__(stage.submod for stage in self.stages)


def opened(model: Any) -> list[nn.Module]:
    """The modules of what a person gives: a module, a list of them, a schedule.

    Raises:
        FlexError: it is a stage by itself.
    """
    if isinstance(model, nn.Module):
        return [model]
    library = sys.modules.get("torch.distributed.pipelining.schedules")
    if library is not None and isinstance(model, library._PipelineSchedule):
        return StageModules(model)
    if library is not None and _is_stage(model):
        raise FlexError("a PipelineStage does not know what runs it; give the schedule that it is handed to")
    parts = list(model)
    if library is not None and any(_is_stage(part) for part in parts):
        raise FlexError(
            "PipelineStages do not know what runs them; give the schedule that they are handed to"
        )
    return parts


def _is_stage(thing: Any) -> bool:
    return isinstance(thing, sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase)


def count_turns(stages: int, rank_of: Mapping[int, int], ranks: int) -> list[int]:
    """For each stage how often the pipeline has gone round before it, 0 for those of one stage a rank.

    Where stages run down and up again (a V), going up takes a round for each rank.
    """
    place, out = -1, []
    for stage in range(stages):
        place += 1 + (rank_of[stage] - place - 1) % ranks
        out.append(place // ranks)
    return out
