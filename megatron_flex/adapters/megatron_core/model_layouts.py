"""The layouts of Megatron's dense models. Every rule names its tensor; none uses a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from torch import nn

from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh

P = ParamSpec("P")


def _memoized(
    make: Callable[Concatenate[ModelLayouts, P], Layout],
) -> Callable[Concatenate[ModelLayouts, P], Layout]:
    """A rule that makes its layout once for each of its arguments: thousands of experts share it."""

    @wraps(make)
    def get(self: ModelLayouts, /, *args: P.args, **keywords: P.kwargs) -> Layout:
        key = make.__name__, args, tuple(keywords.items())
        layout = self._cache.get(key)
        if layout is None:
            layout = self._cache[key] = make(self, *args, **keywords)
        return layout

    return get


@dataclass(frozen=True)
class ModelLayouts:
    """The layouts that follow from one model's configuration and mesh.

    In their shapes `s`, `b` depend on the data; `h`, `f`, `n`, `d`, `v` stand for hidden size, MLP width,
    heads, head size and vocabulary.
    """

    config: Any
    mesh: Mesh
    vocabulary: int | None = None
    _cache: dict[Any, Layout] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.mesh["tp"].size

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is sharded over the sequence."""
        return bool(self.config.sequence_parallel) and self.tp > 1

    def sequence(self, cut: bool = False) -> Dim:
        """The sequence dim: zigzag over context parallel ranks, within it over tensor parallel ranks."""
        return Dim("s", (Cut("cp", "zigzag"), *((Cut("tp"),) if cut else ())))

    @_memoized
    def stream(self, sequence_parallel: bool | None = None) -> Layout:
        """`[s, b, h]`, the residual stream and the tensors added to it; the same layout for its gradient."""
        cut = self.sequence_parallel if sequence_parallel is None else sequence_parallel and self.tp > 1
        return Layout((self.sequence(cut), Dim("b"), Dim("h")))

    @_memoized
    def per_token(self, *names: str) -> Layout:
        """`[s, b, ...]` with other trailing dims, sharded like the residual stream."""
        return Layout((self.sequence(self.sequence_parallel), Dim("b"), *map(Dim, names)))

    @_memoized
    def expert_rows(self, *names: str) -> Layout:
        """`[t, ...]`: each rank has some of the tokens of an expert, in varying numbers."""
        cuts = tuple(Cut(c.axis) for c in self.stream().dims[0].cuts if self.mesh[c.axis].size > 1)
        return Layout((Dim("t", cuts, uneven=bool(cuts)), *map(Dim, names)))

    @_memoized
    def gathered(self) -> Layout:
        """`[s, b, h]` at the input of a column-parallel GEMM: replicated, its gradient partial."""
        return Layout((self.sequence(), Dim("b"), Dim("h")), shared=("tp",))

    @_memoized
    def partial(self) -> Layout:
        """`[s, b, h]` at the output of a row-parallel GEMM, before the reduction."""
        return Layout((self.sequence(), Dim("b"), Dim("h")), partial=("tp",))

    @_memoized
    def features(self, name: str, segments: tuple[int, ...] = (1,)) -> Layout:
        """`[s, b, features]` with the features sharded over tensor parallel ranks."""
        return Layout((self.sequence(), Dim("b"), Dim(name, (Cut("tp"),), segments)))

    def heads(self) -> Layout:
        """`[s, b, n, d]`: queries, and attention's gates."""
        return Layout((self.sequence(), Dim("b"), Dim("n", (Cut("tp"),)), Dim("d")))

    def groups(self) -> Layout:
        """`[s, b, g, d]`: keys and values. With fewer groups than ranks, neighbours hold the same group."""
        groups = self.config.num_query_groups or self.config.num_attention_heads
        copies = self.tp // groups if groups < self.tp else 1
        return Layout((self.sequence(), Dim("b"), Dim("g", (Cut("tp", copies=copies),)), Dim("d")))

    def scores(self) -> Layout:
        """`[b, n, s, s]`: attention scores and probabilities, of a rank's own queries to all keys."""
        return Layout((Dim("b"), Dim("n", (Cut("tp"),)), self.sequence(), Dim("s")))

    def logits(self, gathered: bool = False) -> Layout:
        """`[s, b, v]`, the vocabulary without its padding."""
        cuts = () if gathered else (Cut("tp"),)
        return Layout((self.sequence(), Dim("b"), Dim("v", cuts, keep=self.vocabulary)))

    def loss(self) -> Layout:
        """`[b, s]`: the loss of each token."""
        return Layout((Dim("b"), self.sequence()))

    @_memoized
    def token_ids(self) -> Layout:
        """`[b, s]`: the token ids, which all tensor parallel ranks hold."""
        return Layout((Dim("b"), self.sequence()))

    def word_embeddings(self, module: nn.Module) -> Layout:
        """`[b, s, h]` of the word embeddings alone, which the sequence-parallel run transposes."""
        if getattr(module, "reduce_scatter_embeddings", False):
            layout = self.stream(True)
            return Layout(layout.dims, permute=(1, 0, 2))
        return Layout((Dim("b"), self.sequence(), Dim("h")))

    def word_embeddings_partial(self, module: nn.Module) -> Layout:
        """`[b, s, h]` of the word embeddings before their reduction: a word is zero on all ranks but one."""
        if getattr(module, "reduce_scatter_embeddings", False):
            return Layout(self.partial().dims, partial=("tp",), permute=(1, 0, 2))
        return Layout((Dim("b"), self.sequence(), Dim("h")), partial=("tp",))

    # -- parameters ----------------------------------------------------------------------------------

    @_memoized
    def rows_cut(self, dims: int, segments: tuple[int, ...] = (1,)) -> Layout:
        """A weight or bias sharded along its first dim: column-parallel linears."""
        rest = (Dim("in"),) if dims == 2 else ()
        return Layout((Dim("out", (Cut("tp"),), segments), *rest))

    @_memoized
    def bias_beside(self, features: Dim | None = None) -> Layout:
        """The bias that a parallel linear returns beside its output, with `features` sharded or not.

        Ranks add it to different tokens, so each has a partial gradient.
        """
        axes = ("cp",) if features is not None or not self.sequence_parallel else ("tp", "cp")
        return Layout((features or Dim("out"),), shared=tuple(a for a in axes if self.mesh[a].size > 1))

    def vocabulary_cut(self, dims: int) -> Layout:
        """A weight or bias with a row for each token, the vocabulary without its padding."""
        rest = (Dim("h"),) if dims == 2 else ()
        return Layout((Dim("v", (Cut("tp"),), keep=self.vocabulary), *rest))

    @_memoized
    def columns_cut(self) -> Layout:
        """A row-parallel weight, sharded along its second dim."""
        return Layout((Dim("out"), Dim("in", (Cut("tp"),))))

    @_memoized
    def replicated(self, dims: int, shared: bool) -> Layout:
        """A replicated parameter; `shared` if its gradient is partial."""
        return Layout(tuple(Dim() for _ in range(dims)), shared=("tp",) if shared and self.tp > 1 else ())
