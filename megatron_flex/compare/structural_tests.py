"""Tests that pool over entries: a constant factor, one of each token, an offset, one block, a narrower dtype.

Each compares a statistic with a bound that correct pairs do not reach. The standard error of a pooled
statistic counts differences that are correlated along a dim: it is the sum of the variances clustered by the
entries of each dim (Cameron, Gelbach and Miller, Robust Inference With Multiway Clustering, 2011, without the
terms that this sum counts twice, which makes it larger).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import GRID_DTYPES, find_on_grid
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS
from megatron_flex.compare.difference_profile import DifferenceProfile, DimSums

FACTOR_DEVIATIONS = 8.0  # standard errors; 200,000 tests of correct pairs reach 5
GRADIENT_DEVIATIONS = 12.0  # of gradients of parameters, of which a few tokens are most; they reach 6.3
MIN_CLUSTERS = 16  # entries of the longest dim, fewer of which give no standard error
FACTOR_UNITS = 2.0  # unit roundoffs: a scalar that was rounded once more is not a wrong factor
BLOCK_CONTRAST, SMALL_BLOCK_CONTRAST = 4.0, 6.0  # amplitude of a block's difference over that of the rest
POSITION_CONTRAST = 8.0  # of token positions, which attend to more tokens the later they are
LATE_CONTRAST = 30.0  # once parameters differ: a few tokens may be most of a gradient; they reach 14
GRADIENT_CONTRAST = 10.0  # of rows of a parameter's gradient, to which some tokens contribute; they reach 5.7
SMALL_BLOCK = 64  # entries
MIN_BLOCK_ENTRIES = 4  # of the dim: the median of fewer does not resist one entry
ENTRY_CONTRAST = 10.0  # of one sample, token or head
OFFSET_SHARE = 0.75  # of the difference's energy, in one vector that all rows share
OFFSET_ROWS = 32
ROW_SHARE = 0.5  # of the difference's energy, in a factor of each token; correct pairs reach 0.27
ROW_UNITS = 1.5  # unit roundoffs: a norm's scale that was rounded once more is not a wrong factor
ROW_COUNT = 6.0  # tokens, fewer of which have most of it: single ones that round-off moved, as in fp8
UNRELATED_SIZE, UNRELATED_SHARE = 0.5, 0.9  # half of the difference of unrelated rows is along each of them
ROW_WIDTH = 8  # features, fewer of which have much of any difference along themselves
GRID_SHARE, GRID_SHARE_OTHER, GRID_ENTRIES = 0.999, 0.5, 64  # of B, of A, and entries of a block
HEAD_DIMS = ("n", "g")
Sums = tuple[float, ...]
Copies = dict[Sums, tuple[str, Sums]]  # by what a tensor of A adds up to: its name, and what it does in B


@dataclass(frozen=True, slots=True)
class Outcome:
    """A test of one tensor.

    Attributes:
        test: its name.
        statistic: what it computed.
        bound: the greatest value of correct pairs; a greater one is a divergence.
        evidence: the result as one line; empty where it is within its bound.
        axis: the mesh axis that it names; empty if none.
    """

    test: str
    statistic: float
    bound: float
    evidence: str = ""
    axis: str = ""

    def __post_init__(self) -> None:
        if self.statistic <= self.bound:
            object.__setattr__(self, "evidence", "")

    @property
    def excess(self) -> float:
        """The statistic over its bound: above 1 is a divergence."""
        if self.statistic <= self.bound:
            return self.statistic / self.bound if self.bound > 0 else 0.0
        return self.statistic / self.bound if self.bound > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of a dim that belong together: one rank's shard, one head.

    Attributes:
        dim: the index of the dim.
        entries: indices of its entries.
        text: what it is.
        axis: the mesh axis, for a shard.
    """

    dim: int
    entries: tuple[int, ...]
    text: str
    axis: str = ""


