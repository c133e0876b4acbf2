"""The settings of a dump, and their text form in command lines and files: `0,5`, `::8`, `random:64`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Literal

import torch

from megatron_flex.dump.json_form import to_json
from megatron_flex.dump.part_format import PART_BYTES
from megatron_flex.dump.schema import SettingsRecord, SliceRecord
from megatron_flex.dump.token_selection import (
    NumberSelection,
    RandomTokens,
    TokenSelection,
    normalize_tokens,
    tokens_to_json,
)
from megatron_flex.errors import FlexError, format_value
from megatron_flex.ranges import (
    WantedNumbers,
    check_choice,
    check_count,
    is_selected,
    normalize_numbers,
    normalize_path,
    parse_count,
    parse_numbers,
)
from megatron_flex.sites import Pattern, describe_pattern


def parse_token_setting(text: str | None, flag: str = "--tokens", fractions: bool = True) -> Any:
    """Parse a selection of token positions.

    Args:
        text: numbers, a slice, `random:` with a count, or a fraction; None for all positions.
        flag: the name of the flag, for error messages.
        fractions: whether a fraction is allowed.

    Returns:
        None, a list, a slice, a RandomTokens or a float.

    Raises:
        FlexError: the text is none of these.
    """
    if text is None:
        return None
    if text.startswith(RANDOM_PREFIX):
        return RandomTokens(parse_count(text.removeprefix(RANDOM_PREFIX), f"{flag} {RANDOM_PREFIX}"))
    if fractions and re.fullmatch(r"[0-9]{0,18}\.[0-9]{0,18}", text) and text != ".":
        return check_fraction(float(text), flag)
    try:
        return parse_numbers(text, flag, from_end=True)
    except FlexError as error:
        raise FlexError(
            f"{error}, or {RANDOM_PREFIX}64{', or a fraction 0.1' if fractions else ''}"
        ) from None


def check_fraction(share: float, name: str) -> float:
    """Return a fraction of the tokens.

    Raises:
        FlexError: it is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise FlexError(f"{name}={share}: a fraction of the tokens is above 0 and at most 1")
    return share


