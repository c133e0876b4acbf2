"""The settings of a dump, and their text form in command lines and files: `0,5`, `::8`, `random:64`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any, Literal

import torch

from megatron_flex.dump.json_form import to_json
from megatron_flex.dump.part_format import PART_BYTES
from megatron_flex.dump.schema import SliceRecord
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
    is_selected,
    normalize_numbers,
    parse_count,
    parse_numbers,
)
from megatron_flex.settings import (
    COUNT,
    NAMES,
    PATH,
    PATTERNS,
    SWITCH,
    Kind,
    Setting,
    choice,
    record_settings,
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
SHORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _select_numbers(name: str, given: WantedNumbers) -> NumberSelection:
    numbers = None if given is None else normalize_numbers(name, given)
    return frozenset(numbers) if isinstance(numbers, tuple) else numbers


def _numbers_to_json(numbers: NumberSelection) -> Any:
    if isinstance(numbers, slice):
        return to_json(SliceRecord([numbers.start, numbers.stop, numbers.step]))
    return None if numbers is None else sorted(numbers)


def _parse_dtype(name: str, given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if isinstance(given, str) and given in SHORT_DTYPES:
        return SHORT_DTYPES[given]
    raise FlexError(f"{name}={format_value(given)} is not a torch.dtype or {', '.join(SHORT_DTYPES)}")


NUMBERS: Kind[WantedNumbers, NumberSelection] = Kind(
    _select_numbers, parse=lambda text, name: parse_numbers(text, name), record=_numbers_to_json
)
TOKENS: Kind[int | slice | Sequence[int] | RandomTokens | None, TokenSelection] = Kind(
    lambda _, given: normalize_tokens(given),
    parse=lambda text, name: parse_token_setting(text, name, fractions=False),
    record=tokens_to_json,
)
DTYPE: Kind[torch.dtype | str | None, torch.dtype | None] = Kind(
    _parse_dtype,
    words=tuple(SHORT_DTYPES),
    record=lambda dtype: None if dtype is None else str(dtype).removeprefix("torch."),
)


@dataclass(eq=False, repr=False)
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

    path: Setting[str | PathLike[str], str] = Setting(
        PATH,
        flag="dump",
        help="Write the activations at --flex-sites to a folder.",
        metavar="DIR",
        takes="once",
        recorded=False,
        estimated=False,
    )
    sites: Setting[Sequence[Pattern] | Pattern, list[Pattern]] = Setting(PATTERNS, (), shared=True)
    _: KW_ONLY
    parameters: Setting[Sequence[Pattern] | Pattern, list[Pattern]] = Setting(
        PATTERNS,
        (),
        flag="dump-parameters",
        help="Names or patterns of parameters to write as well.",
        metavar="PATTERN",
    )
    every: Setting[int, int] = Setting(COUNT, 1, shared=True)
    iterations: Setting[WantedNumbers, NumberSelection] = Setting(
        NUMBERS,
        None,
        flag="dump-iterations",
        help="Of the iterations of --flex-every, write only these: 100, or 100,200, or 0:1000:100.",
        metavar="WHICH",
        estimated=False,  # of a run; the estimate is of one iteration
    )
    microbatches: Setting[WantedNumbers, NumberSelection] = Setting(
        NUMBERS,
        None,
        flag="dump-microbatches",
        help="Write only these microbatches of each iteration, such as 0.",
        metavar="WHICH",
        estimated=False,  # the estimate takes their number
    )
    samples: Setting[WantedNumbers, NumberSelection] = Setting(
        NUMBERS,
        None,
        flag="dump-samples",
        help="Write only these samples of the global batch, such as 0:8.",
        metavar="WHICH",
        estimated=False,  # the estimate counts all samples
    )
    tokens: Setting[int | slice | Sequence[int] | RandomTokens | None, TokenSelection] = Setting(
        TOKENS, None, shared=True
    )
    reduce: Setting[Literal["mean"] | None, Literal["mean"] | None] = Setting(
        choice("mean", optional=True),
        None,
        flag="dump-mean",
        help="Write only the mean over each sample's positions.",
    )
    dtype: Setting[torch.dtype | str | None, torch.dtype | None] = Setting(
        DTYPE, None, flag="dump-dtype", help="The dtype to cast tensors to."
    )
    gradients: Setting[bool, bool] = Setting(SWITCH, False, shared=True)
    order: Setting[SampleOrder, SampleOrder] = Setting(choice("interleaved", "blocks"), "interleaved")
    runs: Setting[Literal["first", "all"], Literal["first", "all"]] = Setting(choice("first", "all"), "first")
    replicas: Setting[bool, bool] = Setting(
        SWITCH,
        False,
        flag="dump-replicas",
        help="Write checksums of replicated tensors, which dump verify compares.",
        estimated=False,
    )
    when_full: Setting[WhenFull, WhenFull] = Setting(
        choice("wait", "drop"),
        "wait",
        flag="dump-when-full",
        help="If the disk is slower than the model: wait, or drop iterations.",
        recorded=False,
        estimated=False,
    )
    on_error: Setting[OnDumpError, OnDumpError] = Setting(
        choice("warn", "raise"),
        "warn",
        flag="dump-on-error",
        help="If an iteration cannot be written: warn and leave it out, or stop the run.",
        recorded=False,
        estimated=False,
    )
    queue_bytes: Setting[int, int] = Setting(COUNT, 1 << 30, recorded=False)
    part_bytes: Setting[int, int] = Setting(COUNT, PART_BYTES, recorded=False)
    durable: Setting[bool, bool] = Setting(SWITCH, False, recorded=False)
    groups: Setting[Iterable[str], tuple[str, ...]] = Setting(NAMES, (), recorded=False)

    def __post_init__(self) -> None:
        if not self.sites and not self.parameters:
            raise FlexError("a Dump needs sites, such as 'decoder.layers.*', or parameters")

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
        return record_settings(self)

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