def estimate_factor(profile: DifferenceProfile) -> tuple[float, float]:
    """The constant factor between both minus 1, and its standard error; infinite if it cannot be estimated.

    The factor is the regression of the difference on A.
    """
    energy = profile.total("squares_a")
    longest = max((len(s.numbers) for s in profile.by_dim), default=0)
    if not energy or longest < MIN_CLUSTERS:
        return 0.0, math.inf
    factor = profile.total("dots") / energy
    # Products, not powers: of entries near the greatest double a power raises, and a product is infinite.
    left = max(profile.total("squares") - factor * factor * energy, 0.0) / energy
    variance = left / profile.count
    for sums in profile.by_dim:
        length = len(sums.numbers)
        if length > 1:
            scores = (sums.dots - factor * sums.squares_a) / energy
            variance += float(scores.square().sum()) * length / (length - 1)
    return (factor, math.sqrt(variance)) if math.isfinite(variance) else (0.0, math.inf)


def bound_factor(
    profile: DifferenceProfile, factor: float, error: float, unit: float, deviations: float
) -> float:
    """The greatest deviation from 1 that noise makes.

    A has noise of its own, which the regression takes for a smaller factor: by its part of A's energy.
    """
    energy = profile.total("squares_a")
    left = max(profile.total("squares") / energy - factor * factor, 0.0) if energy else 0.0
    return max(deviations * error, FACTOR_UNITS * unit) + left


def check_factor(
    profile: DifferenceProfile, unit: float, deviations: float = FACTOR_DEVIATIONS, least: float = 0.0
) -> Outcome | None:
    """Whether one is the other times a constant.

    Args:
        profile: the sums of the tensor.
        unit: the unit roundoff of the run.
        deviations: the bound in standard errors.
        least: of the bound.
    """
    factor, error = estimate_factor(profile)
    if not math.isfinite(error):
        return None
    bound = max(bound_factor(profile, factor, error, unit, deviations), least)
    wide = f"{1 + factor:.6g} +- {error:.2g}"
    text = f"B is A times {wide}, pooled over {profile.count:,} entries"
    return Outcome("factor", abs(factor), bound, text)


def _relative_energies(sums: DimSums) -> Tensor:
    """For each entry of a dim the energy of the difference over that of A; half of that is the average's."""
    average = sums.squares_a.sum() / sums.count.sum().clamp(min=1) * sums.count
    return sums.squares / (0.5 * (sums.squares_a + average)).clamp(min=1e-300)


def measure_block(
    profile: DifferenceProfile, block: Block, unit: float, least: float = 0.0
) -> tuple[float, float]:
    """The amplitude of a block's difference over that of the rest, by medians, and its bound.

    Entries of the rest that are equal in both runs do not count where others differ: with context parallelism
    the first positions may be computed by the same operations in both runs, and the last ones may not.
    """
    sums = profile.by_dim[block.dim]
    relative = _relative_energies(sums)
    inside = torch.zeros(len(relative), dtype=torch.bool)
    inside[list(block.entries)] = True
    has_entries = sums.count > 0
    in_block, rest = relative[inside & has_entries], relative[~inside & has_entries]
    if not len(in_block) or not len(rest):
        return 0.0, math.inf
    if bool((rest > 0).any()):
        rest = rest[rest > 0]
    floor = (unit / 2) ** 2
    contrast = math.sqrt(float(in_block.median()) / (float(rest.median()) + floor))
    if len(block.entries) < MIN_BLOCK_ENTRIES:
        return contrast, max(ENTRY_CONTRAST, least)
    if sums.dim in (TOKEN_AXIS, "s"):
        return contrast, max(POSITION_CONTRAST, least)
    small = float(sums.count[inside].sum()) < SMALL_BLOCK
    return contrast, max(SMALL_BLOCK_CONTRAST if small else BLOCK_CONTRAST, least)


