"""The covering design: which part of the product of configurations and edits a run of all tests makes.

Every configuration compares the values and gradients of every site. Edits are dearer, a run of the model
each, so a configuration edits what no configuration before it in its list has edited along one of its axes,
and a share of the rest, several sites in one run. Other tests of (configuration, hook) choose in the same
way, by `part`.
`pytest --product` (scripts/dev/coverage_matrix) makes the full product.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from itertools import combinations
from typing import TypeVar

from tests.support import oracle
from tests.support.gpt import Case

PRODUCT = "FLEX_PRODUCT"  # the variable that is 1 in a run of the full product
SHARE = 6  # of the edits that other configurations make, one in so many is made all the same

AT_ONCE = 8  # sites that are edited in one run of a model

Item = TypeVar("Item")


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
    return _share(case, among, oracle.edits_of)


def sites(case: Case, among: Sequence[Case]) -> list[str]:
    """Which sites a test looks at that is too dear for all of them in each configuration.

    Args:
        case: one of `among`.
        among: the configurations of the test.
    """
    return _share(case, among, oracle.sites_of)


def _share(case: Case, among: Sequence[Case], sites_of: Callable[[Case], list[str]]) -> list[str]:
    """A case's part of some sites: each kind of site along each axis."""

    def elements(number: int, site: str) -> set[tuple[str, str]]:
        return {(kind(site), axis) for axis in axes(among[number])}

    number = [c.name for c in among].index(case.name)
    return part([sites_of(c) for c in among], number, elements)


def together(sites: Sequence[str]) -> list[str]:
    """Sites to edit, several in one run: what one edit does wrong shows in losses and gradients all the same.

    Sites of one run are far apart in the model, and of different modules: which of two edits at one place
    runs first is not compared. In a run of the product each site is edited alone.

    Args:
        sites: their names, in the model's order.

    Returns:
        For each run the names of its sites, with `oracle.AND` between them.
    """
    if is_product():
        return list(sites)
    groups: list[list[str]] = [[] for _ in range(-(-len(sites) // AT_ONCE))]
    for i, site in enumerate(sites):
        turns = [groups[(i + n) % len(groups)] for n in range(len(groups))]
        fits = (g for g in turns if len(g) < AT_ONCE and _module(site) not in map(_module, g))
        group = next(fits, None)
        if group is None:
            groups.append(group := [])
        group.append(site)
    return [oracle.AND.join(g) for g in groups if g]


def _module(site: str) -> str:
    return site.partition(":")[0]


def part(
    offers: Sequence[Sequence[Item]],
    number: int,
    elements: Callable[[int, Item], Iterable[Hashable]],
) -> list[Item]:
    """What one configuration takes of what it could test: all in a run of the product, and else its part.

    Args:
        offers: for each configuration what it could test, those first that should test the most.
        number: which of them.
        elements: of a configuration's number and an item: what is covered by testing that item there.

    Returns:
        The items that cover what no configuration before it covers, and one in `SHARE` of the others.
    """
    mine = offers[number]
    if is_product():
        return list(mine)
    # A configuration covers all that it can: what none before it covers, it takes itself.
    covered = {e for n in range(number) for item in offers[n] for e in elements(n, item)}
    out = []
    for i, item in enumerate(mine):
        found = set(elements(number, item))
        if (i + number) % SHARE == 0 or not found <= covered:
            out.append(item)
            covered |= found
    return out


def least(
    candidates: Iterable[Item], elements: Callable[[Item], Set[Hashable]], cost: Callable[[Item], float]
) -> list[Item]:
    """Few candidates that cover what all of them do: always the one that covers most of the rest at its cost.

    Args:
        candidates: what there is to choose from.
        elements: what one of them covers.
        cost: of one of them, such as its number of ranks.
    """
    every = [(item, elements(item), cost(item)) for item in candidates]
    left = set[Hashable]().union(*(found for _, found, _ in every))
    out = []
    while left:
        item, found, _ = max(every, key=lambda e: len(e[1] & left) / e[2])
        out.append(item)
        left -= found
    return out
