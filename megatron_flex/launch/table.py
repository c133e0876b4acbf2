"""The table of the flags of launchers, and their help."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

FLAGS_VARIABLE = "MEGATRON_FLEX_FLAGS"  # flags in the environment, as they would be typed
FLAG_PREFIX = "--flex-"
HELP_WIDTH = 98

LOOK, EDITS, DUMPS = "what to look at", "edits", "dumps"
STATISTICS, CHECKS, RUN = "statistics", "checks before training", "run time"
FlagArity = Literal["none", "one", "once", "optional", "many", "edit"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag.

    Attributes:
        name: without `--flex-`.
        field: where its value goes among the settings; `dump` is the one dump that flags can say.
        group: of the help.
        words: the help.
        metavar: what its values are called.
        takes: `none`; `one`, of which the last counts, or `once`; `optional`; `many`; an `edit`, which is
            one word or two, and may be repeated.
        value: what is meant where no value is given.
    """

    name: str
    field: tuple[str, ...]
    group: str
    words: str
    metavar: str = ""
    takes: FlagArity = "one"
    value: Any = True

    @property
    def option(self) -> str:
        """As it is typed."""
        return FLAG_PREFIX + self.name

    @property
    def dest(self) -> str:
        """Its name in a namespace of argparse."""
        return "flex_" + self.name.replace("-", "_")

    @property
    def usage(self) -> str:
        """With what it takes."""
        shown = {"none": "", "optional": f"[{self.metavar}]", "many": f"{self.metavar} ..."}
        return f"{self.option} {shown.get(self.takes, self.metavar)}".strip()


FLAGS = (
    Flag(
        "config", (), LOOK, "YAML with any of the settings; flags count on top of it.", "FILE", takes="many"
    ),
    Flag(
        "sites",
        ("sites",),
        LOOK,
        "Names or patterns of sites, for dumps, statistics and edits that name none.",
        "PATTERN",
        takes="many",
    ),
    Flag("every", ("every",), LOOK, "Dump and measure iterations whose number is a multiple of N.", "N"),
    Flag("tokens", ("tokens",), LOOK, "Positions to dump: 0,5 or a slice ::8, or random:64.", "WHICH"),
    Flag("gradients", ("gradients",), LOOK, "Gradients at the sites, too.", takes="none"),
    Flag(
        "edit",
        ("edits",),
        EDITS,
        "Edit what passes at SITE, or else at --flex-sites: package.module:function, file.py:function, or "
        "a preset: scale=0.5, steer=vector.safetensors@4, ablate, mean; a|b is one behind the other. May be "
        "repeated.",
        "[SITE] EDIT",
        takes="edit",
    ),
    Flag(
        "on-error",
        ("on_error",),
        EDITS,
        "An exception in an edit stops the run, or is counted, and the run goes on unedited.",
        "raise|skip",
    ),
    Flag("dump", ("dump", "path"), DUMPS, "Write what passes at --flex-sites to a folder.", "DIR", "once"),
    Flag("dump-dtype", ("dump", "dtype"), DUMPS, "To cast to.", "bf16|fp16|fp32"),
    Flag(
        "dump-parameters",
        ("dump", "parameters"),
        DUMPS,
        "Names or patterns of parameters to write, too.",
        "PATTERN",
        takes="many",
    ),
    Flag(
        "dump-iterations",
        ("dump", "iterations"),
        DUMPS,
        "Of those of --flex-every these only: 100, or 100,200, or 0:1000:100.",
        "WHICH",
    ),
    Flag(
        "dump-microbatches",
        ("dump", "microbatches"),
        DUMPS,
        "These microbatches of each iteration only, such as 0.",
        "WHICH",
    ),
    Flag(
        "dump-samples",
        ("dump", "samples"),
        DUMPS,
        "These samples of the global batch only, such as 0:8.",
        "WHICH",
    ),
    Flag(
        "dump-mean",
        ("dump", "reduce"),
        DUMPS,
        "The mean over each sample's positions only.",
        takes="none",
        value="mean",
    ),
    Flag(
        "dump-when-full",
        ("dump", "when_full"),
        DUMPS,
        "Where the disk is slower than the model: wait, or drop iterations.",
        "wait|drop",
    ),
    Flag(
        "stats",
        ("statistics", "path"),
        STATISTICS,
        "Measure what passes at --flex-sites; files go to DIR, or to flex-stats in the working directory.",
        "DIR",
        takes="optional",
        value="flex-stats",
    ),
    Flag("stats-format", ("statistics", "format"), STATISTICS, "Of the files.", "jsonl|parquet"),
    Flag(
        "stats-parameters",
        ("statistics", "parameters"),
        STATISTICS,
        "Names or patterns of parameters whose gradients' norms are wanted.",
        "PATTERN",
        takes="many",
    ),
    Flag(
        "list-sites",
        ("list_sites",),
        CHECKS,
        "Print the sites that match, or all, and exit.",
        "PATTERN",
        takes="optional",
        value="**",
    ),
    Flag(
        "plan",
        ("plan",),
        CHECKS,
        "Print what dumps would write and what edits would send, and exit.",
        takes="none",
    ),
    Flag(
        "verify",
        ("verify",),
        CHECKS,
        "Check what ranks hold against the layouts, in the first steps; without a number in one.",
        "STEPS",
        takes="optional",
        value="1",
    ),
    Flag(
        "control",
        ("control",),
        RUN,
        "A file that switches groups of hooks on and off between iterations.",
        "FILE",
    ),
    Flag("cpu", ("cpu",), RUN, "Run Megatron on the CPU of this machine, with gloo.", takes="none"),
    Flag("help", (), RUN, "Print this, and exit.", takes="none"),
)
FLAGS_BY_OPTION = {f.option: f for f in FLAGS}


def format_help() -> str:
    """All flags by group, in lines of at most 100 columns."""
    out = [
        "usage: python -m megatron_flex.launch SCRIPT [flags of the script] [flags of megatron_flex]",
        "",
        *wrap(
            "Hooks for a training script as it is. These flags are taken out of the command line; the script "
            f"gets the others as they are. {FLAGS_VARIABLE} may hold flags, too.",
            HELP_WIDTH,
        ),
    ]
    for group in dict.fromkeys(f.group for f in FLAGS):
        out += ["", f"{group}:"]
        for flag in (f for f in FLAGS if f.group == group):
            lines = wrap(flag.words, HELP_WIDTH - 38)
            out.append(f"  {flag.usage:35} {lines[0]}")
            out += [" " * 38 + line for line in lines[1:]]
    return "\n".join(out) + "\n"