def check_blocks(
    profile: DifferenceProfile,
    blocks: Sequence[Block],
    unit: float,
    single: bool,
    least: float = 0.0,
) -> Outcome | None:
    """Whether the difference is confined to one block: the outcome of the block that differs most.

    Args:
        profile: the sums of the tensor.
        blocks: the candidates.
        unit: the unit roundoff of the run.
        single: whether blocks of a few entries count: not where single weights differ.
        least: of the bounds.
    """
    best: Outcome | None = None
    for block in blocks:
        if not single and len(block.entries) < MIN_BLOCK_ENTRIES:
            continue
        contrast, bound = measure_block(profile, block, unit, least)
        text = f"the difference is {contrast:.1f} times as large in {block.text} as elsewhere"
        outcome = Outcome("block", contrast, bound, text, block.axis)
        if best is None or outcome.excess > best.excess:
            best = outcome
    return best


def list_entry_blocks(profile: DifferenceProfile) -> list[Block]:
    """Each sample, token position and head as a block, of dims with at least four of them."""
    words = {SAMPLE_AXIS: "sample", TOKEN_AXIS: "token", "microbatch": "microbatch"}
    words |= dict.fromkeys(HEAD_DIMS, "head")
    out = []
    for at, sums in enumerate(profile.by_dim):
        if sums.dim in words and len(sums.numbers) >= 4:
            relative = _relative_energies(sums)
            worst = int(relative.argmax())  # the only one that can exceed the bound
            out.append(Block(at, (worst,), f"{words[sums.dim]} {sums.numbers[worst]}"))
    return out


def check_offset(profile: DifferenceProfile, weights: float, unit: float) -> Outcome | None:
    """Whether the difference is one vector that all rows share, as a bias is.

    Args:
        profile: the sums of the tensor.
        weights: how far the parameters of the module differ, relative to their norm.
        unit: the unit roundoff of the run.
    """
    energy, reference = profile.total("squares"), profile.total("squares_a")
    features = [s for s in profile.by_dim if s.dim not in (SAMPLE_AXIS, TOKEN_AXIS, "microbatch")]
    if len(features) != 1 or len(profile.by_dim) < 2 or not energy or not reference:
        return None
    sums = features[0]
    if float(sums.count.min()) < OFFSET_ROWS:
        return None
    common = float((sums.total.square() / sums.count).sum())
    size, share = math.sqrt(common / reference), common / energy
    if size < max(4 * weights, 2 * unit):
        share = 0.0
    text = f"{share:.0%} of the difference is the same vector for all tokens: an offset or a bias"
    return Outcome("offset", share, OFFSET_SHARE, text)


def check_rows(profile: DifferenceProfile, unit: float) -> Outcome | None:
    """Whether each row of the last dim is the other run's times a factor of its own, as of an epsilon.

    Args:
        profile: the sums of the tensor.
        unit: the unit roundoff of the run.
    """
    energy, reference = profile.total("squares"), profile.total("squares_a")
    if len(profile.by_dim) < 2 or len(profile.numbers[-1]) < ROW_WIDTH or not energy or not reference:
        return None
    size, share = math.sqrt(profile.along / reference), profile.along / energy
    # The number of rows that have the energy: 1 / (sum of the squares of their shares).
    rows = profile.along * profile.along / profile.along_squares if profile.along_squares else 0.0
    if size < ROW_UNITS * unit or rows < ROW_COUNT:
        share = 0.0
    if size > UNRELATED_SIZE and share < UNRELATED_SHARE:
        share = 0.0
    text = f"{share:.0%} of the difference is a factor of each token by itself, about 1 +- {size:.2g}"
    return Outcome("rows", share, ROW_SHARE, f"{text}: an epsilon, or a scale")


