"""Edits that fail on one rank, in models that are frozen in part: many failures in one process group.

No step changes the weights, so each step that does not fail is that of one process.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import matrix
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

FAILURE = "one rank fails"
SECONDS = 20.0  # that a step may take beside other work; a hang takes 1,800
FAILING = (
    "TESTS_EDITS_FAIL"  # in the environment, which ranks do not compare: whether edits of this rank fail now
)
FROZEN = ("", "embedding", "model")  # which parameters need no gradient
MODES = (
    "train",
    "forward",
    "call",
)  # a step; one under no_grad; a call with a graph and without a backward pass


@dataclass(frozen=True)
class Row:
    """One failure.

    Attributes:
        kind: of KINDS.
        site: the hook point of the edit.
        frozen: of FROZEN.
        trains: whether the edit multiplies by a trained parameter.
        rank: which of the ranks that run the edit fails, counted round.
        step: the step in which it fails.
        late: whether the edit fails after it has computed its result.
        mode: of MODES.
    """

    kind: str
    site: str = "decoder.layers.0:input"
    frozen: str = "embedding"
    trains: bool = True
    rank: int = 1
    step: int = 0
    late: bool = False
    mode: str = "train"


def fail(late: bool, now: bool) -> None:
    if os.environ.get(FAILING) and late is now:
        raise ValueError(FAILURE)


class Centered:
    """Subtracts the mean over the last dim, with a sum over the ranks that shard it."""

    def __init__(self, weight: Tensor | None, late: bool, shard: Any = None) -> None:
        self.weight, self.late, self.shard = weight, late, shard

    def on_shard(self, shard: Any) -> Centered:
        return Centered(self.weight, self.late, shard)

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        fail(self.late, False)
        scaled = inputs if self.weight is None else inputs * self.weight
        total, length = scaled.sum(-1, keepdim=True), inputs.shape[-1]
        if self.shard is not None:
            total, length = self.shard.sum(total, [-1]), self.shard.whole[-1]
        fail(self.late, True)
        return scaled - total / length


def scaled(
    weight: Tensor | None, late: bool, module: Any, inputs: Tensor, save_ctx: Any, modules: Any
) -> Tensor:
    fail(late, False)
    out = inputs * 1.5 if weight is None else inputs * weight
    fail(late, True)
    return out


def rolled(
    weight: Tensor | None, late: bool, module: Any, inputs: Tensor, save_ctx: Any, modules: Any
) -> Tensor:
    fail(late, False)
    out = inputs + 0.2 * inputs.roll(1, -1) * (1.5 if weight is None else weight)
    fail(late, True)
    return out


def trained(
    weight: Tensor | None, late: bool, module: Any, inputs: Tensor, save_ctx: Any, modules: Any
) -> Tensor:
    fail(late, False)
    out = inputs + modules["scale"](inputs)
    fail(late, True)
    return out


def saved(
    weight: Tensor | None, late: bool, module: Any, inputs: Tensor, save_ctx: Any, modules: Any
) -> Tensor:
    fail(late, False)
    out = inputs + 0.2 * inputs.roll(1, -1) * (1.5 if weight is None else weight)
    save_ctx.scaled = out * 2
    fail(late, True)
    return out


def loaded(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.1 * save_ctx.scaled


def gradient(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.2 * inputs.roll(1, -1)


class Scale(nn.Module):
    """A module of one trained vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def width_of(case: Case, site: str) -> int:
    """How many features a tensor of the residual stream or of an MLP has."""
    ffn = case.extra.get("ffn_hidden_size", gpt.FFN)
    widths = {"linear_fc1:output": (1 + case.gated) * ffn, "linear_fc2:input": ffn}
    hidden: int = case.extra.get("hidden_size", gpt.HIDDEN)
    return next((n for point, n in widths.items() if site.endswith(point)), hidden)


