"""The training side: tokens, log-probabilities and hidden states of a dump's sequences, in any layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.compare.tolerance import FP32_ROUNDOFF, read_precision
from megatron_flex.dump import VALUE
from megatron_flex.dump.reader import DumpArray, OpenDump
from megatron_flex.errors import DumpError, FlexError

IDS = "embedding.word_embeddings:input"
LOGITS = "output_layer:output"
LOSS = "loss:output"
READ_ENTRIES = 1 << 23  # of logits that are in memory at a time, as fp64
LOGPROB_ROUNDINGS = 8.0  # in fp32, of the greatest logit, in a softmax and its logarithm


def find_rows(stored: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of positions among the stored ones, in order, and which of the positions have one."""
    if not len(stored):
        return torch.zeros_like(positions), torch.zeros(len(positions), dtype=torch.bool)
    rows = torch.searchsorted(stored, positions).clamp(max=len(stored) - 1)
    return rows, stored[rows] == positions


class StoredRows(NamedTuple):
    """A site's rows of a sequence, `[1, token, *features]`, and the positions of these tokens."""

    array: DumpArray
    positions: Tensor

    def find_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of positions, and which of the positions have one."""
        return find_rows(self.positions, positions)

    def read(self, rows: Tensor) -> Tensor:
        """Some rows, as fp64: `[row, *features]`."""
        return self.array[0, rows.tolist()].torch(torch.float64)


class TrainingSequence(NamedTuple):
    """The tokens of a sequence of the dump, with the numbers that name it."""

    number: int
    positions: Tensor
    tokens: Tensor

    def find_tokens(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens at positions, and which of the positions have one."""
        rows, present = find_rows(self.positions, positions)
        return (self.tokens[rows] if len(self.tokens) else rows), present


class LogProbabilities(NamedTuple):
    """Of some tokens.

    Attributes:
        values: the log-probability of each: `[token]`.
        scales: what it changes by if the logits before it change by their own spread, independently.
        floors: what it may differ by if the logits are equal.
    """

    values: Tensor
    scales: Tensor
    floors: Tensor


