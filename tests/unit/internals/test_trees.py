"""Tensors within whatever modules get and return."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_flex.adapters.tensor_trees import resolve_index, tensors, with_tensor


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass
class Record:
    count: int
    hidden: Any
    others: list[Any] = field(default_factory=list)
    made: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Frozen:
    hidden: Any
    name: str = "x"


@dataclass(frozen=True, slots=True)
class Slotted:
    hidden: Any


@dataclass
class Output(OrderedDict):  # a record that is a mapping too, without the entries that are None
    logits: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "cache"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.cache)


def t(number: float) -> Tensor:
    return torch.tensor(number)


OLD = namedtuple("OLD", "a b")
TREES = [
    (t(1.0), [1]),
    ((t(1.0), None, 3, t(2.0)), [1, 2]),
    ([t(1.0), [t(2.0), (t(3.0),)], "text"], [1, 2, 3]),
    ({"b": t(1.0), "a": {"c": t(2.0)}, "n": 1.5}, [1, 2]),
    (OrderedDict(z=t(1.0), a=t(2.0)), [1, 2]),
    (defaultdict(list, {"x": [t(1.0)]}), [1]),
    (MappingProxyType({"x": t(1.0)}), [1]),
    (Pair(t(1.0), {"k": t(2.0)}), [1, 2]),
    (OLD(None, t(1.0)), [1]),
    (Record(3, t(1.0), [t(2.0), None]), [1, 2]),
    (Frozen(t(1.0)), [1]),
    (Slotted((t(1.0), t(2.0))), [1, 2]),
    (Output(t(1.0), (t(2.0),)), [1, 2]),
    (torch.max(torch.tensor([[1.0, 2.0]]), dim=1), [2, 1]),
    ((None, 4, "text", object(), Record), []),
]


@pytest.mark.parametrize(("tree", "numbers"), TREES, ids=lambda v: type(v).__name__)
def test_tensors_are_counted_depth_first_and_replaced_one_by_one(tree: Any, numbers: list[int]) -> None:
    assert [int(x) for x in tensors(tree)] == numbers
    for place in range(len(numbers)):
        made = with_tensor(tree, place, t(9.0))
        assert type(made) is type(tree)
        assert [int(x) for x in tensors(made)] == [9 if i == place else n for i, n in enumerate(numbers)]
        assert [int(x) for x in tensors(tree)] == numbers, "the given one stays as it was"


def test_what_is_not_on_the_way_is_the_same_object() -> None:
    kept, record = object(), Record(1, t(1.0))
    record.made = kept
    made = with_tensor({"a": record, "b": (kept, t(2.0))}, 0, t(5.0))
    assert made["a"].made is kept
    assert made["b"][0] is kept
    assert made["a"] is not record
    output = with_tensor(Output(t(1.0), (t(2.0),)), 1, t(7.0))
    assert output.cache[0] == output["cache"][0] == 7


def test_negative_numbers_count_from_the_end() -> None:
    assert [resolve_index(i, 3) for i in (0, 2, 3, -1, -3, -4)] == [0, 2, None, 2, 0, None]
    assert resolve_index(0, 0) is None


def test_nothing_is_registered_with_torch() -> None:
    from torch.utils import _pytree

    assert Record not in _pytree.SUPPORTED_NODES
