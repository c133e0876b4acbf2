"""The dumps of a session on this rank: the steps and tensors they record, including routing, and the manifest
of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import (
    Route,
    broadcast_object,
    gather_numbers_to_first,
    gather_objects,
    gather_reports,
    global_rank,
    max_over_ranks,
)
from megatron_flex.dump import (
    GRADIENT,
    ROUTING,
    VALUE,
    Dump,
    DumpWriter,
    Manifest,
    RunMade,
    ShardEntry,
    SiteRecord,
    create_run,
    describe_dims,
    find_access_problem,
    find_earlier_runs,
    layout_to_json,
)
from megatron_flex.dump.expert_routing import choice_to_json, pack_choice
from megatron_flex.dump.file_names import format_run_folder
from megatron_flex.dump.json_form import to_json
from megatron_flex.dump.part_format import DTYPE_NAMES
from megatron_flex.dump.run_folders import IterationKey
from megatron_flex.dump.schema import RowsRoute
from megatron_flex.dump.token_selection import TOKEN_DIM, find_dim
from megatron_flex.dump.writer.writer_threads import WriteTally
from megatron_flex.errors import DumpError, FlexError, name_ranks
from megatron_flex.gpt_names import layer_pattern
from megatron_flex.layout import Layout, name_batch_first, replicated, without_data_axis
from megatron_flex.mesh import Mesh
from megatron_flex.ranges import describe_numbers
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_failures import StepFailure
from megatron_flex.runtime.hooks import make_sink_hooks
from megatron_flex.runtime.parameter_selection import CALL_HAS_NO_GRADIENTS, ParameterSelection
from megatron_flex.runtime.shard_recorder import ShardRecorder
from megatron_flex.runtime.sink_cycle import DUMP_PURPOSE, SinkCycle, StepStart
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.version import __version__
from megatron_flex.wording import count_words

ROUTING_LAYOUT = replicated("t", "bytes")  # each rank has its own


class RoutingRecorder:
    """Records the routing decisions of an iteration, one for each call of a layer."""

    def __init__(self) -> None:
        self._written: set[tuple[str, int, int]] = set()

    def begins(self) -> None:
        self._written.clear()

    def record_choice(self, key: Key, route: Route, writer: DumpWriter) -> dict[str, Any] | None:
        """Write this rank's decision, unless it is written already, before any rows that refer to it.

        Returns:
            The routing part of the entry of this rank's rows; None if the rank has no rows of that expert.
        """
        dispatch, layer = route.dispatch, key.site.partition(".experts")[0]
        decision = layer, key.microbatch, key.call
        if decision not in self._written:  # a replayed layer repeats its decision
            self._written.add(decision)
            bits, choice = pack_choice(dispatch.chosen), choice_to_json(dispatch)
            entry = ShardEntry(
                layer, ROUTING, key.microbatch, key.call, 0, tuple(bits.shape), "", route=choice
            )
            writer.put(entry, ROUTING_LAYOUT, bits, owned=True)
        return to_json(RowsRoute(layer, route.expert)) if route.has_rows else None


class DumpSelection(NamedTuple):
    """The sites and parameters that a dump records.

    Attributes:
        sites: all recorded sites, in model order.
        exact: the names that the user gave literally, and not by a pattern.
        parameters: the recorded parameters.
        buffers: the recorded buffers, which have no gradients.
        left_out: parameters that patterns match and that are not recorded, with the reason.
    """

    sites: tuple[Site, ...]
    exact: frozenset[str]
    parameters: ParameterSelection | None
    buffers: ParameterSelection | None
    left_out: Mapping[str, str]


class DumpSink:
    """An active dump on this rank.

    Attributes:
        settings: the dump.
        hooks: the hooks that feed the sink.
        cycle: the steps that are dumped.
        tally: what this rank has written, from `close` on.
    """

    def __init__(
        self,
        dump: Dump,
        chosen: DumpSelection,
        mesh: Mesh,
        clock: Clock,
        run: tuple[Path, int],
        writes: bool,
    ) -> None:
        self.settings, self.chosen, self.mesh, self.clock = dump, chosen, mesh, clock
        self.cycle = SinkCycle(DUMP_PURPOSE, mesh, clock, chosen.exact)
        gradients = [s for s in chosen.sites if dump.gradients and not s.read_only_reason]
        self.hooks = make_sink_hooks(self, dump.describe(), chosen.sites, gradients, dump.groups)
        self.tally = WriteTally()
        self._folder = run  # of the dump, and the number of the run in it
        writer = DumpWriter(run[0] / format_run_folder(run[1]), global_rank(), mesh.coords, dump)
        self._taking: ShardRecorder | None = ShardRecorder(dump, mesh, writer)
        self._routed = RoutingRecorder()
        self._runs: Counter[int] = Counter()  # number of runs of each wanted iteration
        self._done: set[int] = set()
        self._begun: list[IterationKey] = []  # the iterations that this run writes
        self._writes = writes  # whether this rank's stage has anything that is dumped
        self._training = False
        self._dropped = self._turns = 0
        self._passed: set[str] = set()

    @classmethod
    def open(
        cls, dump: Dump, chosen: DumpSelection, mesh: Mesh, clock: Clock, manifest: Manifest
    ) -> DumpSink:
        """Begin a run of the dump. Collective over the mesh.

        Args:
            dump: the settings.
            chosen: the sites and parameters to record.
            mesh: the run's axes.
            clock: the current step and iteration.
            manifest: the manifest of the run, which is completed here.

        Raises:
            DumpError: on all ranks: the folder cannot be written.
        """
        run = _begin_run(dump, mesh, manifest)
        return cls(dump, chosen, mesh, clock, run, manifest.writes(mesh.coords))

    # -- steps -----------------------------------------------------------------------------------------

    def due(self, start: StepStart) -> bool:
        """Begin a step that the selection of groups includes; return whether the step is dumped.

        Collective over the step's mesh if iterations may be dropped.

        Raises:
            FlexError: on all ranks: the dump asks for gradients of parameters in a call outside a schedule.
        """
        number, taking = self.clock.iteration, self._taking
        if taking is None or not self._wants(number):
            return False
        run_of, self._runs[number] = self._runs[number], self._runs[number] + 1
        if start.called and torch.is_grad_enabled() and self.parameter_gradients:
            raise FlexError(CALL_HAS_NO_GRADIENTS)
        if (
            self.settings.when_full == "drop"
            and max_over_ranks([int(taking.writer.would_wait())], start.mesh)[0]
        ):
            taking.writer.drop(number)
            self._dropped += 1
            return False
        self.cycle.begin()
        self._training = torch.is_grad_enabled()
        self._done.add(number)
        self._begun.append((number, run_of))
        taking.microbatches = start.microbatches
        self._turns = 0
        self._routed.begins()
        if self._writes:
            taking.writer.begin(number, run_of, self._training, start.microbatches)
        if self.chosen.parameters is not None:
            self.chosen.parameters.write_values(taking, number)
        if self.chosen.buffers is not None:
            self.chosen.buffers.write_values(taking, number)
        return True

    def _wants(self, number: int) -> bool:
        if not self.settings.wants_iteration(number):
            return False
        if self.settings.runs == "all" or number not in self._done:
            return True
        if torch.is_grad_enabled():
            self.cycle.warn_once(
                "runs",
                f"iteration {number} is trained again and only its first run is dumped: the loop does not "
                "count iterations, or goes back; pass runs='all' to dump each run",
                alike=True,
            )
        return False

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still arrive after the call of the model."""
        return self.cycle.active and self._training and self.settings.gradients

    @property
    def parameter_gradients(self) -> bool:
        """Whether gradients of parameters are dumped, which exist at the end of a step only."""
        return self.settings.gradients and self.chosen.parameters is not None

    def flush(self, failed: bool, mesh: Mesh) -> None:
        """End the step, dumped or not. Collective over the mesh if a failure is to be raised.

        Raises:
            DumpError: on all ranks, if the settings ask for it: writing failed on some ranks.
            FlexError: on all ranks: gradients of parameters are not available.
        """
        if not self.cycle.active or self._taking is None:
            return
        self.cycle.active = False
        writer, parameters = self._taking.writer, self.chosen.parameters
        if failed:
            self._done.discard(self.cycle.iteration)
            self._begun.pop()
            writer.abandon()
            return
        if parameters is not None and self._training and self.settings.gradients:
            try:
                parameters.write_gradients(self._taking, self.cycle.iteration)
            except FlexError:
                writer.abandon()
                raise
        self.cycle.complete()
        if self._writes:
            writer.finish()
        else:
            writer.tally.written += 1
        if self.settings.on_error == "raise":  # else the writer warns
            self._check_written(mesh)

    def fail(self, failure: StepFailure) -> None:
        """The iteration will be absent, which the writer reports as if the disk were full."""
        if self._taking is not None:
            error = DumpError(failure.message, path=self.settings.path)
            error.__cause__ = failure.error
            self._taking.writer.fail(error)

    def _check_written(self, mesh: Mesh) -> None:
        """Wait for all ranks, and raise if writing failed on one of them and failures are raised."""
        if self._taking is None:
            return
        failure = self._taking.writer.trouble() if self.settings.on_error == "raise" else None
        if max_over_ranks([int(failure is not None)], mesh)[0]:
            reports = gather_objects((global_rank(), failure), mesh, [a.name for a in mesh])
            failed = [(rank, error) for rank, error in reports if error is not None]
            texts = dict.fromkeys(str(error) for _, error in failed)
            raise DumpError(
                "; ".join(texts), path=failed[0][1].path, ranks=sorted(rank for rank, _ in failed)
            ) from failure

    def close(self, failed: bool) -> None:
        """Wait until all ranks have written everything. Collective, unless `failed`."""
        if self._taking is None:
            return
        self.tally = self._taking.writer.tally
        try:
            if self.cycle.active:
                self.flush(failed, self.mesh)
            self._taking.writer.close()
            if not failed:  # the other ranks' files are there when this rank returns
                self._check_written(self.mesh)
        finally:
            self._taking = None
        self._warn_of_earlier_runs()
        if not failed:
            self._warn_of_omitted()

    def _warn_of_earlier_runs(self) -> None:
        """Say on the first rank which of several runs with the same iterations is read."""
        if not self.mesh.is_first(a.name for a in self.mesh):
            return
        path, run = self._folder
        earlier = find_earlier_runs(path, run, self._begun)
        if earlier:
            numbers = sorted({number for keys in earlier.values() for number, _ in keys})
            self.cycle.warn_once(
                "earlier",
                f"{path}: {describe_numbers('iteration', numbers)} of {', '.join(list(earlier)[-3:])} are in "
                f"{format_run_folder(run)} too, and the last run that completed an iteration is read; name "
                "another folder if this run is not a continuation",
            )

    def _warn_of_omitted(self) -> None:
        """Warn about omitted tensors."""
        if self._dropped:
            self.cycle.warn_once(
                "dropped",
                f"{count_words(self._dropped, 'iteration')} dropped from {self.settings.path}: the disk was "
                "slower than the model; dump less, or pass when_full='wait'",
                alike=True,
            )
        warns = self.mesh.is_first(a.name for a in self.mesh if a.name != "pp")
        if warns:
            local_sites = (s.name for s in self.chosen.sites if s.tap is not None)
            self.cycle.warn_of_absent(n for n in local_sites if n not in self._passed)

    # -- recording -------------------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Write the selected entries of this rank's shard of a tensor; see `TensorSink.take`."""
        name = key.site.removesuffix(GRADIENT_SUFFIX)
        self._passed.add(name)
        taking = self._taking
        if taking is None or not self.settings.wants_microbatch(key.microbatch):
            return ""
        if not self.cycle.belongs(key):
            return ""
        cast = self.settings.dtype is not None and local.is_floating_point()
        if local.dtype not in DTYPE_NAMES and not cast:
            self.cycle.warn_omitted(name, f"no file of a dump has tensors of {local.dtype}")
            return ""
        kind = GRADIENT if key.site.endswith(GRADIENT_SUFFIX) else VALUE
        report = over = None
        turn, self._turns = self._turns, self._turns + 1
        if route is not None:
            report, layout, over = (
                self._routed.record_choice(key, route, taking.writer),
                route.layout,
                [self.mesh["etp"]],
            )
            if report is None:
                return ""
        elif not any(d.name for d in layout.dims):
            layout = name_batch_first(layout)
        unnamed = (
            route is None and not all(d.name for d in layout.dims) and find_dim(layout, TOKEN_DIM) is None
        )
        if unnamed and (self.settings.tokens is not None or self.settings.reduce is not None):
            self.cycle.warn_once(
                "tokens", f"cannot select tokens of {name}: its layout names no token dim; all are written"
            )
        entry = ShardEntry(name, kind, key.microbatch, key.call, 0, (), "", route=report, turn=turn)
        try:
            taking.take(entry, local, layout, key.iteration, factor, over)
        except FlexError as error:  # other ranks continue, so this rank does too
            return "" if self.cycle.omits_site(name, str(error)) else str(error)
        except Exception as error:  # likewise; the iteration is missing, as if the disk were full
            taking.writer.fail(error)
        return ""

    @property
    def needs_dim_names(self) -> bool:
        """Whether the dump is of chosen samples or positions; see `TensorSink.needs_dim_names`."""
        return any(x is not None for x in (self.settings.tokens, self.settings.samples, self.settings.reduce))


