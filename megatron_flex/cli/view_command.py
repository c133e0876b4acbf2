"""`megatron-flex view`: one HTML page of a model, a dump, two dumps, statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.cli.estimate_command import MeshOption, WorldSizeOption, parse_mesh_sizes
from megatron_flex.cli.spinner import spinner
from megatron_flex.compare import compare
from megatron_flex.document import make_console
from megatron_flex.dump.run_folders import has_runs, list_runs
from megatron_flex.errors import FlexError
from megatron_flex.page import Page, write
from megatron_flex.page.page_builder import fill_page, make_configuration_page
from megatron_flex.ranges import check_positive
from megatron_flex.statistics.statistics_files import has_statistics
from megatron_flex.statistics.statistics_reader import OpenStatistics, open_statistics

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL_OR_DUMP [OTHER_DUMP]",
        help="A configuration (YAML or JSON), a dump, or a folder of statistics. Two dumps are compared. "
        "The flags of a run may follow after --.",
        show_default=False,
    ),
]
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")]
PageMatchOption = Annotated[
    str,
    typer.Option(
        "--match",
        "-m",
        metavar="PATTERN",
        help="Only hook points of a configuration that match; * is one part of a name, ** any number.",
    ),
]
CompareOption = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Compare two dumps, two statistics, or one of each.")
]
PageSizeOption = Annotated[float, typer.Option(metavar="MB", help="The greatest size of the page.")]


def view(
    what: SourcesArgument,
    out: OutOption = Path("page.html"),
    match: PageMatchOption = "**",
    world_size: WorldSizeOption = None,
    mesh: MeshOption = None,
    compared: CompareOption = True,
    most_megabytes: PageSizeOption = 20.0,
) -> None:
    """Write an HTML page of a model, its ranks and its data.

    The page shows the model with its hook points, the ranks with their shards, and the recorded values of
    dumps and statistics.

    The page is one file that opens in a browser, without a server or network. docs/view.md describes it.

    For example: megatron-flex view dump/ other-dump/ --out page.html
    """
    most_bytes = round(check_positive("--most-megabytes", most_megabytes) * 1_000_000)
    paths, flags = _split_flags(what)
    configs, dumps, measured = _sort_by_kind(paths)
    if len(configs) + bool(flags) > 1:
        raise FlexError("one page shows one model; give one configuration")
    page: Page | None = None
    if configs or flags:
        run = str(configs[0]) if configs else flags
        with spinner("building the model's shapes"):
            page = make_configuration_page(
                run, match=match, mesh=parse_mesh_sizes(mesh), world_size=world_size
            )
    elif mesh or world_size:
        raise FlexError("--mesh and --world-size are for a configuration; a dump has its run's")
    elif match != "**":
        raise FlexError("--match is for a configuration; a page of a dump shows what the dump has")
    statistics: list[OpenStatistics] = [open_statistics(path) for path in measured]
    sources = [path for path in paths if path not in configs]
    comparison = None
    if compared and len(sources) == 2 and len(dumps) + len(measured) == 2:
        comparison = compare(sources[0], sources[1])
    full = [p.resolve() for p in paths]
    same = len({p.name for p in full}) < len(full)  # out-1/dump and out-2/dump
    title = " and ".join(f"{p.parent.name}/{p.name}" if same else p.name for p in full)
    page_file = write(fill_page(page, dumps, statistics, comparison, title), out, most_bytes=most_bytes)
    make_console().print(
        f"{page_file}: {page_file.stat().st_size / 1e6:.1f} MB; open it in a browser", soft_wrap=True
    )


def _split_flags(what: list[str]) -> tuple[list[Path], list[str]]:
    """Paths, and the flags of a run after them."""
    at = next((n for n, word in enumerate(what) if word.startswith("-")), len(what))
    return [Path(word) for word in what[:at]], what[at:]


def _sort_by_kind(paths: list[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Configurations, dumps, folders of statistics; one folder may be a dump and have statistics.

    Raises:
        FlexError: an argument is not one of these.
    """
    configs, dumps, measured = [], [], []
    for path in paths:
        statistics = has_statistics(path)
        measured += [path] if statistics else []
        if path.is_dir() and (has_runs(path) or not statistics):
            list_runs(path)  # raises where no run is
            dumps.append(path)
        elif path.is_file() and path.suffix.lower() in CONFIG_SUFFIXES:
            configs.append(path)
        elif not statistics:
            raise FlexError(
                f"{path} is not a configuration ({', '.join(CONFIG_SUFFIXES)}), a dump or a folder of "
                "statistics"
            )
    return configs, dumps, measured
