"""Full parameters and their gradients: where their shards are, gathered on the leader or on all ranks, and
set on all ranks.

Before a parameter is sent, all ranks must know its dtype, its shape and whether gradients are reduced.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, ParameterSite
from megatron_flex.collectives import (
    assemble_on_stage,
    broadcast_from_first,
    checksum,
    find_differing_axes,
    gather_distinct,
    join_flat_parts,
    send_from_stage,
    sum_along,
)
from megatron_flex.errors import FlexError, LayoutError, SiteError, suggest_nearest
from megatron_flex.gpt_names import own_name
from megatron_flex.layout import TENSOR_AXIS, Layout, Sizes, extract, full_shape, infer_layout
from megatron_flex.layout.gradient_layout import find_stored_gradient
from megatron_flex.sites import model_order

EXPERT_AXES = {"ep", "etp", "edp"}
MAX_NAMES = 8  # bounds the names in one error
UNKNOWN_REDUCTION = "whether these gradients are reduced is not known: {why}"


class ParameterRequest(NamedTuple):
    """A request for a parameter.

    Attributes:
        gradient: request the gradient instead of the parameter.
        reduced: the gradient after the framework's reduction (True), or each data parallel replica's own
            (False); None for the state in which the framework is known to leave gradients.
        padded: include the rows that pad a vocabulary.
        everywhere: return the tensor on every rank, not only on the leader.
        expected: the full tensor's shape; for a parameter of a plain module the shape shows which dims are
            sharded.
        averaged: whether `average_replicas` has averaged the gradients over data parallel replicas.
    """

    gradient: bool = False
    reduced: bool | None = None
    padded: bool = False
    everywhere: bool = False
    expected: tuple[int | None, ...] | None = None
    averaged: bool = False

    @property
    def partial_sums(self) -> bool:
        """Whether ranks hold partial sums, as gradients are before their reduction."""
        return self.gradient and not self.reduced

    def layout(self, site: ParameterSite, sizes: Sizes) -> Layout:
        """The layout of the local parameters, with padding if requested.

        Raises:
            LayoutError: the local parameter is not a shard of a tensor of the expected shape.
        """
        layout = site.layout
        if site.inferred:
            layout = infer_layout(site.shape, self.expected, sizes.get(TENSOR_AXIS, 1))
        if self.padded:
            layout = replace(layout, dims=tuple(replace(d, keep=None) for d in layout.dims))
        return layout


class ParameterReport(NamedTuple):
    """A rank's report about its shard of a parameter, or of its gradient.

    Attributes:
        dtype: the dtype of the requested tensor; None if there is no gradient on this rank.
        held: the dtype of the parameter.
        shape: the shape of the full tensor.
        problem: why the tensor cannot be gathered; empty if it can.
        layout: the layout as text, for inferred layouts.
        unsure: whether the gradient may be a partial sum, which no tracked call has determined yet.
    """

    dtype: torch.dtype | None
    held: torch.dtype
    shape: tuple[int, ...]
    problem: str = ""
    layout: str = ""
    unsure: bool = False


def _find_remedy(kind: str) -> str:
    """What to do about a parameter without a layout, by the class that owns it, or of the parameter."""
    if "DTensor" in kind:
        return "shard each of its dims over one axis in equal parts, or read the shards yourself"
    if kind.startswith("TE") or kind.endswith("Tensor"):  # Transformer Engine's modules, quantized parameters
        return "build the layers with the local spec (--transformer-impl local), or read the shards yourself"
    if kind.startswith("Uninitialized"):
        return "run the model once, which gives it a shape, before you make the FlexModel"
    return "read the shards yourself, with get_parameter() of the module that holds it"


class ParameterIndex:
    """All parameters of a model by global name, over all stages, and the shards on this rank.

    Attributes:
        sites: for each name the parameter, and its copies on other stages.
        unknown: names of parameters without a layout, and the classes of their modules.
        buffers: names of buffers, and the classes of their modules.
        called: whether the model last ran outside a schedule, which does not finalize gradients.
    """

    def __init__(
        self,
        adapter: Adapter,
        local_sites: Sequence[ParameterSite],
        reports: Sequence[ParameterSite],
        unknown: Mapping[str, str] | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        self.buffers, self.unknown = dict(buffers or {}), dict(unknown or {})
        self.adapter, self.mesh, self.called = adapter, adapter.mesh, False
        self.sites: dict[str, list[ParameterSite]] = {}
        for site in sorted(reports, key=model_order):
            self.sites.setdefault(site.copy_of or site.name, []).append(site)
        self.local_sites: dict[str, list[ParameterSite]] = {}
        for site in local_sites:
            self.local_sites.setdefault(site.copy_of or site.name, []).append(site)

    def first_copies(self) -> dict[str, ParameterSite]:
        """Each parameter by name, as the first stage that holds it reports it."""
        return {name: copies[0] for name, copies in self.sites.items()}

    def all_copies(self) -> list[ParameterSite]:
        """All parameters, each followed by its copies on other stages."""
        return [site for copies in self.sites.values() for site in copies]

    def held(self, name: str) -> list[tuple[ParameterSite, nn.Parameter]]:
        """This rank's copies of a parameter, usually one or none."""
        return [(s, s.parameter) for s in self.local_sites.get(name, []) if s.parameter is not None]

    def stages(self, name: str) -> list[int]:
        """The stages that hold the parameter; the first one is read."""
        return sorted({s.stage for s in self.sites[name]})

    def resolve(self, name: str) -> str:
        """The name of a parameter, or of the parameter that it is a copy of; `gpt:` and a GPTModel's name
        are the parameter of this model with the same weights.

        Raises:
            SiteError: there is no such parameter, or its layout is not known.
        """
        name = own_name(name, self.sites)
        if name in self.sites:
            return name
        for original, sites in self.sites.items():
            if any(s.name == name for s in sites):
                return original
        if name in self.unknown:
            raise SiteError(
                f"{name} belongs to a {self.unknown[name]}, whose layout is not known; "
                f"{_find_remedy(self.unknown[name])}"
            )
        if name in self.buffers:
            raise SiteError(
                f"{name} is a buffer of a {self.buffers[name]}, and only parameters have a layout; read it "
                "with get_buffer() of the module that holds it, or hook the tensor that is computed from it"
            )
        raise SiteError(f"no parameter {name!r}{suggest_nearest(name, self.sites)}")

    def prepare(self, want: ParameterRequest) -> ParameterRequest:
        """Fill in `reduced`, and wait for pending work of the framework on parameters.

        Raises:
            FlexError: the framework does not define whether gradients are reduced and the request does not
                either, or the request contradicts the framework.
        """
        if not want.gradient:
            self.adapter.storage.wait_until_ready()
            return want
        known = self.adapter.storage.reduced(self.called)
        if want.reduced is None:
            if isinstance(known, str):
                raise FlexError(UNKNOWN_REDUCTION.format(why=known))
            return want._replace(reduced=known)
        if known is True and not want.reduced:
            raise FlexError(
                "the schedule or the wrapper has reduced these gradients already; drop reduced=False"
            )
        return want

    def layout(self, site: ParameterSite, want: ParameterRequest) -> Layout:
        """The layout of the requested local tensors.

        Raises:
            LayoutError: the local parameter is not a shard of a tensor of the expected shape.
        """
        layout = want.layout(site, self.mesh.sizes)
        if not want.gradient:
            return layout
        return find_stored_gradient(
            layout, not want.partial_sums, self.adapter.gradient_partial_axes(site.name) or ()
        )

    def note(self, name: str, want: ParameterRequest) -> ParameterReport | None:
        """This rank's report about a parameter; None if this rank holds no shard of it."""
        for site, parameter in self.held(name):
            try:
                layout = self.layout(site, want)
            except LayoutError as error:
                return ParameterReport(None, parameter.dtype, site.shape, str(error))
            shape = full_shape(layout, site.local, self.mesh.sizes)
            note = ParameterReport(
                parameter.dtype, parameter.dtype, shape, layout=layout.describe() if site.inferred else ""
            )
            kind = type(parameter.data)
            if kind is not Tensor and not site.sharded:
                problem = f"it is kept as a {kind.__name__}, whose parts are not known; read those yourself"
                return note._replace(problem=problem)
            if not want.gradient:
                return note
            try:
                tensor = self.adapter.storage.gradient(parameter, not want.partial_sums).tensor
            except FlexError as error:
                return note._replace(problem=str(error))
            dtype, unsure = (
                None if tensor is None else tensor.dtype,
                self.adapter.gradient_partial_axes(site.name) is None,
            )
            refused = want.partial_sums and not want.averaged
            return note._replace(
                dtype=dtype,
                unsure=unsure,
                problem=self._no_sum(site) if refused else "",
            )
        return None

    def notes(self, names: Sequence[str], want: ParameterRequest) -> dict[str, ParameterReport]:
        """The reports for the parameters that exist (have a gradient). Collective over the mesh.

        Raises:
            FlexError: on all ranks, if one rank reports a problem, or gradients contradict the request.
        """
        local_reports = {n: note for n in names if (note := self.note(n, want)) is not None}
        report_of: dict[str, ParameterReport] = {}
        others: dict[str, str] = {}
        for reports in gather_distinct(local_reports, self.mesh):
            for name, note in reports.items():
                if note.problem:
                    raise FlexError(f"{name}: {note.problem}")
                if note.layout != others.setdefault(name, note.layout):
                    raise FlexError(f"{name}: ranks have parts of different shapes; read the shards yourself")
                if note.dtype is not None:
                    report_of.setdefault(name, note)
        if want.gradient:
            with_report = [n for n in names if n in report_of]
            self._check_shares([n for n in with_report if report_of[n].unsure])
            if want.reduced:
                self._check_reduced(with_report)
        return {n: report_of[n] for n in names if n in report_of}

    def average_replicas(self) -> None:
        """Average the gradients that no code of the framework reduces, over data parallel replicas.

        For chunks without a wrapper, as Megatron's wrapper does: the context parallel ranks' parts are added,
        and an expert's gradient is the sum over all ranks that run it, divided by as many replicas. A
        parameter without a gradient gets one of zeros. Collective over the replicas.
        """
        replicas = self.mesh["dp"].size * self.mesh["cp"].size
        if replicas == 1 and self.mesh["edp"].size == 1:
            return
        for site, parameter in (pair for name in self.local_sites for pair in self.held(name)):
            if not parameter.requires_grad:
                continue
            reduced_axes = {*site.layout.axes, *site.layout.shared}
            over = ("edp",) if is_expert(site) else ("dp", "cp")
            stored = self.adapter.storage.gradient(parameter, False).tensor
            gradient = torch.zeros_like(parameter) if stored is None else stored.detach().clone()
            sum_along(gradient, self.mesh, [axis for axis in over if axis not in reduced_axes])
            self.adapter.storage.put_gradient(parameter, gradient.div_(replicas), False)

    def _no_sum(self, site: ParameterSite) -> str:
        """Why the gradient cannot be gathered before its reduction; empty if it can."""
        axes, sizes = {*site.layout.axes, *site.layout.shared}, self.mesh.sizes
        apart = sizes.get("ep", 1) > 1 or sizes.get("etp", 1) != sizes.get("tp", 1)
        if apart and is_expert(site):
            return "an expert's gradient comes from several data parallel ranks; reduced=True reads the sum"
        if self.mesh["cp"].size > 1 and "cp" not in axes:
            return "with context parallelism each rank has a share of it; reduced=True reads the sum"
        return ""

    def _check_shares(self, names: Sequence[str]) -> None:
        """Refuse gradients that may be partial sums, if no tracked call can determine that."""
        differing = find_differing_axes(
            [self._copy(name, {"tp", "cp"}) for name in names], self.mesh, ("tp", "cp")
        )
        wrong = [name for name, axes in zip(names, differing, strict=True) if axes]
        if wrong:
            raise FlexError(
                f"ranks have different gradients of {wrong[0]}, and how they form the full one is unknown: "
                "no call of the model was followed, or the calls do not determine it; have a hook at some "
                "module's input or output while it runs, or read each rank's gradient yourself"
            )

    def _copy(self, name: str, axes: set[str]) -> dict[str, int]:
        """A checksum of this rank's gradient for each of some axes."""
        for _, parameter in self.held(name):
            tensor = self.adapter.storage.gradient(parameter, True).tensor
            if tensor is not None:
                return dict.fromkeys(axes, checksum(tensor))
        return {}

    def _check_reduced(self, names: Sequence[str]) -> None:
        """Verify that gradients requested as reduced are reduced: copies must be equal."""
        axes = ("tp", "cp", "dp", "pp", "etp", "edp")
        differing = find_differing_axes([self._reduced_copy(name) for name in names], self.mesh, axes)
        wrong = [f"{n} over {', '.join(axes)}" for n, axes in zip(names, differing, strict=True) if axes]
        if wrong:
            more = f" and {len(wrong) - MAX_NAMES} more" if len(wrong) > MAX_NAMES else ""
            raise FlexError(
                f"gradients declared as reduced differ between ranks that should have equal ones "
                f"({'; '.join(wrong[:MAX_NAMES])}{more}); run finalize_model_grads() first, or ask for "
                "reduced=False"
            )

    def _reduced_copy(self, name: str) -> dict[str, int]:
        """A checksum of this rank's gradient, for each axis over which copies must be equal."""
        for site, parameter in self.held(name):
            local = self.adapter.storage.gradient(parameter, True)
            if local.tensor is None:
                continue
            axes = find_copy_axes(site, len(self.stages(name)) > 1) - {
                *(self.adapter.gradient_partial_axes(name) or ())
            }
            tensor = local.tensor
            if local.part is not None:
                tensor = tensor.reshape(-1)[slice(*local.part)]
                axes -= {"dp", "cp", "edp"}  # each of those ranks holds another range
            return dict.fromkeys(axes, checksum(tensor))
        return {}


