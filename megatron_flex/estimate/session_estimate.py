"""The active content of a session, for estimates: its hooks at their sites, its dumps and its statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from megatron_flex.dump import Dump
from megatron_flex.dump.size_estimate import EstimatedTensor, compute_local_shape, estimate_dump_size
from megatron_flex.errors import FlexError
from megatron_flex.estimate.hook_estimate import (
    RANK_ORDER,
    RING_SHARES,
    AddedCollective,
    Links,
    PassEstimate,
    Placement,
    Traffic,
    traffic_between,
)
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.estimate.run_estimate import HookEstimate, RunEstimate, estimate_run
from megatron_flex.layout import PackedSequences
from megatron_flex.layout.gradient_layout import layout_in_pass
from megatron_flex.layout.packed_sequences import explain_uneven_sequence
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.ranges import check_count
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.dump_sink import DumpSink
from megatron_flex.runtime.local_edits import explain_gather
from megatron_flex.sites import Site

ROUTED_ROWS = "its rows go where the router sends them, which only the data tell"
LAYOUT_UNKNOWN = "its layout is found when a tensor passes"
PARAMETERS_LATER = "parameters are written when the step is over: `--flex-estimate` shows how much"


@dataclass
class SessionEstimate:
    """The hooks of a session, with the lengths of a run.

    Attributes:
        session: the session.
        lengths: of the dims that depend on the data: `s` and `b`, of the full microbatch of a replica.
        padded: the length of the last dim of logits with its padding; 0 if it has none.
        microbatches: the number in a step.
        pack: the packed sequences of each microbatch; None without packing.
        uncounted: what cannot be estimated, and why; filled by the methods.
    """

    session: Session
    lengths: Mapping[str, int]
    padded: int
    microbatches: int
    pack: PackedSequences | None = None
    uncounted: dict[str, str] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The run's mesh, as its first rank has it: the estimate is for all ranks."""
        mesh = self.session.mesh
        return Mesh(_first_rank_axes(mesh.axes), _first_rank_axes(mesh.experts))

    def hooks(self) -> Iterator[tuple[HookSpec, Site, EstimatedTensor]]:
        """Each active hook at each tensor, in model order."""
        for site, hooks in self._hooked_sites(of_sinks=False):
            for backward in (False, True):
                mine = [h for h in hooks if h.backward is backward]
                held = self._held(site, backward) if mine else None
                if held is not None:
                    for spec in self._hook_specs(mine, site, held):
                        yield spec, site, held

    def more(self, links: Links) -> Iterator[HookEstimate]:
        """The estimates of dumps and statistics."""
        dumps: dict[int, tuple[Dump, list[EstimatedTensor]]] = {}
        for site, hooks in self._hooked_sites(of_sinks=True):
            for hook in hooks:
                dump = hook.tensor_sink.settings if isinstance(hook.tensor_sink, DumpSink) else None
                held = None if dump is None else self._held(site, hook.backward)
                if dump is not None and held is not None:
                    dumps.setdefault(id(dump), (dump, []))[1].append(_in_dump_dtype(held, dump))
        for dump, tensors in dumps.values():
            yield from estimate_registered_dump(dump, tensors, self.mesh)
            if dump.parameters:
                self.uncounted[f"the dump in {dump.path}"] = PARAMETERS_LATER
        for measurer in self.session.sinks.statistics:
            words = f"statistics in {measurer.settings.path}"
            yield estimate_statistics(words, measurer.sends, self.mesh, links)

    def _hooked_sites(self, of_sinks: bool) -> Iterator[tuple[Site, list[HookFunction]]]:
        """The sites that have active hooks, and these."""
        at: dict[str, tuple[Site, list[HookFunction]]] = {}
        for entry in self.session.registry.selected:
            if (entry.hook.tensor_sink is not None) is of_sinks:
                for site in entry.sites:
                    at.setdefault(site.name, (site, []))[1].append(entry.hook)
                for parameter in entry.parameters:
                    self.uncounted[parameter.name] = (
                        "gradients of parameters pass once, not as tensors of tokens"
                    )
        order = {s.name: n for n, s in enumerate(self.session.sites)}
        yield from sorted(at.values(), key=lambda found: order.get(found[0].place, 0))

    def _held(self, site: Site, backward: bool) -> EstimatedTensor | None:
        """The tensor at the site, or its gradient; None where its size is unknown."""
        why = ROUTED_ROWS if "experts" in site.module.split(".") else ""
        if not why and (site.inferred or len(site.shape) != len(site.dims)):
            why = LAYOUT_UNKNOWN
        if why:
            self.uncounted[site.name] = why
            return None
        shape = tuple(self._length(site, n) for n in site.shape)
        logits = self.padded and site.module == "output_layer"
        full = tuple(self.padded if logits and d == "v" else n for d, n in zip(site.dims, shape, strict=True))
        here = site.layout if self.pack is None else self.pack.layout_of(site.layout)
        layout = layout_in_pass(here, backward)
        width = self.session.hooks.trials.itemsize
        local = compute_local_shape(here, full, self.mesh.sizes)
        kind = "gradient" if backward else "value"
        return EstimatedTensor(
            site.name, kind, layout, shape, local, width, width, site.stage, site.chunk, self.microbatches
        )

    def _length(self, site: Site, length: int | str) -> int:
        if isinstance(length, int):
            return length
        found = re.fullmatch(r"(\d*)([a-z]+)", length)
        if found and found[2] in self.lengths:
            return int(found[1] or 1) * self.lengths[found[2]]
        raise FlexError(
            f"{site.name}: nothing gives the length of its dim {length!r} is; give estimate() "
            "sequence_length= and micro_batch_size="
        )

    def _hook_specs(
        self, hooks: Sequence[HookFunction], site: Site, held: EstimatedTensor
    ) -> Iterator[HookSpec]:
        """The effect of these hooks at the site, all on the tensor or all on its gradient."""
        session = self.session
        edits = {h: e for h in hooks if (e := h.editing_of(site.name)) is not None}
        trains = bool(session.editing.modules)
        why = explain_gather(edits, held.layout, held.shape, self.mesh, trains) if edits else ""
        kept, gathered = set(), False
        for hook in hooks:
            spec = HookSpec(site.name, gradient=hook.backward, text=hook.describe())
            if hook.save and hook.keep_as not in kept:
                kept.add(hook.keep_as)
                part = f"@{hook.wanted.describe()}" if hook.wanted else ""
                yield replace(spec, wanted=hook.wanted, gathered=bool(why), asked=part)
            if hook in edits and not why:
                yield replace(spec, edit=edits[hook])
            elif hook in edits:
                yield replace(spec, edit="general", gathered=gathered, once=hook.run == "once")
                gathered = True


