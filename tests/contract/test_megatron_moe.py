"""What the adapter relies on in the installed megatron-core's layers of experts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions
METHODS = ("dispatch_preprocess", "token_permutation")


def facts(dispatcher: str) -> dict[str, Any]:
    """One step of a real model; what passes by at the places that taps stand at."""
    case = Case("moe", experts=4, layers=2, dispatcher=dispatcher)
    chunks = ranks.start(case)
    layer: Any = chunks[0].decoder.layers[0].mlp
    seen: dict[str, Any] = {
        "classes": {c.__name__ for c in type(layer).__mro__},
        "experts": [c.__name__ for c in type(layer.experts).__mro__],
        "router": {c.__name__ for c in type(layer.router).__mro__},
        "indices": list(layer.local_expert_indices),
        "dispatcher": type(layer.token_dispatcher).__name__,
    }
    method = next(m for m in METHODS if hasattr(layer.token_dispatcher, m))
    original = getattr(layer.token_dispatcher, method)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        tokens, chosen = next(iter(given.values())), given["routing_map"]
        seen.update(tokens=tuple(tokens.shape), chosen=(tuple(chosen.shape), str(chosen.dtype)), map=chosen)
        return original(*args, **kwargs)

    setattr(layer.token_dispatcher, method, dispatch)
    gating = layer.router.gating
    layer.router.gating = lambda *a: seen.update(logits=tuple(gating(*a).shape)) or gating(*a)

    def experts(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.update(arguments=(len(args), sorted(kwargs)), returned=(type(output).__name__, len(output)))
        seen.update(rows=args[0].detach(), weights=tuple(args[2].shape))

    layer.experts.register_forward_hook(experts, with_kwargs=True)
    layer.router.register_forward_hook(
        lambda m, a, out: seen.update(routed=[tuple(t.shape) for t in out], router_input=a[0].detach())
    )
    called: list[int] = []
    for number, expert in enumerate(layer.experts.local_experts):
        expert.register_forward_hook(lambda m, a, out, n=number: called.append(n))
    gpt.step(Case("one", experts=4, layers=2, microbatches=1), chunks, 0)
    tokens, chosen = seen.pop("router_input"), seen.pop("map")
    by_expert = chosen.T.nonzero()[:, 1]
    seen["in order"] = bool((tokens.reshape(-1, gpt.HIDDEN)[by_expert] == seen.pop("rows")).all())
    seen["called"] = called
    return seen


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts(dispatcher: str) -> None:
    (seen,) = run(1, facts, dispatcher)
    tokens = gpt.SEQUENCE * gpt.BATCH
    assert "MoELayer" in seen["classes"]
    assert "BaseMoELayer" in seen["classes"], "which has local_expert_indices"
    assert seen["experts"][0] == "SequentialMLP"
    assert "Router" in seen["router"]
    assert seen["indices"] == [0, 1, 2, 3]
    assert ("AlltoAll" in seen["dispatcher"]) == (dispatcher == "alltoall"), (
        "its order of sources is known by it"
    )
    assert seen["tokens"] == (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
    assert seen["chosen"] == ((tokens, 4), "torch.bool")
    assert seen["logits"] == (gpt.SEQUENCE, gpt.BATCH, 4)
    assert seen["routed"] == [(tokens, 4), (tokens, 4)]
    assert seen["arguments"] == (3, []), "rows, their numbers by expert, weights: all by position"
    assert seen["weights"] == (tokens * 2,)
    assert seen["returned"] == ("tuple", 2)
    assert seen["called"] == [0, 1, 2, 3], "every expert runs, in order, once"
    assert seen["in order"], "rows are sorted by expert and then by token"
