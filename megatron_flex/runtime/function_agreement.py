"""Compares editing functions between ranks: different code is an error, different values are a warning.

Ranks compare functions together with hooks, in the same exchange, and never while a model runs.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_flex.collectives import Agreement
from megatron_flex.errors import FlexWarning
from megatron_flex.runtime.edit_failures import format_on_ranks
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import unwrap_function
from megatron_flex.runtime.function_digest import FunctionDigest, Trait, digest_function, digest_text
from megatron_flex.runtime.hooks import HookFunction

LARGEST = 1 << 16  # bounds the characters that a rank sends
MAX_WARNINGS = 8  # bounds the warnings of one comparison
MAX_HOOKS = 4  # bounds the hooks named in an error


class TraitMismatch(NamedTuple):
    """A trait of a hook's function that differs between ranks.

    Attributes:
        hook: the hook's index.
        name: the name of the trait.
        held: the ranks, by their value of the trait.
    """

    hook: int
    name: str
    held: dict[str, list[int]]

    def in_words(self) -> str:
        """Format as `2.0 (on rank 0) and 3.0 (on rank 1)`."""
        return " and ".join(f"{what}{format_on_ranks(ranks)}" for what, ranks in self.held.items())


class FunctionAgreement:
    """Compares the hooks of a session between ranks, together with their editing functions.

    A function is examined once, before its first call; later changes are not compared.

    Args:
        agreement: the exchange between ranks.
        own: returns the modules and parameters of the model, by id.
    """

    def __init__(self, agreement: Agreement, own: Callable[[], AbstractSet[int]]) -> None:
        self._agreement, self._own = agreement, own
        self._known: WeakKeyDictionary[HookFunction, FunctionDigest] = WeakKeyDictionary()
        self._warned: set[tuple[str, str]] = set()

    def compare(self, what: str, hooks: Iterable[HookFunction], where: str = "") -> None:
        """Compare hooks on all ranks; `what` describes all hooks, `where` the rank's current step.

        Raises:
            HookError: on all ranks, if hooks or the code of their functions differ, or a rank did not arrive.

        Warns:
            FlexWarning: values that a function reads differ; on the first rank.
        """
        if not self._agreement.meets:
            return
        edits = [h for h in hooks if h.editing_function is not None]
        digests = self._digests(edits)
        code, values = (_text([d[i] for d in digests]) if edits else "" for i in (0, 1))

        def differ(reports: dict[int, str]) -> str:
            return _format_error(edits, list(_unlike(reports)))

        other = self._agreement.compare_details(what, code, values, differ, where)
        new = [u for u in _unlike(other) if (edits[u.hook].describe(), u.name) not in self._warned]
        self._warned |= {(edits[u.hook].describe(), u.name) for u in new}
        for number, found in enumerate(new[:MAX_WARNINGS]):
            more = (
                f" (and {len(new) - MAX_WARNINGS} more such values)"
                if number == MAX_WARNINGS - 1 < len(new) - 1
                else ""
            )
            self._warn(edits[found.hook], found, more)

    def _digests(self, hooks: Sequence[HookFunction]) -> list[FunctionDigest]:
        own: AbstractSet[int] | None = None
        made: dict[tuple[int, ...], FunctionDigest] = {}
        for hook in hooks:
            if hook in self._known:
                continue
            own = self._own() if own is None else own
            edit = hook.editing_function
            assert edit is not None
            inside = traits_of(edit).user_functions
            at = (id(edit),) if inside is None else tuple(map(id, inside))
            if at not in made:
                made[at] = digest_function(edit, own)
            self._known[hook] = made[at]
        return [self._known[h] for h in hooks]

    def _warn(self, hook: HookFunction, found: TraitMismatch, more: str) -> None:
        name = found.name.partition("'")[2].rpartition("'")[0]
        allow = f", or declare @mf.rank_dependent({name!r}) if it is meant to differ" if name else ""
        text = (
            f"hook ({hook.describe()}): {found.name} of its editing function is {found.in_words()}{more}; "
            f"give it the same value on every rank{allow}"
        )
        edit: Any = hook.editing_function
        inside = traits_of(edit).user_functions
        function = unwrap_function(inside[0] if inside else edit)
        code = None if function is None else function.__code__
        place = (__file__, 0) if code is None else (code.co_filename, code.co_firstlineno)
        if dist.get_rank() == self._agreement.ranks[0]:
            warnings.warn_explicit(text, FlexWarning, *place)
            return
        with warnings.catch_warnings(record=True):  # not shown; raised where warnings are errors
            warnings.warn_explicit(text, FlexWarning, *place)


def _text(functions: Sequence[Sequence[Trait]]) -> str:
    """Serialize the traits of a rank's functions, each function once."""
    table: dict[Sequence[Trait], int] = {}
    hooks = [table.setdefault(tuple(f), len(table)) for f in functions]
    text = json.dumps({"hooks": hooks, "functions": list(table)})
    if len(text) > LARGEST:
        text = json.dumps({"hooks": hooks, "functions": [[_shorten(repr(f))] for f in table]})
    if len(text) > LARGEST:
        text = json.dumps({"hooks": [0], "functions": [[_shorten(text)]]})
    return text


def _shorten(text: str) -> Trait:
    digest = digest_text(text)
    return Trait("a part of it", digest, f"#{digest[:6]}")


def _unlike(reports: dict[int, str]) -> Iterator[TraitMismatch]:
    """Find the traits that differ between ranks; of hooks with the same functions only the first is
    reported.
    """
    read = {rank: json.loads(text) for rank, text in reports.items() if text}
    seen = set()
    for hook in range(max((len(r["hooks"]) for r in read.values()), default=0)):
        at = {rank: r["hooks"][min(hook, len(r["hooks"]) - 1)] for rank, r in read.items()}
        if tuple(at.values()) in seen:
            continue
        seen.add(tuple(at.values()))
        traits = {rank: _number_traits(r["functions"][at[rank]]) for rank, r in read.items()}
        for key in dict.fromkeys(k for found in traits.values() for k in found):
            groups: dict[tuple[str, str], list[int]] = {}
            for rank, found in traits.items():
                groups.setdefault(found.get(key, ("", "not there")), []).append(rank)
            if len(groups) > 1:
                alike = len({shown for _, shown in groups}) < len(groups)
                held = {f"{s} #{d[:6]}" if alike else s: ranks for (d, s), ranks in groups.items()}
                yield TraitMismatch(hook, key[0], held)


def _number_traits(traits: Iterable[Sequence[str]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Index traits by their name and a count of that name, because several functions may share a name."""
    counts: Counter[str] = Counter()
    out = {}
    for name, digest, shown in traits:
        out[name, counts[name]] = digest, shown
        counts[name] += 1
    return out


def _format_error(hooks: Sequence[HookFunction], found: Sequence[TraitMismatch]) -> str:
    by_hook: dict[int, list[TraitMismatch]] = {}
    for unlike in found:
        by_hook.setdefault(unlike.hook, []).append(unlike)
    held = [
        f"hook ({hooks[n].describe()}): "
        + ", ".join(f"the {u.name} of its editing function: {u.in_words()}" for u in unlike)
        for n, unlike in by_hook.items()
    ]
    more = f"; and {len(held) - MAX_HOOKS} more hooks" if len(held) > MAX_HOOKS else ""
    return (
        f"editing functions have other code on some ranks: {'; '.join(held[:MAX_HOOKS])}{more}; register the "
        "same function on every rank; what is meant to differ can be a variable that it reads, declared by "
        "@mf.rank_dependent"
    )
