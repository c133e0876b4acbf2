"""What features a user asks for, and which virtual stages send them to which; alike in a replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from megatron_flex.errors import HookError
from megatron_flex.runtime.features.receiving_ranks import ReceivingRanks
from megatron_flex.sites import Site

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# An int is what `torch.distributed.new_group` returns outside of the group.
Receivers: TypeAlias = (
    'Literal["last_stage", "leader", "all"] | tuple[int, ...] | list[int] | ProcessGroup | int'
)
NAMED_RECEIVERS = ("last_stage", "leader", "all")


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """What a user asks for.

    Attributes:
        sites: the hook point of each layer, by the layer's number.
        to: which ranks receive the tensors: one of `NAMED_RECEIVERS`, numbers of stages, or a process group,
            which `ReceivingRanks` replace when all ranks have reported theirs.
        full: whether they receive full tensors, or shards.
        gradients: whether gradients of the tensors reach the layers.
    """

    sites: Mapping[int, Site]
    to: Receivers | ReceivingRanks
    full: bool
    gradients: bool

    def describe(self) -> str:
        """A text that must be the same on all ranks."""
        how = ("full" if self.full else "sharded") + (", with gradients" if self.gradients else "")
        names = ", ".join(s.name for s in self.sites.values())
        return f"features of {names} to {self.describe_receivers()}, {how}"

    def describe_receivers(self) -> str:
        """The receivers, in words that are the same on all ranks."""
        match self.to:
            case str():
                return self.to
            case ReceivingRanks(ranks=ranks):
                return f"ranks {', '.join(map(str, ranks))}"
            case tuple() | list():
                return f"stages {', '.join(sorted(map(str, self.to)))}"
            case _:
                return "a process group"

    def choose_stages(self, stages: Sequence[int], last: int) -> tuple[Sequence[int], bool]:
        """The receiving stages of this replica, and whether they are the last one with all its ranks.

        Args:
            stages: those of the model.
            last: the one that runs last.

        Raises:
            HookError: a stage does not exist.
        """
        match self.to:
            case ReceivingRanks(stages=chosen, complete=complete):
                return chosen, complete
            case "last_stage":
                return (last,), True
            case "all":
                return stages, stages == [last]
            case "leader":
                return (0,), False
            case tuple() | list() if self.to and all(stage in stages for stage in self.to):
                return self.to, set(self.to) == {last}
        raise HookError(
            f"features(to={self.to!r}): the pipeline stages are {list(stages)}; give some of them, or one of "
            f"{', '.join(NAMED_RECEIVERS)}"
        )


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
        end = max(last, key=lambda stage: last[stage])
        chosen, complete = request.choose_stages(sorted(last), end)
        if request.gradients and not complete:
            raise HookError(
                f"features with gradients to {request.describe_receivers()}: only the last stage's backward "
                "pass comes before that of every layer, and all its ranks share in it; give "
                "to='last_stage', or gradients=False"
            )
        return FeaturePlan(stages, layers, {stage: last[stage] for stage in chosen}, first, last)

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
