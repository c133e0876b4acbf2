"""One cell after the other: each configuration x site x check, against the single-process run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support import design, gpt, local_layers, moe, oracle, truths
from tests.support.pool import run

BOUND = 1e-5  # of the greatest entry of the true tensor: fp32, summed in another order


@dataclass(frozen=True)
class Cell:
    """One comparison: the greatest difference relative to the greatest true entry.

    Where upstream's own sharded run, without the library, differs from one process, `upstream` says why;
    `error` is then that run's, and `own` how far the library is from that run. Where a place cannot be had,
    `hidden` says why, and nothing was compared.
    """

    case: str
    site: str
    check: str
    error: float
    bound: float = BOUND
    upstream: str = ""
    own: float = 0.0
    model: str = ""
    hidden: str = ""

    @property
    def good(self) -> bool:
        return (self.own if self.upstream else self.error) <= self.bound


def relative(got: Tensor, want: Tensor) -> float:
    """Greatest difference over greatest true entry; infinite for another shape or dtype, or a NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    if not want.is_floating_point():
        got, want = got.long(), want.long()
    scale = want.abs().max().item()
    error = (got - want).abs().max().item()
    result = error / scale if scale else error
    return result if result == result else float("inf")


def greatest(errors: Iterable[float]) -> float:
    """The greatest of some errors; infinite where one is no number, or there is none."""
    found = list(errors)
    return max(found) if found and all(e == e for e in found) else float("inf")


def judge(found: list[Cell], cells: list[Any]) -> None:
    """Count what was compared, and fail if some of it is not what it should be."""
    cells += found
    bad = [c for c in found if not c.good]
    told = "\n".join(f"{c.case}, {c.site}, {c.check}: {c.error:.2e}" for c in bad[:20])
    assert not bad, f"{len(bad)} of {len(found)} cells differ from one process:\n{told}"


def compare(
    case: gpt.Case,
    sites: list[str] | None = None,
    edits: list[str] | None = None,
    among: Sequence[gpt.Case] = (),
) -> list[Cell]:
    """The cells of a configuration.

    Args:
        case: the configuration.
        sites: whose values and gradients are compared; all if None.
        edits: where it is edited; what the covering design says if None.
        among: the configurations that the design divides edits between; with none, all are its own.
    """
    sites = oracle.sites_of(case) if sites is None else sites
    edits = design.together(design.edits(case, among or [case]) if edits is None else edits)
    truth = _truth(case, sites, edits)
    answers = run(
        case.world, sharded, case, truth["state"], sites, edits, timeout=300, alone=truths.is_alone(case)
    )
    return cells_of(case, sites, edits, truth, answers)


def _truth(case: gpt.Case, sites: list[str], edits: list[str]) -> oracle.Truth:
    """What one process says; of Transformer Engine's layers, one with Megatron's local layers."""
    # Local layers have no grouped experts, and some adapters are made of Transformer Engine's linears.
    if case.te and not case.grouped and not case.adapters:
        return local_layers.truth_of(case, sites, edits)
    return truths.of(case.single(), sites, edits)


def cells_of(
    case: gpt.Case, sites: list[str], edits: list[str], truth: Any, answers: list[dict[str, Any]]
) -> list[Cell]:
    """All cells of a configuration, from what `oracle.run` and each rank's `sharded` gave."""
    found = [*_readings(case, sites, truth, answers), *_effects(case, edits, truth, answers)]
    found += [Cell(case.name, s, "hidden", 0.0, hidden=why) for s, why in answers[0]["hidden"].items()]
    return [replace(c, model=case.model) for c in found]


