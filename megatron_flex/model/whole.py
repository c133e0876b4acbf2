"""Parameters and their gradients as one device would hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.runtime import Session, parameters
from megatron_flex.runtime.survey import ParameterRequest


class ParameterAccess:
    """What FlexModel does with parameters."""

    session: Session

    def get_module_parameter(
        self,
        name: str,
        expected_shape: Sequence[int | None] | None = None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Tensor | None:
        """A parameter, or its gradient, as one device would hold it. Every rank calls it.

        A gradient is read after the step and before the optimizer's, which may scale and clip it in place.
        It has the scale that the framework gave it: microbatches averaged, multiplied by the loss scale.
        Reduced, it is averaged over data parallel ranks, as the framework does it; not reduced, it is the one
        of each data parallel replica alone, and Megatron's DDP has not divided it yet.

        Args:
            name: its global name, `decoder.layers.3.mlp.linear_fc1.weight`.
            expected_shape: the whole's shape, None for a dim that may have any length. Checked, never needed.
            gradient: the gradient instead: `main_grad` where Megatron keeps that, `grad` otherwise.
            reduced: whether gradients are reduced, that is, whether `finalize_model_grads()` ran. Known
                without being said if the schedule calls it (`config.finalize_model_grads_func`), or if no
                DDP is around the model (then they are not).
            padded: with the rows that pad a vocabulary to a multiple.
            everywhere: on every rank instead of on the leader.

        Returns:
            A copy on the CPU, on the leader of each model replica or on every rank; None elsewhere.

        Raises:
            SiteError: no such parameter, or its module's layout is not known; on all ranks, as what follows.
            FlexError: another shape, no gradient, or one that is not what `reduced` says.
        """
        want = ParameterRequest(gradient, reduced, padded, everywhere)
        return parameters.gather_parameter(self.session.survey, name, want, expected_shape)

    def set_module_parameter(
        self,
        name: str,
        value: Tensor | None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        optimizer: Any = None,
    ) -> None:
        """Set a parameter, or its gradient, from the tensor that one device would hold. Every rank calls it.

        All shards are set in place, those of every data parallel replica and of a tied output layer too.
        Megatron's mixed-precision and distributed optimizers keep copies of their own, which their next step
        would write back: give the optimizer, or call its `reload_model_params()` after the last one set.

        Args:
            name: its global name.
            value: the whole; the same on every rank, or on the leader alone and None elsewhere.
            gradient: its gradient instead.
            reduced: as for `get_module_parameter`.
            padded: `value` has the rows that pad a vocabulary; without them they stay as they are.
            optimizer: whose `reload_model_params()` is called.

        Raises:
            SiteError: no such parameter, or its module's layout is not known; on all ranks, as what follows.
            FlexError: another shape or dtype, differing values, or no value on the leader.
        """
        want = ParameterRequest(gradient, reduced, padded)
        parameters.set_parameter(self.session.survey, name, value, want, optimizer)

    def named_full_parameters(
        self,
        gradients: bool = False,
        *,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters, or their gradients, as one device would hold them, by global name in model order.

        Every rank runs it to its end; on ranks that get nothing it is empty. One whole is there at a time.
        Parameters without a known layout are left out with a warning, those without a gradient without.

        Args:
            gradients: their gradients instead; `reduced`, `padded`, `everywhere` as for one of them.
            reduced: likewise.
            padded: likewise.
            everywhere: likewise.
        """
        return parameters.gather_all_parameters(self.session.survey, ParameterRequest(gradients, reduced, padded, everywhere))

    def parameters_without_layout(self) -> dict[str, str]:
        """The parameters that cannot be put together, on all stages, and the classes of their modules."""
        return dict(self.session.survey.unknown)
