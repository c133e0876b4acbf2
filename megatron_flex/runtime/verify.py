"""The laws, checked on the person's own model: copies are equal, shards have the shapes that layouts promise.

During a step each rank only notes what passes; the ranks compare when the step is over, so nothing can hang.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megatron_flex.adapters import Undo
from megatron_flex.collectives import Route, checksum, find_differing_axes, gather_objects
from megatron_flex.errors import LayoutError, VerifyError
from megatron_flex.layout import Coords, Layout, Sizes, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.progress import track
from megatron_flex.runtime.debugging.comparing import LocalEditCheck
from megatron_flex.runtime.firing import HookDispatcher
from megatron_flex.runtime.survey import EXPERT_AXES, ParameterIndex, find_copy_axes
from megatron_flex.sites import Site

MAX_FINDINGS = 8  # findings in one error
SAMPLE_DIMS = {"s", "b"}  # dims that have one length in all of a microbatch


class SiteObservation(NamedTuple):
    """One pass of a tensor through a site, as one rank saw it.

    Attributes:
        site: the site's name.
        microbatch: which one.
        call: the pass within the microbatch.
        layout: the layout of this pass.
        shape: of the local tensor.
        check: checksum of the local tensor, where other ranks must hold the same.
        total: its sum, for showing.
        again: whether it is the very tensor that passed here before.
        rows: whether it has the rows of experts, whose whole is known at home only; `layout` is of those.
    """

    site: str
    microbatch: int
    call: int
    layout: Layout
    shape: tuple[int, ...]
    check: int | None = None
    total: float = 0.0
    again: bool = False
    rows: bool = False


class VerificationRequest:
    """What `verify()` asks of a session: the steps that are checked, if any."""

    def __init__(self) -> None:
        self._verifier: SiteVerifier | None = None

    def begin(self, sites: Iterable[Site], survey: ParameterIndex, firing: HookDispatcher, steps: int) -> None:
        """Watch all sites for the next steps, on every rank alike."""
        self.stop()
        self._verifier = SiteVerifier(sites, survey, firing, steps)

    @property
    def on(self) -> bool:
        """Whether the next step is checked."""
        return self._verifier is not None and self._verifier.left > 0

    @property
    def missed(self) -> bool:
        """Whether checking was asked for and no step has been checked."""
        return self._verifier is not None and not self._verifier.checked

    def step_ends(self, failed: bool, mesh: Mesh) -> list[str]:
        """What is wrong, the same list on all ranks; while it is on. Collective over the mesh."""
        return [] if self._verifier is None else self._verifier.step_ends(failed, mesh)

    def stop(self) -> None:
        """Watch no longer."""
        if self._verifier is not None:
            self._verifier.stop()
            self._verifier = None


class SiteVerifier:
    """Watches all sites of this rank for some steps, and edits that run on ranks' parts."""

    def __init__(self, sites: Iterable[Site], survey: ParameterIndex, firing: HookDispatcher, steps: int) -> None:
        clock = firing.clock
        self._comparing = LocalEditCheck(firing)
        self.survey, self.clock, self.left = survey, clock, steps
        self.checked = 0
        self._sites = {s.name: s for s in sites if s.tap is not None and not s.hidden and not s.inferred}
        self._seen: list[SiteObservation] = []
        self._calls: Counter[tuple[str, int]] = Counter()
        self._last: dict[str, weakref.ref[Tensor]] = {}
        taps = ((s, s.tap) for s in self._sites.values())
        self._taps: list[Undo] = [tap.install(partial(self._fire, site)) for site, tap in taps if tap]

    def stop(self) -> None:
        """Take its taps out."""
        for undo in self._taps:
            undo()
        self._taps.clear()
        self._comparing.stop()
        self._forget()

    def step_ends(self, failed: bool, mesh: Mesh) -> list[str]:
        """What is wrong, the same list on all ranks; empty if the step itself failed.

        Collective over `mesh`.
        """
        seen, edits = self._seen, self._comparing.found
        self._forget()
        self.left -= 1
        if self.left <= 0:
            self.stop()
        if failed:
            return []
        self.checked += 1
        answers = gather_objects((dict(mesh.coords), seen, edits), mesh, ["dp", "cp", "tp"])
        reports = [(coords, passes) for coords, passes, _ in answers]
        here = find_violations(reports, {n: s.shape for n, s in self._sites.items()}, mesh)
        here += dict.fromkeys(text for _, _, found in answers for text in found)
        stages = gather_objects(here, mesh, ["pp"])
        return [*self._parameters(mesh), *(text for stage in stages for text in stage)]

    def _forget(self) -> None:
        self._seen, self._comparing.found = [], []
        self._calls.clear()
        self._last.clear()

    def _fire(
        self, site: Site, local: Tensor, layout: Layout | None = None, route: Route | None = None
    ) -> Tensor:
        if self.clock.replaying():
            return local
        layout = route.layout if route else layout or site.layout
        place = site.name, self.clock.microbatch
        call = self._calls[place]
        self._calls[place] += 1
        last = self._last.get(site.name)
        again = call > 0 and last is not None and last() is local
        self._last[site.name] = weakref.ref(local)
        seen = SiteObservation(*place, call, layout, tuple(local.shape), again=again, rows=route is not None)
        if find_replicated_axes(layout, self.survey.mesh.sizes):
            value = local.detach()
            seen = seen._replace(check=checksum(value), total=float(value.double().sum()))
        self._seen.append(seen)
        return local

    def _parameters(self, mesh: Mesh) -> list[str]:
        survey = self.survey
        values: list[dict[str, int]] = []
        for name in track(survey.sites, "verifying parameters", unit="parameters"):
            mine: dict[str, int] = {}
            for site, parameter in survey.held(name)[:1]:
                axes = find_copy_axes(site, len(survey.stages(name)) > 1)
                # Parts of others are not known, or not the same.
                plain = type(parameter.data) is Tensor and not site.sharded
                if plain and any(mesh[a].size > 1 for a in axes):
                    mine = dict.fromkeys(axes, checksum(parameter))
            values.append(mine)
        found = find_differing_axes(values, mesh, ("tp", "cp", "dp", "pp", "etp", "edp"))
        return [
            f"parameter {name} is not the same on all ranks along {', '.join(axes)}"
            for name, axes in zip(survey.sites, found, strict=True)
            if axes
        ]