def sharded(case: gpt.Case, state: dict[str, Tensor], sites: list[str], edits: list[str]) -> dict[str, Any]:
    """What one rank of the sharded run gives back: leaders their readings, every rank its gradients."""
    import megatron_flex as mf

    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    flex = mf.FlexModel(chunks)
    mesh = flex.session.mesh
    rank = mesh["dp"].coord
    answer: dict[str, Any] = {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": rank}
    answer["sites"] = [s.name for s in flex.sites()]
    answer["hidden"] = {s.name: s.hidden for s in flex.sites() if s.hidden}
    answer["plain"] = gpt.step(case, chunks, rank), _gradients(flex, chunks)
    flex.restore()
    answer["read"] = {}
    for kind in ("forward", "tensor"):  # apart: with a gradient hook the model works on a copy of the tensor
        here = [s for s in sites if kind == "forward" or not moe.read_only(s)]
        with mf.attach(chunks, [mf.HookFunction(site, hook_type=kind) for site in here]) as flex:
            assert gpt.step(case, chunks, rank) == answer["plain"][0], "reading changes nothing"
            answer["read"].update({n: list(r) for n, r in flex.output_dict.items()})
    answer["edited"] = {}
    for together in edits:
        hooks = [mf.HookFunction(s, editing_function=_edit, save=False) for s in oracle.apart(together)]
        with mf.attach(chunks, hooks=hooks) as flex:
            answer["edited"][together] = gpt.step(case, chunks, rank), _gradients(flex, chunks)
    return answer


def _edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return oracle.edit(inputs)


def _gradients(flex: Any, chunks: list[Any]) -> dict[str, tuple[Any, Tensor]]:
    layouts = {p.name: p.layout.gradient() for p in flex.session.adapter.parameters()}
    return {
        name: (layouts[name], parameter.grad.clone())
        for root in chunks
        for name, parameter in gpt.global_names(root)
        if parameter.grad is not None
    }


def whole_gradients(answers: list[dict[str, Any]], pick: Any) -> dict[str, Tensor]:
    """Parameter gradients of the whole model, from all ranks' shards.

    Data and context parallel ranks are averaged, as Megatron's DistributedDataParallel does it.
    """
    from megatron_flex.layout import assemble, coordinates

    experts = _experts_gradients(answers, pick)
    replicas: dict[str, dict[int, Tensor]] = {}
    for dp in {a["dp"] for a in answers}:
        mine = [a for a in answers if a["dp"] == dp]
        for name in {n for a in mine for n in pick(a)} - experts.keys():
            holders = [a for a in mine if name in pick(a)]
            layout = pick(holders[0])[name][0]
            sizes = holders[0]["sizes"]
            shards = [
                next(pick(a)[name][1] for a in holders if all(a["coords"][x] == c for x, c in place.items()))
                for place in coordinates(layout, sizes)
            ]
            replicas.setdefault(name, {})[dp] = assemble(layout, shards, sizes) / sizes["cp"]
    return {name: torch.stack(list(found.values())).mean(0) for name, found in replicas.items()} | experts


def _experts_gradients(answers: list[dict[str, Any]], pick: Any) -> dict[str, Tensor]:
    """Of each expert, the sum over its copies, which see the tokens of different ranks."""
    from megatron_flex.layout import assemble

    copies: dict[str, dict[int, dict[int, tuple[Any, Tensor]]]] = {}
    for a in answers:
        for name in (n for n in pick(a) if ".experts." in n):
            copies.setdefault(name, {}).setdefault(a["coords"]["edp"], {})[a["coords"]["etp"]] = pick(a)[name]
    sizes, dp = answers[0]["sizes"], len({a["dp"] for a in answers}) * answers[0]["sizes"]["cp"]
    return {
        name: sum(assemble(c[0][0], [c[t][1] for t in sorted(c)], sizes) for c in found.values()) / dp
        for name, found in copies.items()
    }


def _readings(case: gpt.Case, sites: list[str], truth: Any, answers: list[dict[str, Any]]) -> list[Cell]:
    cells = []
    leaders = sorted((a for a in answers if a["read"]), key=lambda a: a["dp"])
    assert len(leaders) == case.dp, "one leader for each data parallel replica"
    for site in sites:
        for check, name, wanted in (
            ("value", site, truth["values"].get(site)),
            ("gradient", f"{site}.grad", truth["gradients"].get(site)),
        ):
            if wanted is None:
                continue
            got = [t for a in leaders for t in a["read"].get(name, [])]
            # the one process sees dp * microbatches of them, so its loss is divided by more; and Megatron
            # multiplies the loss of a context parallel rank by their number, to average over them later
            factor = case.dp * case.cp
            truths = [w * factor for w in wanted] if check == "gradient" else wanted
            errors = [relative(g, w) for g, w in zip(got, truths, strict=False)]
            complete = len(got) == len(wanted)
            cells.append(Cell(case.name, site, check, max(errors) if complete and errors else float("inf")))
    return cells


def _effects(case: gpt.Case, edits: list[str], truth: Any, answers: list[dict[str, Any]]) -> list[Cell]:
    def cells(site: str, check: str, pick: Any, want: tuple[list[float], dict[str, Tensor]]) -> list[Cell]:
        losses = [x for a in _last_stage(answers) for x in pick(a)[0]]
        found = whole_gradients(answers, lambda a: pick(a)[1])
        far = [abs(g - w) / abs(w) for g, w in zip(losses, want[0], strict=False)]
        loss = max(far) if len(losses) == len(want[0]) else float("inf")
        out = [Cell(case.name, site, f"{check} loss", loss)]
        missing = set(want[1]) ^ set(found)
        error = max(relative(found[n], want[1][n]) for n in want[1]) if not missing else float("inf")
        return [*out, Cell(case.name, site, f"{check} parameter gradients", error)]

    out = cells("(none)", "unedited", lambda a: a["plain"], (truth["losses"], truth["parameters"]))
    for site in edits:
        out += cells(site, "edited", lambda a, s=site: a["edited"][s], truth["edited"][site])
    return out


def _last_stage(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ranks that have losses, one for each data parallel replica, in order."""
    found: dict[int, dict[str, Any]] = {}
    for answer in answers:
        if answer["plain"][0]:
            found.setdefault(answer["dp"], answer)
    return [found[dp] for dp in sorted(found)]
