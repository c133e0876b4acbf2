"""Where a run stops: the hook points that it reaches, and the residual stream there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_flex.collectives import gather_distinct
from megatron_flex.errors import FlexError, SiteError
from megatron_flex.lens.lens_names import Alias, Filter, LensNames
from megatron_flex.runtime import Session

LOSSES = ("loss", "mtp")  # of Megatron


class StopPoint:
    """The input of a layer, at which a run stops. Every rank makes one. Collective over the model replica.

    Args:
        session: the session of the model.
        names: the model's names.
        layer: the first layer that does not run; negative numbers count from the end.

    Attributes:
        layer: that layer, or the number of layers.
        residual: the residual stream there.

    Raises:
        FlexError: on all ranks: the model has no such layer, or cannot stop.
    """

    def __init__(self, session: Session, names: LensNames, layer: int) -> None:
        self._session, self._names = session, names
        path, before, why = "", "", ""
        try:
            path, before = session.adapter.layer_stack()
        except FlexError as error:
            why = str(error)
        for reason in gather_distinct(why, session.mesh.replica()):
            if reason:
                raise FlexError(reason)
        self._layer = re.compile(rf"{re.escape(path)}\.(\d+)[.:]")
        around = {path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)}  # their outputs are later
        self._around = {*around, session.adapter.logits.partition(":")[0]}
        paths = None if names.made_of is None else names.made_of.paths
        self._after = () if paths is None else (*paths.final_norms, paths.head, *LOSSES)
        matches = [self._layer.match(site.name) for site in session.sites]
        count = 1 + max((int(matched[1]) for matched in matches if matched), default=-1)
        if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer <= count:
            raise FlexError(
                f"stop_at_layer={layer!r}: the model has layers 0 to {count - 1}; give {-count} to {count}"
            )
        self.layer = layer + count if layer < 0 else layer
        if self.layer == 0 and not before:
            raise FlexError(
                f"stop_at_layer={layer}: what enters {path}.0 is known inside it only; read "
                f"'{path}.0:input' with stop_at_layer=1"
            )
        (self.residual,) = names.matching(before if self.layer == 0 else f"{path}.{self.layer - 1}:output")

    def reaches(self, site: str) -> bool:
        """Whether the run reaches a hook point, as far as its name says that."""
        matched = self._layer.match(site)
        if matched:
            return int(matched[1]) < self.layer
        module = site.partition(":")[0]
        after = any(module == path or module.startswith(f"{path}.") for path in self._after)
        return not after and module not in self._around

    def check(self, aliases: Sequence[Alias]) -> None:
        """Refuse hook points that the run does not reach.

        Raises:
            SiteError: there is one.
        """
        for alias in aliases:
            for site in (alias.site, alias.edited[0]):
                if not self.reaches(site):
                    named = site if alias.name == site else f"{alias.name}, here {site},"
                    raise SiteError(
                        f"{named} is not reached by a run that stops at layer {self.layer}; stop later, or "
                        "leave it out"
                    )

    def matching(self, selection: Filter) -> list[Alias]:
        """The names that a filter selects, of those that the run reaches. A name alone must be one of them.

        Raises:
            SiteError: a name matches nothing, or nothing that the run reaches.
        """
        if selection is None or callable(selection):
            return [a for a in self._names.matching(selection) if self.reaches(a.site)]
        selected: dict[str, Alias] = {}
        for name in [selection] if isinstance(selection, str) else selection:
            aliases = self._names.matching(name)
            reached = [a for a in aliases if self.reaches(a.site)]
            self.check(reached or aliases)
            selected.update((a.name, a) for a in reached)
        return list(selected.values())

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop the runs inside the scope."""
        undo = self._session.adapter.stop_at(self.layer)
        try:
            yield
        finally:
            undo()