SampleOrder = Literal["interleaved", "blocks"]
WhenFull = Literal["wait", "drop"]
OnDumpError = Literal["warn", "raise"]
RANDOM_PREFIX = "random:"
SHORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Dump:
    """Dumps the tensors of a run, each rank its local shards, to a folder that `open_dump` reads.

    Every rank makes a Dump with the same settings and passes it to `attach` or `FlexModel.register_dump`.
    No tensor is communicated: each rank copies its shards, and a background thread writes them.

    Args:
        path: the folder, on a file system that all ranks share. Another run of the same model and settings
            continues the dump; of an iteration that several runs have completed, the last one is read.
        sites: names or patterns of modules and hook points, as for HookFunction; a module's name selects its
            output.
        every: dump iterations whose number is a multiple of `every`.
        iterations: dump only these of the iterations: a slice, a range, numbers.
        microbatches: dump only these of each iteration, by their number on the data parallel rank.
        samples: dump only these samples, by their number in the global batch. All microbatches must have
            equally many samples.
        tokens: dump only these positions: a number, a list, a slice (`slice(None, None, 8)`), or
            `sampled(64)`.
        reduce: `mean` writes the mean over the (selected) positions of each sample, in fp32.
        dtype: cast to this dtype before copying: a torch.dtype, or `bf16`, `fp16`, `fp32`.
        gradients: also dump the gradients at the hook points, at the scale of a microbatch's own loss, and
            the gradients of `parameters`, after reduction, at the framework's scale. If a tensor has several
            uses (the residual stream, beside a norm's input), the model's own gradient is then summed in
            another order; everything else in the run stays equal bit for bit.
        parameters: names or patterns of parameters, dumped with their values at the start of the step.
        order: how samples of data parallel ranks are numbered: `interleaved`, as Megatron's samplers
            distribute them (microbatch by microbatch over all ranks), or `blocks`, rank by rank.
        runs: if a schedule runs several times in an iteration (evaluation), the `first`, or `all`.
        when_full: if the disk is slower than the model: `wait` for the disk, or `drop` entire iterations, on
            all ranks, and count them.
        on_error: if writing fails: `warn`, and the iteration is absent; or `raise`, on all ranks, at the end
            of the step.
        queue_bytes: the maximum number of bytes that are copied and not yet written.
        part_bytes: the approximate size in bytes at which a rank starts another file of the iteration; the
            first file has half of it, but 8 MiB or more if `part_bytes` allows, so that writing begins early.
        durable: whether a commit waits until the data are on the disk itself, which protects against power
            loss; a killed process loses nothing that was committed either way.
        replicas: whether the ranks that do not write a replicated tensor write its checksum, so that a reader
            detects replicas that differ.
        groups: groups that the hooks of the dump belong to.

    Raises:
        FlexError: a setting is invalid.

    Examples:
        >>> dump = Dump("dumps/new", "decoder.layers.*", every=100, tokens=slice(None, None, 8))
        >>> with attach(chunks, dumps=dump):
        ...     train_step(chunks)
        >>> open_dump("dumps/new")["decoder.layers.3"]
        DumpArray(decoder.layers.3: iteration 1, sample 4, token 2, h 32; float32, 1,024 bytes; [s, b, h])
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
        part_bytes: int = PART_BYTES,
        durable: bool = False,
        replicas: bool = False,
        groups: Iterable[str] = (),
    ) -> None:
        self.path = normalize_path("path", path)
        self.sites, self.parameters = _list_patterns(sites), _list_patterns(parameters)
        self.every = check_count("every", every)
        self.gradients, self.replicas, self.durable = gradients, replicas, durable
        self.iterations = _select_numbers("iterations", iterations)
        self.microbatches = _select_numbers("microbatches", microbatches)
        self.samples = _select_numbers("samples", samples)
        self.tokens: TokenSelection = normalize_tokens(tokens)
        self.dtype = _parse_dtype(dtype)
        self.reduce, self.order, self.runs = reduce, order, runs
        self.when_full, self.on_error = when_full, on_error
        self.queue_bytes = check_count("queue_bytes", queue_bytes)
        self.part_bytes = check_count("part_bytes", part_bytes)
        self.groups = tuple(groups)
        self._check()

    def _check(self) -> None:
        if not self.sites and not self.parameters:
            raise FlexError("a Dump of nothing: name sites, such as 'decoder.layers.*', or parameters")
        for name, allowed in (
            ("reduce", (None, "mean")),
            ("order", ("interleaved", "blocks")),
            ("runs", ("first", "all")),
            ("when_full", ("wait", "drop")),
            ("on_error", ("warn", "raise")),
        ):
            check_choice(name, getattr(self, name), allowed)

    def wants_iteration(self, number: int) -> bool:
        """Return whether the iteration is to be dumped.

        Examples:
            >>> dump = Dump("dumps/new", "decoder.layers.*", every=100)
            >>> [n for n in range(250) if dump.wants_iteration(n)]
            [0, 100, 200]
        """
        return number % self.every == 0 and is_selected(number, self.iterations)

    def wants_microbatch(self, number: int) -> bool:
        """Return whether the microbatch is to be dumped.

        Examples:
            >>> Dump("dumps/new", "decoder.layers.*", microbatches=[0, 3]).wants_microbatch(1)
            False
        """
        return is_selected(number, self.microbatches)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that readers need, in plain values.

        Examples:
            >>> Dump("dumps/new", "decoder.layers.*", every=100).to_json()["every"]
            100
        """
        record = SettingsRecord(
            sites=[describe_pattern(p) for p in self.sites],
            parameters=[describe_pattern(p) for p in self.parameters],
            every=self.every,
            iterations=_numbers_to_json(self.iterations),
            microbatches=_numbers_to_json(self.microbatches),
            samples=_numbers_to_json(self.samples),
            tokens=tokens_to_json(self.tokens),
            reduce=self.reduce,
            dtype=None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            gradients=self.gradients,
            order=self.order,
            runs=self.runs,
            replicas=self.replicas,
        )
        return to_json(record)

    def __repr__(self) -> str:
        sites = ", ".join(describe_pattern(s) for s in self.sites) or "no sites"
        return f"<Dump of {sites} to {self.path}>"

    def describe(self) -> str:
        """Return the settings that must be equal on all ranks, as text.

        Examples:
            >>> Dump("dumps/new", "decoder.layers.*", every=100).describe()
            "dump to dumps/new of {'sites': ['decoder.layers.*'], 'parameters': [], 'every': 100, ...}"
        """
        return f"dump to {self.path} of {self.to_json()}"


def _list_patterns(given: Sequence[Pattern] | Pattern) -> list[Pattern]:
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _select_numbers(name: str, given: WantedNumbers) -> NumberSelection:
    found = None if given is None else normalize_numbers(name, given)
    return frozenset(found) if isinstance(found, tuple) else found


def _numbers_to_json(wanted: NumberSelection) -> Any:
    if isinstance(wanted, slice):
        return to_json(SliceRecord([wanted.start, wanted.stop, wanted.step]))
    return None if wanted is None else sorted(wanted)


def _parse_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if isinstance(given, str) and given in SHORT_DTYPES:
        return SHORT_DTYPES[given]
    raise FlexError(f"dtype={format_value(given)} is not a torch.dtype or {', '.join(SHORT_DTYPES)}")
