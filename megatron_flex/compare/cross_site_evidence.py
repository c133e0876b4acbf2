"""What other tensors say of the first divergence: a reduction, another layer's tensor, unsummed gradients.

A cause that follows by elimination, as what is before a tensor agrees, is named only if the numbers of the
tensor itself do not show another one: a factor, a vector, an order, or numbers that are not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedTensor
from megatron_flex.compare.hint import ComparedRuns, Hint
from megatron_flex.compare.rotation import find_rotation
from megatron_flex.compare.tensor_pairs import DifferenceSums, TensorPair, align_arrays, sum_differences
from megatron_flex.compare.tolerance import FP32_ROUNDOFF
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE

NUMBERED = re.compile(r"\b(layers|local_experts)\.(\d+)\b")
MAX_CANDIDATES = 64  # tensors of other layers or experts that one is compared with
MATCH = 0.1  # of the difference to the tensor itself, that one to its source may be
MATCH_NOISE = 10.0  # times the noise of the tensor, likewise
MASKED_SCORE, MIN_PROBABILITY = -1e4, 1e-3  # a masked score is below; the other run's probability is above
ROTATED_ENTRIES = 1 << 20  # of queries or keys that are examined
REDUCED_FROM = {"output": "partial"}  # points of a module: the result of a reduction, and its parts
ATTENTION_POINTS = (".core_attention:scores", ".core_attention:probs")
SIBLINGS = (("q", "k", "v"), ("gate", "up"))
REDUCED_FROM_BACKWARD = {"input": "gemm_input"}


class CrossSiteEvidence(ComparedRuns):
    """The other tensors of both runs."""

    def explain(
        self, pair: TensorPair, sums: DifferenceSums, noise: float, identified: bool
    ) -> Iterator[Hint]:
        """Lines of evidence, each with the class of the fault and the group.

        Args:
            pair: the first divergence.
            sums: over all of it.
            noise: the relative difference that round-off makes there.
            identified: whether the numbers of the tensor show a cause by themselves.
        """
        item = pair.item
        if sums.broken or not sums.squares_a or not sums.squares_b:
            return
        if not identified:
            yield from self._find_reduction(item, pair.iteration)
            if item.kind == PARAMETER_GRADIENT:
                yield from self._find_unreduced_gradients(pair.iteration)
            yield from self._find_unsummed_keys(item, pair.iteration)
            yield from self._find_routing(pair)
        close = MATCH_NOISE * max(noise, FP32_ROUNDOFF)
        yield from self._find_source(pair, sums.relative, close)
        yield from self._find_sibling(pair, sums.relative, close)
        if item.kind == VALUE and item.site.endswith(ATTENTION_POINTS):
            yield from self._find_mask(pair)
        if item.kind == VALUE and item.site.endswith((".core_attention:q", ".core_attention:k")):
            yield from self._find_rotation(pair, noise)

    @property
    def axes(self) -> dict[str, int]:
        """The axes of both runs that are longer than 1."""
        return {**self.a.axis_sizes, **self.b.axis_sizes}

    # -- a reduction -------------------------------------------------------------------------------------

    def _find_reduction(self, item: ComparedTensor, iteration: int) -> Iterator[Hint]:
        """Whether the partial sums agree and the reduced tensor does not."""
        module, _, point = item.site.partition(":")
        before = (REDUCED_FROM if item.kind == VALUE else REDUCED_FROM_BACKWARD).get(point)
        if before is None or item.kind not in (VALUE, GRADIENT):
            return
        partial = ComparedTensor(f"{module}:{before}", item.kind, item.call)
        row = self.find_row(partial, iteration)
        groups = ", ".join(a for a in self.axes if a in ("tp", "etp"))
        if row is not None and not row.diverges and groups:
            yield Hint(
                "reduction",
                f"{partial.name} agrees and {item.name} does not: the reduction between them ({groups}) is "
                "missing, partial, or over another group",
            )

    # -- gradients of parameters -------------------------------------------------------------------------

    def _find_unreduced_gradients(self, iteration: int) -> Iterator[Hint]:
        """Which parameters have other gradients, where the gradients of activations agree."""
        of_iteration = [r for r in self.rows if r.iteration == iteration]
        if any(r.diverges for r in of_iteration if r.kind != PARAMETER_GRADIENT):
            return
        gradients = [r for r in of_iteration if r.kind == PARAMETER_GRADIENT]
        wrong = [r.name.removesuffix(".grad") for r in gradients if r.diverges]
        if not wrong or not any(r.kind == GRADIENT for r in of_iteration):
            return
        replicated = all(self._is_replicated(name) for name in wrong)
        groups: list[str] = [a for a in ("dp", "cp", "ep") if a in self.axes]
        if len(wrong) <= 2 and any("embedding" in n or "output_layer" in n for n in wrong):
            # Tied weights are on the first and on the last stage, which add up their gradients.
            groups = [a for a in ("pp",) if a in self.axes] or groups
        elif replicated and len(wrong) < len(gradients):
            # Such as norms on a sharded sequence, of whose tokens each rank has a part.
            groups = [a for a in ("tp", "ep") if a in self.axes] or groups
        over = " or ".join(groups)
        cause = (
            f"their reduction over {over} is missing, partial, or doubled"
            if over
            else "their products or the sum over microbatches"
        )
        yield Hint(
            "gradients of parameters",
            f"gradients of activations agree, those of {len(wrong)} of {len(gradients)} parameters do not: "
            f"{cause}",
        )

    def _find_unsummed_keys(self, item: ComparedTensor, iteration: int) -> Iterator[Hint]:
        """Whether gradients of keys or values differ that several ranks use, and what is behind them agrees.

        Queries stay on their rank. Keys and values are read by the queries of all context parallel ranks;
        those of a head that several tensor parallel ranks have, and the rotary part of latent attention,
        also by those of other heads.
        """
        module, _, point = item.site.partition(":")
        parent, _, role = module.rpartition(".")
        behind = ComparedTensor(f"{module}:q", GRADIENT, item.call)
        axis = "cp" if role == "core_attention" else "tp"
        if role == "linear_kv_down_proj" and point == "output":
            behind = ComparedTensor(f"{parent}.core_attention:k", GRADIENT, item.call)
        elif point not in ("k", "v") or (axis == "tp" and not self._has_copies(item)):
            return
        row = self.find_row(behind, iteration) if item.kind == GRADIENT and axis in self.axes else None
        if row is not None and not row.diverges:
            yield Hint(
                "keys and values",
                f"{row.name} agrees and {item.name} does not: the sum of the gradients of keys and values "
                f"over {axis} is missing or partial",
            )

    def _has_copies(self, item: ComparedTensor) -> bool:
        """Whether several tensor parallel ranks of a run hold the same heads of a value."""
        for side in (self.a, self.b):
            layout = side.layout(ComparedTensor(item.site, VALUE, item.call))
            if layout is not None and "tp" in side.axis_sizes:
                cuts = [c for d in layout.dims for c in d.cuts if c.axis == "tp"]
                if not cuts or any(c.copies > 1 for c in cuts):
                    return True
        return False

    def _is_replicated(self, name: str) -> bool:
        layout = self.b.layout(ComparedTensor(name, PARAMETER))
        return layout is not None and not any(d.cuts for d in layout.dims)

    # -- another layer's tensor --------------------------------------------------------------------------

    def _find_source(self, pair: TensorPair, relative: float, close: float) -> Iterator[Hint]:
        """Whether it is the tensor of another layer or expert.

        Args:
            pair: the first divergence.
            relative: its relative difference.
            close: the greatest relative difference of a tensor to its source.
        """
        item, known = pair.item, set(self.a.items())
        if not NUMBERED.search(item.site):
            return
        candidates = [c for c in self._list_candidates(item) if c in known]
        for candidate in candidates[:MAX_CANDIDATES]:
            distance = self._measure_distance(pair, candidate)
            if distance <= min(MATCH * relative, close):
                text = f"B's {item.name} is A's {candidate.name} (relative difference {distance:.1g}): "
                yield Hint("layers or experts", text + _describe_move(item, candidate))
                return

    def _measure_distance(self, pair: TensorPair, candidate: ComparedTensor) -> float:
        """The relative difference of B's tensor to another tensor of A; infinite if they are unlike."""
        other = self.a.array(candidate)
        if pair.iteration not in other.iterations or other.dtype != pair.a.dtype:
            return math.inf
        pairs = align_arrays(pair.item, pair.iteration, other, self.b.array(pair.item))
        if isinstance(pairs, str) or pairs[0].shape != pair.shape:
            return math.inf
        return sum_differences(pairs, self.most).sums.relative

    def _find_sibling(self, pair: TensorPair, relative: float, close: float) -> Iterator[Hint]:
        """Whether it is another tensor of the same module: keys for values, gate for up."""
        item, known = pair.item, set(self.a.items())
        module, _, point = item.site.partition(":")
        for other in next((g for g in SIBLINGS if point in g), ()):
            candidate = ComparedTensor(f"{module}:{other}", item.kind, item.call)
            if other == point or candidate not in known:
                continue
            if self._measure_distance(pair, candidate) <= min(MATCH * relative, close):
                text = f"B's {item.name} is A's {candidate.name}: {point} and {other} are swapped"
                yield Hint("swapped", text)

    def _find_routing(self, pair: TensorPair) -> Iterator[Hint]:
        """Whether the router's choice agrees, and what its experts get does not."""
        item = pair.item
        layer, experts, _ = item.site.partition(".mlp.experts")
        module, _, point = item.site.partition(":")
        row = self.find_row(ComparedTensor(f"{layer}.mlp.router:probs", VALUE), pair.iteration)
        if not experts or item.kind != VALUE or row is None or row.diverges:
            return
        before = self.find_row(ComparedTensor(f"{module}:input", VALUE, item.call), pair.iteration)
        if before is not None and point != "input" and not before.diverges:
            return  # the fault is in the module
        text = f"{row.name} agrees and {item.name} does not: rows are permuted, or are sent to other experts"
        yield Hint("rows of experts", text)

    def _list_candidates(self, item: ComparedTensor) -> Iterator[ComparedTensor]:
        """The same tensor of other experts, then of other layers; the nearest numbers first."""
        names = {i.site for i in self.a.items() if i.kind == item.kind}
        layer, expert = _get_numbers(item.site)
        pattern = re.compile(
            NUMBERED.sub(lambda m: f"{m[1]}\0", item.site).replace(".", r"\.").replace("\0", r"\.(\d+)")
        )
        similar = [n for n in names if n != item.site and pattern.fullmatch(n)]

        def distance(name: str) -> tuple[int, int]:
            other = _get_numbers(name)
            return abs(other[0] - layer), abs(other[1] - expert)

        for name in sorted(similar, key=distance):
            yield ComparedTensor(name, item.kind, item.call)

    # -- the attention mask ------------------------------------------------------------------------------

    def _find_mask(self, pair: TensorPair) -> Iterator[Hint]:
        """Whether other entries are masked, the same in all heads: those that dropout omits are not."""
        unlike, first, place = 0, "", pair.along("n")
        for block, a, b in pair.blocks(self.most):
            other = _are_masked_in_one(a, b, pair.item.site.endswith(":scores"))
            if place is not None and not bool((other.all(place) == other.any(place)).all()):
                return
            if other.any() and not first:
                at = [int(i) + s.start for i, s in zip(other.nonzero()[0], block, strict=True)]
                first = ", ".join(f"{d} {n[i]}" for d, n, i in zip(pair.dims, pair.numbers, at, strict=True))
            unlike += int(other.sum())
        if unlike:
            text = (
                f"{unlike} entries are masked in one run only, first at {first}: the attention mask differs"
            )
            yield Hint("mask", text)

    def _find_rotation(self, pair: TensorPair, noise: float) -> Iterator[Hint]:
        """Whether the angles of the rotary embedding differ."""
        if pair.dims[:2] != (SAMPLE_AXIS, TOKEN_AXIS) or len(pair.dims) != 4:
            return
        samples = max(1, ROTATED_ENTRIES // math.prod(pair.shape[1:]))
        block = [slice(0, min(samples, pair.shape[0])), *(slice(0, n) for n in pair.shape[1:])]
        text = find_rotation(*pair.read(block), noise) if pair.numbers[1][0] == 0 else ""
        if text:
            yield Hint("rotary angles", text)


def _are_masked_in_one(a: torch.Tensor, b: torch.Tensor, scores: bool) -> torch.Tensor:
    """Entries that attention leaves out in one run, and that count in the other."""
    if scores:
        return (a <= MASKED_SCORE) != (b <= MASKED_SCORE)
    return ((a == 0) & (b > MIN_PROBABILITY)) | ((b == 0) & (a > MIN_PROBABILITY))


def _describe_move(item: ComparedTensor, candidate: ComparedTensor) -> str:
    """What it means that B has A's tensor of another layer or expert."""
    layers = [_get_numbers(i.site)[0] for i in (item, candidate)]
    if layers[0] == layers[1]:
        return "experts are permuted, repeated, or dealt out to other ranks"
    if item.kind == VALUE and layers[1] == layers[0] - 1 and item.site.endswith(":input"):
        return (
            f"layer {layers[0]} reads the input of layer {layers[1]} in B, or layer {layers[1]} adds nothing"
        )
    if item.kind == VALUE and layers[1] == layers[0] - 1:
        return f"layer {layers[0]} adds nothing in B, or layers are permuted"
    return "layers are permuted, repeated, or dealt out to other ranks"


def _get_numbers(name: str) -> tuple[int, int]:
    """The layer and the expert of a name; -1 without."""
    numbers = {m[1]: int(m[2]) for m in NUMBERED.finditer(name)}
    return numbers.get("layers", -1), numbers.get("local_experts", -1)
