"""Numbers that a user gives, as text of a flag or as an argument: counts, rates, ranges such as `0:1000:100`.

Every flag and constructor that takes iterations, microbatches, samples, tokens or indices uses these.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import index
from typing import Any, SupportsIndex

from megatron_flex.errors import FlexError, format_value

WantedNumbers = int | slice | Iterable[int] | None
Span = int | slice

MAX_LISTED = 100_000  # numbers of one selection; more of them are written as a range
MAX_NUMBER = (1 << 62) - 1  # also sums of two fit into 64 bits
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")  # int() also reads 1_000 and digits of other alphabets


def parse_spans(text: str, flag: str, from_end: bool = False) -> list[Span]:
    """Parse numbers and ranges: `100`, `100,200`, `0:1000:100`, several separated by commas.

    Args:
        text: the value of the flag.
        flag: its name, for error messages.
        from_end: whether numbers below 0 count from the end.

    Raises:
        FlexError: an item is neither a number nor a range, or a range has nothing in it.
    """
    return [_parse_span(item, text, flag, from_end) for item in text.split(",")]


def parse_numbers(text: str, flag: str, from_end: bool = False) -> slice | list[int]:
    """Parse a selection as `Dump` and `Select` accept it: one range, or numbers in the given order.

    Raises:
        FlexError: as for `parse_spans`; a range beside others has no end; or there are too many numbers.
    """
    spans = parse_spans(text, flag, from_end)
    if len(spans) == 1 and isinstance(spans[0], slice):
        return spans[0]
    out: list[int] = []
    for span in spans:
        if isinstance(span, int):
            out.append(span)
            continue
        numbers = _expand_closed_range(span)
        if numbers is None:
            raise FlexError(
                f"{flag} {format_value(text)}: in a list, a range needs a start and an end on the same side "
                "of 0, such as 0:1000:100"
            )
        if len(out) + len(numbers) > MAX_LISTED:
            raise FlexError(
                f"{flag} {format_value(text)}: more than {MAX_LISTED:,} numbers; give one range alone"
            )
        out += numbers
    return out


def _parse_span(item: str, text: str, flag: str, from_end: bool) -> Span:
    words = [word.strip() for word in item.split(":")]
    well_formed = len(words) <= 3 and all(_NUMBER.fullmatch(w) or (not w and len(words) > 1) for w in words)
    if not well_formed:
        raise FlexError(
            f"{flag} {format_value(text)}: {format_value(item)} is not a number or a range; give 100, or "
            "100,200, or 0:1000:100"
        )
    values = [int(word) if word else None for word in words]
    if len(values) > 1:
        return check_slice(slice(*values), f"{flag} {format_value(text)}", from_end)
    number = values[0]
    assert number is not None
    if number < 0 and not from_end:
        raise FlexError(f"{flag} {format_value(text)}: {number} is below 0; count from 0")
    return number


def _expand_closed_range(span: slice) -> Sequence[int] | None:
    """The numbers of a range whose ends are both given, and on one side of 0."""
    start = 0 if span.start is None and (span.stop or 0) > 0 else span.start
    if start is None or span.stop is None or (start < 0) != (span.stop < 0):
        return None
    return range(start, span.stop, 1 if span.step is None else span.step)


def check_slice(given: slice, what: str, from_end: bool = False, in_order: bool = False) -> slice:
    """Return the slice with plain integers.

    Args:
        given: the slice.
        what: the argument or flag with its value, for error messages.
        from_end: whether numbers below 0 count from the end.
        in_order: whether the order of the entries counts, so that the slice may also count down.

    Raises:
        FlexError: an end is not an integer, the step is below 1, or nothing can be in the slice.
    """
    try:
        start, stop, step = (
            None if end is None else _to_int(end) for end in (given.start, given.stop, given.step)
        )
    except TypeError:
        raise FlexError(
            f"{what}: the ends and the step of a range are whole numbers, as in 0:1000:100"
        ) from None
    if step is not None and step < 1 and not (in_order and step):
        raise FlexError(f"{what}: the step is {format_value(step)}; count up, in steps of at least 1")
    if not from_end and min(start or 0, stop or 0) < 0:
        raise FlexError(f"{what}: how many there are is not known; count from 0, as in 0:1000:100")
    if max(abs(n) for n in (start or 0, stop or 0, step or 1)) > MAX_NUMBER:
        raise FlexError(f"{what}: numbers are below 2^62")
    if step is not None and step < 0:
        return slice(start, stop, step)
    empty = stop == 0 or (stop is not None and ((start or 0) < 0) == (stop < 0) and stop <= (start or 0))
    if empty and not (start is None and stop is not None and stop < 0):
        raise FlexError(f"{what}: the range is empty, because its end is not above its start")
    return slice(start, stop, step)


def normalize_numbers(
    name: str, given: Any, from_end: bool = False, in_order: bool = False
) -> slice | tuple[int, ...]:
    """Convert an argument to a slice or to numbers in the given order.

    Unless the order counts, a range becomes a slice, however long it is.

    Args:
        name: the argument.
        given: a number, a slice, a range, or numbers.
        from_end: whether numbers below 0 count from the end.
        in_order: whether the order of the entries counts, and one that is not there is an error.

    Raises:
        FlexError: the value is not one of these, is empty, or lists too many numbers.
    """
    what = f"{name}={format_value(given)}"
    if isinstance(given, slice):
        return check_slice(given, what, from_end, in_order)
    if isinstance(given, range) and not in_order and (span := _range_to_slice(given)) is not None:
        return check_slice(span, what, from_end)
    try:
        numbers = _list_integers(given)
    except TypeError:
        numbers = []
    if not numbers:
        raise FlexError(
            f"{what} is not a number, numbers, a range or a slice; give such as [0, 5] or slice(0, 8)"
        )
    if len(numbers) > MAX_LISTED:
        raise FlexError(f"{what} lists more than {MAX_LISTED:,} numbers; give a range or a slice")
    if min(numbers) < 0 and not from_end:
        raise FlexError(
            f"{what} has {format_value(min(numbers))}: how many there are is not known; count from 0"
        )
    if max(map(abs, numbers)) > MAX_NUMBER:
        raise FlexError(f"{what}: numbers are below 2^62")
    return tuple(numbers)


def _range_to_slice(given: range) -> slice | None:
    """The slice that selects the same numbers of any count; None if only a list does."""
    rising = given if given.step > 0 else given[::-1]
    if not rising or rising[0] < 0:
        return None
    return slice(rising.start, rising[-1] + 1, rising.step)


def _list_integers(given: Any) -> list[int]:
    """The integers of an argument, one more than the maximum at most. Raises TypeError."""
    if isinstance(given, (str, bytes, bytearray, memoryview, dict)):
        raise TypeError
    if callable(values := getattr(given, "tolist", None)):  # of a tensor or an array, without an object each
        given = values()
    if isinstance(given, Iterable):
        return [_to_int(n) for n in islice(given, MAX_LISTED + 1)]
    return [_to_int(given)]


def _to_int(given: SupportsIndex) -> int:
    if isinstance(given, bool):
        raise TypeError
    return index(given)


def is_selected(number: int, wanted: slice | Iterable[int] | None) -> bool:
    """Return whether a number is selected: by a slice that counts from 0, or among numbers; None is all."""
    if isinstance(wanted, slice):
        first, last, step = wanted.start or 0, wanted.stop, wanted.step or 1
        return number >= first and (last is None or number < last) and (number - first) % step == 0
    return wanted is None or number in wanted


def select_present(
    spans: Sequence[Span], present: Sequence[int], where: str, kind: type[FlexError] = FlexError
) -> list[int]:
    """The present numbers that are in the spans, in ascending order.

    Args:
        spans: numbers, which must be present, and slices, in which some must be.
        present: the numbers there are.
        where: what has them, for error messages.
        kind: the class of these errors.

    Raises:
        FlexError: a number is not present, or none is in the slices.
    """
    present_numbers, out = set(present), set()
    for span in spans:
        if isinstance(span, slice):
            out |= {n for n in present_numbers if is_selected(n, span)}
        elif span in present_numbers:
            out.add(span)
        else:
            raise kind(f"iteration {span} is not in {where}, which has {summarize_numbers(present)}")
    if not out:
        spelled = ",".join(map(_format_span, spans))
        raise kind(f"no iteration of {spelled} is in {where}, which has {summarize_numbers(present)}")
    return sorted(out)


def _format_span(span: Span) -> str:
    if isinstance(span, int):
        return str(span)
    ends = [span.start, span.stop] + ([] if span.step in (None, 1) else [span.step])
    return ":".join("" if end is None else str(end) for end in ends)


def normalize_spans(name: str, given: Any) -> list[Span]:
    """Convert an argument to spans; beside what `normalize_numbers` accepts, a list may have slices.

    Raises:
        FlexError: as for `normalize_numbers`.
    """
    if isinstance(given, (list, tuple)) and any(isinstance(n, (slice, range)) for n in given):
        return [span for item in given for span in normalize_spans(name, item)]
    numbers = normalize_numbers(name, given)
    return [numbers] if isinstance(numbers, slice) else list(numbers)


def summarize_numbers(numbers: Sequence[int]) -> str:
    """Return the numbers as text: all of a few, the first and last of many."""
    few = ", ".join(map(str, numbers)) or "none"
    return f"{numbers[0]} to {numbers[-1]}, {len(numbers)} in all" if len(numbers) > 8 else few


def describe_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return numbers and what they count: `iteration 3`, `iterations 3, 5`, of many `iterations 3 to 90`."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return f"{noun} {ordered[0]}"
    consecutive = ordered[-1] - ordered[0] == len(ordered) - 1
    return (
        f"{noun}s {ordered[0]} to {ordered[-1]}" if consecutive else f"{noun}s {summarize_numbers(ordered)}"
    )


def parse_count(text: str, flag: str, least: int = 1) -> int:
    """Parse a whole number.

    Raises:
        FlexError: it is not one, or below `least`.
    """
    if not _NUMBER.fullmatch(text.strip()) or int(text) < least:
        raise FlexError(f"{flag} {format_value(text)}: give a whole number of at least {least}")
    return int(text)


def check_count(name: str, given: Any, least: int = 1) -> int:
    """Return an argument as an integer.

    Raises:
        FlexError: it is not an integer, or below `least`.
    """
    try:
        number = _to_int(given)
    except TypeError:
        number = least - 1
    if not least <= number <= MAX_NUMBER:
        bound = f"at least {least}" if number < least else f"at most {MAX_NUMBER}"
        raise FlexError(f"{name}={format_value(given)}: give a whole number of {bound}")
    return number


def normalize_path(name: str, given: Any) -> str:
    """Return a path as text, with `~` expanded.

    Raises:
        FlexError: it is not a path, or a path that no system has.
    """
    try:
        path = os.fsdecode(given)
        os.fsencode(path)
    except (TypeError, UnicodeError):
        path = "\0"
    if "\0" in path:
        raise FlexError(f"{name}={format_value(given)} is not a path; name a file or folder")
    return os.path.expanduser(path)


def check_positive(name: str, given: Any) -> float:
    """Return an argument as a finite number above 0.

    Raises:
        FlexError: it is not one.
    """
    number = _to_float(given)
    if not number > 0:
        raise FlexError(f"{name}={format_value(given)}: give a number above 0")
    return number


def check_nonnegative(name: str, given: Any) -> float:
    """Return an argument as a finite number of at least 0.

    Raises:
        FlexError: it is not one.
    """
    number = _to_float(given)
    if not number >= 0:
        raise FlexError(f"{name}={format_value(given)}: give a number of at least 0")
    return number


def _to_float(given: Any) -> float:
    """A finite number; NaN for anything else."""
    try:
        number = math.nan if isinstance(given, (bool, str, bytes)) else float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several entries
        return math.nan
    return number if math.isfinite(number) else math.nan


def check_choice(name: str, given: Any, allowed: Sequence[str | None]) -> None:
    """Refuse a value that is not one of the allowed ones.

    Raises:
        FlexError: it is another.
    """
    if not (given is None or isinstance(given, str)) or given not in allowed:
        known = ", ".join(map(str, allowed))
        raise FlexError(f"{name}={format_value(given)} is not one of {known}")
