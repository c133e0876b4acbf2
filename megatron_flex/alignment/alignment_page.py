"""An alignment as an HTML page: the two models side by side, layer by layer, with both verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_flex.page.html_page import fill_template, read_asset, write_page_text
from megatron_flex.wording import count_words

Json = Mapping[str, Any]
ASSETS = "alignment"
NO_CAUSE = "None of the causes that are tested explains the difference."
ACCUMULATED = (
    "accumulated",
    "As the models run",
    "with the errors of earlier layers; of a layer, the greatest error over its tolerance",
)
ISOLATED = ("isolated", "With equal layer input", "each layer gets the input that Hugging Face has")
GRADIENTS = "gradients"


def alignment_html(alignment: Json) -> str:
    """The page.

    Args:
        alignment: an alignment as `Alignment.to_json` returns it, or read from JSON.
    """
    return fill_template(
        str(alignment["model"]),
        "\n".join(_content(alignment)),
        ("theme.js", f"{ASSETS}/page.js"),
        style=read_asset(f"{ASSETS}/page.css"),
        attributes=' class="align-page"',
    )


def write_alignment(alignment: Json, path: str | PathLike[str]) -> Path:
    """Write the page atomically.

    Args:
        alignment: as for `alignment_html`.
        path: the file; an existing one is replaced.

    Raises:
        FlexError: it cannot be written.
    """
    return write_page_text(alignment_html(alignment), path)


def _describe_extent(alignment: Json) -> str:
    words = [count_words(len(alignment["sites"]), "hook point")]
    if alignment["gradients"]:
        words.append(count_words(len(alignment["gradients"]), "gradient"))
    runs = count_words(int(alignment["runs"]), "run")
    words.append(f"{runs} of the Megatron model" if alignment["isolates"] else "from two dumps")
    return "  ·  ".join(words)


def _content(alignment: Json) -> Iterator[str]:
    verdicts = (ACCUMULATED, ISOLATED) if alignment["isolates"] else (ACCUMULATED,)
    yield (
        f'<header id="top"><h1 id="title">{escape(str(alignment["model"]))}</h1>'
        f'<p id="about">{escape(_describe_extent(alignment))}</p><div id="tools"></div></header>'
        '<main class="align">'
    )
    yield from _summary(alignment)
    yield _strip(alignment, verdicts)
    yield _heads(verdicts)
    layers = {layer["part"]: layer for layer in alignment["layers"]}
    for part, layer in layers.items():
        sites = [site for site in alignment["sites"] if site["part"] == part]
        yield from _part(part, sites, alignment, verdicts, _layer_cells(layer, verdicts))
    if alignment["gradients"]:
        wrong = sum(_differs(site, "accumulated") for site in alignment["gradients"])
        cells = [_cell(bool(wrong), f"{count_words(wrong, 'differs', 'differ')}" if wrong else "agree")]
        yield from _part(GRADIENTS, alignment["gradients"], alignment, (ACCUMULATED,), cells)
    if alignment["uncompared"]:
        yield _uncompared(alignment["uncompared"])
    yield "</main>"


def _summary(alignment: Json) -> Iterator[str]:
    """The finding in words, with the likely causes."""
    first = _first(alignment)
    bad = "" if first is None else " align-bad"
    yield f'<section class="align-verdict{bad}" aria-label="Result">'
    if first is None:
        yield f"<h2>The models agree</h2><p>{escape(alignment['summary'][0])}</p>"
    else:
        yield (
            f'<h2>The models differ first at <a href="#first"><code>{escape(first["site"])}</code></a></h2>'
            f"<p>{escape(alignment['summary'][0].removeprefix('differs: '))}</p>"
        )
        causes = [f"<li>Likely cause: {escape(cause)}</li>" for cause in alignment["causes"]]
        yield f'<ul class="align-cause">{"".join(causes or [f"<li>{NO_CAUSE}</li>"])}</ul>'
    yield from (f"<p>{escape(note)}</p>" for note in alignment["notes"])
    yield "</section>"


def _strip(alignment: Json, verdicts: Sequence[tuple[str, str, str]]) -> str:
    """A link to each part, with a bar for each verdict."""
    links = []
    for layer in alignment["layers"]:
        bars, words = [], []
        for kind, name, _ in verdicts:
            bars.append('<i class="align-bad"></i>' if layer[kind] else "<i></i>")
            words.append(f"{name}: {'differs' if layer[kind] else 'agrees'}")
        links.append(
            f'<a href="#part-{escape(layer["part"])}" title="{escape("; ".join(words))}">'
            f"{escape(layer['part'])}{''.join(bars)}</a>"
        )
    return f'<nav class="align-strip" aria-label="Parts of the models">{"".join(links)}</nav>'


def _heads(verdicts: Sequence[tuple[str, str, str]]) -> str:
    middle = "".join(f"<span><b>{name}</b>{why}</span>" for _, name, why in verdicts)
    return (
        f'<div class="align-heads {_row_class(verdicts)}"><span><b>Hugging Face</b></span>{middle}'
        '<span class="align-here"><b>Megatron</b></span></div>'
    )


def _row_class(verdicts: Sequence[Any]) -> str:
    return "align-row" if len(verdicts) > 1 else "align-row align-no-isolated"


def _layer_cells(layer: Json, verdicts: Sequence[tuple[str, str, str]]) -> list[str]:
    out = []
    for kind, _, _ in verdicts:
        share = float(layer[f"{kind}_error"])
        out.append(_cell(bool(layer[kind]), f"{'differs' if layer[kind] else 'agrees'}, {share:.2g}"))
    return out


def _part(
    part: str,
    sites: Sequence[Json],
    alignment: Json,
    verdicts: Sequence[tuple[str, str, str]],
    cells: Sequence[str],
) -> Iterator[str]:
    """A part of the models that can be opened, and its hook points."""
    first = _first(alignment)
    megatron_path = _common_path([site["site"] for site in sites])
    hf_path = _common_path([point for site in sites for point in site["other"].split(" + ")])
    opened = " open" if first is not None and any(site is first for site in sites) else ""
    title = part if part == GRADIENTS else megatron_path or part
    yield (
        f'<details class="align-part" id="part-{escape(part)}"{opened}>'
        f'<summary class="{_row_class(verdicts)}">'
        f"<code>{escape(hf_path or part)}</code>{''.join(cells)}"
        f'<code class="align-here">{escape(title)}</code></summary><div class="align-sites">'
    )
    for site in sites:
        yield _site(site, megatron_path, hf_path, verdicts, site is first)
    yield "</div></details>"


def _site(
    site: Json,
    megatron_path: str,
    hf_path: str,
    verdicts: Sequence[tuple[str, str, str]],
    is_first: bool,
) -> str:
    cells = []
    for kind, _, _ in verdicts:
        error, bound, wrong = site[kind]["error"], site[kind]["tolerance"], _differs(site, kind)
        cells.append(_cell(wrong, f"{float(error):.1e} {'&gt;' if wrong else '≤'} {float(bound):.1e}"))
    points = " + ".join(_shortened(point, hf_path) for point in site["other"].split(" + "))
    details = f'<span class="align-details">{_describe_first(site)}</span>' if is_first else ""
    mark = ' align-first" id="first' if is_first else ""
    return (
        f'<div class="{_row_class(verdicts)}{mark}">'
        f'<code title="{escape(site["other"])}">{escape(points)}</code>'
        f'{"".join(cells)}<code class="align-here" title="{escape(site["site"])}">'
        f"{escape(_shortened(site['site'], megatron_path))}</code>{details}</div>"
    )


def _describe_first(site: Json) -> str:
    kind = "isolated" if _differs(site, "isolated") else "accumulated"
    worst, shape = site[kind]["worst"], " × ".join(map(str, site["shape"]))
    if worst is None:
        return "The first difference."
    place, megatron, hf = ", ".join(map(str, worst["index"])), float(worst["a"]), float(worst["b"])
    return escape(
        f"The first difference. Hugging Face has {hf:.6g} ({site['dtypes'][1]}) at [{place}] of {shape}, "
        f"and Megatron {megatron:.6g} ({site['dtypes'][0]})."
    )


def _cell(wrong: bool, text: str) -> str:
    return f'<span class="align-cell{" align-bad" if wrong else ""}">{text}</span>'


def _uncompared(uncompared: Mapping[str, str]) -> str:
    rows = [f"<li><code>{escape(n)}</code>: {escape(why)}</li>" for n, why in uncompared.items()]
    title = count_words(len(uncompared), "hook point was", "hook points were")
    return (
        f'<details class="align-part align-other"><summary>{title} not compared</summary>'
        f"<ul>{''.join(rows)}</ul></details>"
    )


def _first(alignment: Json) -> Json | None:
    """The verdict of the first site that differs."""
    return next(
        (s for s in (*alignment["sites"], *alignment["gradients"]) if s["site"] == alignment["first"]), None
    )


def _differs(site: Json, kind: str) -> bool:
    row = site[kind]
    return row is not None and not float(row["error"]) <= float(row["tolerance"])


def _common_path(names: Sequence[str]) -> str:
    """The module path that all names begin with."""
    paths = [name.partition(":")[0].split(".") for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _shortened(name: str, path: str) -> str:
    """A name without the path that the part has."""
    return name.removeprefix(path).removeprefix(".") if path else name