def is_expert(site: ParameterSite) -> bool:
    """Whether a parameter is an expert's, which `ep`, `etp` and `edp` divide."""
    return bool(site.owner) or bool({*site.layout.axes, *site.layout.shared} & EXPERT_AXES)


def find_copy_axes(site: ParameterSite, copied: bool) -> set[str]:
    """The axes along which ranks must hold equal copies of a parameter.

    Args:
        site: the parameter.
        copied: whether several stages hold the parameter.
    """
    if site.inferred:
        return {"dp"}
    axes = {"etp", "edp"} if is_expert(site) else {"tp", "cp", "dp"}
    return (axes | ({"pp"} if copied else set())) - set(site.layout.axes)


def gather_parameter(
    parameter_index: ParameterIndex, name: str, want: ParameterRequest, expected: Sequence[int | None] | None
) -> Tensor | None:
    """Gather one full tensor on the CPU of the leader or of every rank; None elsewhere. Collective over the
    mesh.
    """
    name = parameter_index.resolve(name)
    want = parameter_index.prepare(want)._replace(expected=None if expected is None else tuple(expected))
    note = parameter_index.notes([name], want).get(name)
    if note is None:
        raise FlexError(f"{name} has no gradient: it is frozen, or no backward pass has run")
    if expected is not None and (
        len(expected) != len(note.shape)
        or any(e is not None and e != n for e, n in zip(expected, note.shape, strict=True))
    ):
        raise FlexError(
            f"{name} has shape {note.shape}, not the expected {tuple(expected)}; drop expected_shape"
        )
    return _gather_full(parameter_index, name, want, note)


