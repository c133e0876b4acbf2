"""The errors of the package. Each message is one line: the value, the rule, the fix."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_flex.runtime.hooks import HookFunction

MAX_MESSAGE = 500  # characters of an error's text
MAX_VALUE = 80  # characters of a value in it
OMITTED = " [...] "  # in place of what is left out


class FlexError(ValueError):
    """An error that the caller can fix; the message says how, in at most 500 characters.

    Args:
        args: the message.
        site: see the attribute.
        hook: see the attribute.
        ranks: see the attribute.

    Attributes:
        site: the name of the hook point that the error concerns, or the pattern that was given; None if the
            error concerns no hook point.
        hook: the hook that the error concerns, as this rank registered it. A pickled error has None here,
            because an editing function need not be picklable.
        ranks: the global ranks that had the error; the same on every rank that raises it.

    Examples:
        >>> try:
        ...     Dump("dumps/new")
        ... except FlexError as error:  # also any class below
        ...     print(error)
        a Dump needs sites, such as 'decoder.layers.*', or parameters
    """

    def __init__(
        self,
        *args: object,
        site: str | None = None,
        hook: HookFunction | None = None,
        ranks: Iterable[int] = (),
    ) -> None:
        super().__init__(
            *(shorten_message(argument) if isinstance(argument, str) else argument for argument in args)
        )
        self.site, self.hook, self.ranks = site, hook, tuple(ranks)

    @property
    def rank(self) -> int | None:
        """The first of the ranks that had the error; None if no rank is named."""
        return self.ranks[0] if self.ranks else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**self.__dict__, "hook": None}


class LayoutError(FlexError):
    """A tensor does not fit its layout.

    Attributes:
        dim: the name of the dim that does not fit, its index if it has no name, or None.

    Examples:
        >>> from megatron_flex.layout import Cut, assemble
        >>> layout = Layout((Dim("s"), Dim("h", (Cut("tp"),))))
        >>> try:
        ...     assemble(layout, [torch.zeros(4, 8), torch.zeros(5, 8)], {"tp": 2})
        ... except LayoutError as error:
        ...     print(error)
        ...     print(error.dim)
        shards have [4, 5] entries in dim 's'; they must fit one length
        s
    """

    def __init__(self, *args: object, dim: str | int | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.dim = dim


class SiteError(FlexError):
    """A name that matches no site, or a site that this configuration hides.

    Examples:
        >>> try:
        ...     flex.sites("decoder.layers.7.mlp")
        ... except SiteError as error:
        ...     print(error)
        ...     print(error.site)
        pattern 'decoder.layers.7.mlp' matches no site...there are 0-3
        decoder.layers.7.mlp
    """


class HookError(FlexError):
    """A hook failed, never fired, or differs between ranks.

    All ranks raise the error of a step, with the hook point, the hook and the ranks on which it failed.

    Examples:
        >>> hook = HookFunction("decoder.layers.3", expected_shape=(16, 2, 64))
        >>> try:
        ...     with attach(chunks, [hook]):
        ...         train_step(chunks)
        ... except HookError as error:
        ...     print(str(error).partition(": ")[2])
        ...     print(error.site, error.hook is hook, error.rank)
        the tensor has shape (16, 2, 32), not the expected (16, 2, 64); drop expected_shape
        decoder.layers.3:output True 0
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


