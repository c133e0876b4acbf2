"""Data of figures: arrays of numbers with a caption, ready for drawing; and the error for missing data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.errors import FlexError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class FigureError(FlexError):
    """The source lacks the data of a figure; the message names what to dump or record."""


def as_array(values: Tensor) -> Array:
    """The same numbers as a numpy array.

    Raises:
        FigureError: numpy is not installed.
    """
    try:
        return values.detach().cpu().numpy()
    except RuntimeError as error:  # torch's error without numpy
        raise FigureError(
            f"figures are arrays of numpy, which is not there: pip install numpy ({error})"
        ) from error


@dataclass(frozen=True)
class Norms:
    """Norms of tensors over iterations: roots of sums of squares, over all samples and tokens.

    Attributes:
        sites: in model order.
        iterations: the framework's iteration numbers; `(0,)` for a cache.
        values: `[iteration, site]`, fp64, of the finite values; NaN where an iteration lacks a site.
        counts: `[iteration, site]`, the number of finite values: `values / sqrt(counts)` is their RMS.
        broken: `[iteration, site]`, the number of NaNs and infinities.
        caption: site, iterations, layout.
    """

    sites: tuple[str, ...]
    iterations: tuple[int, ...]
    values: Array
    counts: Array
    broken: Array
    caption: str


@dataclass(frozen=True)
class Histograms:
    """The number of values of one tensor in each bin, over iterations.

    Attributes:
        site: its name.
        iterations: the framework's iteration numbers.
        edges: `[bins + 1]`: powers of two, as `statistics_records.compute_bin_edges`; the outermost are
            infinite, and zero occurs twice, around the bin of exact zeros.
        counts: `[iteration, bin]`, integers.
        caption: site, iterations, layout.
    """

    site: str
    iterations: tuple[int, ...]
    edges: Array
    counts: Array
    caption: str


@dataclass(frozen=True)
class Heat:
    """One sample of a tensor, tokens x features.

    Attributes:
        site: its name.
        iteration: the framework's iteration number.
        values: `[token, feature]`, fp32: the values, or for large tensors means of |x| over blocks.
        rows: the position of each row's first token.
        columns: the index of each column's first feature, flattened.
        block: tokens and features of a block; `(1, 1)` for single values.
        caption: site, iteration, sample, layout, and the block size of means.
    """

    site: str
    iteration: int
    values: Array
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    block: tuple[int, int]
    caption: str


@dataclass(frozen=True)
class Attention:
    """Attention patterns of one layer for one sample.

    Attributes:
        layer: its number.
        iteration: the framework's iteration number.
        values: `[head, query, key]`, fp32; each query's sum to 1.
        queries: their positions; a subset, if the dump selected tokens.
        keys: their positions.
        caption: site, iteration, sample, layout.
    """

    layer: int
    iteration: int
    values: Array
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    caption: str


@dataclass(frozen=True)
class LogitLens:
    """The prediction of the residual stream after each layer: normed, times the unembedding.

    Attributes:
        layers: the number of layers before the stream; 0 is the input of the first layer.
        tokens: positions.
        ids: `[layer, token, k]`: the most likely tokens of the vocabulary, in descending order.
        probabilities: `[layer, token, k]`, fp32: their probabilities, over the vocabulary without padding.
        iteration: the framework's iteration number.
        caption: sites, iteration, sample, layout.
    """

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    ids: Array
    probabilities: Array
    iteration: int
    caption: str


@dataclass(frozen=True)
class Induction:
    """The attention of each head from a repeated token to the token after its first occurrence.

    Attributes:
        layers: their numbers.
        scores: `[layer, head]`, fp32: attention from the second half to the token after the earlier copy.
        previous: `[layer, head]`: to the previous token.
        uniform: the value of both for uniform attention.
        iteration: the framework's iteration number.
        caption: sites, iteration, samples, layout.
    """

    layers: tuple[int, ...]
    scores: Array
    previous: Array
    uniform: float
    iteration: int
    caption: str


@dataclass(frozen=True)
class Divergence:
    """The distance of two dumps, site by site in execution order.

    Attributes:
        sites: names of sites and parameters, gradients with the suffix `.grad`.
        iterations: the framework's iteration numbers.
        errors: `[iteration, site]`, fp64: the quantity that the tolerance bounds; NaN for a missing site,
            infinite where only one run has NaNs.
        tolerances: `[iteration, site]`.
        first: site and iteration of the first error above its tolerance; None if there is none.
        caption: the two dumps, iterations, the first divergence.
    """

    sites: tuple[str, ...]
    iterations: tuple[int, ...]
    errors: Array
    tolerances: Array
    first: tuple[str, int] | None
    caption: str
