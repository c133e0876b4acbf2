"""Statistics: of which tensors, how often, and where they go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Literal

from megatron_flex.errors import FlexError
from megatron_flex.sites import Pattern, describe_pattern

FILE_FORMATS = ("jsonl", "parquet")
FileFormat = Literal["jsonl", "parquet"]


class Statistics:
    """Mean, std, RMS, abs-max, fraction of zeros, kurtosis and a histogram of tensors, step by step.

    Each rank measures what it holds, and one small all-reduce in a step puts the numbers together: over
    tensor, sequence, context, expert and data parallel ranks and over microbatches they are those of the
    whole tensor. Every rank makes one alike, for `attach` or `FlexModel.register_statistics`.

    Args:
        path: the folder that they are written to.
        sites: names or patterns of modules and places; a module's output where no place is named.
        every: measure iterations whose number is a multiple of it.
        gradients: of the gradients at the sites too, at the scale of a microbatch's own loss.
        parameters: names or patterns of parameters whose reduced gradients' norms are wanted.
        histogram: whether to count values by powers of two.
        format: of the files.
        writers: whether they go to the TensorBoard and W&B writers of the framework too, where it has those.
        tags: groups that the hooks belong to.

    Raises:
        FlexError: a setting that cannot be.
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
        tags: Iterable[str] = (),
    ) -> None:
        self.path = fspath(path)
        self.sites, self.parameters = _list_patterns(sites), _list_patterns(parameters)
        self.every, self.gradients, self.histogram = every, gradients, histogram
        self.format, self.writers = format, writers
        self.tags = tuple(tags)
        if not self.sites and not self.parameters:
            raise FlexError("Statistics of nothing: name sites, such as 'decoder.layers.*', or parameters")
        if every < 1:
            raise FlexError(f"every={every}: measure every n-th iteration, n at least 1")
        if format not in FILE_FORMATS:
            raise FlexError(f"format={format!r} is none of {', '.join(FILE_FORMATS)}")

    def describe(self) -> str:
        """What all ranks must have in common, in words."""
        names = [describe_pattern(p) for p in (*self.sites, *self.parameters)]
        return f"statistics in {self.path} of {names}, every={self.every}, gradients={self.gradients}"


def _list_patterns(given: Sequence[Pattern] | Pattern) -> list[Pattern]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
