"""A sharded run of Megatron writes a dump; what is read of it is compared with the single-process truth."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.matrix import Cell, relative
from tests.support import gpt, oracle, ranks, truths
from tests.support.dumps import healthy
from tests.support.pool import run


def compare(case: gpt.Case, sites: list[str] | None = None, **settings: Any) -> list[Cell]:
    """Dump sites and gradients of a case, and of its one-rank twin; each is as one process has it."""
    every = oracle.sites_of(case)  # who is routed where, too, by which experts' rows are put in order
    sites = every if sites is None else sites
    truth = truths.of(case.single(), every, [])
    with tempfile.TemporaryDirectory() as folder:
        for one in (case, case.single()):
            path = str(Path(folder) / ("one" if one is not case else "many"))
            added = run(one.world, write, one, truth["state"], sites, path, settings, timeout=300)
            assert not any(added), f"a dump communicates nothing: {added}"
            healthy(path)
            assert not (lost := _missing_microbatches(path, one.microbatches)), f"{one.name}: lost {lost}"
        return [*_cells(case, sites, truth, Path(folder) / "many", Path(folder) / "one")]


def write(case: gpt.Case, state: dict[str, Tensor], sites: list[str], path: str, settings: Any) -> Any:
    """One step with a dump; the collectives that it has more than a step without."""
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    rank = ranks.mine(chunks)
    with ranks.counting() as plain:
        losses = gpt.step(case, chunks, rank)
    dump = mf.Dump(path, sites, **{"gradients": True, "order": "blocks", **settings})
    with mf.attach(chunks, dumps=dump):
        assert gpt.step(case, chunks, rank) == losses, "a dump changes nothing"
        with ranks.counting() as dumped:
            assert gpt.step(case, chunks, rank) == losses, "a dump changes nothing"
    return {n: dumped[n] - plain[n] for n in {*plain, *dumped} if dumped[n] != plain[n]}


def _cells(case: gpt.Case, sites: list[str], truth: Any, many: Path, one: Path) -> list[Cell]:
    import megatron_flex as mf

    out = []
    microbatches = case.single().microbatches  # the one process divides its loss by so many
    with mf.open_dump(many) as dump, mf.open_dump(one) as twin:
        assert dump.iterations == twin.iterations == [0, 1]
        for site in sites:
            for name, wanted in ((site, truth["values"]), (f"{site}.grad", truth["gradients"])):
                if site not in wanted:
                    continue
                want = [t if name == site else t * microbatches for t in wanted[site]]
                calls = len(want) // microbatches
                for call in range(calls):
                    key = (name, call) if calls > 1 else name
                    whole = expected(site, want[call::calls], dump.site_records[site].layout, truth)
                    got, theirs = dump[key].torch(), twin[key].torch()
                    errors = [relative(step, whole) for step in (*got, *theirs)]
                    errors += [relative(got, theirs), 0.0 if whole.numel() else float("inf")]
                    check = "dump" if name == site else "dump of gradients"
                    out.append(Cell(case.name, site, check, max(errors)))
    return [replace(c, model=case.model) for c in out]


def _missing_microbatches(path: str, count: int) -> list[tuple[Any, ...]]:
    """Iteration, site, kind, call and microbatches of what only some microbatches of a call have."""
    import megatron_flex as mf

    lost = []
    with mf.open_dump(path) as dump:
        for which in dump.iteration_keys:
            written = dump.stored_iteration(which)
            seen: dict[tuple[Any, ...], set[int]] = {}
            for rank in written.run.coords:
                for part in written.paths(rank):
                    for entry in dump.files.open(part).part.index.entries:
                        if entry.kind in ("value", "gradient") and entry.route is None:
                            of_call = which[0], entry.site, entry.kind, entry.call
                            seen.setdefault(of_call, set()).add(entry.microbatch)
            lost += [(*of_call, found) for of_call, found in seen.items() if found != set(range(count))]
    return lost


def expected(site: str, microbatches: list[Tensor], layout: dict[str, Any], truth: Any) -> Tensor:
    """What the array has of an iteration: microbatches one behind the other, by sample and token."""
    names = [d["name"] for d in layout["dims"]]
    names = [names[i] for i in layout.get("permute", range(len(names)))]
    if "local_experts" in site:
        microbatches, names = (
            [_by_token(site, rows, truth["values"], n) for n, rows in enumerate(microbatches)],
            ["s", "b", *names[1:]],
        )
    front = [names.index(n) for n in ("b", "s") if n in names]
    return torch.cat([t.movedim(front, list(range(len(front)))) for t in microbatches])


def _by_token(site: str, rows: Tensor, values: dict[str, list[Tensor]], microbatch: int) -> Tensor:
    """`[t, ...]` of an expert as `[s, b, ...]`: zeros where it does not get the token."""
    layer, _, path = site.partition(".experts.local_experts.")
    chosen = values[f"{layer}.experts:indices"][microbatch]
    mine = (chosen == int(path.partition(".")[0].partition(":")[0])).any(-1)
    out = rows.new_zeros((*mine.shape, *rows.shape[1:]))
    out[mine] = rows
    return out
