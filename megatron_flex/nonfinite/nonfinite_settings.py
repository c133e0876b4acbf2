"""The settings of the search for values that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Literal

from megatron_flex.settings import NAMES, OPTIONAL_PATH, PATTERNS, SWITCH, Setting, choice
from megatron_flex.sites import Pattern, describe_pattern

MODES = ("stop", "warn")


@dataclass(repr=False, eq=False)
class NonFinite:
    """Names the first tensor of a step that has NaN or infinity, on the rank where the value arose.

    Each tensor costs one reduction to its minimum and maximum, and each step one message of two numbers.

    Args:
        mode: what all ranks do at the end of a step in which a value is not finite. `stop`: raise a
            `NonFiniteError`, before the optimizer takes the gradients. `warn`: warn, once for each hook
            point. Gradients that overflow under loss scaling are a warning in both modes, as the loss scaler
            skips the step.
        sites: names and patterns of the hook points that are watched; all of them by default.
        gradients: whether the gradients at the hook points are watched as well.
        parameters: whether the gradients of parameters are watched at the end of the step.
        path: a folder for the neighbourhood of the first such tensor: each rank on which the tensor is not
            finite writes its shard, and that of the tensor before, to `iteration-N/rank-R.pt`. None: nothing
            is written.
        groups: groups that the hooks belong to.

    Raises:
        FlexError: the mode is neither `stop` nor `warn`.

    Examples:
        >>> with attach(chunks, nonfinite="stop"):
        ...     train_step(chunks)
        >>> NonFinite("warn", "decoder.layers.*")
        <NonFinite warn at decoder.layers.*>
    """

    mode: Setting[Literal["stop", "warn"], Literal["stop", "warn"]] = Setting(choice(*MODES), "stop")
    sites: Setting[Sequence[Pattern] | Pattern, list[Pattern]] = Setting(PATTERNS, ())
    _: KW_ONLY
    gradients: Setting[bool, bool] = Setting(SWITCH, True)
    parameters: Setting[bool, bool] = Setting(SWITCH, True)
    path: Setting[str | PathLike[str] | None, str | None] = Setting(OPTIONAL_PATH, None)
    groups: Setting[Iterable[str], tuple[str, ...]] = Setting(NAMES, ())

    def __repr__(self) -> str:
        return f"<NonFinite {self.mode} at {self._describe_sites()}>"

    def _describe_sites(self) -> str:
        return ", ".join(describe_pattern(p) for p in self.sites) or "all hook points"

    def describe(self) -> str:
        """Return the settings that must be equal on all ranks, as text.

        Examples:
            >>> NonFinite("warn").describe()
            'nonfinite=warn at all hook points, gradients=True, parameters=True'
        """
        return (
            f"nonfinite={self.mode} at {self._describe_sites()}, gradients={self.gradients}, "
            f"parameters={self.parameters}"
        )