def make_verify_error(found: Sequence[str], step: int) -> VerifyError:
    """The error that tells findings; the first are mostly the cause of the others."""
    more = f"; and {len(found) - MAX_FINDINGS} more" if len(found) > MAX_FINDINGS else ""
    return VerifyError(f"step {step}: {len(found)} finding(s): {'; '.join(found[:MAX_FINDINGS])}{more}")


def find_replicated_axes(layout: Layout, sizes: Sizes) -> set[str]:
    """The axes of one sample's ranks along which all or some ranks must hold the same tensor."""
    named = {*layout.axes, *layout.shared}
    axes = {"etp"} if named & EXPERT_AXES else {"tp", "cp"}
    some = {c.axis for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
    return {a for a in (axes - set(layout.axes)) | some if sizes.get(a, 1) > 1}


StageObservations = Sequence[tuple[Coords, Sequence[SiteObservation]]]  # of all ranks of a stage


def find_violations(reports: StageObservations, shapes: Mapping[str, Sequence[int | str]], mesh: Mesh) -> list[str]:
    """What is wrong with the passes through one stage's sites; each site is told once, in order of passing.

    Pure: what every rank of the stage saw goes in.

    Args:
        told: of each rank its coordinates and what it saw.
        shapes: what each site says of its whole.
        mesh: the run's axes.
    """
    passes: dict[tuple[str, int, int], list[tuple[Coords, SiteObservation]]] = {}
    for coords, seen in reports:
        for one in seen:
            passes.setdefault((one.site, one.microbatch, one.call), []).append((coords, one))
    lengths = _count_lengths(passes.values(), shapes, mesh.sizes)
    out: dict[str, str] = {}
    several = track(passes.items(), "verifying sites", unit="passes")
    for (site, microbatch, _), at in several:
        problem = next(_find_problems(at, len(reports), shapes[site], lengths, mesh), "")
        if problem:
            out.setdefault(site, f"{site}, microbatch {microbatch}: {problem}")
    return list(out.values())


CallObservations = list[tuple[Coords, SiteObservation]]


def _find_problems(
    at: CallObservations, ranks: int, promised: Sequence[int | str], lengths: dict[Any, Counter[int]], mesh: Mesh
) -> Iterator[str]:
    if len(at) < ranks:
        yield f"it passed on {len(at)} of {ranks} ranks"
    for coords, seen in at:
        if seen.again:
            yield "the same tensor passed twice; its tap fires twice"
        if seen.rows:
            continue
        try:
            full = _infer_full_shape(seen, mesh.sizes)
        except LayoutError as error:
            yield str(error)
            return
        for name, got in zip(promised, full, strict=True):
            due, why = name, "is promised"
            if isinstance(due, str):
                usual = lengths.get(_make_length_key(coords, seen, due), Counter()).most_common(1)
                due, why = (usual[0][0] if usual else due), f"is {name} at most sites"
            if isinstance(due, int) and got is not None and got != due:
                reports = seen.layout.describe(mesh.sizes)
                yield f"local shape {seen.shape} in {reports} makes {full}, but for {got}, {due} {why}"
    yield from _find_unequal(at, mesh)


def _find_unequal(at: CallObservations, mesh: Mesh) -> Iterator[str]:
    axes = find_replicated_axes(at[0][1].layout, mesh.sizes)
    if not axes:
        return
    groups: dict[tuple[Any, ...], list[SiteObservation]] = {}
    for coords, seen in at:
        groups.setdefault(_shard_identity(coords, seen.layout), []).append(seen)
    for group in groups.values():
        if len({(s.check, s.shape) for s in group}) > 1:
            sums = ", ".join(f"{s.total:.9g}" for s in group)
            yield f"ranks that must hold the same along {', '.join(sorted(axes))} differ (sums {sums})"


def _shard_identity(coords: Coords, layout: Layout) -> tuple[Any, ...]:
    """What two ranks have in common that must hold the same: sample, and the part of what is cut."""
    expert = {*layout.axes, *layout.shared} & EXPERT_AXES
    fixed = ("edp", "ep") if expert else ("dp",)
    copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if not c.partial}
    cut = tuple(coords.get(a, 0) // copies.get(a, 1) for a in layout.axes)
    return (*(coords.get(a, 0) for a in fixed), *cut)


def _infer_full_shape(seen: SiteObservation, sizes: Sizes) -> tuple[int | None, ...]:
    """The whole's shape; None for dims whose length only all shards tell."""
    dims = seen.layout.dims
    if any(d.uneven for d in dims):
        order = seen.layout.permute or tuple(range(len(dims)))
        plain = [None if dims[i].uneven or dims[i].cuts else seen.shape[i] for i in order]
        return tuple(plain) if len(seen.shape) == len(dims) else tuple(seen.shape)
    return full_shape(seen.layout, seen.shape, sizes)


def _make_length_key(coords: Coords, seen: SiteObservation, name: str) -> tuple[Any, ...]:
    return name, seen.microbatch, coords.get("dp", 0)


def _count_lengths(
    passes: Iterable[CallObservations], shapes: Mapping[str, Sequence[int | str]], sizes: Sizes
) -> dict[Any, Counter[int]]:
    """How often each length of the dims of a sample occurs; a site that has another one is wrong."""
    out: dict[Any, Counter[int]] = {}
    for at in passes:
        for coords, seen in at:
            if seen.rows:
                continue
            try:
                full = _infer_full_shape(seen, sizes)
            except LayoutError:
                continue
            for name, length in zip(shapes[seen.site], full, strict=True):
                if isinstance(name, str) and name in SAMPLE_DIMS and length is not None:
                    out.setdefault(_make_length_key(coords, seen, name), Counter())[length] += 1
    return out
