"""The adapter of a model in stages: each is taken as it would be by itself, whatever cut it further.

The schedule tells the mesh's `pp` axis and which modules a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.base import Architecture, Listener, LocalGradient, ParameterSite, Part, Undo
from megatron_flex.adapters.ddp import DDPParameters
from megatron_flex.adapters.modules import Modules, check_names_distinct
from megatron_flex.adapters.pipelining.schedule import ScheduledTap, PipelineSchedule, join_undos
from megatron_flex.adapters.pipelining.stages import StageModules, count_turns
from megatron_flex.errors import FlexError
from megatron_flex.sites import Site

AxisSizes = Mapping[str, int | None]  # axis name to the size that a person gave


def make_pipeline_adapter(chunks: StageModules, axis_sizes: AxisSizes, adapter_of: Callable[[list[nn.Module], AxisSizes], Any]) -> PipelineAdapter:
    """The adapter of a schedule's model.

    Args:
        chunks: its modules on this rank.
        said: the sizes that a person gave.
        adapter_of: makes the adapter of one of them. Collective, as often on all ranks.

    Raises:
        FlexError: what a person says of pipeline stages, or what their modules tell, is not as the schedule
            has it.
    """
    first = chunks.stages[0]
    size = int(first.group_size)
    if axis_sizes.get("pp") not in (None, size):
        raise FlexError(
            f"pipeline_parallel_size={axis_sizes['pp']}, but the schedule's stages are on {size} ranks; leave it "
            "out"
        )
    parts: list[Modules] = []
    for stage, chunk in zip(chunks.stages, chunks, strict=True):
        part = adapter_of([chunk], {**axis_sizes, "pp": size})
        if not isinstance(part, Modules):
            raise FlexError(
                f"stage {stage.stage_index} is a model of {part.name}, which has a pipeline schedule of its "
                "own; run that"
            )
        parts.append(part)
    ranks = tuple(dist.get_process_group_ranks(first.group or dist.group.WORLD))
    for part in parts:
        if part.mesh["pp"].ranks != ranks and size > 1:
            raise FlexError(
                f"the schedule's stages are on ranks {list(ranks)}, and the model's mesh "
                f"({part.mesh.describe()}) has {list(part.mesh['pp'].ranks)} in their place; number the "
                "ranks of stages, replicas and tensor parallel shards in that order, as init_device_mesh "
                "does with mesh_dim_names=('pp', 'dp', 'tp')"
            )
    return PipelineAdapter(chunks, parts)


class PipelineAdapter:
    """The stages of one rank as one model.

    Args:
        chunks: the schedule's modules.
        parts: the adapter of each.
    """

    def __init__(self, chunks: StageModules, parts: list[Modules]) -> None:
        self._parts, self.mesh, self.name = parts, parts[0].mesh, parts[0].name
        self.prefix = parts[0].prefix
        count = int(chunks.stages[0].num_stages)
        self.logits = f"stage{count - 1}:output"
        at = count_turns(count, chunks.stages[0].stage_index_to_group_rank, self.mesh["pp"].size)
        self.turns = [at[stage.stage_index] for stage in chunks.stages]
        self.driving = PipelineSchedule(chunks, self.turns, self.mesh)
        for stage, part in zip(chunks.stages, parts, strict=True):
            self.driving.followers[int(stage.stage_index)] = part.follower
            part.rename(f"stage{stage.stage_index}")
            part.driving = SilentDriving()
            if isinstance(part.keeping, DDPParameters):
                part.keeping.scheduled = True
        self._owners = {id(p.parameter): part for part in parts for p in part.parameters()}

    def _owner(self, parameter: nn.Parameter) -> Modules:
        return self._owners[id(parameter)]

    def module_names(self) -> list[str]:
        """Those of all stages here."""
        return list(dict.fromkeys(n for part in self._parts for n in part.module_names()))

    def parts(self) -> list[Part]:
        """What is in the stages, and the schedule."""
        inside = [p for part in self._parts for p in part.parts() if p.name != SilentDriving.name]
        return [Part(self.driving.name, self.driving.why), *dict.fromkeys(inside)]

    def check(self) -> None:
        """Refuse what a module alone would be refused for, and names that two stages have."""
        for part in self._parts:
            part.check_modules()
        check_names_distinct([part.names() for part in self._parts], self.mesh)

    def sites(self) -> list[Site]:
        """Those of all stages, quiet while the schedule tries shapes."""
        return [
            replace(site, chunk=turn, tap=ScheduledTap(site.tap, self.driving))
            for turn, part in zip(self.turns, self._parts, strict=True)
            for site in part.sites()
        ]

    def parameters(self) -> list[ParameterSite]:
        """Those of all stages."""
        return [
            replace(p, chunk=turn)
            for turn, part in zip(self.turns, self._parts, strict=True)
            for p in part.parameters()
        ]

    def without_layout(self) -> dict[str, str]:
        """Those of all stages."""
        return {name: kind for part in self._parts for name, kind in part.without_layout().items()}

    def settle(self) -> None:
        """Wait for who keeps the parameters."""
        for part in self._parts:
            part.settle()

    def gradients_reduced(self, called: bool = False) -> bool | str:
        """Whether who keeps them reduces them; in words, if that is not known of one stage."""
        answers = [part.gradients_reduced(called) for part in self._parts]
        return next((t for t in answers if isinstance(t, str)), all(answers))

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A parameter."""
        return self._owner(parameter).value(parameter)

    def shares(self, name: str) -> tuple[str, ...] | None:
        """As the stage that has the parameter knows."""
        mine = (part for part in self._parts if any(k.name == name for k in part.keeping.parameters()))
        return next((part.shares(name) for part in mine), ())

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set it."""
        self._owner(parameter).put(parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Its gradient."""
        return self._owner(parameter).gradient(parameter, reduced)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Set that."""
        self._owner(parameter).put_gradient(parameter, value, reduced)

    def freeze(self) -> Undo:
        """Let no parameter get a gradient."""
        self.driving.frozen = True
        return join_undos([partial(setattr, self.driving, "frozen", False), *(p.freeze() for p in self._parts)])

    def open_recomputed(self) -> Undo:
        """Nothing: how a module recomputes is its own."""
        return lambda: None

    def architecture(self) -> Architecture | None:
        """Not known."""
        return None

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Run the schedule forward over whole tokens."""
        self.driving.run(tokens, microbatch_size)

    def watch(self, listener: Listener) -> Undo:
        """Tell of the schedule's steps, and follow layouts in them."""
        return join_undos([self.driving.watch(listener), *(part.watch(listener) for part in self._parts)])


class SilentDriving:
    """Tells nothing: what runs a stage is told of for all stages together."""

    name, why = "nobody", ""

    def watch(self, listener: Listener) -> Undo:
        """Nothing."""
        return lambda: None

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Nothing."""
