"""Checks of the arguments of `attach` and `register_*`: mistakes that are made often, and their remedies.

Each check is a pure function of the arguments, which are the same on every rank, so it raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import nn

from megatron_flex.conversion.huggingface_names import translate_module
from megatron_flex.dump import Dump
from megatron_flex.errors import HookError, SiteError, suggest_nearest
from megatron_flex.gpt_names import NAMESPACE
from megatron_flex.handles import Handle
from megatron_flex.lens import LensNames
from megatron_flex.lens.lens_names import LENS_PREFIXES
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.hooks import HookType, name_function
from megatron_flex.runtime.session_sinks import SinkSettings
from megatron_flex.sites import Pattern
from megatron_flex.statistics import Statistics

EXAMPLE_NAME = "decoder.layers.3"


def check_hook(hook: object, method: str) -> HookFunction:
    """The hook, if it is one.

    Args:
        hook: what was given.
        method: that it was given to.

    Raises:
        HookError: it is not a HookFunction.
    """
    if isinstance(hook, HookFunction):
        return hook
    raise HookError(f"{method} takes a HookFunction, {_suggest_hook(hook)}")


REGISTER_METHODS: dict[HookType, str] = {
    "forward": "register_forward_hook",
    "forward_pre": "register_forward_pre_hook",
    "full_backward": "register_full_backward_hook",
    "full_backward_pre": "register_full_backward_pre_hook",
    "tensor": "register_hook",
}


def register_hook(session: Session, hook: HookFunction, kind: HookType) -> Handle:
    """Check a hook, and register it with a hook type.

    Raises:
        HookError: it is not a HookFunction, or cannot be registered.
    """
    check_hook(hook, REGISTER_METHODS[kind])
    with explain_other_names(session, lambda: [hook.module_name]):
        return session.hooks.register(hook, kind)


def _suggest_hook(given: object) -> str:
    """What was given instead of a hook, and what to write."""
    if isinstance(given, str):
        return f"not the name {given!r}; give HookFunction({given!r})"
    if isinstance(given, type):
        return f"not the class {given.__name__}; give HookFunction({EXAMPLE_NAME!r})"
    if isinstance(given, (Dump, Statistics)):
        kind = "dump" if isinstance(given, Dump) else "statistics"
        keyword = "dumps" if isinstance(given, Dump) else "statistics"
        return f"not {given!r}; give it to register_{kind}, or as attach(..., {keyword}=...)"
    if isinstance(given, nn.Module):
        return f"not a {type(given).__name__}; the model is given first, then hooks: attach(model, hooks)"
    if callable(given):
        name = name_function(given)
        return (
            f"not the function {name}; give HookFunction({EXAMPLE_NAME!r}, {name}), whose "
            "function takes (current_module, inputs, save_ctx, modules)"
        )
    if isinstance(given, (list, tuple)):
        return f"not a {type(given).__name__}; register hooks one by one, or give attach() the list"
    return f"not {given!r}; give HookFunction({EXAMPLE_NAME!r})"


def check_attach_arguments(model: object, hooks: object, dumps: object, statistics: object) -> None:
    """Check the kinds of the arguments of `attach`.

    Raises:
        HookError: hooks are given as names or functions, one hook without its list, model and hooks swapped,
            or a folder's name instead of a dump or statistics.
    """
    first = next(iter(model), None) if isinstance(model, (list, tuple)) else model
    if isinstance(first, HookFunction):
        raise HookError("the model is given first, then its hooks: attach(model, hooks)")
    if isinstance(hooks, HookFunction):
        raise HookError(f"hooks is one hook and no list; give attach(model, [hook]) ({hooks!r})")
    if isinstance(hooks, str) or not isinstance(hooks, Sequence):
        raise HookError(f"hooks is a list of HookFunctions, {_suggest_hook(hooks)} in a list")
    for hook in hooks:
        check_hook(hook, "each of the hooks of attach()")
    for keyword, kind, given in (("dumps", Dump, dumps), ("statistics", Statistics, statistics)):
        several = [given] if isinstance(given, (str, kind)) or not isinstance(given, Sequence) else given
        for sink in several:
            check_sink(sink, kind, f"attach({keyword}=...)")


def check_sink(given: object, kind: type[SinkSettings], method: str) -> None:
    """Check that the settings of a sink are given, and not their folder's name.

    Raises:
        HookError: it is something else.
    """
    if not isinstance(given, kind):
        name = kind.__name__
        if kind is NonFinite:
            raise HookError(f"{method} takes 'stop', 'warn' or a NonFinite, not {given!r}; give 'stop'")
        raise HookError(f"{method} takes a {name}, not {given!r}; give {name}('FOLDER', [{EXAMPLE_NAME!r}])")


@contextmanager
def explain_other_names(session: Session, patterns: Callable[[], Sequence[Pattern]]) -> Iterator[None]:
    """Say what a name of TransformerLens or Hugging Face is here, where only names of sites are accepted.

    Args:
        session: the session of the model.
        patterns: returns the names that were given.

    Raises:
        SiteError: as in the scope, with the remedy where a pattern is such a name.
    """
    try:
        yield
    except SiteError:
        names = LensNames(session.sites, session.adapter.architecture(), list(session.parameters.index.sites))
        for pattern in (p for p in patterns() if isinstance(p, str)):
            alias = names.aliases.get(names.resolve(pattern))
            if alias is not None:
                raise SiteError(
                    f"{pattern!r} is a name of TransformerLens, which flex.interp takes (run_with_cache, "
                    f"run_with_hooks); the site of this model is {alias.site!r}",
                    site=pattern,
                ) from None
            if names.aliases and pattern.removeprefix(NAMESPACE).startswith(LENS_PREFIXES):
                raise SiteError(
                    f"{pattern!r} is a name as TransformerLens has them, for flex.interp, and no site"
                    f"{suggest_nearest(pattern, names.aliases)}",
                    site=pattern,
                ) from None
            if name_in_model := _find_huggingface_module(session, pattern):
                raise SiteError(
                    f"{pattern!r} is a name of a Hugging Face model; in this model it is {name_in_model!r}",
                    site=pattern,
                ) from None
        raise


def _find_huggingface_module(session: Session, pattern: str) -> str:
    """The name here of what a Hugging Face model calls `pattern`; empty if this model has nothing of it."""
    module, colon, point = pattern.partition(":")
    for name in translate_module(module):
        for translated in (f"{name}{colon}{point}", f"{NAMESPACE}{name}{colon}{point}"):
            with suppress(SiteError):
                session.sites.match(translated)
                return translated
    return ""
