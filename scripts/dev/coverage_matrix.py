"""Write docs/contributing/coverage.md and build/coverage.csv from a run of the matrix."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE, FIGURES = ROOT / "docs" / "contributing" / "coverage.md", ROOT / "build" / "coverage.csv"
CHECKS = ("value", "gradient", "edited")  # a row of the file has these, in this order
SUMMED = (*CHECKS, "dump")  # and a row of the summary has these
COLUMNS = ("model", "site", "configuration", "value", "gradient", "edit", "note")  # of the file
UNHOOKED = "no hook: loss and parameter gradients"
BOUND = 1e-5  # where a row says no other
Cell = dict[str, Any]
Row = tuple[str, ...]  # of the file: COLUMNS

HEAD = """# Coverage

Which hook points, features and frameworks are compared with a single process, and how closely they agree.
Written by `scripts/dev/coverage_matrix` from a run of the tests, never by hand:
{commit}; {versions}; {seconds} of tests on {cores} cores.

Each configuration is compared with a single process of plain Megatron on the same weights and data, whose
tensors are captured by plain PyTorch hooks. Other frameworks and plain modules are compared with plain torch
or, where the name says so, with TransformerLens. All runs are in fp32. An error is the greatest difference
over all layers and microbatches, divided by the greatest entry of the tensor of the single process.

{counts}{not_run}
## By model
The last four columns are the greatest errors.

{summary}
## By hook point
`scripts/dev/coverage_matrix` also writes `build/coverage.csv`, {rows} rows of `{columns}`.

In the file, `value` and `gradient` are errors of the captured tensor and of its gradient. `edit` is the
greatest error of the loss and of all parameters' gradients when the hook point is edited; in runs that
compute logits only, it is the error of the logits. An empty field was not checked: integers have no gradient,
and edits are checked in the last layers and where a pipeline stage sends to the next. `N` and `E` replace the
numbers of layers and experts. Dumps are in the counts above and in the summary by model. For some features,
the column `site` holds something else:

{features}
"""

FORMULAS = "names, and values that a cache computes, compared with formulas in one process"
FEATURES = {  # what follows the models, in this order: what `site` is in the file, where that is not one
    "GPT, data parallel samples together": "",
    "GPT, ready-made edits": "presets, each compared with its formula in one process",
    "GPT, linear edits": "edits that are linear maps, on the shard of each rank",
    "GPT, values shared by edits": "sets of edits that pass values from layer to layer; `once` and "
    "`replicated` name where the edits run",
    "GPT, modules trained in hooks": "parameters of the modules, in several steps",
    "GPT, by TransformerLens' names": FORMULAS,
    "Other models, by TransformerLens' names": FORMULAS,
    "GPT-2 and Llama, against TransformerLens": "names, and methods of the cache, compared with those of "
    "TransformerLens",
    "GPT, interface of FlexModel (2023)": "calls that register a hook",
    "The same hooks, framework by framework": "names of the single process; hook code and weights are "
    "the same in all frameworks",
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


def escape(case: str) -> str:
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
    """Why a framework was not run: why its tests were skipped, or what is not installed."""
    absent = [p for p in FRAMEWORKS[name] if run.get("packages", {}).get(p) is None]
    if absent:
        verb = "are" if len(absent) > 1 else "is"
        return f"{' and '.join(absent)} {verb} not installed"
    stems = tuple(f"test_{p}" for p in FRAMEWORKS[name])
    found = {why: None for test, why in run.get("skipped", {}).items() if Path(test).name.startswith(stems)}
    return "; ".join(found) or "no test of it was chosen"


def group_of(check: str) -> str | None:
    """Which figure of a row a check belongs to: `trained value` is a value, `edited logits` an edit's."""
    first, last = check.split()[0], check.split()[-1]
    return next((word for word in (first, last) if word in SUMMED), None)


