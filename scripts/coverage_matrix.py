"""Write docs/coverage.md and the table in docs/frameworks.md from the cells that a run of the matrix left."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, SUMMARY = ROOT / "docs" / "coverage.md", ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- coverage -->\n", "<!-- /coverage -->"
CHECKS = ("value", "gradient", "edited")  # an entry of the tables has these, in this order
FIGURES = (*CHECKS, "dump")  # and a row of the summary has these
BOUND = 1e-5  # of a table that says no other
Cell = dict[str, Any]

HEAD = """# Coverage

Written by `scripts/coverage_matrix` from a run of the tests, never by hand: {commit};
{versions}; {seconds} of tests on {cores} cores.
Each configuration is compared with a single process of plain Megatron on the same weights and data, whose
tensors are taken by plain PyTorch hooks (other frameworks and plain modules: with plain torch; where a title
says so, with TransformerLens). An entry has three figures, each the greatest difference
relative to the greatest entry of the true tensor, over all layers and microbatches: the **value** / the
**gradient** / the effect of an **edit** there (on the loss and on every parameter's gradient, the greater; of
runs over tokens, on the logits). `-`: not checked there (integers have no gradient; edits are checked in the
last layers, and where one stage hands on to the next). What is read back from dumps is in the counts, and
in the summary of frameworks.md. The bound is 1e-5 (fp32) where a table says no other;
what is beyond it is bold. A framework that this machine has not is named with the reason.

{counts}
"""

FORMULAS = "Rows are names, and what a cache computes; one process has plain formulas."
FEATURES = {  # what stands behind the models, in this order: the rows of its table, where they are no sites
    "GPT, data parallel samples together": "",
    "GPT, ready-made edits": "Rows are presets, each against its formula on one process.",
    "GPT, values shared by edits": "Rows are sets of edits that hand values on from layer to layer; "
    "`once` and `replicated` say where they run, in turn.",
    "GPT, modules trained in hooks": "Rows are the modules' parameters, in several steps.",
    "GPT, by TransformerLens' names": FORMULAS,
    "Other models, by TransformerLens' names": FORMULAS,
    "GPT-2 and Llama, against TransformerLens": "Rows are names, and methods of the cache, as it has them.",
    "GPT, interface of FlexModel (2023)": "Rows are the calls that register a hook.",
    "The same hooks, framework by framework": "The same hook code on one model of the same weights: "
    "rows are the names that one process has.",
    "fairscale": "",
    "apex": "",
    "PyTorch": "",
    "Hugging Face": "",
    "DeepSpeed": "",
    "Plain modules": "",
}
FRAMEWORKS = {  # each has a section, run or not: the packages that it is run with
    "fairscale": ("fairscale",),
    "apex": ("apex",),
    "PyTorch": ("torch",),
    "Hugging Face": ("transformers", "accelerate"),
    "DeepSpeed": ("deepspeed",),
}


def kind(site: str) -> str:
    """A site with the numbers of layers and experts folded away."""
    site = re.sub(r"local_experts\.\d+", "local_experts.E", site)
    return re.sub(r"(layers|blocks)\.\d+", r"\1.N", site).replace("final_norm", "final_layernorm")


def told(case: str) -> str:
    """A configuration's name as Markdown shows it."""
    return re.sub(r"([|*])", r"\\\1", case)


def models(cells: list[Cell], not_run: Iterable[str] = ()) -> list[str]:
    """The models, the plain one first, and then the features, with those that were not run."""
    order = ["GPT", "", *FEATURES]
    found = dict.fromkeys([*(str(c["model"]) for c in cells), *not_run])
    return sorted(found, key=lambda model: order.index(model if model in order else ""))


def missing(run: dict[str, Any]) -> dict[str, str]:
    """The frameworks of which a run has no cells, and why."""
    have = {c["model"] for c in run["cells"] if not c["hidden"]}
    return {name: why_not(name, run) for name in FRAMEWORKS if name not in have}


