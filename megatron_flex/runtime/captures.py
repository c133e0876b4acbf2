"""The captures on the leader: for each site the full tensors by step, microbatch and call."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from torch import Tensor

from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.sites import GRADIENT_SUFFIX


class Key(NamedTuple):
    """Identifies a captured tensor.

    Attributes:
        site: the site's name, with the suffix `.grad` for a gradient.
        step: the number of runs of the schedule since attaching, from 0 (evaluation runs and repeated
            iterations count).
        iteration: the framework's own iteration number.
        microbatch: the microbatch within the step.
        call: the pass through the site within the microbatch.
    """

    site: str
    step: int
    iteration: int
    microbatch: int
    call: int

    @property
    def time(self) -> tuple[int, int, int]:
        """The order of the tensors of one site."""
        return self.step, self.microbatch, self.call


class Readings(Sequence[Tensor]):
    """The tensors of one site, in the order of step, microbatch and call; `keys` holds their keys."""

    def __init__(self) -> None:
        self._items: list[tuple[Key, Tensor]] = []

    @property
    def keys(self) -> list[Key]:
        """The key of each tensor."""
        return [k for k, _ in self._items]

    def at(
        self, *, step: int | None = None, iteration: int | None = None, microbatch: int | None = None
    ) -> list[Tensor]:
        """The tensors of that step, iteration or microbatch."""
        want = {"step": step, "iteration": iteration, "microbatch": microbatch}
        return [t for k, t in self._items if all(v is None or getattr(k, n) == v for n, v in want.items())]

    def add(self, key: Key, tensor: Tensor) -> None:
        """Insert a tensor in the order of its key."""
        insort(self._items, (key, tensor), key=lambda item: item[0].time)

    def take(self, wanted: Callable[[Key], bool]) -> list[tuple[Key, Tensor]]:
        """Remove and return the tensors whose key satisfies `wanted`."""
        removed = [item for item in self._items if wanted(item[0])]
        self._items = [item for item in self._items if not wanted(item[0])]
        return removed

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return [t for _, t in self._items[index]] if isinstance(index, slice) else self._items[index][1]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Readings({len(self)} of {tuple(self[0].shape) if self else '-'})"


class Captures(Mapping[str, Readings]):
    """Maps site names to readings; empty on every rank but the leader.

    A module's name refers to its only captured point, or to its output.
    """

    def __init__(self) -> None:
        self._readings: dict[str, Readings] = {}

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add a tensor."""
        self._readings.setdefault(key.site, Readings()).add(key, tensor)

    def take(self, wanted: Callable[[Key], bool]) -> list[tuple[Key, Tensor]]:
        """Remove and return the tensors whose key satisfies `wanted`, by site, in the order of capture."""
        out: list[tuple[Key, Tensor]] = []
        for name in list(self._readings):
            removed = self._readings[name].take(wanted)
            out += removed
            if removed and not len(self._readings[name]):
                del self._readings[name]
        return out

    def clear(self) -> None:
        """Remove all captures."""
        self._readings.clear()

    def __getitem__(self, name: str) -> Readings:
        if name in self._readings:
            return self._readings[name]
        points = [n for n in self._readings if n.partition(":")[0] == name]
        chosen = next((n for n in points if n.endswith((":output", f":output{GRADIENT_SUFFIX}"))), None)
        if len(points) == 1 or chosen:
            return self._readings[chosen or points[0]]
        if points:
            raise SiteError(f"{name!r} was read at several points ({', '.join(points)}); name one of them")
        raise KeyError(f"nothing was read at {name!r}{suggest_nearest(name, self._readings)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._readings)

    def __len__(self) -> int:
        return len(self._readings)

    def __repr__(self) -> str:
        return "Captures(" + ", ".join(f"{n}: {len(r)}" for n, r in self._readings.items()) + ")"
