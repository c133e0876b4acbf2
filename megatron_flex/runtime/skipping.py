"""Edits that may fail: a pass through one that does is left out, on all ranks that hold the tensor alike."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from megatron_flex.collectives import any_rank, everyone
from megatron_flex.errors import FlexWarning
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debugging.blame import users_place
from megatron_flex.runtime.failing import global_rank, grouped, on_ranks
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.trainable import Trainable

ELSEWHERE = "failed on another rank that holds the tensor"


@dataclass(slots=True)
class Skipped:
    """What became of a hook with `on_error="skip"`, as this rank knows it.

    Attributes:
        count: passes that its edit was left out of; each microbatch and call at each site is one.
        first: the first error, in words: the site, iteration, microbatch, what was raised and where.
    """

    count: int
    first: str


class LeftOut(Exception):
    """A pass is left out; `error` is what this rank's function raised, None if only another's did."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class News:
    """A hook's first failure here: its number in the order of registration, in words, the user's line."""

    number: int
    text: str
    place: tuple[str, int] | None


class Skipping:
    """Counts what is left out, and remembers it for recomputation.

    Args:
        mesh: the axes of the run.
        trainable: whose gradients and buffers a pass that is left out must not change.

    Attributes:
        skipped: by hook, of those left out at least once where this rank runs them.
    """

    def __init__(self, mesh: Mesh, trainable: Trainable) -> None:
        self._mesh, self._trainable = mesh, trainable
        self.skipped: dict[HookFunction, Skipped] = {}
        self._expected: list[HookFunction] = []
        self._counted: Counter[HookFunction] = Counter()  # on one of the ranks that hold a tensor
        self._left: set[tuple[Key, int]] = set()  # of this step's forward passes
        self._step = -1
        self._told: set[int] = set()
        self._new: list[News] = []

    def expect(self, hook: HookFunction) -> None:
        """Note a hook that is registered, on every rank alike."""
        if hook.on_error == "skip" and hook not in self._expected:
            self._expected.append(hook)

    def was_left_out(self, key: Key, index: int) -> bool:
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
            if any_rank([int(error is not None)], holders)[0]:
                raise LeftOut(error)
        assert made is not None
        return made

    def count(self, hook: HookFunction, index: int, key: Key, text: str, left: LeftOut, leads: bool) -> None:
        """Count a pass; `leads`: whether this rank does so for all that hold the tensor."""
        if key.step != self._step:
            self._left.clear()
            self._step = key.step
        self._left.add((key, index))
        self._counted[hook] += leads
        known = self.skipped.setdefault(hook, Skipped(0, text))
        known.count += 1
        if left.error is not None:
            self.expect(hook)
            number = self._expected.index(hook)
            if number not in self._told and all(n.number != number for n in self._new):
                self._new.append(News(number, text, users_place(left.error)))

    def settle(self, failed: bool, mesh: Mesh) -> bool:
        """At a step's end, whether some rank failed; the first one tells what is new of what was left out.

        Collective over the mesh.
        """
        wrong, news = any_rank([int(failed), int(bool(self._new))], mesh)
        if news:
            self._tell(mesh)
        return bool(wrong)

    def _tell(self, mesh: Mesh) -> None:
        mine, self._new = [(global_rank(), n) for n in self._new], []
        found = [item for items in everyone(mine, mesh, [a.name for a in mesh]) for item in items]
        for number in dict.fromkeys(n.number for _, n in found):
            told = [(rank, n) for rank, n in found if n.number == number]
            text, ranks = next(iter(grouped((r, n.text) for r, n in told).items()))
            if number not in self._told and mesh.is_first(a.name for a in mesh):
                file, line = told[0][1].place or (__file__, 0)
                warnings.warn_explicit(
                    f"{text}{on_ranks(ranks)}; on_error='skip': such passes are left unedited, and counted "
                    "in flex.skipped",
                    FlexWarning,
                    file,
                    line,
                )
            self._told.add(number)

    def sum_up(self) -> None:
        """Tell on the first rank how often each hook was left out.

        Collective over the mesh, if hooks were registered that may be.
        """
        if not self._expected:
            return
        mine = [
            (self._counted[h], self.skipped[h].first if h in self.skipped else "") for h in self._expected
        ]
        if not any_rank([int(any(n for n, _ in mine))], self._mesh)[0]:
            return
        told = everyone(mine, self._mesh, [a.name for a in self._mesh])
        if self._mesh.is_first(a.name for a in self._mesh):
            for hook, row in zip(self._expected, zip(*told, strict=True), strict=True):
                _summary(hook, row)


def _summary(hook: HookFunction, row: Iterable[tuple[int, str]]) -> None:
    row = list(row)
    count = sum(n for n, _ in row)
    if count:
        told = sorted((text for _, text in row if text), key=lambda text: text.endswith(ELSEWHERE))
        passes = "pass" if count == 1 else "passes"
        warnings.warn(
            f"hook ({hook.describe()}) failed in {count} {passes}, left unedited; {told[0]}",
            FlexWarning,
            stacklevel=4,
        )
