"""The activations of a text that a model generates: those of all calls of the model, joined by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from megatron_flex.errors import FlexError, HookError
from megatron_flex.lens.activation_cache import ActivationCache
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.lens_names import Alias
from megatron_flex.lens.temporary_hooks import TemporaryCaptures
from megatron_flex.lens.tensor_views import Positions
from megatron_flex.runtime import Session

POSITION_DIM = "s"
UNFINISHED = "the text is not finished: read the cache after the `with` block"


class GeneratedText:
    """What a model computed while it generated, by position of the text.

    Row b of a tensor is request b. The last token that was generated has no position, as the model was not
    called on it.

    Examples:
        >>> with flex.interp.generation("decoder.layers.1") as text:
        ...     for length in (15, 16):  # without a cache of keys and values
        ...         _ = chunks[0](tokens[:, :length], torch.arange(length).expand(2, -1), None)
        >>> text.cache["decoder.layers.1"].shape
        torch.Size([2, 16, 32])
    """

    def __init__(self, axes: dict[str, int], weights: FullWeights, spread: bool) -> None:
        self._axes, self._weights, self._spread = axes, weights, spread
        self._calls: dict[str, list[Tensor]] | None = None

    @property
    def cache(self) -> ActivationCache:
        """The tensors `[batch, pos, ...]`: positions of the prompts first, then one for each further call.

        Raises:
            FlexError: the text is not finished.
            HookError: the calls do not continue one another, or have different numbers of rows.
        """
        if self._calls is None:
            raise FlexError(UNFINISHED)
        return self._make_cache({name: self._join(name, calls) for name, calls in self._calls.items()})

    def follow(self, beam_indices: Tensor) -> ActivationCache:
        """The tensors of the sequences that a beam search returned: row b is the b-th returned sequence.

        In each call the rows are the beams at that time, which the search reorders.

        Args:
            beam_indices: `[sequences, new tokens]`, -1 at the end of shorter ones: the field of that name of
                `model.generate(..., return_dict_in_generate=True, output_scores=True)`.

        Returns:
            The cache; entries behind the end of a shorter sequence are zeros.

        Raises:
            FlexError: the text is not finished, or has fewer calls than `beam_indices` has columns.
        """
        if self._calls is None:
            raise FlexError(UNFINISHED)
        rows = beam_indices.cpu()
        joined = {}
        for name, calls in self._calls.items():
            if len(calls) < rows.shape[1]:
                raise FlexError(
                    f"follow(): beam_indices has {rows.shape[1]} new tokens and {name} {len(calls)} calls; "
                    "pass the indices of the search that ran in this block"
                )
            # Call n computes the scores of new token n, in the row that the token was taken from.
            selected = [_take_rows(call, rows[:, n]) for n, call in enumerate(calls[: rows.shape[1]])]
            joined[name] = self._join(name, selected)
        return self._make_cache(joined)

    def finish(self, calls: dict[str, list[Tensor]]) -> None:
        """Keep the tensors of each call; called where the `with` block ends."""
        self._calls = calls

    def _make_cache(self, tensors: dict[str, Tensor]) -> ActivationCache:
        return ActivationCache(tensors, self._weights, self._spread)

    def _join(self, name: str, calls: Sequence[Tensor]) -> Tensor:
        axis = self._axes[name]
        lengths = [call.shape[axis] for call in calls]
        shapes = {(*c.shape[:axis], *c.shape[axis + 1 :]) for c in calls}
        # Without a cache of keys and values, each call has the text so far and one token more.
        whole = len(lengths) > 1 and lengths == list(range(lengths[0], lengths[0] + len(lengths)))
        if len(shapes) > 1 or (not whole and any(length > 1 for length in lengths[1:])):
            described = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(c.shape for c in calls))
            raise HookError(
                f"the calls of the model do not continue one text: {name} has the shapes {described}; "
                "generate one batch in the `with` block"
            )
        return calls[-1] if whole else torch.cat(list(calls), axis)


def _take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows of a tensor, with zeros where a row is -1."""
    selected = tensor[rows.clamp(min=0)]
    ended = (rows < 0).view(-1, *[1] * (selected.ndim - 1))
    return selected.masked_fill(ended, 0)


def find_axes(session: Session, aliases: Sequence[Alias]) -> dict[str, int]:
    """The dim of positions of each alias, in TransformerLens' shapes.

    Raises:
        HookError: a tensor has no dim of positions, or a second one, which grows from call to call, or is
            computed from the positions of a whole text.
    """
    axes = {}
    for alias in aliases:
        dims = alias.view.dims(session.sites[alias.site].shape)
        names = [str(dim) for dim in dims or ("b", POSITION_DIM)]
        if names.count(POSITION_DIM) != 1 or isinstance(alias.view, Positions):
            raise HookError(
                f"{alias.name} has the dims {names}, which cannot be joined by position; name hook points "
                "with one dim of positions, such as hook_z or a layer's output"
            )
        axes[alias.name] = names.index(POSITION_DIM)
    return axes


@contextmanager
def record_generation(
    session: Session, weights: FullWeights, aliases: Sequence[Alias], everywhere: bool
) -> Iterator[GeneratedText]:
    """Capture what the model computes in all calls of a scope.

    Args:
        session: the session of the model.
        weights: the model's weights.
        aliases: what to capture.
        everywhere: whether every rank gets it.
    """
    captures = TemporaryCaptures(session, weights)
    text = GeneratedText(find_axes(session, aliases), weights, everywhere)
    # Stages wait for each other's tensors in every call, so that ranks meet at the end only.
    step = session.step() if session.mesh["pp"].size > 1 else nullcontext()
    try:
        captures.add(aliases)
        with step, torch.no_grad():
            yield text
        text.finish(captures.collect_calls(everywhere))
    finally:
        captures.remove()
