"""The handling of a failed edit: all ranks raise at the end of the step, or all of them skip the edit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import (
    FailedElsewhere,
    any_over_ranks,
    gather_objects,
    gather_reports,
    global_rank,
    max_over_ranks,
)
from megatron_flex.errors import MAX_MESSAGE, AbsentError, FlexWarning, HookError, shorten_message
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.trainable_modules import TrainableModules

MAX_ERRORS = 4  # errors to list; the others are counted


@dataclass(frozen=True, slots=True)
class StepFailure:
    """An error of this rank in a step, which all ranks raise at its end.

    Attributes:
        message: the message of the error that all ranks raise.
        error: the exception.
        site: the hook point at which it was raised, if at one.
        hook: the hook whose function raised it, if one did.
    """

    message: str
    error: BaseException
    site: str | None = None
    hook: HookFunction | None = None


def raise_on_all_ranks(
    failure: StepFailure | None, mesh: Mesh, hooks: Sequence[HookFunction] = ()
) -> NoReturn:
    """Raise the errors of all ranks. Collective over the mesh, once some rank is known to have an error.

    Args:
        failure: this rank's error; None without an error.
        mesh: the axes.
        hooks: the hooks that are active, in the same order on all ranks.

    Raises:
        HookError: on every rank; the message names the ranks of each error, the attributes the hook point
            and hook of the first one.
    """
    local_report = None
    if failure is not None:
        number = hooks.index(failure.hook) if failure.hook in hooks else None
        local_report = failure.message, failure.site, number
    reports = gather_objects((global_rank(), local_report), mesh, [a.name for a in mesh])
    failed = [(rank, report) for rank, report in reports if report is not None]
    ranks_by_message = group_ranks((rank, message) for rank, (message, _, _) in failed)
    kind: type[HookError] = (
        type(failure.error) if failure and isinstance(failure.error, AbsentError) else HookError
    )
    _, (_, site, number) = failed[0]
    raise kind(
        _join_messages(ranks_by_message),
        site=site,
        hook=None if number is None else hooks[number],
        ranks=sorted(rank for rank, _ in failed),
    ) from (failure.error if failure else None)


def _join_messages(ranks_by_message: dict[str, list[int]]) -> str:
    """The messages of several ranks in one, in which each keeps its remedy and its ranks."""
    shown = [(text, format_on_ranks(ranks)) for text, ranks in ranks_by_message.items()][:MAX_ERRORS]
    left_out = len(ranks_by_message) - len(shown)
    more = f"; and {left_out} more" if left_out else ""
    room = MAX_MESSAGE - len(more) - sum(len(suffix) + len("; ") for _, suffix in shown)
    if sum(len(text) for text, _ in shown) > room:
        shown = [(shorten_message(text, room // len(shown)), suffix) for text, suffix in shown]
    return "; ".join(text + suffix for text, suffix in shown) + more


def group_ranks(reports: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for rank, message in reports:
        out.setdefault(message, []).append(rank)
    return out


def format_on_ranks(ranks: Sequence[int]) -> str:
    """Format as ` (on rank 3)` or ` (on ranks 0-3, 8)`; empty in a job of one rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    return f" (on {format_ranks(ranks)})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format as `rank 3` or `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    reports = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {reports}"


FAILED_ELSEWHERE = "failed on another rank that holds the tensor"


@dataclass(slots=True)
class SkipCount:
    """The skipped passes of a hook with `on_error="skip"` on this rank.

    Attributes:
        count: the number of skipped passes; each microbatch and call at each site is one.
        first: the message of the first error: the site, iteration, microbatch, exception and source line.
    """

    count: int
    first: str


class SkipEdit(Exception):
    """Skips one pass; `error` is the exception of this rank's function, None if it failed only elsewhere."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """A hook's first failure on this rank: its registration index, the message, the user's source line."""

    number: int
    text: str
    place: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One pass of an edit that is left out where it fails.

    Attributes:
        hook: the hook.
        index: of the hook among those at the site.
        key: the key of the pass.
        failed: whether it failed on a rank that holds the tensor, on the device of the tensor.
        error: the exception of this rank's function, if it raised.
        leads: whether this rank counts for all ranks that hold the tensor.
    """

    hook: HookFunction
    index: int
    key: Key
    failed: Tensor
    error: Exception | None
    leads: bool


