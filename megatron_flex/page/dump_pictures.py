"""Pictures of a dump's tensors: heat maps, attention patterns, the logit lens; bounded in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from megatron_flex.dump.reader import OpenDump
from megatron_flex.errors import FlexError
from megatron_flex.figures import attention, heat, logit_lens
from megatron_flex.figures.figure_sources import PATTERN_SITES
from megatron_flex.page.dump_damage import shorten_paths
from megatron_flex.page.html_page import PageNote, info_note
from megatron_flex.page.tensor_tables import (
    ABSENT,
    DAMAGED,
    TensorTables,
    choose_evenly,
    encode_labels,
    json_number,
    quantise,
    shrink,
)

SIDES = (128, 96, 64, 48, 32)  # of heat maps; attention patterns have at least the last one
MAX_TRIED_SAMPLES = 4  # samples to try if some are damaged
MAX_HISTOGRAM_ITERATIONS = 12
MIN_VALUES, MAX_VALUES = 1 << 12, 1 << 23  # of a tensor to read in an iteration


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Limits of the page's data of a source. Notes list what is left out.

    Attributes:
        tensors: maximum number, evenly spread over the model.
        iterations: maximum iterations of numbers.
        cells: maximum tensors times iterations of numbers.
        rows: maximum tensors times iterations of histograms.
        values: maximum values to read for numbers and histograms in total.
        heats: maximum entries of all heat maps together, a byte each.
        heat_iterations: maximum iterations with heat maps.
        side: maximum side of a heat map.
        attention: maximum entries of all attention patterns together.
        tokens: maximum tokens of the logit lens.
        top: vocabulary entries of the logit lens at each position.
    """

    tensors: int = 24_000
    iterations: int = 48
    cells: int = 72_000
    rows: int = 12_000
    values: int = 1 << 30
    heats: int = 3 << 20
    heat_iterations: int = 4
    side: int = 128
    attention: int = 3 << 19
    tokens: int = 48
    top: int = 5

    def iterations_of(self, tensors: int) -> int:
        """The number of iterations for this many tensors."""
        return max(1, min(self.iterations, self.cells // max(1, tensors)))

    def histograms_of(self, tensors: int, iterations: int) -> int:
        """The number of iterations with histograms."""
        return max(1, min(iterations, MAX_HISTOGRAM_ITERATIONS, self.rows // max(1, tensors)))

    def values_of(self, cells: int) -> int:
        """The number of values of a tensor to read in an iteration."""
        return max(MIN_VALUES, min(MAX_VALUES, self.values // max(1, cells)))


class DumpPictures:
    """The pictures of one dump.

    Attributes:
        notes: one line for each thing that is left out.
        lacks: for each kind of picture why it is missing.
    """

    def __init__(self, dump: OpenDump, bounds: PageBounds, tables: TensorTables, label: str) -> None:
        self.dump, self.bounds, self.tables, self.label = dump, bounds, tables, label
        self.notes: list[PageNote] = []
        self.lacks: dict[str, str] = {}
        self._heats: dict[str, list[dict[str, Any]]] = {}
        self._attention: list[dict[str, Any]] = []
        self._lens: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {"heats": self._heats, "attention": self._attention, "lens": self._lens}

    def add_heat_maps(self, tensors: Sequence[tuple[int, str]]) -> None:
        """Add heat maps of tensors, within the limits.

        Args:
            tensors: their indices and names.
        """
        iterations, side = self._fitting(len(tensors))
        chosen = choose_evenly(tensors, max(1, self.bounds.heats // (side * side)))
        if len(chosen) < len(tensors):
            self._add_note(
                f"heat maps of {len(chosen)} of {len(tensors)} tensors, evenly spread over the model"
            )
        if len(iterations) < len(self.tables.iterations):
            these = ", ".join(str(self.tables.iterations[at]) for at in iterations)
            self._add_note(f"heat maps of iterations {these}")
        shrunk = 0
        for tensor, name in chosen:
            for at in iterations:
                picture = self._heat(tensor, name, at, side)
                if picture is not None:
                    self._heats.setdefault(str(tensor), []).append(picture)
                    shrunk += picture["mean"]
        if shrunk:
            self._add_note(
                f"heat maps of more than {side} x {side} entries as means of magnitudes over blocks"
            )

    def _fitting(self, tensors: int) -> tuple[list[int], int]:
        """The iterations and the side of heat maps, chosen so that all tensors have one if possible."""
        places = list(range(len(self.tables.iterations)))
        room = self.bounds.heats // max(1, tensors)
        for most in (self.bounds.heat_iterations, 2, 1):
            for side in SIDES if most == 1 else SIDES[:2]:
                chosen = choose_evenly(places, most)
                if side <= self.bounds.side and len(chosen) * side * side <= room:
                    return chosen, side
        return choose_evenly(places, 1), min(SIDES[-1], self.bounds.side)

    def _heat(self, tensor: int, name: str, at: int, side: int) -> dict[str, Any] | None:
        state = self.tables.state(tensor, at)
        if state in (ABSENT, DAMAGED):
            return None  # the tables show that
        trouble: FlexError | None = None
        for sample in range(MAX_TRIED_SAMPLES if state else 1):
            try:
                figure = heat(self.dump, name, self.tables.iterations[at], sample, (side, side))
            except FlexError as error:
                trouble = trouble or error
                continue
            return {
                "at": at,
                "shape": list(figure.values.shape),
                "rows": encode_labels(figure.rows),
                "columns": encode_labels(figure.columns),
                "of": list(figure.block),
                "mean": figure.block != (1, 1),
                "caption": figure.caption,
                **quantise(figure.values),
            }
        self.lacks.setdefault(name, self._words(trouble))
        return None

    def add_attention(self) -> None:
        """Add attention patterns of the last iteration that can be shown, of all layers if they fit."""
        by_layer = {int(m[1]): m[0] for n in self.dump.sites if (m := PATTERN_SITES.fullmatch(n)) is not None}
        layers = sorted(by_layer)
        if not layers:
            try:
                attention(self.dump, 0)
            except FlexError as error:
                self.lacks["attention"] = self._words(error)
            return
        heads = next(filter(None, (self._heads(by_layer[layer]) for layer in layers)), 0)
        if not heads:
            self.lacks["attention"] = "the attention patterns of this dump cannot be read"
            return
        shown, side = self._fit_patterns(layers, heads)
        if len(shown) < len(layers):
            self._add_note(f"attention patterns of {len(shown)} of {len(layers)} layers")
        for layer in shown:
            for at in choose_evenly(range(len(self.tables.iterations)), 1):
                self._pattern(layer, at, side)
        if any(picture["of"] != [1, 1] for picture in self._attention):
            self._add_note(f"attention patterns of more than {side} tokens as means over blocks")
        if not self._attention:
            self.lacks.setdefault("attention", "the attention patterns of this dump cannot be read")

    def _fit_patterns(self, layers: Sequence[int], heads: int) -> tuple[Sequence[int], int]:
        """The layers whose patterns are shown, evenly spread if not all fit, and the side of a pattern."""
        room, least = self.bounds.attention, SIDES[-1]
        side = min(self.bounds.side, isqrt(max(1, room // (len(layers) * heads))))
        if side >= least:
            return layers, side
        return choose_evenly(layers, max(1, room // (heads * least**2))), min(self.bounds.side, least)

    def _heads(self, name: str) -> int:
        try:
            array = self.dump[name]
        except FlexError:
            return 0
        front = len({"iteration", "sample", "token"} & set(array.dims))
        return prod(array.shape[front:-1])

    def _pattern(self, layer: int, at: int, side: int) -> None:
        iteration = self.tables.iterations[at]
        try:
            figure = attention(self.dump, layer, iteration)
        except FlexError as error:
            self.lacks.setdefault(f"attention {layer}", self._words(error))
            return
        values, block = shrink(figure.values, (side, side))
        self._attention.append(
            {
                "layer": layer,
                "at": at,
                "shape": list(values.shape),
                "queries": encode_labels(figure.queries[:: block[0]]),
                "keys": encode_labels(figure.keys[:: block[1]]),
                "of": list(block),
                "caption": figure.caption,
                **quantise(values),
            }
        )

    def add_lens(self) -> None:
        """Add the logit lens of the last iteration."""
        at = len(self.tables.iterations) - 1
        tokens = slice(self.bounds.tokens)
        try:
            figure = logit_lens(self.dump, self.tables.iterations[at], 0, self.bounds.top, positions=tokens)
        except FlexError as error:
            self.lacks["lens"] = self._words(error)
            return
        if len(figure.tokens) == self.bounds.tokens:
            self._add_note(f"the logit lens of the first {self.bounds.tokens} tokens of a sample")
        self._lens = {
            "at": at,
            "layers": list(figure.layers),
            "tokens": list(figure.tokens),
            "ids": figure.ids.tolist(),
            "shares": [
                [[json_number(float(p), 3) for p in token] for token in layer]
                for layer in figure.probabilities
            ],
            "caption": figure.caption,
        }

    def _add_note(self, text: str) -> None:
        self.notes.append(info_note(f"{self.label}: {text}."))

    def _words(self, error: FlexError | None) -> str:
        return shorten_paths(str(error), self.dump.path)
