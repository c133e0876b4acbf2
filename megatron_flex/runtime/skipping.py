"""Edits that may fail: a pass through one that does is left out, on all ranks that hold the tensor alike."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from megatron_flex.collectives import max_over_ranks, gather_objects
from megatron_flex.errors import FlexWarning
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.failing import global_rank, group_ranks, format_on_ranks
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.trainable_modules import TrainableModules

FAILED_ELSEWHERE = "failed on another rank that holds the tensor"


@dataclass(slots=True)
class SkipCount:
    """What became of a hook with `on_error="skip"`, as this rank knows it.

    Attributes:
        count: passes that its edit was left out of; each microbatch and call at each site is one.
        first: the first error, in words: the site, iteration, microbatch, what was raised and where.
    """

    count: int
    first: str


class SkipEdit(Exception):
    """A pass is left out; `error` is what this rank's function raised, None if only another's did."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """A hook's first failure here: its number in the order of registration, in words, the user's line."""

    number: int
    text: str
    place: tuple[str, int] | None


class EditSkips:
    """Counts what is left out, and remembers it for recomputation.

    Args:
        mesh: the axes of the run.
        trainable: whose gradients and buffers a pass that is left out must not change.

    Attributes:
        skipped: by hook, of those left out at least once where this rank runs them.
    """

    def __init__(self, mesh: Mesh, trainable: TrainableModules) -> None:
        self._mesh, self._trainable = mesh, trainable
        self.skipped: dict[HookFunction, SkipCount] = {}
        self._expected: list[HookFunction] = []
        self._counted: Counter[HookFunction] = Counter()  # on one of the ranks that hold a tensor
        self._left: set[tuple[Key, int]] = set()  # of this step's forward passes
        self._step = -1
        self._told: set[int] = set()
        self._new: list[FirstFailure] = []

    def expect(self, hook: HookFunction) -> None:
        """Note a hook that is registered, on every rank alike."""
        if hook.on_error == "skip" and hook not in self._expected:
            self._expected.append(hook)

    def was_skipped(self, key: Key, index: int) -> bool:
        """Whether the first pass of what is recomputed now was."""
        return (key, index) in self._left

    def attempt(self, holders: Mesh, edit: Callable[[], Tensor]) -> Tensor:
        """Run an edit; what it did to trainable modules is taken back where it fails.

        Collective over `holders`, which all hold the tensor and run it: one flag.

        Raises:
            LeftOut: it failed on one of them; on all.
        """
        error: Exception | None = None
        made: Tensor | None = None
        with self._trainable.all_or_nothing():
            try:
                made = edit()
            except Exception as raised:  # counted, by the caller
                error = raised
            if max_over_ranks([int(error is not None)], holders)[0]:
                raise SkipEdit(error)
        assert made is not None
        return made

    def count(self, hook: HookFunction, index: int, key: Key, text: str, left: SkipEdit, leads: bool) -> None:
        """Count a pass; `leads`: whether this rank does so for all that hold the tensor."""
        if key.step != self._step:
            self._left.clear()
            self._step = key.step
        self._left.add((key, index))
        self._counted[hook] += leads
        known = self.skipped.setdefault(hook, SkipCount(0, text))
        known.count += 1
        if left.error is not None:
            self.expect(hook)
            number = self._expected.index(hook)
            if number not in self._told and all(n.number != number for n in self._new):
                self._new.append(FirstFailure(number, text, find_user_line(left.error)))

    def settle(self, failed: bool, mesh: Mesh) -> bool:
        """At a step's end, whether some rank failed; the first one tells what is new of what was left out.

        Collective over the mesh.
        """
        wrong, news = max_over_ranks([int(failed), int(bool(self._new))], mesh)
        if news:
            self._tell(mesh)
        return bool(wrong)

    def _tell(self, mesh: Mesh) -> None:
        mine, self._new = [(global_rank(), n) for n in self._new], []
        found = [item for items in gather_objects(mine, mesh, [a.name for a in mesh]) for item in items]
        for number in dict.fromkeys(n.number for _, n in found):
            reports = [(rank, n) for rank, n in found if n.number == number]
            text, ranks = next(iter(group_ranks((r, n.text) for r, n in reports).items()))
            if number not in self._told and mesh.is_first(a.name for a in mesh):
                file, line = reports[0][1].place or (__file__, 0)
                warnings.warn_explicit(
                    f"{text}{format_on_ranks(ranks)}; on_error='skip': such passes are left unedited, and counted "
                    "in flex.skipped",
                    FlexWarning,
                    file,
                    line,
                )
            self._told.add(number)

    def warn_of_skips(self) -> None:
        """Tell on the first rank how often each hook was left out.

        Collective over the mesh, if hooks were registered that may be.
        """
        if not self._expected:
            return
        mine = [
            (self._counted[h], self.skipped[h].first if h in self.skipped else "") for h in self._expected
        ]
        if not max_over_ranks([int(any(n for n, _ in mine))], self._mesh)[0]:
            return
        reports = gather_objects(mine, self._mesh, [a.name for a in self._mesh])
        if self._mesh.is_first(a.name for a in self._mesh):
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
            stacklevel=4,
        )
