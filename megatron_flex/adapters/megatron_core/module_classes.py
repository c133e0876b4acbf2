"""Identification of a module by its class name and Megatron's module path, and its global name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

from torch import nn

from megatron_flex.adapters.module_walk import find_once, walk_modules

LANGUAGE_CLASSES = ("GPTModel", "HybridModel", "MambaModel", "BertModel", "T5Model")
VISION_CLASSES = ("CLIPViTModel", "RADIOViTModel")
PROJECTORS = ("MultimodalProjector",)
PART_CLASSES = (*LANGUAGE_CLASSES, *VISION_CLASSES, *PROJECTORS)  # models whose modules have layouts
# Packages of wrappers, which hold the model as `module` and may have other attributes besides.
# A FlexModel of the compatible interface is a module around the model, with its trainable modules beside it.
WRAPPER_PACKAGES = ("megatron", "megatron_flex", "torch", "fairscale", "deepspeed", "apex", "accelerate")
WRAPPERS = ("DistributedDataParallel", "Float16Module")
COLUMN_LINEARS = ("ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear")
ROW_LINEARS = ("RowParallelLinear", "TERowParallelLinear")
LINEAR_WITH_NORM = "TELayerNormColumnParallelLinear"


def is_megatron(module: Any, *names: str) -> bool:
    """Whether a module's class, or one of its bases, is Megatron's class of one of these names."""
    cls: Any = type(module)
    return is_megatron_class(cls, *names)


@lru_cache(4096)  # a model has thousands of modules of few classes
def is_megatron_class(cls: Any, *names: str) -> bool:
    """Whether a class, or one of its bases, is Megatron's class of one of these names."""
    return any(c.__name__ in names and c.__module__.startswith("megatron.") for c in cls.__mro__)


def is_megatrons_own(module: nn.Module) -> bool:
    """Whether a module's class is Megatron's or Transformer Engine's itself, and not derived from one."""
    return type(module).__module__.startswith(("megatron.", "transformer_engine."))


PLAIN_BASES = ("MegatronModule", "GraphableMegatronModule")  # of any module, also of a user's head


def is_megatrons_part(module: nn.Module) -> bool:
    """Whether a module's class is Megatron's or Transformer Engine's, or derived from one of a certain part.

    A fork or a package beside Megatron derives its own `TransformerBlock` or `ColumnParallelLinear`, which is
    that part all the same.
    """
    return any(
        c.__module__.startswith(("megatron.", "transformer_engine.")) and c.__name__ not in PLAIN_BASES
        for c in type(module).__mro__
    )


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
    while not is_megatron(passed[-1], *PART_CLASSES):
        inner = getattr(passed[-1], "module", None)
        if not isinstance(inner, nn.Module) or _holds_more(passed[-1]):
            break
        passed.append(inner)
    return passed


def _holds_more(module: nn.Module) -> bool:
    """Whether a user's class holds modules or parameters beside `module`, such as a value head."""
    package = type(module).__module__.partition(".")[0]
    return package not in WRAPPER_PACKAGES and len(module._modules) + len(module._parameters) > 1


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module inside the model is one of Megatron's wrappers around a part of it."""
    return is_megatron(module, *WRAPPERS) and isinstance(getattr(module, "module", None), nn.Module)


def global_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules of a chunk with their global names, parents first.

    A layer's index in its list is local to the stage and chunk; its `layer_number`, which Megatron counts
    from 1 over the full model, is not. Likewise for experts, which the layer that owns them numbers. A module
    that is held twice has the first of its names, as in torch's `named_modules`; wrappers have none.
    """
    return find_once(_name_modules, root)


def _name_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    out: list[tuple[str, nn.Module]] = []
    pending: list[tuple[str, nn.Module, Sequence[int]]] = [("", root, ())]
    visited: set[nn.Module] = set()
    wrappers = {kind for kind, module in walk_modules(root).classes.items() if is_megatron(module, *WRAPPERS)}
    while pending:
        path, module, experts = pending.pop()
        while type(module) in wrappers and is_wrapper(module):
            module = cast(Any, module).module
        if module in visited:
            continue
        visited.add(module)
        out.append((path, module))
        if not module._modules:
            continue
        if is_megatron(module, "BaseMoELayer"):
            experts = cast(Any, module).local_expert_indices
        front = f"{path}." if path else ""
        # Those of `named_children`, and again those that are held twice.
        names: Iterable[tuple[str, nn.Module | None]] = module._modules.items()
        if isinstance(module, nn.ModuleList):
            names = _number_children(module, path, experts)
        pending += [(front + name, child, experts) for name, child in names if child is not None][::-1]
    return out


def _number_children(
    modules: nn.ModuleList, path: str, experts: Sequence[int]
) -> Iterator[tuple[str, nn.Module]]:
    local = path.endswith(".local_experts")
    for name, child in modules.named_children():
        if local:
            yield str(experts[int(name)]), child
        else:
            number = getattr(child, "layer_number", None)
            yield str(number - 1) if isinstance(number, int) else name, child
