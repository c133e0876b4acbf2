"""The settings of a launcher: one model, of which flags, their help, YAML keys and Python arguments are made.

A field with a flag is declared by `_flag`: its description is the flag's help, and its type says which values
it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from megatron_flex.dump.dump_settings import parse_token_setting
from megatron_flex.errors import FlexError
from megatron_flex.ranges import parse_numbers

DEFAULT_STATISTICS_FOLDER = "flex-stats"  # the folder of statistics, where none is given
DEFAULT_REPORT_FILE = "flex-report.txt"  # in the working directory, of a run that is started with flags
SITES_GROUP, EDIT_GROUP, DUMP_GROUP = "what to look at", "edits", "dumps"  # the groups of the help
STATISTICS_GROUP, CHECK_GROUP, RUN_GROUP = "statistics", "checks before training", "run time"
FLAG_KEY = "flag"  # in a field's extra information: how its flag is written


def _as_list(given: Any) -> Any:
    """Accept one word where a list is expected."""
    return [given] if isinstance(given, str) else given


def _join_numbers(given: Any) -> Any:
    """A number, or a list of them, as it is written on a command line."""
    if isinstance(given, list) and given and all(re.fullmatch(r"-?\d+", str(n)) for n in given):
        return ",".join(map(str, given))
    return given


def _reject_bool(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"{str(given).lower()} is not a number")
    return given


def _reject_empty(given: Any) -> Any:
    if isinstance(given, str) and not given.strip():
        raise ValueError("an empty word names nothing")
    return given


def _check_positions(given: str) -> str:
    parse_token_setting(given, "tokens", fractions=False)
    return given


def _check_numbers(given: str) -> str:
    parse_numbers(given, "numbers")
    return given


NonEmptyText = Annotated[str, AfterValidator(_reject_empty)]
NameList = Annotated[tuple[NonEmptyText, ...], BeforeValidator(_as_list)]
PositiveInt = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]
TokensText = Annotated[str, BeforeValidator(_join_numbers), AfterValidator(_check_positions)]
NumbersText = Annotated[str, BeforeValidator(_join_numbers), AfterValidator(_check_numbers)]


def _flag(
    default: Any,
    name: str,
    group: str,
    description: str,
    metavar: str = "",
    takes: str = "",
    value: Any = None,
) -> Any:
    """A field with a flag.

    Args:
        default: of the field.
        name: of the flag, without `--flex-`.
        group: of the help.
        description: the help.
        metavar: what values are called; those of a Literal if empty.
        takes: how many values there are; by the type if empty.
        value: the value of the flag when it is given without one.
    """
    extra: dict[str, Any] = {"name": name, "group": group, "metavar": metavar, "takes": takes, "value": value}
    return Field(default, description=description, json_schema_extra={FLAG_KEY: extra})


class SettingsPart(BaseModel):
    """A part of the settings: nothing in it that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class EditSettings(SettingsPart):
    """An edit.

    Attributes:
        site: where: a name or pattern; empty for those of `Settings.sites`.
        edit: `package.module:function`, `file.py:function`, or a preset with arguments, as for
            `edits.parse`.
        hook_type: as for HookFunction.
        run: likewise.
        groups: groups that it belongs to, beside `edit`.
        enabled: whether it counts from the beginning, or waits to be switched on.
    """

    edit: NonEmptyText
    site: str = ""
    hook_type: Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"] = "forward"
    run: Literal["replicated", "once"] = "replicated"
    groups: NameList = ()
    enabled: bool = True


