"""Objects taken apart and put together again, by the compatible calls."""

from __future__ import annotations

import importlib
from collections import OrderedDict, namedtuple
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_flex import FlexError
from megatron_flex.compat import FlexModel, HookFunction
from megatron_flex.compat.traverse import (
    InternalNode,
    LeafNode,
    flatten,
    nodes,
    register_internal_node_type,
    register_leaf_node_type,
    unflatten,
)
from tests.support.messages import raises

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    hidden: Tensor
    name: str
    more: Any = None


class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def ones(number: int) -> Tensor:
    return torch.full((number,), float(number))


TREES = [
    [1, 2, ones(1), "zzz", (ones(2), ones(3))],
    {"a": ones(1), "b": [None, ones(2)], "c": 3.0},
    Pair(ones(1), Pair(ones(2), None)),
    Record(ones(1), "name", {"more": (ones(2),)}),
    Output(last=ones(1), cache=(ones(2), ones(3))),
    ones(1),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: type(t).__name__)
def test_flatten_and_unflatten(tree: Any) -> None:
    treedef, leaves = flatten(tree)
    assert [len(t) for t in leaves] == list(range(1, len(leaves) + 1)), "depth first"
    made = unflatten(treedef, [t * 2 for t in leaves])
    assert type(made) is type(tree)
    again, doubled = flatten(made)
    assert again == treedef
    assert all(torch.equal(a, b * 2) for a, b in zip(doubled, leaves, strict=True))
    assert all(float(t[0]) == len(t) for t in flatten(tree)[1]), "the given one stays as it is"


def test_what_is_no_tensor_stays() -> None:
    treedef, leaves = flatten(TREES[0])
    assert unflatten(treedef, leaves)[3] == "zzz"
    assert unflatten(*flatten(TREES[3])).name == "name"
    assert flatten(TREES[0])[0] != flatten(TREES[1])[0]


def test_too_few_and_too_many_leaves() -> None:
    treedef, leaves = flatten(TREES[1])
    with raises(FlexError, 1):
        unflatten(treedef, leaves[:1])
    with raises(FlexError, 3, 1):
        unflatten(treedef, [*leaves, leaves[0]])


class Box:
    """Nothing that anybody knows how to look into."""

    def __init__(self, tensor: Tensor, label: str) -> None:
        self.tensor, self.label = tensor, label


class Boxed(nn.Module):
    def forward(self, inputs: Tensor) -> Box:
        return Box(inputs * 2, "mine")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boxed = Boxed()

    def forward(self, inputs: Tensor) -> tuple[Tensor, str]:
        box = self.boxed(inputs)
        return box.tensor + 1, box.label


def test_register_internal_node_type() -> None:
    """Hooks find tensors in it, too."""

    @nodes.register_internal_node_type(Box)
    class BoxNode(InternalNode):
        def flatten(self, instance: Box) -> tuple[Any, ...]:
            self.label = instance.label
            return (instance.tensor,)

        def unflatten(self, children: Iterable[Any]) -> Box:
            (tensor,) = children
            return Box(tensor, self.label)

    assert nodes.register_internal_node_type is register_internal_node_type
    treedef, (leaf,) = flatten((Box(ones(1), "label"), 3))
    made, three = unflatten(treedef, [leaf + 1])
    assert (float(made.tensor), made.label, three) == (2.0, "label", 3)

    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Model(), output)
    flex.register_forward_hook(HookFunction("boxed", editing_function=lambda m, x, c, t: x * 10))
    made, label = flex(ones(1))
    assert (float(made), label) == (21.0, "mine")
    assert float(output["boxed"][0]) == 2.0
    flex.restore()


def test_register_leaf_node_type() -> None:
    class Weight(float):
        pass

    @nodes.register_leaf_node_type(Weight)
    class WeightNode(LeafNode):
        pass

    assert nodes.register_leaf_node_type is register_leaf_node_type
    treedef, leaves = flatten([Weight(2), 3.0])
    assert leaves == [2.0]
    assert unflatten(treedef, ["new"]) == ["new", 3.0]


def test_names_of_the_original_modules() -> None:
    """Names that no code needs to change: where FlexModel had them, and what they do."""
    from megatron_flex import compat
    from megatron_flex.compat.core import core_utils, hook_function, wrapper
    from megatron_flex.compat.distributed import distributed_state, mappings, strategies
    from megatron_flex.compat.traverse import nodes, ops

    assert core_utils.DummyModule is compat.DummyModule
    assert wrapper.FlexModel is compat.FlexModel
    assert hook_function.HookFunction is compat.HookFunction
    assert distributed_state.initialize_distributed_state is compat.distributed.initialize_distributed_state
    assert mappings.all_gather_tensor_parallel is compat.distributed.all_gather_tensor_parallel
    assert strategies.NullMemoryOffloadStrategy is compat.distributed.NullMemoryOffloadStrategy
    tensor = torch.ones(2)
    assert compat.distributed.unity(tensor, compat.FlexModel(nn.Linear(2, 2), {}).fmps) is tensor
    tree, _ = ops.flatten([tensor, 1])
    assert tree == [nodes.LeafNode(tensor.shape), 1]


@pytest.mark.parametrize(
    ("module", "name", "successor"),
    [
        ("traverse.nodes", "ListNode", "traverse.flatten"),
        ("traverse.nodes", "is_leaf_node", "isinstance(node, traverse.LeafNode)"),
        ("traverse", "ScalarNode", "typing.Any"),
        ("distributed", "BaseRoutingStrategy", "expected_shape"),
        ("distributed.strategies", "NonValidatedFunctionStrategy", "HookFunction(editing_function=...)"),
    ],
)
def test_a_name_that_is_gone_names_its_successor(module: str, name: str, successor: str) -> None:
    with raises(ImportError, name, successor):
        exec(f"from megatron_flex.compat.{module} import {name}")
    with pytest.raises(AttributeError):
        _ = importlib.import_module(f"megatron_flex.compat.{module}").unknown


def test_outputs_of_transformers_are_nodes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    node = nodes.BaseModelOutputWithPastNode()
    given = outputs.BaseModelOutputWithPast(*(torch.ones(1) * n for n in range(4)))
    made = node.unflatten(node.flatten(given))
    assert type(made) is type(given)
    assert [float(t) for t in (made.last_hidden_state, *made.to_tuple()[1:])] == [0.0, 1.0, 2.0, 3.0]
    treedef, leaves = flatten(given)
    doubled = unflatten(treedef, [leaf * 2 for leaf in leaves])
    assert type(doubled) is type(given)
    assert [float(t) for t in doubled.to_tuple()] == [0.0, 2.0, 4.0, 6.0]
    assert float(given.hidden_states) == 2.0
