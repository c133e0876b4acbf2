"""The errors a person sees. One line each: the value, the rule, the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FlexError(ValueError):
    """Something the caller can mend; the message says how."""


class LayoutError(FlexError):
    """A tensor and the layout it is said to have do not fit."""


class SiteError(FlexError):
    """A name that stands for no site, or a site that this configuration hides."""


class HookError(FlexError):
    """A hook that failed, never fired, or differs between ranks."""


class AbsentError(HookError, IndexError):
    """A tensor that a hook means by its number, and that is not there."""


class VerifyError(FlexError):
    """What ranks hold contradicts what the layouts say: the model is out of step, or a layout is wrong."""


class DumpError(FlexError):
    """A dump that cannot be written there, or is damaged, or does not have what is asked for."""


class FlexWarning(UserWarning):
    """Something that works, and may not do what its author thinks; it is shown at the author's line."""


def suggest_nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Return `": nearest are a, b"` for the names closest to `name`, or an empty string."""
    found = get_close_matches(name, list(names), n=count, cutoff=0.4)
    return f"; nearest: {', '.join(found)}" if found else ""


def described(error: BaseException) -> str:
    """An error's kind and text in one line; its kind alone if the text cannot be had.

    The error may be of a person's own class, whose `__str__` raises: no rank may stop over that.
    """
    kind = "" if isinstance(error, FlexError) else type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a person's own class
        text = ""
    return f"{kind}: {text}" if kind and text else kind or text
