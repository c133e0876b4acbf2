"""Modules by the names that they would have without wrappers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Graph
from torch.nn.parallel import DataParallel, DistributedDataParallel

DEEPSPEED_ENGINE = "DeepSpeedEngine"  # DeepSpeed's wrapper
ROOT = "root"  # what the outermost module is called, which torch gives an empty name
# What wrappers call the module inside them, which stands in its place in the model's tree.
WRAPPED_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def is_deepspeed(module: nn.Module, kind: str) -> bool:
    """Whether it is of a class of DeepSpeed's, which is not imported for that."""
    return any(c.__name__ == kind and c.__module__.startswith("deepspeed.") for c in type(module).__mro__)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside the wrappers that stand about all of it."""
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
            continue
        if is_deepspeed(module, DEEPSPEED_ENGINE):
            module = module.get_submodule("module")
            continue
        held = module._modules  # a scripted module's has no get()
        inner = next((m for n in WRAPPED_ATTRIBUTES if n in held and (m := held[n]) is not None), None)
        if inner is None:
            return module
        module = inner


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules below wrappers, parents first, each once; the outermost has an empty name."""
    yield from _walk_modules(unwrap(root), "", set())


def _walk_modules(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield path, module
    for name, child in _children(module):
        yield from _walk_modules(unwrap(child), f"{path}.{name}" if path else name, seen)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children; a Pipe of fairscale's keeps those of the module that it was given in partitions."""
    pipe = any(c.__name__ == "Pipe" and c.__module__.startswith("fairscale.") for c in type(module).__mro__)
    for name, child in module.named_children():
        if pipe and name == "partitions":
            for part in child.children():
                yield from part.named_children()
        else:
            yield name, child


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name, in model order, each once."""
    seen: set[nn.Parameter] = set()
    for path, module in named_modules(root):
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{own}" if path else own, parameter


def strip_wrapper_names(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(step for step in name.split(".") if step not in WRAPPED_ATTRIBUTES)


def has_forward(module: nn.Module) -> bool:
    """Whether it has a `forward`; a ModuleList has none, and what torch.export makes of it an empty one."""
    if isinstance(graph := vars(module).get("graph"), Graph) and not graph.nodes:
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
