"""Names of modules and parameters as in the model without wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torch.fx import Graph
from torch.nn.parallel import DataParallel, DistributedDataParallel

from megatron_flex.adapters.module_walk import walk_modules

DEEPSPEED_ENGINE = "DeepSpeedEngine"  # DeepSpeed's wrapper
SHARDED_DDP = "ShardedDataParallel"  # fairscale's
ROOT = "root"  # the name of the outermost module, whose name is empty in torch
# The attributes under which wrappers hold the wrapped module.
WRAPPED_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def is_fairscale(module: object, *kinds: str) -> bool:
    """Whether an object is an instance of one of these fairscale classes; does not import fairscale."""
    return is_fairscale_class(type(module), *kinds)


def is_fairscale_class(cls: Any, *kinds: str) -> bool:
    """Whether a class is, or derives from, one of these fairscale classes."""
    return _is_class_of(cls, "fairscale.", kinds)


def is_deepspeed(module: nn.Module, kind: str) -> bool:
    """Whether a module is an instance of this DeepSpeed class; does not import DeepSpeed."""
    cls: Any = type(module)
    return _is_class_of(cls, "deepspeed.", (kind,))


@lru_cache(4096)  # a model has thousands of modules of few classes
def _is_class_of(cls: Any, package: str, names: tuple[str, ...]) -> bool:
    return any(c.__name__ in names and c.__module__.startswith(package) for c in cls.__mro__)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside the wrappers around all of it."""
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
            continue
        if is_fairscale(module, SHARDED_DDP):
            module = module.get_submodule("module")
            continue
        if is_deepspeed(module, DEEPSPEED_ENGINE):
            module = module.get_submodule("module")
            continue
        children = module._modules  # in a scripted module, an object without get()
        inner = next(
            (m for n in WRAPPED_ATTRIBUTES if n in children and (m := children[n]) is not None), None
        )
        if inner is None:
            return module
        module = inner


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules except wrappers, parents first, each once; the outermost has an empty name."""
    yield from _walk_modules(unwrap(root), "", set())


def _walk_modules(module: nn.Module, path: str, visited: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    pending = [
        (path, module)
    ]  # no generator in a generator: each module would go through as many as it is deep
    while pending:
        path, module = pending.pop()
        if module in visited:
            continue
        visited.add(module)
        yield path, module
        front = f"{path}." if path else ""
        pending += [(front + name, unwrap(child)) for name, child in _children(module)][::-1]


MAX_ALIASES = 64  # further names of one module: blocks that share blocks multiply them


def further_names(root: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """The names of modules that the model holds several times, besides the name in `named_modules`."""
    holders: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    first = {module: path for path, module in named_modules(root)}
    for holder in first:
        for name, child in _held_children(holder):
            holders.setdefault(unwrap(child), []).append((holder, name))
    if all(len(places) == 1 for places in holders.values()):
        return {}
    names: dict[nn.Module, list[str]] = {}

    def names_of(module: nn.Module, within: frozenset[nn.Module]) -> list[str]:
        if module not in names:
            places = [(h, n) for h, n in holders.get(module, ()) if h not in within]
            paths = [f"{p}.{n}" if p else n for h, n in places for p in names_of(h, within | {module})]
            names[module] = paths[: MAX_ALIASES + 1] or [first[module]]
        return names[module]

    return {
        module: further
        for module, path in first.items()
        if (further := tuple(n for n in names_of(module, frozenset({module})) if n != path))
    }


def _held_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children, one held twice with both names; those of a Pipe of fairscale once."""
    if is_fairscale(module, "Pipe"):
        yield from _children(module)
    else:
        yield from ((name, child) for name, child in module._modules.items() if child is not None)


def all_modules(root: nn.Module) -> list[nn.Module]:
    """All modules, wrappers too, as `root.modules()` has them, in a fraction of its time."""
    return walk_modules(root).modules


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children; fairscale's Pipe holds the children of its module in partitions."""
    pipe = is_fairscale(module, "Pipe")
    for name, child in module.named_children():
        if pipe and name == "partitions":
            for part in child.children():
                yield from part.named_children()
        else:
            yield name, child


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name, in model order, each once."""
    yielded: set[nn.Parameter] = set()
    for path, module in named_modules(root):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in yielded:
                yielded.add(parameter)
                yield f"{path}.{name}" if path else name, parameter


def strip_wrapper_names(name: str) -> str:
    """A parameter's name without the components that wrappers add."""
    return ".".join(step for step in name.split(".") if step not in WRAPPED_ATTRIBUTES)


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a `forward`. A ModuleList has none; torch.export replaces it by an empty one."""
    if isinstance(graph := vars(module).get("graph"), Graph) and not graph.nodes:
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
