"""Verification of the user's own model: copies are equal, and shards have the shapes of their layouts.

During a step each rank only records observations of the tensors at its sites; the ranks compare them at the
end of the step, so that verification cannot deadlock. Parameters and buffers are compared over the ranks that
hold copies, and local edits with gathered edits.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives import (
    Route,
    checksum,
    find_differing_axes,
    gather_distinct,
    gather_full,
    gather_objects,
    global_rank,
    max_over_ranks,
)
from megatron_flex.errors import LayoutError, VerifyError, describe_error, list_some
from megatron_flex.layout import Coords, Layout, Sizes, full_order, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.progress import track
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_failures import format_ranks
from megatron_flex.runtime.full_parameters import EXPERT_AXES, ParameterIndex, find_copy_axes
from megatron_flex.runtime.gradient_norm import GradientNorms
from megatron_flex.runtime.hook_dispatcher import HookDispatcher
from megatron_flex.runtime.hooks import describe_edit
from megatron_flex.runtime.local_edits import LocalEditPlan
from megatron_flex.runtime.session_taps import SessionTaps
from megatron_flex.runtime.site_pass import Pass
from megatron_flex.sites import Site
from megatron_flex.wording import count_words

COPY_AXES = ("tp", "cp", "dp", "pp", "etp", "edp")
MAX_COPIES = 32  # bounds the copies named for one step
CopyChecksums = dict[
    str, int
]  # a checksum for each axis along which this rank's copy must be equal to others


class Finding(NamedTuple):
    """What the verification of a step found at one hook point or tensor.

    Attributes:
        text: the contradiction between ranks, which names the place.
        site: the hook point, parameter or buffer.
        ranks: the ranks that hold different values, where they are known.
    """

    text: str
    site: str | None = None
    ranks: tuple[int, ...] = ()


def find_unequal_copies(parameter_index: ParameterIndex, mesh: Mesh) -> list[Finding]:
    """The parameters and buffers whose copies differ; the same list on all ranks.

    Collective over the mesh.
    """
    parameters = [
        (name, _checksum_parameter(parameter_index, name, mesh))
        for name in track(parameter_index.sites, "verifying parameters", unit="parameters")
    ]
    unequal = _describe_unequal("parameter", parameters, mesh)
    local_buffers = {
        b.name: b.parameter for b in parameter_index.adapter.buffers() if b.parameter is not None
    }
    names = dict.fromkeys(n for stage in gather_objects(list(local_buffers), mesh, ["pp"]) for n in stage)
    buffers = [
        (name, _checksum_tensor(local_buffers[name], {"dp"}, mesh) if name in local_buffers else {})
        for name in names
    ]
    return [
        *unequal,
        *_describe_unequal("buffer", buffers, mesh),
        *_find_unequal_shards(parameter_index, mesh),
    ]


def _find_unequal_shards(parameter_index: ParameterIndex, mesh: Mesh) -> list[Finding]:
    """Likewise for shards that several data parallel ranks hold, as where FSDP shards within a replica."""
    if mesh["dp"].size == 1:
        return []
    shards = parameter_index.adapter.storage.shards()
    if not max_over_ranks([len(shards)], mesh)[0]:
        return []
    checksums = {name: (part, checksum(tensor)) for name, (part, tensor) in shards.items()}
    findings = _compare_shards(checksums, mesh) if _may_differ(checksums, mesh) else []
    elsewhere = gather_distinct(findings, mesh, [a.name for a in mesh if a.name != "dp"])
    return list({finding.text: finding for several in elsewhere for finding in several}.values())


def _may_differ(checksums: Mapping[str, tuple[Any, int]], mesh: Mesh) -> bool:
    """Whether ranks that hold the same part of a parameter may have other values; the same along `dp`.

    What ranks send does not grow with their number but for two numbers a rank: a parameter that all hold
    alike is compared by the greatest and the least checksum, the others by one digest of the parts of a rank
    and one of its values.
    """
    parts = [{"dp": zlib.crc32(repr(part).encode())} for part, _ in checksums.values()]
    sums = [{"dp": total} for _, total in checksums.values()]
    differing = find_differing_axes([*parts, *sums], Mesh((mesh["dp"],)), ["dp"])  # stages hold others
    is_divided = [bool(axes) for axes in differing[: len(checksums)]]
    if any(
        axes and not divided for divided, axes in zip(is_divided, differing[len(checksums) :], strict=True)
    ):
        return True
    divided = [item for item, is_apart in zip(checksums.items(), is_divided, strict=True) if is_apart]
    position = zlib.crc32(repr([(name, part) for name, (part, _) in divided]).encode())
    values = zlib.crc32(repr([total for _, (_, total) in divided]).encode())
    by_position: dict[int, set[int]] = {}
    for at, digest in gather_objects((position, values), mesh, ["dp"]):
        by_position.setdefault(at, set()).add(digest)
    return any(len(digests) > 1 for digests in by_position.values())


def _compare_shards(checksums: Mapping[str, tuple[Any, int]], mesh: Mesh) -> list[Finding]:
    """The parameters of which ranks along `dp` have the same part with other values. Collective over `dp`."""
    gathered = gather_objects((global_rank(), checksums), mesh, ["dp"])
    findings = []
    for name in checksums:
        parts: dict[Any, dict[int, list[int]]] = {}
        for rank, shards in gathered:
            part, total = shards[name]
            parts.setdefault(part, {}).setdefault(total, []).append(rank)
        differ = [list(sides.values()) for sides in parts.values() if len(sides) > 1]
        if differ:
            texts = "; ".join(" and ".join(map(format_ranks, sides)) for sides in differ)
            ranks = tuple(sorted(rank for sides in differ for side in sides for rank in side))
            text = f"parameter {name} is not the same on all ranks along dp ({texts} differ)"
            findings.append(Finding(text, name, ranks))
    return findings


def _checksum_parameter(parameter_index: ParameterIndex, name: str, mesh: Mesh) -> CopyChecksums:
    for site, parameter in parameter_index.held(name)[:1]:
        # Other shards are not known, or not equal.
        if type(parameter.data) is Tensor and not site.sharded:
            return _checksum_tensor(
                parameter, find_copy_axes(site, len(parameter_index.stages(name)) > 1), mesh
            )
    return {}


def _checksum_tensor(tensor: Tensor, axes: set[str], mesh: Mesh) -> CopyChecksums:
    compared = {a for a in axes if mesh[a].size > 1}
    return dict.fromkeys(compared, checksum(tensor)) if compared else {}


def _describe_unequal(kind: str, copies: Sequence[tuple[str, CopyChecksums]], mesh: Mesh) -> list[Finding]:
    """Describe the copies of parameters or buffers that differ, with the axes and the ranks."""
    axes = find_differing_axes([sums for _, sums in copies], mesh, COPY_AXES)
    wrong = [(name, sums, along) for (name, sums), along in zip(copies, axes, strict=True) if along]
    if not wrong:
        return []
    # Which ranks: each line of ranks along the axis, and their checksums.
    local_sums = {
        n: {a: (mesh[a].ranks, s[a]) for a in along if a in s} for n, s, along in wrong[:MAX_COPIES]
    }
    gathered = gather_objects((global_rank(), local_sums), mesh, [a.name for a in mesh])
    findings = []
    for name, _, along in wrong:
        sides, ranks = _describe_sides(gathered, name, along)
        text = f"{kind} {name} is not the same on all ranks along {', '.join(along)}{sides}"
        findings.append(Finding(text, name, ranks))
    return findings


GatheredChecksums = Sequence[tuple[int, Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]]]]


def _describe_sides(
    gathered: GatheredChecksums, name: str, along: Sequence[str]
) -> tuple[str, tuple[int, ...]]:
    """Describe which ranks hold different values, for each line of ranks that should be equal; the ranks."""
    lines: dict[tuple[int, ...], dict[int, set[int]]] = {}
    for rank, totals in gathered:
        for axis, (line, total) in totals.get(name, {}).items():
            if axis in along:
                lines.setdefault(line, {}).setdefault(total, set()).add(rank)
    differ = [sides for sides in lines.values() if len(sides) > 1]
    texts = [" and ".join(format_ranks(sorted(ranks)) for ranks in sides.values()) for sides in differ]
    differing = {rank for sides in differ for ranks in sides.values() for rank in ranks}
    return f" ({'; '.join(texts)} differ)" if texts else "", tuple(sorted(differing))


ROUNDING_BOUND = 1e-5  # relative to the largest entry: reductions over ranks add in another order


class LocalEditCheck:
    """Compares each local edit with the gathered edit, until the check is stopped.

    Attributes:
        findings: the same on all ranks that hold a tensor.
    """

    def __init__(self, dispatcher: HookDispatcher) -> None:
        self._dispatcher = dispatcher
        self.findings: list[Finding] = []
        dispatcher.passes.compared = self.compare
        dispatcher.registry.note_change()

    def stop(self) -> None:
        self._dispatcher.passes.compared = None
        self._dispatcher.registry.note_change()

    def compare(
        self, key: Key, local: Tensor, out: Tensor, plan: LocalEditPlan, gathered: Callable[[], Pass]
    ) -> None:
        """Edit the full tensor too, and record a difference. Collective over the ranks that hold shards.

        Args:
            key: the key of the pass.
            local: the local tensor before the edits.
            out: the local tensor after them.
            plan: how they ran on the shard.
            gathered: makes the pass that runs the same edits on the full tensor.
        """
        dispatcher, editing = self._dispatcher, self._dispatcher.editing
        words = " | ".join(describe_edit(e) for e in plan.original_functions.values())
        with torch.no_grad():
            with editing.collect_failures() as failures:
                want = gathered()(local.detach(), key, False)
            got, want = (gather_full(t.detach(), plan.layout, dispatcher.mesh) for t in (out, want))
            far, most = measure_difference(got, want)
        if failures:  # of the user's function, which ran on shards before
            text = describe_error(failures[0].error)
            self._note(key, f"{words} ran on the shards, but fails on the full tensor: {text}")
            return
        room = max(ROUNDING_BOUND, 8 * torch.finfo(got.dtype).eps) * most if got.is_floating_point() else 0.0
        if not far <= room:
            self._note(
                key,
                f"{words} makes another tensor from shards than from the full tensor, by {far:.3g} at most "
                f"where the greatest entry is {most:.3g}; it is not local along the dims that are cut",
            )

    def _note(self, key: Key, text: str) -> None:
        self.findings.append(Finding(f"{key.site}, microbatch {key.microbatch}: {text}", key.site))


def measure_difference(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest difference, and the largest expected entry; NaN and infinity count too."""
    if not want.numel():
        return 0.0, 0.0
    exact = not want.is_floating_point() and not want.is_complex()
    result, expected = (got.long(), want.long()) if exact else (got, want)
    if not exact and want.element_size() == 1:  # torch has no arithmetic for such dtypes
        result, expected = got.float(), want.float()
    same = (result == expected) | ((result != result) & (expected != expected))
    far = (result - expected).abs().masked_fill(same, 0).double()
    finite = expected.abs().double()
    most = float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0
    return float(far.nan_to_num(nan=float("inf")).max()), most