def gather_all_parameters(
    parameter_index: ParameterIndex, want: ParameterRequest
) -> Iterator[tuple[str, Tensor]]:
    """Gather the full tensors one by one. Collective over the mesh: every rank iterates to the end."""
    unknown = parameter_index.unknown
    if unknown:
        some = ", ".join(f"{n} ({kind})" for n, kind in list(unknown.items())[:3])
        more = ", ..." if len(unknown) > 3 else ""
        warnings.warn(
            f"{len(unknown)} parameters of modules without a known layout are left out: {some}{more}; "
            "parameters_without_layout() has all",
            stacklevel=3,
        )
    want = parameter_index.prepare(want)
    for name, note in parameter_index.notes(list(parameter_index.sites), want).items():
        full = _gather_full(parameter_index, name, want, note)
        if full is not None:
            yield name, full


def set_parameter(
    parameter_index: ParameterIndex, name: str, value: Tensor | None, want: ParameterRequest, optimizer: Any
) -> None:
    """Write a full tensor to all its shards and copies. Collective over the mesh."""
    name = parameter_index.resolve(name)
    if optimizer is not None and not hasattr(optimizer, "reload_model_params"):
        kind = type(optimizer).__name__
        raise FlexError(f"a {kind} has no reload_model_params(); give Megatron's optimizer, or none")
    want = parameter_index.prepare(want)
    if parameter_index.sites[name][0].inferred:
        want = want._replace(expected=_share_shape(parameter_index, value))
    value = _agree_on_value(parameter_index, name, value, want)
    for number, (site, parameter) in enumerate(parameter_index.held(name)):
        first = number == 0 and site.stage == parameter_index.stages(name)[0]
        # Of partial sums one rank gets the value and the others zeros, as in a layout.
        contribution = value if first or not want.partial_sums else torch.zeros_like(value)
        _write_shard(parameter_index, site, parameter, contribution, want)
    if optimizer is not None:
        optimizer.reload_model_params()