def figure(cells: list[Cell]) -> str:
    """The greatest error of some cells; marked where it is beyond the bound or upstream's own."""
    if not cells:
        return "-"
    worst = max(cells, key=lambda c: float(c["error"]))
    text = f"{float(worst['error']):.0e}".replace("e-0", "e-").replace("0e+00", "0")
    return f"**{text}**" if any(not c["good"] for c in cells) else text + ("†" if worst["upstream"] else "")


def counts(cells: list[Cell]) -> str:
    """How many cells of each check there are, how many agree and what the greatest error is."""
    lines = ["| check | comparisons | in agreement | bound | greatest error | where |", "|---" * 6 + "|"]
    for check in dict.fromkeys(c["check"] for c in cells):
        mine = [c for c in cells if c["check"] == check and not c["upstream"]]
        if mine:
            worst = max(mine, key=lambda c: float(c["error"]))
            good = sum(c["good"] for c in mine)
            site = "" if worst["site"] == "(none)" else f"`{worst['site']}`, "
            where = site + escape(worst["case"])
            error, within = float(worst["error"]), " or ".join(bounds(mine))
            lines.append(f"| {check} | {len(mine)} | {good} | {within} | {error:.1e} | {where} |")
    good = sum(c["good"] for c in cells)
    return f"**{len(cells)} comparisons, {good} in agreement.**\n\n" + "\n".join(lines) + "\n"


def bounds(cells: list[Cell]) -> list[str]:
    """The bounds of some cells, in words."""
    return [f"{b:.0e}".replace("e-0", "e-") for b in sorted({float(c["bound"]) for c in cells})]


def rows(cells: list[Cell], model: str) -> Iterator[Row]:
    """The file's rows of one model: each configuration, and in it each kind of hook point."""
    for case in dict.fromkeys(c["case"] for c in cells):
        of_case = [c for c in cells if c["case"] == case]
        whole = [c for c in of_case if c["site"] == "(none)"]
        if whole:
            yield (model, UNHOOKED, case, figure(whole), "", "", note(whole))
        for site in dict.fromkeys(kind(c["site"]) for c in of_case if c["site"] != "(none)"):
            mine = [c for c in of_case if kind(c["site"]) == site]
            hidden = next((c["number"] for c in mine if c["hidden"]), None)
            if hidden:
                yield (model, site, case, "", "", "", f"hidden: {hidden}")
            else:
                errors = (figure([c for c in mine if group_of(c["check"]) == g]) for g in CHECKS)
                yield (model, site, case, *errors, note(mine))


def note(cells: list[Cell]) -> str:
    """What a row says beside its figures."""
    words = ["beyond the bound"] if any(not c["good"] for c in cells) else []
    words += ["upstream differs"] if any(c["upstream"] for c in cells) else []
    return "; ".join([*words, *(f"bound {b}" for b in bounds(cells) if float(b) != BOUND)])


def write_rows(table: Iterable[Row]) -> int:
    """Write the file, without the marks that the figures have on a page; the number of rows."""
    found = [[re.sub(r"[*†]", "", x) if 3 <= n < 6 else x for n, x in enumerate(row)] for row in table]
    found = [["" if x == "-" else x for x in row] for row in found]
    found = [row for row in found if any(row[3:])]  # others have cells of dumps alone
    FIGURES.parent.mkdir(exist_ok=True)
    with FIGURES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(found)
    return len(found)


def write_page(
    about: dict[str, Any],
    counted: str,
    not_run: dict[str, str],
    table: list[Row],
    why: list[str],
    by_model: str,
) -> None:
    """Write the page, and the file that it points to."""
    features = [f"- {name}: {text}" for name, text in FEATURES.items() if text]
    head = HEAD.format(
        **about,
        counts=counted,
        summary=by_model,
        not_run="".join(f"\n**Not run**: {name}, because {reason}.\n" for name, reason in not_run.items()),
        rows=f"{write_rows(table):,}",
        columns=", ".join(COLUMNS),
        features="\n".join(features),
    )
    PAGE.write_text("\n".join([head, *why]).rstrip() + "\n", encoding="utf-8")


