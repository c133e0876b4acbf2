"""The same weights in two layouts: the commands that save, load, dump in both, and compare.

A checkpoint in Megatron's `torch_dist` format can be loaded in any layout. Both runs load it with
`--finetune`, which begins at iteration 0 with the same data, without dropout, and with a vocabulary that is
padded to the same size; what then differs is the layout.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from megatron_flex.errors import FlexError
from megatron_flex.launch.flags import FLAGS_VARIABLE
from megatron_flex.launch.gradient_norm_file import read_norms
from megatron_flex.ranges import parse_count
from megatron_flex.wording import count_words

VOCABULARY_FLAG, DEFAULT_VOCABULARY_MULTIPLE = "--make-vocab-size-divisible-by", 128  # Megatron's default
AXIS_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
# Flags that would begin elsewhere, end elsewhere, or contradict the few iterations of these runs.
REPLACED_FLAGS = (
    *(
        "--train-iters",
        "--train-samples",
        "--load",
        "--save",
        "--save-interval",
        "--ckpt-format",
        "--finetune",
    ),
    *("--eval-iters", "--eval-interval", "--exit-interval", "--exit-duration-in-mins", "--rampup-batch-size"),
    *("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-decay-samples"),
    *("--hidden-dropout", "--attention-dropout", VOCABULARY_FLAG, "--async-save"),
)
FIXED_FLAGS = (
    *("--ckpt-format", "torch_dist", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--eval-iters", "0", "--eval-interval", "1000000", "--lr-warmup-iters", "0"),
)
# Megatron's first loss scale, 2^32, overflows gradients in fp16: it would skip the few steps of these runs.
LOSS_SCALE_FLAGS, LOSS_SCALE = ("--loss-scale", "--initial-loss-scale"), 2**16
SCHEDULE_FLAG = "--step-batch-size-schedule"  # such as "0:768 250B:1536"
DEFAULT_SITES = ("decoder.layers.*", "loss")


@dataclass(frozen=True, slots=True)
class LayoutRun:
    """One run of the script.

    Attributes:
        title: what the run is for.
        processes: the number of processes.
        words: the script and its flags.
        variable: the value of MEGATRON_FLEX_FLAGS.
    """

    title: str
    processes: int
    words: tuple[str, ...]
    variable: str = ""

    def shell(self) -> str:
        """The command as it is typed."""
        variable = f"{FLAGS_VARIABLE}={shlex.quote(self.variable)} " if self.variable else ""
        runner = [
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(self.processes),
            "-m",
            "megatron_flex.launch",
        ]
        return variable + shlex.join([*runner, *self.words])


@dataclass(frozen=True, slots=True)
class TwoLayouts:
    """The plan.

    Attributes:
        runs: in order: the one that saves, unless there is a checkpoint, and the two that dump.
        dumps: the folders of the two dumps.
    """

    runs: tuple[LayoutRun, ...]
    dumps: tuple[Path, Path]

    def wrong_norms(self) -> list[str]:
        """Which layouts reported a gradient norm that their full gradients do not have: a line for each."""
        lines = []
        for folder in self.dumps:
            wrong = [record for record in read_norms(norm_file(folder)) if record.finding]
            if wrong:
                first, later = wrong[0], len(wrong) - 1
                more = f"; likewise in {count_words(later, 'later iteration')}" if later else ""
                lines.append(f"{folder.name} layout, iteration {first.iteration}: {first.finding}{more}")
        return lines


def norm_file(dump: Path) -> Path:
    """The file of the reported gradient norms of the run that wrote a dump."""
    return dump.with_name(f"{dump.name}-norms.jsonl")


def plan_two_layouts(
    words: Sequence[str],
    against: str,
    out: Path,
    *,
    without: Sequence[str] = (),
    iterations: int = 2,
    sites: Sequence[str] = DEFAULT_SITES,
    parameters: bool = True,
    processes: Sequence[int] = (),
    checkpoint: Path | None = None,
) -> TwoLayouts:
    """The runs that compare a script in two layouts.

    Args:
        words: the script and its flags, in the first layout.
        against: the flags of the second layout, which replace those of the first; may be empty if the
            numbers of processes differ, that is, between data parallel replicas.
        out: the folder of checkpoint and dumps.
        without: flags of the first layout that the second run does not have.
        iterations: how many iterations are dumped.
        sites: patterns of the sites to dump, with their gradients.
        parameters: dump the parameters and their gradients too.
        processes: the number of processes of each run; if empty, one data parallel replica.
        checkpoint: a `torch_dist` checkpoint to begin with; None to make one.

    Raises:
        FlexError: no script or no second layout is named, or a size is not a number.

    Examples:
        >>> from pathlib import Path
        >>> from megatron_flex.launch.two_layouts import plan_two_layouts
        >>> words, against = ["pretrain_gpt.py"], "--tensor-model-parallel-size 2"
        >>> plan = plan_two_layouts(words, against, Path("two-layouts"))
        >>> [(run.processes, run.title) for run in plan.runs]
        [(1, 'save a checkpoint'), (1, 'dump the first layout'), (2, 'dump the second layout')]
    """
    if not words or words[0].startswith("-"):
        raise FlexError("no script: megatron-flex two-layouts -- SCRIPT FLAGS --against 'FLAGS'")
    other = shlex.split(against)
    _check_second_layout(other, processes)
    first = drop_flags(words, REPLACED_FLAGS)
    names = [word.partition("=")[0] for word in other if word.startswith("--")]
    second = [*drop_flags(first, [*names, *without]), *other]
    multiple = _read_number(words, VOCABULARY_FLAG, DEFAULT_VOCABULARY_MULTIPLE)
    sizes = [{axis: _read_number(w, flag, 1) for axis, flag in AXIS_FLAGS.items()} for w in (first, second)]
    padded = lcm(*(multiple * size["tp"] for size in sizes))
    worlds = list(processes) or [_count_ranks(size) for size in sizes]
    common = [
        [*flags, VOCABULARY_FLAG, str(padded // size["tp"]), *FIXED_FLAGS, *_list_loss_scale(flags)]
        for flags, size in zip((first, second), sizes, strict=True)
    ]
    runs = []
    if checkpoint is None:
        checkpoint = out / "checkpoint"
        least = worlds.index(min(worlds))
        # Nothing loads the optimizer's state, and Megatron cannot save it where only some layers are frozen.
        saving = ["--save", str(checkpoint), "--save-interval", "1", "--no-save-optim"]
        saving += _bound_iterations(common[least], 1)
        runs.append(LayoutRun("save a checkpoint", worlds[least], (*common[least], *saving)))
    dumps = out / "first", out / "second"
    for title, folder, flags, world in zip(("first", "second"), dumps, common, worlds, strict=True):
        loading = ["--load", str(checkpoint), "--finetune", *_bound_iterations(flags, iterations)]
        ours = ["--flex-dump", str(folder), "--flex-gradients", "--flex-sites", *sites]
        ours += ["--flex-dump-parameters", "**"] if parameters else []
        ours += ["--flex-report", str(out / "report.txt")]
        ours += ["--flex-gradient-norms", str(norm_file(folder))]
        runs.append(LayoutRun(f"dump the {title} layout", world, (*flags, *loading), shlex.join(ours)))
    return TwoLayouts(tuple(runs), dumps)


def _check_second_layout(flags: Sequence[str], processes: Sequence[int]) -> None:
    if not flags and len(set(processes)) < 2:
        raise FlexError(
            "--against has no flags: give the flags of the second layout, in quotes (or --processes 4,2 if "
            "only the number of data parallel replicas differs)"
        )
    if len(processes) not in (0, 2):
        raise FlexError(f"--processes {','.join(map(str, processes))}: give two numbers, such as 4,2")


def _bound_iterations(words: Sequence[str], iterations: int) -> list[str]:
    """The flags that end a run after so many iterations.

    Under a schedule of batch sizes Megatron makes a dataset of as many samples as iterations of its smallest
    batch need, and runs out of them. Such a run has samples for its largest batch, and exits by itself.
    """
    *_, schedule = ["", *_list_values(words, SCHEDULE_FLAG)]
    if not schedule:
        return ["--train-iters", str(iterations)]
    sizes = [parse_count(step.rpartition(":")[2], SCHEDULE_FLAG) for step in schedule.split()]
    return ["--train-samples", str(iterations * max(sizes)), "--exit-interval", str(iterations)]


def _list_loss_scale(words: Sequence[str]) -> list[str]:
    """The loss scale of a run in fp16, where its flags have none."""
    names = {word.partition("=")[0] for word in words}
    if "--fp16" not in names or names & set(LOSS_SCALE_FLAGS):
        return []
    return ["--initial-loss-scale", str(LOSS_SCALE)]


def drop_flags(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command line without some flags and their values."""
    out: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            out.append(word)
    return out


def _list_values(words: Sequence[str], name: str) -> Iterator[str]:
    for number, word in enumerate(words):
        option, glued, value = word.partition("=")
        if option == name:
            yield value if glued else words[number + 1] if number + 1 < len(words) else ""


def _read_number(words: Sequence[str], name: str, default: int) -> int:
    """The last value of a flag."""
    *_, value = ["", *_list_values(words, name)] if name in " ".join(words) else [str(default)]
    return parse_count(value, name)


def _count_ranks(sizes: Mapping[str, int]) -> int:
    """The ranks of one data parallel replica; where experts have more ranks than layers, those."""
    dense, experts = sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"]
    return sizes["pp"] * lcm(dense, experts)
