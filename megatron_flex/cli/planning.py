"""`megatron-flex plan`: what a dump would write, before there is a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from megatron_flex.cli.options import Json
from megatron_flex.cli.terminal import console, in_bytes, say_json, table
from megatron_flex.dump.selection import Sampled
from megatron_flex.errors import FlexError
from megatron_flex.launch.planning import Plan
from megatron_flex.launch.planning import plan as make

STAGES = 8  # of more stages only the lightest and the heaviest are told


def plan(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- MEGATRON FLAGS]", help="The run's own flags.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="YAML or JSON of Megatron's arguments.", show_default=False
        ),
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites", "-s", metavar="PATTERN", help="Sites to dump; may be repeated.", show_default=False
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Parameters to dump; may be repeated.", show_default=False),
    ] = None,
    gradients: Annotated[bool, typer.Option("--gradients", "-g", help="Gradients, too.")] = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Positions: 0,5 or a slice ::8, or random:64, or a fraction 0.1.",
            show_default=False,
        ),
    ] = None,
    mean: Annotated[bool, typer.Option("--mean", help="The mean over the positions only.")] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16|fp32", help="To cast to.", show_default=False)
    ] = None,
    world_size: Annotated[int | None, typer.Option(metavar="N", help="Ranks.", show_default=False)] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS=N", help="Instead of the config's: tp, pp, cp, ep, etp, dp.", show_default=False
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="N", help="That each data parallel rank dumps.", show_default=False)
    ] = None,
    every: Annotated[int, typer.Option(metavar="N", help="Dump every n-th iteration.")] = 1,
    iterations: Annotated[
        int | None, typer.Option(metavar="N", help="Iterations of the run.", show_default=False)
    ] = None,
    disk: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", help="What the disks take together, in 10^9 bytes/s.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a dump would write, before there is a run.

    By site, pipeline stage and rank, from the configuration of a Megatron run alone.

    For example: megatron-flex plan -s 'decoder.layers.*' --world-size 64 -- --num-layers 32 ...
    """
    if (config is None) == (not flags):
        raise FlexError("say the run's configuration once: --config FILE, or its flags behind --")
    found = make(
        str(config) if config is not None else cast(list[str], flags),
        sites or (),
        mesh=_mesh(mesh),
        world_size=world_size,
        microbatches=microbatches,
        dtype=dtype,
        gradients=gradients,
        parameters=parameters or (),
        tokens=tokens_said(tokens),
        reduce="mean" if mean else None,
        every=every,
        iterations=iterations,
        disk_bytes_per_second=None if disk is None else disk * 1e9,
    )
    if as_json:
        say_json(found.to_json())
    else:
        tell_plan(console(), found)


def _mesh(said: list[str] | None) -> dict[str, int] | None:
    out = {}
    for word in (w for words in said or () for w in words.split(",")):
        axis, _, size = word.partition("=")
        if not size.isdigit():
            raise FlexError(f"--mesh {word}: say AXIS=N, such as tp=8")
        out[axis] = int(size)
    return out or None


def tokens_said(said: str | None) -> Any:
    """Positions as they are written on the command line.

    Raises:
        FlexError: it is none of what can be said.
    """
    if said is None:
        return None
    try:
        if said.startswith("random:"):
            return Sampled(int(said.removeprefix("random:")))
        if ":" in said:
            return slice(*(int(n) if n else None for n in said.split(":")))
        if "." in said:
            return float(said)
        return [int(n) for n in said.split(",")]
    except (ValueError, TypeError):
        raise FlexError(f"--tokens {said}: say 0,5 or a slice ::8, or random:64, or a fraction 0.1") from None


def tell_plan(out: Console, found: Plan) -> None:
    """Sites, stages, totals."""
    rows = table("tensor", "stage", "shape", "layout", ">of a rank", ">in all")
    for row in found.rows():
        rows.add_row(*row)
    out.print(rows)
    if len(found.stages) > 1:
        out.print()
        stages = table(">stage", ">bytes in an iteration")
        shown = list(enumerate(found.stages))
        if len(shown) > STAGES:
            ends = {min(shown, key=lambda s: s[1])[0], max(shown, key=lambda s: s[1])[0]}
            shown = [s for s in shown if s[0] in ends]
        for stage, nbytes in shown:
            stages.add_row(str(stage), in_bytes(nbytes))
        out.print(stages)
        if len(shown) < len(found.stages):
            out.print(f"the lightest and the heaviest of {len(found.stages)} stages")
    out.print()
    totals = table("", "")
    totals.show_header = False
    for name, value in found.summary():
        totals.add_row(name, value)
    out.print(totals)
