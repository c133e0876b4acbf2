"""The covering design: which part of the product of configurations and edits a run of all tests makes.

Every configuration compares the values and gradients of every site. Edits are dearer, a run of the model
each, so a configuration edits what no configuration before it in its list has edited along one of its axes,
and a share of the rest. `pytest --product` (scripts/coverage_matrix) makes the full product.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import combinations

from tests.support import oracle
from tests.support.gpt import Case

PRODUCT = "FLEX_PRODUCT"  # the variable that is 1 in a run of the full product
SHARE = 6  # of the edits that other configurations make, one in so many is made all the same


def is_product() -> bool:
    """Whether this run makes the full product."""
    return os.environ.get(PRODUCT) == "1"


def axes(case: Case) -> frozenset[str]:
    """The axes of parallelism that a case has, and `recompute`; `tp1` where it has none."""
    found = {n for n in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp") if (getattr(case, n) or 1) > 1}
    found |= {"sp"} if case.sp else set()
    found |= {"recompute"} if case.recompute else set()
    return frozenset(found or {"tp1"})


def pairs(case: Case) -> frozenset[tuple[str, ...]]:
    """The pairs of axes that a case has together."""
    return frozenset(combinations(sorted(axes(case)), 2))


def kind(site: str) -> str:
    """A site without the numbers of layers and experts."""
    return re.sub(r"\.\d+\b", ".N", site)


def edits(case: Case, among: Sequence[Case]) -> list[str]:
    """Where a case is edited: all of `oracle.edits_of` in a run of the product, and else its part of them.

    Args:
        case: one of `among`.
        among: configurations in the order in which they are considered, those of simpler models first: a
            site that two models have is the same code.
    """
    mine = oracle.edits_of(case)
    if is_product():
        return mine
    covered: set[tuple[str, str]] = set()
    number = [c.name for c in among].index(case.name)
    for other in among[:number]:
        covered |= _elements(other, oracle.edits_of(other))
    out = []
    for i, site in enumerate(mine):
        elements = _elements(case, [site])
        if (i + number) % SHARE == 0 or not elements <= covered:
            out.append(site)
            covered |= elements
    return out


def _elements(case: Case, sites: Iterable[str]) -> set[tuple[str, str]]:
    """What is edited, along which axis."""
    return {(kind(site), axis) for site in sites for axis in axes(case)}
