"""The numbers of all tensors over iterations, packed for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flex.page.data_packing import encode_bytes, choose_evenly, encode_floats, json_number
from megatron_flex.page.data_reading import ABSENT, TensorCell
from megatron_flex.statistics.measured import BINS_PER_SIGN, compute_bin_edges

MEASURES = ("rms", "absmax", "mean", "std", "zeros")
MAX_TROUBLES, MAX_TEXTS = 4000, 300
ZERO_BIN_SHARE = 100  # of so many values one may lie in the bin around zero, beside zeros themselves


class TensorTables:
    """Cells by iteration and tensor.

    Args:
        iterations: their numbers.
        names: of tensors.
    """

    def __init__(self, iterations: Sequence[int], names: Sequence[str]) -> None:
        self.iterations, self.names = list(iterations), list(names)
        self._measures: dict[str, list[list[float | None]]] = {
            m: [[None] * len(names) for _ in iterations] for m in MEASURES
        }
        self._state = [[ABSENT] * len(names) for _ in iterations]
        self._counts: dict[tuple[int, int], Sequence[int]] = {}
        self._histograms: dict[int, dict[str, Any]] = {}
        self._texts: dict[str, int] = {}
        self._troubles: list[tuple[int, int, int]] = []

    def put(self, tensor: int, at: int, cell: TensorCell) -> None:
        """Set down what is known of a tensor in an iteration."""
        self._state[at][tensor] = cell.state
        if cell.text and len(self._troubles) < MAX_TROUBLES:
            if cell.text not in self._texts and len(self._texts) < MAX_TEXTS:
                self._texts[cell.text] = len(self._texts)
            self._troubles.append((tensor, at, self._texts.get(cell.text, -1)))
        if cell.found is not None:
            for name, table in self._measures.items():
                table[at][tensor] = getattr(cell.found, name)
            if cell.found.histogram:
                self._counts[tensor, at] = cell.found.histogram

    def histogram(self, tensor: int, most: int) -> None:
        """Pack the histograms of a tensor, of so many iterations, without the empty bins at either end."""
        there = sorted(at for t, at in self._counts if t == tensor) if self._counts else []
        chosen = choose_evenly(there, most)
        rows = {at: self._counts[tensor, at] for at in chosen}
        for at in there:
            del self._counts[tensor, at]
        full = [bin_ for bin_ in range(len(compute_bin_edges()) - 1) if any(counts[bin_] for counts in rows.values())]
        if not full:
            return
        first, last = full[0], full[-1] + 1
        low, high = _zero_bins(
            [sum(counts[bin_] for counts in rows.values()) for bin_ in range(len(compute_bin_edges()) - 1)]
        )
        if first < high and low < last:
            low, high = max(low, first), min(high, last)
        bounds = [e for i, e in enumerate(compute_bin_edges()) if first <= i <= last and not low < i < high]
        self._histograms[tensor] = {
            "at": chosen,
            "uneven": True,
            "edges": [json_number(e) for e in bounds],
            "counts": [_fold_bins(rows[at], first, last, low, high) for at in chosen],
        }

    def state(self, tensor: int, at: int) -> int:
        """What is known of a tensor in an iteration, as `data_reading` has it."""
        return self._state[at][tensor]

    @property
    def texts(self) -> list[str]:
        """What is wrong, each once."""
        return list(self._texts)

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        flat = {m: [v for row in table for v in row] for m, table in self._measures.items()}
        return {
            "iterations": self.iterations,
            "measures": {m: encode_floats(values) for m, values in flat.items()},
            "state": encode_bytes(s for row in self._state for s in row),
            "troubles": [list(t) for t in self._troubles],
            "texts": list(self._texts),
            "histograms": {str(t): found for t, found in self._histograms.items()},
        }


def _zero_bins(counts: Sequence[int]) -> tuple[int, int]:
    """The bins around zero, from one to before another: of values that are not zero they hold one in FEW."""
    low, high, held = BINS_PER_SIGN, BINS_PER_SIGN + 1, 0
    most = (sum(counts) - counts[BINS_PER_SIGN]) // ZERO_BIN_SHARE
    while low > 0 and high < len(counts) and held + counts[low - 1] + counts[high] <= most:
        low, high = low - 1, high + 1
        held += counts[low] + counts[high - 1]
    return low, high


def _fold_bins(counts: Sequence[int], first: int, last: int, low: int, high: int) -> list[int]:
    """The bins from `first` to before `last`, those from `low` to before `high` as one."""
    middle = [sum(counts[low:high])] if first < high and low < last else []
    return [*counts[first : min(low, last)], *middle, *counts[max(high, first) : last]]
