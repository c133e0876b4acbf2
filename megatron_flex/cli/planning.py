"""`megatron-flex plan`: what a dump would write and hooks would cost, before there is a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from megatron_flex.cli.options import Json
from megatron_flex.cli.terminal import console, in_bytes, print_filled, say_json, table
from megatron_flex.dump import Dump
from megatron_flex.dump.said import tokens_said
from megatron_flex.dump.words import unnumbered
from megatron_flex.errors import FlexError
from megatron_flex.launch.planning import Costs, Links, Plan
from megatron_flex.launch.planning import costs as price
from megatron_flex.launch.planning import plan as make

STAGES = 8  # of more stages only the lightest and the heaviest are told


def _option(words: str, *, metavar: str, flags: tuple[str, ...] = ()) -> Any:
    """An option that is left out as a rule."""
    return typer.Option(*flags, metavar=metavar, help=words, show_default=False)


Flags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- MEGATRON FLAGS]", help="The run's own flags.", show_default=False),
]
Config = Annotated[
    Path | None,
    _option("YAML or JSON of Megatron's arguments.", metavar="FILE", flags=("--config", "-c")),
]
Sites = Annotated[
    list[str] | None,
    _option("Sites to dump; may be repeated.", metavar="PATTERN", flags=("--sites", "-s")),
]
Parameters = Annotated[list[str] | None, _option("Parameters to dump; may be repeated.", metavar="PATTERN")]
Gradients = Annotated[bool, typer.Option("--gradients", "-g", help="Gradients, too.")]
Tokens = Annotated[
    str | None,
    _option("Positions: 0,5 or a slice ::8, or random:64, or a fraction 0.1.", metavar="WHICH"),
]
Mean = Annotated[bool, typer.Option("--mean", help="The mean over the positions only.")]
Dtype = Annotated[str | None, _option("To cast to.", metavar="bf16|fp16|fp32")]
World = Annotated[int | None, _option("Ranks.", metavar="N")]
Mesh = Annotated[
    list[str] | None, _option("Instead of the config's: tp, pp, cp, ep, etp, dp.", metavar="AXIS=N")
]
Microbatches = Annotated[int | None, _option("That each data parallel rank dumps.", metavar="N")]
Every = Annotated[int, typer.Option(metavar="N", help="Dump every n-th iteration.")]
Iterations = Annotated[int | None, _option("Iterations of the run.", metavar="N")]
Disk = Annotated[float | None, _option("What the disks take together, in 10^9 bytes/s.", metavar="GB/S")]
Read = Annotated[
    list[str] | None,
    _option(
        "What hooks read: PATTERN@gradient, PATTERN@positions=-1, PATTERN@mean=s; may be repeated.",
        metavar="PATTERN[@...]",
    ),
]
Edit = Annotated[
    list[str] | None,
    _option(
        "What hooks edit: PATTERN=general, =local, =linear:4, or a preset, =scale=1.01; may be repeated.",
        metavar="PATTERN=HOW",
    ),
]
Node = Annotated[int, typer.Option("--gpus-per-node", metavar="N", help="Ranks fill nodes of so many.")]
Nvlink = Annotated[float, typer.Option(metavar="GB/S", help="Of one GPU to the others of its node, one way.")]
Network = Annotated[float, typer.Option(metavar="GB/S", help="Of one GPU to other nodes, one way.")]
Pcie = Annotated[float, typer.Option(metavar="GB/S", help="Of one GPU to its host, one way.")]


def plan(
    flags: Flags = None,
    config: Config = None,
    sites: Sites = None,
    parameters: Parameters = None,
    gradients: Gradients = False,
    tokens: Tokens = None,
    mean: Mean = False,
    dtype: Dtype = None,
    world_size: World = None,
    mesh: Mesh = None,
    microbatches: Microbatches = None,
    every: Every = 1,
    iterations: Iterations = None,
    disk: Disk = None,
    read: Read = None,
    edit: Edit = None,
    gpus_per_node: Node = 8,
    nvlink: Nvlink = 450.0,
    network: Network = 50.0,
    pcie: Pcie = 55.0,
    as_json: Json = False,
) -> None:
    """Say what a dump would write and what hooks would cost, before there is a run.

    By site, pipeline stage and rank, from the configuration of a Megatron run alone.

    For example: megatron-flex plan -s 'decoder.layers.*' --world-size 64 -- --num-layers 32 ...
    """
    if (config is None) == (not flags):
        raise FlexError("say the run's configuration once: --config FILE, or its flags behind --")
    run = str(config) if config is not None else cast(list[str], flags)
    how: dict[str, Any] = {"mesh": mesh_said(mesh), "world_size": world_size, "microbatches": microbatches}
    priced: Costs | None = None
    if read or edit:
        links = Links(gpus_per_node, nvlink * 1e9, network * 1e9, pcie * 1e9)
        kept: dict[str, Any] = {"tokens": tokens_said(tokens), "reduce": "mean" if mean else None}
        if isinstance(kept["tokens"], float):  # spread evenly, as the plan of the dump has them
            kept["tokens"] = slice(None, None, max(1, round(1 / kept["tokens"])))
        dump = Dump("the folder", sites, dtype=dtype, gradients=gradients, **kept) if sites else None
        priced = price(run, read=read or (), edit=edit or (), links=links, dump=dump, **how)
        if not (sites or parameters):
            _say(None, priced, as_json)
            return
    found = make(
        run,
        sites or (),
        dtype=dtype,
        gradients=gradients,
        parameters=parameters or (),
        tokens=tokens_said(tokens),
        reduce="mean" if mean else None,
        every=every,
        iterations=iterations,
        disk_bytes_per_second=None if disk is None else disk * 1e9,
        **how,
    )
    _say(found, priced, as_json)


def _say(found: Plan | None, priced: Costs | None, as_json: bool) -> None:
    """What was asked for: a dump, hooks, or both."""
    if as_json:
        say_json({**(found.to_json() if found else {}), **({"costs": priced.to_json()} if priced else {})})
        return
    if priced is not None:
        tell_costs(console(), priced)
    if found is not None:
        tell_plan(console(), found)


def mesh_said(said: list[str] | None) -> dict[str, int] | None:
    """What is said of sizes of axes.

    Raises:
        FlexError: it is no AXIS=N.
    """
    out = {}
    for word in (w for words in said or () for w in words.split(",")):
        axis, _, size = word.partition("=")
        if not size.isdigit():
            raise FlexError(f"--mesh {word}: say AXIS=N, such as tp=8")
        out[axis] = int(size)
    return out or None


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


LINKS = (">NVLink", ">network", ">PCIe")
TENSOR = ("tensor", "hook", "layout", ">whole", ">part", "collectives", *LINKS, ">disk", ">device")
RANK = ("rank", ">collectives", *LINKS, ">shared", ">disk", ">of links", ">device", ">host")


def tell_costs(out: Console, found: Costs) -> None:
    """Hooks, and what ranks pay for all of them in a step."""
    out.print("each time that a tensor passes:")
    print_filled(out, TENSOR, found.rows())
    out.print("\nof a rank in a step:")
    print_filled(out, RANK, found.summary())
    if found.flags:
        out.print(f"and {found.flags} collectives of a few bytes, by which ranks compare flags after an edit")
    slowest = found.slowest
    out.print(f"slowest: {slowest.role}, {slowest.seconds * 1e3:.3f} ms")
    for name, why in {unnumbered(n): w for n, w in found.uncounted.items()}.items():
        out.print(f"not counted: {name}: {why}")
    out.print()
