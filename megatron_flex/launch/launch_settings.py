"""The settings of a launcher, of which YAML keys and flags are made.

Those of dumps and of statistics are declared in `Dump` and `Statistics`; a field of `Settings` with a flag is
declared by `_flag`: its description is the flag's help, and its type says which values it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from megatron_flex.dump.dump_settings import TOKENS, Dump
from megatron_flex.errors import FlexError
from megatron_flex.settings import REQUIRED, Kind, Setting, list_settings
from megatron_flex.statistics.statistics_settings import Statistics

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


NonEmptyText = Annotated[str, AfterValidator(_reject_empty)]
NameList = Annotated[tuple[NonEmptyText, ...], BeforeValidator(_as_list)]
PositiveInt = Annotated[int, BeforeValidator(_reject_bool), Field(ge=1)]


def _text_check(name: str, kind: Kind[Any, Any]) -> Callable[[str], str]:
    """A check that `kind` parses a text, which stays as it is."""

    def check(text: str) -> str:
        if kind.parse is not None:
            kind.parse(text, name)
        return text

    return check


TokensText = Annotated[str, BeforeValidator(_join_numbers), AfterValidator(_text_check("tokens", TOKENS))]


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


def _derived_field(setting: Setting[Any, Any]) -> tuple[Any, Any]:
    """The type and the field of a part of the settings, from the declaration of a setting."""
    kind = setting.kind
    plain: dict[type, Any] = {bool: bool, int: PositiveInt, tuple: NameList, str: NonEmptyText}
    annotation = plain[kind.plain]
    if kind.words:
        annotation = Literal[kind.words]
    elif kind.parse is not None:
        annotation = Annotated[
            str, BeforeValidator(_join_numbers), AfterValidator(_text_check(setting.name, kind))
        ]
    optional = setting.shared and kind.plain is not tuple
    default = ... if setting.default is REQUIRED else None if optional else setting.default
    if isinstance(setting.value, str):  # of a flag that needs no value, and of a mapping without the key
        default = setting.value
    return annotation | None if default is None else annotation, Field(default)


def _derive_part(name: str, declared: type) -> Any:
    """A part of the settings with a field for each setting that a class declares."""
    fields: dict[str, Any] = {s.name: _derived_field(s) for s in list_settings(declared)}
    return create_model(name, __base__=SettingsPart, **fields)


class DumpSettings(_derive_part("DumpSettings", Dump)):  # type: ignore[misc]  # the fields are those of Dump
    """A dump; fields as for `megatron_flex.Dump`, those not given as in `Settings`."""


class StatisticsSettings(_derive_part("StatisticsSettings", Statistics)):  # type: ignore[misc]  # likewise
    """Statistics; fields as for `megatron_flex.Statistics`, those not given as in `Settings`."""


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
    nonfinite: Literal["stop", "warn"] | None = _flag(
        None,
        "nonfinite",
        RUN_GROUP,
        "Watch all hook points and gradients for NaN and infinities, and name the first tensor that has one: "
        "stop the run before the optimizer's step, or warn.",
    )
    nonfinite_dir: NonEmptyText | None = _flag(
        None,
        "nonfinite-dir",
        RUN_GROUP,
        "Write the shards of the first tensor that is not finite, and of the one before, to DIR.",
        "DIR",
    )
    gradient_norms: NonEmptyText | None = _flag(
        None,
        "gradient-norms",
        CHECK_GROUP,
        "Write each reported gradient norm and that of the full gradients to a file of JSON lines.",
        "FILE",
    )
    weights_digest: NonEmptyText | None = _flag(
        None,
        "weights-digest",
        CHECK_GROUP,
        "Write the digest of every full parameter to a JSON file when the training ends, for "
        "megatron-flex weights compare.",
        "FILE",
    )
    weights_digest_at: Annotated[int, BeforeValidator(_reject_bool), Field(ge=0)] | None = _flag(
        None,
        "weights-digest-at",
        CHECK_GROUP,
        "Write it before the step of iteration N instead: 0 for the weights that the run has loaded.",
        "N",
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
                    f"{flag} {part.path}: hook points are missing; give --flex-sites PATTERN, or parameters"
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
