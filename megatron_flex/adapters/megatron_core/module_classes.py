"""Identification of a module by its class name and Megatron's module path, and its global name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from torch import nn

MODEL_CLASSES = ("GPTModel", "HybridModel", "MambaModel", "BertModel")


def is_megatron(module: Any, *names: str) -> bool:
    """Whether a module's class, or one of its bases, is Megatron's class of one of these names."""
    cls: Any = type(module)
    return _is_class_of_megatron(cls, names)


@lru_cache(4096)  # a model has thousands of modules of few classes
def _is_class_of_megatron(cls: Any, names: tuple[str, ...]) -> bool:
    return any(c.__name__ in names and c.__module__.startswith("megatron.") for c in cls.__mro__)


def is_identity(module: Any) -> bool:
    """Whether a spec left this submodule empty."""
    return module is None or is_megatron(module, "IdentityOp", "IdentityFuncOp")


def unwrap_model(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, Float16Module and the like."""
    return _wrapper_chain(module)[-1]


def wrappers_around(module: nn.Module) -> list[nn.Module]:
    """The wrappers of the model, the outermost first."""
    return _wrapper_chain(module)[:-1]


def _wrapper_chain(module: nn.Module) -> list[nn.Module]:
    passed = [module]
    while not is_megatron(passed[-1], *MODEL_CLASSES):
        inner = getattr(passed[-1], "module", None)
        if not isinstance(inner, nn.Module):
            break
        passed.append(inner)
    return passed


def global_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a chunk with their global names, parents first.

    A layer's index in its list is local to the stage and chunk; its `layer_number`, which Megatron counts
    from 1 over the full model, is not. Likewise for experts, which the layer that owns them numbers.
    """
    yield from _walk_modules(root, "", ())


def _walk_modules(module: nn.Module, path: str, experts: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
    left = [(path, module, experts)]  # no generator in a generator, which is slow in deep models
    while left:
        path, module, experts = left.pop()
        yield path, module
        if is_megatron(module, "BaseMoELayer"):
            experts = cast(Any, module).local_expert_indices
        front = f"{path}." if path else ""
        names = _child_names(module, path, experts)
        left += [(front + name, child, experts) for name, child in names][::-1]


def _child_names(module: nn.Module, path: str, experts: Sequence[int]) -> Iterator[tuple[str, nn.Module]]:
    numbered = isinstance(module, nn.ModuleList)
    local = numbered and path.endswith(".local_experts")
    for name, child in module.named_children():
        if local:
            yield str(experts[int(name)]), child
        elif numbered and isinstance(number := getattr(child, "layer_number", None), int):
            yield str(number - 1), child
        else:
            yield name, child
