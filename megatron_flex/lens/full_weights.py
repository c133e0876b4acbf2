"""Full weights, fetched when first used and cached."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_flex.collectives import Agreement, agreement_seconds, gather_objects
from megatron_flex.errors import FlexError, HookError
from megatron_flex.layout import Sizes
from megatron_flex.lens.lens_names import LensNames
from megatron_flex.lens.tensor_views import split_output
from megatron_flex.runtime import Session, full_parameters
from megatron_flex.runtime.full_parameters import ParameterRequest


class FullWeights:
    """The full weights of a model, with their values at the first use.

    Fetching is collective; if a rank does not take part, the others raise after a timeout.

    Raises:
        HookError: created inside a step.

    Examples:
        >>> from megatron_flex.lens import FullWeights
        >>> weights = FullWeights(flex.session, flex.interp.names)
        >>> weights.unembedding().shape
        torch.Size([32, 64])
    """

    _count = 0

    def __init__(self, session: Session, names: LensNames) -> None:
        if session.running:  # on the ranks of one stage only, so that a collective would wait
            raise HookError(
                "a step is in progress, in which the model cannot be run; call this before or after it"
            )
        self.names, self._session = names, session
        self._kept: dict[str, Tensor] = {}
        self._head: str | None = None  # why there is no W_U; None until the ranks have told each other
        self._agreement = Agreement(f"weights{FullWeights._count}", agreement_seconds())
        FullWeights._count += 1

    @property
    def sizes(self) -> Sizes:
        """The number of ranks on each axis of the mesh."""
        return self._session.mesh.sizes

    def __call__(self, name: str) -> Tensor:
        """One full parameter, on the CPU of every rank."""
        return self.assemble([name])[name]

    def assemble(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Return several weights, by name.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> weights = FullWeights(flex.session, flex.interp.names)
            >>> sorted(weights.assemble(["output_layer.weight"]))
            ['output_layer.weight']
        """
        wanted = list(dict.fromkeys(wanted))
        missing = [n for n in wanted if n not in self._kept]
        if missing:
            self._agreement.compare(f"weights {', '.join(missing)}")
        for name in missing:
            full = full_parameters.gather_parameter(
                self._session.parameters.index, name, ParameterRequest(everywhere=True), None
            )
            assert full is not None
            self._kept[name] = full
        return {n: self._kept[n] for n in wanted}

    def output(self, layer: int) -> Tensor:
        """Return W_O of a block, `[heads, size, h]`.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> FullWeights(flex.session, flex.interp.names).output(0).shape
            torch.Size([4, 8, 32])
        """
        made_of = self.names.made_of
        assert made_of is not None
        paths = made_of.paths
        weight = self(f"{paths.layer(layer)}.{paths.head_output}.weight")
        return split_output(weight, made_of.heads, paths.transposed)

    def neurons(self, layer: int) -> Tensor:
        """Return W_out of a block's MLP, `[f, h]`.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> FullWeights(flex.session, flex.interp.names).neurons(0).shape
            torch.Size([48, 32])
        """
        paths = self.names.paths
        weight = self(f"{paths.layer(layer)}.{paths.neuron_output}.weight")
        return weight if paths.transposed else weight.T

    def bias(self, linear: str) -> Tensor | None:
        """Return the bias of a linear, `[h]`; None if it has none.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> weights = FullWeights(flex.session, flex.interp.names)
            >>> weights.bias("decoder.layers.0.mlp.linear_fc2") is None
            True
        """
        name = f"{linear}.bias"
        return self(name) if self.names.has(name) else None

    def unembedding(self) -> Tensor:
        """Return W_U, `[h, vocabulary]`, without the final norm's weights: with the model's scale of logits.

        Raises:
            FlexError: the logits are more than a product with the output layer's weight.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> FullWeights(flex.session, flex.interp.names).unembedding().shape
            torch.Size([32, 64])
        """
        made_of, paths = self.names.made_of, self.names.paths
        tied = made_of is not None and made_of.tied
        self._check_head()
        weight = self(f"{paths.embedding if tied else paths.head}.weight").T
        return weight if made_of is None or made_of.logit_scale == 1.0 else weight * made_of.logit_scale

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits of streams `[..., h]` that the final norm has normalized, without its weights.

        Raises:
            FlexError: as `unembedding`.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> weights = FullWeights(flex.session, flex.interp.names)
            >>> weights.logits(torch.zeros(2, 32)).shape
            torch.Size([2, 64])
        """
        made_of = self.names.made_of
        assert made_of is not None
        unembedding = self.unembedding()
        weight, bias = self.final_norm()
        stream = stream * weight.to(stream)
        stream = stream if bias is None else stream + bias.to(stream)
        out, head_bias = stream @ unembedding.to(stream), self.bias(made_of.paths.head)
        if head_bias is not None:
            out = out + head_bias.to(out)
        return made_of.soft_cap * torch.tanh(out / made_of.soft_cap) if made_of.soft_cap else out

    def embedding(self) -> Tensor:
        """Return W_E, `[vocabulary, h]`, with the model's scale of embeddings.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> FullWeights(flex.session, flex.interp.names).embedding().shape
            torch.Size([64, 32])
        """
        made_of = self.names.made_of
        weight = self(f"{self.names.paths.embedding}.weight")
        scale = 1.0 if made_of is None else made_of.embedding_scale * made_of.table_scale
        return weight if scale == 1.0 else weight * torch.tensor(scale).to(weight)

    def _check_head(self) -> None:
        """Refuse a head of which only its rank knows that it does more than multiply. Collective, once."""
        if self._head is None:
            made_of, mesh = self.names.made_of, self._session.mesh
            problem = "" if made_of is None else made_of.not_linear
            self._head = next(filter(None, gather_objects(problem, mesh, ["pp"])), "")
        if self._head:
            raise FlexError(f"{self._head}; use the logits of run_with_cache() instead")

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and, if it has one, the bias of the norm before the logits, `[h]`.

        Examples:
            >>> from megatron_flex.lens import FullWeights
            >>> weight, bias = FullWeights(flex.session, flex.interp.names).final_norm()
        """
        made_of = self.names.made_of
        assert made_of is not None
        parameters = [self(n) for n in self.names.norm(self.names.final_norm)]
        return parameters[0] + float(made_of.unit_offset), parameters[1] if len(parameters) > 1 else None
