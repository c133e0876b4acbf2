"""Values that are not finite, planted on one rank of a Megatron run, and what the search for them says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import gpt, ranks, wrapped
from tests.support.rank import changes

NAN, INF = float("nan"), float("inf")
SCALE = 4096.0


@dataclass(frozen=True)
class Plant:
    """A value that is not finite.

    Attributes:
        name: for the ids of tests.
        module: whose output, its gradient, or whose parameter gets the value.
        kind: `output`, `gradient`, `weight`, `weight gradient`, `scores` or `loss`.
        site: the hook point that must be named; that of the output if empty.
        value: the value.
        place: the entry of this rank's shard, by fractions of its lengths.
        microbatch: the microbatch of an output or a gradient; in which the value is planted.
        last: whether the last of the ranks that have the module has the value, or the first.
    """

    name: str
    module: str
    kind: str = "output"
    site: str = ""
    value: float = NAN
    place: float = 0.7
    microbatch: int = 1
    last: bool = True

    @property
    def expected(self) -> str:
        """The name that the verdict must give."""
        return self.site or f"{self.module}:output"


class _PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, poison: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.poison = poison
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.poison(gradient), None


def _poison(plant: Plant, tensor: Tensor) -> Tensor:
    entry = tuple(min(int(n * plant.place), n - 1) for n in tensor.shape)
    out = tensor.clone()
    out[entry] = plant.value
    return out


def _wrap_output(plant: Plant, module: nn.Module) -> None:
    """Let the module return the value in one microbatch; recomputation returns it again."""
    forward, calls = module.forward, [0, 0]

    def run(*args: Any, **kwargs: Any) -> Any:
        from megatron_flex.adapters import is_recomputing

        replays = is_recomputing()
        number = calls[replays]
        calls[replays] += 1
        output = forward(*args, **kwargs)
        if number != plant.microbatch:
            return output
        first = output[0] if isinstance(output, tuple) else output
        poison = torch.no_grad()(lambda t: _poison(plant, t))
        if plant.kind == "gradient":
            first = _PoisonGradient.apply(first, poison)
        else:
            with torch.no_grad():
                bad = _poison(plant, first) - first
            first = first + bad
        return (first, *output[1:]) if isinstance(output, tuple) else first

    changes.setattr(module, "forward", run)


def _plant(plant: Plant, module: nn.Module, heads: int) -> None:
    if plant.kind in ("output", "gradient"):
        _wrap_output(plant, module)
    elif plant.kind == "weight":
        module.weight.data[0] = plant.value
    elif plant.kind == "weight gradient":
        module.weight.register_hook(lambda gradient: _poison(plant, gradient))
    elif plant.kind == "scores":  # queries and keys are large, their product is not finite
        width = module.weight.shape[0] // heads
        module.weight.data[: (heads - 1) * width] *= 1e22


def _divide_by_zero(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = step(*args, **kwargs)

        def divide(output: Tensor) -> Any:
            loss, *rest = loss_function(output)
            return (loss / torch.zeros(()), *rest)

        return output, divide

    return run


def scale_loss(loss: Tensor) -> Tensor:
    """What an optimizer's gradient scaler does."""
    return loss * SCALE


def search(
    case: gpt.Case,
    state: dict[str, Tensor] | None,
    plant: Plant | None,
    mode: str = "stop",
    ddp: dict[str, Any] | None = None,
    path: Path | None = None,
) -> dict[str, Any]:
    """Run a step with a planted value; then capture the tensor that must be named, which shows all of it."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    if state is not None:
        gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    with ranks.counting() as plain:
        gpt.step(case, chunks, dp)
    with mf.attach(chunks) as flex:
        local_sites = flex.session.taps.local_sites.values()
        known = {s.module: s.tap.module for s in local_sites if s.tap and s.tap.module is not None}
        coords = dict(flex.session.mesh.coords)
    answer: dict[str, Any] = {"coords": coords, "has": False, "error": None, "full": None}
    if plant is not None and plant.kind == "loss":
        changes.setattr(gpt, "forward_step", _divide_by_zero(gpt.forward_step))
    elif plant is not None and plant.module in known:
        edge = {n: (flex.session.mesh.sizes[n] - 1 if plant.last else 0) for n in ("tp", "cp", "dp")}
        answer["has"] = all(coords[n] == at for n, at in edge.items())
        if answer["has"]:
            groups = chunks[0].config.num_query_groups // case.tp if plant.kind == "scores" else 1
            heads = groups and (chunks[0].config.num_attention_heads // case.tp // groups + 2)
            _plant(plant, known[plant.module], heads)
    chunks = chunks if ddp is None else wrapped.ddp(chunks, True, **ddp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mf.FlexWarning)
        with mf.attach(chunks) as flex:
            flex.register_nonfinite(mf.NonFinite(mode, path=path))  # type: ignore[arg-type]  # both are tried
            try:
                with ranks.counting() as counts:
                    gpt.step(case, chunks, dp)
            except mf.NonFiniteError as error:
                answer["error"] = {**vars(error), "text": str(error)}
            answer["more"] = {n: counts[n] - plain[n] for n in counts if counts[n] != plain[n]}
        if plant is not None and plant.kind == "output":
            hook = mf.HookFunction(plant.expected)
            answer["full"] = _capture(case, chunks, dp, hook, plant.microbatch)
    answer["said"] = [str(w.message) for w in caught if issubclass(w.category, mf.FlexWarning)]
    return answer


def _capture(case: gpt.Case, chunks: list[nn.Module], dp: int, hook: Any, microbatch: int) -> Tensor | None:
    """The entries of the full tensor that are not finite, on the leader."""
    import megatron_flex as mf

    for chunk in chunks:
        for module in chunk.modules():
            run = vars(module).get("forward")
            for cell in getattr(run, "__closure__", None) or ():
                if isinstance(cell.cell_contents, list):  # the numbers of calls
                    cell.cell_contents[:] = [0, 0]
    with mf.attach(chunks, [hook]) as flex:
        gpt.step(case, chunks, dp)
        readings = flex.output_dict.get(hook.module_name, [])
        return readings[microbatch].isfinite().logical_not().nonzero() if len(readings) else None
