"""What figures are: arrays of numbers with a caption, ready to be drawn; and the error of what is lacking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.errors import FlexError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class FigureError(FlexError):
    """The source lacks what a figure is made of; the message says what to dump or record."""


def as_array(values: Tensor) -> Array:
    """The same numbers for numpy.

    Raises:
        FigureError: numpy is not installed.
    """
    try:
        return values.detach().cpu().numpy()
    except RuntimeError as error:  # torch's, where it finds no numpy
        raise FigureError(
            f"figures are arrays of numpy, which is not there: pip install numpy ({error})"
        ) from error


@dataclass(frozen=True)
class Norms:
    """Norms of tensors over iterations: roots of sums of squares, over all samples and tokens.

    Attributes:
        sites: in model order.
        iterations: as the framework counts; `(0,)` of a cache.
        values: `[iteration, site]`, fp64, of the finite values; NaN where an iteration lacks a site.
        counts: `[iteration, site]`, how many finite values there are: `values / sqrt(counts)` is their RMS.
        broken: `[iteration, site]`, how many NaNs and infinities there are besides.
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
    """How many values of one tensor lie in each bin, over iterations.

    Attributes:
        site: its name.
        iterations: as the framework counts.
        edges: `[bins + 1]`: powers of two, as `statistics.measured.edges` has them; the outermost are
            infinite, and zero stands twice, around the bin of exact zeros.
        counts: `[iteration, bin]`, whole numbers.
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
        iteration: as the framework counts.
        values: `[token, feature]`, fp32: the values, or where there are too many the means of |x| of blocks.
        rows: the position of each row's (first) token.
        columns: the number of each column's (first) feature, counted flat.
        block: tokens and features of a block; `(1, 1)` where the values are themselves.
        caption: site, iteration, sample, layout, and blocks where they are means.
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
        iteration: as the framework counts.
        values: `[head, query, key]`, fp32; each query's sum to 1.
        queries: their positions; not all, where the dump took some tokens only.
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
    """What the residual stream would say if it were the last: normed, times the unembedding.

    Attributes:
        layers: behind how many layers the stream is; 0 is in front of the first one.
        tokens: positions.
        ids: `[layer, token, k]`: of the vocabulary the likeliest, the likeliest first.
        probabilities: `[layer, token, k]`, fp32: theirs, over the whole vocabulary without its padding.
        iteration: as the framework counts.
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
    """How strongly each head looks from a repeated token to what followed it the first time.

    Attributes:
        layers: their numbers.
        scores: `[layer, head]`, fp32: attention from the second half to the token behind the earlier copy.
        previous: `[layer, head]`: to the token before.
        uniform: what a head without any preference gives either.
        iteration: as the framework counts.
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
    """How far two dumps are apart, site by site in the order of execution.

    Attributes:
        sites: names of sites and parameters, `.grad` behind those of gradients.
        iterations: as the framework counts.
        errors: `[iteration, site]`, fp64: what the tolerance bounds; NaN where an iteration lacks a site,
            infinite where one run has NaNs that the other has not.
        tolerances: `[iteration, site]`.
        first: site and iteration of the first that is above its tolerance; None if none is.
        caption: the two dumps, iterations, the first divergence.
    """

    sites: tuple[str, ...]
    iterations: tuple[int, ...]
    errors: Array
    tolerances: Array
    first: tuple[str, int] | None
    caption: str
