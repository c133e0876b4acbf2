"""The result of an alignment, for people, scripts and terminals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_flex.alignment.alignment_page import write_alignment
from megatron_flex.compare.compared_result import ComparedResult, TableRow
from megatron_flex.compare.comparison import Row


@dataclass(frozen=True, slots=True)
class SiteVerdict:
    """One hook point in both models.

    Attributes:
        site: the Megatron site.
        other: the Hugging Face points.
        part: the number of the layer as text, `embedding` or `logits`.
        accumulated: the difference as the models run, and how far correct models may differ; A is Megatron.
        isolated: likewise where Megatron's layer got the layer input of Hugging Face, of the first run where
            one run was enough; None for dumps and gradients.
        shape: the shape of the compared tensors.
        dtypes: the dtypes of the Megatron tensor and the Hugging Face tensor.
    """

    site: str
    other: str
    part: str
    accumulated: Row
    isolated: Row | None = None
    shape: tuple[int, ...] = ()
    dtypes: tuple[str, str] = ("", "")

    @property
    def diverges(self) -> bool:
        """Whether the models differ there as they run."""
        return self.accumulated.diverges

    @property
    def diverges_alone(self) -> bool:
        """Whether they differ there with equal layer inputs."""
        return self.isolated is not None and self.isolated.diverges


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """The two verdicts of a layer.

    Attributes:
        part: the number of the layer as text, `embedding` or `logits`.
        accumulated: the first site that differs as the models run; empty if none does.
        isolated: the first site that differs with the layer input of Hugging Face; empty if none does.
        accumulated_error: the greatest error over its tolerance as the models run.
        isolated_error: likewise with equal layer inputs.
    """

    part: str
    accumulated: str
    isolated: str
    accumulated_error: float
    isolated_error: float


@dataclass(frozen=True, repr=False)
class Alignment(ComparedResult):
    """What `align` found.

    Attributes:
        model: the two models as text.
        sites: every compared site, in the order of execution.
        gradients: parameter gradients and the loss, where they were compared.
        causes: likely causes of the first difference, the most likely first.
        notes: what was done with the tokens.
        uncompared: the sites that were not compared, with the reason.
        isolates: whether there are isolated verdicts, as there are not for dumps.
        runs: how often the Megatron model ran forward. After one run the isolated difference of a site is its
            accumulated one, which was small enough for both.

    Examples:
        >>> found = align(hf_model, flex, tokens)
        >>> found.agrees, len(found.sites)
        (True, 135)
        >>> worst = max(found.sites, key=lambda verdict: verdict.accumulated.error)
        >>> worst.accumulated.error < 1e-5
        True
    """

    HEADS = (
        "part",
        "as the models run",
        ">error / tolerance",
        "with equal layer input",
        ">error / tolerance",
    )

    model: str
    sites: tuple[SiteVerdict, ...]
    gradients: tuple[SiteVerdict, ...] = ()
    causes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    uncompared: dict[str, str] = field(default_factory=dict)
    isolates: bool = True
    runs: int = 1

    @property
    def first(self) -> SiteVerdict | None:
        """The first site that differs with equal layer inputs, else the first that differs as they run."""
        alone = next((s for s in self.sites if s.diverges_alone), None)
        return alone or next((s for s in (*self.sites, *self.gradients) if s.diverges), None)

    @property
    def agrees(self) -> bool:
        """Whether no site differs by more than its tolerance."""
        return self.first is None

    @property
    def exit_status(self) -> int:
        """0 if the models agree, 1 if they differ."""
        return 0 if self.agrees else 1

    @property
    def layers(self) -> list[LayerVerdict]:
        """The two verdicts of each layer."""
        parts: dict[str, list[SiteVerdict]] = {}
        for site in self.sites:
            parts.setdefault(site.part, []).append(site)
        return [_layer(part, sites) for part, sites in parts.items()]

    def summary(self) -> list[str]:
        """Return the result in lines.

        Examples:
            >>> align(hf_model, flex, tokens).summary()
            ['agrees: 135 hook points, greatest error ...', 'Hugging Face LlamaForCausalLM and Megatron on one
             rank']
        """
        return list(self._summary())

    def _summary(self) -> Iterator[str]:
        first = self.first
        if first is None:
            worst = max((s.accumulated.error for s in self.sites), default=0.0)
            yield f"agrees: {len(self.sites)} hook points, greatest error {worst:.1e}"
        else:
            row = first.isolated if first.isolated is not None and first.diverges_alone else first.accumulated
            how = "with the layer input of Hugging Face" if row is first.isolated else "as the models run"
            yield (
                f"differs: first at {first.site} ({first.other}), {how}: error {row.error:.2e}, "
                f"tolerance {row.tolerance:.1e}"
            )
            if row.worst is not None:
                place, a, b = row.worst.place(), row.worst.a, row.worst.b
                yield f"at {place or '[]'} Megatron has {a:.6g} and Hugging Face {b:.6g}"
            yield from (f"likely cause: {cause}" for cause in self.causes)
            ill = [v.part for v in self.layers if v.isolated]
            if ill:
                yield f"parts that differ by themselves: {', '.join(ill)}"
        yield self.model
        yield from self.notes

    def table_rows(self, most: int | None = None) -> list[TableRow]:
        """Return the two verdicts of each layer."""
        first = self.first
        return [
            TableRow(
                (layer.part, *_cells(layer.accumulated, layer.accumulated_error))
                + (_cells(layer.isolated, layer.isolated_error) if self.isolates else ("", "")),
                bool(layer.accumulated or layer.isolated),
                first is not None and layer.part == first.part,
            )
            for layer in self.layers[:most]
        ]

    def _content(self) -> dict[str, Any]:
        first = self.first
        return {
            "model": self.model,
            "agrees": self.agrees,
            "isolates": self.isolates,
            "runs": self.runs,
            "summary": self.summary(),
            "first": None if first is None else first.site,
            "causes": list(self.causes),
            "notes": list(self.notes),
            "table": [asdict(row) for row in self.table_rows()],
            "layers": [asdict(layer) for layer in self.layers],
            "sites": [asdict(site) for site in self.sites],
            "gradients": [asdict(site) for site in self.gradients],
            "uncompared": self.uncompared,
        }

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write an HTML page: both models side by side, layer by layer, with both verdicts.

        It is one file without scripts from elsewhere. In a run, write it on one rank.

        Args:
            path: the file; an existing one is replaced.

        Returns:
            The path of the file.

        Raises:
            FlexError: it cannot be written.

        Examples:
            >>> align(hf_model, flex, tokens).to_html("align.html")
            PosixPath('align.html')
        """
        return write_alignment(self.to_json(), path)


def _layer(part: str, sites: Sequence[SiteVerdict]) -> LayerVerdict:
    accumulated = next((s.site for s in sites if s.diverges), "")
    isolated = next((s.site for s in sites if s.diverges_alone), "")
    return LayerVerdict(
        part,
        accumulated,
        isolated,
        max(s.accumulated.excess for s in sites),
        max((s.isolated.excess for s in sites if s.isolated is not None), default=0.0),
    )


def _cells(site: str, share: float) -> tuple[str, str]:
    """The first site that differs, and the greatest error over its tolerance."""
    return site or "agrees", f"{share:.2g}"
