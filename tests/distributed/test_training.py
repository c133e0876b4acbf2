"""Under Megatron's DistributedDataParallel and optimizer: what is read and edited, over several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.training import Trainer

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

STEPS = 3  # two updates, and a step that shows them
SITES = [
    "embedding:output",
    "decoder.layers.0.self_attention.linear_proj:partial",
    "decoder.layers.1.mlp.linear_fc1:output",
    "decoder.layers.1.input_layernorm:output",
    "output_layer:output",
]
EDITED = "decoder.layers.1.mlp.linear_fc1:output"
PLAIN: dict[str, Any] = {}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
CASES = [
    (Case("dp2", dp=2, layers=2), PLAIN),
    (Case("tp2 sp dp2, distributed optimizer", tp=2, sp=True, dp=2, layers=2), DISTRIBUTED),
    (Case("dp2, overlapped", dp=2, layers=2), OVERLAPPED),
    (Case("cp2 dp2, overlapped", cp=2, dp=2, layers=2), OVERLAPPED),
    (Case("pp2 vpp2 dp2, distributed optimizer", pp=2, vpp=2, dp=2, layers=4), DISTRIBUTED),
]


def alone(case: Case, edited: bool) -> dict[str, Any]:
    """The same steps on one process, by plain PyTorch hooks."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    values: dict[str, list[Tensor]] = {site: [] for site in SITES}
    gradients: dict[str, list[Tensor]] = {site: [] for site in SITES}

    def watch(site: str) -> oracle.Visit:
        def visit(tensor: Tensor) -> Tensor:
            values[site].append(tensor.detach().clone())
            tensor = oracle.edit(tensor) if edited and site == EDITED else tensor.clone()
            tensor.register_hook(lambda grad: gradients[site].append(grad.clone()))  # of what goes on
            return tensor

        return visit

    for site in SITES:
        oracle.install(chunks[0], site, watch(site))
    trainer = Trainer(case, chunks, 0)
    steps = [trainer.step() for _ in range(STEPS)]
    after = {n: p.detach().clone() for n, p in gpt.global_names(chunks[0])}
    return {"state": state, "values": values, "gradients": gradients, "steps": steps, "after": after}


def _edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return oracle.edit(inputs)


def spread(case: Case, ddp: dict[str, Any], state: dict[str, Tensor], edited: bool) -> dict[str, Any]:
    """The same steps on this rank of many, by hooks of ours."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    rank = ranks.mine(chunks)
    trainer = Trainer(case, chunks, rank, **ddp)
    hooks = [mf.HookFunction(s, hook_type=k) for s in SITES for k in ("forward", "tensor")]
    if edited:
        hooks.append(mf.HookFunction(EDITED, editing_function=_edit, save=False))
    with mf.attach(trainer.models, hooks) as flex:
        steps = [trainer.step() for _ in range(STEPS)]
        trainer.settle()
        after = dict(flex.named_full_parameters())
        read = {n: list(r) for n, r in flex.output_dict.items()}
    return {"dp": rank, "steps": steps, "read": read, "after": after, "last": bool(chunks[-1].post_process)}


@pytest.mark.parametrize("edited", [False, True], ids=["read", "edited"])
@pytest.mark.parametrize(("case", "ddp"), CASES, ids=lambda x: getattr(x, "name", None))
def test_steps_of_training(case: Case, ddp: dict[str, Any], edited: bool) -> None:
    truth = truths.once(alone, case.single(), edited)
    answers = run(case.world, spread, case, ddp, truth["state"], edited)
    leaders = sorted((a for a in answers if a["read"]), key=lambda a: a["dp"])
    assert len(leaders) == case.dp
    for site in SITES:
        for name, wanted, factor in (
            (site, truth["values"][site], 1),
            (f"{site}.grad", truth["gradients"][site], case.dp * case.cp),
        ):
            assert len(wanted) == STEPS * case.microbatches * case.dp
            for leader in leaders:
                mine = range(leader["dp"] * case.microbatches, (leader["dp"] + 1) * case.microbatches)
                want = [w for n, w in enumerate(wanted) if n % (case.microbatches * case.dp) in mine]
                got = leader["read"][name]
                assert len(got) == len(want)
                errors = [relative(g, w * factor) for g, w in zip(got, want, strict=True)]
                assert max(errors) <= BOUND, (name, errors)
    first, last = truth["state"], truth["after"]
    moved = [relative(last[n], first[n]) for n in last]
    assert min(moved) > 100 * BOUND, "every parameter has moved, far more than the bound"
    for leader in leaders:
        assert leader["after"].keys() == last.keys()
        for name, want in last.items():
            assert relative(leader["after"][name], want) <= BOUND, name
    for answer in answers:
        for (_, norm), (_, wanted) in zip(answer["steps"], truth["steps"], strict=True):
            assert norm == pytest.approx(wanted, rel=BOUND)


def stale() -> list[int]:
    """How many parameters have not moved right after a step, and once their gathering is waited for."""
    case = Case("dp2", dp=2, layers=2)
    chunks = ranks.start(case)
    trainer = Trainer(case, chunks, ranks.mine(chunks), **OVERLAPPED)
    before = [p.detach().clone() for p in chunks[0].parameters()]
    trainer.step()
    counts = []
    for wait in (lambda: None, trainer.settle):
        wait()
        same = [torch.equal(p, b) for p, b in zip(chunks[0].parameters(), before, strict=True)]
        counts.append(sum(same))
    return counts


def test_overlapped_parameters_are_old_until_gathered() -> None:
    """What `named_full_parameters` warns of; it reads what the model holds."""
    for unmoved, later in run(2, stale):
        assert unmoved > 0
        assert later == 0