def hooks(case: Case, row: Row, weight: Tensor | None) -> list[Any]:
    """The hooks of a row."""
    import megatron_flex as mf
    from megatron_flex import edits

    def hook(edit: Callable[..., Any], site: str = row.site, **more: Any) -> Any:
        return mf.HookFunction(site, editing_function=edit, save=False, **more)

    given = weight, row.late
    direction = torch.cos(torch.arange(float(width_of(case, row.site))))
    kinds: dict[str, Callable[[], list[Any]]] = {
        "gathered": lambda: [hook(partial(rolled, *given))],
        "local": lambda: [hook(mf.local()(partial(scaled, *given)))],
        "sum": lambda: [hook(Centered(*given))],
        "chain": lambda: [hook(mf.local()(partial(scaled, *given)) | edits.project_out(direction))],
        "two": lambda: [hook(partial(rolled, *given)), hook(edits.scale(2.0))],
        "once": lambda: [hook(partial(rolled, *given), run="once")],
        "skip": lambda: [hook(partial(rolled, *given), on_error="skip")],
        "skip local": lambda: [hook(mf.local()(partial(scaled, *given)), on_error="skip")],
        "skip sum": lambda: [hook(Centered(*given), on_error="skip")],
        "module": lambda: [hook(partial(trained, *given))],
        "context": lambda: [hook(partial(saved, *given)), hook(loaded, "decoder.layers.1:input")],
        "context once": lambda: [
            hook(partial(saved, *given)),
            hook(loaded, "decoder.layers.1:input", run="once"),
        ],
        "then gradient": lambda: [
            hook(partial(rolled, *given)),
            hook(gradient, hook_type="tensor"),
            hook(gradient, "decoder.layers.1:input", hook_type="tensor"),
        ],
        "gradient": lambda: [hook(partial(rolled, *given), hook_type="tensor")],
        "gradient local": lambda: [hook(mf.local()(partial(scaled, *given)), hook_type="tensor")],
        "gradient sum": lambda: [hook(Centered(*given), hook_type="tensor")],
        "gradient once": lambda: [hook(partial(rolled, *given), hook_type="tensor", run="once")],
        "gradient skip": lambda: [hook(partial(rolled, *given), hook_type="tensor", on_error="skip")],
    }
    return kinds[row.kind]()


KINDS = ("gathered", "local", "sum", "chain", "two", "once", "skip", "skip local", "skip sum", "module")
KINDS += ("context", "context once", "then gradient")
KINDS += ("gradient", "gradient local", "gradient sum", "gradient once", "gradient skip")


def freeze(chunks: Sequence[nn.Module], what: str) -> list[nn.Parameter]:
    """Let some parameters of a model need no gradient; they are returned."""
    some = [
        p
        for root in chunks
        for name, p in gpt.global_names(root)
        if what == "model" or (what == "embedding" and name.startswith("embedding"))
    ]
    for p in some:
        p.requires_grad_(False)
    return some


def rank_that_fails(flex: Any, row: Row) -> int:
    """The rank of a row among those that run its edit. Collective."""
    mesh = flex.session.mesh
    runs = any(site.name == row.site for site in flex.session.adapter.sites())
    if row.kind in ("once", "gradient once"):
        runs = runs and not any(mesh[axis].coord for axis in ("tp", "cp"))
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, runs)
    ranks_of_edit = [rank for rank, one in enumerate(each) if one]
    return ranks_of_edit[row.rank % len(ranks_of_edit)]


def steps(case: Case, chunks: list[nn.Module], row: Row, fails: bool) -> list[dict[str, Any]]:
    """Run a row's steps, of which one may fail, and one more; what each gave or raised."""
    import megatron_flex as mf

    module = Scale(width_of(case, "decoder"))
    weight = nn.Parameter(torch.tensor(1.25)) if row.trains and row.kind != "module" else None
    trainees = [p for p in (weight, module.weight) if p is not None]
    out = []
    with contextlib.ExitStack() as undo:
        for parameter in freeze(chunks, row.frozen if row.frozen != "model" else ""):
            undo.callback(parameter.requires_grad_, True)
        flex = mf.FlexModel(chunks)
        if row.kind == "module":
            flex.register_trainable_module("scale", module)
        if row.frozen == "model":
            flex.freeze()
        for hook in hooks(case, row, weight):
            flex.session.hooks.add(hook)
        failing_rank = rank_that_fails(flex, row)
        for number in range(row.step + 2):
            os.environ[FAILING] = "1" * (fails and number == row.step and dist.get_rank() == failing_rank)
            for parameter in trainees:
                parameter.grad = None
            got: dict[str, Any] = {"losses": [], "error": None, "failing": failing_rank}
            start = time.monotonic()
            try:
                if row.mode == "call":
                    got["losses"] = [float(ranks.call(chunks).sum())]
                else:
                    got["losses"] = gpt.step(case, chunks, ranks.mine(chunks), row.mode == "forward")
            except mf.HookError as error:
                got["error"] = str(error), error.site, error.ranks
            got["seconds"] = time.monotonic() - start
            got["gradients"] = matrix._gradients(flex, chunks)
            got["trained"] = module.weight.grad
            out.append(got)
        os.environ.pop(FAILING, None)
        flex.session.close()
    return out