def reasons(cells: list[Cell]) -> Iterator[str]:
    """Why hook points are hidden and where upstream differs; hidden cells get the number of their reason."""
    found: dict[str, int] = {}
    for cell in (c for c in cells if c["hidden"]):
        cell["number"] = found.setdefault(cell["hidden"], len(found) + 1)
    if found:
        yield "## Hidden hook points\n"
        yield "Registering a hook at these hook points raises an error with one of these messages."
        yield "The file refers to them by number.\n"
        yield from (f"{number}. {why}" for why, number in found.items())
        yield ""
    upstream = list(dict.fromkeys(c["upstream"] for c in cells if c["upstream"]))
    if upstream:
        yield "## Where Megatron itself differs from one device (†)\n"
        yield "Runs with and without this package agree, and both differ from one device. The figure is their"
        yield "difference from plain Megatron in the same layout. If a model's name says that upstream's"
        yield "gradient is patched, the tests correct that gradient, and nothing else."
        for why in upstream:
            mine = [c for c in cells if c["upstream"] == why]
            own = max(float(c["own"]) for c in mine)
            yield f"\n- {why} ({len(mine)} cells, greatest difference from plain Megatron {own:.1e})"
        yield ""


def summary(cells: list[Cell], not_run: dict[str, str]) -> str:
    """One row for each model."""
    compared = [c for c in cells if not c["hidden"]]
    lines = [
        "| model, feature | configurations | kinds of hook points, names | comparisons | "
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
        figures = [figure([c for c in own if group_of(c["check"]) == g]) for g in SUMMED]
        count = len({c["case"] for c in mine})
        within = [] if {float(c["bound"]) for c in mine} == {BOUND} else bounds(mine)
        name = f"{model} (bound {' or '.join(within)})" if within else model
        lines.append(f"| {name} | {count} | {len(sites)} | {len(mine)} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def read(paths: Iterable[str]) -> dict[str, Any]:
    """Read the files of one run of the matrix, or of several runs of one commit, as one run."""
    runs = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    commits = dict.fromkeys(run.get("commit", "an unknown commit") for run in runs)
    if len(commits) > 1:
        sys.exit(
            f"error: the files are of different commits ({'; '.join(commits)}): run the matrix on one of them"
        )
    packages: dict[str, str | None] = {}
    for run in runs:
        for name, version in run.get("packages", {}).items():
            packages[name] = packages.get(name) or version
    return runs[0] | {
        "packages": packages,
        "versions": ", ".join(f"{n} {v}" for n, v in packages.items() if v) or runs[0]["versions"],
        "skipped": {test: why for run in runs for test, why in run.get("skipped", {}).items()},
        "seconds": sum(run["seconds"] for run in runs),
        "cells": [cell for run in runs for cell in run["cells"]],
    }


def main(*paths: str) -> None:
    """Write both."""
    run = read(paths)
    cells: list[Cell] = run["cells"]
    for cell in cells:
        cell["good"] = float(cell["own"] if cell["upstream"] else cell["error"]) <= float(cell["bound"])
    why = list(reasons(cells))
    about = {
        "commit": run.get("commit", "an unknown commit"),
        "versions": run["versions"],
        "seconds": f"{run['seconds'] / 60:.0f} minutes",
        "cores": run["cores"],
    }
    not_run = missing(run)
    names = [name for name in models(cells) if name not in not_run]
    table = [row for name in names for row in rows([c for c in cells if c["model"] == name], name)]
    counted = counts([c for c in cells if not c["hidden"]])
    write_page(about, counted, not_run, table, why, summary(cells, not_run))
    print(f"wrote {PAGE.name} and {FIGURES.name}: {len(cells)} cells")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: scripts/dev/coverage_matrix.py FILE ..., which 'scripts/test --cells FILE' wrote")
    main(*sys.argv[1:])
