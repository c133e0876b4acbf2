"""What features a user asks for, and which virtual stages send them to which; the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_flex.errors import HookError
from megatron_flex.sites import Site

Receivers = Literal["last_stage", "leader", "all"] | tuple[int, ...] | list[int]
NAMED_RECEIVERS = ("last_stage", "leader", "all")


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a user asks for.

    Attributes:
        sites: the hook point of each layer, by the layer's number.
        to: which ranks receive the tensors; numbers of stages, if not one of `NAMED_RECEIVERS`.
        full: whether they receive full tensors, or shards.
        gradients: whether gradients of the tensors reach the layers.
    """

    sites: Mapping[int, Site]
    to: Receivers
    full: bool
    gradients: bool

    def describe(self) -> str:
        """A text that must be the same on all ranks."""
        to = self.to if isinstance(self.to, str) else f"stages {sorted(self.to)}"
        how = ("full" if self.full else "sharded") + (", with gradients" if self.gradients else "")
        return f"features of {', '.join(s.name for s in self.sites.values())} to {to}, {how}"


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """The transfers of the features of a request.

    A virtual stage's number is its chunk times the number of stages plus its stage: they run in this order.

    Attributes:
        stages: the number of pipeline stages.
        layers: the layers of each virtual stage that has some.
        receivers: of each receiving stage the last virtual stage, in whose pass it receives.
        first: of each stage the first virtual stage.
        last: of each stage the last virtual stage.
    """

    stages: int
    layers: Mapping[int, tuple[int, ...]]
    receivers: Mapping[int, int]
    first: Mapping[int, int]
    last: Mapping[int, int]

    @staticmethod
    def from_request(request: FeatureRequest, sites: Iterable[Site], stages: int) -> FeaturePlan:
        """The plan of a request on a model with these sites.

        Raises:
            HookError: a stage does not exist, or gradients cannot come back in time.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for site in sites:
            number = site.chunk * stages + site.stage
            first[site.stage] = min(first.get(site.stage, number), number)
            last[site.stage] = max(last.get(site.stage, number), number)
        layers: dict[int, tuple[int, ...]] = {}
        for layer, site in request.sites.items():
            number = site.chunk * stages + site.stage
            layers[number] = (*layers.get(number, ()), layer)
        end, to = max(last, key=lambda stage: last[stage]), request.to
        named = {"last_stage": (end,), "leader": (0,), "all": tuple(sorted(last))}
        chosen = named[to] if isinstance(to, str) else to
        if not chosen or any(stage not in last for stage in chosen):
            raise HookError(
                f"features to {list(chosen)}: the pipeline stages are {sorted(last)}; give some of them, or "
                f"one of {', '.join(NAMED_RECEIVERS)}"
            )
        plan = FeaturePlan(stages, layers, {stage: last[stage] for stage in chosen}, first, last)
        if request.gradients and set(chosen) != {end}:
            raise HookError(
                f"features with gradients to {to!r}: only the last stage's backward pass comes "
                "before that of every layer; give to='last_stage', or gradients=False"
            )
        return plan

    @property
    def links(self) -> bool:
        """Whether anything is sent between stages."""
        return any(self.list_remote(receiver) for receiver in self.receivers)

    def list_remote(self, stage: int) -> list[int]:
        """The virtual stages on other stages that have layers, in the order in which they run."""
        return sorted(v for v in self.layers if v % self.stages != stage)

    def is_late(self, owner: int, stage: int) -> bool:
        """Whether a virtual stage runs after a receiving stage's last one."""
        return owner > self.receivers[stage]

    def list_late(self, stage: int) -> list[int]:
        """The virtual stages whose layers a receiving stage can only have after its forward pass."""
        return [v for v in self.list_remote(stage) if self.is_late(v, stage)]

    def list_targets(self, owner: int) -> list[int]:
        """The other stages that receive the layers of a virtual stage."""
        return [stage for stage in sorted(self.receivers) if stage != owner % self.stages]
