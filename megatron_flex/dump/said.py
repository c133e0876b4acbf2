"""Positions and numbers as people write them on command lines and in files: `0,5`, `::8`, `random:64`."""

from __future__ import annotations

from typing import Any

from megatron_flex.dump.selection import RandomTokens
from megatron_flex.errors import FlexError


def parse_token_setting(text: str | None, flag: str = "--tokens", fractions: bool = True) -> Any:
    """Positions as they are written.

    Args:
        said: numbers, a slice, `random:` and how many, a fraction; None for all.
        flag: what they were said by.
        fractions: whether a fraction will do.

    Returns:
        None, a list, a slice, a Sampled or a float.

    Raises:
        FlexError: it is none of what can be said.
    """
    if text is None:
        return None
    try:
        if text.startswith("random:"):
            return RandomTokens(int(text.removeprefix("random:")))
        if ":" in text:
            return slice(*(int(n) if n else None for n in text.split(":")))
        if "." in text and fractions:
            return float(text)
        return [int(n) for n in text.split(",")]
    except (ValueError, TypeError):
        also = ", or a fraction 0.1" if fractions else ""
        raise FlexError(f"{flag} {text}: say 0,5 or a slice ::8, or random:64{also}") from None


def parse_number_ranges(text: str, flag: str = "iterations") -> list[int | slice]:
    """Numbers and ranges as they are written: `100`, `100,200`, `0:1000:100`, several with commas.

    Raises:
        FlexError: one is no number and no range.
    """
    out: list[int | slice] = []
    for item in text.split(","):
        try:
            if ":" in item:
                first, last, *step = (int(n) if n.strip() else None for n in item.split(":"))
                out.append(slice(first, last, *step))
            else:
                out.append(int(item))
        except (ValueError, TypeError):
            raise FlexError(
                f"{flag} {item!r}: no number and no range; say 100, or 100,200, or 0:1000:100"
            ) from None
    return out


def parse_number_setting(text: str | None, flag: str = "iterations") -> Any:
    """Numbers that are wanted of those that will come, from 0 on, as `Dump` takes them.

    Returns:
        None, a slice, or a sorted list.

    Raises:
        FlexError: it says no numbers, none, or negative ones, or a range without an end beside others.
    """
    if text is None:
        return None
    spans = parse_number_ranges(text, flag)
    out: set[int] = set()
    for span in spans:
        if isinstance(span, int):
            out.add(span)
            continue
        first, last, step = span.start or 0, span.stop, 1 if span.step is None else span.step
        if first < 0 or step < 1 or (last is not None and last <= first):
            raise FlexError(f"{flag} {text}: a range counts up from 0, such as 0:1000:100")
        if len(spans) == 1:
            return slice(first, last, step)
        if last is None:
            raise FlexError(f"{flag} {text}: beside others a range needs its end, such as 0:1000:100")
        out |= set(range(first, last, step))
    if min(out) < 0:
        raise FlexError(f"{flag} {text}: count from 0")
    return sorted(out)
