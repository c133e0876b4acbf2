"""What all ranks must know of parameters before one is sent: dtype, shape, how far gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, ParameterSite
from megatron_flex.collectives import checksum, find_differing_axes, gather_objects
from megatron_flex.errors import FlexError, LayoutError, SiteError, suggest_nearest
from megatron_flex.layout import TENSOR_AXIS, Layout, Sizes, infer_layout, full_shape
from megatron_flex.sites import model_order

EXPERT_AXES = {"ep", "etp", "edp"}
MAX_NAMES = 8  # names in one error
UNKNOWN_REDUCTION = "whether these gradients are reduced is not known: {why}"


class ParameterRequest(NamedTuple):
    """What is asked for of a parameter.

    Attributes:
        gradient: its gradient and not itself.
        reduced: the gradient after the framework's reduction, or each data parallel replica's own; None for
            what the framework is known to leave.
        padded: with the rows that pad a vocabulary.
        everywhere: on every rank and not on the leader alone.
        expected: the whole's shape; of a parameter of a plain module it says what is cut.
    """

    gradient: bool = False
    reduced: bool | None = None
    padded: bool = False
    everywhere: bool = False
    expected: tuple[int | None, ...] | None = None

    @property
    def summands(self) -> bool:
        """Whether what ranks hold are summands, as gradients are before they are reduced."""
        return self.gradient and not self.reduced

    def layout(self, site: ParameterSite, sizes: Sizes) -> Layout:
        """How the local tensors of what is wanted relate.

        Raises:
            LayoutError: the local parameter is no part of one of the expected shape.
        """
        layout = site.layout
        if site.inferred:
            layout = infer_layout(site.shape, self.expected, sizes.get(TENSOR_AXIS, 1))
        layout = layout.gradient() if self.summands else layout
        if self.padded:
            layout = replace(layout, dims=tuple(replace(d, keep=None) for d in layout.dims))
        return layout


class ParameterReport(NamedTuple):
    """What a rank says about its part of a parameter, or of its gradient.

    Attributes:
        dtype: of what is wanted; None if it has no gradient here.
        held: dtype of the parameter.
        shape: of the whole.
        problem: why it cannot be had.
        layout: how the parts relate, in words.
        unsure: whether its gradient may be a summand, which no followed call has told yet.
    """

    dtype: torch.dtype | None
    held: torch.dtype
    shape: tuple[int, ...]
    problem: str = ""
    layout: str = ""
    unsure: bool = False


class ParameterIndex:
    """All parameters of a model by global name, over all stages, and what this rank holds of each.

    Attributes:
        sites: for each name the parameter, and its copies on other stages.
        unknown: names of those without a layout, and the classes of their modules.
        called: whether the model ran outside a schedule last, which then finalized nothing.
    """

    def __init__(
        self,
        adapter: Adapter,
        own: Sequence[ParameterSite],
        reports: Sequence[ParameterSite],
        unknown: Mapping[str, str],
    ) -> None:
        self.adapter, self.mesh, self.unknown, self.called = adapter, adapter.mesh, dict(unknown), False
        self.sites: dict[str, list[ParameterSite]] = {}
        for site in sorted(reports, key=model_order):
            self.sites.setdefault(site.copy_of or site.name, []).append(site)
        self.own: dict[str, list[ParameterSite]] = {}
        for site in own:
            self.own.setdefault(site.copy_of or site.name, []).append(site)

    def held(self, name: str) -> list[tuple[ParameterSite, nn.Parameter]]:
        """This rank's copies of a parameter, mostly one or none."""
        return [(s, s.parameter) for s in self.own.get(name, []) if s.parameter is not None]

    def stages(self, name: str) -> list[int]:
        """The stages that hold it, the one that it is read from first."""
        return sorted({s.stage for s in self.sites[name]})

    def resolve(self, name: str) -> str:
        """The name of a parameter, or of the one that it is a copy of.

        Raises:
            SiteError: it is none, or its layout is not known.
        """
        if name in self.sites:
            return name
        for original, sites in self.sites.items():
            if any(s.name == name for s in sites):
                return original
        if name in self.unknown:
            raise SiteError(
                f"{name} belongs to a {self.unknown[name]}, whose layout is not known; build the layers with "
                "the local spec (--transformer-impl local), or read the shards yourself"
            )
        raise SiteError(f"no parameter {name!r}{suggest_nearest(name, self.sites)}")

    def prepare(self, want: ParameterRequest) -> ParameterRequest:
        """Say what `reduced` is, and wait for what the framework still does to parameters.

        Raises:
            FlexError: only the person who wrote the loop knows whether gradients are reduced, or errs.
        """
        if not want.gradient:
            self.adapter.settle()
            return want
        known = self.adapter.gradients_reduced(self.called)
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
        """How the local tensors of what is wanted of a parameter relate.

        Raises:
            LayoutError: the local parameter is no part of one of the expected shape.
        """
        layout = want.layout(site, self.mesh.sizes)
        more = self.adapter.shares(site.name) if want.gradient else ()
        there = {*layout.axes, *layout.shared}
        return replace(layout, partial=(*layout.partial, *(a for a in more or () if a not in there)))

    def note(self, name: str, want: ParameterRequest) -> ParameterReport | None:
        """What this rank has to say about a parameter; None if it holds nothing of it."""
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
                tensor = self.adapter.gradient(parameter, not want.summands).tensor
            except FlexError as error:
                return note._replace(problem=str(error))
            dtype, unsure = None if tensor is None else tensor.dtype, self.adapter.shares(site.name) is None
            return note._replace(
                dtype=dtype, unsure=unsure, problem=self._no_sum(site) if want.summands else ""
            )
        return None

    def notes(self, names: Sequence[str], want: ParameterRequest) -> dict[str, ParameterReport]:
        """Those of the parameters that exist (have a gradient). Collective over the mesh.

        Raises:
            FlexError: on all ranks, if one of them has a problem, or gradients are not what is said.
        """
        mine = {n: note for n in names if (note := self.note(n, want)) is not None}
        found: dict[str, ParameterReport] = {}
        others: dict[str, str] = {}
        for reports in gather_objects(mine, self.mesh, [a.name for a in self.mesh]):
            for name, note in reports.items():
                if note.problem:
                    raise FlexError(f"{name}: {note.problem}")
                if note.layout != others.setdefault(name, note.layout):
                    raise FlexError(f"{name}: ranks have parts of different shapes; read the shards yourself")
                if note.dtype is not None:
                    found.setdefault(name, note)
        if want.gradient:
            here = [n for n in names if n in found]
            self._check_shares([n for n in here if found[n].unsure])
            if want.reduced:
                self._check_reduced(here)
        return {n: found[n] for n in names if n in found}

    def _no_sum(self, site: ParameterSite) -> str:
        """Why a gradient that is not reduced cannot be put together, if it cannot."""
        axes, sizes = {*site.layout.axes, *site.layout.shared}, self.mesh.sizes
        apart = sizes.get("ep", 1) > 1 or sizes.get("etp", 1) != sizes.get("tp", 1)
        if apart and (site.owner or axes & EXPERT_AXES):
            return "an expert's gradient comes from several data parallel ranks; reduced=True reads the sum"
        if self.mesh["cp"].size > 1 and "cp" not in axes:
            return "with context parallelism each rank has a share of it; reduced=True reads the sum"
        return ""

    def _check_shares(self, names: Sequence[str]) -> None:
        """Refuse gradients that may be summands, where no call was followed that would tell."""
        found = find_differing_axes([self._copy(name, {"tp", "cp"}) for name in names], self.mesh, ("tp", "cp"))
        wrong = [name for name, axes in zip(names, found, strict=True) if axes]
        if wrong:
            raise FlexError(
                f"each rank has another gradient of {wrong[0]}, and how they make the whole is not known: no "
                "call of the model was followed, or those that were do not tell; have a hook at some "
                "module's input or output while it runs, or read the ranks' shares yourself"
            )

    def _copy(self, name: str, axes: set[str]) -> dict[str, int]:
        """A checksum of this rank's gradient for each of some axes."""
        for _, parameter in self.held(name):
            tensor = self.adapter.gradient(parameter, True).tensor
            if tensor is not None:
                return dict.fromkeys(axes, checksum(tensor))
        return {}

    def _check_reduced(self, names: Sequence[str]) -> None:
        """Hold a promise that gradients are reduced against the gradients: copies must be equal."""
        axes = ("tp", "cp", "dp", "pp", "etp", "edp")
        found = find_differing_axes([self._reduced_copy(name) for name in names], self.mesh, axes)
        wrong = [f"{n} over {', '.join(axes)}" for n, axes in zip(names, found, strict=True) if axes]
        if wrong:
            more = f" and {len(wrong) - MAX_NAMES} more" if len(wrong) > MAX_NAMES else ""
            raise FlexError(
                f"gradients said to be reduced differ between ranks that should have equal ones "
                f"({'; '.join(wrong[:MAX_NAMES])}{more}); run finalize_model_grads() first, or ask for "
                "reduced=False"
            )

    def _reduced_copy(self, name: str) -> dict[str, int]:
        """A checksum of this rank's gradient, for each axis over which it must be the same."""
        for site, parameter in self.held(name):
            local = self.adapter.gradient(parameter, True)
            if local.tensor is None:
                continue
            axes = find_copy_axes(site, len(self.stages(name)) > 1) - {*(self.adapter.shares(name) or ())}
            tensor = local.tensor
            if local.part is not None:
                tensor = tensor.reshape(-1)[slice(*local.part)]
                axes -= {"dp", "cp", "edp"}  # each of those ranks has another part
            return dict.fromkeys(axes, checksum(tensor))
        return {}


def find_copy_axes(site: ParameterSite, copied: bool) -> set[str]:
    """The axes along which ranks must hold the same of a parameter.

    Args:
        site: the parameter.
        copied: whether several stages hold it.
    """
    if site.inferred:
        return {"dp"}
    expert = bool(site.owner) or bool({*site.layout.axes, *site.layout.shared} & EXPERT_AXES)
    axes = {"etp", "edp"} if expert else {"tp", "cp", "dp"}
    return (axes | ({"pp"} if copied else set())) - set(site.layout.axes)
