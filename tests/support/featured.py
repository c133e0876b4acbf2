"""Features of a small GPT: what the loss function reads of them, and gradients of a loss of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import matrix
from tests.support import gpt, ranks
from tests.support.rank import changes

LAYERS = (0, 1, 3)
SHARE = 0.25  # of the loss of the features, beside the model's


def loss_of(features: Mapping[int, Tensor]) -> Tensor:
    """A loss that weights each entry of each layer differently."""
    total = torch.zeros(())
    for layer in LAYERS:
        hidden = features[layer]
        weights = torch.linspace(-1.0, 1.0, hidden.numel()).view(hidden.shape)
        total = total + (layer + 1) * (weights * hidden * hidden).mean()
    return SHARE * total


def watch_loss(read: Callable[[], Tensor | None]) -> None:
    """Let the loss function add what `read` returns to the model's loss."""
    step = gpt.forward_step

    def run(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = step(*args, **kwargs)

        def both(output: Tensor) -> Any:
            loss, *rest = loss_function(output)
            more = read()
            return (loss if more is None else loss + more, *rest)

        return output, both

    changes.setattr(gpt, "forward_step", run)


@dataclass(frozen=True)
class Asked:
    """How features are asked for, and whether a loss is computed of them."""

    to: Any = "last_stage"
    full: bool = True
    gradients: bool = False
    loss: bool = False
    forward_only: bool = False


@dataclass(frozen=True)
class Groups:
    """Process groups of these ranks; each rank asks for features to the one that it is in."""

    ranks: tuple[tuple[int, ...], ...]


@contextmanager
def receivers(to: Any) -> Iterator[Any]:
    """What a rank gives for `to`: the group made of `Groups`, anything else as it is."""
    if not isinstance(to, Groups):
        yield to
        return
    groups = [dist.new_group(list(ranks)) for ranks in to.ranks]
    mine = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    yield mine[0] if mine else dist.GroupMember.NON_GROUP_MEMBER
    for group in mine:
        dist.destroy_process_group(group)


def spread(case: gpt.Case, state: dict[str, Tensor], asked: Asked) -> dict[str, Any]:
    """Run a step, and return what the loss function and on_features have, with captures of the same."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    dp = ranks.mine(chunks)
    hooks = [mf.HookFunction(f"decoder.layers.{layer}") for layer in LAYERS]
    with mf.attach(chunks, hooks) as flex, receivers(asked.to) as to:
        read: list[dict[int, Tensor]] = []
        arrived: list[tuple[int, dict[int, Tensor]]] = []
        features = flex.features(
            LAYERS,
            to,
            full=asked.full,
            gradients=asked.gradients,
            on_features=lambda f, m: arrived.append((m, {k: t.detach().clone() for k, t in f.items()})),
        )

        def look() -> Tensor | None:
            if not (asked.loss or asked.to == "last_stage"):
                return None
            read.append({layer: tensor.detach().clone() for layer, tensor in features.items()})
            return loss_of(features) if asked.loss else None

        watch_loss(look)
        losses = gpt.step(case, chunks, dp, forward_only=asked.forward_only)
        grads = {} if asked.forward_only else matrix._gradients(flex, chunks)
        mesh = flex.session.mesh
        return {
            "rank": dist.get_rank(),
            "dp": dp,
            "sizes": dict(mesh.sizes),
            "coords": dict(mesh.coords),
            "receives": features.receives,
            "read": read,
            "arrived": arrived,
            "captures": {n: list(flex.output_dict[f"decoder.layers.{n}"]) for n in LAYERS}
            if flex.is_leader
            else {},
            "losses": losses,
            "gradients": grads,
            "left": len(features._exchange._micros),
            "sent": len(features._exchange._relay._sent),
        }


def by_hand(
    case: gpt.Case, state: dict[str, Tensor], share: bool, sent: tuple[int, ...] = ()
) -> dict[str, Any]:
    """One process without hooks of this package: outputs of layers, losses and gradients of parameters.

    The loss reads the layers in `sent` without their graph, as a stage has them that was sent them by hand; a
    hook adds the gradient that comes back. Autograd sums in this order, which decides the last bit.
    """
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    hidden: dict[int, Tensor] = {}
    outputs: list[dict[int, Tensor]] = []

    def keep(layer: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            hidden[layer] = leaf = output[0].detach().requires_grad_() if layer in sent else output[0]
            if layer in sent:
                output[0].register_hook(lambda grad: grad if leaf.grad is None else grad + leaf.grad)

        return hook

    for layer in LAYERS:
        chunks[0].decoder.layers[layer].register_forward_hook(keep(layer))

    def look() -> Tensor | None:
        outputs.append({layer: tensor.detach().clone() for layer, tensor in hidden.items()})
        return loss_of(hidden) if share else None

    watch_loss(look)
    losses = gpt.step(case, chunks, 0)
    grads = {name: p.grad.clone() for name, p in gpt.global_names(chunks[0])}
    return {"outputs": outputs, "losses": losses, "gradients": grads}


def train_head(case: gpt.Case, state: dict[str, Tensor]) -> tuple[Tensor, list[str]]:
    """The gradient of a draft head beside a frozen model, and which parameters of the model have one."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    head = nn.Linear(gpt.HIDDEN * len(LAYERS), gpt.HIDDEN, bias=False)
    weight = torch.linspace(-1.0, 1.0, head.weight.numel()).view(head.weight.shape)
    head.weight.data.copy_(weight)
    with mf.attach(chunks) as flex:
        flex.register_trainable_module("draft", head)
        flex.freeze()
        features = flex.features(LAYERS)

        def look() -> Tensor:
            hidden = torch.cat([features[layer] for layer in LAYERS], dim=-1)
            draft: Tensor = flex.trainable_modules["draft"](hidden)
            return draft.square().mean()

        watch_loss(look)
        gpt.step(case, chunks, ranks.mine(chunks))
        (grad,) = (p.grad for p in flex.trainable_parameters())
        assert grad is not None
        trained = [n for chunk in chunks for n, p in gpt.global_names(chunk) if p.grad is not None]
        return grad, trained


def compare_memory(case: gpt.Case) -> list[bool]:
    """For each layer, on a receiving rank, whether the feature is in the memory of the layer's output."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    here: dict[int, int] = {}
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):

        def keep(module: Any, _: Any, output: Any) -> None:
            here[module.layer_number - 1] = output[0].data_ptr()

        layer.register_forward_hook(keep)
    same: list[bool] = []
    with mf.attach(chunks) as flex, flex.features(LAYERS, gradients=True) as features:

        def look() -> None:
            same[:] = [features[layer].data_ptr() == here.get(layer) for layer in LAYERS]

        watch_loss(look)
        gpt.step(case, chunks, 0)
    return same


class Refused(NamedTuple):
    """A request that is refused: the arguments, the class of the error, and what it names."""

    arguments: dict[str, Any]
    error: str
    values: tuple[Any, ...]


REFUSED = {
    "no such layer": Refused({"layers": [1, 7]}, "SiteError", ("decoder.layers.7",)),
    "no layers": Refused({"layers": []}, "HookError", ("layers",)),
    "twice": Refused({"layers": [1, 1]}, "HookError", ([1, 1],)),
    "negative": Refused({"layers": [-1]}, "HookError", ([-1],)),
    "receiver": Refused(
        {"layers": [1], "to": "first"}, "HookError", ("first", "last_stage", "leader", "all")
    ),
    "stage": Refused({"layers": [1], "to": [5]}, "HookError", ([5], [0, 1])),
    "gradients": Refused({"layers": [1], "to": "all", "gradients": True}, "HookError", ("all", "last_stage")),
    "name": Refused({"layers": [1], "at": "decoder.layers"}, "HookError", ("decoder.layers",)),
    "function": Refused({"layers": [1], "on_features": 3}, "HookError", ("on_features", 3)),
}


def refuse(case: gpt.Case, name: str) -> tuple[str, str]:
    """The class and the text of the error of a bad request."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex:
        stage = flex.session.mesh["pp"].coord
        arguments = REFUSED[name].arguments if name in REFUSED else {"layers": [stage]}
        try:
            flex.features(**arguments)
        except mf.FlexError as error:
            return type(error).__name__, str(error)
    return "", ""


def refuse_group(case: gpt.Case, groups: Groups, gradients: bool, but: tuple[int, ...]) -> str:
    """The error of a request with groups, which the ranks `but` do not give."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex, receivers(groups) as to:
        given = dist.GroupMember.NON_GROUP_MEMBER if dist.get_rank() in but else to
        try:
            flex.features(LAYERS, given, gradients=gradients)
        except mf.HookError as error:
            return str(error)
    return ""


FAILURES: dict[str, tuple[Any, ...]] = {
    "on_features": ("on_features", "microbatch 1", "planted"),
    "a layer does not run": ("decoder.layers.0", "microbatch 0"),
    "a layer runs again": ("decoder.layers.1", "microbatch 0"),
    "a layer is changed in place": ("decoder.layers.0",),
}


def fail(case: gpt.Case, name: str) -> tuple[str, int]:
    """The error of a step in which something fails, and how many microbatches arrive in the next one."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    layers = {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}
    broken = [True]
    arrived: list[int] = []

    def receive(features: Mapping[int, Tensor], microbatch: int) -> None:
        if broken and name == "on_features" and microbatch == 1:
            raise RuntimeError("planted")
        arrived.append(microbatch)

    def wrap(layer: nn.Module, call: Callable[..., Any]) -> None:
        implementation = layer._call_impl

        def run(*args: Any, **kwargs: Any) -> Any:
            return (call if broken else implementation)(*args, **kwargs)

        changes.setattr(layer, "_call_impl", run)

    with mf.attach(chunks) as flex, flex.features(LAYERS, on_features=receive) as features:
        if name == "a layer does not run" and 0 in layers:
            wrap(layers[0], layers[0].forward)  # past its hooks
        if name == "a layer runs again" and 1 in layers:
            once = layers[1]._call_impl
            wrap(layers[1], lambda *args, **kwargs: (once(*args, **kwargs), once(*args, **kwargs))[1])
        if name == "a layer is changed in place" and 1 in layers:

            def change(_: nn.Module, args: Any, kwargs: Any) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                if broken:
                    hidden.data.mul_(1.0)
                    torch._C._autograd._unsafe_set_version_counter((hidden,), (hidden._version + 1,))

            layers[1].register_forward_pre_hook(change, with_kwargs=True)
        text = ""
        try:
            gpt.step(case, chunks, 0)
        except mf.HookError as error:
            text = str(error)
        broken.clear()
        arrived.clear()
        gpt.step(case, chunks, 0)
        return text, len(arrived) if features.receives else case.microbatches
