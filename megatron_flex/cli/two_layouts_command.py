"""`megatron-flex two-layouts`: the same weights in two layouts, dumped and compared, in one command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from megatron_flex.cli.compare_command import print_comparison
from megatron_flex.cli.spinner import spinner
from megatron_flex.compare import Comparison, compare
from megatron_flex.document import make_console
from megatron_flex.dump.reader import open_dump
from megatron_flex.errors import FlexError
from megatron_flex.launch.flags import FLAGS_VARIABLE
from megatron_flex.launch.run_report import hide_secrets
from megatron_flex.launch.two_layouts import DEFAULT_SITES, LayoutRun, TwoLayouts, plan_two_layouts
from megatron_flex.page import write
from megatron_flex.page.page_builder import fill_page
from megatron_flex.ranges import parse_count

RANK_MARK = re.compile(r"\[rank(\d+)\]:")  # at the beginning of each line of an exception
LAUNCHERS_REPORT = "failed (exitcode: "  # in the first line that torchrun prints of a failed process
LINES_OF_FAILURE = 12  # that are shown of a log


class ScriptCommand(typer.core.TyperCommand):
    """A command whose options may also be among the flags of the script, and behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; all other words are in `ctx.args`, in order."""
        return super().parse_args(ctx, [word for word in args if word != "--"])


def two_layouts(
    context: typer.Context,
    against: Annotated[
        str, typer.Option(metavar="'FLAGS'", help="Flags of the second layout.", show_default=False)
    ] = "",
    without: Annotated[
        str, typer.Option(metavar="'FLAGS'", help="Flags that only the first layout has.", show_default=False)
    ] = "",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the checkpoint, the dumps and the logs.")
    ] = Path("two-layouts"),
    iterations: Annotated[str, typer.Option(metavar="N", help="The number of iterations to dump.")] = "2",
    sites: Annotated[str | None, typer.Option(metavar="'PATTERNS'", help="The hook points to dump.")] = None,
    processes: Annotated[
        str | None, typer.Option(metavar="4,2", help="The number of ranks of each run.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint to load instead of saving one.")
    ] = None,
    no_parameters: Annotated[bool, typer.Option("--no-parameters", help="Do not dump parameters.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML page of the two dumps.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the commands only.")] = False,
) -> None:
    """Run the same weights in two layouts, and compare the runs.

    The command runs a training script three times. The first run saves a torch_dist checkpoint. The other two
    load the checkpoint with --finetune, each in its own layout, and write dumps. Then the dumps are compared.

    The options may be anywhere in the command. The exit status is that of compare.

    For example: megatron-flex two-layouts -- pretrain_gpt.py --tensor-model-parallel-size 2 ...
    --against '--tensor-model-parallel-size 1'
    """
    plan = plan_two_layouts(
        context.args,
        against,
        out,
        without=without.split(),
        iterations=parse_count(iterations, "--iterations"),
        sites=DEFAULT_SITES if sites is None else sites.split(),
        parameters=not no_parameters,
        processes=[] if processes is None else [parse_count(n, "--processes") for n in processes.split(",")],
        checkpoint=checkpoint,
    )
    if dry:
        for run in plan.runs:
            typer.echo(run.shell())
        typer.echo(f"megatron-flex compare {plan.dumps[0]} {plan.dumps[1]}")
    elif status := _run_plan(plan, out, html):
        raise typer.Exit(status)


two_layouts_app = typer.Typer(add_completion=False, rich_markup_mode=None)
two_layouts_app.command(
    cls=ScriptCommand,
    options_metavar="[OPTIONS] -- SCRIPT [FLAGS]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(two_layouts)


def _run_plan(plan: TwoLayouts, out: Path, html: Path | None) -> int:
    """Run the three trainings, print the comparison, and return its exit status.

    Raises:
        FlexError: a folder of a dump exists, or a training failed; its own messages are above.
    """
    for folder in plan.dumps:
        if folder.exists():
            raise FlexError(f"{folder} already exists: name another folder with --out, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(plan.runs):
        sys.stderr.write(f"megatron-flex: {number + 1} of {len(plan.runs)}: {run.title}\n  {run.shell()}\n")
        with spinner(f"training; its log is {out / f'log-{number + 1}.txt'}"):
            _train(run, out / f"log-{number + 1}.txt")
    comparison = compare(*plan.dumps)
    wrong_norms = plan.wrong_norms()
    console = make_console()
    if comparison.exit_status:  # a divergence of gradients explains another norm
        print_comparison(comparison)
    for line in wrong_norms:
        console.print(line, style="bold red", soft_wrap=True)
    if not comparison.exit_status:
        print_comparison(comparison)
    report = write_bug_report(out / "report-to-paste.txt", plan, comparison, wrong_norms)
    console.print(f"to paste into a bug report: {report}", soft_wrap=True)
    if html is not None:
        title = " and ".join(dump.name for dump in plan.dumps)
        page = write(fill_page(None, list(plan.dumps), [], comparison, title), html)
        console.print(f"{page}: open it in a browser", soft_wrap=True)
    return comparison.exit_status or int(bool(wrong_norms))


def write_bug_report(
    path: Path, plan: TwoLayouts, comparison: Comparison, wrong_norms: Sequence[str]
) -> Path:
    """Write the verdict, the commands that repeat it, and the versions as a short text."""
    commands = [hide_secrets(run.shell().split(" ")) for run in plan.runs]
    with open_dump(plan.dumps[0]) as dump:
        versions = [f"{name} {version}" for name, version in dump.manifests[0].versions.items()]
    verdict = comparison.summary()
    findings = [*verdict, *wrong_norms] if comparison.exit_status else [*wrong_norms, *verdict]
    lines = [*findings, "", *commands, "", ", ".join(versions)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _train(run: LayoutRun, log: Path) -> None:
    """Run one training; what it prints goes to a file, of which the end is shown if it fails."""
    options = ["--standalone", "--nproc-per-node", str(run.processes), "-m", "megatron_flex.launch"]
    inherited = os.environ.get(FLAGS_VARIABLE, "")
    environment: dict[str, Any] = {**os.environ, FLAGS_VARIABLE: f"{inherited} {run.variable}".strip()}
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, *run.words],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.stderr.write(find_failure(log.read_text(encoding="utf-8", errors="replace")))
        raise FlexError(f"the run to {run.title} failed with status {done.returncode}; its log is {log}")


def find_failure(log: str) -> str:
    """The part of a run's log that shows why the run failed.

    torchrun ends a log with a traceback of its own, which can be longer than that of the training. PyTorch
    marks the lines of an exception with their rank.

    Args:
        log: what the run printed.

    Returns:
        The last lines of the exception of the rank whose exception is first in the log; without one, the last
        lines before torchrun's own.
    """
    lines = log.splitlines()
    marked = [(marked_rank[1], line) for line in lines if (marked_rank := RANK_MARK.match(line))]
    if marked:
        lines = [line for rank, line in marked if rank == marked[0][0]]
    else:
        ends = [number for number, line in enumerate(lines) if LAUNCHERS_REPORT in line]
        lines = lines[: ends[0]] if ends else lines
    return "\n".join([*lines[-LINES_OF_FAILURE:], ""])
