"""Compares editing functions between ranks: different code is an error, different values are a warning.

Ranks compare functions together with hooks, in the same exchange, and never while a model runs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_flex.collectives import Agreement
from megatron_flex.errors import FlexWarning
from megatron_flex.runtime.edit_failures import format_on_ranks
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import unwrap_function
from megatron_flex.runtime.function_digest import FunctionDigest, digest_function, shorten
from megatron_flex.runtime.hooks import HookFunction

MAX_SENT = 1 << 16  # bounds the characters that a rank sends
MAX_WARNINGS = 8  # bounds the warnings of one comparison
MAX_HOOKS = 4  # bounds the hooks named in an error


class Mismatch(NamedTuple):
    """A property of a hook's function that differs between ranks.

    Attributes:
        hook: the hook's index.
        name: the name of the property.
        ranks: the ranks, by their text.
    """

    hook: int
    name: str
    ranks: dict[str, list[int]]

    def in_words(self) -> str:
        """Format as `2.0 (on rank 0) and 3.0 (on rank 1)`."""
        return " and ".join(f"{text}{format_on_ranks(ranks)}" for text, ranks in self.ranks.items())


class FunctionAgreement:
    """Compares the hooks of a session between ranks, together with their editing functions.

    A function is examined once, before its first call; later changes are not compared.

    Args:
        agreement: the exchange between ranks.
        model_ids: returns the modules and parameters of the model, by id.
    """

    def __init__(self, agreement: Agreement, model_ids: Callable[[], AbstractSet[int]]) -> None:
        self._agreement, self._model_ids = agreement, model_ids
        self._known: WeakKeyDictionary[HookFunction, FunctionDigest] = WeakKeyDictionary()
        self._warned: set[tuple[str, str]] = set()

    def compare(self, what: str, hooks: Iterable[HookFunction], where: str = "") -> None:
        """Compare hooks on all ranks; `what` describes all hooks, `where` the rank's current step.

        Raises:
            HookError: on all ranks, if hooks or the code of their functions differ, or a rank did not arrive.

        Warns:
            FlexWarning: values that a function reads differ; on the first rank.
        """
        if not self._agreement.has_peers:
            return
        edits = [h for h in hooks if h.editing_function is not None]
        digests = self._digest(edits)
        code, values = (pack_texts([d[i] for d in digests]) if edits else "" for i in (0, 1))

        def explain(reports: dict[int, str]) -> str:
            return _explain(edits, list(find_mismatches(reports)))

        differing = self._agreement.compare_details(what, code, values, explain, where)
        new = [(edits[m.hook].describe(), m) for m in find_mismatches(differing)]
        new = [(name, m) for name, m in new if (name, m.name) not in self._warned]
        self._warned |= {(name, m.name) for name, m in new}
        for _, mismatch in new[:MAX_WARNINGS]:
            self._warn(edits[mismatch.hook], mismatch, len(new))

    def _digest(self, hooks: Sequence[HookFunction]) -> list[FunctionDigest]:
        new = [h for h in hooks if h not in self._known]
        model_ids = self._model_ids() if new else frozenset()
        shared: dict[tuple[int, ...], FunctionDigest] = {}
        for hook in new:
            edit = hook.editing_function
            assert edit is not None
            inside = traits_of(edit).user_functions
            key = (id(edit),) if inside is None else tuple(map(id, inside))
            if key not in shared:
                shared[key] = digest_function(edit, model_ids)
            self._known[hook] = shared[key]
        return [self._known[h] for h in hooks]

    def _warn(self, hook: HookFunction, mismatch: Mismatch, count: int) -> None:
        name = mismatch.name.partition("'")[2].rpartition("'")[0]
        allow = f", or declare @mf.rank_dependent({name!r}) if it is meant to differ" if name else ""
        more = f" (one of {count} such values)" if count > MAX_WARNINGS else ""
        text = (
            f"hook ({hook.describe()}): {mismatch.name} of its editing function is {mismatch.in_words()}"
            f"{more}; give it the same value on every rank{allow}"
        )
        inside = traits_of(hook.editing_function).user_functions
        function = unwrap_function(inside[0] if inside else hook.editing_function)
        code = function and function.__code__
        place = (code.co_filename, code.co_firstlineno) if code else (__file__, 0)
        # Shown on the first rank; on the others raised where warnings are errors.
        with warnings.catch_warnings(record=dist.get_rank() != self._agreement.ranks[0]):
            warnings.warn_explicit(text, FlexWarning, *place)


def pack_texts(functions: Sequence[Mapping[str, str]]) -> str:
    """Serialize the texts of a rank's functions, each function once, in at most `MAX_SENT` characters."""
    table: dict[str, int] = {}
    hooks = [table.setdefault(json.dumps(f), len(table)) for f in functions]
    packed = json.dumps({"hooks": hooks, "functions": [json.loads(f) for f in table]})
    if len(packed) > MAX_SENT:
        packed = json.dumps({"hooks": hooks, "functions": [{"a part of it": shorten(f, 0)} for f in table]})
    if len(packed) > MAX_SENT:
        packed = json.dumps({"hooks": [0], "functions": [{"a part of it": shorten(packed, 0)}]})
    return packed


def find_mismatches(reports: Mapping[int, str]) -> Iterator[Mismatch]:
    """Find what differs between ranks; of hooks with the same functions only the first is reported."""
    read = {rank: json.loads(text) for rank, text in reports.items() if text}
    reported = set()
    for hook in range(max((len(r["hooks"]) for r in read.values()), default=0)):
        index = {rank: r["hooks"][min(hook, len(r["hooks"]) - 1)] for rank, r in read.items()}
        if tuple(index.values()) in reported:
            continue
        reported.add(tuple(index.values()))
        functions = {rank: r["functions"][index[rank]] for rank, r in read.items()}
        for name in dict.fromkeys(n for f in functions.values() for n in f):
            ranks: dict[str, list[int]] = {}
            for rank, function in functions.items():
                ranks.setdefault(function.get(name, "not there"), []).append(rank)
            if len(ranks) > 1:
                yield Mismatch(hook, name, ranks)


def _explain(hooks: Sequence[HookFunction], mismatches: Sequence[Mismatch]) -> str:
    by_hook: dict[int, list[str]] = {}
    for m in mismatches:
        by_hook.setdefault(m.hook, []).append(f"the {m.name} of its editing function: {m.in_words()}")
    texts = [f"hook ({hooks[n].describe()}): {', '.join(differences)}" for n, differences in by_hook.items()]
    more = f"; and {len(texts) - MAX_HOOKS} more hooks" if len(texts) > MAX_HOOKS else ""
    return (
        f"editing functions have other code on some ranks: {'; '.join(texts[:MAX_HOOKS])}{more}; register "
        "the same function on every rank; what is meant to differ can be a variable that it reads, declared "
        "by @mf.rank_dependent"
    )