class TrainingDump:
    """An iteration of a training dump, as sequences. Opening reads token ids, and no logits.

    Args:
        dump: the dump.
        iteration: its number; None for the first.
        vocabulary: the number of logits that are not padding; None for all that the dump has.

    Attributes:
        iteration: the number.
        sequences: in the order of the global batch.
        precision: of the run.
        has_logits: whether the dump has logits, and not the loss of each token alone.
        dtype: of the logits or losses.
    """

    def __init__(self, dump: OpenDump, iteration: int | None = None, vocabulary: int | None = None) -> None:
        if not dump.iterations:
            raise DumpError(f"{dump.path} has no complete iteration to compare", path=dump.path)
        self._dump = dump
        self.iteration = dump.iterations[0] if iteration is None else iteration
        if self.iteration not in dump.iterations:
            raise FlexError(f"{dump.path} has no iteration {iteration}; it has {dump.iterations[:8]}")
        self._calls: dict[str, int] = {}
        ids = self.find_site(IDS)
        if ids is None:
            raise FlexError(
                f"{dump.path} has no token ids: dump {IDS!r}, and {LOGITS!r} or {LOSS!r}, of the training run"
            )
        name = self.find_site(LOGITS) or self.find_site(LOSS)
        if name is None:
            raise FlexError(
                f"{dump.path} has neither logits nor losses of tokens: dump {LOGITS!r} or {LOSS!r} of the "
                "training run"
            )
        self.has_logits = self.find_site(LOGITS) is not None
        self._outputs = self.list_rows(name)
        self.dtype = self._outputs[0].array.dtype
        self.precision = read_precision(dump.manifest, [self.dtype])
        self._vocabulary = self._check_vocabulary(vocabulary)
        self.sequences = [
            TrainingSequence(number, rows.positions, rows.array[0].torch().long().flatten())
            for number, rows in enumerate(self.list_rows(ids))
        ]

    def _check_vocabulary(self, vocabulary: int | None) -> int:
        """The number of logits to read; 0 if the dump has losses only."""
        if not self.has_logits:
            return 0
        width = self._outputs[0].array.shape[-1]
        if vocabulary is not None and not 0 < vocabulary <= width:
            raise FlexError(f"vocabulary {vocabulary}: {self._dump.path} has {width} logits for each token")
        return vocabulary or width

    def find_site(self, name: str) -> str | None:
        """The dump's name of a hook point of a GPTModel; None if it has none."""
        record = self._dump.site_records.get(name)
        if record is not None:
            return name
        try:
            model_name = self._dump.gpt_names.to_model(name)
        except FlexError:
            return None
        return model_name if model_name in self._dump.site_records else None

    def list_rows(self, name: str) -> list[StoredRows]:
        """The rows of a site, sequence by sequence; of a site that is called several times, the last call."""
        written = self._dump.stored_iteration((self.iteration, 0))
        stage = self._dump.site_record(name).stage
        entries = self._dump.entries(written, name, VALUE, stage, written.run.replicas[0])
        calls = {entry.call for _, entry, *_ in entries}
        array = self._dump[(name, max(calls)) if len(calls) > 1 else name].at(self.iteration)
        return [StoredRows(s.array, s.positions) for s in array.sequence_arrays()]

    def read_logprobs(
        self, number: int, positions: Tensor, tokens: Tensor, temperature: float = 1.0
    ) -> tuple[LogProbabilities, Tensor]:
        """The log-probabilities of tokens after those before them.

        Args:
            number: of the sequence.
            positions: of the tokens, from 1: the logits one position earlier are theirs.
            tokens: their ids. A dump of losses has only the log-probabilities of its own tokens.
            temperature: by which logits are divided.

        Returns:
            They, and which of the tokens have one.
        """
        rows, present = self._outputs[number].find_rows(positions - 1)
        if not self.has_logits:
            labels, known = self.sequences[number].find_tokens(positions)
            present &= known & (labels == tokens)
            losses = self._outputs[number].read(rows[present])
            return _measure_losses(losses), present
        present &= tokens < self._vocabulary
        parts = [
            _measure_logits(logits, ids, temperature)
            for logits, ids in self._read_logits(number, rows[present], tokens[present])
        ]
        empty = torch.zeros(0, dtype=torch.float64)
        parts = parts or [LogProbabilities(empty, empty, empty)]
        return LogProbabilities(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), present

    def read_logits(self, number: int, position: int) -> Tensor:
        """The logits `[vocabulary]` before a token, as fp64."""
        rows, _ = self._outputs[number].find_rows(torch.tensor([position - 1]))
        return next(logits for logits, _ in self._read_logits(number, rows, rows))[0]

    def _read_logits(self, number: int, rows: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some rows of logits at a time, with their tokens."""
        output = self._outputs[number]
        many = max(1, READ_ENTRIES // self._vocabulary)
        for some, ids in zip(rows.split(many), tokens.split(many), strict=True):
            if len(some):
                array = output.array[0, some.tolist(), : self._vocabulary]
                yield array.torch(torch.float64), ids

    def find_layer_site(self, layer: int) -> str | None:
        """The hook point that has the residual stream before layer `layer`; None if the dump has none."""
        before = f"decoder.layers.{layer - 1}:output" if layer else "embedding:output"
        return self.find_site(before) or self.find_site(f"decoder.layers.{layer}:input")

    @property
    def layers(self) -> int:
        """The number of layers of the model; 0 if it is not known."""
        return self.precision.layers

    @property
    def experts_per_token(self) -> int:
        """The number of experts that a router chooses; 0 if it is not known."""
        return int(self._dump.manifest.model.get("moe_router_topk") or 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the model has experts, by its config."""
        model = self._dump.manifest.model
        frequency = model.get("moe_layer_freq", 1)
        if not model.get("num_moe_experts"):
            return False
        if isinstance(frequency, int):
            return layer % frequency == 0
        return bool(frequency[layer]) if layer < len(frequency) else True


def _measure_logits(logits: Tensor, tokens: Tensor, temperature: float) -> LogProbabilities:
    logits = logits / temperature
    total = logits.logsumexp(-1, keepdim=True)
    values = (logits.gather(-1, tokens[:, None]) - total)[:, 0]
    probability = values.exp()
    squares = (logits - total).exp_().square_().sum(-1) - probability.square()
    # The change of a logit moves the log-probability of the token by 1 - p, or by -p of another token.
    leverage = ((1 - probability).square() + squares.clamp(min=0)).sqrt()
    floors = LOGPROB_ROUNDINGS * FP32_ROUNDOFF * logits.abs().amax(-1).clamp(min=1)
    return LogProbabilities(values, logits.std(-1, unbiased=False) * leverage, floors)


def _measure_losses(losses: Tensor) -> LogProbabilities:
    """Likewise without logits, whose spread is estimated from the loss."""
    greatest = losses.abs().clamp(min=1)
    return LogProbabilities(
        -losses,
        greatest * -torch.expm1(-losses.abs()) * math.sqrt(2),
        LOGPROB_ROUNDINGS * FP32_ROUNDOFF * greatest,
    )
