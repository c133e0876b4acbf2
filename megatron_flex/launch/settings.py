"""What a launcher is to do: the same fields in YAML, on the command line and in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """A part of the settings: nothing in it that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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

    edit: str
    site: str = ""
    hook_type: Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"] = "forward"
    run: Literal["replicated", "leader"] = "replicated"
    tags: tuple[str, ...] = ()
    enabled: bool = True


class DumpSettings(Part):
    """A dump; fields as for `megatron_flex.Dump`, those not given as in `Settings`."""

    path: str
    sites: tuple[str, ...] = ()
    every: int | None = None
    iterations: str | None = None
    microbatches: str | None = None
    samples: str | None = None
    tokens: str | None = None
    reduce: Literal["mean"] | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    gradients: bool | None = None
    parameters: tuple[str, ...] = ()
    when_full: Literal["wait", "drop"] = "wait"
    replicas: bool = False
    durable: bool = False
    tags: tuple[str, ...] = ()


class StatisticsSettings(Part):
    """Statistics; fields as for `megatron_flex.Statistics`, those not given as in `Settings`."""

    path: str
    sites: tuple[str, ...] = ()
    every: int | None = None
    gradients: bool | None = None
    parameters: tuple[str, ...] = ()
    histogram: bool = True
    format: Literal["jsonl", "parquet"] = "jsonl"
    writers: bool = True
    tags: tuple[str, ...] = ()


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

    sites: tuple[str, ...] = ()
    every: int = Field(default=1, ge=1)
    tokens: str | None = None
    gradients: bool = False
    edits: tuple[EditSettings, ...] = ()
    dumps: tuple[DumpSettings, ...] = ()
    statistics: StatisticsSettings | None = None
    on_error: Literal["raise", "skip"] = "raise"
    control: Path | None = None
    list_sites: str | None = None
    plan: bool = False
    verify: int = Field(default=0, ge=0)
    cpu: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted."""
        return self == Settings(cpu=self.cpu)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two sets of plain values: lists one behind the other, anything else from the second."""
    out = dict(first)
    for name, value in second.items():
        both = isinstance(value, (list, tuple)) and isinstance(out.get(name), (list, tuple))
        out[name] = [*out[name], *value] if both else value
    return out