class NonFiniteError(FlexError):
    """A value of a step is NaN or infinite; all ranks raise it at the end of the step.

    `site` is the first hook point, in the order of execution, whose tensor is not finite while those before
    it are (with `.grad` for a gradient; for the gradient of a parameter, the parameter's name with `.grad`).
    `ranks` are the global ranks whose shard of it is not finite.

    Attributes:
        iteration: the iteration of the step.
        microbatch: the microbatch; None for the gradient of a parameter.
        indices: some of the entries that are not finite, as indices of the full tensor; empty if they are not
            known.
        inputs: the minimum and the maximum of the tensors that came before, by their names.
        parameters: the parameters of the model that are not finite themselves.

    Examples:
        >>> try:
        ...     with attach(chunks, nonfinite="stop"):
        ...         train_step(chunks)
        ... except NonFiniteError as error:
        ...     print(error.site, error.ranks, error.indices)
    """

    def __init__(
        self,
        *args: object,
        iteration: int = -1,
        microbatch: int | None = None,
        indices: Sequence[tuple[int, ...]] = (),
        inputs: Mapping[str, tuple[float, float]] | None = None,
        parameters: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.iteration, self.microbatch = iteration, microbatch
        self.indices, self.inputs, self.parameters = tuple(indices), dict(inputs or {}), tuple(parameters)


class DumpError(FlexError):
    """A dump that cannot be written, is damaged, or does not contain the requested entry.

    Attributes:
        path: the folder of the dump, or the file in it that is damaged; None if the error concerns no file.

    Examples:
        >>> try:
        ...     open_dump("dumps/nothing")
        ... except DumpError as error:
        ...     print(error)
        ...     print(error.path)
        dumps/nothing: cannot be read: No such file or directory
        dumps/nothing
    """

    def __init__(self, *args: object, path: str | PathLike[str] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.path = None if path is None else fspath(path)


class FlexWarning(UserWarning):
    """Valid code that may not do what its author expects; reported at the author's line.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", FlexWarning)  # raise instead, in a test of your own
        ...     flex = FlexModel(chunks)
    """


@contextmanager
def error_attributes(**attributes: Any) -> Iterator[None]:
    """Give a FlexError that is raised within these attributes, except those that it has already.

    Attributes that the class of the error does not have, such as `path` on a HookError, are left out.
    """
    try:
        yield
    except FlexError as error:
        for name, value in attributes.items():
            if getattr(error, name, value) in (None, ()):
                setattr(error, name, fspath(value) if isinstance(value, PathLike) else value)
        raise


def shorten_message(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return at most 500 characters: of a longer text the beginning, and the end, which has the remedy."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return text[: limit - end - len(OMITTED)] + OMITTED + text[-end:]


class _ShortRepr(reprlib.Repr):
    """Values in messages: of a long text, list or array the beginning and the end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_VALUE
        self.maxlong = self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = 6

    def repr_int(self, x: int, level: int) -> str:
        """An integer; Python refuses to write one of more than 4,300 digits."""
        return repr(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"


def format_value(value: object) -> str:
    """Return the `repr` of a value in one line of at most about 80 characters, whatever the value is."""
    try:
        text = " ".join(_ShortRepr().repr(value).split())
    except Exception:  # `__repr__` of a user's class may raise; that must not replace the error
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 10] + "..." + text[-7:]


MAX_NAMED_RANKS = 8  # ranks that an error names; others are only counted


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `"rank 3"` or `"ranks 0, 1"`; of many, the first ones and the number of the others."""
    return f"rank{'' if len(ranks) == 1 else 's'} {list_some(ranks, MAX_NAMED_RANKS)}"


def list_some(items: Sequence[object], most: int = 5, separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others: `a, b and 3 more`, `a; b; and 3 more`."""
    before = " " if separator == ", " else separator
    more = f"{before}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def suggest_nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Return `"; nearest: a, b"` for the names closest to `name`, or an empty string.

    For a name with the number of a layer that is not among the names, return the numbers that are:
    `"; of decoder.layers there are 0-3"`.
    """
    known = list(names)
    if numbers := _describe_missing_number(name, known):
        return numbers
    nearest = get_close_matches(name, known, n=count, cutoff=0.4)
    return f"; nearest: {', '.join(nearest)}" if nearest else ""


def _describe_missing_number(name: str, names: list[str]) -> str:
    """The numbers that names have where `name` has another one."""
    for part in re.finditer(r"\.(\d+)(?=[.:]|$)", name):
        prefix = name[: part.start()]
        same = re.compile(re.escape(prefix) + r"\.(\d+)(?=[.:]|$)")
        numbers = sorted({int(matched[1]) for other in names if (matched := same.match(other))})
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
