"""The scale of gradients: what Megatron sends back, and that of a microbatch's own loss."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])

SITES = ["decoder.layers.1.mlp.linear_fc1:output", "decoder.layers.0:output"]
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
EDITED = SITES[0]
BELOW = "decoder.layers.0.mlp.linear_fc1.weight"
Kind = Literal["pair", "three", "each token", "small"]
CASES: list[tuple[Case, float | None, Kind]] = [
    (Case("tp2 sp, scaled", tp=2, sp=True, layers=2), 1024.0, "pair"),
    (Case("tp2, four microbatches", tp=2, layers=2, microbatches=4), None, "pair"),
    (Case("cp2, scaled", cp=2, layers=2), 1024.0, "pair"),
    (Case("cp2 pp2, four microbatches", cp=2, pp=2, layers=2, microbatches=4), 1024.0, "pair"),
    (Case("cp2, three", cp=2, layers=2), 1024.0, "three"),
    (Case("cp2, each token", cp=2, layers=2, extra={"calculate_per_token_loss": True}), 1024.0, "each token"),
]


def skew(gradient: Tensor) -> Tensor:
    """An edit that tells scales apart: it adds something of one scale to whatever comes."""
    return oracle.edit(gradient) + 0.01


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return skew(inputs)


def alone(kind: Kind) -> dict[str, Any]:
    """One process, no schedule: for each microbatch the loss as people write it, and its gradients."""
    chunks = ranks.start(Case("alone", layers=2))
    state = gpt.randomize(chunks[0])
    out: dict[str, Any] = {"state": state}
    for name, change in (("plain", None), ("edited", skew)):
        fresh = gpt.build(Case("alone", layers=2))
        gpt.load(fresh, state)
        seen: dict[str, list[Tensor]] = {site: [] for site in SITES}

        def watch(site: str, change: Any = change, seen: Any = seen) -> Any:
            def react(grad: Tensor) -> Tensor | None:
                seen[site].append(grad.clone())
                return change(grad) if change and site == EDITED else None

            def visit(tensor: Tensor) -> Tensor:
                tensor = tensor.clone()
                tensor.register_hook(react)
                return tensor

            return visit

        for site in SITES:
            oracle.install(fresh[0], site, watch(site))
        weights = dict(gpt.global_names(fresh[0]))
        taken: dict[str, list[Tensor]] = {WEIGHT: [], BELOW: []}
        for batch in gpt.data(4):
            positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
            mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
            losses = fresh[0](batch["tokens"], positions, mask, labels=batch["labels"])
            (losses.sum() if kind == "each token" else losses.mean()).backward()
            for weight, got in taken.items():
                got.append(weights[weight].grad.clone())
                weights[weight].grad = None
        out[name] = {**seen, **taken}
    return out


def step(case: Case, chunks: list[Any], kind: Kind) -> None:
    """Megatron's schedule with a loss function of that kind."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
        output, pair = gpt.forward_step(iterator, model)

        def loss(losses: Tensor) -> Any:
            tokens = losses.numel() * (case.cp if VERSION < (0, 14) else 1)  # 0.12 wants those of all ranks
            return losses.sum(), torch.tensor(tokens, dtype=torch.int), {"loss": losses.detach().sum()}

        def small(losses: Tensor) -> Any:
            value, report = pair(losses)
            return value * 2.0**-14, report

        return output, {"pair": pair, "small": small}.get(kind, loss)

    for chunk in chunks:
        chunk.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(gpt.data(case.microbatches)),
        model=chunks[0],
        num_microbatches=case.microbatches,
        seq_length=gpt.SEQUENCE,
        micro_batch_size=gpt.BATCH,
        forward_only=False,
    )


