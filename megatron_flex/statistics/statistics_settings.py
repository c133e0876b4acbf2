"""The settings of statistics: which tensors are measured, how often, and where the numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any

from megatron_flex.errors import FlexError
from megatron_flex.settings import (
    COUNT,
    NAMES,
    PATH,
    PATTERNS,
    SWITCH,
    Setting,
    record_settings,
)
from megatron_flex.sites import Pattern, describe_pattern

DEFAULT_STATISTICS_FOLDER = "flex-stats"  # the folder of statistics whose flag names none


@dataclass(eq=False, repr=False)
class Statistics:
    """Mean, std, RMS, abs-max, fraction of zeros, kurtosis and a histogram of tensors, step by step.

    Each rank measures its local shards, and one small all-reduce in a step combines the numbers over tensor,
    sequence, context, expert and data parallel ranks and over microbatches into those of the full tensor.
    Every rank makes Statistics with the same settings, for `attach` or `FlexModel.register_statistics`.

    Args:
        path: the folder that the statistics are written to.
        sites: names or patterns of modules and hook points; a module's name selects its output.
        every: measure iterations whose number is a multiple of `every`.
        gradients: also measure the gradients at the hook points, at the scale of a microbatch's own loss.
        parameters: names or patterns of parameters whose reduced gradients' norms are measured.
        histogram: whether to count values by powers of two.
        writers: whether to send the numbers to the framework's TensorBoard and W&B writers too, if present.
        groups: groups that the hooks belong to.

    Raises:
        FlexError: a setting is invalid.

    Examples:
        >>> with attach(chunks, statistics=Statistics("stats/new", "decoder.layers.*", gradients=True)):
        ...     train_step(chunks)
        >>> open_statistics("stats/new")["decoder.layers.3.grad"].iterations
        [0]
    """

    path: Setting[str | PathLike[str], str] = Setting(
        PATH,
        flag="stats",
        help="Measure the activations at --flex-sites and write the statistics to DIR, or to "
        f"{DEFAULT_STATISTICS_FOLDER} in the working directory.",
        metavar="DIR",
        takes="optional",
        value=DEFAULT_STATISTICS_FOLDER,
        recorded=False,
    )
    sites: Setting[Sequence[Pattern] | Pattern, list[Pattern]] = Setting(PATTERNS, (), shared=True)
    _: KW_ONLY
    parameters: Setting[Sequence[Pattern] | Pattern, list[Pattern]] = Setting(
        PATTERNS,
        (),
        flag="stats-parameters",
        help="Names or patterns of parameters whose gradient norms are measured.",
        metavar="PATTERN",
    )
    every: Setting[int, int] = Setting(COUNT, 1, shared=True)
    gradients: Setting[bool, bool] = Setting(SWITCH, False, shared=True)
    histogram: Setting[bool, bool] = Setting(SWITCH, True)
    writers: Setting[bool, bool] = Setting(SWITCH, True, recorded=False)
    groups: Setting[Iterable[str], tuple[str, ...]] = Setting(NAMES, (), recorded=False)

    def __post_init__(self) -> None:
        if not self.sites and not self.parameters:
            raise FlexError("Statistics need sites, such as 'decoder.layers.*', or parameters")

    def to_json(self) -> dict[str, Any]:
        """Return the settings that readers need, in plain values."""
        return record_settings(self)

    def __repr__(self) -> str:
        names = ", ".join(describe_pattern(p) for p in (*self.sites, *self.parameters)) or "nothing"
        return f"<Statistics of {names} in {self.path}>"

    def describe(self) -> str:
        """Return the settings that must be equal on all ranks, as text.

        Examples:
            >>> Statistics("stats/new", "decoder.layers.*", every=10).describe()
            "statistics in stats/new of ['decoder.layers.*'], every=10, gradients=False"
        """
        names = [describe_pattern(p) for p in (*self.sites, *self.parameters)]
        return f"statistics in {self.path} of {names}, every={self.every}, gradients={self.gradients}"
