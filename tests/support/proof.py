"""The same test of every framework: value, gradient, edit, parameter, trainable module, against one process.

A framework's test hands over a function that builds its part of the model on a rank; everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.adapters import list_model_chunks
from tests.distributed.matrix import Cell, greatest, judge, relative
from tests.support import llama
from tests.support.pool import run


@dataclass
class Built:
    """One rank's part of a model, and how a step of it is run.

    Attributes:
        model: what is handed to FlexModel, wrapped as people do.
        step: forward and backward on (tokens, labels); returns the loss, averaged over nothing.
        options: for FlexModel.
        name: a site of the single-process model to the name that it has here.
        averaged: whether gradients are those of the mean of the replicas' losses when a step is over.
        microbatches: in how many a step takes the samples; their losses are averaged.
        whole: what else makes a tensor comparable with one process's, site and tensor to tensor.
        stepped: whether `step` calls the model from a loop of its own, as stages of a pipeline are called.
        clear: drops all gradients; the model's `zero_grad()` if None.
        samples: of each replica's batch.
        gradient_scale: of hooks on gradients, for those of a microbatch's own loss.
    """

    model: Any
    step: Callable[[Tensor, Tensor], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    name: Callable[[str], str] = lambda site: site
    averaged: bool = False
    microbatches: int = 1
    whole: Callable[[str, Tensor], Tensor] = lambda site, tensor: tensor
    stepped: bool = False
    clear: Callable[[], None] | None = None
    samples: int = llama.SAMPLES
    gradient_scale: Literal["raw", "loss"] = "raw"

    def run(self, flex: mf.FlexModel, data: tuple[Tensor, Tensor]) -> Tensor:
        """A step under hooks."""
        with flex.step() if self.stepped else nullcontext():
            return self.step(*data)


Build = Callable[..., Built]


def _edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return llama.mixed(inputs)


def _bias(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


def probe() -> nn.Linear:
    """A trainable module, with the same weights everywhere."""
    torch.manual_seed(3)
    return nn.Linear(llama.HIDDEN, llama.HIDDEN)


PROBED = "layers.1:output"


def answer(build: Build, args: Sequence[Any], sites: Sequence[str], edits: Sequence[str]) -> dict[str, Any]:
    """What one rank says."""
    built = build(*args)
    flex = mf.FlexModel(built.model, **built.options)
    mesh = flex.session.mesh
    replica = mesh["dp"].coord
    data = llama.batch(replica, built.samples)
    out: dict[str, Any] = {
        "replica": replica,
        "leader": flex.is_leader,
        "edited": {},
        "averaged": built.averaged,
        "microbatches": built.microbatches,
        "samples": built.samples,
    }
    out["mesh"] = mesh.describe()
    plain = built.run(flex, data)
    clear(built)
    flex.restore()
    for kind in ("forward", "tensor"):
        scale = built.gradient_scale if kind == "tensor" else "raw"
        hooks = [mf.HookFunction(built.name(s), hook_type=kind, gradient_scale=scale) for s in sites]
        with mf.attach(built.model, hooks, **built.options) as flex:
            loss = built.run(flex, data)
            assert torch.equal(loss, plain), "reading changes nothing"
            # by the single process's names
            names = {built.name(s): s for s in sites}
            for name, read in flex.output_dict.items():
                at, grad = (name.removesuffix(".grad"), ".grad") if name.endswith(".grad") else (name, "")
                site = names[at]
                out.setdefault("read", {})[site + grad] = built.whole(site, _joined(read))
            if kind == "tensor":
                out["gradients"] = _gradients(flex)
                out["parameters"] = {n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)}
        clear(built)
    out["loss"] = plain.detach()
    for site in edits:
        hook = mf.HookFunction(built.name(site), editing_function=_edit, save=False)
        with mf.attach(built.model, [hook], **built.options) as flex:
            loss = built.run(flex, data)
            out["edited"][site] = loss.detach(), _gradients(flex)
        clear(built)
    with mf.FlexModel(built.model, **built.options) as flex:
        flex.register_trainable_module("probe", probe())
        flex.register_forward_hook(mf.HookFunction(built.name(PROBED), editing_function=_bias, save=False))
        built.run(flex, data)
        out["trained"] = {n: p.grad.clone() for n, p in flex.trainable_modules["probe"].named_parameters()}
    clear(built)
    return out


def _joined(read: Any) -> Tensor:
    """What was read of a step's microbatches, in their order."""
    numbers = [key.microbatch for key in read.keys]
    assert len(set(numbers)) == len(numbers)
    found = [read[numbers.index(n)] for n in sorted(numbers)]
    return found[0] if len(found) == 1 else torch.cat(found)