class EditSkips:
    """Counts skipped edits, and remembers them for recomputation.

    What failed on another rank alone is known on the device first: the host reads it at the end of a step in
    which an edit failed.

    Args:
        mesh: the axes of the run.
        trainable: the trainable modules, whose gradients and buffers a skipped pass must not change.
        describe: returns the message of a failure.

    Attributes:
        skipped: by hook, the counts of hooks skipped at least once where this rank runs them.
    """

    def __init__(
        self,
        mesh: Mesh,
        trainable: TrainableModules,
        describe: Callable[[HookFunction, Key, Exception | None], str],
    ) -> None:
        self._mesh, self._trainable, self._describe = mesh, trainable, describe
        self.skipped: dict[HookFunction, SkipCount] = {}
        self._expected: list[HookFunction] = []
        self._counted: Counter[HookFunction] = Counter()  # on one of the ranks that hold a tensor
        self._left: set[tuple[Key, int]] = set()  # of this step's forward passes
        self._step = -1
        self._warned: set[int] = set()
        self._new: list[FirstFailure] = []
        self._attempts: dict[tuple[Key, int], Attempt] = {}  # of this step

    def expect(self, hook: HookFunction) -> None:
        """Note a hook that is registered. Every rank makes the same call."""
        if hook.on_error == "skip" and hook not in self._expected:
            self._expected.append(hook)

    def was_skipped(self, key: Key, index: int) -> bool:
        """Whether the edit was skipped in the first pass of the region that is recomputed now."""
        return (key, index) in self._left

    def note(
        self,
        hook: HookFunction,
        index: int,
        key: Key,
        error: Exception | None,
        like: Tensor,
        holders: Mesh,
        leads: bool,
    ) -> Tensor:
        """Note an attempt, and return whether it failed on any rank that holds the tensor, on its device.

        Collective over `holders`. The host waits for nothing.
        """
        if key.step != self._step:
            self._begin(key.step)
        failed = any_over_ranks(error is not None, holders, like.device)
        self._attempts[key, index] = Attempt(hook, index, key, failed, error, leads)
        return failed

    def find_attempt(self, key: Key, index: int) -> Attempt | None:
        """The attempt in the first pass of the region that is recomputed now."""
        return self._attempts.get((key, index))

    def _begin(self, step: int) -> None:
        self._left.clear()
        self._attempts.clear()
        self._step = step

    def attempt(self, holders: Mesh, edit: Callable[[], Tensor]) -> Tensor:
        """Run an edit; if it fails, undo its changes of trainable modules.

        Collective over `holders`, the ranks that hold the tensor and run the edit: one flag.

        Raises:
            SkipEdit: on all ranks, if the edit failed on one of them.
        """
        error: Exception | None = None
        edited: Tensor | None = None
        with self._trainable.all_or_nothing():
            try:
                edited = edit()
            except FailedElsewhere:  # the exchange says so
                edited = None
            except Exception as raised:  # counted by the caller
                error = raised
            if max_over_ranks([int(error is not None)], holders)[0]:
                raise SkipEdit(error)
        assert edited is not None
        return edited

    def count(self, hook: HookFunction, index: int, key: Key, text: str, skip: SkipEdit, leads: bool) -> None:
        """Count a skipped pass; `leads`: whether this rank counts for all ranks that hold the tensor."""
        if key.step != self._step:
            self._begin(key.step)
        self._left.add((key, index))
        self._counted[hook] += leads
        known = self.skipped.setdefault(hook, SkipCount(0, text))
        known.count += 1
        if skip.error is not None:
            self.expect(hook)
            number = self._expected.index(hook)
            if number not in self._warned and all(n.number != number for n in self._new):
                self._new.append(FirstFailure(number, text, find_user_line(skip.error)))

    def has_news(self) -> bool:
        """Whether this rank has edits to count or to warn of at the end of the step."""
        return bool(self._new) or any(a.error is not None for a in self._attempts.values())

    def settle(self, news: bool, mesh: Mesh) -> None:
        """Count skipped edits at the end of a step; the first rank warns of new ones.

        Collective over the mesh if any rank has news.
        """
        attempts, self._attempts = self._attempts, {}
        if news:
            self._count_failed(list(attempts.values()))
            self._warn_of_skipped(mesh)

    def _count_failed(self, attempts: Sequence[Attempt]) -> None:
        if not attempts:
            return
        device = attempts[0].failed.device
        flags = torch.stack(
            [attempt.failed.to(device) for attempt in attempts]
        ).tolist()  # the host waits once
        for attempt, failed in zip(attempts, flags, strict=True):
            if failed:
                text = self._describe(attempt.hook, attempt.key, attempt.error)
                self.count(
                    attempt.hook, attempt.index, attempt.key, text, SkipEdit(attempt.error), attempt.leads
                )

    def _warn_of_skipped(self, mesh: Mesh) -> None:
        new, self._new = self._new, []
        skipped = [(rank, n) for rank, items in gather_reports(new or None, mesh) for n in items]
        for number in dict.fromkeys(n.number for _, n in skipped):
            reports = [(rank, n) for rank, n in skipped if n.number == number]
            text, ranks = next(iter(group_ranks((r, n.text) for r, n in reports).items()))
            if number not in self._warned and mesh.is_first(a.name for a in mesh):
                file, line = reports[0][1].place or (__file__, 0)
                warnings.warn_explicit(
                    f"{text}{format_on_ranks(ranks)}; on_error='skip': such passes are left unedited, and "
                    "counted "
                    "in flex.skipped",
                    FlexWarning,
                    file,
                    line,
                )
            self._warned.add(number)

    def warn_of_skips(self) -> None:
        """Warn on the first rank how often each hook was skipped.

        Collective over the mesh, if hooks with `on_error="skip"` were registered.
        """
        if not self._expected:
            return
        local_counts = [
            (self._counted[h], self.skipped[h].first if h in self.skipped else "") for h in self._expected
        ]
        reports = [
            report
            for _, report in gather_reports(
                local_counts if any(n for n, _ in local_counts) else None, self._mesh
            )
        ]
        if reports and self._mesh.is_first(a.name for a in self._mesh):
            for hook, row in zip(self._expected, zip(*reports, strict=True), strict=True):
                _warn_of_count(hook, row)


def _warn_of_count(hook: HookFunction, row: Iterable[tuple[int, str]]) -> None:
    row = list(row)
    count = sum(n for n, _ in row)
    if count:
        reports = sorted((text for _, text in row if text), key=lambda text: text.endswith(FAILED_ELSEWHERE))
        passes = "pass" if count == 1 else "passes"
        warnings.warn(
            f"hook ({hook.describe()}) failed in {count} {passes}, left unedited; {reports[0]}",
            FlexWarning,
            stacklevel=5,
        )
