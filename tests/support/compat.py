"""What runs on the ranks in tests of the compatible interface, on Megatron models, and its truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support import gpt, oracle, ranks
from tests.support.gpt import Case

# register_* to the module that it is shown on, the site that this is, and whether it is a gradient
KINDS = {
    "register_forward_hook": ("decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1:output"),
    "register_forward_pre_hook": ("decoder.layers.1.mlp.linear_fc2", "decoder.layers.1.mlp.linear_fc2:input"),
    "register_full_backward_hook": ("decoder.layers.1.mlp", "decoder.layers.1.mlp:input"),
    "register_full_backward_pre_hook": (
        "decoder.layers.0.self_attention",
        "decoder.layers.0.self_attention:output",
    ),
}
BACKWARD = ("register_full_backward_hook", "register_full_backward_pre_hook")
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return oracle.edit(inputs)


def wrap(case: Case, chunks: list[Any], output_ptr: dict[str, list[Tensor]], **settings: Any) -> Any:
    """A compatible FlexModel of a case's model, with gradients on the scale of the backward pass."""
    from megatron_flex.compat import FlexModel

    settings.setdefault("divide_gradients_by_dp", False)
    module = chunks if len(chunks) > 1 else chunks[0]
    return FlexModel(module, output_ptr, case.tp, case.pp, case.dp, **settings)


def start(case: Case, state: dict[str, Tensor] | None = None) -> list[Any]:
    chunks = ranks.start(case)
    if state is None:
        for chunk in chunks:
            gpt.randomize(chunk)
    else:
        gpt.load(chunks, state)
    return chunks


def truth(case: Case) -> dict[str, Any]:
    """Of one process: values, gradients, and the effect of an edit at each place."""
    sites = [site for _, site in KINDS.values()]
    forward = [site for call, (_, site) in KINDS.items() if call not in BACKWARD]
    found = oracle.run(case, sites, forward)
    for call in BACKWARD:
        _, site = KINDS[call]

        def visit(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor.register_hook(oracle.edit)
            return tensor

        found["edited"][site] = _step(
            case, found["state"], lambda root, s=site, v=visit: oracle.install(root, s, v)
        )

    def hook_weight(root: Any) -> None:
        root.get_parameter(WEIGHT).register_hook(oracle.edit)

    found["edited"][WEIGHT] = _step(case, found["state"], hook_weight)
    return found


def _step(case: Case, state: dict[str, Tensor], put: Any) -> tuple[list[float], dict[str, Tensor]]:
    chunks = gpt.build(case)
    gpt.load(chunks, state)
    put(chunks[0])
    losses = gpt.step(case, chunks, 0)
    return losses, {n: p.grad.clone() for n, p in gpt.global_names(chunks[0]) if p.grad is not None}


def sharded(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    """Of one rank: what `output_ptr` got, and the effect of an edit at each place."""
    from megatron_flex.compat import HookFunction
    from tests.distributed import matrix

    chunks = start(case, state)
    answer: dict[str, Any] = {"edited": {}, "read": {}}
    places = {**{call: name for call, (name, _) in KINDS.items()}, "register_hook": WEIGHT}
    output: dict[str, list[Tensor]] = {}
    flex = wrap(case, chunks, output)
    for call, name in places.items():
        assert getattr(flex, call)(HookFunction(name)) is None
    answer["dp"] = flex.fmps.get_data_parallel_rank()
    for _ in range(2):
        answer["plain"] = gpt.step(case, chunks, answer["dp"])
    answer["read"] = {n: list(r) for n, r in output.items()}
    assert flex.restore() is chunks[0]
    for call, name in places.items():
        flex = wrap(case, chunks, {})
        getattr(flex, call)(HookFunction(name, editing_function=edit))
        mesh = flex._flex.session.mesh
        answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes)}
        losses = gpt.step(case, chunks, answer["dp"])
        answer["edited"][call] = losses, matrix._gradients(flex._flex, chunks)
        flex.restore()
    answer["leader"] = torch.distributed.get_rank() == 0
    return answer
