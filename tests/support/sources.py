"""Sources with the anchors that the patches look for, made up here: none of it is anybody's."""

from __future__ import annotations

from dataclasses import dataclass

OLD, GROUPS, LATER = "0.12", "0.13", "0.19"


@dataclass(frozen=True)
class Shape:
    """What differs between versions.

    Attributes:
        groups: whether collectives are given the group.
        method: whether the GEMM is a method and not set by each forward.
        inference: whether the embedding has another reduction for inference.
    """

    groups: bool = True
    method: bool = True
    inference: bool = False


SHAPES = {OLD: Shape(groups=False, method=False), GROUPS: Shape(method=False), LATER: Shape(inference=True)}

COLUMN = """
class ColumnParallelLinear(Base):
    def forward(self, x, weight=None, runtime_gather_output=None):
        y = x if self.sums or self.cut else copy_to_tensor_model_parallel_region(x{group})
        sums = self.sums
        {set_}z = self._forward_impl(
            input=y,
            weight=weight,
            allreduce_dgrad=sums,
            sequence_parallel=self.cut,
        )
        out = gather_from_tensor_model_parallel_region(z{group}) if self.gathers else z
        return out, None
"""
ROW = """
class RowParallelLinear(Base):
    def forward(self, x):
        {set_}z = self._forward_impl(
            input=x, weight=self.weight, allreduce_dgrad=False, sequence_parallel=False
        )
        if self.cut:
            out = reduce_scatter_to_sequence_parallel_region(z{group})
        else:
            out = reduce_from_tensor_model_parallel_region(z{group})
        return out, self.bias
"""
EMBEDDING = """
class VocabParallelEmbedding(Base):
    def forward(self, ids):
        found = self.weight[ids]
        if self.cut:
            found = found.transpose(0, 1)
            {if_}
            out = reduce_scatter_to_sequence_parallel_region(found{group})
        else:
            out = reduce_from_tensor_model_parallel_region(found{group})
        return out
"""
IMPL = """
    def _forward_impl(self, input, weight, **how):
        return gemm(input, weight, **how)
"""
HEAD = '''"""A stand-in for a file of parallel layers."""
from __future__ import annotations

import operator

from stand_in import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gemm,
    inference_reduce_scatter_to_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class Base:
    pass
'''
NAMED = """if not self.training:
                out = inference_reduce_scatter_to_sequence_parallel_region(found, self.tp_group)
                return out"""


def layers(shape: Shape = SHAPES[LATER]) -> str:
    """A file of Megatron's parallel layers in the shape of some version."""
    words = {
        "group": ", group=self.tp_group" if shape.groups else "",
        "set_": "" if shape.method else "self._forward_impl = gemm\n        ",
        "if_": NAMED if shape.inference else "found = found.contiguous()",
    }
    impl = IMPL if shape.method else ""
    column, row = (text.format(**words) + impl for text in (COLUMN, ROW))
    return HEAD + "\n" + column + "\n" + row + "\n" + EMBEDDING.format(**words)


FAIRSCALE = '''"""A stand-in for fairscale's."""
from stand_in import (
    F, copy_to_model_parallel_region, gather_from_model_parallel_region, reduce_from_model_parallel_region
)


class ColumnParallelLinear:
    def forward(self, x):
        y = copy_to_model_parallel_region(x)
        z = F.linear(y, self.weight)
        out = gather_from_model_parallel_region(z)
        return out


class RowParallelLinear:
    def forward(self, x):
        z = F.linear(x, self.weight)
        out = reduce_from_model_parallel_region(z)
        return out


class ParallelEmbedding:
    def forward(self, ids):
        z = self.weight[ids]
        out = gather_from_model_parallel_region(z)
        return out


class VocabParallelEmbedding:
    def forward(self, ids):
        z = self.weight[ids]
        out = reduce_from_model_parallel_region(z)
        return out
'''
GUARDED = '''"""A pretrain script."""
from somewhere import model, parse_and_validate_args, pretrain


def main():
    pretrain(parse_and_validate_args(), model)


if __name__ == "__main__":
    # why it starts so
    main()
'''
BARE = """import sys
from somewhere import model
import somewhere as training

config = training.parse_and_validate_args()
training.pretrain(config, model)
"""
CALLED = '''from somewhere import model, pretrain


def run():
    """Starts."""
    pretrain(model)
'''