class DumpSettings(SettingsPart):
    """A dump; fields as for `megatron_flex.Dump`, those not given as in `Settings`."""

    path: NonEmptyText = _flag(
        ..., "dump", DUMP_GROUP, "Write the activations at --flex-sites to a folder.", "DIR", "once"
    )
    dtype: Literal["bf16", "fp16", "fp32"] | None = _flag(
        None, "dump-dtype", DUMP_GROUP, "The dtype to cast tensors to."
    )
    parameters: NameList = _flag(
        (), "dump-parameters", DUMP_GROUP, "Names or patterns of parameters to write as well.", "PATTERN"
    )
    iterations: NumbersText | None = _flag(
        None,
        "dump-iterations",
        DUMP_GROUP,
        "Of the iterations of --flex-every, write only these: 100, or 100,200, or 0:1000:100.",
        "WHICH",
    )
    microbatches: NumbersText | None = _flag(
        None,
        "dump-microbatches",
        DUMP_GROUP,
        "Write only these microbatches of each iteration, such as 0.",
        "WHICH",
    )
    samples: NumbersText | None = _flag(
        None,
        "dump-samples",
        DUMP_GROUP,
        "Write only these samples of the global batch, such as 0:8.",
        "WHICH",
    )
    reduce: Literal["mean"] | None = _flag(
        None, "dump-mean", DUMP_GROUP, "Write only the mean over each sample's positions."
    )
    when_full: Literal["wait", "drop"] = _flag(
        "wait",
        "dump-when-full",
        DUMP_GROUP,
        "If the disk is slower than the model: wait, or drop iterations.",
    )
    on_error: Literal["warn", "raise"] = _flag(
        "warn",
        "dump-on-error",
        DUMP_GROUP,
        "If an iteration cannot be written: warn and leave it out, or stop the run.",
    )
    replicas: bool = _flag(
        False,
        "dump-replicas",
        DUMP_GROUP,
        "Write checksums of replicated tensors, which dump verify compares.",
    )
    sites: NameList = ()
    every: PositiveInt | None = None
    tokens: TokensText | None = None
    gradients: bool | None = None
    durable: bool = False
    groups: NameList = ()


class StatisticsSettings(SettingsPart):
    """Statistics; fields as for `megatron_flex.Statistics`, those not given as in `Settings`."""

    path: NonEmptyText = _flag(
        DEFAULT_STATISTICS_FOLDER,
        "stats",
        STATISTICS_GROUP,
        "Measure the activations at --flex-sites and write the statistics to DIR, or to "
        f"{DEFAULT_STATISTICS_FOLDER} in the working directory.",
        "DIR",
        "optional",
        DEFAULT_STATISTICS_FOLDER,
    )
    format: Literal["jsonl", "parquet"] = _flag(
        "jsonl", "stats-format", STATISTICS_GROUP, "The format of the files."
    )
    parameters: NameList = _flag(
        (),
        "stats-parameters",
        STATISTICS_GROUP,
        "Names or patterns of parameters whose gradient norms are measured.",
        "PATTERN",
    )
    sites: NameList = ()
    every: PositiveInt | None = None
    gradients: bool | None = None
    histogram: bool = True
    writers: bool = True
    groups: NameList = ()