def _begin_run(dump: Dump, mesh: Mesh, manifest: Manifest) -> tuple[Path, int]:
    """Make the folder of a run, and return the folder of the dump and the number of the run. Collective.

    Raises:
        DumpError: on all ranks: the first rank cannot make the folder, or another one cannot write there.
    """
    rank, path, coords = global_rank(), Path(dump.path), dict(mesh.coords)
    numbers = gather_numbers_to_first((rank, *coords.values()), mesh)
    outcome: RunMade | DumpError | None = None
    if mesh.is_first(axis.name for axis in mesh):
        ranks = tuple((number, dict(zip(coords, at, strict=True))) for number, *at in numbers)
        try:
            written = create_run(path, replace(manifest, ranks=ranks))
            outcome = RunMade(written.run, written.created, rank)
        except DumpError as error:
            outcome = error
    run: RunMade | DumpError = broadcast_object(outcome, mesh)
    if isinstance(run, DumpError):
        raise run
    # One rank of a node waits for a shared file system and reads the manifest; then the others look.
    folder, asks = path / format_run_folder(run.run), os.environ.get("LOCAL_RANK", "0") == "0"
    report = gather_reports((find_access_problem(path, run) or None) if asks else None, mesh)
    sees = asks or os.access(folder, os.W_OK | os.X_OK)
    if report := report + gather_reports(None if sees else "cannot see it, or may not write to it", mesh):
        blind = {why: [r for r, w in report if w == why] for _, why in report}
        why = "; ".join(f"{name_ranks(who)} {why}" for why, who in blind.items())
        raise DumpError(
            f"{folder} was made by rank {run.rank}, and {why}: name a folder on a file system that "
            "all ranks share and may write to",
            path=folder,
        )
    return path, run.run


