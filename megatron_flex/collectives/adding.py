"""Sums over all ranks that nobody waits for: posted when a step ends, and there when the next one does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import call_metered
from megatron_flex.mesh import Axis, Mesh


class BackgroundReduction:
    """All-reduces over all ranks of a mesh. Making one is collective where those are not all of the job.

    Args:
        mesh: the run's axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        joined = dist.is_available() and dist.is_initialized()
        ranks = mesh.ranks or (tuple(range(dist.get_world_size())) if joined else (0,))
        group: Any = None
        if joined and len(ranks) > 1:
            every = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if every else dist.new_group(ranks, use_local_synchronization=True)
        rank = ranks.index(dist.get_rank()) if joined and len(ranks) > 1 else 0
        self.axis = Axis("all", len(ranks), rank, group, tuple(ranks))

    def post(self, vector: Tensor, maxima: Tensor | None = None) -> PendingReduction:
        """Begin to add up a vector, and to take the greatest of `maxima` entry by entry.

        Every rank calls it alike; one collective for each of the two.
        """
        if self.axis.group is None:
            return PendingReduction([], vector, maxima)
        device = "cuda" if dist.get_backend(self.axis.group) == "nccl" else "cpu"
        works = []
        vector = vector.to(device)
        works.append(self._begin(vector, dist.ReduceOp.SUM))
        if maxima is not None:
            maxima = maxima.to(device)
            works.append(self._begin(maxima, dist.ReduceOp.MAX))
        return PendingReduction(works, vector, maxima)

    def _begin(self, tensor: Tensor, op: Any) -> Any:
        found: list[Any] = []

        def call(group: Any) -> None:
            found.append(dist.all_reduce(tensor, op=op, group=group, async_op=True))

        call_metered("all_reduce", self.axis, tensor, call)
        return found[0]


class PendingReduction:
    """Sums that are on their way."""

    def __init__(self, works: list[Any], vector: Tensor, maxima: Tensor | None) -> None:
        self._works, self._tensors = works, (vector, maxima)
        self._copied: tuple[Tensor, Tensor | None, Any] | None = None
        if vector.is_cuda:
            self._copied = self._copy(vector, maxima)

    def _copy(self, vector: Tensor, maxima: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        """Bring them to the host as soon as they are there, beside what the device does else."""
        side = torch.cuda.Stream(vector.device)
        side.wait_stream(torch.cuda.current_stream(vector.device))
        with torch.cuda.stream(side):
            for work in self._works:
                work.wait()
            found = [t if t is None else _copy_to_pinned(t) for t in (vector, maxima)]
            event = torch.cuda.Event()
            event.record(side)
        for tensor in (vector, maxima):
            if tensor is not None:
                tensor.record_stream(side)
        assert found[0] is not None
        return found[0], found[1], event

    def there(self) -> bool:
        """Whether nothing would have to be waited for."""
        if self._copied is not None:
            return bool(self._copied[2].query())
        return all(w.is_completed() for w in self._works)

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """The sum and the greatest of all ranks, on the CPU."""
        if self._copied is not None:
            vector, maxima, event = self._copied
            event.synchronize()
            return vector, maxima
        for work in self._works:
            work.wait()
        vector, more = self._tensors
        return vector, more


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
