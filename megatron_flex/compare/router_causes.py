"""Causes at a router: dropped tokens, another number of experts, a bias, the scale of an auxiliary loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.hint import ComparedRuns, Hint
from megatron_flex.compare.routing_ties import ROUTER, RoutingTies
from megatron_flex.compare.tensor_pairs import TensorPair, align_arrays
from megatron_flex.dump import GRADIENT, VALUE

CHOICE_FIELDS = (  # of the configuration, by which experts are chosen
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)
AUXILIARY_FIELDS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
CAPACITY, BALANCING = "moe_expert_capacity_factor", "moe_router_load_balancing_type"
SAME_PART = 0.05  # of what differs in gradients of logits, that a scale of the auxiliary loss leaves


def describe_fields(a: Mapping[str, object], b: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """The fields of the two configurations that differ, with both values."""
    return [
        f"{name} is {a.get(name)!r} in A and {b.get(name)!r} in B"
        for name in names
        if a.get(name) != b.get(name)
    ]


class RouterCauses(ComparedRuns):
    """The routers of both runs."""

    def explain(self, pair: TensorPair, ties: RoutingTies | None) -> Iterator[Hint]:
        """Lines about the first divergence, if it is at a router.

        Args:
            pair: the first divergence.
            ties: the tokens whose experts differ there, by the logits of both runs.
        """
        item = pair.item
        if ROUTER.fullmatch(item.site) and item.kind == VALUE and ties is not None and ties.others:
            yield from self._explain_choices(item, ties)
        elif item.kind == GRADIENT and item.site.endswith("router:logits"):
            yield from self._explain_auxiliary_loss(pair)

    # -- the choice of experts -----------------------------------------------------------------------------

    def _explain_choices(self, item: ComparedTensor, ties: RoutingTies) -> Iterator[Hint]:
        models = self.a.manifest.model, self.b.manifest.model
        sample, token, *experts = ties.first or (0, 0, (), ())
        chosen = [list(chosen) for chosen in experts]
        place = f"first sample {sample}, token {token}: experts {chosen[0]} in A and {chosen[1]} in B"
        configured = describe_fields(*models, CHOICE_FIELDS)
        dropped = [run for run, count in zip("AB", ties.fewer, strict=True) if count]
        if not dropped:
            text = f"{ties.others} of {ties.tokens} tokens have other experts, and not by a tie ({place})"
            yield Hint("router", text)
        for run in dropped:
            count = ties.fewer["AB".index(run)]
            text = f"{count} of {ties.tokens} tokens have fewer experts in {run} ({place})"
            yield Hint("router", text)
        yield from (Hint("configuration", text) for text in configured)
        if configured or not self._agrees(item.site.rpartition(":")[0] + ":logits", item):
            return
        if dropped:
            yield from self._explain_drops(models, dropped)
        else:
            yield Hint("router", f"the logits agree: {_describe_choice(models[0])}")

    def _explain_drops(self, models: Sequence[Mapping[str, object]], runs: Sequence[str]) -> Iterator[Hint]:
        factor = models[0].get(CAPACITY)
        if factor is not None:
            yield Hint(
                "dropped tokens",
                f"{' and '.join(runs)} dropped tokens of full experts ({CAPACITY}={factor}), whose capacity "
                "counts the tokens of a rank or of a microbatch",
            )
        else:
            text = f"the logits agree and {CAPACITY} is None: {' and '.join(runs)} masks or drops tokens"
            yield Hint("dropped tokens", text)

    def _agrees(self, name: str, item: ComparedTensor) -> bool:
        rows = [r for r in self.rows if r.name == ComparedTensor(name, VALUE, item.call).name]
        return bool(rows) and not any(r.diverges for r in rows)

    # -- the auxiliary loss --------------------------------------------------------------------------------

    def _explain_auxiliary_loss(self, pair: TensorPair) -> Iterator[Hint]:
        """Whether gradients of probabilities agree, and those of logits differ by another loss's part."""
        router = pair.item.site.rpartition(":")[0]
        grad = ComparedTensor(f"{router}:probs", GRADIENT, pair.item.call)
        row = self.find_row(grad, pair.iteration)
        if row is None or row.diverges or not row.is_evidence:
            return
        text = f"{row.name} agrees and {pair.item.name} does not: the fault is in the router's backward pass"
        yield Hint("router", text)
        models = self.a.manifest.model, self.b.manifest.model
        fields = describe_fields(*models, AUXILIARY_FIELDS)
        yield from (Hint("configuration", text) for text in fields)
        scale = self._measure_auxiliary_scale(pair, router, models[0])
        if scale is not None:
            yield Hint(
                "auxiliary loss",
                f"what an auxiliary loss adds to {pair.item.name} is {scale:.4g} times as large in B: its "
                "coefficient, or what it is divided by",
            )

    def _measure_auxiliary_scale(
        self, pair: TensorPair, router: str, model: Mapping[str, object]
    ) -> float | None:
        """The factor of the auxiliary loss; None if that does not explain the difference."""
        read = {
            (point, kind): self._read(pair, ComparedTensor(f"{router}:{point}", kind, pair.item.call))
            for point, kind in (("logits", VALUE), ("probs", VALUE), ("probs", GRADIENT))
        }
        grad_a, grad_b = (t.double() for t in pair.read([slice(0, n) for n in pair.shape]))
        logits, probs, grad = read.values()
        if (
            logits is None
            or probs is None
            or grad is None
            or not (grad_a.isfinite() & grad_b.isfinite()).all()
        ):
            return None
        main = compute_logits_gradient(logits, probs, grad, model)
        if main is None or main.shape != grad_a.shape:
            return None
        first, second = grad_a - main, grad_b - main
        if float(first.norm()) <= SAME_PART * float((grad_b - grad_a).norm()) or not float(
            (grad_b - grad_a).norm()
        ):
            return None
        scale = float((first * second).sum() / first.square().sum())
        left = float((second - scale * first).norm()) / float((grad_b - grad_a).norm())
        return scale if left <= SAME_PART and math.isfinite(scale) else None

    def _read(self, pair: TensorPair, item: ComparedTensor) -> Tensor | None:
        """A tensor of A with the entries of a pair; None if it has others, or too many."""
        if item not in self.a.items() or 8 * math.prod(pair.shape) > self.most:
            return None
        array = self.a.array(item)
        pairs = align_arrays(pair.item, pair.iteration, array, self.b.array(pair.item))
        if isinstance(pairs, str) or len(pairs) != 1 or pairs[0].numbers != pair.numbers:
            return None
        return pairs[0].read([slice(0, n) for n in pair.shape])[0].double()


