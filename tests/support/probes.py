"""Modules that are trained inside hooks, and the same training on one process by plain PyTorch hooks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import context, gpt, moe, oracle, ranks
from tests.support.gpt import HIDDEN, VOCABULARY, Case

STEPS = 3
QKV = "decoder.layers.0.self_attention.linear_qkv:output"
EXPERT = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1:output"
Edit = Callable[[Any, Tensor, Namespace, nn.ModuleDict], Tensor]


class Low(nn.Module):
    """A change of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class Sparse(nn.Module):
    """A sparse autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def loss(self, x: Tensor) -> Tensor:
        features = self.encode(x).relu()
        return (self.decode(features) - x).square().mean() + 0.01 * features.abs().mean()


def modules() -> dict[str, nn.Module]:
    """Fresh ones, of this process's random numbers."""
    return {
        "lens": nn.Linear(HIDDEN, VOCABULARY),
        "sparse": Sparse(),
        "low": Low(2 * HIDDEN),
        "expert": Low(2 * moe.WIDTH),
        "shared": Low(HIDDEN),
        "unused": nn.Linear(2, 2),
    }


def low(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    return modules["low"](inputs)


def expert(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    return modules["expert"](inputs)


def shared(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    return modules["shared"](inputs)


def sparse(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    (modules["sparse"].loss(inputs.detach()) * save_ctx.weight).backward()
    return inputs


def remember(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    save_ctx.hidden = inputs.detach()
    return inputs


def lens(module: Any, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    guess = modules["lens"](save_ctx.hidden).log_softmax(-1)
    truth = inputs.detach().log_softmax(-1)
    loss = nn.functional.kl_div(guess, truth, log_target=True, reduction="sum") / truth[..., 0].numel()
    (loss * save_ctx.weight).backward()
    return inputs


def edits(case: Case) -> dict[str, Edit]:
    """What is trained where. Gradients of `lens` and `sparse` are of losses of their own."""
    last = f"decoder.layers.{case.layers - 1}"
    return {
        QKV: low,
        **({EXPERT: expert} if case.experts else {}),
        "decoder.layers.0:mid": shared,
        "decoder.layers.0:output": sparse,
        "decoder.layers.0:input": remember,  # on the first stage; the lens is on the last one
        f"{last}:mid": shared,
        "output_layer:output": lens,
    }


def optimizer(parameters: Any) -> Any:
    """Adam, whose eps keeps gradients that are nothing but rounding from becoming whole steps."""
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


def alone(case: Case, per_token: bool = False) -> dict[str, Any]:
    """Train on one process, all microbatches together."""
    chunks = ranks.start(case)
    weights = gpt.randomize(chunks[0])
    torch.manual_seed(5)
    trained = nn.ModuleDict(modules())
    shared_by_all = Namespace(weight=1 / case.microbatches)  # of own losses, so that their sum is the mean
    first = {n: p.detach().clone() for n, p in trained.named_parameters()}
    for site, edit in edits(case).items():
        oracle.install(chunks[0], site, lambda tensor, edit=edit: edit(None, tensor, shared_by_all, trained))
    steps = optimizer(trained.parameters())
    gradients = []
    for _ in range(STEPS):
        steps.zero_grad()
        step(case, chunks, 0, per_token)
        if per_token:  # what Megatron's finalize_model_grads does to its own
            tokens = sum(int(_counted(batch).sum()) for batch in gpt.data(case.microbatches))
            for parameter in [*trained["low"].parameters(), *trained["shared"].parameters()]:
                parameter.grad /= tokens
        gradients.append({n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None})
        steps.step()
    after = {n: p.detach().clone() for n, p in trained.named_parameters()}
    return {"weights": weights, "first": first, "after": after, "gradients": gradients}


def spread(
    case: Case,
    weights: dict[str, Tensor],
    run_on: str = "replicated",
    frozen: bool = False,
    per_token: bool = False,
    together: bool = False,
) -> dict[str, Any]:
    """The same on this rank of many; `together`: hooks see the samples of all data parallel ranks."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, weights)
    # The first rank's values go to all: the others have others.
    torch.manual_seed(5 + torch.distributed.get_rank())
    hooks = [mf.HookFunction(s, editing_function=e, run=run_on, save=False) for s, e in edits(case).items()]
    gradients = []
    with mf.attach(chunks, hooks, gather_data_parallel=together) as flex:
        for name, module in modules().items():
            flex.register_trainable_module(name, module)
        flex.save_ctx.weight = 1.0
        if frozen:
            flex.freeze()
        steps = optimizer(flex.trainable_parameters())
        for _ in range(STEPS):
            steps.zero_grad()
            step(case, chunks, ranks.mine(chunks), per_token)
            found = flex.trainable_modules.named_parameters()
            gradients.append({n: p.grad.clone() for n, p in found if p.grad is not None})
            steps.step()
        after = {n: p.detach().clone() for n, p in flex.trainable_modules.named_parameters()}
    trains = [p.requires_grad for chunk in chunks for p in chunk.parameters()]
    return {"after": after, "gradients": gradients, "restored": all(trains)}


def step(case: Case, chunks: list[nn.Module], rank: int, per_token: bool) -> None:
    """One run of the schedule; `per_token`: gradients are divided by all tokens in the end."""
    if not per_token:
        gpt.step(case, chunks, rank)
        return
    for chunk in chunks:
        chunk.config.calculate_per_token_loss = True
    original = gpt.forward_step
    gpt.forward_step = partial(_each_token, original)  # type: ignore[assignment]
    try:
        gpt.step(case, chunks, rank)
    finally:
        gpt.forward_step = original


def _counted(batch: dict[str, Tensor]) -> Tensor:
    """Which tokens count: unequally many of microbatches, and of ranks."""
    return batch["labels"] % 3 != 0


def _each_token(forward_step: Any, iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(iterator)
    output, _ = forward_step(iter([batch]), model)
    mask = _counted(batch)[:, context.here(gpt.SEQUENCE)]

    def loss(losses: Tensor) -> Any:
        return (losses * mask).sum(), mask.sum().int(), {"loss": losses.detach().sum()}

    return output, loss
