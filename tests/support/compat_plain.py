"""Plain modules for tests of the compatible interface: what torch's own hooks see and do on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

REGISTER = {
    "forward": "register_forward_hook",
    "forward_pre": "register_forward_pre_hook",
    "full_backward": "register_full_backward_hook",
    "full_backward_pre": "register_full_backward_pre_hook",
    "tensor": "register_hook",
}


def mix(tensor: Tensor) -> Tensor:
    """An edit that mixes samples: no data parallel rank can do it alone."""
    return tensor * 1.5 + 0.5 * tensor.roll(1, 0)


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return mix(inputs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 20), nn.Linear(20, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.fc2(self.fc1(inputs).tanh())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(10, 3))


def data(count: int = 6) -> Tensor:
    return torch.randn(count, 10, generator=torch.Generator().manual_seed(3))


def loss_of(output: Tensor, count: int) -> Tensor:
    """A loss whose sum over parts of the batch is that of the batch."""
    return (output**2).sum() / count


def truth(kind: str, name: str, function: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
    """One process with torch's own hook."""
    root, seen = model(), []

    def visit(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach().clone())
        return tensor if function is None else function(tensor)

    if kind == "tensor":
        root.get_parameter(name).register_hook(visit)
    else:
        module: Any = root.get_submodule(name)
        hook = {
            "forward": lambda m, args, out: visit(out),
            "forward_pre": lambda m, args: (visit(args[0]), *args[1:]),
            "full_backward": lambda m, into, out: (visit(into[0]), *into[1:]),
            "full_backward_pre": lambda m, out: (visit(out[0]), *out[1:]),
        }[kind]
        getattr(module, REGISTER[kind])(hook)
    output = root(data())
    loss_of(output, 6).backward()
    return {"seen": seen, "output": output.detach(), "grads": [p.grad for p in root.parameters()]}


def hooked(kind: str, name: str, function: Any, wrapper: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The same by the compatible calls, alone or with `sizes` samples on data parallel ranks."""
    from megatron_flex.compat import FlexModel, HookFunction

    root: Any = model()
    rank = dist.get_rank() if len(sizes) > 1 else 0
    start = sum(sizes[:rank])
    mine = data()[start : start + sizes[rank]]
    if wrapper == "ddp":
        root = nn.parallel.DistributedDataParallel(root)
    output: dict[str, list[Tensor]] = {}
    # The losses of the replicas are summed: gradients have one device's scale without a division.
    flex = FlexModel(root, output, data_parallel_size=len(sizes), divide_gradients_by_dp=False)
    called = f"module.{name}" if wrapper else name
    getattr(flex, REGISTER[kind])(HookFunction(called, editing_function=function))
    out = flex(mine)
    loss_of(out, 6).backward()
    grads = [p.grad.clone() for p in root.parameters()]
    flex.restore()
    return {"seen": output, "output": out.detach(), "grads": grads, "name": called}