def run_rows(case: Case, state: dict[str, Tensor] | None, rows: Sequence[Row], fails: bool) -> dict[str, Any]:
    """Run rows one after the other in one process group, and return what each gave on this rank."""
    from megatron_flex.adapters import detect
    from megatron_flex.config import flex_config

    flex_config.dry_run = False
    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, state)
    mesh = detect(chunks).mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of skipped edits
        found = [steps(case, chunks, row, fails) for row in rows]
    answer = {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": mesh["dp"].coord}
    return answer | {"state": state, "rows": found}


def one_process(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    """The rows without a failure, on one process."""
    (truth,) = run(1, run_rows, replace(case.single(), recompute=case.recompute), None, rows, False)
    return truth


def problems(row: Row, truth: list[dict[str, Any]], answers: list[dict[str, Any]], number: int) -> list[str]:
    """What is wrong with a row: the errors of all ranks, and the steps beside the failing one."""
    out = []
    found = [a["rows"][number] for a in answers]
    for step, want in enumerate(truth):
        each = [steps[step] for steps in found]
        errors = {s["error"] for s in each}
        if len(errors) > 1:
            out.append(f"step {step}: ranks raised {errors}")
        error = errors.pop()
        if step == row.step and "skip" not in row.kind:
            named = error is not None and FAILURE in error[0] and error[1].startswith(row.site)
            if (
                not named or each[0]["failing"] not in error[2]
            ):  # others fail too where they read what was to be saved
                out.append(f"step {step}: {error}")
        elif error is not None:
            out.append(f"step {step}: {error}")
        if max(s["seconds"] for s in each) > SECONDS:
            out.append(f"step {step} took {max(s['seconds'] for s in each):.0f} s")
        if step != row.step and not out and row.mode != "call":
            out += [f"step {step}: {text}" for text in _differences(row, want, answers, number, step)]
    return out


def _differences(
    row: Row, want: dict[str, Any], answers: list[dict[str, Any]], number: int, step: int
) -> Iterator[str]:
    """How a step differs from that of one process: losses, and the gradients of parameters."""
    leaders = [a for a in answers if not any(a["coords"].get(axis, 0) for axis in ("tp", "cp"))]
    leaders.sort(key=lambda a: a["coords"].get("dp", 0))
    losses = [x for a in leaders for x in a["rows"][number][step]["losses"]]
    if matrix.relative(torch.tensor(losses), torch.tensor(want["losses"])) > matrix.BOUND:
        yield f"losses {losses}, not {want['losses']}"
    gradients = matrix.whole_gradients(answers, lambda a: a["rows"][number][step]["gradients"])
    if gradients.keys() != want["gradients"].keys():
        yield f"gradients of {sorted(gradients.keys() ^ want['gradients'].keys())}"
    greatest = max((float(g.abs().max()) for _, g in want["gradients"].values()), default=0.0)
    for name in gradients.keys() & want["gradients"].keys():
        got, truth = gradients[name], want["gradients"][name][1]
        # A gradient that is zero but for rounding, such as that of the bias of keys, has no relative error.
        rounding = float((got - truth).abs().max()) <= matrix.BOUND / 10 * greatest
        if not rounding and (error := matrix.relative(got, truth)) > 10 * matrix.BOUND:
            yield f"gradient of {name}: {error:.1e}"
    trained = [a["rows"][number][step]["trained"] for a in answers] if row.kind == "module" else []
    if any(not _agree(t, want["trained"]) for t in trained):
        yield f"gradient of the module {trained}, not {want['trained']}"


def _agree(got: Tensor | None, want: Tensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return matrix.relative(got, want) <= 10 * matrix.BOUND
