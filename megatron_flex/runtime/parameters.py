"""Whole parameters and their gradients: read on the leader or everywhere, and set on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import checksum, gather_objects, join_flat_parts, broadcast_from_first, send_from_stage, assemble_on_stage
from megatron_flex.errors import FlexError
from megatron_flex.layout import extract
from megatron_flex.runtime.survey import ParameterReport, ParameterIndex, ParameterRequest


def gather_parameter(survey: ParameterIndex, name: str, want: ParameterRequest, expected: Sequence[int | None] | None) -> Tensor | None:
    """One whole, on the CPU of the leader or of every rank; None elsewhere. Collective over the mesh."""
    name = survey.resolve(name)
    want = survey.prepare(want)._replace(expected=None if expected is None else tuple(expected))
    note = survey.notes([name], want).get(name)
    if note is None:
        raise FlexError(f"{name} has no gradient: it is frozen, or no backward pass has run")
    if expected is not None and (
        len(expected) != len(note.shape)
        or any(e is not None and e != n for e, n in zip(expected, note.shape, strict=True))
    ):
        raise FlexError(
            f"{name} has shape {note.shape}, not the expected {tuple(expected)}; drop expected_shape"
        )
    return _gather_full(survey, name, want, note)


def gather_all_parameters(survey: ParameterIndex, want: ParameterRequest) -> Iterator[tuple[str, Tensor]]:
    """One whole after the other; collective over the mesh, so every rank goes on to the end."""
    if survey.unknown:
        some = ", ".join(f"{n} ({kind})" for n, kind in list(survey.unknown.items())[:3])
        more = ", ..." if len(survey.unknown) > 3 else ""
        warnings.warn(
            f"{len(survey.unknown)} parameters of modules without a known layout are left out: {some}{more}; "
            "parameters_without_layout() has all",
            stacklevel=2,
        )
    want = survey.prepare(want)
    for name, note in survey.notes(list(survey.sites), want).items():
        full = _gather_full(survey, name, want, note)
        if full is not None:
            yield name, full


def set_parameter(survey: ParameterIndex, name: str, value: Tensor | None, want: ParameterRequest, optimizer: Any) -> None:
    """Put a whole into all its shards and copies. Collective over the mesh."""
    name = survey.resolve(name)
    if optimizer is not None and not hasattr(optimizer, "reload_model_params"):
        kind = type(optimizer).__name__
        raise FlexError(f"a {kind} has no reload_model_params(); give Megatron's optimizer, or none")
    want = survey.prepare(want)
    if survey.sites[name][0].inferred:
        want = want._replace(expected=_share_shape(survey, value))
    value = _agree_on_value(survey, name, value, want)
    for number, (site, parameter) in enumerate(survey.held(name)):
        first = number == 0 and site.stage == survey.stages(name)[0]
        # Of summands one gets the value and the others zeros, here as in a layout.
        mine = value if first or not want.summands else torch.zeros_like(value)
        _write_shard(survey, site, parameter, mine, want)
    if optimizer is not None:
        optimizer.reload_model_params()


def _gather_full(survey: ParameterIndex, name: str, want: ParameterRequest, note: ParameterReport) -> Tensor | None:
    """Bring one whole where it is wanted; of copies that are summands the sum."""
    mesh = survey.mesh
    like = torch.empty(note.shape, dtype=note.dtype, device="meta")
    total: Tensor | None = None
    for stage in survey.stages(name) if want.summands else survey.stages(name)[:1]:
        full = None
        if stage == mesh["pp"].coord:
            site = survey.own[name][0]
            local = _read_local(survey, name, want, note)
            full = assemble_on_stage(local, survey.layout(site, want), site.owner, like, mesh, want.everywhere)
        full = send_from_stage(full, stage, like, mesh, want.everywhere)
        if full is not None:
            total = full.to("cpu", copy=True) if total is None else total + full.cpu()
    return total


def _read_local(survey: ParameterIndex, name: str, want: ParameterRequest, note: ParameterReport) -> Tensor | None:
    held = [parameter for _, parameter in survey.held(name)]
    if not held or not want.gradient:
        return survey.adapter.value(held[0]) if held else None
    # A rank without a gradient where others have one: nothing came through here.
    shape = survey.own[name][0].local
    nothing = torch.zeros(shape, dtype=note.dtype, device=held[0].device)
    if want.reduced:
        local = survey.adapter.gradient(held[0], True)
        return join_flat_parts(nothing if local.tensor is None else local.tensor.detach(), local.part, local.group)
    found = [survey.adapter.gradient(p, False).tensor for p in held]
    return sum((t.detach() for t in found if t is not None), nothing)


def _share_shape(survey: ParameterIndex, value: Tensor | None) -> tuple[int, ...] | None:
    """The shape of the value, which says how a plain module's parameter is cut. Collective over the mesh."""
    given = None if value is None else tuple(value.shape)
    answers = gather_objects(given, survey.mesh, [a.name for a in survey.mesh])
    return next((shape for shape in answers if shape is not None), None)


def _agree_on_value(survey: ParameterIndex, name: str, value: Tensor | None, want: ParameterRequest) -> Tensor:
    """The value on every rank, after all have found it to be of the right kind."""
    mesh = survey.mesh
    given = None if value is None else (tuple(value.shape), value.dtype, checksum(value))
    answers = gather_objects((survey.note(name, want), given), mesh, [a.name for a in mesh])
    notes = [note for note, _ in answers if note is not None]
    if problem := next((n.problem for n in notes if n.problem), ""):
        raise FlexError(f"{name}: {problem}")
    supplied = [g for _, g in answers if g is not None]
    if answers[0][1] is None:
        raise FlexError(f"no value for {name}; pass the whole tensor on every rank, or on the leader")
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
    device = next(p.device for n in survey.own for _, p in survey.held(n))
    buffer = torch.empty(shape, dtype=dtype, device=device)
    if value is not None:
        buffer.copy_(value)
    return broadcast_from_first(buffer, mesh)


def _write_shard(survey: ParameterIndex, site: ParameterSite, parameter: nn.Parameter, value: Tensor, want: ParameterRequest) -> None:
    mesh, adapter = survey.mesh, survey.adapter
    old = adapter.value(parameter)
    layout = survey.layout(site, want)
    if want.gradient:
        found = adapter.gradient(parameter, not want.summands).tensor
        old = torch.zeros_like(old) if found is None else found
    # A local tensor keeps the padding that the whole comes without.
    shard = extract(layout, value.to(old.device), mesh.coords, mesh.sizes, old)
    if want.gradient:
        adapter.put_gradient(parameter, shard, not want.summands)
    else:
        adapter.put(parameter, shard)