def _gather_full(
    parameter_index: ParameterIndex, name: str, want: ParameterRequest, note: ParameterReport
) -> Tensor | None:
    """Gather one full tensor on the requested ranks; copies that are partial sums are added."""
    mesh = parameter_index.mesh
    like = torch.empty(note.shape, dtype=note.dtype, device="meta")
    total: Tensor | None = None
    for stage in parameter_index.stages(name) if want.partial_sums else parameter_index.stages(name)[:1]:
        full = None
        if stage == mesh["pp"].coord:
            site = parameter_index.local_sites[name][0]
            local = _read_local(parameter_index, name, want, note)
            full = assemble_on_stage(
                local, parameter_index.layout(site, want), site.owner, like, mesh, want.everywhere
            )
        full = send_from_stage(full, stage, like, mesh, want.everywhere)
        if full is not None:
            total = full.to("cpu", copy=True) if total is None else total + full.cpu()
    return total


def _read_local(
    parameter_index: ParameterIndex, name: str, want: ParameterRequest, note: ParameterReport
) -> Tensor | None:
    copies = [parameter for _, parameter in parameter_index.held(name)]
    if not copies or not want.gradient:
        return parameter_index.adapter.storage.value(copies[0]) if copies else None
    # This rank has no gradient where others have one: its contribution is zero.
    shape = parameter_index.local_sites[name][0].local
    nothing = torch.zeros(shape, dtype=note.dtype, device=copies[0].device)
    if want.reduced:
        local = parameter_index.adapter.storage.gradient(copies[0], True)
        return join_flat_parts(
            nothing if local.tensor is None else local.tensor.detach(), local.part, local.group
        )
    gradients = [parameter_index.adapter.storage.gradient(p, False).tensor for p in copies]
    return sum((t.detach() for t in gradients if t is not None), nothing)


