"""The dumps of a session on this rank: the steps and tensors they record, including routing, and the manifest
of the run.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import Route, gather_objects, max_over_ranks
from megatron_flex.dump import (
    GRADIENT,
    ROUTING,
    VALUE,
    Dump,
    DumpWriter,
    Manifest,
    ShardEntry,
    SiteRecord,
    create_run,
    describe_dims,
    find_access_problem,
    find_earlier_runs,
    layout_to_json,
)
from megatron_flex.dump.expert_routing import choice_to_json, pack_choice
from megatron_flex.dump.json_form import to_json
from megatron_flex.dump.part_format import DTYPE_NAMES, format_iteration_folder, format_run_folder
from megatron_flex.dump.schema import RowsRoute
from megatron_flex.dump.token_selection import TOKEN_DIM, find_dim
from megatron_flex.dump.writer.writer_threads import WriteTally
from megatron_flex.errors import DumpError, FlexError, FlexWarning, name_ranks
from megatron_flex.gpt_names import layer_pattern
from megatron_flex.layout import Layout, name_batch_first, replicated, without_data_axis
from megatron_flex.mesh import Mesh
from megatron_flex.notebook_html import count_words
from megatron_flex.ranges import describe_numbers
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_failures import global_rank
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, make_sink_hooks
from megatron_flex.runtime.parameter_selection import CALL_HAS_NO_GRADIENTS, ParameterSelection
from megatron_flex.runtime.shard_recorder import ShardRecorder
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.version import __version__

ROUTING_LAYOUT = replicated("t", "bytes")  # each rank has its own


class RoutingRecorder:
    """Records the routing decisions of an iteration, one for each call of a layer."""

    def __init__(self) -> None:
        self._written: set[tuple[str, int, int]] = set()

    def begins(self) -> None:
        """Begin an iteration."""
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
        return to_json(RowsRoute(layer, route.expert)) if route.here else None


MAX_NAMES = 8  # bounds the names in one warning


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
        dump: the settings.
        hooks: the hooks that the sink registered.
        active: whether this step is dumped.
        first: whether no step has been dumped completely yet.
        tally: what this rank has written, from `close` on.
    """

    def __init__(self, dump: Dump, chosen: DumpSelection, mesh: Mesh, clock: Clock) -> None:
        self.dump, self.chosen, self.mesh, self.clock = dump, chosen, mesh, clock
        self.active, self.first = False, True
        gradients = [s for s in chosen.sites if dump.gradients and not s.read_only_reason]
        self.hooks = make_sink_hooks(self, dump.describe(), chosen.sites, gradients, dump.groups)
        self.tally = WriteTally()
        self._taking: ShardRecorder | None = None
        self._routed = RoutingRecorder()
        self._runs: Counter[int] = Counter()  # number of runs of each wanted iteration
        self._done: set[int] = set()
        self._folder: tuple[Path, int] | None = None  # of the dump, and the number of the run in it
        self._names: list[str] = []  # the folders of the iterations that this run writes
        self._step, self._number, self._training = -1, -1, False
        self._dropped = self._turns = 0
        self._passed: set[str] = set()
        self._warned: set[str] = set()

    def open(self, manifest: Manifest) -> None:
        """Begin a run of the dump. Collective over the mesh.

        Raises:
            DumpError: on all ranks: the folder cannot be written.
        """
        axes = [a.name for a in self.mesh]
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        ranks = gather_objects((rank, dict(self.mesh.coords)), self.mesh, axes)
        answer: Manifest | DumpError | None = None
        if rank == ranks[0][0]:
            try:
                answer = create_run(Path(self.dump.path), replace(manifest, ranks=tuple(ranks)))
            except DumpError as error:
                answer = error
        answer = gather_objects(answer, self.mesh, axes)[0]
        if not isinstance(answer, Manifest):
            assert answer is not None  # the first rank's
            raise answer
        path = Path(self.dump.path)
        folder = path / format_run_folder(answer.run)
        report = gather_objects((rank, find_access_problem(path, answer)), self.mesh, axes)
        blind = {why: [r for r, w in report if w == why] for _, why in report if why}
        if blind:
            why = "; ".join(f"{name_ranks(who)} {why}" for why, who in blind.items())
            raise DumpError(
                f"{folder} was made by rank {ranks[0][0]}, and {why}: name a folder on a file system that "
                "all ranks share and may write to",
                path=folder,
            )
        self._folder = path, answer.run
        self._taking = ShardRecorder(
            self.dump, self.mesh, DumpWriter(folder, rank, self.mesh.coords, self.dump)
        )

    # -- steps -----------------------------------------------------------------------------------------

    def begins(self, microbatches: int, mesh: Mesh, called: bool) -> bool:
        """Begin a step that the selection of groups includes; return whether the step is dumped.

        Collective over the mesh if iterations may be dropped.

        Args:
            microbatches: the number of microbatches on each data parallel rank; 0 if not known yet.
            mesh: the ranks that take part in the step.
            called: whether the step is a single call of the model outside a schedule.

        Raises:
            FlexError: on all ranks: the dump asks for gradients of parameters in such a call.
        """
        number, taking = self.clock.iteration, self._taking
        if taking is None or not self._wants(number):
            return False
        run_of, self._runs[number] = self._runs[number], self._runs[number] + 1
        if called and torch.is_grad_enabled() and self.dump.gradients and self.chosen.parameters is not None:
            raise FlexError(CALL_HAS_NO_GRADIENTS)
        if self.dump.when_full == "drop" and max_over_ranks([int(taking.writer.would_wait())], mesh)[0]:
            taking.writer.drop(number)
            self._dropped += 1
            return False
        self.active, self._step, self._number = True, self.clock.step, number
        self._training = torch.is_grad_enabled()
        self._done.add(number)
        self._names.append(format_iteration_folder(number, run_of))
        taking.microbatches = microbatches
        self._turns = 0
        self._routed.begins()
        taking.writer.begin(number, run_of, self._training, microbatches)
        if self.chosen.parameters is not None:
            self.chosen.parameters.values(taking, number)
        if self.chosen.buffers is not None:
            self.chosen.buffers.values(taking, number)
        return True

    def _wants(self, number: int) -> bool:
        if not self.dump.wants_iteration(number):
            return False
        if self.dump.runs == "all" or number not in self._done:
            return True
        if torch.is_grad_enabled():
            self._warn_once(
                "runs",
                f"iteration {number} is trained again and only its first run is dumped: the loop does not "
                "count iterations, or goes back; pass runs='all' to dump each run",
                alike=True,
            )
        return False

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still arrive after the call of the model."""
        return self.active and self._training and self.dump.gradients

    def end_overdue_step(self, mesh: Mesh) -> None:
        """End the previous step if the backward pass that it waited for did not come."""
        if self.active:
            self._warn_once(
                "late",
                f"the call of iteration {self._number} is in the dump without gradients: another one began "
                "before its backward pass; take such calls together in `with flex.step():`",
            )
            self.ends(False, mesh)

    def ends(self, failed: bool, mesh: Mesh) -> None:
        """End the step. Collective over the mesh if a failure is to be raised.

        Raises:
            DumpError: on all ranks, if the settings ask for it: writing failed on some ranks.
            FlexError: on all ranks: gradients of parameters are not available.
        """
        if not self.active or self._taking is None:
            return
        self.active = False
        writer, parameters = self._taking.writer, self.chosen.parameters
        if failed:
            self._done.discard(self._number)
            self._names.pop()
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
        """Raise if writing failed on a rank of the mesh and failures are raised; else the writer warns."""
        if self.dump.on_error != "raise" or mesh is None or self._taking is None:
            return
        failure = self._taking.writer.trouble()
        if max_over_ranks([int(failure is not None)], mesh)[0]:
            reports = gather_objects((global_rank(), failure), mesh, [a.name for a in mesh])
            failed = [(rank, error) for rank, error in reports if error is not None]
            texts = dict.fromkeys(str(error) for _, error in failed)
            raise DumpError(
                "; ".join(texts), path=failed[0][1].path, ranks=sorted(rank for rank, _ in failed)
            ) from failure

    def close(self, failed: bool) -> None:
        """Wait until everything is written. Collective if a failure is to be raised, unless `failed`."""
        if self._taking is None:
            return
        self.tally = self._taking.writer.tally
        try:
            if self.active:
                self.ends(failed, self.mesh)
            self._taking.writer.close()
            self._check(None if failed else self.mesh)
        finally:
            self._taking = None
        self._warn_of_earlier_runs()
        if not failed:
            self._warn_of_omitted()

    def _warn_of_earlier_runs(self) -> None:
        """Say on the first rank which of several runs with the same iterations is read."""
        if self._folder is None or not self.mesh.is_first(a.name for a in self.mesh):
            return
        path, run = self._folder
        earlier = find_earlier_runs(path, run, self._names)
        if earlier:
            numbers = sorted({int(name.partition(".")[0]) for names in earlier.values() for name in names})
            self._warn_once(
                "earlier",
                f"{path}: {describe_numbers('iteration', numbers)} of {', '.join(list(earlier)[-3:])} are in "
                f"{format_run_folder(run)} too, and the last run that completed an iteration is read; name "
                "another folder if this run is not a continuation",
            )

    def _warn_of_omitted(self) -> None:
        """Warn about omitted tensors."""
        if self._dropped:
            self._warn_once(
                "dropped",
                f"{count_words(self._dropped, 'iteration')} dropped from {self.dump.path}: the disk was "
                "slower than the model; dump less, or pass when_full='wait'",
                alike=True,
            )
        here = self.mesh.is_first(a.name for a in self.mesh if a.name != "pp")
        own = [s.name for s in self.chosen.sites if s.tap is not None]
        absent = [n for n in own if n not in self._passed and n not in self._warned]
        if here and absent and not self.first:
            self._warn_once(
                "quiet", f"in the steps that were dumped nothing was recorded at {_format_names(absent)}"
            )

    # -- recording -------------------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Write the selected entries of this rank's shard of a tensor; see `TensorSink.take`."""
        name = key.site.removesuffix(GRADIENT_SUFFIX)
        self._passed.add(name)
        taking = self._taking
        if taking is None or not self.dump.wants_microbatch(key.microbatch):
            return ""
        if not self.active or key.step != self._step:
            self._warn_once(
                "late",
                f"gradients of step {key.step} came when it was over, and are not in the dump; take calls "
                "whose backward passes come later, or twice, together in `with flex.step():`",
            )
            return ""
        if local.dtype not in DTYPE_NAMES and not (self.dump.dtype is not None and local.is_floating_point()):
            self._warn_once(
                name, f"{name} is left out of the dump: no file of a dump has tensors of {local.dtype}"
            )
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
        if unnamed and (self.dump.tokens is not None or self.dump.reduce is not None):
            self._warn_once("tokens", f"nothing names the dim of {name} are tokens: all of them are written")
        entry = ShardEntry(name, kind, key.microbatch, key.call, 0, (), "", route=report, turn=turn)
        try:
            taking.take(entry, local, layout, key.iteration, factor, over)
        except FlexError as error:  # other ranks continue, so this rank does too
            return "" if self.omits_site(name, str(error)) else str(error)
        except Exception as error:  # likewise; the iteration is missing, as if the disk were full
            taking.writer.fail(error)
        return ""

    @property
    def needs_dim_names(self) -> bool:
        """Whether the dump is of chosen samples or positions; see `TensorSink.needs_dim_names`."""
        return any(x is not None for x in (self.dump.tokens, self.dump.samples, self.dump.reduce))

    @property
    def asks(self) -> bool:
        """Whether a tensor that cannot be recorded in this step is an error; see `TensorSink.asks`."""
        return self.first and bool(self.chosen.exact)

    def omits_site(self, name: str, why: str) -> bool:
        """Whether a site that cannot be dumped is omitted with a warning; otherwise it is an error.

        It is an error in the first step, at whose end all ranks compare failures, if the user named the site.
        """
        if self.first and name in self.chosen.exact:
            return False
        self._passed.add(name)
        self._warn_once(name, f"{name} is left out of the dump: {why}")
        return True

    def _warn_once(self, what: str, text: str, alike: bool = False) -> None:
        """Warn once on this rank; once in all, on the first rank, of what is `alike` on all ranks."""
        if what not in self._warned:
            self._warned.add(what)
            if not alike or self.mesh.is_first(a.name for a in self.mesh):
                warnings.warn(text, FlexWarning, stacklevel=2)