def spread(case: Case, scale: float | None, kind: Kind, state: dict[str, Tensor]) -> dict[str, Any]:
    """The same under Megatron's schedule, on both scales; the sums of the weights' gradients, edited."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    if scale is not None:
        chunks[0].config.grad_scale_func = lambda loss: loss * scale
    out: dict[str, Any] = {}
    for at in ("raw", "loss"):
        hooks = [mf.HookFunction(n, hook_type="tensor", gradient_scale=at) for n in (*SITES, WEIGHT)]
        with mf.attach(chunks, hooks) as flex:
            step(case, chunks, kind)
            out[at] = {n.removesuffix(".grad"): list(r) for n, r in flex.output_dict.items()}
    hooks = [mf.HookFunction(EDITED, editing_function=edit, hook_type="tensor", gradient_scale="loss")]
    hooks += [mf.HookFunction(n, hook_type="tensor", gradient_scale="loss") for n in (WEIGHT, BELOW)]
    with mf.attach(chunks, hooks) as flex:
        step(case, chunks, kind)
        out["edited"] = {n.removesuffix(".grad"): list(r) for n, r in flex.output_dict.items()}
    return out


@pytest.mark.parametrize(("case", "scale", "kind"), CASES, ids=lambda x: getattr(x, "name", None))
def test_gradients_on_the_scale_of_the_loss(case: Case, scale: float | None, kind: Kind) -> None:
    truth = truths.once(alone, kind)
    found = run(case.world, spread, case, scale, kind, truth["state"])[0]
    factor = (scale or 1.0) * (1.0 if kind == "each token" else case.cp / case.microbatches)
    assert factor != 1.0, "a case that cannot tell the scales apart"
    for at, reading, times in (("loss", "plain", 1.0), ("raw", "plain", factor), ("edited", "edited", 1.0)):
        assert found[at], at
        for name, got in found[at].items():
            assert len(got) == case.microbatches
            for one, want in zip(got, truth[reading][name], strict=False):
                assert relative(one, want * times) <= BOUND, (at, name)


def half() -> Any:
    """A gradient of fp16 as it goes back, far below what fp16 can hold without the scale."""
    import megatron_flex as mf

    case = Case("fp16", layers=2, extra={"fp16": True, "params_dtype": torch.float16})
    chunks = ranks.start(case)
    chunks[0].half()
    chunks[0].config.grad_scale_func = lambda loss: loss * 2.0**16
    out = []
    for at in ("raw", "loss"):
        with mf.attach(chunks, [mf.HookFunction(SITES[1], hook_type="tensor", gradient_scale=at)]) as flex:
            step(case, chunks, "small")
            out.append(flex.output_dict[f"{SITES[1]}.grad"][0])
    hook = mf.HookFunction(SITES[1], edit, hook_type="tensor", gradient_scale="loss")
    with mf.attach(chunks, [hook]):
        step(case, chunks, "small")
    return *out, case.microbatches


def test_half_precision_keeps_its_small_gradients() -> None:
    ((raw, loss, count),) = run(1, half)
    assert raw.dtype == torch.float16
    assert loss.dtype == torch.float32
    assert torch.equal(loss * 2.0**16 / count, raw.float())
    assert bool((loss.half().float() != loss).any()), "fp16 would lose some of them"


def refusals() -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(Case("one", layers=2))
    flex = mf.FlexModel(chunks)
    flex.register_full_backward_pre_hook(mf.HookFunction(SITES[0]))
    out = []
    for hook, kind in (
        (mf.HookFunction(SITES[0], gradient_scale="loss"), "forward"),
        (mf.HookFunction(SITES[0], gradient_scale="loss"), "full_backward_pre"),
    ):
        with pytest.raises(mf.HookError) as caught:
            getattr(flex, f"register_{kind}_hook")(hook)
        out.append(str(caught.value))
    with pytest.raises(mf.HookError) as caught:
        mf.HookFunction(SITES[0], gradient_scale="mean")  # type: ignore[arg-type]
    return [*out, str(caught.value)]


def test_scales_that_cannot_be_are_refused() -> None:
    ((forward, both, unknown),) = run(1, refusals)
    assert_names(forward, "gradient_scale")
    assert_names(both, "gradient_scale")
    assert SITES[0] in both
    assert_names(unknown, "mean", "raw", "loss")
