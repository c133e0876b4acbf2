"""What other tensors say of the first divergence: a reduction, another layer's tensor, unsummed gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    VALUE,
    ComparedDump,
    ComparedTensor,
)
from megatron_flex.compare.comparison import Row
from megatron_flex.compare.tensor_pairs import TensorPair, align_arrays, sum_differences

NUMBERED = re.compile(r"\b(layers|local_experts)\.(\d+)\b")
MOST_CANDIDATES = 64  # tensors of other layers or experts that one is compared with
MATCH = 0.1  # of the difference to the tensor itself, that one to its source may be
REDUCED_FROM = {"output": "partial"}  # points of a module: the result of a reduction, and its parts
SIBLINGS = (("q", "k", "v"), ("gate", "up"))
REDUCED_FROM_BACKWARD = {"input": "gemm_input"}


@dataclass(frozen=True)
class CrossSiteEvidence:
    """The other tensors of both runs.

    Args:
        a: the first dump.
        b: the second dump.
        rows: what was compared.
        most: bytes of one block.
    """

    a: ComparedDump
    b: ComparedDump
    rows: Sequence[Row]
    most: int = COMPARE_BLOCK

    def explain(self, pair: TensorPair) -> Iterator[str]:
        """Lines of evidence, each with the class of the fault and the group.

        Args:
            pair: the first divergence.
        """
        item = pair.item
        yield from self._find_reduction(item, pair.iteration)
        if item.kind == PARAMETER_GRADIENT:
            yield from self._find_unreduced_gradients(pair.iteration)
        yield from self._find_unsummed_keys(item, pair.iteration)
        yield from self._find_source(pair)
        yield from self._find_sibling(pair)
        yield from self._find_routing(pair)
        if item.kind == VALUE and item.site.endswith((":scores", ":probs")):
            yield from self._find_mask(pair)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of both runs that are longer than 1."""
        return {**self.a.axis_sizes, **self.b.axis_sizes}

    # -- a reduction -------------------------------------------------------------------------------------

    def _find_reduction(self, item: ComparedTensor, iteration: int) -> Iterator[str]:
        """Whether the partial sums agree and the reduced tensor does not."""
        module, _, point = item.site.partition(":")
        before = (REDUCED_FROM if item.kind == VALUE else REDUCED_FROM_BACKWARD).get(point)
        if before is None or item.kind not in (VALUE, GRADIENT):
            return
        partial = ComparedTensor(f"{module}:{before}", item.kind, item.call)
        row = self._find_row(partial, iteration)
        if row is not None and not row.diverges:
            groups = ", ".join(a for a in self.axes if a in ("tp", "etp")) or "tp"
            yield (
                f"{partial.name} agrees and {item.name} does not: the reduction between them ({groups}) is "
                "missing, partial, or over another group"
            )

    def _find_row(self, item: ComparedTensor, iteration: int) -> Row | None:
        return next((r for r in self.rows if r.name == item.name and r.iteration == iteration), None)

    # -- gradients of parameters -------------------------------------------------------------------------

    def _find_unreduced_gradients(self, iteration: int) -> Iterator[str]:
        """Which parameters have other gradients, where the gradients of activations agree."""
        own = [r for r in self.rows if r.iteration == iteration]
        if any(r.diverges for r in own if r.kind != PARAMETER_GRADIENT):
            return
        gradients = [r for r in own if r.kind == PARAMETER_GRADIENT]
        wrong = [r.name.removesuffix(".grad") for r in gradients if r.diverges]
        if not wrong or not any(r.kind == GRADIENT for r in own):
            return
        replicated = all(self._is_replicated(name) for name in wrong)
        groups: list[str] = [a for a in ("dp", "cp", "ep") if a in self.axes]
        if len(wrong) <= 2 and any("embedding" in n or "output_layer" in n for n in wrong):
            groups = [a for a in ("pp",) if a in self.axes] or groups
        elif replicated and len(wrong) < len(gradients):
            groups = [a for a in ("tp", "ep") if a in self.axes] or groups
        over = f" over {' or '.join(groups)}" if groups else ""
        yield (
            f"gradients of activations agree, those of {len(wrong)} of {len(gradients)} parameters do not: "
            f"their reduction{over} is missing, partial, or doubled"
        )

    def _find_unsummed_keys(self, item: ComparedTensor, iteration: int) -> Iterator[str]:
        """Whether gradients of keys and values differ, and that of queries agrees, under context parallelism.

        Queries stay on their rank; keys and values are read by the queries of all ranks.
        """
        module, _, point = item.site.partition(":")
        if item.kind != GRADIENT or point not in ("k", "v") or "cp" not in self.axes:
            return
        row = self._find_row(ComparedTensor(f"{module}:q", GRADIENT, item.call), iteration)
        if row is not None and not row.diverges:
            yield (
                f"{row.name} agrees and {item.name} does not: the sum of the gradients of keys and values "
                "over cp is missing or partial"
            )

    def _is_replicated(self, name: str) -> bool:
        layout = self.b.layout(ComparedTensor(name, PARAMETER))
        return layout is not None and not any(d.cuts for d in layout.dims)

    # -- another layer's tensor --------------------------------------------------------------------------

    def _find_source(self, pair: TensorPair) -> Iterator[str]:
        """Whether it is the tensor of another layer or expert."""
        item, known = pair.item, set(self.a.items())
        if not NUMBERED.search(item.site):
            return
        own = sum_differences([pair], self.most).sums.relative
        candidates = [c for c in self._list_candidates(item) if c in known]
        for candidate in candidates[:MOST_CANDIDATES]:
            other = self.a.array(candidate)
            if pair.iteration not in other.iterations or other.dtype != pair.a.dtype:
                continue
            found = align_arrays(item, pair.iteration, other, self.b.array(item))
            if isinstance(found, str) or found[0].shape != pair.shape:
                continue
            distance = sum_differences(found, self.most).sums.relative
            if distance <= MATCH * own:
                layers = [_get_numbers(i.site)[0] for i in (item, candidate)]
                what = "experts" if layers[0] == layers[1] else "layers"
                yield (
                    f"B's {item.name} is A's {candidate.name} (relative difference {distance:.1g}): "
                    f"{what} are permuted, repeated, or dealt out to other ranks"
                )
                return

    def _find_sibling(self, pair: TensorPair) -> Iterator[str]:
        """Whether it is another tensor of the same module: keys for values, gate for up."""
        item, known = pair.item, set(self.a.items())
        module, _, point = item.site.partition(":")
        group = next((g for g in SIBLINGS if point in g), ())
        own = sum_differences([pair], self.most).sums.relative
        for other in group:
            candidate = ComparedTensor(f"{module}:{other}", item.kind, item.call)
            if other == point or candidate not in known:
                continue
            found = align_arrays(item, pair.iteration, self.a.array(candidate), self.b.array(item))
            if isinstance(found, str) or found[0].shape != pair.shape:
                continue
            if sum_differences(found, self.most).sums.relative <= MATCH * own:
                yield f"B's {item.name} is A's {candidate.name}: {point} and {other} are swapped"

    def _find_routing(self, pair: TensorPair) -> Iterator[str]:
        """Whether the router's choice agrees, and what its experts get does not."""
        layer, found, _ = pair.item.site.partition(".mlp.experts")
        row = self._find_row(ComparedTensor(f"{layer}.mlp.router:probs", VALUE), pair.iteration)
        if found and pair.item.kind == VALUE and row is not None and not row.diverges:
            yield (
                f"{row.name} agrees and {pair.item.name} does not: rows are permuted, or are sent to other "
                "experts"
            )

    def _list_candidates(self, item: ComparedTensor) -> Iterator[ComparedTensor]:
        """The same tensor of other experts, then of other layers; the nearest numbers first."""
        names = {i.site for i in self.a.items() if i.kind == item.kind}
        layer, expert = _get_numbers(item.site)
        pattern = re.compile(
            NUMBERED.sub(lambda m: f"{m[1]}\0", item.site).replace(".", r"\.").replace("\0", r"\.(\d+)")
        )
        found = [n for n in names if n != item.site and pattern.fullmatch(n)]

        def distance(name: str) -> tuple[int, int]:
            other = _get_numbers(name)
            return abs(other[0] - layer), abs(other[1] - expert)

        for name in sorted(found, key=distance):
            yield ComparedTensor(name, item.kind, item.call)

    # -- the attention mask ------------------------------------------------------------------------------

    def _find_mask(self, pair: TensorPair) -> Iterator[str]:
        """Whether other entries are masked."""
        unlike, first = 0, ""
        for block, a, b in pair.blocks(self.most):
            masked = [_is_masked(t) for t in (a, b)]
            other = masked[0] != masked[1]
            if other.any() and not first:
                at = [int(i) + s.start for i, s in zip(other.nonzero()[0], block, strict=True)]
                first = ", ".join(f"{d} {n[i]}" for d, n, i in zip(pair.dims, pair.numbers, at, strict=True))
            unlike += int(other.sum())
        if unlike:
            yield f"{unlike} entries are masked in one run only, first at {first}: the attention mask differs"


def _is_masked(scores: torch.Tensor) -> torch.Tensor:
    """Entries of scores or probabilities that attention leaves out."""
    return (scores == 0) | (scores <= -1e4)


def _get_numbers(name: str) -> tuple[int, int]:
    """The layer and the expert of a name; -1 without."""
    found = {m[1]: int(m[2]) for m in NUMBERED.finditer(name)}
    return found.get("layers", -1), found.get("local_experts", -1)
