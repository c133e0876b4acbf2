"""`scripts/dev/exam`: silent bugs that others reported, beside clean runs, and the page of which are found.

Each row of `tests/support/exam` is run with its bug and without. What was said is kept in
tests/data/exam.json, a line for each row, and written into docs/contributing/exam.md and the README.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.exam import PAIRS, ROWS, STEPS
from tests.support.exam.runs import ask, stepped
from tests.support.planted import Bench

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "data" / "exam.json"
PAGE, README = ROOT / "docs" / "contributing" / "exam.md", ROOT / "README.md"
MAX_SAID = 220  # characters of the words that a cell quotes
HEADS = ["bug", "configuration", "Megatron", "found by", "first site", "cause", "clean run"]
PRECISIONS = ("fp32", "bf16")
PAIR_NAMES = [(c, p, f"clean pair {c.name}, {p}") for c in PAIRS for p in PRECISIONS]
TOOLS = {"compare": "`compare`", "verify": "`verify()`"}


def main(words: list[str] | None = None) -> None:
    """Run rows, and write what was said of them."""
    parser = argparse.ArgumentParser(prog="scripts/dev/exam", description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add(
        "--rows", default="", metavar="WORDS", help="only rows with these words in their names (default: all)"
    )
    add("--json", type=Path, default=KEPT, help="what was said, by row (default: tests/data/exam.json)")
    add(
        "--page", type=Path, default=PAGE, help="the page with the table (default: docs/contributing/exam.md)"
    )
    add("--readme", type=Path, default=README, help="the page with the sentence (default: README.md)")
    args = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    kept: dict[str, Any] = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="exam-") as folder:
        for row in (r for r in ROWS if args.rows in r.name):
            start = time.monotonic()
            kept[row.name] = ask(row, Bench(Path(folder))).to_json()
            print(f"{row.name}: {brief(kept[row.name])} ({time.monotonic() - start:.0f} s)", flush=True)
            keep(args.json, kept)
        for case, precision, name in PAIR_NAMES:
            if args.rows in name:
                kept[name] = stepped(case, precision, Bench(Path(folder)))
                print(f"{name}: {kept[name]}", flush=True)
                keep(args.json, kept)
    kept = keep(args.json, kept)
    sections = {"rows": table(kept), "sums": sums(kept), "pairs": pairs(kept)}
    texts_of = {args.page: sections, args.readme: {"sum": total(kept)}}
    for path, texts in texts_of.items():
        text = path.read_text(encoding="utf-8")
        for name, new in texts.items():
            text = put(text, name, new)
        path.write_text(text, encoding="utf-8")


def keep(path: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Write what was said, in the order of the table and without rows that are no longer in it."""
    names = [*(row.name for row in ROWS), *(name for *_, name in PAIR_NAMES)]
    kept = {name: said[name] for name in names if name in said}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(words)}" for name, words in kept.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return kept


def brief(said: Mapping[str, Any]) -> str:
    """One line of a terminal."""
    cause = {True: "cause named", False: "cause not named", None: "no cause to name"}[said["named"]]
    site = "first site right" if said["right"] else f"first site {said['first'] or 'none'}"
    clean = "clean run silent" if said["silent"] else f"CLEAN RUN: {said['clean']}"
    return ", ".join(["found" if said["found"] else "NOT FOUND", site, cause, clean])


# -- pages -------------------------------------------------------------------------------------------------


def put(page: str, name: str, text: str) -> str:
    """A page with the text between the two comments of that name replaced."""
    begin, end = f"<!-- {name}: written by scripts/dev/exam -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"the page has no {begin} and {end}: put them where the text shall be")
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(kept: Mapping[str, Any]) -> str:
    """The table of all rows that were run."""
    rows = [HEADS, ["---"] * len(HEADS)]
    rows += [cells(row, kept[row.name]) for row in ROWS if row.name in kept]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(row: Any, said: Mapping[str, Any]) -> list[str]:
    """The cells of one row."""
    there = "planted" if row.planted else "as it is"
    by = TOOLS[row.tool] if said["found"] else "**not found**"
    site = f"`{said['first']}`" if said["right"] else f"**other**: {said['first'] or 'none'}"
    clean = "silent" if said["silent"] else f"**alarm**: {shown(said['clean'], '')}"
    named = {True: "", False: "**not named**: ", None: "none to name: "}[said["named"]]
    cause = named + (shown(said["words"], row.cause) or "nothing is said")
    links = ", ".join(link(thread) for thread in row.threads)
    configuration = row.configuration.replace("|", "\\|")
    return [f"{row.bug} {links}", configuration, there, by, site, cause, clean]


def link(thread: str) -> str:
    """A link to `owner/repository#number`, the words after it beside the number."""
    place, _, rest = thread.partition("#")
    number = re.match(r"\d+", rest)
    assert number is not None, thread
    return f"[{place.partition('/')[2]}#{rest}](https://github.com/{place}/issues/{number[0]})"


def shown(words: str, cause: str) -> str:
    """The sentence that names the cause, or else the first; safe in a table."""
    sentences = words.split("; ")
    sentence = next((s for s in sentences if cause and re.search(cause, s, re.IGNORECASE)), sentences[0])
    sentence = " ".join(sentence.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return sentence if len(sentence) <= MAX_SAID else f"{sentence[:MAX_SAID]} ..."


def counted(kept: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of how many rows each thing holds."""
    rows = [kept[row.name] for row in ROWS if row.name in kept]
    causes = [r for r in rows if r["named"] is not None]
    return {
        "found": (sum(r["found"] for r in rows), len(rows)),
        "right": (sum(r["found"] and r["right"] for r in rows), len(rows)),
        "named": (sum(r["found"] and r["named"] for r in causes), len(causes)),
        "silent": (sum(r["silent"] for r in rows), len(rows)),
    }


def sums(kept: Mapping[str, Any]) -> str:
    """The sums above the table."""
    names = {
        "found": "found",
        "right": "at the right first site",
        "named": "cause named",
        "silent": "clean runs without an alarm",
    }
    return "\n".join(f"- {names[n]}: {k} of {all_}" for n, (k, all_) in counted(kept).items())


def pairs(kept: Mapping[str, Any]) -> str:
    """The table of clean pairs."""
    rows = [["layout", "steps of Adam", *PRECISIONS], ["---"] * (2 + len(PRECISIONS))]
    for case in PAIRS:
        found = {p: kept[name] for c, p, name in PAIR_NAMES if c is case and name in kept}
        texts = [
            f"{'silent' if f['silent'] else '**alarm**'}, {f['tensors']} tensors" for f in found.values()
        ]
        if len(texts) == len(PRECISIONS):
            rows.append([f"`{case.name}`", str(STEPS), *texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def total(kept: Mapping[str, Any]) -> str:
    """The sentence of the README."""
    by = counted(kept)
    return (
        f"`compare` and `verify()` [find {by['found'][0]} of {by['found'][1]} silent bugs]"
        "(docs/contributing/exam.md) from public issue trackers, reproduced in small models, and name the "
        f"right hook point or parameter for {by['right'][0]} of them. No alarm is raised for "
        f"{by['silent'][0]} of {by['silent'][1]} clean runs."
    )


if __name__ == "__main__":
    main()
