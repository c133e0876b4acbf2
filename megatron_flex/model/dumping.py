"""Dumps as FlexModel takes them."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

from torch import nn

from megatron_flex.dump import Dump
from megatron_flex.errors import FlexWarning, HookError
from megatron_flex.layout import AXIS
from megatron_flex.runtime import Session
from megatron_flex.runtime.dumps import Chosen, chosen_parameters, manifest_of
from megatron_flex.sites import Pattern, Site

LEAF = re.compile(r"(.+:.+)\[(\d+)\]")  # a point, and which of the tensors that pass there
SHOWN = 8  # names in one warning


class Dumps:
    """What FlexModel does with dumps."""

    session: Session
    chunks: nn.ModuleList

    def register_dump(self, dump: Dump) -> None:
        """Write to a dump from the next step on. Every rank calls it alike.

        What passes is written as it is before edits at the same place. Of places that a pattern matches,
        those that the configuration hides are left out, with a warning.

        Raises:
            SiteError: a pattern matches nothing.
            HookError: a name, or all that a pattern matches, is hidden; on all ranks, if they have different
                dumps.
            DumpError: on all ranks: it cannot be written there.
        """
        session = self.session
        sites, exact = self._sites_of(dump)
        chosen = Chosen(sites, exact, chosen_parameters(session.survey, dump.parameters))
        config = getattr(self.chunks[0], "config", getattr(session.adapter, "config", None))
        parameters = {name: found[0] for name, found in session.survey.sites.items()}
        manifest = manifest_of(dump, session.adapter.name, session.mesh, chosen, parameters, config)
        for hook in session.sinks.dumping.add(dump, chosen, manifest).hooks:
            session.add(hook)

    def remove_dump(self, dump: Dump) -> None:
        """Take a dump out, and wait until all of it is written. Every rank calls it alike, between steps.

        Raises:
            DumpError: it is not registered; or, with on_error='raise', writing failed on some rank.
        """
        for hook in self.session.sinks.dumping.remove(dump).hooks:
            self.session.remove(hook)

    def _sites_of(self, dump: Dump) -> tuple[tuple[Site, ...], frozenset[str]]:
        """The sites of a dump, in model order, and which of them were named as they are."""
        table, own = self.session.sites, self.session.standing.own
        wanted: dict[str, set[int]] = {}
        exact: set[str] = set()
        hidden: dict[str, str] = {}
        for pattern in dump.sites:
            name, index = _leaf(pattern)
            found = table.match(name, "output")
            open_ = [s for s in found if not s.hidden]
            hidden |= {s.name: s.hidden for s in found if s.hidden}
            if not open_ or (len(open_) < len(found) and not _is_glob(name)):
                first = next(s for s in found if s.hidden)
                raise HookError(f"no hook can stand at {first.name}: {first.hidden}")
            for site in open_:
                wanted.setdefault(site.name, set()).add(index)
            exact |= set() if _is_glob(name) else {s.leaf(index).name for s in open_}
        _tell(hidden)
        sites = [s.leaf(i) for s in table if s.name in wanted for i in sorted(wanted[s.name])]
        self._tell_uncut(sites)
        return tuple(replace(s, tap=own[s.place].tap) if s.place in own else s for s in sites), frozenset(
            exact
        )

    def _tell_uncut(self, sites: list[Site]) -> None:
        """Warn of plain modules whose tensors may be parts, which nobody says."""
        expected, cut = self.session.registry.expected, self.session.mesh[AXIS].size > 1
        names = [s.name for s in sites if cut and s.inferred and not s.followed and expected(s.name) is None]
        if names:
            warnings.warn(
                f"{names[0]} and other places of plain modules ({len(names)} in all) are dumped as if every "
                "tensor parallel rank had the whole; give a hook with expected_shape where one has a part",
                FlexWarning,
                stacklevel=3,
            )


def _tell(hidden: dict[str, str]) -> None:
    if hidden:
        told = "; ".join(f"{name}: {why}" for name, why in list(hidden.items())[:SHOWN])
        more = f"; and {len(hidden) - SHOWN} more" if len(hidden) > SHOWN else ""
        warnings.warn(f"left out of the dump: {told}{more}", FlexWarning, stacklevel=4)


def _leaf(pattern: Pattern) -> tuple[Pattern, int]:
    """A pattern without the number of a tensor, and that number."""
    found = LEAF.fullmatch(pattern) if isinstance(pattern, str) else None
    return (found.group(1), int(found.group(2))) if found else (pattern, 0)


def _is_glob(pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None
