"""Where a rollout and a training run part: log-probabilities by token, hidden states by layer, causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import torch

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.compared_result import ComparedResult, TableRow
from megatron_flex.compare.tolerance import Precision, ReductionDepths, derive_tolerance
from megatron_flex.dump import VALUE
from megatron_flex.dump.reader import OpenDump, open_dump
from megatron_flex.errors import FlexError
from megatron_flex.ranges import check_positive
from megatron_flex.rollout.hidden_causes import explain_layers
from megatron_flex.rollout.hidden_differences import MAX_POSITION, HiddenComparer, LayerDifferences
from megatron_flex.rollout.hidden_files import HiddenStates
from megatron_flex.rollout.rollout_table import Request, read_table
from megatron_flex.rollout.token_causes import Cause, TokenExplainer
from megatron_flex.rollout.token_differences import TokenDifferences
from megatron_flex.rollout.token_matching import Match, TokenIndex
from megatron_flex.rollout.training_dump import LOGITS, LogProbabilities, TrainingDump
from megatron_flex.wording import count_words, format_number

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_ROWS = 20  # of the table
MAX_TOKENS = 1000  # that a result lists


class TokenDifference(NamedTuple):
    """A token's two log-probabilities.

    Attributes:
        request: the name of the request.
        position: of the token.
        token: its id.
        rollout: the log-probability in the rollout.
        training: in the training run.
        bound: of the difference that round-off explains.
    """

    request: str
    position: int
    token: int
    rollout: float
    training: float
    bound: float

    @property
    def difference(self) -> float:
        """Training minus rollout."""
        return self.training - self.rollout

    @property
    def place(self) -> str:
        """The token in words."""
        return f"request {self.request}, position {self.position}, token {self.token}"


class HiddenDifference(NamedTuple):
    """The first hidden state that differs.

    Attributes:
        site: the hook point.
        layer: vLLM's number.
        request: the name of the request.
        position: of the token.
        error: the norm of the difference, over that of the training run's hidden state.
        bound: of the error that round-off explains.
    """

    site: str
    layer: int
    request: str
    position: int
    error: float
    bound: float


@dataclass(frozen=True)
class RolloutComparison(ComparedResult):
    """The result of `compare_rollout`. Differences are training minus rollout, in nats.

    Attributes:
        rollout: the path of the table.
        dump: the path of the dump.
        iteration: the iteration of the dump.
        compared: the number of tokens compared.
        uncompared: the number of the others, by reason.
        mean: the mean difference.
        k1: the mean of `-d`, an estimate of KL(rollout, training).
        k3: the mean of `exp(d) - 1 - d`, another one, which is never negative.
        greatest: the token whose log-probabilities differ most; None if none was compared.
        beyond: the number of tokens that differ by more than round-off.
        first: the first of these in the order of the table; None if there is none.
        site: the first hidden state that differs by more than round-off: of the request of `first`, if it has
            one, at a position before that token.
        layers: the greatest error and the bound of each compared hook point of hidden states.
        causes: what explains the difference, where other causes are excluded.
        measured: what was measured, where they are not.
        tokens: the first tokens that differ by more than round-off, or those that differ most.
    """

    rollout: str
    dump: str
    iteration: int
    compared: int
    uncompared: Mapping[str, int]
    mean: float
    k1: float
    k3: float
    greatest: TokenDifference | None
    beyond: int
    first: TokenDifference | None
    site: HiddenDifference | None
    layers: Mapping[str, tuple[float, float]]
    causes: tuple[Cause, ...]
    measured: tuple[str, ...]
    tokens: tuple[TokenDifference, ...]
    HEADS: ClassVar[tuple[str, ...]] = (
        "request", ">position", ">token", ">rollout", ">training", ">difference", ">bound",
    )  # fmt: skip

    @property
    def exit_status(self) -> int:
        """0 if no difference is beyond round-off, 1 if one is, 2 if no token was compared."""
        if self.first is not None or self.site is not None or self.causes:
            return 1
        return 0 if self.compared else 2

    @property
    def verdict(self) -> str:
        """`not distinguishable from round-off`, `diverges` or `cannot be compared`."""
        return ("not distinguishable from round-off", "diverges", "cannot be compared")[self.exit_status]

    def summary(self) -> list[str]:
        """Return the result in lines, the verdict first."""
        lines = [f"{self.verdict}: {count_words(self.compared, 'token')} of {self.rollout} and {self.dump}"]
        if self.first is not None:
            lines[0] = (
                f"{self.verdict}: {self.beyond:,} of {count_words(self.compared, 'token')}, first at "
                f"{self.first.place}"
            )
            lines.append(
                f"  rollout {self.first.rollout:.6g}, training {self.first.training:.6g}: difference "
                f"{self.first.difference:.3g}, bound {self.first.bound:.2g}"
            )
        if self.site is not None:
            lines.append(
                f"  first hidden state that differs: {self.site.site}, request {self.site.request}, position "
                f"{self.site.position}: error {self.site.error:.3g}, bound {self.site.bound:.2g}"
            )
        lines += [f"  {cause.name}: {cause.text}" for cause in self.causes]
        lines += [f"  {line}" for line in self.measured]
        if self.greatest is not None:
            lines.append(
                f"training - rollout: mean {self.mean:.3g}, greatest {self.greatest.difference:.3g} "
                f"({self.greatest.place}); k1 {self.k1:.3g}, k3 {self.k3:.3g}"
            )
        lines += [f"not compared: {count_words(n, 'token')}: {why}" for why, n in self.uncompared.items()]
        return lines

    def table_rows(self, most: int = MAX_ROWS) -> list[TableRow]:
        """Return a row for each of the first tokens that differ by more than round-off."""
        return [
            TableRow(
                (
                    token.request,
                    str(token.position),
                    str(token.token),
                    *map(format_number, (token.rollout, token.training)),
                    f"{token.difference:.3g}",
                    f"{token.bound:.2g}",
                ),
                abs(token.difference) > token.bound,
                token == self.first,
            )
            for token in self.tokens[:most]
        ]

    def _content(self) -> dict[str, Any]:
        names = "rollout", "dump", "iteration", "compared", "mean", "k1", "k3", "beyond", "measured"
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in names},
            "uncompared": dict(self.uncompared),
            "greatest": None if self.greatest is None else self.greatest._asdict(),
            "first": None if self.first is None else self.first._asdict(),
            "site": None if self.site is None else self.site._asdict(),
            "layers": {site: {"error": e, "bound": b} for site, (e, b) in self.layers.items()},
            "causes": [cause._asdict() for cause in self.causes],
            "tokens": [token._asdict() for token in self.tokens],
        }


def compare_rollout(
    rollout: str | PathLike[str],
    dump: OpenDump | str | PathLike[str],
    *,
    hidden: str | PathLike[str] | None = None,
    layers: Sequence[int] = (),
    temperature: float = 1.0,
    dtype: str | None = None,
    iteration: int | None = None,
    vocabulary: int | None = None,
) -> RolloutComparison:
    """Compare the log-probabilities of a rollout with those of a training run on the same tokens.

    Requests are found in the dump by their tokens. Logits are read some at a time.

    Args:
        rollout: a table of JSON lines or Parquet with the columns request, position (from 0, prompt
            included), token and logprob.
        dump: of the training run in any layout: the input of `embedding.word_embeddings`, and the output of
            `output_layer` or `loss`.
        hidden: a folder with vLLM's hidden states, a file `REQUEST.safetensors` for each request.
        layers: vLLM's numbers of their layers, `eagle_aux_hidden_state_layer_ids`.
        temperature: by which the rollout divided the logits before its log-probabilities.
        dtype: `fp32`, `bf16` or `fp16`: what the rollout computed in; by default as its hidden states, or as
            the training run.
        iteration: of the dump; by default the first.
        vocabulary: the number of logits that are not padding; by default all that the dump has.

    Returns:
        The differences, the first token and hook point beyond round-off, and causes with evidence.

    Raises:
        FlexError: the table, the dump or the hidden states cannot be compared.

    Examples:
        >>> from megatron_flex.rollout import compare_rollout
        >>> comparison = compare_rollout("dumps/rollout.jsonl", "dumps/tokens")
        >>> comparison.verdict, comparison.compared
        ('not distinguishable from round-off', 60)
    """
    check_positive("temperature", temperature)
    if dtype is not None and dtype not in DTYPES:
        raise FlexError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if layers and hidden is None:
        raise FlexError(f"layers {list(layers)} are those of hidden states: give their folder too")
    if not isinstance(dump, OpenDump):
        with open_dump(dump) as opened:
            return compare_rollout(
                rollout, opened, hidden=hidden, layers=layers, temperature=temperature, dtype=dtype,
                iteration=iteration, vocabulary=vocabulary,
            )  # fmt: skip
    requests = read_table(rollout)
    states = None if hidden is None else HiddenStates(hidden, layers)
    training = TrainingDump(dump, iteration, vocabulary)
    if temperature != 1 and not training.has_logits:
        raise FlexError(f"temperature {temperature}: {dump.path} has losses only; dump {LOGITS!r} too")
    computed = DTYPES[dtype] if dtype else states.dtype if states else training.precision.computed
    precisions = training.precision, replace(training.precision, computed=computed, stored=None)
    comparer = None if states is None else HiddenComparer(states, training, precisions)
    if states is not None:
        for request in requests:
            states.check_tokens(request)
    return _Comparison(str(rollout), dump, requests, training, comparer, precisions, temperature).run()


class _Comparison:
    """A comparison in progress."""

    def __init__(
        self,
        rollout: str,
        dump: OpenDump,
        requests: Sequence[Request],
        training: TrainingDump,
        comparer: HiddenComparer | None,
        precisions: Sequence[Precision],
        temperature: float,
    ) -> None:
        self.rollout, self.dump, self.requests = rollout, dump, requests
        self.training, self.comparer = training, comparer
        self.precisions, self.temperature = precisions, temperature
        self.uncompared: Counter[str] = Counter()

    def run(self) -> RolloutComparison:
        index = TokenIndex(self.training.sequences)
        matches = {n: match for n, request in enumerate(self.requests) if (match := index.find(request))}
        layers = [] if self.comparer is None else self.comparer.compare(self.requests, matches)
        tokens = self._compare_tokens(matches)
        beyond = tokens.beyond.nonzero().flatten()
        first = self._describe(tokens, int(beyond[0])) if len(beyond) else None
        explainer = TokenExplainer(self.requests, matches, tokens, self.training, self.temperature)
        causes, measured = explainer.explain()
        if self.comparer is not None:
            more, notes = explain_layers(layers, self.comparer, self.requests, matches, bool(causes))
            causes, measured = [*causes, *more], [*([] if more else measured), *notes]
        d = tokens.differences
        largest = d.abs().argsort(descending=True)
        shown = beyond if len(beyond) else largest
        return RolloutComparison(
            rollout=self.rollout,
            dump=str(self.dump.path),
            iteration=self.training.iteration,
            compared=len(d),
            uncompared=dict(self.uncompared),
            mean=_mean(d),
            k1=-_mean(d),
            k3=_mean(d.expm1() - d),
            greatest=self._describe(tokens, int(largest[0])) if len(d) else None,
            beyond=len(beyond),
            first=first,
            site=self._find_site(layers, tokens, beyond),
            layers={layer.site: (layer.greatest, layer.bound) for layer in layers},
            causes=tuple(causes),
            measured=tuple(measured),
            tokens=tuple(self._describe(tokens, int(n)) for n in shown[:MAX_TOKENS]),
        )

    def _compare_tokens(self, matches: Mapping[int, Match]) -> TokenDifferences:
        """The log-probabilities of all tokens that both have."""
        parts: list[TokenDifferences] = []
        for number, request in enumerate(self.requests):
            match = matches.get(number)
            if match is None:
                self.uncompared["no sequence of the dump has the tokens of the request"] += len(
                    request.tokens
                )
                continue
            parts.append(self._compare_request(number, request, match))
        empty = torch.zeros(0, dtype=torch.float64)
        none = torch.zeros(0, dtype=torch.int64)
        parts = parts or [
            TokenDifferences(none, none, none, empty, LogProbabilities(empty, empty, empty), empty)
        ]
        joined = TokenDifferences.join(parts)
        sites = ["embedding:output", *(f"decoder.layers.{n}:output" for n in range(self.training.layers))]
        depth = ReductionDepths([*sites, LOGITS], self.training.layers).forward(LOGITS)
        dtypes = self.training.dtype, self.precisions[1].computed or self.training.dtype
        derived = derive_tolerance(ComparedTensor(LOGITS, VALUE), depth, self.precisions, dtypes)
        return joined.with_bounds(derived)

    def _compare_request(self, number: int, request: Request, match: Match) -> TokenDifferences:
        known = ~request.logprobs.isnan()
        follows = known & (request.positions + match.offset > 0)
        comparable = follows & match.comparable
        tied = {} if self.comparer is None else self.comparer.tied
        chosen = comparable & (request.positions <= tied.get(number, MAX_POSITION))
        positions, tokens = request.positions[chosen], request.tokens[chosen]
        training, present = self.training.read_logprobs(
            match.sequence, positions + match.offset, tokens, self.temperature
        )
        reasons = {
            "the table has no log-probability": ~known,
            "the first token of a sequence follows none": known & ~follows,
            "it is, or follows, a token that differs from the dump's": follows & ~comparable,
            "it follows a token whose router had a near tie of two experts": comparable & ~chosen,
        }
        for reason, which in reasons.items():
            if count := int(which.sum()):
                self.uncompared[reason] += count
        if count := int((~present).sum()):
            what = "logits" if self.training.has_logits else "loss"
            self.uncompared[f"the dump has no {what} of the token"] += count
        return TokenDifferences(
            torch.full_like(positions[present], number),
            positions[present],
            tokens[present],
            request.logprobs[chosen][present],
            training,
            torch.zeros(0, dtype=torch.float64),
        )

    def _describe(self, tokens: TokenDifferences, at: int) -> TokenDifference:
        return TokenDifference(
            self.requests[int(tokens.requests[at])].name,
            int(tokens.positions[at]),
            int(tokens.tokens[at]),
            float(tokens.rollout[at]),
            float(tokens.training.values[at]),
            float(tokens.bounds[at]),
        )

    def _find_site(
        self, layers: Sequence[LayerDifferences], tokens: TokenDifferences, beyond: torch.Tensor
    ) -> HiddenDifference | None:
        """The first hidden state that differs before the first token that does, or the first of all."""
        for layer in layers if len(beyond) else ():
            of_request = layer.requests == tokens.requests[beyond[0]]
            before = layer.positions < tokens.positions[beyond[0]]
            if len(where := (layer.beyond & of_request & before).nonzero().flatten()):
                return self._describe_layer(layer, int(where[0]))
        for layer in layers:
            if len(where := layer.beyond.nonzero().flatten()):
                return self._describe_layer(layer, int(where[0]))
        return None

    def _describe_layer(self, layer: LayerDifferences, at: int) -> HiddenDifference:
        return HiddenDifference(
            layer.site,
            layer.layer,
            self.requests[int(layer.requests[at])].name,
            int(layer.positions[at]),
            float(layer.errors[at]),
            layer.bound,
        )


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
