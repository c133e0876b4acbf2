"""Whole weights, fetched when they are needed and kept."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megatron_flex.collectives import Agreement
from megatron_flex.errors import HookError
from megatron_flex.config import flex_config
from megatron_flex.layout import Sizes
from megatron_flex.lens.lens_names import Names
from megatron_flex.runtime import Session, parameters
from megatron_flex.runtime.survey import ParameterRequest


class WholeWeights:
    """The weights of a model as one device would hold them, as they were when they were first asked for.

    Asking is collective; a rank that never comes makes the others raise after a while instead of waiting.

    Raises:
        HookError: made inside a step.
    """

    _count = 0

    def __init__(self, session: Session, names: Names) -> None:
        if session.running:  # on the ranks of one stage, where the others do not come
            raise HookError(
                "a step is under way, in which the model cannot be run; do it before or behind it"
            )
        self.names, self._session = names, session
        self._kept: dict[str, Tensor] = {}
        self._agreement = Agreement(f"weights{WholeWeights._count}", flex_config.agree_seconds)
        WholeWeights._count += 1

    @property
    def sizes(self) -> Sizes:
        """How many ranks each axis of the mesh has."""
        return self._session.adapter.mesh.sizes

    def __call__(self, name: str) -> Tensor:
        """One parameter, on the CPU of every rank."""
        return self.of([name])[name]

    def of(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Several."""
        wanted = list(dict.fromkeys(wanted))
        missing = [n for n in wanted if n not in self._kept]
        if missing:
            self._agreement.compare(f"weights {', '.join(missing)}")
        for name in missing:
            found = parameters.gather_parameter(self._session.survey, name, ParameterRequest(everywhere=True), None)
            assert found is not None
            self._kept[name] = found
        return {n: self._kept[n] for n in wanted}

    def output(self, layer: int) -> Tensor:
        """W_O of a block, `[heads, size, h]`."""
        made_of = self.names.made_of
        assert made_of is not None
        weight = self(f"decoder.layers.{layer}.self_attention.linear_proj.weight")
        return weight.view(len(weight), made_of.heads, -1).permute(1, 2, 0)

    def neurons(self, layer: int) -> Tensor:
        """W_out of a block's MLP, `[f, h]`."""
        return self(f"decoder.layers.{layer}.mlp.linear_fc2.weight").T

    def bias(self, linear: str) -> Tensor | None:
        """The bias of a linear, `[h]`; None if it has none."""
        name = f"{linear}.bias"
        return self(name) if self.names.has(name) else None

    def unembedding(self) -> Tensor:
        """W_U, `[h, vocabulary]`, as it is: without the final norm's weights."""
        made_of = self.names.made_of
        tied = made_of is not None and made_of.tied
        return self("embedding.word_embeddings.weight" if tied else "output_layer.weight").T

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """The weight and, if it has one, the bias of the norm in front of the logits, `[h]`."""
        made_of = self.names.made_of
        assert made_of is not None
        found = [self(n) for n in self.names.norm(self.names.final_norm)]
        return found[0] + float(made_of.unit_offset), found[1] if len(found) > 1 else None
