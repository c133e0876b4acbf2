"""The base of all plots: a figure without a backend, its title and caption, labels of axes and tokens."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from megatron_flex.errors import FlexError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
Tokenizer = Callable[[int], str | bytes]  # text of a token id, or its bytes

DPI = 150
SERIES_COLORS = ("#2b62b8", "#d9730d", "#12805c", "#a0348f", "#8a6d00", "#0e8ba0")
STYLE: dict[Any, Any] = {  # of all plots
    "figure.dpi": DPI,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.5",
    "axes.grid": False,
    "axes.prop_cycle": f"cycler('color', {list(SERIES_COLORS)})",
    "grid.alpha": 0.3,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}
SMALL, TINY = 8, 7  # points
CAPTION_LETTERS = 15.5  # letters of a caption per inch
GREY, RED = "0.35", "tab:red"
VISIBLE_LETTERS = {"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍"}
# What tokenizers write for a space and a newline, where they name tokens instead of decoding them.
TOKEN_LETTERS = {"Ġ": "␣", "▁": "␣", "Ċ": "⏎"}
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # of tokenizers that fall back to bytes
MATPLOTLIB_MISSING = "plots need matplotlib: pip install megatron-flex[plot]"
LAYER_NUMBER = re.compile(r"(?<=layers\.)(\d+)(?=[.:])")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """A plot in the package's style, whatever the caller's matplotlib settings are."""

    @wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            from matplotlib import rc_context
        except ImportError as error:
            raise FlexError(MATPLOTLIB_MISSING) from error
        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, size in inches; it is not shown, and pyplot has no reference to it.

    Raises:
        FlexError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlexError(MATPLOTLIB_MISSING) from error
    return Figure(figsize=(width, height), layout="constrained")


def finish_figure(figure: Figure, title: str, caption: str) -> Figure:
    """Put the title above and the caption below, wrapped to the width of the figure."""
    wide = max(30, int(figure.get_figwidth() * CAPTION_LETTERS))
    figure.suptitle(_wrap_text(title, wide * 2 // 3), fontsize=11, parse_math=False)
    visible = _wrap_text(caption, wide)
    figure.supxlabel(visible, x=0.01, ha="left", fontsize=SMALL, color=GREY, parse_math=False)
    return figure


def _wrap_text(text: str, wide: int) -> str:
    """Lines of at most this many letters: broken between words, or within longer words such as paths."""
    return textwrap.fill(text, wide, break_on_hyphens=False)


def label_ticks(axis: Any, labels: Sequence[str], most: int = 32, **how: Any) -> None:
    """Label the positions 0, 1, ... of an axis (`axes.xaxis`); if too many, only every n-th."""
    least = -(-len(labels) // most)
    step = next(s * 10**p for p in range(9) for s in (1, 2, 5) if s * 10**p >= least)
    places = range(0, len(labels), step)
    axis.set_ticks(list(places), [labels[i] for i in places], parse_math=False, **how)


def label_sites(axes: Axes, sites: Sequence[str]) -> None:
    """Label the x axis with sites: with layer numbers alone where nothing else differs."""
    templates = {LAYER_NUMBER.sub("N", name, count=1) for name in sites}
    numbers = [LAYER_NUMBER.search(name) for name in sites]
    if len(templates) == 1 and all(numbers):
        label_ticks(axes.xaxis, [match[0] for match in numbers if match is not None])
        axes.set_xlabel(f"N of {templates.pop()}", parse_math=False)
    else:
        label_ticks(axes.xaxis, sites, 48, rotation=90, fontsize=TINY)


def token_labels(ids: Sequence[int], tokenizer: Tokenizer | None, most: int = 9) -> list[str]:
    """Tokens as text: their ids, or the tokenizer's text, shortened if necessary."""
    return [show_token(str(i) if tokenizer is None else tokenizer(int(i)), most) for i in ids]


def place_labels(
    places: Sequence[int], tokens: Sequence[int] | None, tokenizer: Tokenizer | None, most: int = 9
) -> list[str]:
    """Positions of a sequence: by number, or with their tokens.

    Raises:
        FlexError: there are fewer tokens than positions.
    """
    if tokens is None:
        return [str(p) for p in places]
    ids = [int(t) for t in tokens]
    if places and max(places) >= len(ids):
        raise FlexError(
            f"tokens has {len(ids)} of the sample's, and position {max(places)} is drawn; give all of them"
        )
    return token_labels([ids[p] for p in places], tokenizer, most)


def show_token(text: str | bytes, most: int = 9) -> str:
    """A token on one line: spaces and line ends as signs; what is not printable text as `\\xe8`.

    Args:
        text: of the token; its bytes, which may be a part of a letter; or a byte token such as `<0xE8>`.
        most: the number of letters; what is longer is shortened.
    """
    if isinstance(text, str) and (byte := BYTE_TOKEN.fullmatch(text)) is not None:
        text = bytes([int(byte[1], 16)])
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="surrogateescape")  # bytes that are not text become surrogates
    signs = VISIBLE_LETTERS | TOKEN_LETTERS
    visible = "".join(signs.get(c, c if c.isprintable() else _escape(c)) for c in text)
    return visible if len(visible) <= most else visible[: most - 1] + "…"


def _escape(letter: str) -> str:
    number = ord(letter)
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00  # a byte that is not text
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def iteration_colors(iterations: Sequence[int]) -> list[Any]:
    """A color of viridis for each iteration, by its number; dark for the first."""
    from matplotlib import colormaps

    first, last = min(iterations, default=0), max(iterations, default=0)
    span = max(1, last - first)
    return [colormaps["viridis"](0.9 * (number - first) / span) for number in iterations]


def add_iteration_bar(figure: Figure, axes: Axes, iterations: Sequence[int]) -> None:
    """A colorbar of iterations; none for a single one."""
    if len(iterations) < 2:
        return
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    part = ListedColormap(colormaps["viridis"]([0.9 * i / 255 for i in range(256)]))
    scale = ScalarMappable(Normalize(min(iterations), max(iterations)), part)
    bar = figure.colorbar(scale, ax=axes, label="iteration", pad=0.02)
    if len(iterations) <= 8:
        bar.set_ticks(list(iterations))
        bar.minorticks_off()
