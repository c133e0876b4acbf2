"""Run a random case on one process and on many, and compare all that can be known exactly.

What is asserted:

- Without dropout: every reading, selected or not, forward or of gradients, and the losses and all parameters'
  gradients, with and without the hooks, are those of one process of plain Megatron hooked by plain PyTorch.
- Hooks that only read change no bit of the losses, nor, if none is on a gradient, of parameters' gradients.
- With dropout one process draws other numbers; a run is then compared with its own twin from the same random
  state. If hooks only read, its twin has none, and losses and gradients of parameters are the same bits; if
  some edit, its twin does not recompute, and all readings, losses and gradients agree: recomputation replays
  edits and dropout alike. `verify()` sees that what ranks hold replicated has the same bits.
- Where an edit fails on one rank, all ranks raise one error, or none where the hook skips errors, and the
  steps beside it are those of one process in which nothing fails.
- In bf16 a run is as near to one process as that one is to itself in fp32, times the summands that it rounds
  more.

A difference above `BOUND` is held against what one process makes of its weights when their last bits change:
what is as sensitive as that is judged by ten times that difference.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed import matrix
from tests.distributed.matrix import BOUND, Cell, relative
from tests.support import (
    dumped,
    edit_table,
    failing,
    gpt,
    measuring,
    oracle,
    random_cases,
    ranks,
    wish_table,
)
from tests.support.pool import RankError, run
from tests.support.random_cases import QUIET, Draw, Hook, matched

Tensors = dict[tuple[str, str], list[Tensor]]  # by site and check
SENSITIVE = 10.0  # times what a change of the weights' last bits makes
HOPELESS = 1e-2  # what is more sensitive than that proves nothing
HALF_EPS = 2.0**-9  # of bf16
TIMEOUT = 240.0
WITHOUT = "without hooks"  # how the checks of such a run end
DUMPED = {"dump": "values", "dump of gradients": "gradients"}  # by check


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        draw: the case.
        cells: what was compared.
        unjudged: what is too sensitive to say anything.
        error: what was raised, if something was.
        seconds: how long it took.
    """

    draw: Draw
    cells: list[Cell] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> list[Cell]:
        """The comparisons that failed."""
        return [c for c in self.cells if not c.good]

    @property
    def good(self) -> bool:
        """Whether all agrees, and something was compared."""
        return bool(self.cells) and not self.bad and not self.error

    @property
    def upstream(self) -> bool:
        """Whether the run without hooks differs from one process already: no case that should be drawn."""
        return any(c.check.endswith(WITHOUT) for c in self.bad)

    def told(self) -> str:
        """What failed, a line each."""
        lines = ["without hooks the run differs from one process already"] * self.upstream
        lines += [
            f"{c.site}, {c.check}: relative error {c.error:.2e}, bound {c.bound:.0e}" for c in self.bad[:12]
        ]
        raised = self.error.splitlines()
        if len(raised) > 10:
            raised[3:-6] = ["..."]
        return "\n".join([*lines, *raised])


