"""The parameters and buffers of a dump at the beginning of a step, and gradients at its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters import ParameterSite
from megatron_flex.dump import PARAMETER, PARAMETER_GRADIENT, ShardEntry, SiteRecord, layout_to_json
from megatron_flex.errors import FlexError, FlexWarning, SiteError
from megatron_flex.layout import TENSOR_AXIS, Layout
from megatron_flex.mesh import Axis
from megatron_flex.runtime.full_parameters import (
    ParameterIndex,
    ParameterRequest,
    find_copy_axes,
    is_expert,
)
from megatron_flex.runtime.shard_recorder import ShardRecorder
from megatron_flex.sites import Pattern, Site, SiteTable

MAX_NAMES = 3  # bounds the names in one warning
OPTIMIZER_AXES = {"dp", "cp", "edp"}  # a distributed optimizer leaves each of their ranks a part
CALL_HAS_NO_GRADIENTS = (
    "gradients of parameters are taken once the backward pass is over, which a call of the model by itself "
    "does not tell: run forward and backward in `with flex.step():`, or by the framework's schedule"
)


class LocalParameterGradient(NamedTuple):
    """The part of a gradient on this rank.

    Attributes:
        site: the parameter.
        name: its global name, or that of the parameter that it is a copy of.
        local: the gradient of the local parameter.
        part: the range of this rank's entries in the flattened gradient; None for all.
        layout: the layout of `local`.
    """

    site: ParameterSite
    name: str
    local: Tensor
    part: tuple[int, int] | None
    layout: Layout


class ParameterSelection:
    """The parameters that a dump records.

    Attributes:
        names: the names in model order; copies on several stages have the name of the first.
        left_out: parameters that patterns match and that are not recorded, with the reason.
    """

    def __init__(
        self, parameter_index: ParameterIndex, names: Sequence[str], left_out: Mapping[str, str] | None = None
    ) -> None:
        self.parameter_index, self.names, self.left_out = parameter_index, list(names), dict(left_out or {})

    def places(self) -> list[SiteRecord]:
        """Their records in the manifest."""
        sites = [self.parameter_index.sites[n][0] for n in self.names]
        return [
            SiteRecord(p.name, layout_to_json(p.layout), tuple(p.shape), p.stage, p.chunk, p.inferred)
            for p in sites
        ]

    def write_values(self, recorder: ShardRecorder, iteration: int) -> None:
        """Write the parameters. All data parallel ranks of a stage make the same call."""
        self.parameter_index.adapter.storage.wait_until_ready()
        for name, copies in self._local_copies():
            site, parameter = copies[0]
            local = self.parameter_index.adapter.storage.value(parameter)
            entry = ShardEntry(name, PARAMETER, 0, 0, 0, (), "")
            layout = self.parameter_index.layout(site, ParameterRequest())
            self._write(recorder, entry, site, local, layout, iteration)

    def write_gradients(self, recorder: ShardRecorder, iteration: int) -> None:
        """Write the gradients that exist. All data parallel ranks of a stage make the same call.

        Raises:
            FlexError: on all ranks: the gradients are not reduced, or that is not known.
        """
        for site, name, local, part, layout in self.local_gradients():
            entry = ShardEntry(name, PARAMETER_GRADIENT, 0, 0, 0, (), "", span=part)
            self._write(recorder, entry, site, local, layout, iteration)

    def local_gradients(self) -> Iterator[LocalParameterGradient]:
        """The gradients of which this rank holds a part, in model order.

        Raises:
            FlexError: on all ranks: the gradients are not reduced, or that is not known.
        """
        request = self._request()
        for name, copies in self._local_copies():
            site, parameter = copies[0]
            if not request.reduced:
                local, part = self._sum_copies(copies), None
            else:
                given = self.parameter_index.adapter.storage.gradient(parameter, True)
                local, part = given.tensor, given.part
            if local is not None:
                layout = self.parameter_index.layout(site, request)
                yield LocalParameterGradient(site, name, local, part, layout)

    def _local_copies(self) -> Iterator[tuple[str, list[tuple[ParameterSite, nn.Parameter]]]]:
        for name in self.names:
            copies = self.parameter_index.held(name)
            if copies:
                yield name, copies

    def _write(
        self,
        recorder: ShardRecorder,
        entry: ShardEntry,
        site: ParameterSite,
        local: Tensor,
        layout: Layout,
        iteration: int,
    ) -> None:
        first, copy_axes = self.parameter_index.stages(entry.site)[0], self.copy_axes(site)
        if site.stage != first:
            if entry.span is None:
                recorder.copy(entry, local, layout)
        elif entry.span is not None:
            recorder.part(entry, local, layout, self.same_part_axes(copy_axes))
        else:
            recorder.take(entry, local, layout, iteration, over=copy_axes)

    def copy_axes(self, site: ParameterSite) -> list[Axis]:
        """The axes along which ranks may hold equal copies of a parameter."""
        mesh = self.parameter_index.mesh
        duplicated = {c.axis for d in site.layout.dims for c in d.cuts if c.copies > 1}
        names = find_copy_axes(site, False) | duplicated
        return [a for a in (mesh.experts if is_expert(site) else mesh.axes) if a.name in names]

    @staticmethod
    def same_part_axes(copy_axes: Sequence[Axis]) -> list[Axis]:
        """The axes among these along which ranks hold the same part of a gradient that is split into
        parts.
        """
        return [a for a in copy_axes if a.name not in OPTIMIZER_AXES]

    def _request(self) -> ParameterRequest:
        known = self.parameter_index.adapter.storage.reduced(self.parameter_index.called)
        if isinstance(known, str):
            raise FlexError(
                f"gradients of parameters are unavailable, as it is not known if they are reduced: {known}; "
                "or leave them out"
            )
        if not known:
            mesh = self.parameter_index.mesh
            unreduced = [a.name for a in mesh if a.name in ("dp", "cp") and a.size > 1]
            copied = [n for n in self.names if len(self.parameter_index.stages(n)) > 1]
            if unreduced or copied:
                over = f"over {', '.join(unreduced)}"
                which = over if unreduced else f"of {copied[0]}, which several stages hold"
                raise FlexError(
                    f"gradients of parameters are not reduced {which} when the step is over; wrap the model "
                    "in the framework's DistributedDataParallel, or leave them out"
                )
        return ParameterRequest(gradient=True, reduced=known)

    def _sum_copies(self, copies: Sequence[tuple[ParameterSite, nn.Parameter]]) -> Tensor | None:
        gradients = [self.parameter_index.adapter.storage.gradient(p, False).tensor for _, p in copies]
        present = [t.detach() for t in gradients if t is not None]
        return torch.stack(present).sum(0) if len(present) > 1 else next(iter(present), None)


def select_buffers(buffer_index: ParameterIndex, patterns: Sequence[Pattern]) -> ParameterSelection:
    """Select the buffers that patterns of parameters match, which may be none."""
    table = _make_table(buffer_index)
    matched = {name for pattern in patterns for name, _ in _match_pattern(table, pattern)}
    omitted = {n: why for n in sorted(matched) if (why := _explain_omission(buffer_index, n))}
    names = [n for n in buffer_index.sites if n in matched and n not in omitted]
    return ParameterSelection(buffer_index, names, omitted)


def select_parameters(
    parameter_index: ParameterIndex,
    patterns: Sequence[Pattern],
    what: str = "the dump",
    buffers: Sequence[str] = (),
) -> ParameterSelection:
    """Select the parameters that patterns match. Warnings name the purpose `what`.

    Args:
        parameter_index: all parameters.
        patterns: names and patterns.
        what: the purpose.
        buffers: names of buffers; a pattern that matches one of them need not match a parameter.

    Raises:
        SiteError: a pattern matches nothing, or a name is that of a parameter without a known layout.
    """
    table = _make_table(parameter_index)
    buffer_table = SiteTable(Site(n, Layout(()), ()) for n in buffers)
    without_layout = SiteTable(Site(n, Layout(()), (kind,)) for n, kind in parameter_index.unknown.items())
    matched: set[str] = set()
    omitted: dict[str, str] = {}
    for pattern in patterns:
        if _match_pattern(buffer_table, pattern) and not _match_pattern(table, pattern):
            continue  # buffers only
        if isinstance(pattern, str) and not set(pattern) & set("*?["):
            matched.add(parameter_index.resolve(pattern))
            continue
        unknown = {name: f"is of a {kind}" for name, kind in _match_pattern(without_layout, pattern)}
        omitted |= {name: f"{why}, whose layout is not known" for name, why in unknown.items()}
        try:
            matched |= {s.name for s in table.match(pattern)}
        except SiteError:
            if not unknown:
                raise
    omitted |= {n: why for n in sorted(matched) if (why := _explain_omission(parameter_index, n))}
    if omitted:
        name, why = next(iter(omitted.items()))
        more = f", and likewise {len(omitted) - 1} more" if len(omitted) > 1 else ""
        warnings.warn(f"parameters are left out of {what}: {name} {why}{more}", FlexWarning, stacklevel=2)
    names = [n for n in parameter_index.sites if n in matched and n not in omitted]
    return ParameterSelection(parameter_index, names, omitted)


def _make_table(parameter_index: ParameterIndex) -> SiteTable:
    return SiteTable(Site(n, sites[0].layout, sites[0].shape) for n, sites in parameter_index.sites.items())


def _match_pattern(table: SiteTable, pattern: Pattern) -> list[tuple[str, str]]:
    try:
        return [(s.name, str(s.shape[0]) if s.shape else "") for s in table.match(pattern)]
    except SiteError:
        return []


def _explain_omission(parameter_index: ParameterIndex, name: str) -> str:
    """Why the parameter cannot be dumped; empty if it can."""
    site = parameter_index.sites[name][0]
    if site.inferred and parameter_index.mesh[TENSOR_AXIS].size > 1:
        return "is of a plain module, and how tensor parallel ranks cut it is not known"
    for _, parameter in parameter_index.held(name):
        if type(parameter.data) is not Tensor and not site.sharded:
            return f"is kept as a {type(parameter.data).__name__}, whose parts are not known"
    return ""
