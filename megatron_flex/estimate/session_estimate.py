"""Estimates of a live session: its active hooks, dumps and statistics, and a dump that a run will write."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from megatron_flex.collectives import gather_distinct, run_or_raise_on_all
from megatron_flex.dump import Dump
from megatron_flex.errors import FlexError
from megatron_flex.estimate.dump_estimate import DumpEstimate, estimate_dump_size
from megatron_flex.estimate.hook_estimate import Links
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.estimate.run_estimate import (
    HookEstimate,
    RunEstimate,
    estimate_dump_rows,
    estimate_run,
    estimate_statistics,
)
from megatron_flex.estimate.tensor_sizes import (
    EstimatedTensor,
    TensorSizes,
    UnknownSizeError,
    count_microbatches,
    megatron_dtype,
    select_estimated_parameters,
    select_estimated_sites,
)
from megatron_flex.layout import PackedSequences
from megatron_flex.layout.packed_sequences import explain_uneven_sequence
from megatron_flex.mesh import Mesh, mesh_of_sizes
from megatron_flex.ranges import check_count
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.dump_sink import DumpSink
from megatron_flex.runtime.local_edits import explain_gather
from megatron_flex.sites import Site

PARAMETERS_LATER = "parameters are written when the step is over: `--flex-estimate` shows how much"
GRADIENTS_ONCE = "gradients of parameters pass once, not as tensors of tokens"


def sizes_of_session(
    session: Session,
    chunks: Iterable[nn.Module],
    lengths: Mapping[str, int],
    microbatches: int = 1,
    pack: PackedSequences | None = None,
) -> TensorSizes:
    """The sizes of the tensors of a live model.

    Args:
        session: of the model.
        chunks: the modules of this rank.
        lengths: of the dims that depend on the data; the framework's arguments give others.
        microbatches: of a step, on each data parallel rank.
        pack: the packed sequences of each microbatch; None without packing.
    """
    modules: list[Any] = [m for chunk in chunks for m in chunk.modules()]
    config = next((m.config for m in modules if hasattr(m, "config")), None)
    dtype = session.hooks.trials.dtype
    is_megatron = hasattr(config, "moe_router_topk")
    fp32_loss = not any(getattr(m, "fp16_lm_cross_entropy", False) for m in modules)
    heads = getattr(config, "linear_num_value_heads", None) or 0
    return TensorSizes(
        session.mesh.sizes,
        {"heads": heads, **session.hooks.trials.lengths, **lengths},
        partial(megatron_dtype, config=config, dtype=dtype, fp32_loss=fp32_loss)
        if is_megatron
        else lambda _: dtype,
        microbatches,
        max((int(getattr(m, "vocab_size", 0) or 0) for m in modules), default=0) if is_megatron else 0,
        config=config if is_megatron else None,
        pack=pack,
    )


def estimate_session(
    session: Session,
    chunks: nn.ModuleList,
    lengths: Mapping[str, int | None],
    microbatches: int,
    links: Links | None,
    sequences: PackedSequences | Iterable[int] | None = None,
) -> RunEstimate:
    """What the active hooks, dumps and statistics of a session cost in a step. Communicates nothing.

    Args:
        session: whose hooks.
        chunks: the modules of this rank.
        lengths: of `s` and `b`; None for what the framework's arguments tell.
        microbatches: of a step, on each data parallel rank.
        links: between ranks; None for usual ones.
        sequences: the packed sequences of each microbatch, or their lengths; None without packing.

    Raises:
        FlexError: nothing is active whose cost can be estimated, or a length is unknown.
    """
    check_count("microbatches", microbatches)
    for name, length in lengths.items():
        if length is not None:
            check_count(name, length)
    links = links or Links()
    if sequences is None or isinstance(sequences, PackedSequences):
        pack = sequences
    else:
        pack = PackedSequences.from_ends(accumulate(sequences, initial=0))
    if pack is not None:
        lengths = _packed_lengths(pack, lengths, session.mesh["cp"].size)
    known = {name: length for name, length in lengths.items() if length is not None}
    sizes = sizes_of_session(session, chunks, known, microbatches, pack)
    dense_sizes, expert_sizes = (
        {a.name: a.size for a in axes} for axes in (session.mesh.axes, session.mesh.experts)
    )
    mesh = mesh_of_sizes(dense_sizes, expert_sizes)  # the estimate is for all ranks
    heads = int(getattr(sizes.config, "num_attention_heads", 0) or 0)
    uncounted: dict[str, str] = {}
    hooks = list(_hooks_at_tensors(session, sizes, mesh, uncounted))
    sinks = [
        *_dump_rows(session, sizes, mesh, uncounted),
        *(
            estimate_statistics(measurer.settings.path, measurer.sends, mesh, links)
            for measurer in session.sinks.statistics
        ),
    ]
    if not hooks and not sinks:
        why = "; ".join(f"{name}: {reason}" for name, reason in uncounted.items())
        raise FlexError(f"nothing to estimate: {why or 'no hook is active; register some first'}")
    return estimate_run(mesh, hooks, links, uncounted, heads, sinks)


def _hooks_at_tensors(
    session: Session, sizes: TensorSizes, mesh: Mesh, uncounted: dict[str, str]
) -> Iterator[tuple[HookSpec, Site, EstimatedTensor]]:
    """Each active hook at each tensor, in model order; adds to `uncounted` why others have no estimate."""
    for site, hooks in _hooked_sites(session, uncounted, of_sinks=False):
        for backward in (False, True):
            same_direction = [h for h in hooks if h.backward is backward]
            tensor = _estimate_tensor(sizes, site, backward, uncounted) if same_direction else None
            if tensor is not None:
                for spec in _list_hook_specs(session, same_direction, site, tensor, mesh):
                    yield spec, site, tensor


def _dump_rows(
    session: Session, sizes: TensorSizes, mesh: Mesh, uncounted: dict[str, str]
) -> Iterator[HookEstimate]:
    """The estimates of the registered dumps; adds to `uncounted` what they leave out, and why."""
    tensors: dict[int, tuple[Dump, list[EstimatedTensor]]] = {}
    for site, hooks in _hooked_sites(session, uncounted, of_sinks=True):
        for hook in hooks:
            if isinstance(hook.tensor_sink, DumpSink):
                dump = hook.tensor_sink.settings
                tensor = _estimate_tensor(sizes, site, hook.backward, uncounted)
                if tensor is not None:
                    tensors.setdefault(id(dump), (dump, []))[1].append(tensor)
    for dump, dumped in tensors.values():
        yield from estimate_dump_rows(dump, dumped, mesh)
        if dump.parameters:
            uncounted[f"the dump in {dump.path}"] = PARAMETERS_LATER


def _hooked_sites(
    session: Session, uncounted: dict[str, str], *, of_sinks: bool
) -> list[tuple[Site, list[HookFunction]]]:
    """The sites that have active hooks, and these, in model order; adds parameters to `uncounted`."""
    hooks_at: dict[str, tuple[Site, list[HookFunction]]] = {}
    for entry in session.registry.selected:
        if (entry.hook.tensor_sink is not None) is of_sinks:
            for site in entry.sites:
                hooks_at.setdefault(site.name, (site, []))[1].append(entry.hook)
            uncounted.update((p.name, GRADIENTS_ONCE) for p in entry.parameters)
    order = {s.name: n for n, s in enumerate(session.sites)}
    return sorted(hooks_at.values(), key=lambda hooked: order.get(hooked[0].place, 0))


def _estimate_tensor(
    sizes: TensorSizes, site: Site, backward: bool, uncounted: dict[str, str]
) -> EstimatedTensor | None:
    """The tensor at the site, or its gradient; None where its size is unknown: adds why to `uncounted`."""
    try:
        return sizes.activation(site, "gradient" if backward else "value")
    except UnknownSizeError as error:
        if error.dims:
            text = f"{site.name}: {error.reason}; give estimate() sequence_length= and micro_batch_size="
            raise FlexError(text) from error
        uncounted[site.name] = error.reason
        return None


def _list_hook_specs(
    session: Session, hooks: Sequence[HookFunction], site: Site, tensor: EstimatedTensor, mesh: Mesh
) -> Iterator[HookSpec]:
    """The effect of these hooks at the site, all on the tensor or all on its gradient."""
    edits = {h: e for h in hooks if (e := h.editing_of(site.name)) is not None}
    trains = bool(session.editing.modules)
    why = explain_gather(edits, tensor.layout, tensor.shape, mesh, trains) if edits else ""
    capture_names, gathered = set(), False
    for hook in hooks:
        spec = HookSpec(site.name, gradient=hook.backward, text=hook.describe())
        if hook.save and hook.keep_as not in capture_names:
            capture_names.add(hook.keep_as)
            part = f"@{hook.selection.describe()}" if hook.selection else ""
            yield replace(spec, selection=hook.selection, gathered=bool(why), asked=part)
        if hook in edits and not why:
            yield replace(spec, edit=edits[hook])
        elif hook in edits:
            yield replace(spec, edit="general", gathered=gathered, once=hook.run == "once")
            gathered = True


def _packed_lengths(
    pack: PackedSequences, given: Mapping[str, int | None], context_parallel: int
) -> dict[str, int]:
    """The lengths of `s` and `b` of a row of packed sequences.

    Raises:
        FlexError: the caller gives others, or context parallel ranks cannot shard each sequence.
    """
    lengths, names = {"s": sum(pack.padded), "b": 1}, {"s": "sequence_length", "b": "micro_batch_size"}
    for name, length in lengths.items():
        if given.get(name) not in (None, length):
            raise FlexError(
                f"{names[name]}={given[name]} with {pack}: a row of packed sequences has "
                f"{names[name]}={length}; leave the argument out"
            )
    if uneven := explain_uneven_sequence(pack, context_parallel):
        raise FlexError(uneven)
    return lengths


def estimate_live_dump(session: Session, chunks: nn.ModuleList, args: Namespace, dump: Dump) -> DumpEstimate:
    """Estimate the size of a dump of a Megatron run. Collective over the mesh; the same on all ranks.

    Args:
        session: of the model.
        chunks: the modules of this rank.
        args: Megatron's validated arguments.
        dump: the settings of the dump; samples that the dump leaves out are counted too.

    Raises:
        FlexError: on all ranks: a pattern matches nothing or only hidden sites, or a size does not follow
            from the configuration.
    """
    mesh, local_sites = session.mesh, session.taps.local_sites
    chosen = select_estimated_sites(session.sites, dump.sites)
    parameters = [*session.parameters.index.all_copies(), *session.parameters.buffers.all_copies()]
    names = {p.name for p in select_estimated_parameters(parameters, dump.parameters)}
    local_parameters = [*session.adapter.parameters(), *session.adapter.buffers()]
    written = sum(dump.wants_microbatch(n) for n in range(count_microbatches(args, None)))
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", False)
    sizes = replace(
        sizes_of_session(session, chunks, {"s": args.seq_length, "b": args.micro_batch_size}, written),
        even_routing=True,
        gradient_dtype=torch.float32 if in_fp32 else None,
    )

    def list_tensors() -> list[EstimatedTensor]:
        # Taps, which say what rows of experts are, stay on the rank that has the module.
        sites = [local_sites[s.name] for s in chosen if s.name in local_sites]
        return list(sizes.of_dump(sites, (p for p in local_parameters if p.name in names), dump.gradients))

    tensors: dict[tuple[str, str], EstimatedTensor] = {}
    for listed in gather_distinct(run_or_raise_on_all(mesh, list_tensors), mesh):
        for tensor in listed:
            tensors.setdefault((tensor.name, tensor.kind), tensor)
    places = {name: n for n, name in enumerate([s.name for s in chosen] + [p.name for p in parameters])}
    return estimate_dump_size(
        mesh,
        sorted(tensors.values(), key=lambda t: places[t.name]),
        dump,
        iterations=sum(dump.wants_iteration(n) for n in range(args.iteration, args.train_iters or 0)),
        hidden={s.name: s.hidden for s in chosen if s.hidden},
    )
