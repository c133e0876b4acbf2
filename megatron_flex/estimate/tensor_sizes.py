"""Sizes of the tensors of a run, from a configuration or a live session: what all estimates count."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from megatron_flex.adapters import ParameterSite
from megatron_flex.adapters.megatron_core.moe_layers import RoutedRows, rows_of_experts
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, PackedSequences, count_parts, spans
from megatron_flex.layout.gradient_layout import find_stored_gradient, layout_in_pass
from megatron_flex.sites import Pattern, Site, SiteTable

ROUTED_ROWS = "its rows go where the router sends them, which only the data tell"
LAYOUT_UNKNOWN = "it depends on the data: its layout is known when the model runs"
INTEGER_DTYPES = {"map": torch.bool, "indices": torch.int64}  # points of a layer of experts
RESIDUAL_NAMES = re.compile(
    r"embedding:output|decoder\.layers\.\d+(:(input|mid|output)|\.(input_layernorm|pre_mlp_layernorm|norm):input)"
    r"|decoder\.final_(layernorm|norm):input"
)
ROUTER_POINTS = (("router", "logits"), ("router", "probs"), ("experts", "weights"))
ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class UnknownSizeError(FlexError):
    """The size of a tensor does not follow from what is known before the model runs.

    Attributes:
        reason: why, without the name of the hook point.
        dims: the names of the dims whose lengths are missing; empty if something else is.
    """

    def __init__(self, *args: object, reason: str = "", dims: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*args, **named)
        self.reason, self.dims = reason, tuple(dims)


def make_unknown_size_error(site: str, reason: str, dims: Sequence[str] = ()) -> UnknownSizeError:
    """The error of a hook point whose size is not known; `reason` and `dims` are its attributes."""
    return UnknownSizeError(f"{site}: {reason}; leave it out", site=site, reason=reason, dims=dims)


@dataclass(frozen=True, slots=True)
class EstimatedTensor:
    """A tensor of a run, on every rank that has it.

    Attributes:
        name: of the hook point or parameter.
        kind: `value`, `gradient`, `parameter` or `parameter_gradient`.
        layout: the layout of the shards.
        shape: of the full tensor, without padding; a name for a dim whose length depends on the data.
        local: the shape of a rank's shard; the expected number of rows if `expected`.
        dtype: in the run.
        stage: the pipeline stage that has the tensor.
        chunk: the virtual chunk of that stage.
        times: captures in an iteration, on each data parallel rank.
        replicated: the axes over which the tensor is replicated, in addition to those of the layout.
        where: coordinates of the ranks that have the tensor; empty for all ranks of the stage.
        expected: whether the number of rows depends on the data, and is that of even routing.
    """

    name: str
    kind: str
    layout: Layout
    shape: tuple[int | str, ...]
    local: tuple[float, ...]
    dtype: torch.dtype
    stage: int = 0
    chunk: int = 0
    times: int = 1
    replicated: tuple[str, ...] = ("cp", "tp")
    where: tuple[tuple[str, int], ...] = ()
    expected: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(round(n) for n in self.local)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard."""
        return round(prod(self.local) * self.dtype.itemsize)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full tensor, without padding."""
        return prod(n for n in self.shape if isinstance(n, int)) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSizes:
    """The sizes of the tensors of a run.

    Attributes:
        axes: the sizes of the mesh's axes.
        lengths: of the dims that depend on the data: `s` and `b`, of the full microbatch of a replica.
        dtype: gives the dtype at a hook point; None where only the data tell.
        microbatches: the number in a step, on each data parallel rank.
        padded_vocabulary: the length of the logits' last dim with its padding; 0 if it is not known.
        config: Megatron's TransformerConfig; None for another framework.
        even_routing: whether rows of experts are counted as even routing would have them, for which hook
            points need their taps; otherwise their size is unknown.
        gradient_dtype: of reduced gradients of parameters; None for that of the parameters.
        pack: the packed sequences of each microbatch; None without packing.
    """

    axes: Mapping[str, int]
    lengths: Mapping[str, int]
    dtype: Callable[[Site], torch.dtype | None]
    microbatches: int = 1
    padded_vocabulary: int = 0
    config: Any = None
    even_routing: bool = False
    gradient_dtype: torch.dtype | None = None
    pack: PackedSequences | None = None

    def of_dump(
        self, sites: Iterable[Site], parameters: Iterable[ParameterSite], gradients: bool
    ) -> Iterator[EstimatedTensor]:
        """What a dump of these hook points and parameters writes, hidden ones left out.

        Raises:
            UnknownSizeError: only the data determine a size.
        """
        for site in sites:
            if not site.hidden:
                yield (value := self.activation(site))
                if gradients and value.dtype.is_floating_point:
                    yield self.activation(site, "gradient")
        for p in parameters:
            yield self.parameter(p)
            if gradients:
                yield self.parameter(p, "parameter_gradient")

    def activation(self, site: Site, kind: str = "value") -> EstimatedTensor:
        """The tensor at a hook point, or its gradient.

        Raises:
            UnknownSizeError: only the data determine its layout, its dtype or a length.
        """
        if site.inferred or not site.shape or len(site.shape) != len(site.dims):
            raise make_unknown_size_error(site.name, LAYOUT_UNKNOWN)
        routed = rows_of_experts(site) if self.even_routing else None
        if not self.even_routing and "experts" in site.module.split("."):
            raise make_unknown_size_error(site.name, ROUTED_ROWS)
        known = tuple(self._length(n) for n in site.shape)
        missing = [str(n) for n in known if isinstance(n, str) and not (routed and n == "t")]
        if missing:
            text = f"only the data tell how long {' and '.join(missing)} is"
            raise make_unknown_size_error(site.name, text, missing)
        dtype = self.dtype(site)
        if dtype is None:
            raise make_unknown_size_error(site.name, "only the data tell its dtype")
        if routed is None:
            layout = site.layout if self.pack is None else self.pack.layout_of(site.layout)
            shape = tuple(int(n) for n in known)
            try:
                local = compute_local_shape(layout, self._padded(site, shape), self.axes)
            except FlexError as error:
                raise make_unknown_size_error(site.name, str(error)) from error
            tensor = EstimatedTensor(site.name, kind, layout, shape, local, dtype)
        else:
            tensor = self._expert_rows(site, routed, kind, known, dtype)
        # Multi-token prediction calls the output layer once for each of its depths, too.
        depths = getattr(self.config, "mtp_num_layers", None) or 0
        calls = 1 + depths if site.module in ("output_layer", "loss") else 1
        return replace(
            tensor,
            layout=layout_in_pass(tensor.layout, kind == "gradient"),
            stage=site.stage,
            chunk=site.chunk,
            times=self.microbatches * calls,
        )

    def _length(self, length: int | str) -> int | str:
        """The length of a dim; its name if it is not known. `2s` is twice the length of `s`."""
        times = None if isinstance(length, int) else re.fullmatch(r"(\d*)([a-z]+)", length)
        if times is None or not self.lengths.get(times[2]):
            return length
        return int(times[1] or 1) * self.lengths[times[2]]

    def _padded(self, site: Site, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with the padding of a vocabulary: the least that divides, unless it is known."""
        order = range(len(shape)) if site.layout.permute is None else site.layout.permute
        out = []
        for name, length, index in zip(site.dims, shape, order, strict=True):
            dim = site.layout.dims[index]
            if self.padded_vocabulary and name == "v" and site.module == "output_layer":
                length = self.padded_vocabulary
            elif dim.keep is not None:
                parts = count_parts(dim, self.axes)
                length = -(-length // parts) * parts
            out.append(length)
        return tuple(out)

    def _expert_rows(
        self, site: Site, routed: RoutedRows, kind: str, shape: tuple[int | str, ...], dtype: torch.dtype
    ) -> EstimatedTensor:
        """A tensor of experts, with the number of rows on each rank under even routing."""
        config, axes = self.config, self.axes
        tokens = self.lengths["s"] * self.lengths["b"] / axes["cp"]
        if config.sequence_parallel:
            tokens /= axes["tp"]
        rows = tokens * config.moe_router_topk * axes["etp"]
        where: tuple[tuple[str, int], ...] = ()
        if routed.expert is not None:
            experts = config.num_moe_experts // axes["ep"]
            rows, where = rows / experts, (("ep", routed.expert // experts),)
        width = site.shape[-1]
        assert isinstance(width, int), "the last dim of an expert's tensor is known"
        local = (rows, *(width // prod(axes[c.axis] for c in dim.cuts) for dim in routed.layout.dims[1:]))
        return EstimatedTensor(
            site.name,
            kind,
            routed.layout,
            shape,
            local,
            dtype,
            replicated=("etp",),
            where=where,
            expected=True,
        )

    def parameter(self, p: ParameterSite, kind: str = "parameter") -> EstimatedTensor:
        """A parameter after the step, or with `parameter_gradient` its reduced gradient."""
        assert p.parameter is not None or p.owner, "one rank sees all parameters but other ranks' experts"
        dtype = self.config.params_dtype if p.parameter is None else p.parameter.dtype
        layout = p.layout
        if kind == "parameter_gradient":
            dtype = self.gradient_dtype or dtype
            layout = find_stored_gradient(p.layout, reduced=True)
        local = p.local
        if not local and p.parameter is not None:
            local = tuple(p.parameter.shape)
        elif not local:
            local = compute_local_shape(p.layout, p.shape, self.axes)
        return EstimatedTensor(
            p.name,
            kind,
            layout,
            p.shape,
            local,
            dtype,
            p.stage,
            p.chunk,
            replicated=("edp", "etp") if p.owner else ("dp", "cp", "tp"),
            where=p.owner,
        )


def megatron_dtype(site: Site, config: Any, dtype: torch.dtype, fp32_loss: bool) -> torch.dtype:
    """The dtype of the tensor at a hook point of a Megatron model.

    Args:
        site: the hook point.
        config: Megatron's TransformerConfig.
        dtype: of the parameters.
        fp32_loss: whether the loss is computed in fp32.
    """
    role = site.module.rpartition(".")[2]
    if role in ("router", "experts") and site.point in INTEGER_DTYPES:
        return INTEGER_DTYPES[site.point]
    if (role, site.point) == ("word_embeddings", "input"):  # token ids
        return torch.int64
    if (role, site.point) in ROUTER_POINTS and getattr(config, "moe_router_dtype", None) is not None:
        return ROUTER_DTYPES[config.moe_router_dtype]
    in_fp32 = (
        (site.name == "loss:output" and fp32_loss)
        or (role, site.point) == ("self_attention", "g")
        or (getattr(config, "fp32_residual_connection", False) and RESIDUAL_NAMES.fullmatch(site.name))
    )
    return torch.float32 if in_fp32 else dtype


def compute_local_shape(
    layout: Layout, full_shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """A rank's shape, dims in the local order, from the full shape with its padding.

    Raises:
        FlexError: a dim does not divide.
    """
    order = range(len(full_shape)) if layout.permute is None else layout.permute
    padded = [0] * len(full_shape)
    for place, index in enumerate(order):
        padded[index] = full_shape[place]
    out = []
    for dim, length in zip(layout.dims, padded, strict=True):
        even = replace(dim, uneven=False)
        out.append(sum(b - a for a, b in spans(even, length, {}, sizes)))
    return tuple(out)


def count_microbatches(args: argparse.Namespace, requested: int | None) -> int:
    """The number of microbatches that each data parallel rank dumps."""
    samples = args.micro_batch_size * args.data_parallel_size
    number = int(args.global_batch_size // samples)
    if requested is not None and not 1 <= requested <= number:
        raise FlexError(f"microbatches={requested}: an iteration has {number} on each data parallel rank")
    return number if requested is None else requested


def select_estimated_sites(sites: Iterable[Site], patterns: Iterable[Pattern]) -> list[Site]:
    """The matching sites, hidden ones included; raises where the run would."""
    table = SiteTable(sites)
    names: set[str] = set()
    for pattern in patterns:
        matching = table.match(pattern, "output")
        hidden = [s for s in matching if s.hidden]
        is_glob = not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None
        if hidden and (len(hidden) == len(matching) or not is_glob):
            raise FlexError(f"{hidden[0].name} cannot be dumped: {hidden[0].hidden}")
        names |= {s.name for s in matching}
    return [s for s in table if s.name in names]


def select_estimated_parameters(
    parameters: list[ParameterSite], patterns: Sequence[Pattern]
) -> list[ParameterSite]:
    """The matching parameters, without copies of other matching parameters."""
    as_sites = SiteTable(Site(p.name, p.layout, p.shape) for p in {p.name: p for p in parameters}.values())
    names = {s.name for pattern in patterns for s in as_sites.match(pattern)}
    return [p for p in parameters if p.name in names and p.copy_of not in names]