def prove(draw: Draw, sharded: Any = None) -> Verdict:
    """Run a case and compare it.

    Args:
        draw: the case.
        sharded: what runs on the ranks instead of `spread`, or where edits fail of `failing.run_rows`; a
            fault can be planted there.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if draw.failures:
                cells, unjudged = _failures(draw, sharded or failing.run_rows), []
            else:
                cells, unjudged = _compared(draw, folder, sharded or spread)
            return Verdict(draw, cells, unjudged, seconds=time.monotonic() - started)
        except Exception as error:  # of the ranks, or of comparing what they gave: no case may end the others
            text = str(error) if isinstance(error, RankError) else traceback.format_exc()
            return Verdict(draw, error=text, seconds=time.monotonic() - started)


def _compared(draw: Draw, folder: str, sharded: Any) -> tuple[list[Cell], list[str]]:
    (truth,) = run(1, alone, replace(draw, dropout=0.0), None, timeout=TIMEOUT)
    answers = run(draw.world, sharded, draw, truth["state"], truth["shapes"], folder, timeout=TIMEOUT)
    if draw.dropout:
        return _against_twin(draw, answers), []
    want, got = wanted(draw, truth), found(draw, answers)
    cells = [
        Cell(draw.layout, *at, _distance(got.get(at), want.get(at)), _bound(draw, truth, at), model=draw.kind)
        for at in sorted(want.keys() | got.keys())
    ]
    cells, unjudged = _weighed(draw, truth, want, [*cells, *_dumps(draw, truth, folder)])
    return [*cells, *_unchanged(draw, truth, answers), *_statistics(draw, truth, answers)], unjudged


def _failures(draw: Draw, sharded: Any) -> list[Cell]:
    """A cell for each edit that fails: whether anything is wrong with it."""
    case, rows = draw.case(), draw.failures
    truth = failing.one_process(case, rows)
    answers = run(draw.world, sharded, case, truth["state"], rows, True, timeout=TIMEOUT)
    cells = []
    for number, row in enumerate(rows):
        wrong = failing.problems(row, truth["rows"][number], answers, number)
        check, error = "; ".join([f"{row}", *wrong]), float("inf") if wrong else 0.0
        cells.append(Cell(draw.layout, row.site, check, error, model=draw.kind))
    return cells


def _weighed(
    draw: Draw, truth: dict[str, Any], want: Tensors, cells: list[Cell]
) -> tuple[list[Cell], list[str]]:
    """The same with the bounds of what is sensitive to its last bits; and what is too much so, by itself."""
    if not any(c.bound < c.error < float("inf") for c in cells):
        return cells, []
    (other,) = run(1, alone, draw, truth["state"], timeout=TIMEOUT)
    nudged = wanted(draw, other)
    judged, unjudged = [], []
    for cell in cells:
        if not cell.bound < cell.error < float("inf"):
            judged.append(cell)
            continue
        at = (cell.site, cell.check)
        if cell.check in DUMPED:
            first, second = (t["steps"][0][DUMPED[cell.check]].get(cell.site) for t in (other, truth))
            sensitivity = _distance(first, second)
        else:
            sensitivity = _distance(nudged.get(at), want.get(at))
        if sensitivity > HOPELESS:
            unjudged.append(f"{cell.site}, {cell.check}")
        else:
            judged.append(replace(cell, bound=max(cell.bound, SENSITIVE * sensitivity)))
    return judged, unjudged


def _distance(got: list[Tensor] | None, want: list[Tensor] | None) -> float:
    if got is None or want is None or len(got) != len(want):
        return float("inf")
    return matrix.greatest([relative(g, w) for g, w in zip(got, want, strict=True)])


def _bound(draw: Draw, truth: dict[str, Any], at: tuple[str, str]) -> float:
    """fp32's; in bf16 what the roundings make of one process, as often as the run rounds more.

    Where no rank sums a part, values and losses have the same bits.
    """
    if not draw.bf16:
        return BOUND
    summands = draw.tp * draw.cp
    if summands == 1 and at[1].startswith(("value", "losses")):
        return 0.0
    return (summands + 1) * _rounded(truth)


def _rounded(truth: dict[str, Any]) -> float:
    return max(float(truth["rounding"]), HALF_EPS)


# -- one process ---------------------------------------------------------------------------------------


def single(draw: Draw) -> gpt.Case:
    """The model on one process, with the data of all replicas."""
    case = draw.case()
    if draw.gathered:
        return replace(case.single(), microbatches=draw.microbatches, joint=draw.dp)
    return case.single()


def _half(chunks: list[nn.Module], draw: Draw) -> list[nn.Module]:
    from megatron.core.transformer.module import Float16Module

    return [Float16Module(c.config, c) for c in chunks] if draw.bf16 else chunks


def alone(draw: Draw, nudge: dict[str, Tensor] | None) -> dict[str, Any]:
    """Everything that a spread run is compared with, from one process of plain Megatron.

    Args:
        draw: the case.
        nudge: weights whose last bits are changed; random ones if None.

    Returns:
        `state`, the weights; `shapes` of the sites that are hooked; `plain`, losses and gradients without
        hooks; of each of `steps` the `values` and `gradients` by site, `losses` and `parameters`; `rounding`,
        of bf16.
    """
    case = single(draw)
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0]) if nudge is None else _nudged(nudge)
    out: dict[str, Any] = {"state": state, "steps": []}
    out["plain"] = _hooked_alone(case, replace(draw, hooks=(), dump=(), statistics=()), state)
    steps = [draw.hooks, tuple(h for h in draw.hooks if not h.quiet)][: draw.steps]
    for number, hooks in enumerate(steps):
        if number and hooks == steps[0]:
            out["steps"].append(out["steps"][0])
        else:
            out["steps"].append(_hooked_alone(case, replace(draw, hooks=hooks), state))
    out["shapes"] = {s: tuple(v[0].shape) for s, v in out["steps"][0]["values"].items() if v}
    if draw.bf16:
        extra = {k: v for k, v in case.extra.items() if k not in ("bf16", "params_dtype", "pipeline_dtype")}
        full = _hooked_alone(replace(case, extra=extra), replace(draw, bf16=False), state)
        out["rounding"] = _rounding(out["steps"][0], full)
    return out


def _nudged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, each greater or smaller by about its last bit."""
    generator = torch.Generator().manual_seed(5)
    signs = {n: torch.randint(0, 2, t.shape, generator=generator) * 2 - 1 for n, t in state.items()}
    return {n: t * (1 + signs[n] * torch.finfo(t.dtype).eps) for n, t in state.items()}