def clear(built: Built) -> None:
    """Drop all gradients."""
    if built.clear is not None:
        built.clear()
        return
    for chunk in list_model_chunks(built.model):
        chunk.zero_grad()


def _gradients(flex: mf.FlexModel) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in flex.named_full_parameters(gradients=True, everywhere=True)}


def compare(
    framework: str,
    case: str,
    world: int,
    build: Build,
    *args: Any,
    sites: Sequence[str] = llama.SITES,
    edits: Sequence[str] = llama.EDITED,
    parameter: Callable[[str], str] = lambda name: name,
    timeout: float = 240.0,
    alone: bool = False,
) -> list[Cell]:
    """All cells of one configuration of a framework.

    Args:
        framework: the section of the coverage page.
        case: the configuration.
        world: number of ranks.
        build: runs on each rank, with `args`; must be picklable by name.
        sites: of the single-process model.
        edits: likewise.
        parameter: a parameter's name here to that of the single process.
        timeout: seconds until the ranks are given up.
        alone: on ranks of its own: for frameworks whose own state cannot be put back.
    """
    given = build, args, list(sites), list(edits)
    answers = run(world, answer, *given, timeout=timeout, alone=alone)
    replicas = 1 + max(a["replica"] for a in answers)
    samples = answers[0]["samples"]
    wanted = llama.truth(replicas, sites, edits, answers[0]["microbatches"], samples)
    found: list[Cell] = []

    def cell(site: str, check: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
        error = greatest(relative(got.detach(), want.detach()) for got, want in pairs)
        found.append(Cell(case, site, check, error, model=framework))

    leaders = [a for a in answers if a["leader"]]
    assert {a["replica"] for a in leaders} == set(range(replicas))
    for site in sites:
        cell(site, "value", [(a["read"][site], wanted[a["replica"]]["values"][site]) for a in leaders])
        scale = replicas if leaders[0].get("mean loss") else 1
        pairs = [
            (a["read"][f"{site}.grad"] * scale, wanted[a["replica"]]["gradients"][site]) for a in leaders
        ]
        cell(site, "gradient", pairs)
    cell("(none)", "unedited loss", [(a["loss"], wanted[a["replica"]]["loss"]) for a in answers])
    for check, key in (("parameter", "parameters"), ("unedited parameter gradients", "gradients")):
        theirs = [w["parameters" if key == "parameters" else "parameter gradients"] for w in wanted]
        cell(
            "(none)", check, _pairs(answers, [a[key] for a in answers], theirs, parameter, key == "gradients")
        )
    for site in edits:
        losses = [(a["edited"][site][0], wanted[a["replica"]]["edited"][site][0]) for a in answers]
        cell(site, "edited loss", losses)
        theirs = [w["edited"][site][1] for w in wanted]
        ours = [a["edited"][site][1] for a in answers]
        cell(site, "edited parameter gradients", _pairs(answers, ours, theirs, parameter, True))
    pairs = []
    for a in answers:
        for name, got in a["trained"].items():
            pairs.append((got, _trained(replicas, samples)[name]))
    cell(PROBED, "trained gradient", pairs)
    return found


def _pairs(
    answers: list[dict[str, Any]],
    ours: list[dict[str, Tensor]],
    theirs: list[dict[str, Tensor]],
    parameter: Callable[[str], str],
    gradients: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Whole parameters of every rank, or their gradients, with those of one process."""
    out = []
    for a, mine in zip(answers, ours, strict=True):
        named = {parameter(n): t for n, t in mine.items()}
        assert named.keys() == theirs[0].keys(), sorted(named)
        for name, tensor in named.items():
            if gradients and a["averaged"]:
                want = torch.stack([w[name] for w in theirs]).mean(0)
            else:
                want = theirs[a["replica"]][name]
            out.append((tensor, want))
    return out


def _trained(replicas: int, samples: int) -> dict[str, Tensor]:
    """The probe's gradient on one process, of the mean of the replicas' losses."""
    module, model = probe(), llama.single()
    llama.install(model, PROBED, lambda t: t + module(t))
    for r in range(replicas):
        tokens, labels = llama.batch(r, samples)
        (llama.loss_of(model(tokens), labels) / replicas).backward()
    return {n: p.grad for n, p in module.named_parameters()}


__all__ = ["Built", "answer", "compare", "judge", "run"]
