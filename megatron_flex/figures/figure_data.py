"""Data of figures: arrays of numbers with a caption, ready for drawing; and the error for missing data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.errors import FlexError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


MAX_LISTED = 6  # entries of a tuple that a printed figure lists


class FigureError(FlexError):
    """The source lacks the data of a figure; the message names what to dump or record.

    Examples:
        >>> try:
        ...     figures.attention("dumps/run", layer=9)
        ... except figures.FigureError as error:
        ...     print(error)
        dumps/run has the attention patterns of layers 0 to 3, but not layer 9
    """


def as_array(values: Tensor) -> Array:
    """The same numbers as a numpy array.

    Raises:
        FigureError: numpy is not installed.
    """
    try:
        return values.detach().cpu().numpy()
    except RuntimeError as error:  # torch's error without numpy
        raise FigureError(
            f"figures are numpy arrays, and numpy is not installed: pip install numpy ({error})"
        ) from error


def describe_data(data: Any) -> str:
    """The caption of a figure, and below it what its fields have, with the shapes of arrays."""
    lines = [f"{type(data).__name__}: {data.caption}"]
    for name in (field.name for field in fields(data) if field.name != "caption"):
        value = getattr(data, name)
        if hasattr(value, "shape"):
            text = f"array {list(value.shape)}, {value.dtype}"
        elif isinstance(value, tuple) and len(value) > MAX_LISTED:
            text = f"{value[0]} ... {value[-1]} ({len(value)})"
        elif isinstance(value, tuple):
            text = ", ".join(map(str, value))
        else:
            text = str(value)
        lines.append(f"  {name}: {text}")
    return "\n".join(lines)


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
        token_norms: `[3, iteration, site]`, fp64: the mean of the norms of single tokens, and their 10th and
            90th percentile; NaN where a tensor has no tokens. None if they were not asked for, or of
            statistics.

    Examples:
        >>> figure = figures.norms("dumps/run")
        >>> figure.sites, figure.iterations
        (('decoder.layers.0:output', 'decoder.layers.1:output', 'decoder.layers.2:output',
         'decoder.layers.3:output'), (0, 1))
    """

    sites: tuple[str, ...]
    iterations: tuple[int, ...]
    values: Array
    counts: Array
    broken: Array
    caption: str
    token_norms: Array | None = None

    def __str__(self) -> str:
        return describe_data(self)


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

    Examples:
        >>> figure = figures.histograms("stats/run", "decoder.layers.3")
        >>> figure.counts.shape, figure.edges.shape
        ((2, 129), (130,))
    """

    site: str
    iterations: tuple[int, ...]
    edges: Array
    counts: Array
    caption: str

    def __str__(self) -> str:
        return describe_data(self)


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

    Examples:
        >>> figure = figures.heat("dumps/run", "decoder.layers.3", most=(8, 8))
        >>> figure.values.shape, figure.block
        ((8, 8), (2, 4))
    """

    site: str
    iteration: int
    values: Array
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    block: tuple[int, int]
    caption: str

    def __str__(self) -> str:
        return describe_data(self)


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

    Examples:
        >>> figure = figures.attention("dumps/run", layer=1)
        >>> figure.caption
        'decoder.layers.1.self_attention.core_attention:probs · iteration 1 · sample 0 · [b, n, s, s]'
    """

    layer: int
    iteration: int
    values: Array
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    caption: str

    def __str__(self) -> str:
        return describe_data(self)


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
        entropies: `[layer, token]`, fp32, in nats: of the distribution over the vocabulary.
        ranks: `[layer, token]`, integers: the rank of the target among all tokens of the vocabulary; 1 is the
            likeliest.
        targets: `[token]`: the tokens that were ranked; by default the likeliest after the last layer.

    Examples:
        >>> figure = figures.logit_lens("dumps/run", top=3)
        >>> figure.ids.shape, figure.layers
        ((5, 16, 3), (0, 1, 2, 3, 4))
    """

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    ids: Array
    probabilities: Array
    iteration: int
    caption: str
    entropies: Array | None = None
    ranks: Array | None = None
    targets: Array | None = None

    def __str__(self) -> str:
        return describe_data(self)


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

    Examples:
        >>> repeated = tokens[:, :8].repeat(1, 2)
        >>> logits, cache = flex.interp.run_with_cache(repeated, lambda name: "pattern" in name)
        >>> figure = figures.induction(cache)
        >>> figure.layers, round(figure.uniform, 3)
        ((0, 1, 2, 3), 0.083)
    """

    layers: tuple[int, ...]
    scores: Array
    previous: Array
    uniform: float
    iteration: int
    caption: str

    def __str__(self) -> str:
        return describe_data(self)


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

    Examples:
        >>> from megatron_flex.compare import compare
        >>> figure = figures.divergence(compare("dumps/run", "dumps/changed"))
        >>> figure.first, bool((figure.errors > figure.tolerances).any())
        (('decoder.layers.3:input', 0), True)
    """

    sites: tuple[str, ...]
    iterations: tuple[int, ...]
    errors: Array
    tolerances: Array
    first: tuple[str, int] | None
    caption: str

    def __str__(self) -> str:
        return describe_data(self)
