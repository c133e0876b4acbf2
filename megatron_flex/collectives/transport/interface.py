"""The interface of a transport, which carries captured shards to the rank that receives captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_flex.collectives.expert_route import Route
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh

Arrival = tuple[Any, Tensor]  # the tag of a capture and its full tensor, on the rank that receives captures
Watch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TransportBytes:
    """The bytes that one capture moves, for the estimate before a run.

    Attributes:
        host: that each rank copies from its device to host memory.
        sent: that the busiest rank sends to another node.
        received: that the receiving rank gets from other nodes.
    """

    host: int
    sent: int
    received: int


class Transport(Protocol):
    """Carries captured shards of one pipeline stage to the rank that receives captures.

    All ranks of a stage make the same calls in the same order.
    """

    @classmethod
    def open(cls, mesh: Mesh, watch: Watch | None, name: str) -> Transport | None:
        """Set the transport up; None, on all ranks of the stage, if it is not available.

        Collective within the stage.

        Args:
            mesh: the axes of the run.
            watch: called now and then while this rank waits for another one; it may raise.
            name: the session's, the same on all ranks and different from that of every earlier one.
        """

    combines: bool  # whether `collect` exchanges the flags of the stage; otherwise it returns this rank's

    @property
    def active(self) -> bool:
        """Whether anything was submitted in this step."""

    def submit(self, tag: Any, local: Tensor, layout: Layout, route: Route | None = None) -> bool:
        """Copy the local shard of a capture, which the caller may overwrite afterwards. No communication.

        Args:
            tag: names the capture; equal on all ranks.
            local: the local shard, detached.
            layout: how the shards relate; with a route, of the rows once they are back at their tokens.
            route: of the rows of experts.

        Returns:
            Whether this transport carries the capture. All ranks of the stage return the same.

        Raises:
            LayoutError: the shape does not fit the layout.
        """

    def start(self) -> list[Arrival]:
        """Begin to send what was submitted, if it has become large. Collective within the stage.

        Returns:
            What arrived of the captures that were sent before, on the receiving rank.
        """

    def collect(self, flags: Sequence[int], at: str) -> tuple[list[int], str]:
        """End the step, before the ranks agree that it is good. Collective within the stage.

        All ranks of the stage call it, whatever failed on them. Errors of the transport are returned, not
        raised: they travel with the flags, so that all ranks learn of them.

        Args:
            flags: of the step. The first is positive if the step failed on this rank, so that ranks may have
                submitted different tensors, or if the transport lost the captures.
            at: describes the exchange, the same on all ranks: `max_over_ranks`.

        Returns:
            The greatest value of each flag over the stage, and why the captures are lost, where this rank
            knows it.

        Raises:
            HookError: from the watch, or as ranks are at different exchanges.
        """

    def finish(self) -> list[Arrival]:
        """Deliver everything that was submitted, once `collect` was good on all ranks. Collective within the
        stage.

        Returns:
            What arrived, on the receiving rank; nothing on the others.
        """

    def drop(self, failed: bool) -> None:
        """Discard what was submitted; `failed`: perhaps other ranks submitted more, or less."""

    def close(self) -> None:
        """Discard what was submitted and release all memory. Waits for no rank."""

    @staticmethod
    def estimate(part: int, ranks_per_node: Sequence[int]) -> TransportBytes:
        """The bytes that a capture moves.

        Args:
            part: bytes of a local shard.
            ranks_per_node: how many ranks send a shard, for each node; the first is the receiving rank's.
        """