def _share_shape(parameter_index: ParameterIndex, value: Tensor | None) -> tuple[int, ...] | None:
    """Broadcast the shape of the value, which shows how a plain module's parameter is sharded. Collective
    over the mesh.
    """
    given = None if value is None else tuple(value.shape)
    answers = gather_distinct(given, parameter_index.mesh)
    return next((shape for shape in answers if shape is not None), None)


def _agree_on_value(
    parameter_index: ParameterIndex, name: str, value: Tensor | None, want: ParameterRequest
) -> Tensor:
    """Return the value on every rank, after all ranks have validated its type."""
    mesh = parameter_index.mesh
    given = None if value is None else (tuple(value.shape), value.dtype, checksum(value))
    # All that follows is decided by what all ranks have: they raise together, or go on to the broadcast.
    answers = gather_distinct((parameter_index.note(name, want), given), mesh)
    notes = [note for note, _ in answers if note is not None]
    if problem := next((n.problem for n in notes if n.problem), ""):
        raise FlexError(f"{name}: {problem}")
    supplied = [g for _, g in answers if g is not None]
    if answers[0][1] is None:
        raise FlexError(f"no value for {name}; pass the full tensor on every rank, or on the leader")
    if any(g != supplied[0] for g in supplied):
        raise FlexError(f"the values for {name} differ between ranks; pass the same, or the leader's only")
    shape, dtype, _ = supplied[0]
    known = next((n.dtype for n in notes if n.dtype is not None), notes[0].held)
    if shape != notes[0].shape or dtype != known:
        raise FlexError(
            f"{name} has shape {notes[0].shape} and dtype {known}; the value has {shape} and {dtype}: "
            "convert it"
        )
    if value is not None and len(supplied) == len(answers):
        return value.detach()
    device = next(p.device for n in parameter_index.local_sites for _, p in parameter_index.held(n))
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if value is not None:
        buffer.copy_(value)
    return broadcast_from_first(buffer, mesh)


def _write_shard(
    parameter_index: ParameterIndex,
    site: ParameterSite,
    parameter: nn.Parameter,
    value: Tensor,
    want: ParameterRequest,
) -> None:
    mesh, adapter = parameter_index.mesh, parameter_index.adapter
    old = adapter.storage.value(parameter)
    layout = parameter_index.layout(site, want)
    if want.gradient:
        gradient = adapter.storage.gradient(parameter, not want.partial_sums).tensor
        old = torch.zeros_like(old) if gradient is None else gradient
    # The full tensor has no padding; the local tensor keeps its padding.
    shard = extract(layout, value.to(old.device), mesh.coords, mesh.sizes, old)
    if want.gradient:
        adapter.storage.put_gradient(parameter, shard, not want.partial_sums)
    else:
        adapter.storage.set_value(parameter, shard)
