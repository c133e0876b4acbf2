"""Copies that are out of step within one run: by the checksums of the ranks that did not write a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_flex.compare.comparison import OutOfStep
from megatron_flex.compare.source import Source
from megatron_flex.dump import GRADIENT, PARAMETER_GRADIENT
from megatron_flex.dump.replicas import Replicas
from megatron_flex.errors import DumpError
from megatron_flex.progress import tracked
from megatron_flex.sites import GRAD


def out_of_step(source: Source, iterations: Sequence[int]) -> list[OutOfStep]:
    """Tensors of which ranks that should hold the same hold something else, in the order of execution.

    Only a dump that was made with `replicas=True` has the checksums that this takes.

    Args:
        source: the dump.
        iterations: those to look at.
    """
    order = {i.name: n for n, i in enumerate(source.items())}
    out: list[OutOfStep] = []
    for iteration in tracked(iterations, f"comparing the replicas of {source.label}", unit="iterations"):
        ill: dict[tuple[str, int], set[int]] = defaultdict(set)
        for rank, _, entry in _replicas(source, iteration).differing():
            grad = entry.kind in (GRADIENT, PARAMETER_GRADIENT) and not entry.site.endswith(GRAD)
            ill[entry.site + GRAD * grad, entry.microbatch].add(rank)
        found = [OutOfStep(source.label, n, iteration, m, tuple(sorted(r))) for (n, m), r in ill.items()]
        out += sorted(found, key=lambda o: (order.get(o.name, len(order)), o.microbatch))
    return out


def _replicas(source: Source, iteration: int) -> Replicas:
    """Every checksum of an iteration."""
    written = source.dump.written((iteration, 0))
    out = Replicas(written.run.manifest)
    for rank in written.run.coords:
        for path in written.paths(rank):
            try:
                out.add(rank, source.dump.files.open(path).part)
            except OSError as error:
                raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
    return out