MAX_FINDINGS = 8  # bounds the findings in one error
SAMPLE_DIMS = {"s", "b"}  # dims whose length is the same throughout a microbatch


class SiteObservation(NamedTuple):
    """One pass of a tensor through a site, as observed by one rank.

    Attributes:
        site: the site's name.
        microbatch: the microbatch.
        call: the pass within the microbatch.
        layout: the layout of this pass.
        shape: the shape of the local tensor.
        check: checksum of the local tensor, where other ranks must hold the same.
        total: the tensor's sum, for display.
        again: whether this very tensor passed the site before.
        rows: whether these are rows of experts, whose full tensor is known only to the ranks that own the
            tokens; `layout` is then the layout of the rows.
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
    """The state of `verify()` in a session: the steps to verify, if any."""

    def __init__(self) -> None:
        self._verifier: SiteVerifier | None = None
        self._norms: GradientNorms | None = None

    def begin(
        self,
        sites: Iterable[Site],
        parameter_index: ParameterIndex,
        dispatcher: HookDispatcher,
        taps: SessionTaps,
        steps: int,
    ) -> None:
        """Verify all sites during the next steps. Every rank makes the same call."""
        self.stop()
        self._verifier = SiteVerifier(sites, parameter_index, dispatcher, taps, steps)
        self._norms = GradientNorms(parameter_index, steps)

    @property
    def on(self) -> bool:
        """Whether the next step is verified."""
        return self._verifier is not None and self._verifier.left > 0

    @property
    def missed(self) -> bool:
        """Whether verification was requested and no step has been verified."""
        return self._verifier is not None and not self._verifier.checked

    def compare_copies(self, mesh: Mesh) -> None:
        """Compare parameters and buffers over all ranks, which have just synchronized. Collective over
        `mesh`.
        """
        if self._verifier is not None and self.on:
            self._verifier.compare_copies(mesh)

    def step_ends(self, failed: bool, mesh: Mesh) -> list[Finding]:
        """The findings of the step, the same list on all ranks; called while on. Collective over the mesh."""
        return [] if self._verifier is None else self._verifier.step_ends(failed, mesh)

    def compare_norms(self, mesh: Mesh, last: bool = False) -> list[Finding]:
        """The gradient norms reported since the last call that the gradients do not have, as findings.

        A framework reports the norm of a step after the step's end. Collective over the mesh while norms are
        still to be compared; with `last` if verification was requested at all, as replicas may have made
        different numbers of calls.
        """
        if self._norms is None or (self._norms.left <= 0 and not last):
            return []
        return [
            Finding(norm.finding, next(iter(norm.names), None), norm.ranks)
            for norm in self._norms.compare(mesh)
            if norm.finding
        ]

    def stop(self) -> None:
        if self._norms is not None:
            self._norms.stop()
            self._norms = None
        if self._verifier is not None:
            self._verifier.stop()
            self._verifier = None


class SiteVerifier:
    """Observes all sites of this rank during some steps, and the edits that run on shards."""

    def __init__(
        self,
        sites: Iterable[Site],
        parameter_index: ParameterIndex,
        dispatcher: HookDispatcher,
        taps: SessionTaps,
        steps: int,
    ) -> None:
        self._comparing = LocalEditCheck(dispatcher)
        self.parameter_index, self.left = parameter_index, steps
        self._dispatcher, self._taps = dispatcher, taps
        self.checked = 0
        self._sites = {s.name: s for s in sites if s.tap is not None and not s.hidden and not s.inferred}
        self._seen: list[SiteObservation] = []
        self._before: list[Finding] = []  # findings at the beginning of the step
        self._calls: Counter[tuple[str, int]] = Counter()
        self._last: dict[str, weakref.ref[Tensor]] = {}
        dispatcher.observe(self._see)
        taps.observe(self._sites)

    def stop(self) -> None:
        """Remove the taps."""
        self._dispatcher.observe(None)
        self._taps.observe(())
        self._comparing.stop()
        self._forget()

    def compare_copies(self, mesh: Mesh) -> None:
        """Compare parameters and buffers over more ranks than those that synchronize at the end of the step.

        Collective over `mesh`.
        """
        self._before = find_unequal_copies(self.parameter_index, mesh)

    def step_ends(self, failed: bool, mesh: Mesh) -> list[Finding]:
        """The findings of the step, the same list on all ranks; empty if the step itself failed.

        Collective over `mesh`.
        """
        observations, edits = self._seen, self._comparing.findings
        before, self._before = self._before, []
        self._forget()
        self.left -= 1
        if self.left <= 0:
            self.stop()
        if failed:
            return []
        self.checked += 1
        reports = gather_objects(
            (dict(mesh.coords), observations), mesh, self._list_compared_axes(observations, mesh)
        )
        violations = find_violations(reports, {n: s.shape for n, s in self._sites.items()}, mesh)
        stages = gather_distinct([*violations, *dict.fromkeys(edits)], mesh)
        copies = dict.fromkeys([*before, *find_unequal_copies(self.parameter_index, mesh)])
        return [*copies, *dict.fromkeys(finding for stage in stages for finding in stage)]

    def _list_compared_axes(self, observations: Sequence[SiteObservation], mesh: Mesh) -> list[str]:
        """The axes over which ranks exchange what they saw: data parallel ranks rarely have to.

        Each of them has other samples. They compare how often each site was passed; copies of expert tensors
        are within a replica, unless its tensor parallel ranks are fewer than those of its experts.
        """
        replica = {rank for name in ("cp", "tp") for rank in mesh[name].ranks}
        passes = zlib.crc32(
            repr(
                [(observation.site, observation.microbatch, observation.call) for observation in observations]
            ).encode()
        )
        across = int(not replica.issuperset(mesh["etp"].ranks) and mesh["etp"].size > 1)
        data = Mesh((mesh["dp"], mesh["cp"], mesh["tp"]))
        most, least, across = max_over_ranks([passes, -passes, across], data, "passes of a verified step")
        return ["cp", "tp"] if most == -least and not across else ["dp", "cp", "tp"]

    def _forget(self) -> None:
        self._seen, self._comparing.findings = [], []
        self._calls.clear()
        self._last.clear()

    def _see(self, key: Key, local: Tensor, layout: Layout, route: Route | None) -> None:
        if key.site not in self._sites:
            return
        layout = route.layout if route else layout
        place = key.site, key.microbatch
        call = self._calls[place]
        self._calls[place] += 1
        last = self._last.get(key.site)
        again = call > 0 and last is not None and last() is local
        self._last[key.site] = weakref.ref(local)
        observation = SiteObservation(
            *place, call, layout, tuple(local.shape), again=again, rows=route is not None
        )
        if find_replicated_axes(layout, self.parameter_index.mesh.sizes):
            value = local.detach()
            observation = observation._replace(check=checksum(value), total=float(value.double().sum()))
        self._seen.append(observation)


def make_verify_error(findings: Sequence[Finding], step: int) -> VerifyError:
    """Make the error of the findings, with the attributes of the first; it usually causes the others."""
    count = count_words(len(findings), "finding")
    texts = list_some([finding.text for finding in findings], MAX_FINDINGS, "; ")
    return VerifyError(f"step {step}: {count}: {texts}", site=findings[0].site, ranks=findings[0].ranks)


def find_replicated_axes(layout: Layout, sizes: Sizes) -> set[str]:
    """The axes, within the ranks of one sample, along which all or some ranks must hold the same tensor."""
    named = {*layout.axes, *layout.shared}
    axes = {"etp"} if named & EXPERT_AXES else {"tp", "cp"}
    some = {c.axis for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
    return {a for a in (axes - set(layout.axes)) | some if sizes.get(a, 1) > 1}


StageObservations = Sequence[tuple[Coords, Sequence[SiteObservation]]]  # of all ranks of a stage


def find_violations(
    reports: StageObservations, shapes: Mapping[str, Sequence[int | str]], mesh: Mesh
) -> list[Finding]:
    """The violations at one stage's sites; each site is reported once, in order of execution.

    A pure function of the observations of all ranks of the stage.

    Args:
        reports: the coordinates and the observations of each rank.
        shapes: the full tensor's shape that each site declares.
        mesh: the run's axes.
    """
    passes: dict[tuple[str, int, int], list[tuple[Coords, SiteObservation]]] = {}
    for coords, observations in reports:
        for observation in observations:
            passes.setdefault((observation.site, observation.microbatch, observation.call), []).append(
                (coords, observation)
            )
    lengths = _count_lengths(passes.values(), shapes, mesh.sizes)
    out: dict[str, Finding] = {}
    several = track(passes.items(), "verifying sites", unit="passes")
    for (site, microbatch, _), at in several:
        problem = next(_find_problems(at, len(reports), shapes[site], lengths, mesh), "")
        if problem:
            out.setdefault(site, Finding(f"{site}, microbatch {microbatch}: {problem}", site))
    return list(out.values())


CallObservations = list[tuple[Coords, SiteObservation]]


def _find_problems(
    at: CallObservations,
    ranks: int,
    promised: Sequence[int | str],
    lengths: dict[Any, Counter[int]],
    mesh: Mesh,
) -> Iterator[str]:
    if len(at) < ranks:
        yield f"it passed on {len(at)} of {ranks} ranks"
    for coords, observation in at:
        if observation.again:
            yield "the same tensor passed twice; its tap runs the hooks twice"
        if observation.rows:
            continue
        try:
            full = _infer_full_shape(observation, mesh.sizes)
        except LayoutError as error:
            yield str(error)
            return
        for name, got in zip(_list_promised_lengths(promised, observation), full, strict=True):
            due, why = name, "is promised"
            if isinstance(due, str):
                usual = lengths.get(_make_length_key(coords, observation, due), Counter()).most_common(1)
                due, why = (usual[0][0] if usual else due), f"is {name} at most sites"
            if isinstance(due, int) and got is not None and got != due:
                reports = observation.layout.describe(mesh.sizes)
                premise = f"local shape {observation.shape} in {reports} makes {full}"
                yield f"{premise}; instead of {got}, {due} {why}"
    yield from _find_unequal(at, mesh)


def _find_unequal(at: CallObservations, mesh: Mesh) -> Iterator[str]:
    axes = find_replicated_axes(at[0][1].layout, mesh.sizes)
    if not axes:
        return
    groups: dict[tuple[Any, ...], list[SiteObservation]] = {}
    for coords, observation in at:
        groups.setdefault(_shard_identity(coords, observation.layout), []).append(observation)
    for group in groups.values():
        if len({(s.check, s.shape) for s in group}) > 1:
            sums = ", ".join(f"{s.total:.9g}" for s in group)
            yield f"ranks that must hold the same along {', '.join(sorted(axes))} differ (sums {sums})"


def _shard_identity(coords: Coords, layout: Layout) -> tuple[Any, ...]:
    """What ranks that must hold the same tensor have in common: the sample, and the index of the shard."""
    expert = {*layout.axes, *layout.shared} & EXPERT_AXES
    fixed = ("edp", "ep") if expert else ("dp",)
    copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if not c.partial}
    cut = tuple(coords.get(a, 0) // copies.get(a, 1) for a in layout.axes)
    return (*(coords.get(a, 0) for a in fixed), *cut)


def _infer_full_shape(observation: SiteObservation, sizes: Sizes) -> tuple[int | None, ...]:
    """The full tensor's shape; None for dims whose length depends on all shards."""
    dims = observation.layout.dims
    if any(d.uneven for d in dims):
        order = full_order(observation.layout)
        plain = [None if dims[i].uneven or dims[i].cuts else observation.shape[i] for i in order]
        return tuple(plain) if len(observation.shape) == len(dims) else tuple(observation.shape)
    return full_shape(observation.layout, observation.shape, sizes)


