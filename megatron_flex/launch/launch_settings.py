"""What a launcher is to do: the same fields in YAML, on the command line and in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from megatron_flex.dump.said import parse_number_setting, parse_token_setting

DEFAULT_STATISTICS_FOLDER = "flex-stats"  # the folder of statistics, where none is said


def _as_list(given: Any) -> Any:
    """One word where a list may stand."""
    return [given] if isinstance(given, str) else given


def _join_numbers(given: Any) -> Any:
    """A number, or a list of them, as it is written on a command line."""
    if isinstance(given, list) and given and all(re.fullmatch(r"-?\d+", str(n)) for n in given):
        return ",".join(map(str, given))
    return given


def _reject_bool(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"{str(given).lower()} is no number")
    return given


def _reject_empty(given: Any) -> Any:
    if isinstance(given, str) and not given.strip():
        raise ValueError("an empty word names nothing")
    return given


def _check_positions(given: str) -> str:
    parse_token_setting(given, "tokens", fractions=False)
    return given


def _check_numbers(given: str) -> str:
    parse_number_setting(given, "numbers")
    return given


NonEmptyText = Annotated[str, AfterValidator(_reject_empty)]
NameList = Annotated[tuple[NonEmptyText, ...], BeforeValidator(_as_list)]
PositiveInt = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]
TokensText = Annotated[str, BeforeValidator(_join_numbers), AfterValidator(_check_positions)]
NumbersText = Annotated[str, BeforeValidator(_join_numbers), AfterValidator(_check_numbers)]


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
        tags: groups that it belongs to, beside `edit`.
        enabled: whether it counts from the beginning, or waits to be switched on.
    """

    edit: NonEmptyText
    site: str = ""
    hook_type: Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"] = "forward"
    run: Literal["replicated", "leader"] = "replicated"
    tags: NameList = ()
    enabled: bool = True


class DumpSettings(SettingsPart):
    """A dump; fields as for `megatron_flex.Dump`, those not given as in `Settings`."""

    path: NonEmptyText
    sites: NameList = ()
    every: PositiveInt | None = None
    iterations: NumbersText | None = None
    microbatches: NumbersText | None = None
    samples: NumbersText | None = None
    tokens: TokensText | None = None
    reduce: Literal["mean"] | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    gradients: bool | None = None
    parameters: NameList = ()
    when_full: Literal["wait", "drop"] = "wait"
    replicas: bool = False
    durable: bool = False
    tags: NameList = ()


class StatisticsSettings(SettingsPart):
    """Statistics; fields as for `megatron_flex.Statistics`, those not given as in `Settings`."""

    path: NonEmptyText = DEFAULT_STATISTICS_FOLDER
    sites: NameList = ()
    every: PositiveInt | None = None
    gradients: bool | None = None
    parameters: NameList = ()
    histogram: bool = True
    format: Literal["jsonl", "parquet"] = "jsonl"
    writers: bool = True
    tags: NameList = ()


class Settings(SettingsPart):
    """All of it.

    Attributes:
        sites: names or patterns, for dumps, statistics and edits that name none.
        every: dump and measure iterations whose number is a multiple of it.
        tokens: positions to dump: `0,5`, `::8`, `random:64`.
        gradients: dump and measure gradients at the sites, too.
        edits: in the order in which they run where they meet.
        dumps: what is written.
        statistics: what is measured.
        on_error: what becomes of an exception in an edit: it stops the run, or is counted.
        control: a file that switches groups of hooks on and off while the model trains.
        list_sites: print the sites that match, and exit before training.
        plan: print what dumps would write, and exit before training.
        verify: how many steps to check against the layouts.
        cpu: run Megatron on this machine's CPU, with gloo.
    """

    sites: NameList = ()
    every: PositiveInt = 1
    tokens: TokensText | None = None
    gradients: bool = False
    edits: tuple[EditSettings, ...] = ()
    dumps: tuple[DumpSettings, ...] = ()
    statistics: StatisticsSettings | None = None
    on_error: Literal["raise", "skip"] = "raise"
    control: Annotated[Path, BeforeValidator(_reject_empty)] | None = None
    list_sites: NonEmptyText | None = None
    plan: bool = False
    verify: Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)] = 0
    cpu: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted."""
        return self == Settings(cpu=self.cpu)


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