REPORTED_PACKAGES = ("torch", "megatron-core", "fairscale", "deepspeed", "transformers", "accelerate")


def make_manifest(
    dump: Dump,
    framework: str,
    mesh: Mesh,
    chosen: DumpSelection,
    parameters: Mapping[str, ParameterSite],
    config: Any,
) -> Manifest:
    """Make the manifest of a run, with the fields that every rank knows.

    Args:
        dump: the settings.
        framework: the adapter's name.
        mesh: the axes of the run.
        chosen: the sites and parameters to record.
        parameters: all parameters of the model.
        config: the framework's config of the model.
    """
    shapes = sorted((name, list(p.shape)) for name, p in parameters.items())
    return Manifest(
        run=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=collect_versions(),
        framework=framework,
        axes={a.name: a.size for a in mesh.axes},
        experts={a.name: a.size for a in mesh.experts},
        ranks=(),
        model=filter_plain_values(config),
        identity=hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        sites=tuple(_describe_site(s) for s in chosen.sites),
        parameters=tuple(
            place
            for selection in (chosen.parameters, chosen.buffers)
            if selection is not None
            for place in selection.places()
        ),
        settings=dump.to_json(),
        layers=layer_pattern(parameters),
        left_out=chosen.left_out,
    )


def _describe_site(site: Site) -> SiteRecord:
    layout = without_data_axis(site.layout)
    return SiteRecord(
        site.name,
        layout_to_json(layout),
        tuple(site.shape),
        site.stage,
        site.chunk,
        site.inferred,
        describe_dims(layout),
    )


def collect_versions() -> dict[str, str]:
    """The versions of this package, Python, and the imported frameworks."""
    out = {"megatron_flex": __version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        if package.replace("-core", "") in sys.modules:
            try:
                out[package] = version(package)
            except PackageNotFoundError:
                out[package] = "unknown"
    return out


def filter_plain_values(config: Any) -> dict[str, Any]:
    """The plain values of a config."""
    attributes = dict(getattr(config, "__dict__", None) or {})
    kind = getattr(config, "model_type", None)  # of transformers, which have it on the class
    if isinstance(kind, str):
        attributes["model_type"] = kind
    return {k: v for k, v in sorted(attributes.items()) if isinstance(v, (bool, int, float, str, type(None)))}