def estimate_session(
    session: Session,
    chunks: nn.ModuleList,
    given: Mapping[str, int | None],
    microbatches: int,
    links: Links | None,
    sequences: PackedSequences | Iterable[int] | None = None,
) -> RunEstimate:
    """What the active hooks, dumps and statistics of a session cost in a step. Communicates nothing.

    Args:
        session: whose hooks.
        chunks: the modules of this rank.
        given: lengths of `s` and `b`; None for what the framework's arguments tell.
        microbatches: of a step, on each data parallel rank.
        links: between ranks; None for usual ones.
        sequences: the packed sequences of each microbatch, or their lengths; None without packing.

    Raises:
        FlexError: nothing is active whose cost can be estimated, or a length is unknown.
    """
    check_count("microbatches", microbatches)
    for name, length in given.items():
        if length is not None:
            check_count(name, length)
    links = links or Links()
    if sequences is None or isinstance(sequences, PackedSequences):
        pack = sequences
    else:
        pack = PackedSequences.of(accumulate(sequences, initial=0))
    if pack is not None:
        given = _packed_lengths(pack, given, session.mesh["cp"].size)
    lengths = {**session.hooks.trials.lengths, **{n: k for n, k in given.items() if k is not None}}
    modules: list[Any] = [m for chunk in chunks for m in chunk.modules()]
    padded = max((int(getattr(m, "vocab_size", 0) or 0) for m in modules), default=0)
    config = next((m.config for m in modules if hasattr(m, "config")), None)
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    standing = SessionEstimate(session, lengths, padded, microbatches, pack)
    found, more = list(standing.hooks()), list(standing.more(links))
    if not found and not more:
        why = "; ".join(f"{n}: {w}" for n, w in standing.uncounted.items())
        raise FlexError(f"costs of nothing: {why or 'no hook is active; register some first'}")
    return estimate_run(standing.mesh, found, links, standing.uncounted, heads, more)


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


def _first_rank_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(Axis(a.name, a.size, 0, None, tuple(range(a.size))) for a in axes)


def _in_dump_dtype(held: EstimatedTensor, dump: Dump) -> EstimatedTensor:
    cast = dump.dtype if isinstance(dump.dtype, torch.dtype) else None
    return held if cast is None else replace(held, itemsize=cast.itemsize)


def estimate_registered_dump(
    dump: Dump, tensors: Sequence[EstimatedTensor], mesh: Mesh
) -> Iterator[HookEstimate]:
    """The estimate of a dump: nothing is sent; each rank of a stage writes its part of the stage's tensors.

    Args:
        dump: its settings; samples that it omits are counted, too.
        tensors: the tensors of each microbatch.
        mesh: the run's mesh.
    """
    estimate = estimate_dump_size(mesh, tensors, dump)
    ranks = estimate.ranks // mesh["pp"].size
    for site, held in zip(estimate.sites, tensors, strict=True):
        share = round(site.bytes / (ranks * held.times))
        moved = Traffic(pcie=share, disk=share)
        full = prod(n for n in held.shape if isinstance(n, int)) * held.weight
        part = round(prod(held.local) * held.weight)
        each = PassEstimate("dump", (), full, part, moved, moved, device=part, host=share, leader_host=share)
        words = f"dump to {dump.path}"
        yield HookEstimate(words, held.name, held.kind, site.layout, held.shape, held.stage, held.times, each)


def estimate_statistics(words: str, nbytes: Sequence[int], mesh: Mesh, links: Links) -> HookEstimate:
    """The estimate of statistics: one all-reduce over all ranks in a step that is measured.

    Args:
        words: their description.
        nbytes: of each all-reduce.
        mesh: the run's mesh.
        links: between ranks.
    """
    ranks = prod(a.size for a in mesh)
    sent = tuple(AddedCollective("all_reduce", "all", ranks, n) for n in nbytes if ranks > 1)
    near = Placement(mesh.sizes, links.gpus_per_node).within(RANK_ORDER)
    moved = traffic_between(sum(RING_SHARES[s.op](s.ranks) * s.nbytes for s in sent), near)
    each = PassEstimate("statistics", sent, sum(nbytes), sum(nbytes), moved, moved, host=sum(nbytes))
    return HookEstimate(words, "all that is measured", "value", "", (), -1, 1, each)
