"""The captures on the receiving rank: for each site the full tensors by step, microbatch and call."""

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

    Examples:
        >>> with attach(chunks, [HookFunction("decoder.layers.3")]) as flex:
        ...     train_step(chunks)
        ...     flex.output_dict["decoder.layers.3"].keys[1]
        Key(site='decoder.layers.3:output', step=0, iteration=0, microbatch=1, call=0)
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
    """The tensors of one site, in the order of step, microbatch and call; `keys` holds their keys.

    Examples:
        >>> with attach(chunks, [HookFunction("decoder.layers.3")]) as flex:
        ...     train_step(chunks)
        ...     readings = flex.output_dict["decoder.layers.3"]
        >>> [(key.microbatch, tuple(tensor.shape)) for key, tensor in zip(readings.keys, readings)]
        [(0, (16, 2, 32)), (1, (16, 2, 32))]
    """

    def __init__(self) -> None:
        self._items: list[tuple[Key, Tensor]] = []

    @property
    def keys(self) -> list[Key]:
        """The key of each tensor."""
        return [k for k, _ in self._items]

    def at(
        self, *, step: int | None = None, iteration: int | None = None, microbatch: int | None = None
    ) -> list[Tensor]:
        """Return the tensors of that step, iteration or microbatch.

        Examples:
            >>> with attach(chunks, [HookFunction("decoder.layers.3")]) as flex:
            ...     train_step(chunks)
            ...     len(flex.output_dict["decoder.layers.3"].at(microbatch=1))
            1
        """
        want = {"step": step, "iteration": iteration, "microbatch": microbatch}
        return [t for k, t in self._items if all(v is None or getattr(k, n) == v for n, v in want.items())]

    def add(self, key: Key, tensor: Tensor) -> None:
        """Insert a tensor in the order of its key.

        Examples:
            >>> from megatron_flex.runtime import Key, Readings
            >>> readings = Readings()
            >>> readings.add(Key("decoder.layers.3:output", 0, 0, 1, 0), torch.ones(1))
            >>> readings.add(Key("decoder.layers.3:output", 0, 0, 0, 0), torch.zeros(1))
            >>> [tensor.item() for tensor in readings]
            [0.0, 1.0]
        """
        if not self._items or self._items[-1][0].time <= key.time:
            self._items.append((key, tensor))
            return
        insort(self._items, (key, tensor), key=lambda item: item[0].time)

    def take(self, wanted: Callable[[Key], bool]) -> list[tuple[Key, Tensor]]:
        """Remove the tensors whose key satisfies `wanted`.

        Returns:
            Pairs of key and tensor.

        Examples:
            >>> with attach(chunks, [HookFunction("decoder.layers.3")]) as flex:
            ...     train_step(chunks)
            ...     len(flex.output_dict["decoder.layers.3"].take(lambda key: key.microbatch == 0))
            1
        """
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
    """Maps site names to readings; empty except on the receiving rank.

    A module's name refers to its only captured point, or to its output.

    Args:
        own_name: returns the model's own name for one that a person may use; None if there is only one name.
        receiver: the rank that receives the captures; None on that rank.

    Examples:
        >>> with attach(chunks, [HookFunction("decoder.layers.*")]) as flex:
        ...     train_step(chunks)
        ...     captures = flex.output_dict
        >>> list(captures)
        ['decoder.layers.0:output', 'decoder.layers.1:output', 'decoder.layers.2:output',
         'decoder.layers.3:output']
        >>> len(captures["decoder.layers.3"])  # of 2 microbatches
        2
    """

    def __init__(self, own_name: Callable[[str], str] | None = None, receiver: int | None = None) -> None:
        self._readings: dict[str, Readings] = {}
        self._own_name, self._receiver = own_name, receiver

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add a tensor.

        Examples:
            >>> from megatron_flex.runtime import Captures, Key
            >>> captures = Captures()
            >>> captures.add(Key("decoder.layers.3:output", 0, 0, 0, 0), torch.zeros(16, 2, 32))
            >>> list(captures)
            ['decoder.layers.3:output']
        """
        readings = self._readings.get(key.site)
        if readings is None:
            readings = self._readings[key.site] = Readings()
        readings.add(key, tensor)

    def take(self, wanted: Callable[[Key], bool]) -> list[tuple[Key, Tensor]]:
        """Remove the tensors whose key satisfies `wanted`.

        Returns:
            Pairs of key and tensor, by site, in the order of capture.

        Examples:
            >>> with attach(chunks, [HookFunction("decoder.layers.*")]) as flex:
            ...     train_step(chunks)
            ...     taken = flex.output_dict.take(lambda key: key.microbatch == 0)
            >>> len(taken)
            4
        """
        out: list[tuple[Key, Tensor]] = []
        for name in list(self._readings):
            removed = self._readings[name].take(wanted)
            out += removed
            if removed and not len(self._readings[name]):
                del self._readings[name]
        return out

    def clear(self) -> None:
        """Remove all captures.

        Examples:
            >>> with attach(chunks, [HookFunction("decoder.layers.*")]) as flex:
            ...     for _ in range(3):
            ...         train_step(chunks)
            ...         flex.output_dict.clear()  # frees the memory
        """
        self._readings.clear()

    def __getitem__(self, name: str) -> Readings:
        if self._own_name is not None:
            name = self._own_name(name)
        if name in self._readings:
            return self._readings[name]
        points = [n for n in self._readings if n.partition(":")[0] == name]
        chosen = next((n for n in points if n.endswith((":output", f":output{GRADIENT_SUFFIX}"))), None)
        if len(points) == 1 or chosen:
            return self._readings[chosen or points[0]]
        if points:
            raise SiteError(
                f"{name!r} was captured at several points ({', '.join(points)}); name one of them"
            )
        if self._receiver is not None and not self._readings:
            raise KeyError(
                f"rank {self._receiver} has the captures of {name!r}; read them where flex.is_leader is True"
            )
        raise KeyError(f"nothing was captured at {name!r}{suggest_nearest(name, self._readings)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._readings)

    def __len__(self) -> int:
        return len(self._readings)

    def __repr__(self) -> str:
        return "Captures(" + ", ".join(f"{n}: {len(r)}" for n, r in self._readings.items()) + ")"
