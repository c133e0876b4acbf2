"""What a launcher is to do: the same fields in YAML, on the command line and in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from megatron_flex.dump.said import numbers_said, tokens_said

STATISTICS = "flex-stats"  # the folder of statistics, where none is said


def _many(said: Any) -> Any:
    """One word where a list may stand."""
    return [said] if isinstance(said, str) else said


def _words(said: Any) -> Any:
    """A number, or a list of them, as it is written on a command line."""
    if isinstance(said, list) and said and all(re.fullmatch(r"-?\d+", str(n)) for n in said):
        return ",".join(map(str, said))
    return said


def _number(said: Any) -> Any:
    if isinstance(said, bool):
        raise ValueError(f"{str(said).lower()} is no number")
    return said


def _named(said: Any) -> Any:
    if isinstance(said, str) and not said.strip():
        raise ValueError("an empty word names nothing")
    return said


def _positions(said: str) -> str:
    tokens_said(said, "tokens", fractions=False)
    return said


def _numbers(said: str) -> str:
    numbers_said(said, "numbers")
    return said


Name = Annotated[str, AfterValidator(_named)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_many)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Tokens = Annotated[str, BeforeValidator(_words), AfterValidator(_positions)]
Numbers = Annotated[str, BeforeValidator(_words), AfterValidator(_numbers)]


class Part(BaseModel):
    """A part of the settings: nothing in it that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


class EditSettings(Part):
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

    edit: Name
    site: str = ""
    hook_type: Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"] = "forward"
    run: Literal["replicated", "leader"] = "replicated"
    tags: Names = ()
    enabled: bool = True


class DumpSettings(Part):
    """A dump; fields as for `megatron_flex.Dump`, those not given as in `Settings`."""

    path: Name
    sites: Names = ()
    every: Count | None = None
    iterations: Numbers | None = None
    microbatches: Numbers | None = None
    samples: Numbers | None = None
    tokens: Tokens | None = None
    reduce: Literal["mean"] | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    gradients: bool | None = None
    parameters: Names = ()
    when_full: Literal["wait", "drop"] = "wait"
    replicas: bool = False
    durable: bool = False
    tags: Names = ()


class StatisticsSettings(Part):
    """Statistics; fields as for `megatron_flex.Statistics`, those not given as in `Settings`."""

    path: Name = STATISTICS
    sites: Names = ()
    every: Count | None = None
    gradients: bool | None = None
    parameters: Names = ()
    histogram: bool = True
    format: Literal["jsonl", "parquet"] = "jsonl"
    writers: bool = True
    tags: Names = ()


class Settings(Part):
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

    sites: Names = ()
    every: Count = 1
    tokens: Tokens | None = None
    gradients: bool = False
    edits: tuple[EditSettings, ...] = ()
    dumps: tuple[DumpSettings, ...] = ()
    statistics: StatisticsSettings | None = None
    on_error: Literal["raise", "skip"] = "raise"
    control: Annotated[Path, BeforeValidator(_named)] | None = None
    list_sites: Name | None = None
    plan: bool = False
    verify: Annotated[int, BeforeValidator(_number), Field(ge=0)] = 0
    cpu: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted."""
        return self == Settings(cpu=self.cpu)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two sets of plain values: lists joined, mappings merged, anything else from the second."""
    out = dict(first)
    for name, value in second.items():
        old = out.get(name)
        if isinstance(value, (list, tuple)) and isinstance(old, (list, tuple)):
            value = [*old, *value]
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merged(old, value)
        out[name] = value
    return out