def _rounding(half: dict[str, Any], full: dict[str, Any]) -> float:
    """How far bf16 is from fp32, at the worst of the places that are read."""
    far = [0.0]
    for kind in ("values", "gradients"):
        for site, tensors in half[kind].items():
            far += [
                relative(h.float(), f.float())
                for h, f in zip(tensors, full[kind][site], strict=True)
                if h.dtype.is_floating_point
            ]
    return max(far)


def _hooked_alone(case: gpt.Case, draw: Draw, state: dict[str, Tensor]) -> dict[str, Any]:
    chunks = gpt.build(case)
    models = _half(chunks, draw)
    failing.freeze(chunks, draw.frozen)
    with torch.no_grad():
        for name, parameter in gpt.global_names(chunks[0]):
            parameter.copy_(state[name])
    watch = _Watch(draw)
    for site in sorted(watch.order(), key=_flow):
        oracle.install(chunks[0], site, watch.visit(site))
    weights = dict(gpt.global_names(chunks[0]))
    for name in {hook.site for hook in draw.hooks if hook.kind == "parameter"}:
        weights[name].register_hook(watch.note(name))
    losses = gpt.step(case, models, 0, draw.forward_only)
    parameters = {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
    return {
        "values": dict(watch.values),
        "gradients": {s: [g[n] for n in sorted(g)] for s, g in watch.gradients.items()},
        "losses": losses,
        "parameters": {n: _without_padding(draw, n, g) for n, g in parameters.items()},
    }


def _flow(site: str) -> int:
    """Where the data flow reaches a hook point among those of its module; parts come after an output."""
    flow = ("input", "gemm_input", "partial", "local", "output")
    point = site.rpartition(":")[2]
    return flow.index(point) if point in flow else len(flow)


def _without_padding(draw: Draw, name: str, tensor: Tensor) -> Tensor:
    words = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
    return tensor[: draw.vocabulary - draw.padding] if draw.padding and name in words else tensor


class _Watch:
    """What plain PyTorch notes and edits in one process; the edits at a site come in the hooks' order."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.factor = draw, _factor(draw)
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.hooks: dict[str, list[Hook]] = defaultdict(list)
        for hook in draw.hooks:
            for site in matched(draw, hook):
                self.hooks[site].append(hook)
        for site in (*draw.dump, *draw.statistics):
            self.hooks[site] += []

    def order(self) -> list[str]:
        """The sites in the order in which hooks were first registered there, as places of one module fire.

        Summands come before their sum, and what a linear gets before what of it is multiplied.
        """
        known = set(random_cases.sites_of(self.draw))
        turns = {"partial": 0, "gemm_input": 2}
        return sorted((s for s in self.hooks if s in known), key=lambda s: turns.get(s.partition(":")[2], 1))

    def note(self, parameter: str) -> Any:
        def hook(grad: Tensor) -> None:
            found = self.gradients[parameter]
            found[len(found)] = grad.detach().clone()

        return hook

    def visit(self, site: str) -> oracle.Visit:
        """What is done with a tensor: note it, edit it, and do the same with its gradient."""
        real = self.draw.vocabulary - self.draw.padding
        padded = self.draw.padding and site == "output_layer:output"

        def visit(tensor: Tensor) -> Tensor:
            if not padded:
                return self._visit(site, tensor)
            return torch.cat([self._visit(site, tensor[..., :real]), tensor[..., real:]], -1)

        return visit

    def _visit(self, site: str, tensor: Tensor) -> Tensor:
        call = len(self.values[site])
        self.values[site].append(tensor.detach().clone())
        edits = [h for h in self.hooks[site] if h.edit]
        for hook in (h for h in edits if not h.backward):
            tensor = edit_table.TABLE[hook.edit].formula(tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor

        def back(grad: Tensor) -> Tensor:
            self.gradients[site][call] = grad.detach().clone()
            grad = grad * self.factor
            for hook in (h for h in edits if h.backward):
                grad = edit_table.TABLE[hook.edit].formula(grad)
            return grad / self.factor

        if any(h.backward for h in self.hooks[site]) or site in (*self.draw.dump, *self.draw.statistics):
            tensor = tensor.clone()
            tensor.register_hook(back if any(h.backward for h in edits) else _only(back))
        return tensor


def _only(back: Any) -> Any:
    def hook(grad: Tensor) -> None:
        back(grad)

    return hook


# -- many processes ------------------------------------------------------------------------------------


def spread(
    draw: Draw, state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], folder: str
) -> dict[str, Any]:
    """What one rank gives back: without hooks, and in each step with them.

    Args:
        draw: the case.
        state: the weights.
        shapes: of the sites that are edited.
        folder: where dumps go.
    """
    case = draw.case()
    chunks = ranks.start(case)
    models = _half(chunks, draw)
    gpt.load(chunks, state)
    failing.freeze(chunks, draw.frozen)
    with _tokens(draw):
        answer = _both(draw, case, models, chunks, shapes, folder)
        if draw.dropout and draw.edits:
            twin = replace(draw, recompute=())
            others = gpt.build(twin.case())
            gpt.load(others, state)
            failing.freeze(others, draw.frozen)
            answer["twin"] = _both(twin, twin.case(), _half(others, draw), others, shapes, folder)
        return answer


@contextlib.contextmanager
def _tokens(draw: Draw) -> Iterator[None]:
    """Tell how many tokens of the vocabulary are real, as `megatron.training` does."""
    if not draw.padding:
        yield
        return
    import megatron.training.global_vars as known

    before = known._GLOBAL_TOKENIZER
    known._GLOBAL_TOKENIZER = SimpleNamespace(vocab_size=draw.vocabulary - draw.padding)
    try:
        yield
    finally:
        known._GLOBAL_TOKENIZER = before


def _both(
    draw: Draw,
    case: gpt.Case,
    models: list[nn.Module],
    chunks: list[nn.Module],
    shapes: dict[str, tuple[int, ...]],
    folder: str,
) -> dict[str, Any]:
    import megatron_flex as mf

    flex = mf.FlexModel(models)
    mesh = flex.session.mesh
    dp = mesh["dp"].coord
    answer: dict[str, Any] = {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes), "dp": dp, "steps": []}
    answer["plain"] = _step(draw, case, models), matrix._gradients(flex, chunks)
    flex.restore()
    more: dict[str, Any] = {"gather_data_parallel": draw.gathered, "verify": draw.verify}
    if draw.dump:
        gradients = not draw.forward_only
        more["dumps"] = mf.Dump(folder, list(draw.dump), gradients=gradients, order="blocks", replicas=True)
    kept = measuring.Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.FlexWarning)
        with mf.attach(models, [hook_function(draw, h, shapes) for h in draw.hooks], **more) as flex:
            if draw.statistics:
                flex.register_statistics(
                    mf.Statistics("nowhere", list(draw.statistics), gradients=True), kept
                )
            for number in range(draw.steps):
                with (
                    flex.hooks(f"-{QUIET}")
                    if number and any(h.quiet for h in draw.hooks)
                    else contextlib.nullcontext()
                ):
                    losses = _step(draw, case, models)
                read = {
                    n: [(tuple(k[1:]), t) for k, t in zip(r.keys, r, strict=True)]
                    for n, r in flex.output_dict.items()
                }
                answer["steps"].append((losses, matrix._gradients(flex, chunks)))
            answer["read"] = read
            answer["leader"] = flex.is_leader
    answer["rows"] = kept.rows
    return answer


def _step(draw: Draw, case: gpt.Case, models: list[nn.Module]) -> list[float]:
    """One step; with dropout always from the same random state."""
    if draw.dropout:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
    losses = gpt.step(case, models, ranks.mine(models), draw.forward_only)
    if draw.tied and draw.pp > 1 and not draw.forward_only:
        _sum_tied(models)
    return losses


def _sum_tied(models: list[nn.Module]) -> None:
    """Do what Megatron's finalize_model_grads does for embeddings that two stages hold."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    for chunk in models:
        root = chunk.module if hasattr(chunk, "module") else chunk
        if root.pre_process or root.post_process:
            dist.all_reduce(root.shared_embedding_or_output_weight().grad, group=group)


def hook_function(draw: Draw, hook: Hook, shapes: dict[str, tuple[int, ...]]) -> Any:
    """The hook, as a person writes it."""
    import megatron_flex as mf

    sites = matched(draw, hook)
    width = shapes[sites[0]][-1] if hook.kind != "parameter" else 0
    return mf.HookFunction(
        hook.pattern,
        editing_function=edit_table.TABLE[hook.edit].make(width) if hook.edit else None,
        hook_type="tensor" if hook.kind == "parameter" else hook.kind,  # type: ignore[arg-type]
        gradient_scale=draw.scale if hook.backward else "raw",  # type: ignore[arg-type]
        run=hook.run,  # type: ignore[arg-type]
        groups=(QUIET,) if hook.quiet else (),
        **wish_table.hook_arguments(hook.wish, width),
    )


# -- comparing -----------------------------------------------------------------------------------------


def wanted(draw: Draw, truth: dict[str, Any]) -> Tensors:
    """What one process says of everything that a spread run gives."""
    out: Tensors = {}
    for number, (site, hook) in _readings(draw):
        step = truth["steps"][number]
        tensors = step["gradients" if hook.backward else "values"].get(site, [])
        factor = _factor(draw) if hook.backward else 1.0
        got = [wish_table.plainly(hook.wish, t * factor if factor != 1.0 else t) for t in tensors]
        out[site, _check(hook, number)] = got
    for name, one in (
        (WITHOUT, truth["plain"]),
        *((f"step {n}", s) for n, s in enumerate(truth["steps"])),
    ):
        losses, parameters = torch.tensor(one["losses"]), dict(one["parameters"])
        if (
            draw.tied and draw.pp > 1 and parameters
        ):  # the last stage has a copy, of which the gradient is the same
            parameters["output_layer.weight"] = parameters["embedding.word_embeddings.weight"]
        out["(all)", f"losses {name}"] = [losses]
        for parameter, gradient in parameters.items():
            out[parameter, f"parameter's gradient {name}"] = [gradient]
    return out


def _factor(draw: Draw) -> float:
    """How much greater gradients are than in one process, which takes the mean over all microbatches."""
    return float(draw.dp * (draw.microbatches if draw.scale == "loss" else draw.cp))


def _readings(draw: Draw) -> Iterator[tuple[int, tuple[str, Hook]]]:
    """Step, site and hook of everything that is read."""
    for number in range(draw.steps):
        for hook in draw.hooks:
            if not (number and hook.quiet):
                for site in matched(draw, hook):
                    yield number, (site, hook)


def _check(hook: Hook, number: int) -> str:
    kind = "gradient" if hook.backward else "value"
    return f"{kind} {hook.wish}".strip() + f" step {number}"


def _name(site: str, hook: Hook) -> str:
    return site + (".grad" if hook.backward else "") + (f".{hook.wish}" if hook.wish else "")


def found(draw: Draw, answers: list[dict[str, Any]]) -> Tensors:
    """The same of a spread run."""
    out: Tensors = {}
    leaders = sorted((a for a in answers if a["leader"]), key=lambda a: a["dp"])
    for number, (site, hook) in _readings(draw):
        got = [t for a in leaders for key, t in a["read"].get(_name(site, hook), []) if key[0] == number]
        out[site, _check(hook, number)] = got
    runs = [(WITHOUT, lambda a: a["plain"])]
    runs += [(f"step {n}", lambda a, n=n: a["steps"][n]) for n in range(draw.steps)]
    for name, pick in runs:
        out["(all)", f"losses {name}"] = [torch.tensor(_losses(draw, answers, pick))]
        gradients = matrix.whole_gradients(answers, lambda a, pick=pick: pick(a)[1])
        out |= {(p, f"parameter's gradient {name}"): [g] for p, g in gradients.items()}
    return out


def _losses(draw: Draw, answers: list[dict[str, Any]], pick: Any) -> list[float]:
    """Those of all replicas, in order; gathered ones are of one batch."""
    each = [pick(a)[0] for a in matrix._last_stage(answers)]
    if draw.gathered:
        return [sum(losses) / len(each) for losses in zip(*each, strict=True)]
    return [x for losses in each for x in losses]


def _unchanged(draw: Draw, truth: dict[str, Any], answers: list[dict[str, Any]]) -> list[Cell]:
    """Hooks that only read change no bit; with those on gradients, sums may be taken in another order."""
    if draw.edits:
        return []
    reordered = any(h.backward for h in draw.hooks) or draw.dump or draw.statistics
    bound = 0.0 if not reordered else 2 * _rounded(truth) if draw.bf16 else BOUND
    out = []
    for a in answers:
        losses, before = a["plain"]
        for after, behind in a["steps"]:
            same = 0.0 if losses == after else float("inf")
            out.append(Cell(draw.layout, "(all)", "losses unchanged by reading", same, 0.0, model=draw.kind))
            if not before:
                continue
            pairs = [(behind.get(n), g) for n, (_, g) in before.items()]
            error = matrix.greatest(relative(b[1], g) if b else float("inf") for b, g in pairs)
            check = "parameters' gradients unchanged by reading"
            out.append(Cell(draw.layout, "(all)", check, error, bound, model=draw.kind))
    return out


def _dumps(draw: Draw, truth: dict[str, Any], folder: str) -> list[Cell]:
    if not draw.dump:
        return []
    first = truth["steps"][0]
    given = {"values": first["values"], "gradients": first["gradients"], "losses": first["losses"]}
    if draw.forward_only:
        given["gradients"] = {}
    return dumped.against_truth(draw.case(), folder, list(draw.dump), given)


def _statistics(draw: Draw, truth: dict[str, Any], answers: list[dict[str, Any]]) -> list[Cell]:
    """The numbers of a step, which are sums: what one process says of all of them."""
    if not draw.statistics:
        return []
    total = len(truth["plain"]["losses"])
    out = []
    for number in range(draw.steps):
        step = truth["steps"][number]
        rows = {r.site: r for r in answers[0]["rows"][number]}
        have = {"values": step["values"], "gradients": step["gradients"]}
        real = draw.vocabulary - draw.padding if draw.padding else None
        want = measuring.expected(have, rows, total, real, bool(draw.capacity))
        names = [*draw.statistics, *(f"{s}.grad" for s in draw.statistics if s in step["gradients"])]
        for name in names:
            numbers = measuring.numbers(want[name]) if name in want else None
            wrong = measuring.differences(rows[name], numbers, total) if numbers else ["absent"]
            check = " ".join([f"statistics step {number}", *wrong])
            out.append(Cell(draw.layout, name, check, float("inf") if wrong else 0.0, model=draw.kind))
    return out


def _against_twin(draw: Draw, answers: list[dict[str, Any]]) -> list[Cell]:
    """With dropout: a run beside its twin of the same random numbers."""
    if not draw.edits:
        return _unchanged(draw, {}, answers)
    twins = [a["twin"] for a in answers]
    got, want = found(draw, answers), found(draw, twins)
    return [
        Cell(draw.layout, *at, _distance(got.get(at), want.get(at)), model=draw.kind)
        for at in sorted(got.keys() | want.keys())
    ]
