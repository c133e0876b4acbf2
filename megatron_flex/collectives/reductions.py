"""Sums over ranks apart from captures and edits: bit-identical values on all ranks, and background sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_scatter import broadcast_from_first
from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.messages import as_bytes, begin_collective
from megatron_flex.collectives.meter import call_metered
from megatron_flex.mesh import Axis, Mesh

HOST_BACKENDS = ("gloo", "mpi", "fake")  # which take tensors of the host
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
        broadcast_from_first(as_bytes(packed), mesh)
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
    """All-reduces over all ranks of a mesh, on the host, while the model runs on.

    Beside NCCL and its like the process group is one of gloo of its own: an all-reduce of NCCL would hold the
    queue in which the kernels of the next step wait, until the slowest rank arrives. The constructor is
    collective if it makes a process group.

    Args:
        mesh: the run's axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        joined = dist.is_available() and dist.is_initialized()
        ranks = mesh.ranks or (tuple(range(dist.get_world_size())) if joined else (0,))
        group: Any = None
        if joined and len(ranks) > 1:
            group = dist.group.WORLD
            if len(ranks) < dist.get_world_size() or dist.get_backend(group) not in HOST_BACKENDS:
                group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        rank = ranks.index(dist.get_rank()) if joined and len(ranks) > 1 else 0
        self.axis = Axis("all", len(ranks), rank, group, tuple(ranks))

    def post(self, vector: Tensor, maxima: Tensor | None = None) -> PendingReduction:
        """Start the sum of a vector, and the elementwise maximum of `maxima`.

        Every rank calls it with the same shapes; one collective for each of the two. Tensors of a GPU are
        copied first, and the collectives start in `begin`.
        """
        tensors = [
            (vector, dist.ReduceOp.SUM),
            *([(maxima, dist.ReduceOp.MAX)] if maxima is not None else []),
        ]
        pending = PendingReduction(self.axis, [(_copy_to_host(t), op) for t, op in tensors], vector.device)
        if vector.device.type == "cpu":
            pending.begin()
        return pending


class PendingReduction:
    """Reductions in progress.

    Args:
        axis: the ranks.
        tensors: on the host, perhaps still being copied, with the operation of each.
        source: the device that they are copied from.
    """

    def __init__(self, axis: Axis, tensors: list[tuple[Tensor, Any]], source: torch.device) -> None:
        self._axis, self._tensors = axis, tensors
        self._works: list[Any] | None = None
        self._copied: torch.cuda.Event | None = None
        if source.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(source))

    def begin(self) -> None:
        """Start the collectives, in the order in which reductions were posted; a second call does nothing."""
        if self._works is not None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        self._works = []
        if self._axis.group is not None:
            for tensor, op in self._tensors:
                work = begin_collective("all_reduce", self._axis, tensor, dist.all_reduce, tensor, op)
                self._works.append(work)

    def there(self) -> bool:
        """Whether `wait` would return immediately."""
        return self._works is not None and all(w.is_completed() for w in self._works)

    def wait(self) -> tuple[Tensor, Tensor | None]:
        """The sum and the maximum over all ranks, on the CPU."""
        self.begin()
        for work in self._works or ():
            work.wait()
        (vector, _), *more = self._tensors
        return vector, more[0][0] if more else None


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A tensor of the host; of a GPU's the copy is on its way."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
