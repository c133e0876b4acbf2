"""Dump: what is to be written, when, and how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from os import PathLike, fspath
from typing import Any, Literal

import torch

from megatron_flex.dump.selection import RandomTokens, NumberSelection, TokenSelection, is_selected, normalize_tokens, tokens_to_json
from megatron_flex.errors import FlexError
from megatron_flex.sites import Pattern, describe_pattern

SampleOrder = Literal["interleaved", "blocks"]
WhenFull = Literal["wait", "drop"]
OnDumpError = Literal["warn", "raise"]
WantedNumbers = int | slice | Iterable[int] | None
SHORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Dump:
    """Writes the tensors of a run, each rank its own shards, to a folder that `open_dump` reads.

    Every rank makes one alike and gives it to `attach` or `FlexModel.register_dump`. Nothing is communicated
    on the way of a tensor: what a rank holds is copied, and written by a thread in the background.

    Args:
        path: the folder, on a file system that all ranks see. Another run of the same model and settings
            continues what is there: iterations that are whole already are not written again.
        sites: names or patterns of modules and places, as for HookFunction; a module's output where no place
            is named.
        every: dump iterations whose number is a multiple of it.
        iterations: of these the ones in here: a slice, a range, numbers.
        microbatches: of each iteration these, by their number on the data parallel rank.
        samples: these samples only, by their number in the global batch, in which all microbatches have
            equally many.
        tokens: these positions only: a number, a list, a slice (`slice(None, None, 8)`), or `sampled(64)`.
        reduce: `mean` writes the mean over the (kept) positions of each sample, in fp32.
        dtype: to cast to before anything is copied: a torch.dtype, or `bf16`, `fp16`, `fp32`.
        gradients: the gradients at the sites too, at the scale of a microbatch's own loss, and those of
            `parameters`, once they are reduced, at the scale that the framework gave them. Where a tensor is
            used elsewhere too (the residual stream, beside a norm's input), what the model itself gets is
            then summed in another order; all else in the run keeps its bits.
        parameters: names or patterns of parameters, as they are when the step begins.
        order: how samples of data parallel ranks are numbered: `interleaved`, as Megatron's samplers deal
            them out (microbatch by microbatch over all ranks), or `blocks`, one rank's behind the other's.
        runs: where a schedule runs several times in an iteration (evaluation), the `first`, or `all`.
        when_full: when the disk is slower than the model: `wait` for it, or `drop` whole iterations, on all
            ranks alike, with a count.
        on_error: when writing fails: `warn`, and the iteration is absent; or `raise`, on all ranks, at the
            step's end.
        queue_bytes: how much may be copied and not yet written.
        part_bytes: a rank's file of an iteration is closed and another begun at about this size.
        durable: whether a commit waits until the disk itself has the data, which a power cut needs and a
            killed process does not.
        replicas: whether the ranks that do not write a replicated tensor write its checksum, so that replicas
            that are out of step are seen.
        tags: groups that the hooks of the dump belong to.

    Raises:
        FlexError: a setting that cannot be.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        sites: Sequence[Pattern] | Pattern = (),
        *,
        every: int = 1,
        iterations: WantedNumbers = None,
        microbatches: WantedNumbers = None,
        samples: WantedNumbers = None,
        tokens: int | slice | Sequence[int] | RandomTokens | None = None,
        reduce: Literal["mean"] | None = None,
        dtype: torch.dtype | str | None = None,
        gradients: bool = False,
        parameters: Sequence[Pattern] | Pattern = (),
        order: SampleOrder = "interleaved",
        runs: Literal["first", "all"] = "first",
        when_full: WhenFull = "wait",
        on_error: OnDumpError = "warn",
        queue_bytes: int = 1 << 30,
        part_bytes: int = 256 << 20,
        durable: bool = False,
        replicas: bool = False,
        tags: Iterable[str] = (),
    ) -> None:
        self.path = fspath(path)
        self.sites, self.parameters = _list_patterns(sites), _list_patterns(parameters)
        self.every, self.gradients, self.replicas, self.durable = every, gradients, replicas, durable
        self.iterations = _normalize_numbers("iterations", iterations)
        self.microbatches = _normalize_numbers("microbatches", microbatches)
        self.samples = _normalize_numbers("samples", samples)
        self.tokens: TokenSelection = normalize_tokens(tokens)
        self.dtype = _parse_dtype(dtype)
        self.reduce, self.order, self.runs = reduce, order, runs
        self.when_full, self.on_error = when_full, on_error
        self.queue_bytes, self.part_bytes = queue_bytes, part_bytes
        self.tags = tuple(tags)
        self._check()

    def _check(self) -> None:
        if not self.sites and not self.parameters:
            raise FlexError("a Dump of nothing: name sites, such as 'decoder.layers.*', or parameters")
        if self.every < 1:
            raise FlexError(f"every={self.every}: dump every n-th iteration, n at least 1")
        for name, allowed in (
            ("reduce", (None, "mean")),
            ("order", ("interleaved", "blocks")),
            ("runs", ("first", "all")),
            ("when_full", ("wait", "drop")),
            ("on_error", ("warn", "raise")),
        ):
            if getattr(self, name) not in allowed:
                known = ", ".join(map(str, allowed))
                raise FlexError(f"{name}={getattr(self, name)!r} is none of {known}")
        for name in ("queue_bytes", "part_bytes"):
            if getattr(self, name) < 1:
                raise FlexError(f"{name}={getattr(self, name)}: a number of bytes, at least 1")

    def wants_iteration(self, number: int) -> bool:
        """Whether the iteration is one of those to dump."""
        return number % self.every == 0 and is_selected(number, self.iterations)

    def wants_microbatch(self, number: int) -> bool:
        """Whether the microbatch is one of those to dump."""
        return is_selected(number, self.microbatches)

    def to_json(self) -> dict[str, Any]:
        """What a reader must know of the settings, in plain values."""
        return {
            "sites": [describe_pattern(p) for p in self.sites],
            "parameters": [describe_pattern(p) for p in self.parameters],
            "every": self.every,
            "iterations": _numbers_to_json(self.iterations),
            "microbatches": _numbers_to_json(self.microbatches),
            "samples": _numbers_to_json(self.samples),
            "tokens": tokens_to_json(self.tokens),
            "reduce": self.reduce,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "gradients": self.gradients,
            "order": self.order,
            "runs": self.runs,
            "replicas": self.replicas,
        }

    def describe(self) -> str:
        """What all ranks must have in common, in words."""
        return f"dump to {self.path} of {self.to_json()}"


