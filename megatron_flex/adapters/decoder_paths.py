"""Where the parts of a decoder are: one table for each family of models.

The keys are TransformerLens' names within a block, and the values are relative to the path of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """A hook point of a layer, and the part of its tensor that is meant.

    Attributes:
        site: the hook point.
        heads: the kinds of heads that the last dim has side by side, `n` of queries and `g` of keys and
            values: `ngg` for packed queries, keys and values. Empty if heads have a dim of their own.
        heads_first: whether the dim of heads is before that of the sequence.
        index: which of these, or which of `parts`.
        parts: the number of equal parts of the last dim.
        bias: the parameter that the framework adds to the tensor later; empty if there is none.
        bias_part: the index of an equal part of that bias, and the number of parts.
    """

    site: str
    heads: str = ""
    heads_first: bool = False
    index: int = 0
    parts: int = 1
    bias: str = ""
    bias_part: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class NormPoint:
    """A norm of a layer.

    Attributes:
        module: its path.
        edited: the hook point at which its output is edited, if that is not the module's own, because other
            modules read the output too.
    """

    module: str
    edited: str = ""


@dataclass(frozen=True, slots=True)
class DecoderPaths:
    """The paths of a decoder's parts.

    Attributes:
        layers: the list of layers.
        embedding: the token embeddings.
        head: the output layer.
        final_norms: the norm before the logits, by each name that the family has for it.
        attention: the module of attention.
        attention_points: the hook points of attention, by TransformerLens' names.
        head_output: the linear that multiplies the results of the heads, `z`, by W_O.
        mlp_points: the hook points of the MLP, likewise.
        neuron_output: the linear that multiplies the neurons by W_out.
        norms: the norms, by TransformerLens' names: `ln1`, `ln2`, `ln1_post`, `ln2_post`.
        position_sum: the hook point of the sum of token and position embeddings.
        position_table: the parameter with the position embeddings.
        fused_norms: the linears that may hold the parameters of a norm, by the module of the norm.
        sequence_first: whether activations are `[s, b, ...]`.
        transposed: whether the weight of a linear is `[in, out]`.
        normed_inputs: whether attention and MLP read the normalized stream.
        normed_outputs: whether their outputs are normalized before they are added to the stream.
        parallel: whether the MLP reads the same stream as attention.
        mid: the module that reads the stream between attention and MLP first, if the adapter makes the hook
            point `mid` of a layer from it; empty otherwise.
    """

    layers: str
    embedding: str
    head: str
    final_norms: tuple[str, ...]
    attention: str
    attention_points: Mapping[str, LayerPoint]
    head_output: str
    mlp_points: Mapping[str, LayerPoint]
    neuron_output: str
    norms: Mapping[str, NormPoint]
    position_sum: str = ""
    position_table: str = ""
    fused_norms: Mapping[str, str] = field(default_factory=dict)
    sequence_first: bool = False
    transposed: bool = False
    normed_inputs: bool = True
    normed_outputs: bool = False
    parallel: bool = False
    mid: str = ""

    def layer(self, number: int) -> str:
        """The path of a layer."""
        return f"{self.layers}.{number}"
