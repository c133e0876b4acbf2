"""A cache of the values that were asked for last, up to a total weight."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class WeightedCache(Generic[K, V]):
    """The values that were asked for last, up to a total weight."""

    def __init__(self, most: int) -> None:
        self.most, self._weight = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock, self._process = threading.Lock(), os.getpid()

    def get(self, key: K, make: Callable[[], V], weight: Callable[[V], int] = lambda _: 1) -> V:
        """The value of a key; made where it is not kept."""
        if self._process != os.getpid():  # forked off, maybe while another thread held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            cached = self._values.get(key)
            if cached is not None:
                self._values.move_to_end(key)
                return cached[0]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, weight(value)
                self._weight += self._values[key][1]
            while self._weight > self.most and len(self._values) > 1:
                self._weight -= self._values.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._weight = 0
