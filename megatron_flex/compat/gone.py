"""Public names of FlexModel (2023) that this package leaves out, with what replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

_BY_LAYOUT = "HookFunction(expected_shape=...), from which a hook knows how to gather"
_BY_EDIT = "HookFunction(editing_function=...)"
_BY_CONTAINER = "traverse.flatten: its tree has the containers themselves"

SUCCESSORS = {
    "BaseRoutingStrategy": _BY_LAYOUT,
    "ParameterTensorParallelRoutingStrategy": _BY_LAYOUT,
    "ActivationTensorAllToAllRoutingStrategy": _BY_LAYOUT,
    "BaseFunctionStrategy": _BY_EDIT,
    "NonValidatedFunctionStrategy": _BY_EDIT,
    "TupleNode": _BY_CONTAINER,
    "ListNode": _BY_CONTAINER,
    "get_internal_node": _BY_CONTAINER,
    "is_internal_node": _BY_CONTAINER,
    "is_internal_obj": _BY_CONTAINER,
    "TensorNode": "traverse.LeafNode",
    "get_leaf_node": "traverse.LeafNode",
    "is_leaf_node": "isinstance(node, traverse.LeafNode)",
    "is_leaf_obj": "isinstance(obj, torch.Tensor)",
    "InternalObject": "typing.Any",
    "LeafObject": "typing.Any",
    "ScalarObject": "typing.Any",
    "ScalarNode": "typing.Any",
}


def refuse_gone(module: str) -> Callable[[str], NoReturn]:
    """Make the `__getattr__` of a module: it names the successor of a name that is gone.

    A name that is gone raises ImportError, because an AttributeError's text is lost in `from ... import`.
    """

    def getattr_of_module(name: str) -> NoReturn:
        if name in SUCCESSORS:
            raise ImportError(f"{module} has no {name} of FlexModel (2023): use {SUCCESSORS[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