def _format_names(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


class SessionDumps:
    """The dumps of a session.

    Args:
        registry: the hooks of the session.
        mesh: the axes of the run.
        clock: the current step and iteration.
        agree: compares a dump's settings with those of other ranks.
    """

    def __init__(
        self,
        registry: HookRegistry,
        mesh: Mesh,
        clock: Clock,
        agree: Callable[[str], None],
    ) -> None:
        self.registry, self.mesh, self.clock = registry, mesh, clock
        self._agree = agree
        self.dumps: list[DumpSink] = []

    def add(self, dump: Dump, chosen: DumpSelection, manifest: Manifest) -> DumpSink:
        """Open a dump. Collective over the mesh.

        Args:
            dump: the settings.
            chosen: the sites and parameters to record.
            manifest: the manifest of the run; opening the dump completes it.

        Raises:
            DumpError: on all ranks: the folder cannot be written.
            HookError: on all ranks: the ranks have different dumps.
        """
        self._agree(dump.describe())
        if any(realpath(d.dump.path) == realpath(dump.path) for d in self.dumps):
            raise DumpError(
                f"{dump.path} is being written by another dump here; name another folder", path=dump.path
            )
        dumped = DumpSink(dump, chosen, self.mesh, self.clock)
        dumped.open(manifest)
        self.dumps.append(dumped)
        return dumped

    def remove(self, dump: Dump) -> DumpSink:
        """Remove a dump after all of it is written. Collective over the mesh.

        Raises:
            DumpError: the dump is not open; or writing failed and the settings ask to raise.
        """
        found = next((d for d in self.dumps if d.dump is dump), None)
        if found is None:
            raise DumpError(
                f"the dump to {dump.path} is not registered here; nothing to remove", path=dump.path
            )
        self.dumps.remove(found)
        found.close(False)
        return found

    def begins(
        self, microbatches: int, mesh: Mesh, called: bool = False, probing: bool = False
    ) -> set[HookFunction]:
        """Begin a step, and find the hooks of dumps that do not record it.

        Args:
            microbatches: the number of microbatches on each data parallel rank; 0 if not known yet.
            mesh: the ranks that take part in the step.
            called: whether the step is a single call of the model outside a schedule.
            probing: whether the model runs only to be captured, which is not a step of the training loop.

        Returns:
            The hooks to deactivate in this step.
        """
        resting: set[HookFunction] = set()
        for dumped in self.dumps:
            dumped.end_overdue_step(mesh)
            wanted = not probing and self.registry.takes(dumped.dump.groups)
            if not wanted or not dumped.begins(microbatches, mesh, called):
                resting |= set(dumped.hooks)
        return resting

    def ends(self, failed: bool, mesh: Mesh, later: bool = False) -> None:
        """End the step; with `later` only its forward pass, after which a backward pass may follow."""
        for dumped in self.dumps:
            if failed or not (later and dumped.awaits_gradients):
                dumped.ends(failed, mesh)

    def close(self, failed: bool) -> None:
        """Wait until everything is written. Collective over the mesh, unless `failed`."""
        dumps, self.dumps = self.dumps, []
        for dumped in dumps:
            dumped.close(failed)


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
    found = dict(getattr(config, "__dict__", None) or {})
    kind = getattr(config, "model_type", None)  # of transformers, which have it on the class
    if isinstance(kind, str):
        found["model_type"] = kind
    return {k: v for k, v in sorted(found.items()) if isinstance(v, (bool, int, float, str, type(None)))}
