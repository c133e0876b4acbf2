"""The sites that patterns of a dump, or of statistics, choose."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_flex.errors import FlexWarning, HookError
from megatron_flex.layout import TENSOR_AXIS
from megatron_flex.runtime import Session
from megatron_flex.sites import Pattern, Site

INDEXED_POINT = re.compile(r"(.+:.+)\[(\d+)\]")  # a point, and which of the tensors that pass there
MAX_NAMES_SHOWN = 8  # names in one warning


class SinkPurpose(NamedTuple):
    """What sites are chosen for, as warnings say it: what it is, and what is done to them."""

    what: str
    done: str


def select_sink_sites(
    session: Session, patterns: Sequence[Pattern], purpose: SinkPurpose, bars: Callable[[Site], str] | None = None
) -> tuple[tuple[Site, ...], frozenset[str]]:
    """The sites that patterns choose, in model order, and which of them were named as they are.

    Of those that a pattern matches, the ones that cannot be had are left out, with a warning.

    Args:
        session: whose sites they are.
        patterns: names and patterns.
        purpose: what they are for.
        bars: what else stands in the way of a site, in words; empty for nothing.

    Raises:
        SiteError: a pattern matches nothing.
        HookError: a name, or all that a pattern matches, cannot be had.
    """
    own = session.standing.own
    wanted: dict[str, set[int]] = {}
    exact: set[str] = set()
    barred: dict[str, str] = {}
    for pattern in patterns:
        name, index = _split_index(pattern)
        found = session.sites.match(name, "output")
        why = {s.name: s.hidden or (bars(s) if bars else "") for s in found}
        barred |= {name: reasons for name, reasons in why.items() if reasons}
        free = [s for s in found if not why[s.name]]
        if not free or (len(free) < len(found) and not _is_glob(name)):
            first = next(s for s in found if why[s.name])
            raise HookError(f"no hook can stand at {first.name}: {why[first.name]}")
        for site in free:
            wanted.setdefault(site.name, set()).add(index)
        exact |= set() if _is_glob(name) else {s.leaf(index).name for s in free}
    warn_left_out(barred, purpose)
    sites = [s.leaf(i) for s in session.sites if s.name in wanted for i in sorted(wanted[s.name])]
    _warn_assumed_replicated(session, sites, purpose)
    return tuple(replace(s, tap=own[s.place].tap) if s.place in own else s for s in sites), frozenset(exact)


def warn_left_out(barred: dict[str, str], purpose: SinkPurpose) -> None:
    """Warn of places that are left out, and why."""
    if barred:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(barred.items())[:MAX_NAMES_SHOWN])
        more = f"; and {len(barred) - MAX_NAMES_SHOWN} more" if len(barred) > MAX_NAMES_SHOWN else ""
        warnings.warn(f"left out of {purpose.what}: {reasons}{more}", FlexWarning, stacklevel=4)


def _warn_assumed_replicated(session: Session, sites: list[Site], purpose: SinkPurpose) -> None:
    """Warn of plain modules whose tensors may be parts, which nobody says."""
    expected, cut = session.registry.expected, session.mesh[TENSOR_AXIS].size > 1
    names = [s.name for s in sites if cut and s.inferred and not s.followed and expected(s.name) is None]
    if names:
        warnings.warn(
            f"{names[0]} and other places of plain modules ({len(names)} in all) are {purpose.done} as if "
            "every tensor parallel rank had the whole; give a hook with expected_shape where one has a part",
            FlexWarning,
            stacklevel=4,
        )


def _split_index(pattern: Pattern) -> tuple[Pattern, int]:
    """A pattern without the number of a tensor, and that number."""
    found = INDEXED_POINT.fullmatch(pattern) if isinstance(pattern, str) else None
    return (found.group(1), int(found.group(2))) if found else (pattern, 0)


def _is_glob(pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None
