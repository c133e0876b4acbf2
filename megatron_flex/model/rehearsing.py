"""Editing functions tried before the first step."""

from __future__ import annotations

import warnings

from megatron_flex.errors import FlexWarning, HookError
from megatron_flex.runtime import Session


class Rehearsing:
    """What FlexModel does with editing functions before a step."""

    session: Session

    def dry_run(self) -> None:
        """Run every active editing function once, on a random tensor of a small shape. Every rank calls it.

        Each runs with its module, a `save_ctx` of these trials, the trainable modules and its side effects,
        at the first of its hook's sites on each pipeline stage. (When a hook is registered this is done by
        itself with functions whose source shows that they can do no harm.) Where the lengths of sequence and
        batch are not known, small ones stand for them.

        Raises:
            HookError: on all ranks, if one returns what it must not, or raises with the lengths of a step.

        Warns:
            FlexWarning: one raises with lengths that are not those of a step.
        """
        session = self.session
        own = session.standing.own
        found = session.rehearsal.all(session.registry.active, own, session.editing.modules)
        bad = [f.text for f, certain in found if certain]
        if bad:
            raise HookError("; ".join(bad))
        for failure, _ in found:
            warnings.warn_explicit(failure.text, FlexWarning, *failure.place)
