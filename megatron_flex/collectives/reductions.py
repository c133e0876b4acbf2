"""Sums over ranks apart from captures and edits: bit-identical values on all ranks, and background sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_scatter import broadcast_from_first
from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.messages import begin_collective
from megatron_flex.collectives.meter import call_metered
from megatron_flex.mesh import Axis, Mesh

SAMPLE_AXES = ("cp", "tp")  # ranks along these compute the same of one sample


def combine_replicas(flat: Tensor, mesh: Mesh) -> Tensor:
    """Sum over pipeline stages, average over data parallel ranks, and broadcast the result to every rank.

    Of the ranks along `tp` and `cp` only the first contributes. Every rank receives the same bits: one rank
    reduces and the others receive copies. Collective over the mesh: one collective for each axis with more
    than one rank, two for `pp`.

    Args:
        flat: contiguous; overwritten.
        mesh: the run's axes.
    """
    stages, data = mesh["pp"], mesh["dp"]
    if stages.size > 1 and mesh.is_first(SAMPLE_AXES):
        run_collective(dist.reduce, flat, stages.ranks[0], group=stages.group)
    if data.size > 1 and mesh.is_first(("pp", *SAMPLE_AXES)):
        run_collective(dist.all_reduce, flat, group=data.group)
        flat /= data.size
    return broadcast_from_first(flat, Mesh(tuple(mesh[n] for n in ("pp", *SAMPLE_AXES))))


def broadcast_copies(tensors: Sequence[Tensor], mesh: Mesh) -> None:
    """Overwrite tensors, of any dtype and strides, by those of the mesh's first rank.

    Collective over the mesh; all ranks pass tensors of the same shapes and dtypes.
    """
    for tensor in tensors:
        packed = tensor.detach().clone(memory_format=torch.contiguous_format)
        broadcast_from_first(
            packed.reshape(-1).view(torch.uint8), mesh
        )  # as bytes, since not every backend supports bools
        with torch.no_grad():
            tensor.copy_(packed)


def sum_over_ranks(value: Tensor, mesh: Mesh, axes: Sequence[str]) -> float:
    """The sum of a number over the ranks along `axes`. Collective over these axes.

    Args:
        value: a tensor of one entry and any numeric dtype, on the device that the axes' backend uses.
        mesh: the run's axes.
        axes: the axes to sum over.
    """
    total = value.detach().double().reshape(1).clone()
    sum_along(total, mesh, axes)
    return float(total)


def sum_along(tensor: Tensor, mesh: Mesh, axes: Sequence[str]) -> None:
    """Overwrite a tensor by its sum over the ranks along `axes`. Collective over these axes.

    Args:
        tensor: contiguous, and of the same shape and dtype on all these ranks.
        mesh: the run's axes.
        axes: the axes to sum over; one collective for each with more than one rank.
    """
    for axis in (mesh[n] for n in axes):
        if axis.size > 1:
            call_metered("all_reduce", axis, tensor, dist.all_reduce, tensor)


class BackgroundReduction:
    """All-reduces over all ranks of a mesh. The constructor is collective if these are not all of the job.

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
        """Start the sum of a vector, and the elementwise maximum of `maxima`.

        Every rank calls it with the same shapes; one collective for each of the two.
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
        return begin_collective("all_reduce", self.axis, tensor, dist.all_reduce, tensor, op)


class PendingReduction:
    """Reductions in progress."""

    def __init__(self, works: list[Any], vector: Tensor, maxima: Tensor | None) -> None:
        self._works, self._tensors = works, (vector, maxima)
        self._copied: tuple[Tensor, Tensor | None, Any] | None = None
        if vector.is_cuda:
            self._copied = self._copy(vector, maxima)

    def _copy(self, vector: Tensor, maxima: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        """Copy the results to the host once they are complete, concurrently with other work of the device."""
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
        """Whether `wait` would return immediately."""
        if self._copied is not None:
            return bool(self._copied[2].query())
        return all(w.is_completed() for w in self._works)

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """The sum and the maximum over all ranks, on the CPU."""
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
