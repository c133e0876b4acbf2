"""What a dump of a run that stands would write: its own model and arguments, asked on every rank."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_flex.collectives import gather_objects
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import EstimatedTensor, DumpEstimate, estimate_dump
from megatron_flex.launch.agreeing import run_or_raise_on_all
from megatron_flex.launch.planning.meta_model import ModelDescription
from megatron_flex.launch.planning.planning import TensorSizes, select_planned_parameters, select_planned_sites, count_microbatches
from megatron_flex.model import FlexModel


def plan_live_run(flex: FlexModel, args: Namespace, dump: Dump) -> DumpEstimate:
    """Say what a dump would write. Collective over the mesh; the same on all ranks.

    Args:
        flex: the model.
        args: Megatron's, validated.
        dump: its settings; samples that it leaves out are counted, too.

    Raises:
        FlexError: on all ranks: a pattern matches nothing or only what cannot be had, or no configuration
            tells a size.
    """
    session = flex.session
    mesh, own = session.mesh, session.standing.own
    chosen = select_planned_sites(list(session.sites), dump.sites)
    here = session.adapter.parameters()
    all_parameters = [p for held in session.survey.sites.values() for p in held]
    wanted = {p.name for p in select_planned_parameters(all_parameters, dump.parameters)}
    numbers = range(args.iteration, args.train_iters or 0)
    run = TensorSizes(
        _describe_live_model(flex), args, sum(dump.wants_microbatch(n) for n in range(count_microbatches(args, None))), dump
    )

    def ask() -> list[EstimatedTensor]:
        mine = [own[s.name] for s in chosen if s.name in own]
        return [*run.activations(mine), *run.parameters(p for p in here if p.name in wanted)]

    tensors_of_ranks = gather_objects(run_or_raise_on_all(mesh, ask), mesh, [a.name for a in mesh])
    held: dict[tuple[str, str], EstimatedTensor] = {}
    for tensor in (t for tensors in tensors_of_ranks for t in tensors):
        held.setdefault((tensor.name, tensor.kind), tensor)
    places = {name: n for n, name in enumerate([s.name for s in chosen] + [p.name for p in all_parameters])}
    return estimate_dump(
        mesh,
        sorted(held.values(), key=lambda t: places[t.name]),
        tokens=dump.tokens,
        reduce=dump.reduce,
        every=dump.every,
        iterations=sum(dump.wants_iteration(n) for n in numbers),
        part_bytes=dump.part_bytes,
        hidden={s.name: s.hidden for s in chosen if s.hidden},
    )


def _describe_live_model(flex: FlexModel) -> ModelDescription:
    """The model as plans know it."""
    chunks: Any = [m for chunk in flex.chunks for m in chunk.modules() if hasattr(m, "config")]
    padded = max((int(getattr(m, "vocab_size", 0)) for m in chunks), default=0)
    return ModelDescription(flex.session.mesh, chunks[0].config, padded)
