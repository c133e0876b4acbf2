"""One dump at work on this rank: which steps it takes, and what passes in them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import Route, max_over_ranks, gather_objects
from megatron_flex.dump import GRADIENT, VALUE, Dump, ShardEntry, Manifest, DumpWriter, create_run, find_access_problem
from megatron_flex.dump.part_format import format_iteration_folder, format_run_folder
from megatron_flex.dump.selection import TOKEN_DIM, find_dim
from megatron_flex.errors import DumpError, FlexError, FlexWarning
from megatron_flex.layout import Layout, name_batch_first
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.parameter_selection import CALL_HAS_NO_GRADIENTS, ParameterSelection
from megatron_flex.runtime.dumps.routed import RoutingRecorder
from megatron_flex.runtime.shard_recorder import ShardRecorder
from megatron_flex.runtime.sinking import make_sink_hooks
from megatron_flex.sites import GRADIENT_SUFFIX, Site

MAX_NAMES = 8  # names in one warning


class DumpSelection(NamedTuple):
    """What a dump is of.

    Attributes:
        sites: all of them, in model order.
        exact: the names of those that were named as they are, and not by a pattern.
        parameters: of the parameters.
    """

    sites: tuple[Site, ...]
    exact: frozenset[str]
    parameters: ParameterSelection | None


class DumpSink:
    """One dump at work on this rank.

    Attributes:
        dump: its settings.
        hooks: those that stand for it.
        active: whether this step is dumped.
        first: whether no step has been dumped to its end.
    """

    def __init__(self, dump: Dump, chosen: DumpSelection, mesh: Mesh, clock: Clock) -> None:
        self.dump, self.chosen, self.mesh, self.clock = dump, chosen, mesh, clock
        self.active, self.first = False, True
        gradients = [s for s in chosen.sites if dump.gradients and not s.fixed]
        self.hooks = make_sink_hooks(self, dump.describe(), chosen.sites, gradients, dump.tags)
        self._taking: ShardRecorder | None = None
        self._routed = RoutingRecorder()
        self._runs: Counter[int] = Counter()  # of the iterations that are wanted
        self._done: set[int] = set()
        self._skipped: frozenset[str] = frozenset()
        self._step, self._number, self._training = -1, -1, False
        self._dropped = self._turns = 0
        self._passed: set[str] = set()
        self._said: set[str] = set()

    def open(self, manifest: Manifest) -> None:
        """Begin a run of the dump. Collective over the mesh.

        Raises:
            DumpError: on all ranks: it cannot be written there.
        """
        axes = [a.name for a in self.mesh]
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        ranks = gather_objects((rank, dict(self.mesh.coords)), self.mesh, axes)
        answer: Manifest | str | None = None
        if rank == ranks[0][0]:
            try:
                answer = create_run(Path(self.dump.path), replace(manifest, ranks=tuple(ranks)))
            except DumpError as error:
                answer = str(error)
        answer = gather_objects(answer, self.mesh, axes)[0]
        if not isinstance(answer, Manifest):
            raise DumpError(str(answer))
        path = Path(self.dump.path)
        folder = path / format_run_folder(answer.run)
        report = gather_objects((rank, find_access_problem(path, answer)), self.mesh, axes)
        blind = {why: [r for r, w in report if w == why] for _, why in report if why}
        if blind:
            why = "; ".join(f"rank(s) {who[:MAX_NAMES]} {why}" for why, who in blind.items())
            raise DumpError(
                f"{folder} was made by rank {ranks[0][0]}, and {why}: name a folder on a file system that "
                "all ranks share and may write to"
            )
        self._skipped = frozenset(answer.skipped)
        self._taking = ShardRecorder(self.dump, self.mesh, DumpWriter(folder, rank, self.mesh.coords, self.dump))

    # -- steps -----------------------------------------------------------------------------------------

    def begins(self, microbatches: int, mesh: Mesh, called: bool) -> bool:
        """A step starts that the selection of groups takes; returns whether it is dumped.

        Collective over the mesh where iterations may be dropped.

        Args:
            microbatches: how many it has on each data parallel rank; 0 if that is not known yet.
            mesh: of the ranks that are in it.
            called: whether it is a call of the model by itself.

        Raises:
            FlexError: on all ranks: gradients of parameters are wanted of such a call.
        """
        number, taking = self.clock.iteration, self._taking
        if taking is None or not self._wants(number):
            return False
        run_of, self._runs[number] = self._runs[number], self._runs[number] + 1
        if self._there(number, run_of):
            return False
        if called and torch.is_grad_enabled() and self.dump.gradients and self.chosen.parameters is not None:
            raise FlexError(CALL_HAS_NO_GRADIENTS)
        if self.dump.when_full == "drop" and max_over_ranks([int(taking.writer.would_wait())], mesh)[0]:
            taking.writer.drop(number)
            self._dropped += 1
            return False
        self.active, self._step, self._number = True, self.clock.step, number
        self._training = torch.is_grad_enabled()
        self._done.add(number)
        taking.microbatches = microbatches
        self._turns = 0
        self._routed.begins()
        taking.writer.begin(number, run_of, self._training, microbatches)
        if self.chosen.parameters is not None:
            self.chosen.parameters.values(taking, number)
        return True

    def _wants(self, number: int) -> bool:
        if not self.dump.wants_iteration(number):
            return False
        if self.dump.runs == "all" or number not in self._done:
            return True
        if torch.is_grad_enabled():
            self._say(
                "runs",
                f"iteration {number} is trained again and only its first run is dumped: the loop does not "
                "count iterations, or goes back; say runs='all' to dump each run",
            )
        return False

    def _there(self, number: int, run_of: int) -> bool:
        """Whether an earlier run of the dump has the iteration."""
        name = format_iteration_folder(number, run_of)
        first = {name.partition(".")[0] for name in self._skipped} if self.dump.runs == "first" else ()
        if name not in self._skipped and name not in first:
            return False
        self._say(
            "there",
            f"iteration {number} is in {self.dump.path} already, from an earlier run, and is not written "
            "again, nor are others that are there; name another folder if this run is not its continuation",
        )
        return True

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still come once the model was called."""
        return self.active and self._training and self.dump.gradients

    def end_overdue_step(self, mesh: Mesh) -> None:
        """Another step begins, and the backward pass that was waited for has not come."""
        if self.active:
            self._say(
                "late",
                f"the call of iteration {self._number} is in the dump without gradients: another one began "
                "before its backward pass; take such calls together in `with flex.step():`",
            )
            self.ends(False, mesh)

    def ends(self, failed: bool, mesh: Mesh) -> None:
        """The step is over. Collective over the mesh where a failure is to be raised.

        Raises:
            DumpError: on all ranks, if the settings say so: writing failed on some.
            FlexError: on all ranks: gradients of parameters cannot be had.
        """
        if not self.active or self._taking is None:
            return
        self.active = False
        writer, parameters = self._taking.writer, self.chosen.parameters
        if failed:
            self._done.discard(self._number)
            writer.abandon()
            return
        if parameters is not None and self._training and self.dump.gradients:
            try:
                parameters.gradients(self._taking, self._number)
            except FlexError:
                writer.abandon()
                raise
        self.first = False
        writer.finish()
        self._check(mesh)

    def _check(self, mesh: Mesh | None) -> None:
        """See whether a rank of the mesh had a failure, if those are raised; the writer warns of others."""
        if self.dump.on_error != "raise" or mesh is None or self._taking is None:
            return
        failure = self._taking.writer.trouble()
        if max_over_ranks([int(failure is not None)], mesh)[0]:
            report = gather_objects(failure and str(failure), mesh, [a.name for a in mesh])
            raise DumpError("; ".join(dict.fromkeys(t for t in report if t)))

    def close(self, failed: bool) -> None:
        """Wait until everything is written. Collective if a failure is to be raised, unless `failed`."""
        if self._taking is None:
            return
        try:
            if self.active:
                self.ends(failed, self.mesh)
            self._taking.writer.close()
            self._check(None if failed else self.mesh)
        finally:
            self._taking = None
        if not failed:
            self._tell()

    def _tell(self) -> None:
        """Say what was left out."""
        if self._dropped:
            warnings.warn(
                f"{self._dropped} iteration(s) were dropped from {self.dump.path}: the disk was slower than "
                "the model; dump less, or say when_full='wait'",
                FlexWarning,
                stacklevel=2,
            )
        here = self.mesh.is_first(a.name for a in self.mesh if a.name != "pp")
        own = [s.name for s in self.chosen.sites if s.tap is not None]
        absent = [n for n in own if n not in self._passed and n not in self._said]
        if here and absent and not self.first:
            self._say("quiet", f"in the steps that were dumped nothing passed at {_format_names(absent)}")

    # -- on the way of a tensor ------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Write this rank's part of a tensor, as far as the dump selects it; see `Taker.take`."""
        name = key.site.removesuffix(GRADIENT_SUFFIX)
        self._passed.add(name)
        taking = self._taking
        if taking is None or not self.dump.wants_microbatch(key.microbatch):
            return ""
        if not self.active or key.step != self._step:
            self._say(
                "late",
                f"gradients of step {key.step} came when it was over, and are not in the dump; take calls "
                "whose backward passes come later, or twice, together in `with flex.step():`",
            )
            return ""
        kind = GRADIENT if key.site.endswith(GRADIENT_SUFFIX) else VALUE
        report = over = None
        turn, self._turns = self._turns, self._turns + 1
        if route is not None:
            report, layout, over = (
                self._routed.tell(key, route, taking.writer),
                route.layout,
                [self.mesh["etp"]],
            )
            if report is None:
                return ""
        elif not any(d.name for d in layout.dims):
            layout = name_batch_first(layout)  # no framework says what its dims are
        unnamed = route is None and not all(d.name for d in layout.dims) and find_dim(layout, TOKEN_DIM) is None
        if unnamed and (self.dump.tokens is not None or self.dump.reduce is not None):
            self._say("tokens", f"nothing tells which dim of {name} are tokens: all of them are written")
        entry = ShardEntry(name, kind, key.microbatch, key.call, 0, (), "", route=report, turn=turn)
        try:
            taking.take(entry, local, layout, key.iteration, factor, over)
        except FlexError as error:  # other ranks go on, so this one does
            return "" if self.omits_site(name, str(error)) else str(error)
        return ""

    def omits_site(self, name: str, why: str) -> bool:
        """Whether a place that cannot be dumped is left out, with a warning; else it is an error.

        It is one in the first step, at whose end all ranks ask each other, where a person named the place.
        """
        if self.first and name in self.chosen.exact:
            return False
        self._passed.add(name)
        self._say(name, f"{name} is left out of the dump: {why}")
        return True

    def _say(self, what: str, text: str) -> None:
        """Warn, once."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, FlexWarning, stacklevel=2)


def _format_names(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more