def why_not(name: str, run: dict[str, Any]) -> str:
    """Why a framework was not run: what its tests said when they were skipped, or what is not installed."""
    absent = [p for p in FRAMEWORKS[name] if run.get("packages", {}).get(p) is None]
    if absent:
        verb = "are" if len(absent) > 1 else "is"
        return f"{' and '.join(absent)} {verb} not installed"
    stems = tuple(f"test_{p}" for p in FRAMEWORKS[name])
    said = {why: None for test, why in run.get("skipped", {}).items() if Path(test).name.startswith(stems)}
    return "; ".join(said) or "no test of it was chosen"


def group_of(check: str) -> str | None:
    """Which figure of an entry a check belongs to: `trained value` is a value, `edited logits` an edit's."""
    first, last = check.split()[0], check.split()[-1]
    return next((word for word in (first, last) if word in FIGURES), None)


def figure(cells: list[Cell]) -> str:
    """The greatest error of some cells; marked where it is beyond the bound or upstream's own."""
    if not cells:
        return "-"
    worst = max(cells, key=lambda c: float(c["error"]))
    text = f"{float(worst['error']):.0e}".replace("e-0", "e-").replace("0e+00", "0")
    return f"**{text}**" if any(not c["good"] for c in cells) else text + ("†" if worst["upstream"] else "")


def counts(cells: list[Cell]) -> str:
    """How many cells of each check there are, how many agree and what the greatest error is."""
    lines = ["| check | cells | in agreement | bound | greatest error | where |", "|---" * 6 + "|"]
    for check in dict.fromkeys(c["check"] for c in cells):
        mine = [c for c in cells if c["check"] == check and not c["upstream"]]
        if mine:
            worst = max(mine, key=lambda c: float(c["error"]))
            good = sum(c["good"] for c in mine)
            where = f"`{worst['site']}`, {told(worst['case'])}"
            error, within = float(worst["error"]), " or ".join(bounds(mine))
            lines.append(f"| {check} | {len(mine)} | {good} | {within} | {error:.1e} | {where} |")
    good = sum(c["good"] for c in cells)
    return f"**{len(cells)} cells, {good} in agreement.**\n\n" + "\n".join(lines) + "\n"


def bounds(cells: list[Cell]) -> list[str]:
    """The bounds of some cells, in words."""
    return [f"{b:.0e}".replace("e-0", "e-") for b in sorted({float(c["bound"]) for c in cells})]


def section(model: str, cells: list[Cell], not_run: str = "") -> Iterator[str]:
    """One model's title, what its rows and bounds are where they are not as ever, and its table."""
    yield f"\n## {model}\n"
    if not_run:
        yield f"**Not run**: {not_run}.\n"
        return
    notes = [FEATURES[model]] if FEATURES.get(model) else []
    if {float(c["bound"]) for c in cells} != {BOUND}:
        notes.append(f"Bound: {' or '.join(bounds(cells))}.")
    if notes:
        yield " ".join(notes) + "\n"
    yield from table(cells, "name" if FEATURES.get(model) else "site")


def table(cells: list[Cell], what: str) -> Iterator[str]:
    """A row for each kind of site, a column for each configuration."""
    cases = list(dict.fromkeys(c["case"] for c in cells))
    rows = dict.fromkeys(kind(c["site"]) for c in cells if c["site"] != "(none)")
    yield f"| {what} | " + " | ".join(map(told, cases)) + " |"
    yield "|---" * (len(cases) + 1) + "|"
    whole = {case: [c for c in cells if c["case"] == case and c["site"] == "(none)"] for case in cases}
    if any(whole.values()):
        yield (
            "| *no hook: loss and parameter gradients* | "
            + " | ".join(figure(whole[c]) for c in cases)
            + " |"
        )
    for row in rows:
        entries = []
        for case in cases:
            mine = [c for c in cells if c["case"] == case and kind(c["site"]) == row]
            hidden = next((c["number"] for c in mine if c["hidden"]), None)
            figures = [figure([c for c in mine if group_of(c["check"]) == g]) for g in CHECKS]
            entries.append(f"hidden: {hidden}" if hidden else " / ".join(figures) if mine else "")
        yield f"| `{row}` | " + " | ".join(entries) + " |"


