"""Puts together what hooks would cost: the model's sites, their sizes in this run, and the hooks at them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.dispatch import Rows
from megatron_flex.costs import Cost, Costs, Links, PlannedHook, costs_of, edit_said, read_said
from megatron_flex.costs.standing import dumped, measured
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import Held
from megatron_flex.errors import SiteError
from megatron_flex.launch.planning.arguments import Config, arguments
from megatron_flex.launch.planning.model import Whole, built, quiet
from megatron_flex.launch.planning.planning import Run, changes, chosen_sites, microbatches_of
from megatron_flex.sites import Site, SiteTable
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.measured import Kind
from megatron_flex.statistics.table import Entry, Table

ROWS = "its rows go where the router sends them, which only the data tell"


def costs(
    config: Config,
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
) -> Costs:
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
    hooks = [*_meant(read, read_said), *_meant(edit, edit_said)]
    with cpu.runtime(force=True), quiet():
        args = arguments(config, changes(mesh, world_size, sequence_length, micro_batch_size))
        whole = built(args)
    uncounted: dict[str, str] = {}
    number, links = microbatches_of(args, microbatches), links or Links()
    found = list(_standing(hooks, whole, args, number, uncounted))
    more: list[Cost] = []
    if dump is not None:
        taken = Run(whole, args, number, dump).activations(chosen_sites(whole.sites, dump.sites))
        more += dumped(dump, list(taken), whole.mesh)
    if statistics is not None:
        more.append(_measured(statistics, whole, links))
    return costs_of(whole.mesh, found, links, uncounted, whole.config.num_attention_heads, more)


def _measured(statistics: Statistics, whole: Whole, links: Links) -> Cost:
    """What statistics of sites cost."""
    sites = [s for s in chosen_sites(whole.sites, statistics.sites) if not s.hidden]
    kinds: list[Kind] = ["value", "gradient"] if statistics.gradients else ["value"]
    entries = tuple(Entry(s.name, kind, s.stage) for s in sites for kind in kinds)
    ranks = prod(a.size for a in whole.mesh if a.name != "pp")
    table = Table(entries, ranks, statistics.histogram)
    return measured(f"statistics in {statistics.path}", table.sends, whole.mesh, links)


def _meant(said: Sequence[str | PlannedHook] | str, understood: object) -> list[PlannedHook]:
    assert callable(understood)
    words = [said] if isinstance(said, str) else said
    return [understood(w) if isinstance(w, str) else w for w in words]


def _standing(
    hooks: Iterable[PlannedHook],
    whole: Whole,
    args: argparse.Namespace,
    microbatches: int,
    uncounted: dict[str, str],
) -> Iterator[tuple[PlannedHook, Site, Held]]:
    """Each hook at each tensor that it means and of which the configuration tells the size."""
    table = SiteTable(whole.sites)
    run = Run(whole, args, microbatches, Dump("", "**", gradients=True))
    for hook in hooks:
        sites = table.match(hook.pattern, "output")
        bars = {s.name: ROWS if isinstance(s.tap, Rows) else s.hidden for s in sites}
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
