"""The settings of statistics: which tensors are measured, how often, and where the numbers are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Literal

from megatron_flex.errors import FlexError
from megatron_flex.ranges import check_choice, check_count, normalize_path
from megatron_flex.sites import Pattern, describe_pattern

FILE_FORMATS = ("jsonl", "parquet")
FileFormat = Literal["jsonl", "parquet"]


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
        format: the format of the files.
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

    def __init__(
        self,
        path: str | PathLike[str],
        sites: Sequence[Pattern] | Pattern,
        *,
        every: int = 1,
        gradients: bool = False,
        parameters: Sequence[Pattern] | Pattern = (),
        histogram: bool = True,
        format: FileFormat = "jsonl",
        writers: bool = True,
        groups: Iterable[str] = (),
    ) -> None:
        self.path = normalize_path("path", path)
        self.sites, self.parameters = _list_patterns(sites), _list_patterns(parameters)
        self.every = check_count("every", every)
        self.gradients, self.histogram = gradients, histogram
        self.format, self.writers = format, writers
        self.groups = tuple(groups)
        if not self.sites and not self.parameters:
            raise FlexError("Statistics of nothing: name sites, such as 'decoder.layers.*', or parameters")
        check_choice("format", format, FILE_FORMATS)

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


def _list_patterns(given: Sequence[Pattern] | Pattern) -> list[Pattern]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
