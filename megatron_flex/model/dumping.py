"""Dumps as FlexModel takes them."""

from __future__ import annotations

from torch import nn

from megatron_flex.dump import Dump
from megatron_flex.model.choosing import SinkPurpose, select_sink_sites
from megatron_flex.runtime import Session
from megatron_flex.runtime.dumps import DumpSelection, select_parameters, make_manifest

DUMP_PURPOSE = SinkPurpose("the dump", "dumped")


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
        session.check_open()
        sites, exact = select_sink_sites(session, dump.sites, DUMP_PURPOSE)
        chosen = DumpSelection(sites, exact, select_parameters(session.survey, dump.parameters))
        config = getattr(self.chunks[0], "config", getattr(session.adapter, "config", None))
        parameters = {name: found[0] for name, found in session.survey.sites.items()}
        manifest = make_manifest(dump, session.adapter.name, session.mesh, chosen, parameters, config)
        for hook in session.sinks.dumping.add(dump, chosen, manifest).hooks:
            session.add(hook)

    def remove_dump(self, dump: Dump) -> None:
        """Take a dump out, and wait until all of it is written. Every rank calls it alike, between steps.

        Raises:
            DumpError: it is not registered; or, with on_error='raise', writing failed on some rank.
        """
        for hook in self.session.sinks.dumping.remove(dump).hooks:
            self.session.remove(hook)
