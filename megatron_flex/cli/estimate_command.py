"""`megatron-flex estimate`: what a dump would write and hooks would cost, before there is a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from megatron_flex.cli.command_options import JsonOption
from megatron_flex.cli.json_output import print_json
from megatron_flex.cli.spinner import spinner
from megatron_flex.document import make_console
from megatron_flex.dump import Dump
from megatron_flex.dump.dump_settings import parse_token_setting
from megatron_flex.errors import FlexError
from megatron_flex.estimate import ConfiguredRun, DumpEstimate, Links, RunEstimate
from megatron_flex.ranges import check_positive, parse_count
from megatron_flex.settings import Setting, list_settings


def _option(words: str, *, metavar: str, flags: tuple[str, ...] = ()) -> Any:
    """An option that is left out as a rule."""
    return typer.Option(*flags, metavar=metavar, help=words, show_default=False)


FlagsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- MEGATRON FLAGS]", help="The flags of the run.", show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    _option("Megatron's arguments as YAML or JSON.", metavar="FILE", flags=("--config", "-c")),
]
SitesOption = Annotated[
    list[str] | None,
    _option(
        "Hook points to dump, by name or pattern; may be repeated.",
        metavar="PATTERN",
        flags=("--sites", "-s"),
    ),
]
GradientsOption = Annotated[bool, typer.Option("--gradients", "-g", help="Also dump gradients.")]
TokensOption = Annotated[
    str | None,
    _option("Positions to dump: 0,5, a slice ::8, random:64, or a fraction 0.1.", metavar="WHICH"),
]
WorldSizeOption = Annotated[int | None, _option("The number of ranks.", metavar="N")]
MeshOption = Annotated[
    list[str] | None,
    _option("Sizes that replace those of the configuration: tp, pp, cp, ep, etp, dp.", metavar="AXIS=N"),
]
MicrobatchesOption = Annotated[
    int | None, _option("Microbatches that each data parallel rank dumps.", metavar="N")
]
EveryOption = Annotated[int, typer.Option(metavar="N", help="Dump every N-th iteration.")]
RunIterationsOption = Annotated[int | None, _option("The number of iterations of the run.", metavar="N")]
DiskOption = Annotated[
    float | None, _option("The write rate of all disks together, in 10^9 bytes/s.", metavar="GB/S")
]
ReadOption = Annotated[
    list[str] | None,
    _option(
        "A hook that reads: PATTERN, PATTERN@gradient, "
        "PATTERN@positions=-1, PATTERN@mean=s. May be repeated.",
        metavar="PATTERN[@...]",
    ),
]
EditOption = Annotated[
    list[str] | None,
    _option(
        "A hook that edits: PATTERN=general, =local, =linear:4, or a preset, =scale=1.01; may be repeated.",
        metavar="PATTERN=HOW",
    ),
]
GpusPerNodeOption = Annotated[
    int, typer.Option("--gpus-per-node", metavar="N", help="The number of GPUs of a node.")
]
NvlinkOption = Annotated[
    float, typer.Option(metavar="GB/S", help="The bandwidth from one GPU to the others of its node, one way.")
]
NetworkOption = Annotated[
    float, typer.Option(metavar="GB/S", help="The bandwidth from one GPU to other nodes, one way.")
]
PcieOption = Annotated[
    float, typer.Option(metavar="GB/S", help="The bandwidth from one GPU to its host, one way.")
]


def _with_dump_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each setting of a dump that an estimate takes.

    The option has the name of the flag without `dump-`; the command receives these settings as keywords.
    """
    settings = {s.flag.removeprefix("dump-").replace("-", "_"): s for s in list_settings(Dump) if s.estimated}
    signature = inspect.signature(command, eval_str=True)
    given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
        for name, (annotation, default) in ((n, _setting_option(s)) for n, s in settings.items())
    ]
    place = [p.name for p in given].index("tokens") + 1
    shown = [*given[:place], *options, *given[place:]]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in settings}
        command(**values, **{s.name: _setting_value(s, chosen[name]) for name, s in settings.items()})

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


