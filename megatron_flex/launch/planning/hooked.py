"""Puts together what hooks would cost: the model's sites, their sizes in this run, and the hooks at them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.dispatch import ExpertRows
from megatron_flex.costs import HookEstimate, RunEstimate, Links, PlannedHook, estimate_run, parse_edit_hook, parse_read_hook
from megatron_flex.costs.session_estimate import estimate_registered_dump, estimate_statistics
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import EstimatedTensor
from megatron_flex.errors import SiteError
from megatron_flex.launch.planning.megatron_arguments import RunConfig, parse_arguments
from megatron_flex.launch.planning.meta_model import ModelDescription, describe_model, silence_megatron
from megatron_flex.launch.planning.planning import TensorSizes, collect_overrides, select_planned_sites, count_microbatches
from megatron_flex.sites import Site, SiteTable
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.measured import StatisticsKind
from megatron_flex.statistics.table import MomentEntry, MomentTable

ROUTED_ROWS_REASON = "its rows go where the router sends them, which only the data tell"


def costs(
    config: RunConfig,
    *,
    read: Sequence[str | PlannedHook] | str = (),
    edit: Sequence[str | PlannedHook] | str = (),
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    microbatches: int | None = None,
    links: Links | None = None,
    dump: Dump | None = None,
    statistics: Statistics | None = None,
) -> RunEstimate:
    """Say what hooks would cost in a Megatron run: bytes by link, collectives, memory, seconds.

    The model is built by Megatron on meta tensors, in a process that has no process groups yet and keeps
    none; `docs/costs.md` has the formulae.

    Args, beside those that are as for `plan`:
        read: what is read, in words: `PATTERN`, `PATTERN@gradient`, `PATTERN@positions=-1`, `PATTERN@mean=s`.
        edit: what is edited, and how: `PATTERN=general`, `PATTERN=local`, `PATTERN=linear:4`, or a preset as
            in `PATTERN=scale=1.01`, which itself says what it needs.
        microbatches: of a step; else all of `global_batch_size`.
        links: how fast they are, and how many ranks share a node.
        dump: what is written in a step that is dumped; of activations, parameters apart.
        statistics: what is measured in a step that is measured; parameters apart.

    Raises:
        FlexError: the configuration cannot be; a pattern matches nothing, or only what cannot be had; a hook
            is not well said or cannot stand there; the process has groups already.
    """
    hooks = [*_parse_planned_hooks(read, parse_read_hook), *_parse_planned_hooks(edit, parse_edit_hook)]
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, sequence_length, micro_batch_size))
        description = describe_model(args)
    uncounted: dict[str, str] = {}
    number, links = count_microbatches(args, microbatches), links or Links()
    found = list(_match_hooks_to_tensors(hooks, description, args, number, uncounted))
    more: list[HookEstimate] = []
    if dump is not None:
        tensors = TensorSizes(description, args, number, dump).activations(select_planned_sites(description.sites, dump.sites))
        more += estimate_registered_dump(dump, list(tensors), description.mesh)
    if statistics is not None:
        more.append(_cost_of_statistics(statistics, description, links))
    return estimate_run(description.mesh, found, links, uncounted, description.config.num_attention_heads, more)


def _cost_of_statistics(statistics: Statistics, description: ModelDescription, links: Links) -> HookEstimate:
    """What statistics of sites cost."""
    sites = [s for s in select_planned_sites(description.sites, statistics.sites) if not s.hidden]
    kinds: list[StatisticsKind] = ["value", "gradient"] if statistics.gradients else ["value"]
    entries = tuple(MomentEntry(s.name, kind, s.stage) for s in sites for kind in kinds)
    ranks = prod(a.size for a in description.mesh if a.name != "pp")
    table = MomentTable(entries, ranks, statistics.histogram)
    return estimate_statistics(f"statistics in {statistics.path}", table.sends, description.mesh, links)


def _parse_planned_hooks(said: Sequence[str | PlannedHook] | str, understood: object) -> list[PlannedHook]:
    assert callable(understood)
    words = [said] if isinstance(said, str) else said
    return [understood(w) if isinstance(w, str) else w for w in words]


def _match_hooks_to_tensors(
    hooks: Iterable[PlannedHook],
    description: ModelDescription,
    args: argparse.Namespace,
    microbatches: int,
    uncounted: dict[str, str],
) -> Iterator[tuple[PlannedHook, Site, EstimatedTensor]]:
    """Each hook at each tensor that it means and of which the configuration tells the size."""
    table = SiteTable(description.sites)
    run = TensorSizes(description, args, microbatches, Dump("", "**", gradients=True))
    for hook in hooks:
        sites = table.match(hook.pattern, "output")
        bars = {s.name: ROUTED_ROWS_REASON if isinstance(s.tap, ExpertRows) else s.hidden for s in sites}
        there = [s for s in sites if not bars[s.name]]
        if not there:
            raise SiteError(f"{sites[0].name}: no cost can be told of it: {bars[sites[0].name]}")
        uncounted.update({name: why for name, why in bars.items() if why})
        kind = "gradient" if hook.gradient else "value"
        by_name = {s.name: s for s in there}
        held = [h for h in run.activations(there) if h.kind == kind]
        if not held:
            raise SiteError(f"{there[0].name} has no gradient: its entries are whole numbers")
        for tensor in held:
            yield hook, by_name[tensor.name], tensor