def _list_patterns(given: Sequence[Pattern] | Pattern) -> list[Pattern]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _normalize_numbers(name: str, given: WantedNumbers) -> NumberSelection:
    if isinstance(given, slice):
        ends = given.start or 0, 0 if given.stop is None else given.stop, 1 if given.step is None else given.step
        if min(ends[:2]) < 0 or ends[2] < 1:
            raise FlexError(
                f"{name}={given!r}: how many there are is not known; count from 0, with steps of 1 or more"
            )
        return given
    if given is None:
        return None
    try:
        found = frozenset(index(n) for n in ([given] if isinstance(given, int) else given))
    except TypeError:
        found = frozenset()
    if isinstance(given, bool) or not found or min(found) < 0:
        raise FlexError(
            f"{name}={given!r} is no number from 0 on, list of them, range or slice; say which to dump"
        )
    return found


def _numbers_to_json(wanted: NumberSelection) -> Any:
    if isinstance(wanted, slice):
        return {"slice": [wanted.start, wanted.stop, wanted.step]}
    return None if wanted is None else sorted(wanted)


def _parse_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if given in SHORT_DTYPES:
        return SHORT_DTYPES[given]
    raise FlexError(f"dtype={given!r} is no torch.dtype and none of {', '.join(SHORT_DTYPES)}")
