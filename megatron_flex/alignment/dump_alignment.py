"""Dumps of a Hugging Face model and of a Megatron model, compared by the table of hook points.

Names and axes are mapped when tensors are read; no file is converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megatron_flex.alignment.alignment_result import Alignment
from megatron_flex.alignment.counterparts import FAMILIES, Family, Match, family_of
from megatron_flex.alignment.site_pairs import (
    axis_sizes,
    batch_first,
    compared_pair,
    reference_tensor,
    take_part,
)
from megatron_flex.alignment.site_rows import hold_to, make_verdict, sum_site
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.tolerance import Tolerances, read_precision
from megatron_flex.dump import VALUE
from megatron_flex.dump.reader import OpenDump, open_dump
from megatron_flex.errors import DumpError, FlexError

MEGATRON = "megatron-core"
NOT_DUMPED = "the dump of {which} has no tensor there"
NEEDS_BIAS = "Megatron adds {bias} after this site; dump that parameter, too"


def family_of_dump(dump: OpenDump) -> Family | None:
    """The table of the architecture of a dumped Hugging Face model; None for other dumps."""
    kind = dump.manifest.model.get("model_type")
    return FAMILIES.get(str(kind)) if dump.manifest.framework != MEGATRON else None


def are_of_both_frameworks(a: str | PathLike[str], b: str | PathLike[str]) -> bool:
    """Whether one dump is of a Hugging Face model with a table, and the other of a Megatron model.

    Raises:
        DumpError: a dump cannot be read.
    """
    with open_dump(a) as one, open_dump(b) as two:
        frameworks = [d.manifest.framework == MEGATRON for d in (one, two)]
        return sorted(frameworks) == [False, True] and any(family_of_dump(d) for d in (one, two))


def align_dumps(
    hf_dump: str | PathLike[str], megatron_dump: str | PathLike[str], tolerance: float | None = None
) -> Alignment:
    """Compare the dump of a Hugging Face model with that of a Megatron model. On one process.

    The first iteration that both have is compared, samples by number. A dump has the tensors of modules;
    rotated queries, scores and the rows of experts of a Hugging Face model are compared by `align` only.

    Args:
        hf_dump: the dump of a model of transformers; the two may be exchanged.
        megatron_dump: the dump of a Megatron model, of any layout.
        tolerance: as for `align`.

    Returns:
        The accumulated differences.

    Raises:
        DumpError: a dump cannot be read, or the two have no iteration or tensor in common.
        FlexError: there is no table for the architecture.

    Examples:
        >>> print(align_dumps("dumps/hf", "dumps/run"))
        agrees: ... hook points, greatest error ...
        llama in dumps/hf and Megatron in dumps/run
    """
    with open_dump(hf_dump) as one, open_dump(megatron_dump) as two:
        hf, megatron = (two, one) if one.manifest.framework == MEGATRON else (one, two)
        if megatron.manifest.framework != MEGATRON or hf.manifest.framework == MEGATRON:
            raise FlexError(
                f"{hf_dump} and {megatron_dump} must be dumps of a Hugging Face model and of Megatron"
            )
        family = family_of_dump(hf) or family_of(str(hf.manifest.model.get("model_type")))
        return _DumpAlignment(hf, megatron, family, tolerance).run()


@dataclass
class _DumpAlignment:
    """A comparison in progress."""

    hf: OpenDump
    megatron: OpenDump
    family: Family
    tolerance: float | None
    _own: dict[str, str] = field(default_factory=dict)

    def run(self) -> Alignment:
        common = sorted(set(self.hf.iterations) & set(self.megatron.iterations))
        if not common:
            raise DumpError(
                f"{self.hf.path} has the iterations {self.hf.iterations} and {self.megatron.path} "
                f"{self.megatron.iterations}; dump one that both have",
                path=self.hf.path,
            )
        parameters = frozenset(self.megatron.gpt_names.index(self.megatron.parameters))
        self._stored_names = self.megatron.gpt_names.index(self.megatron.sites)
        matches, uncompared = self.family.match(self._stored_names, parameters)
        precisions = [read_precision(dump.manifest) for dump in (self.megatron, self.hf)]
        tolerances = Tolerances(self.tolerance, [m.site for m in matches], precisions)
        verdicts = []
        for match in matches:
            pair = self._pair(match, common[0])
            if isinstance(pair, str):
                uncompared[match.site] = pair
                continue
            megatron, hf = pair
            dtypes = megatron.dtype, hf.dtype
            item = ComparedTensor(match.site, VALUE)
            row = hold_to(tolerances.bound(item, dtypes), item, sum_site(megatron, hf))
            verdicts.append(make_verdict(match.row.points, match.part, hf.shape, dtypes, row))
        if not verdicts:
            raise DumpError(
                f"{self.hf.path} and {self.megatron.path} have no tensor in common: {uncompared}",
                path=self.hf.path,
            )
        later = (
            (f"iteration {common[0]} was compared, of {len(common)} that both have",)
            if len(common) > 1
            else ()
        )
        name = f"{self.family.name} in {self.hf.path} and Megatron in {self.megatron.path}"
        return Alignment(name, tuple(verdicts), notes=later, uncompared=uncompared, isolates=False)

    def _pair(self, match: Match, iteration: int) -> tuple[Tensor, Tensor] | str:
        """Both tensors in the same order, with the common samples; text where they cannot be compared."""
        row, captures = match.row, {}
        samples: list[list[int] | None] = []
        for point in row.other:
            if point not in self.hf:
                return NOT_DUMPED.format(which="the Hugging Face model")
            array = self.hf[point].at(iteration)[0]
            captures[point] = array.torch()
            samples.append(_numbers(array))
        array = self.megatron[self._stored_names[match.site]].at(iteration)[0]
        megatron = array.torch()
        samples.append(_numbers(array))
        if row.bias and self.megatron.manifest.model.get("add_bias_linear", True):
            own_bias = self.megatron.gpt_names.index(self.megatron.parameters).get(row.bias)
            if own_bias is None:
                return NEEDS_BIAS.format(bias=row.bias)
            bias = self.megatron.parameter(own_bias).at(iteration)[0].torch()
            megatron = megatron + take_part(bias, row.bias_part).to(megatron)
        hf = reference_tensor(row, captures, self._sizes(len(megatron)))
        assert hf is not None, "every point was read"
        stored = batch_first(row)
        megatron, hf = compared_pair(stored, megatron, hf, self._sizes(len(megatron)), self._config)
        return _common_samples(megatron, hf, samples[-1], samples[0])

    @property
    def _config(self) -> Any:
        return SimpleNamespace(**self.megatron.manifest.model)

    def _sizes(self, samples: int) -> Mapping[str, int]:
        return axis_sizes(SimpleNamespace(**self.hf.manifest.model), samples)


def _numbers(array: Any) -> list[int] | None:
    """The numbers of the samples; None where a tensor has none."""
    return None if array.samples is None else [int(i) for i in array.samples.tolist()]


def _common_samples(
    megatron: Tensor, hf: Tensor, megatron_numbers: list[int] | None, hf_numbers: list[int] | None
) -> tuple[Tensor, Tensor] | str:
    """The samples that both have, by number."""
    if (
        megatron_numbers is None
        or hf_numbers is None
        or megatron_numbers == hf_numbers
        or len(hf_numbers) != len(hf)
        or len(megatron_numbers) != len(megatron)
    ):
        return megatron, hf
    both = sorted(set(megatron_numbers) & set(hf_numbers))
    if not both:
        return "the two dumps have no sample in common"
    return megatron[[megatron_numbers.index(n) for n in both]], hf[[hf_numbers.index(n) for n in both]]