def check_copy(profile: DifferenceProfile, name: str, copies: Copies) -> Outcome | None:
    """Whether a tensor that is another's copy in one run is so in the other.

    Args:
        profile: the sums of the tensor.
        name: its name.
        copies: the tensors before it, to which it is added.
    """
    digest_a, digest_b = (
        (float(profile.count), *getattr(profile.by_dim[0], sums).tolist())
        for sums in ("squares_a", "squares_b")
    )
    source, expected = copies.setdefault(digest_a, (name, digest_b))
    if expected == digest_b:
        return None
    return Outcome("copy", 1.0, 0.0, f"it is a copy of {source} in A, and not in B")


def check_grid(profile: DifferenceProfile, blocks: Sequence[Block], bits: int = 0) -> Outcome | None:
    """Whether one of the runs, or one of its shards, has only values that a narrower dtype represents.

    Args:
        profile: the sums of the tensor.
        blocks: the shards.
        bits: the low bits of the mantissa that the run's compute dtype leaves zero by itself.
    """
    if not profile.total("squares_a") or not profile.total("squares_b"):
        return None  # every dtype has 0
    for grid in profile.grids:
        if grid.bits <= bits:
            continue
        everything = (
            ("B", grid.total_b, grid.total_a, "all of the tensor", "", profile.count),
            ("A", grid.total_a, grid.total_b, "all of the tensor", "", profile.count),
        )
        candidates: list[tuple[str, float, float, str, str, float]] = list(everything)
        for block in blocks:
            where = list(block.entries)
            count = float(profile.by_dim[block.dim].count[where].sum())
            a, b = (float(t[block.dim][where].sum()) for t in (grid.a, grid.b))
            candidates += [
                ("B", b, a, block.text, block.axis, count),
                ("A", a, b, block.text, block.axis, count),
            ]
        for run, rounded, other, text, axis, count in candidates:
            on_grid = count >= GRID_ENTRIES and rounded >= GRID_SHARE * count
            if on_grid and other <= GRID_SHARE_OTHER * count:
                line = f"in {text}, {rounded / count:.1%} of {run}'s values are rounded to {grid.name},"
                return Outcome(
                    "narrower dtype",
                    rounded / count,
                    GRID_SHARE_OTHER,
                    f"{line} a narrower dtype, and {other / count:.1%} of the other run's",
                    axis,
                )
    return None


def check_partial_sums(
    profile: DifferenceProfile, run: str, parts: Iterable[tuple[str, int, Tensor]]
) -> Outcome | None:
    """Whether one rank's part of a sum has only values that a narrower dtype represents.

    The sum itself does not: the other ranks' parts are added to it.

    Args:
        profile: the sums of the tensor.
        run: `A` or `B`, which has the parts.
        parts: the mesh axis of the sum, the rank's coordinate on it, and its part; several for a rank.
    """
    counts: dict[tuple[str, int], Tensor] = {}
    for axis, coord, part in parts:
        if part.dtype not in GRID_DTYPES:
            return None
        part = part[part != 0]
        on_grid = [int(find_on_grid(part, grid.bits).sum()) for grid in profile.grids]
        entry_counts = torch.tensor([part.numel(), *on_grid])
        counts[axis, coord] = counts.get((axis, coord), torch.zeros_like(entry_counts)) + entry_counts
    for at, grid in enumerate(profile.grids, 1):
        other = (grid.total_a if run == "B" else grid.total_b) / max(profile.count, 1)
        for (axis, coord), entry_counts in counts.items():
            count, rounded = int(entry_counts[0]), int(entry_counts[at])
            if count >= GRID_ENTRIES and rounded >= GRID_SHARE * count and other <= GRID_SHARE_OTHER:
                return Outcome(
                    "narrower dtype",
                    rounded / count,
                    GRID_SHARE_OTHER,
                    f"{rounded / count:.1%} of the partial sums of {axis} rank {coord} in {run} are rounded "
                    f"to {grid.name}, a narrower dtype, and {other:.1%} of the other run's values",
                    axis,
                )
    return None
