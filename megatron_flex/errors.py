"""The errors of the package. Each message is one line: the value, the rule, the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class FlexError(ValueError):
    """An error that the caller can fix; the message says how.

    Examples:
        >>> try:
        ...     Dump("dumps/new")
        ... except FlexError as error:  # also any class below
        ...     print(error)
        a Dump of nothing: name sites, such as 'decoder.layers.*', or parameters
    """


class LayoutError(FlexError):
    """A tensor does not fit its layout.

    Examples:
        >>> from megatron_flex.layout import Cut, assemble
        >>> layout = Layout((Dim("s"), Dim("h", (Cut("tp"),))))
        >>> try:
        ...     assemble(layout, [torch.zeros(4, 8), torch.zeros(5, 8)], {"tp": 2})
        ... except LayoutError as error:
        ...     print(error)
        shards have [4, 5] entries in dim 's'; they must fit one length
    """


class SiteError(FlexError):
    """A name that matches no site, or a site that this configuration hides.

    Examples:
        >>> try:
        ...     flex.sites("decoder.layers.7.mlp")
        ... except SiteError as error:
        ...     print(error)
        pattern 'decoder.layers.7.mlp' matches no site...there are 0-3
    """


class HookError(FlexError):
    """A hook failed, never fired, or differs between ranks.

    Examples:
        >>> hook = HookFunction("decoder.layers.3", expected_shape=(16, 2, 64))
        >>> try:
        ...     with attach(chunks, [hook]):
        ...         train_step(chunks)
        ... except HookError as error:
        ...     print(str(error).partition(": ")[2])
        the tensor has shape (16, 2, 32), not the expected (16, 2, 64); drop expected_shape
    """


class BrokenError(FlexError):
    """A collective of a hook failed on this rank; it is raised at once, because other ranks wait in it."""


class AbsentError(HookError, IndexError):
    """A hook names a tensor by an index that the output does not have."""


class VerifyError(FlexError):
    """Ranks hold values that contradict the layouts: the replicas have diverged, or a layout is wrong.

    Examples:
        >>> try:
        ...     with attach(chunks, verify=True):
        ...         train_step(chunks)
        ... except VerifyError as error:  # names tensors, ranks and layouts
        ...     print(error)
    """


class DumpError(FlexError):
    """A dump that cannot be written, is damaged, or does not contain the requested entry.

    Examples:
        >>> try:
        ...     open_dump("dumps/nothing")
        ... except DumpError as error:
        ...     print(error)
        dumps/nothing: cannot be read: No such file or directory
    """


class FlexWarning(UserWarning):
    """Valid code that may not do what its author expects; reported at the author's line.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", FlexWarning)  # raise instead, in a test of your own
        ...     flex = FlexModel(chunks)
    """


MAX_NAMED_RANKS = 8  # ranks that an error names; others are only counted


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `"rank 3"` or `"ranks 0, 1"`; of many, the first ones and the number of the others."""
    named = ", ".join(str(r) for r in ranks[:MAX_NAMED_RANKS])
    more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {named}{more}"


def suggest_nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Return `"; nearest: a, b"` for the names closest to `name`, or an empty string.

    For a name with the number of a layer that is not among the names, return the numbers that are:
    `"; of decoder.layers there are 0-3"`.
    """
    known = list(names)
    if numbers := _describe_missing_number(name, known):
        return numbers
    found = get_close_matches(name, known, n=count, cutoff=0.4)
    return f"; nearest: {', '.join(found)}" if found else ""


def _describe_missing_number(name: str, names: list[str]) -> str:
    """The numbers that names have where `name` has another one."""
    for part in re.finditer(r"\.(\d+)(?=[.:]|$)", name):
        prefix = name[: part.start()]
        same = re.compile(re.escape(prefix) + r"\.(\d+)(?=[.:]|$)")
        numbers = sorted({int(found[1]) for other in names if (found := same.match(other))})
        if numbers and int(part[1]) not in numbers:
            first, last = numbers[0], numbers[-1]
            every = last - first == len(numbers) - 1
            text = f"{first}-{last}" if every and len(numbers) > 1 else ", ".join(map(str, numbers[:8]))
            verb = "are" if len(numbers) > 1 else "is only"
            return f"; of {prefix} there {verb} {text}"
    return ""


def describe_error(error: BaseException) -> str:
    """An error's type and text in one line; the type alone if its text is not available.

    A user-defined error may raise in `__str__`; that must not stop a rank.
    """
    kind = "" if isinstance(error, FlexError) else type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception:  # `__str__` of a user-defined class may raise; the original error is still raised
        text = ""
    return f"{kind}: {text}" if kind and text else kind or text
