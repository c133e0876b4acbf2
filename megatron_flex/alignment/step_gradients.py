"""The loss and the parameter gradients of one step of both models, compared tensor by tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.alignment.alignment_result import SiteVerdict
from megatron_flex.alignment.site_rows import hold_to, make_verdict, sum_site
from megatron_flex.alignment.token_batch import TokenBatch
from megatron_flex.collectives import sum_over_ranks
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.tolerance import Tolerances
from megatron_flex.conversion import place_full_tensors
from megatron_flex.conversion.architectures import OUTPUT_WEIGHT, WORD_EMBEDDINGS
from megatron_flex.dump import PARAMETER_GRADIENT, VALUE
from megatron_flex.errors import FlexError
from megatron_flex.model import FlexModel
from megatron_flex.runtime.full_parameters import (
    ParameterRequest,
    gather_all_parameters,
    gather_parameter,
)

LOSS, PART = "loss:output", "gradients"


class StepGradients:
    """A step of the Megatron model: its loss, and its gradients in the form of the Hugging Face model.

    Every rank makes one alike. Gradients are cleared before and after.

    Args:
        hf_model: the Hugging Face model on the first rank; None on the others.
        flex: the Megatron model.
        batch: the tokens; each predicts the next one.

    Attributes:
        notes: in words, what the losses are of; set by `verdicts`.

    Raises:
        FlexError: on all ranks: gradients cannot be gathered, such as those under torch's
            DistributedDataParallel with sequence parallelism.
    """

    def __init__(self, hf_model: Any, flex: FlexModel, batch: TokenBatch) -> None:
        adapter: Any = flex.session.adapter
        self._batch, self._hf_model = batch, hf_model
        self._labels = batch.tokens.roll(-1, 1)
        self._counted = batch.real & batch.real.roll(-1, 1)
        self._counted[:, -1] = False
        self.notes: tuple[str, ...] = ()
        if not bool(self._counted.any()):
            raise FlexError("no token predicts another; give sequences of two tokens or more")
        _clear_gradients(adapter.chunks)
        result = adapter.runner.run_backward(batch.tokens, self._labels, self._counted)
        self._loss = _full_loss(flex, result.loss)
        try:
            gradients = dict(_full_gradients(flex, result.reduced))
        except FlexError as error:
            raise FlexError(
                f"gradients cannot be compared here ({error}); align without gradients, or wrap the "
                "chunks in Megatron's DistributedDataParallel"
            ) from None
        self._padding = _padding_rows(flex, hf_model)
        self._placed = copy.deepcopy(hf_model) if hf_model is not None else None
        if self._placed is not None:
            with torch.no_grad():
                for parameter in self._placed.parameters():
                    parameter.zero_()
        place_full_tensors(adapter.chunks, gradients, self._placed)
        _clear_gradients(adapter.chunks)

    def verdicts(self, tolerances: Tolerances) -> tuple[SiteVerdict, ...]:
        """The verdicts for the loss and each tensor of the Hugging Face model, the last layers first.

        On the rank with the Hugging Face model.

        Args:
            tolerances: of the sites.
        """
        assert self._placed is not None, "the first rank has the model"
        loss, gradients = self._reference()
        megatron_loss, hf_loss = torch.tensor([self._loss]), torch.tensor([loss])
        out = [self._verdict(LOSS, megatron_loss, hf_loss, tolerances, VALUE)]
        for name, placed in reversed(list(self._placed.named_parameters())):
            gradient = gradients.get(name)
            hf_gradient = torch.zeros_like(placed) if gradient is None else gradient
            pair = placed.detach().cpu(), hf_gradient.detach().cpu()
            out.append(self._verdict(name, *pair, tolerances, PARAMETER_GRADIENT))
        return tuple(out)

    def _reference(self) -> tuple[float, dict[str, Tensor]]:
        """The loss and the gradients of the Hugging Face model, whose own gradients are put back."""
        model: Any = self._hf_model
        parameters = dict(model.named_parameters())
        before = {name: p.grad for name, p in parameters.items()}
        try:
            model.zero_grad(set_to_none=True)
            with self._training_all_rows(model.get_input_embeddings()):
                loss = self._reference_loss(model, next(iter(parameters.values())).device)
                loss.backward()
            return float(loss.detach()), {n: p.grad for n, p in parameters.items() if p.grad is not None}
        finally:
            for name, parameter in parameters.items():
                parameter.grad = before[name]

    def _reference_loss(self, model: Any, device: torch.device) -> Tensor:
        """The mean cross entropy over the tokens that Megatron counts, with those that pad its vocabulary."""
        counted = self._counted.to(device)
        inputs: list[Tensor] = []
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            logits = model(input_ids=self._batch.tokens.to(device), use_cache=False).logits[counted].float()
        finally:
            hook.remove()
        labels = self._labels.to(device)[counted]
        loss: Tensor = nn.functional.cross_entropy(logits, labels)
        if self._padding is None or not len(self._padding):
            return loss
        rows = self._padding.to(inputs[-1])
        padded = torch.cat([logits, (inputs[-1][counted] @ rows.T).float()], -1)
        counting: Tensor = nn.functional.cross_entropy(padded, labels)
        self.notes += (
            f"the losses are over {padded.shape[-1]} tokens, as Megatron counts the {len(rows)} that pad its "
            f"vocabulary; over the {logits.shape[-1]} of Hugging Face the loss is {loss.detach():.6g}, not "
            f"{counting.detach():.6g}",
        )
        return counting

    @contextmanager
    def _training_all_rows(self, embedding: Any) -> Iterator[None]:
        """Let the row of `pad_token_id` have a gradient, as in Megatron."""
        token = getattr(embedding, "padding_idx", None)
        if token is None or not bool((self._batch.tokens == token).any()):
            yield
            return
        self.notes += (
            f"token {token}, the pad_token_id of Hugging Face, is in the batch: its embedding has a gradient "
            "in Megatron, and in this comparison in Hugging Face, which gives it none in training",
        )
        try:
            embedding.padding_idx = None
            yield
        finally:
            embedding.padding_idx = token

    @staticmethod
    def _verdict(name: str, megatron: Tensor, hf: Tensor, tolerances: Tolerances, kind: str) -> SiteVerdict:
        dtypes = megatron.dtype, hf.dtype
        item = ComparedTensor(name, kind)
        row = hold_to(tolerances.bound(item, dtypes), item, sum_site(megatron, hf))
        return make_verdict(name, PART, hf.shape, dtypes, row)


def _full_loss(flex: FlexModel, part: float | None) -> float:
    """The loss on every rank, of which context parallel ranks of the last stage have parts. Collective."""
    mesh = flex.session.mesh
    # Replicas have the same loss, so that only the first one's parts are added.
    first = part is not None and all(axis.coord == 0 for axis in mesh if axis.name in ("dp", "tp"))
    device = next(flex.chunks.parameters()).device
    local = torch.tensor(part if first else 0.0, dtype=torch.float64, device=device)
    return sum_over_ranks(local, mesh, [axis.name for axis in mesh])


def _padding_rows(flex: FlexModel, hf_model: Any) -> Tensor | None:
    """The rows of the output layer after Hugging Face's vocabulary, on the first rank. Collective."""
    index = flex.session.parameters.index
    name = OUTPUT_WEIGHT if OUTPUT_WEIGHT in index.sites else WORD_EMBEDDINGS
    weight = gather_parameter(index, name, ParameterRequest(padded=True), None)
    if weight is None or hf_model is None:
        return None
    return weight[len(hf_model.get_output_embeddings().weight) :].clone()  # so that the others are freed


def _full_gradients(flex: FlexModel, reduced: bool | None) -> Iterator[tuple[str, Tensor]]:
    """The full gradients, averaged over replicas. Collective: every rank iterates to the end."""
    index = flex.session.parameters.index
    if reduced is False:
        index.average_replicas()
    return gather_all_parameters(index, ParameterRequest(True, reduced, averaged=reduced is False))


def _clear_gradients(chunks: list[nn.Module]) -> None:
    """Clear the gradients of Megatron's chunks, also those in the buffers of a data parallel wrapper."""
    for chunk in chunks:
        clear = getattr(chunk, "zero_grad_buffer", None)
        if clear is not None:
            clear()
        chunk.zero_grad(set_to_none=True)
