"""Puts together what a dump would write: the model's sites, their sizes in this run, and who writes them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from megatron_flex import cpu
from megatron_flex.adapters import ParameterSite
from megatron_flex.adapters.megatron_core.dispatch import ExpertRows
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import EstimatedTensor, DumpEstimate, compute_local_shape, estimate_dump
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.launch.planning.megatron_arguments import AXIS_ARGUMENTS, RunConfig, parse_arguments
from megatron_flex.launch.planning.meta_model import ModelDescription, describe_model, silence_megatron
from megatron_flex.sites import Pattern, Site, SiteTable

INTEGER_DTYPES = {"map": torch.bool, "indices": torch.int64}  # points of a layer of experts
RESIDUAL_NAMES = re.compile(
    r"embedding:output|decoder\.layers\.\d+(:(input|mid|output)|\.(input_layernorm|pre_mlp_layernorm|norm):input)"
    r"|decoder\.final_(layernorm|norm):input"
)
ROUTER_POINTS = (("router", "logits"), ("router", "probs"), ("experts", "weights"))
ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def plan(
    config: RunConfig,
    sites: Sequence[Pattern] | Pattern = (),
    *,
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    microbatches: int | None = None,
    dtype: torch.dtype | str | None = None,
    gradients: bool = False,
    parameters: Sequence[str] | str = (),
    tokens: Any = None,
    reduce: Literal["mean"] | None = None,
    every: int = 1,
    iterations: int | None = None,
    disk_bytes_per_second: float | None = None,
    part_bytes: int = 256 << 20,
) -> DumpEstimate:
    """Say what a dump of a Megatron run would write.

    The model is built by Megatron on meta tensors, stage by stage, in a process that has no process groups
    yet and keeps none; the adapter is asked for its sites. Ranks of data parallelism are only counted.

    Args, beside those that are as for Dump:
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        mesh: sizes that count instead of the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: ranks; else from `dp`, or with the least data parallel size that fits.
        sequence_length, micro_batch_size: instead of the config's.
        microbatches: how many each data parallel rank dumps; else all of `global_batch_size`.
        tokens: a fraction below 1, too.
        iterations: of the run; one dumped iteration if None.
        disk_bytes_per_second: what the disks take together, for the seconds of an iteration.

    Raises:
        FlexError: the configuration cannot be; a pattern matches nothing, or only what cannot be had; the
            process has groups already.
    """
    share, kept = _split_token_fraction(tokens)
    how: dict[str, Any] = {"every": every, "tokens": kept, "reduce": reduce, "dtype": dtype}
    dump = Dump("", sites, parameters=parameters, part_bytes=part_bytes, gradients=gradients, **how)
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, sequence_length, micro_batch_size))
        whole = describe_model(args)
    chosen = select_planned_sites(whole.sites, dump.sites)
    run = TensorSizes(whole, args, count_microbatches(args, microbatches), dump)
    return estimate_dump(
        whole.mesh,
        [*run.activations(chosen), *run.parameters(select_planned_parameters(whole.parameters, dump.parameters))],
        tokens=dump.tokens if share is None else share,
        reduce=reduce,
        every=every,
        iterations=1 if iterations is None else -(-iterations // every),
        disk=disk_bytes_per_second,
        part_bytes=part_bytes,
        hidden={s.name: s.hidden for s in chosen if s.hidden},
    )


def _split_token_fraction(tokens: Any) -> tuple[float | None, Any]:
    """A fraction of the tokens, or else what Dump takes."""
    if not isinstance(tokens, float):
        return None, tokens
    if not 0 < tokens <= 1:
        raise FlexError(f"tokens={tokens}: a fraction of the tokens is above 0 and at most 1")
    return tokens, None


def collect_overrides(
    mesh: Mapping[str, int] | None, world: int | None, length: int | None, size: int | None
) -> dict[str, Any]:
    """Megatron's names of what counts instead of the config's.

    Raises:
        FlexError: an axis that no mesh has.
    """
    for axis in mesh or {}:
        if axis not in AXIS_ARGUMENTS:
            raise FlexError(
                f"mesh has no axis {axis!r}{suggest_nearest(axis, AXIS_ARGUMENTS)}; its axes are {', '.join(AXIS_ARGUMENTS)}"
            )
    lengths = {"seq_length": length, "max_position_embeddings": length, "micro_batch_size": size}
    return {**(mesh or {}), "world_size": world, **lengths}


def count_microbatches(args: argparse.Namespace, requested: int | None) -> int:
    """How many each data parallel rank dumps."""
    samples = args.micro_batch_size * args.data_parallel_size
    there = int(args.global_batch_size // samples)
    if requested is not None and not 1 <= requested <= there:
        raise FlexError(f"microbatches={requested}: an iteration has {there} on each data parallel rank")
    return there if requested is None else requested


def _is_on_residual_stream(site: Site) -> bool:
    """Whether it is on the residual stream itself, not on what is added to it."""
    return bool(RESIDUAL_NAMES.fullmatch(site.name))


def select_planned_sites(sites: list[Site], patterns: Iterable[Pattern]) -> list[Site]:
    """Those meant, and hidden ones beside them; what the run would refuse is refused here."""
    table = SiteTable(sites)
    names: set[str] = set()
    for pattern in patterns:
        found = table.match(pattern, "output")
        hidden = [s for s in found if s.hidden]
        if hidden and (len(hidden) == len(found) or not _is_glob(pattern)):
            raise FlexError(f"{hidden[0].name} cannot be dumped: {hidden[0].hidden}")
        names |= {s.name for s in found}
    return [s for s in table if s.name in names]


def _is_glob(pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None


def select_planned_parameters(found: list[ParameterSite], patterns: Sequence[Pattern]) -> list[ParameterSite]:
    """Those meant; without copies of others that are among them."""
    as_sites = SiteTable(Site(p.name, p.layout, p.shape) for p in {p.name: p for p in found}.values())
    names = {s.name for pattern in patterns for s in as_sites.match(pattern)}
    return [p for p in found if p.name in names and p.copy_of not in names]


class TensorSizes:
    """Sizes of tensors in one run."""

    def __init__(self, whole: ModelDescription, args: argparse.Namespace, microbatches: int, dump: Dump) -> None:
        self.whole, self.args, self.microbatches, self.gradients = whole, args, microbatches, dump.gradients
        self.cast, self.config, self.sizes = dump.dtype, whole.config, dict(whole.mesh.sizes)
        self.lengths = {"s": args.seq_length, "b": args.micro_batch_size}
        self.lengths["heads"] = getattr(self.config, "linear_num_value_heads", None) or 0

    def activations(self, sites: Iterable[Site]) -> Iterator[EstimatedTensor]:
        """What passes at sites, and its gradients."""
        for site in sites:
            if site.hidden:
                continue
            held = self._rows(site) if isinstance(site.tap, ExpertRows) else self._dense(site)
            dtype = self.dtype(site)
            for kind in ("value", "gradient") if self.gradients and dtype.is_floating_point else ("value",):
                layout = held["layout"].gradient() if kind == "gradient" else held["layout"]
                yield EstimatedTensor(
                    **{**held, "layout": layout},
                    name=site.name,
                    kind=kind,
                    itemsize=self._written(dtype).itemsize,
                    weight=dtype.itemsize,
                    stage=site.stage,
                    chunk=site.chunk,
                    times=self.microbatches * self._calls(site),
                )

    def parameters(self, found: Iterable[ParameterSite]) -> Iterator[EstimatedTensor]:
        """Parameters when the step is over, and their reduced gradients."""
        for p in found:
            assert p.parameter is not None or p.owner, "one rank sees all parameters but other ranks' experts"
            expert = bool(p.owner)
            dtype = self.config.params_dtype if p.parameter is None else p.parameter.dtype
            kinds = {"parameter": dtype}
            if self.gradients:
                kept = getattr(self.args, "accumulate_allreduce_grads_in_fp32", False)
                kinds["parameter_gradient"] = torch.float32 if kept else dtype
            for kind, own in kinds.items():
                yield EstimatedTensor(
                    name=p.name,
                    kind=kind,
                    layout=p.layout,
                    shape=p.shape,
                    local=self._local_parameter(p),
                    itemsize=self._written(own).itemsize,
                    weight=own.itemsize,
                    stage=p.stage,
                    chunk=p.chunk,
                    replicated=("edp", "etp") if expert else ("dp", "cp", "tp"),
                    where=p.owner,
                )

    def _local_parameter(self, p: ParameterSite) -> tuple[int, ...]:
        if p.local:
            return tuple(p.local)
        if p.parameter is not None:
            return tuple(p.parameter.shape)
        return compute_local_shape(p.layout, p.shape, self.sizes)

    def _dense(self, site: Site) -> dict[str, Any]:
        """A tensor of all tokens."""
        shape = tuple(self._length(site, n) for n in site.shape)
        padded = tuple(
            self.whole.padded_vocabulary if name == "v" and site.module == "output_layer" else n
            for name, n in zip(site.dims, shape, strict=True)
        )
        return {"layout": site.layout, "shape": shape, "local": compute_local_shape(site.layout, padded, self.sizes)}

    def _length(self, site: Site, dim_length: int | str) -> int:
        if isinstance(dim_length, int):
            return dim_length
        times = re.fullmatch(r"(\d*)([a-z]+)", dim_length)
        if times and self.lengths.get(times[2]):
            return int(times[1] or 1) * int(self.lengths[times[2]])
        raise FlexError(
            f"{site.name}: the length of its dim {dim_length!r} follows from no configuration; leave it out"
        )

    def _rows(self, site: Site) -> dict[str, Any]:
        """A tensor of experts, with as many rows on each rank as even routing brings."""
        tap: Any = site.tap
        config, sizes = self.config, self.sizes
        mine = self.lengths["s"] * self.lengths["b"] / sizes["cp"]
        if config.sequence_parallel:
            mine /= sizes["tp"]
        rows = mine * config.moe_router_topk * sizes["etp"]
        where: tuple[tuple[str, int], ...] = ()
        if tap.expert is not None:
            each = config.num_moe_experts // sizes["ep"]
            rows, where = rows / each, (("ep", tap.expert // each),)
        local: list[float] = [rows]
        for dim in tap.layout.dims[1:]:
            width = site.shape[-1]
            assert isinstance(width, int), "the last dim of an expert's tensor is known"
            cut = 1
            for c in dim.cuts:
                cut *= sizes[c.axis]
            local.append(width // cut)
        shape = tuple(n if n == "t" else self._length(site, n) for n in site.shape)
        return {
            "layout": tap.layout,
            "shape": shape,
            "local": tuple(local),
            "replicated": ("etp",),
            "where": where,
            "expected": True,
        }

    def _calls(self, site: Site) -> int:
        """How often a tensor passes for each microbatch: depths of prediction ask the output layer too."""
        depths = getattr(self.config, "mtp_num_layers", None) or 0
        return 1 + depths if site.module in ("output_layer", "loss") else 1

    def _written(self, dtype: torch.dtype) -> torch.dtype:
        return self.cast if self.cast is not None and dtype.is_floating_point else dtype

    def dtype(self, site: Site) -> torch.dtype:
        """What a tensor has in the model."""
        config, own = self.config, self.config.params_dtype
        role = site.module.rpartition(".")[2]
        if role in ("router", "experts") and site.point in INTEGER_DTYPES:
            return INTEGER_DTYPES[site.point]
        if site.name == "loss:output":
            return own if self.args.fp16_lm_cross_entropy else torch.float32
        if (role, site.point) in ROUTER_POINTS and getattr(config, "moe_router_dtype", None) is not None:
            return ROUTER_DTYPES[config.moe_router_dtype]
        if (role, site.point) == ("self_attention", "g") or (
            getattr(config, "fp32_residual_connection", False) and _is_on_residual_stream(site)
        ):
            return torch.float32
        assert isinstance(own, torch.dtype), "Megatron's parameters have one dtype"
        return own