class Settings(SettingsPart):
    """The settings of a launcher. Descriptions of the fields are the help of the flags.

    Examples:
        >>> from megatron_flex.launch import Settings
        >>> Settings(sites="decoder.layers.*").sites
        ('decoder.layers.*',)
    """

    sites: NameList = _flag(
        (),
        "sites",
        SITES_GROUP,
        "Names or patterns of sites, for dumps, statistics and edits that name none.",
        "PATTERN",
    )
    every: PositiveInt = _flag(
        1, "every", SITES_GROUP, "Dump and measure iterations whose number is a multiple of N.", "N"
    )
    tokens: TokensText | None = _flag(
        None, "tokens", SITES_GROUP, "Positions to dump: 0,5 or a slice ::8, or random:64.", "WHICH"
    )
    gradients: bool = _flag(
        False, "gradients", SITES_GROUP, "Dump and measure the gradients at the sites as well."
    )
    edits: tuple[EditSettings, ...] = _flag(
        (),
        "edit",
        EDIT_GROUP,
        "Edit the activation at SITE, or at --flex-sites if none is given. EDIT is package.module:function, "
        "file.py:function, or a preset: scale=0.5, steer=vector.safetensors@4, zero, mean; a|b runs a, then "
        "b. May be repeated.",
        "[SITE] EDIT",
        "edit",
    )
    on_error: Literal["raise", "skip"] = _flag(
        "raise",
        "on-error",
        EDIT_GROUP,
        "If an edit raises an exception: stop the run, or count it and continue without the edit.",
    )
    dumps: tuple[DumpSettings, ...] = ()
    statistics: StatisticsSettings | None = None
    list_sites: NonEmptyText | None = _flag(
        None,
        "list-sites",
        CHECK_GROUP,
        "Print the sites that match, or all, and exit.",
        "PATTERN",
        "optional",
        "**",
    )
    estimate: bool = _flag(
        False, "estimate", CHECK_GROUP, "Print what dumps would write and what edits would send, and exit."
    )
    verify: Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)] = _flag(
        0,
        "verify",
        CHECK_GROUP,
        "Compare the ranks' tensors with their layouts in the first STEPS steps, 1 if no number is given.",
        "STEPS",
        "optional",
        "1",
    )
    gradient_norms: NonEmptyText | None = _flag(
        None,
        "gradient-norms",
        CHECK_GROUP,
        "Write each reported gradient norm and that of the full gradients to a file of JSON lines.",
        "FILE",
    )
    align: NonEmptyText | None = _flag(
        None,
        "align",
        CHECK_GROUP,
        "Compare the model with that of Hugging Face in a folder, hook point by hook point, and exit.",
        "DIR",
        "once",
    )
    align_tokens: NonEmptyText | None = _flag(
        None,
        "align-tokens",
        CHECK_GROUP,
        "JSON of token ids for --flex-align, one list a sequence, or input_ids and attention_mask.",
        "FILE",
    )
    align_report: NonEmptyText | None = _flag(
        None, "align-report", CHECK_GROUP, "A file that --flex-align writes its result to, as JSON.", "FILE"
    )
    control: Annotated[Path, BeforeValidator(_reject_empty)] | None = _flag(
        None,
        "control",
        RUN_GROUP,
        "A file that switches groups of hooks on and off between iterations.",
        "FILE",
    )
    report: Annotated[Path, BeforeValidator(_reject_empty)] | None = _flag(
        None,
        "report",
        RUN_GROUP,
        f"The file for what this package prints, {DEFAULT_REPORT_FILE} if none is given.",
        "FILE",
    )
    cpu: bool = _flag(False, "cpu", RUN_GROUP, "Run Megatron on the CPU of this machine, with gloo.")

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted."""
        return self == Settings(cpu=self.cpu, report=self.report)

    def check_sites(self) -> None:
        """Refuse edits, dumps and statistics of nothing; no model is needed to detect them.

        Raises:
            FlexError: an edit has no site, or a dump or the statistics have neither sites nor parameters.

        Examples:
            >>> from megatron_flex.launch import Settings
            >>> Settings(sites="decoder.layers.*").check_sites()
        """
        if self.sites:
            return
        for edit in self.edits:
            if not edit.site.strip():
                raise FlexError(
                    f"--flex-edit {edit.edit}: no site is named, neither there nor by --flex-sites"
                )
        parts: list[DumpSettings | StatisticsSettings] = [*self.dumps]
        parts += [] if self.statistics is None else [self.statistics]
        for part in parts:
            if not part.sites and not part.parameters:
                flag = "--flex-dump" if isinstance(part, DumpSettings) else "--flex-stats"
                raise FlexError(
                    f"{flag} {part.path}: nothing is named; give --flex-sites PATTERN, or parameters"
                )


def merge_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two sets of plain values: lists joined, mappings merged, anything else from the second."""
    out = dict(first)
    for name, value in second.items():
        old = out.get(name)
        if isinstance(value, (list, tuple)) and isinstance(old, (list, tuple)):
            value = [*old, *value]
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge_values(old, value)
        out[name] = value
    return out