def _describe_choice(model: Mapping[str, object]) -> str:
    """What chooses other experts by equal logits, in this configuration."""
    if model.get(BALANCING) == "sinkhorn":
        return f"{BALANCING}=sinkhorn balances the tokens of a rank and a microbatch"
    unseen = "the expert bias" if model.get("moe_router_enable_expert_bias") else "groups or a bias"
    return f"{unseen} of the router differs"


def compute_logits_gradient(
    logits: Tensor, probs: Tensor, grad: Tensor, model: Mapping[str, object]
) -> Tensor | None:
    """The gradient of a router's logits from that of its probabilities, without that of an auxiliary loss.

    Args:
        logits: `[..., experts]`.
        probs: zero for experts that were not chosen.
        grad: of `probs`.
        model: the model's config.

    Returns:
        The gradient; None if the probabilities are not the function of the logits that is known here.
    """
    chosen, scale = probs != 0, model.get("moe_router_topk_scaling_factor") or 1.0
    function = model.get("moe_router_score_function", "softmax")
    with torch.enable_grad():
        leaf = logits.detach().clone().requires_grad_()
        if function == "sigmoid":
            scores = leaf.sigmoid() * chosen
            out = scores / (scores.sum(-1, keepdim=True) + 1e-20) if int(chosen.sum(-1).max()) > 1 else scores
        elif function != "softmax":
            return None
        elif model.get("moe_router_pre_softmax"):
            out = leaf.softmax(-1) * chosen
        else:
            out = leaf.masked_fill(~chosen, -math.inf).softmax(-1)
        out = out * float(str(scale))
        if not torch.allclose(out, probs, rtol=1e-2, atol=1e-3):
            return None
        (logits_gradient,) = torch.autograd.grad(out, leaf, grad)
    return logits_gradient