def _setting_option(setting: Setting[Any, Any]) -> tuple[Any, Any]:
    """The annotation and the default of an option."""
    if setting.kind.plain is bool or len(setting.kind.words) == 1:
        return Annotated[bool, typer.Option(help=setting.help)], False
    several = setting.kind.plain is tuple
    metavar = setting.metavar or "|".join(setting.kind.words)
    option = _option(setting.help + " May be repeated." * several, metavar=metavar)
    kind: Any = list[str] if several else int if setting.kind.plain is int else str
    return Annotated[kind | None, option], None


def _setting_value(setting: Setting[Any, Any], value: Any) -> Any:
    """The argument of `Dump` for the value of an option."""
    if len(setting.kind.words) == 1:
        return setting.kind.words[0] if value else setting.default
    return setting.default if value is None else setting.read(value)


@_with_dump_settings
def estimate(
    flags: FlagsArgument = None,
    config: ConfigOption = None,
    sites: SitesOption = None,
    gradients: GradientsOption = False,
    tokens: TokensOption = None,
    world_size: WorldSizeOption = None,
    mesh: MeshOption = None,
    microbatches: MicrobatchesOption = None,
    every: EveryOption = 1,
    iterations: RunIterationsOption = None,
    disk: DiskOption = None,
    read: ReadOption = None,
    edit: EditOption = None,
    gpus_per_node: GpusPerNodeOption = 8,
    nvlink: NvlinkOption = 450.0,
    network: NetworkOption = 50.0,
    pcie: PcieOption = 55.0,
    as_json: JsonOption = False,
    **settings: Any,
) -> None:
    """Estimate the cost of hooks and the size of dumps.

    The estimate needs only the configuration of a Megatron run. It has rows for hook points, pipeline stages
    and ranks.

    For example: megatron-flex estimate -s 'decoder.layers.*' --world-size 64 -- --num-layers 32 ...
    """
    if (config is None) == (not flags):
        raise FlexError("give the configuration of the run once: --config FILE, or its flags after --")
    links = Links(gpus_per_node, nvlink * 1e9, network * 1e9, pcie * 1e9)
    rate = None if disk is None else check_positive("--disk", disk) * 1e9
    token_setting = parse_token_setting(tokens)
    share = token_setting if isinstance(token_setting, float) else None
    how: dict[str, Any] = {"gradients": gradients, "every": every, **settings}
    how["tokens"] = token_setting if share is None else None
    hooks = bool(read or edit)
    dump = Dump("the folder", sites or (), **how) if sites or settings["parameters"] or not hooks else None
    with spinner("building the model's shapes"):
        run = ConfiguredRun(
            str(config) if config is not None else cast(list[str], flags),
            mesh=parse_mesh_sizes(mesh),
            world_size=world_size,
            microbatches=microbatches,
        )
    estimated: RunEstimate | None = None
    if hooks:
        beside = dump if sites else None
        if beside is not None and share is not None:  # spread evenly, as the estimate of the dump has them
            spread = slice(None, None, max(1, round(1 / share)))
            beside = Dump("the folder", sites or (), **{**how, "tokens": spread})
        estimated = run.estimate_hooks(read or (), edit or (), links=links, dump=beside)
    dump_estimate = None
    if dump is not None:
        dump_estimate = run.estimate_dump(
            dump, share=share, iterations=iterations, disk_bytes_per_second=rate
        )
    _print_estimates(dump_estimate, estimated, as_json)


def _print_estimates(
    dump_estimate: DumpEstimate | None, estimated: RunEstimate | None, as_json: bool
) -> None:
    """The estimate that was requested: of a dump, of hooks, or of both."""
    if as_json:
        hooks = {"hook_estimate": estimated.to_json()} if estimated else {}
        print_json({**(dump_estimate.to_json() if dump_estimate else {}), **hooks})
        return
    if estimated is not None:
        estimated.to_document().print()
        if dump_estimate is not None:
            make_console().print()
    if dump_estimate is not None:
        dump_estimate.to_document().print()


def parse_mesh_sizes(assignments: list[str] | None) -> dict[str, int] | None:
    """The sizes of the mesh axes that the options give.

    Raises:
        FlexError: it is not AXIS=N.
    """
    out = {}
    for word in (w for words in assignments or () for w in words.split(",")):
        axis, given, size = word.partition("=")
        if not given:
            raise FlexError(f"--mesh {word}: give AXIS=N, such as tp=8")
        out[axis] = parse_count(size, f"--mesh {axis}=")
    return out or None
