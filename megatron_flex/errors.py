"""The errors of the package. Each message is one line: the value, the rule, the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FlexError(ValueError):
    """An error that the caller can fix; the message says how."""


class LayoutError(FlexError):
    """A tensor does not fit its layout."""


class SiteError(FlexError):
    """A name that matches no site, or a site that this configuration hides."""


class HookError(FlexError):
    """A hook failed, never fired, or differs between ranks."""


class BrokenError(FlexError):
    """A collective of a hook failed on this rank; it is raised at once, because other ranks wait in it."""


class AbsentError(HookError, IndexError):
    """A hook names a tensor by an index that the output does not have."""


class VerifyError(FlexError):
    """Ranks hold values that contradict the layouts: the replicas have diverged, or a layout is wrong."""


class DumpError(FlexError):
    """A dump that cannot be written, is damaged, or does not contain the requested entry."""


class FlexWarning(UserWarning):
    """Valid code that may not do what its author expects; reported at the author's line."""


def suggest_nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Return `": nearest are a, b"` for the names closest to `name`, or an empty string."""
    found = get_close_matches(name, list(names), n=count, cutoff=0.4)
    return f"; nearest: {', '.join(found)}" if found else ""


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
