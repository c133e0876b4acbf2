"""Copies that are out of step within one run: by the checksums of the ranks that did not write a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_flex.compare.comparison import ReplicaMismatch
from megatron_flex.compare.compared_dump import ComparedDump
from megatron_flex.dump import GRADIENT, PARAMETER_GRADIENT
from megatron_flex.dump.replicas import ReplicaChecksums
from megatron_flex.errors import DumpError
from megatron_flex.progress import track
from megatron_flex.sites import GRADIENT_SUFFIX


def find_replica_mismatches(source: ComparedDump, iterations: Sequence[int]) -> list[ReplicaMismatch]:
    """Tensors of which ranks that should hold the same hold something else, in the order of execution.

    Only a dump that was made with `replicas=True` has the checksums that this takes.

    Args:
        source: the dump.
        iterations: those to look at.
    """
    order = {i.name: n for n, i in enumerate(source.items())}
    out: list[ReplicaMismatch] = []
    for iteration in track(iterations, f"comparing the replicas of {source.label}", unit="iterations"):
        ill: dict[tuple[str, int], set[int]] = defaultdict(set)
        for rank, _, entry in _read_replica_checksums(source, iteration).differing():
            grad = entry.kind in (GRADIENT, PARAMETER_GRADIENT) and not entry.site.endswith(GRADIENT_SUFFIX)
            ill[entry.site + GRADIENT_SUFFIX * grad, entry.microbatch].add(rank)
        found = [ReplicaMismatch(source.label, n, iteration, m, tuple(sorted(r))) for (n, m), r in ill.items()]
        out += sorted(found, key=lambda o: (order.get(o.name, len(order)), o.microbatch))
    return out


def _read_replica_checksums(source: ComparedDump, iteration: int) -> ReplicaChecksums:
    """Every checksum of an iteration."""
    written = source.dump.written((iteration, 0))
    out = ReplicaChecksums(written.run.manifest)
    for rank in written.run.coords:
        for path in written.paths(rank):
            try:
                out.add(rank, source.dump.files.open(path).part)
            except OSError as error:
                raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    return out