def _list_promised_lengths(
    promised: Sequence[int | str], observation: SiteObservation
) -> Sequence[int | str]:
    """The declared full shape; for a tensor with other dims (packed sequences) the dims' names."""
    dims = observation.layout.dims
    if len(promised) == len(dims):
        return promised
    return [dims[i].name for i in full_order(observation.layout)]


def _make_length_key(coords: Coords, observation: SiteObservation, name: str) -> tuple[Any, ...]:
    return name, observation.microbatch, coords.get("dp", 0)


def _count_lengths(
    passes: Iterable[CallObservations], shapes: Mapping[str, Sequence[int | str]], sizes: Sizes
) -> dict[Any, Counter[int]]:
    """Count how often each length of the dims of a sample occurs; a site with another length is wrong."""
    out: dict[Any, Counter[int]] = {}
    for at in passes:
        for coords, observation in at:
            if observation.rows:
                continue
            try:
                full = _infer_full_shape(observation, sizes)
            except LayoutError:
                continue
            for name, length in zip(
                _list_promised_lengths(shapes[observation.site], observation), full, strict=True
            ):
                if isinstance(name, str) and name in SAMPLE_DIMS and length is not None:
                    out.setdefault(_make_length_key(coords, observation, name), Counter())[length] += 1
    return out
