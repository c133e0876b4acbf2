"""What runs beside a training: edits, dumps and statistics of a model, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_flex.collectives import everyone
from megatron_flex.dump import Dump
from megatron_flex.errors import FlexError
from megatron_flex.launch.settings import Settings
from megatron_flex.mesh import Mesh
from megatron_flex.model import FlexModel
from megatron_flex.runtime import HookFunction

RESTING = ("dump", "stats")  # the groups that evaluations do not count for
SHOWN = 8  # ranks that an error names before it says how many more there are


class Running:
    """What settings ask for, beside one training. Every rank makes one and calls it alike.

    Attributes:
        settings: what is wanted.
        flex: the model with its hooks; None before `attach` and after `finish` or `abort`.
        dumps: those that are written.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.flex: FlexModel | None = None
        self.dumps: list[Dump] = []
        self._trained = False
        self._before_evaluation: Any = None

    def attach(self, chunks: Any, write: bool = True) -> FlexModel:
        """Put hooks on a model that is built and has its weights. Collective over the job.

        Args:
            chunks: the model, or the list of its virtual pipeline chunks.
            write: whether dumps and statistics are opened, too.

        Raises:
            FlexError: on all ranks: what the settings ask for cannot be; nothing stays in the model then.
        """
        self.abort()
        flex = FlexModel(chunks)
        try:
            found = together(flex.session.mesh, lambda: self._stand(flex))
            if write:
                self._write(flex, found)
        except BaseException:
            flex.session.close(failed=True)
            raise
        self.flex, self._trained = flex, False
        return flex

    def _stand(self, flex: FlexModel) -> Any:
        """Find what the settings name, and put edits where they belong. Nothing is communicated."""
        found = resolved(self.settings)
        for hook in found[0]:
            flex.session.add(hook)
        return found

    def _write(self, flex: FlexModel, found: Any) -> None:
        for dump in found[1]:
            flex.register_dump(dump)
        self.dumps = list(found[1])
        if self.settings.verify:
            flex.verify(self.settings.verify)

    def step_begins(self, iteration: int | None = None) -> None:
        """A training step begins; `iteration` as the loop counts, from 0, None if it does not."""
        self._trained = True

    def step_ends(self) -> None:
        """It is over: its backward passes and the optimizer's update are done."""

    def evaluation(self, on: bool) -> None:
        """Evaluation begins, or is over: meanwhile edits count, and nothing is dumped or measured.

        In a run that only evaluates all of it counts.
        """
        if self.flex is None or not self._trained:
            return
        registry = self.flex.session.registry
        if on:
            self._before_evaluation = before = registry.selection
            if not before.complement:
                registry.selection = replace(before, without=before.without | set(RESTING))
        elif self._before_evaluation is not None:
            registry.selection, self._before_evaluation = self._before_evaluation, None

    def finish(self) -> None:
        """Take everything out, and wait until all is written. Collective; nothing if nothing stands.

        Raises:
            FlexError: on all ranks: a hook never fired, or something could not be written. The model is
                restored even so.
        """
        flex, self.flex = self.flex, None
        if flex is not None:
            flex.restore()

    def abort(self) -> None:
        """Take everything out of a training that failed, perhaps on this rank only: nobody is waited for.

        What was dumped whole stays.
        """
        flex, self.flex = self.flex, None
        if flex is not None:
            flex.session.close(failed=True)


def together(mesh: Mesh, act: Callable[[], Any]) -> Any:
    """Do what may fail on some ranks, and raise on all if it did. Collective over the mesh.

    Returns:
        What `act` did.

    Raises:
        FlexError: on the ranks where nothing failed, with what the others say.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as caught:  # told to all, and raised as it is
        error = caught
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    told = everyone((rank, None if error is None else _said(error)), mesh, [a.name for a in mesh])
    if error is not None:
        raise error
    wrong: dict[str, list[int]] = {}
    for who, what in told:
        if what is not None:
            wrong.setdefault(what, []).append(who)
    if wrong:
        raise FlexError("; ".join(f"{what} (rank {_some(who)})" for what, who in wrong.items()))
    return result


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, FlexError) else f"{type(error).__name__}: {error}"


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more


def resolved(settings: Settings) -> tuple[list[HookFunction], list[Dump]]:
    """Edits and dumps that the settings name."""
    from megatron_flex.edits import parse

    hooks = [
        HookFunction(
            site, editing_function=parse(e.edit), save=False, hook_type=e.hook_type, tags=("edit", *e.tags)
        )
        for e in settings.edits
        for site in ([e.site] if e.site else settings.sites)
    ]
    dumps = [
        Dump(
            d.path,
            d.sites or ([] if d.parameters else settings.sites),
            every=d.every or settings.every,
            gradients=settings.gradients if d.gradients is None else d.gradients,
            dtype=d.dtype,
            parameters=d.parameters,
            tags=("dump", *d.tags),
        )
        for d in settings.dumps
    ]
    return hooks, dumps
