"""Dumps as FlexModel takes them."""

from __future__ import annotations

import re

from torch import nn

from megatron_flex.dump import Dump
from megatron_flex.errors import HookError
from megatron_flex.runtime import Session
from megatron_flex.runtime.dumps import manifest_of
from megatron_flex.sites import Pattern, Site


class Dumps:
    """What FlexModel does with dumps."""

    session: Session
    chunks: nn.ModuleList

    def register_dump(self, dump: Dump) -> None:
        """Write to a dump from the next step on. Collective over the mesh.

        Raises:
            SiteError: a pattern matches nothing, or only what the configuration hides.
            DumpError: on all ranks: it cannot be written there.
        """
        session = self.session
        sites = self._sites_of(dump)
        config = getattr(self.chunks[0], "config", getattr(session.adapter, "config", None))
        parameters = {p.name: p for ps in session.survey.sites.values() for p in ps[:1]}
        manifest = manifest_of(dump, session.adapter.name, session.mesh, sites, parameters, config)
        names, fixed = frozenset(s.name for s in sites), frozenset(s.name for s in sites if s.fixed)
        dumped = session.dumping.add(dump, manifest, names, fixed)
        for hook in dumped.hooks:
            session.add(hook)

    def _sites_of(self, dump: Dump) -> list[Site]:
        table = self.session.sites
        wanted: set[str] = set()
        for pattern in dump.sites:
            found = table.match(pattern, "output")
            open_ = [s for s in found if not s.hidden]
            if not open_ or (len(open_) < len(found) and not _is_glob(pattern)):
                hidden = next(s for s in found if s.hidden)
                raise HookError(f"no hook can stand at {hidden.name}: {hidden.hidden}")
            wanted |= {s.name for s in open_}
        return [s for s in table if s.name in wanted]


def _is_glob(pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None