def reasons(cells: list[Cell]) -> Iterator[str]:
    """Why places are hidden and where upstream differs; hidden cells get the number of their reason."""
    found: dict[str, int] = {}
    for cell in (c for c in cells if c["hidden"]):
        cell["number"] = found.setdefault(cell["hidden"], len(found) + 1)
    if found:
        yield "## Hidden places\n"
        yield "Registering a hook there is an error with these words; a shard is never given for a whole.\n"
        yield from (f"{number}. {why}" for why, number in found.items())
        yield ""
    upstream = list(dict.fromkeys(c["upstream"] for c in cells if c["upstream"]))
    if upstream:
        yield "## Where upstream itself differs from one device (†)\n"
        yield "The figure is that of plain Megatron without the library; the library equals that run. Where a"
        yield "table says that upstream's gradient is mended, the tests do that, and nothing else."
        for why in upstream:
            mine = [c for c in cells if c["upstream"] == why]
            own = max(float(c["own"]) for c in mine)
            yield f"\n- {why} ({len(mine)} cells, greatest difference from plain Megatron {own:.1e})"
        yield ""


def summary(cells: list[Cell], not_run: dict[str, str]) -> str:
    """The summary in docs/frameworks.md: one row for each model."""
    compared = [c for c in cells if not c["hidden"]]
    good = sum(c["good"] for c in compared)
    lines = [
        f"{len(compared)} cells, {good} in agreement. Site by site: [coverage](coverage.md).",
        "",
    ]
    lines += [
        "| model, feature | configurations | kinds of sites, names | cells | "
        "value | gradient | edit | dump |",
        "|---" * 8 + "|",
    ]
    for model in models(compared, not_run):
        if model in not_run:
            lines.append(f"| {model} | not run: {not_run[model]} | | | | | | |")
            continue
        mine = [c for c in compared if c["model"] == model]
        sites = {kind(c["site"]) for c in mine} - {"(none)"}
        own = [c for c in mine if not c["upstream"]]
        figures = [figure([c for c in own if group_of(c["check"]) == g]) for g in FIGURES]
        count = len({c["case"] for c in mine})
        within = [] if {float(c["bound"]) for c in mine} == {BOUND} else bounds(mine)
        name = f"{model} (bound {' or '.join(within)})" if within else model
        lines.append(f"| {name} | {count} | {len(sites)} | {len(mine)} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def main(path: str) -> None:
    """Write both."""
    run = json.loads(Path(path).read_text(encoding="utf-8"))
    cells: list[Cell] = run["cells"]
    for cell in cells:
        cell["good"] = float(cell["own"] if cell["upstream"] else cell["error"]) <= float(cell["bound"])
    why = list(reasons(cells))
    minutes = f"{run['seconds'] / 60:.0f} minutes"
    sums = counts([c for c in cells if not c["hidden"]])
    parts = [
        HEAD.format(
            commit=run.get("commit", "an unknown commit"),
            versions=run["versions"],
            seconds=minutes,
            cores=run["cores"],
            counts=sums,
        )
    ]
    not_run = missing(run)
    for model in models(cells, not_run):
        parts += section(model, [c for c in cells if c["model"] == model], not_run.get(model, ""))
    PAGE.write_text("\n".join([*parts, "", *why]).rstrip() + "\n", encoding="utf-8")
    head, _, rest = SUMMARY.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        sys.exit(f"error: {SUMMARY.name} has no '{BEGIN.strip()}' ... '{END}': put them back")
    SUMMARY.write_text(head + BEGIN + summary(cells, not_run) + END + tail, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and the table in {SUMMARY.name}: {len(cells)} cells")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/coverage_matrix.py FILE, which 'scripts/test --cells FILE' wrote")
    main(sys.argv[1])
