"""Shows what scripts/analyses found: python scripts/analyses_report.py FILE"""

from __future__ import annotations

import sys
from pathlib import Path

from quickstart_data import load, one_byte
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from megatron_flex.plot.canvas import show_token

SHOWN = 11  # positions of the text
CLEAR = 5  # how many times no preference a head must give, to count
SHADES = ("grey42", "cyan", "green", "yellow", "bright_red")  # of growing strength


def shade(strength: float) -> str:
    """A colour for a strength from 0 to 1."""
    return SHADES[min(int(strength * len(SHADES)), len(SHADES) - 1)]


def glyph(byte: float) -> str:
    """A byte as plots show it."""
    return show_token(one_byte(int(byte)))


def plain_table(title: str, *headings: str) -> Table:
    """A table without frills."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="right" if number else "left")
    return table


def heads(name: str, title: str, found: dict[str, Tensor]) -> Table:
    """Scores by layer and head, shaded by how far they are above no preference."""
    scores, uniform = found[name], found["uniform"].item()
    greatest = max(scores.max().item(), CLEAR * uniform)
    table = plain_table(title, "", *(f"head {n}" for n in range(scores.shape[1])))
    for layer, row in enumerate(scores.tolist()):
        cells = [Text(f"{s:.3f}", style=shade(s / greatest if s > uniform else 0.0)) for s in row]
        table.add_row(f"layer {layer}", *cells)
    return table


def strongest(name: str, found: dict[str, Tensor]) -> str:
    """The head with the greatest score, in words."""
    scores = found[name]
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    times = scores.max().item() / found["uniform"].item()
    return f"L{layer}H{head} ({scores.max().item():.3f}, {times:.1f} times no preference)"


def induction(console: Console, found: dict[str, Tensor]) -> None:
    """Heads, and whether the model uses what is repeated."""
    first, second = found["repeated"].tolist()
    console.print("[bold]Induction heads[/] on random bytes, twice")
    console.print(f"attention without any preference gives {found['uniform'].item():.3f}\n")
    console.print(heads("induction", "to the byte behind the earlier copy", found), "")
    console.print(heads("previous", "to the byte before", found), "")
    console.print(
        f"strongest: {strongest('induction', found)}; previous byte: {strongest('previous', found)}"
    )
    if found["induction"].max() < CLEAR * found["uniform"]:
        console.print("none is an induction head: this model has not been trained for long (--iterations)")
    console.print(f"loss {first:.3f} in the first half, {second:.3f} where it is repeated\n")


def lenses(console: Console, found: dict[str, Tensor]) -> None:
    """What each layer would say, and how good that is through either lens."""
    text, guesses, certainty = found["text"].tolist(), found["guesses"].tolist(), found["certainty"].tolist()
    last = len(guesses) - 1
    start = len(text) - SHOWN
    console.print(
        "[bold]Logit lens[/] on held-out text: the likeliest next byte, shaded by its probability\n"
    )
    table = plain_table("", "text", *(glyph(b) for b in text[start:]))
    for layer in range(last + 1):
        cells = [
            Text(glyph(b), style=shade(p))
            for b, p in zip(guesses[layer][start:], certainty[layer][start:], strict=True)
        ]
        table.add_row("the model" if layer == last else f"before layer {layer}", *cells)
    console.print(table, "")
    console.print(
        "[bold]Tuned lens[/]: an affine map for each layer's input, trained towards the model's output;"
    )
    console.print("its loss, and its divergence from the model in nats\n")
    table = plain_table("", "", "loss: logit lens", "tuned lens", "KL: logit lens", "tuned lens")
    plain, tuned, apart = (found[n].tolist() for n in ("lens losses", "tuned losses", "divergence"))
    for layer in range(last):
        row = (plain[layer], tuned[layer], apart[0][layer], apart[1][layer])
        table.add_row(f"before layer {layer}", *(f"{v:.3f}" for v in row))
    table.add_row("the model", f"{plain[last]:.3f}", "", "", "")
    console.print(table)


def report(path: Path) -> None:
    """Print everything."""
    found, console = load(path), Console(highlight=False)
    induction(console, found)
    lenses(console, found)


if __name__ == "__main__":
    report(Path(sys.argv[1]))
