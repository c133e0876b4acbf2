"""Estimates before a run: the size of a dump, the cost of hooks, and a page of both.

Estimates are computed from the model's sites and the sizes of their tensors in the run: from a Megatron
configuration alone, or from the model and the arguments of a run that is about to train.
"""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from megatron_flex import cpu
from megatron_flex.adapters import ParameterSite
from megatron_flex.adapters.megatron_core.moe_layers import RoutedRows, rows_of_experts
from megatron_flex.collectives import gather_distinct
from megatron_flex.dump import Dump
from megatron_flex.dump.dump_settings import check_fraction
from megatron_flex.dump.size_estimate import (
    DumpEstimate,
    EstimatedTensor,
    compute_local_shape,
    estimate_dump_size,
)
from megatron_flex.errors import FlexError, SiteError, suggest_nearest
from megatron_flex.estimate import (
    HookEstimate,
    HookSpec,
    Links,
    RunEstimate,
    estimate_run,
    parse_edit_hook,
    parse_read_hook,
)
from megatron_flex.estimate.session_estimate import estimate_registered_dump, estimate_statistics
from megatron_flex.launch.estimate.megatron_arguments import AXIS_ARGUMENTS, RunConfig, parse_arguments
from megatron_flex.launch.estimate.meta_model import ModelDescription, describe_model, silence_megatron
from megatron_flex.launch.rank_errors import run_or_raise_on_all
from megatron_flex.layout.gradient_layout import find_stored_gradient, layout_in_pass
from megatron_flex.model import FlexModel
from megatron_flex.page import Page, grid_of_sizes
from megatron_flex.page.site_estimates import estimate_sites
from megatron_flex.ranges import check_count, check_positive
from megatron_flex.sites import Pattern, Site, SiteTable
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.moments import MomentEntry, MomentTable
from megatron_flex.statistics.statistics_records import StatisticsKind

INTEGER_DTYPES = {"map": torch.bool, "indices": torch.int64}  # points of a layer of experts
RESIDUAL_NAMES = re.compile(
    r"embedding:output|decoder\.layers\.\d+(:(input|mid|output)|\.(input_layernorm|pre_mlp_layernorm|norm):input)"
    r"|decoder\.final_(layernorm|norm):input"
)
ROUTER_POINTS = (("router", "logits"), ("router", "probs"), ("experts", "weights"))
ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def estimate_dump(
    config: RunConfig,
    sites: Sequence[Pattern] | Pattern = (),
    *,
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    microbatches: int | None = None,
    tokens: Any = None,
    iterations: int | None = None,
    disk_bytes_per_second: float | None = None,
    **settings: Any,
) -> DumpEstimate:
    """Return the estimated size of a dump of a Megatron run.

    Megatron builds the model on meta tensors, stage by stage, in this process, which must not have process
    groups and has none afterwards; the adapter returns the sites. Data parallel ranks are only counted.

    Args, beside those of Dump (`parameters`, `gradients`, `dtype`, `reduce`, `every`, ...):
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        mesh: sizes that override the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: the number of ranks; by default from `dp`, or with the smallest data parallel size that
            fits.
        sequence_length, micro_batch_size: override the config's.
        microbatches: the number that each data parallel rank dumps; by default all of `global_batch_size`.
        tokens: as in Dump, or a fraction below 1.
        iterations: the iterations of the run; one dumped iteration if None.
        disk_bytes_per_second: the bandwidth of all disks together, for the seconds of an iteration.

    Raises:
        FlexError: the configuration is invalid; a pattern matches nothing, or only hidden sites; the process
            has groups already.

    Examples:
        >>> from megatron_flex.launch.estimate import estimate_dump
        >>> size = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
        >>> run = {**size, "micro_batch_size": 2, "max_position_embeddings": 32, "vocab_size": 256}
        >>> estimate = estimate_dump(run, "decoder.layers.*", mesh={"tp": 2, "dp": 4})
        >>> estimate.ranks, estimate.total_bytes
        (8, 262144)
    """
    share, kept = _split_token_fraction(tokens)
    runs = 1 if iterations is None else check_count("iterations", iterations)
    disk = (
        None
        if disk_bytes_per_second is None
        else check_positive("disk_bytes_per_second", disk_bytes_per_second)
    )
    dump = Dump("dump", sites, tokens=kept, **settings)
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, sequence_length, micro_batch_size))
        model = describe_model(args)
    chosen = select_estimated_sites(model.sites, dump.sites)
    run = TensorSizes(model, args, count_microbatches(args, microbatches), dump)
    return estimate_dump_size(
        model.mesh,
        [
            *run.activations(chosen),
            *run.parameters(select_estimated_parameters(model.parameters, dump.parameters)),
        ],
        dump,
        share=share,
        iterations=1 if iterations is None else -(-runs // dump.every),
        disk=disk,
        hidden={s.name: s.hidden for s in chosen if s.hidden},
    )


def _split_token_fraction(tokens: Any) -> tuple[float | None, Any]:
    """A fraction of the tokens, or the value for Dump."""
    if not isinstance(tokens, float):
        return None, tokens
    return check_fraction(tokens, "tokens"), None


def collect_overrides(
    mesh: Mapping[str, int] | None, world: int | None, length: int | None, size: int | None
) -> dict[str, Any]:
    """The overrides of the config, by Megatron's argument names.

    Raises:
        FlexError: an axis does not exist.
    """
    for axis in mesh or {}:
        if axis not in AXIS_ARGUMENTS:
            raise FlexError(
                f"mesh has no axis {axis!r}{suggest_nearest(axis, AXIS_ARGUMENTS)}; its axes are "
                f"{', '.join(AXIS_ARGUMENTS)}"
            )
    lengths = {"seq_length": length, "max_position_embeddings": length, "micro_batch_size": size}
    return {**(mesh or {}), "world_size": world, **lengths}


def count_microbatches(args: argparse.Namespace, requested: int | None) -> int:
    """The number of microbatches that each data parallel rank dumps."""
    samples = args.micro_batch_size * args.data_parallel_size
    there = int(args.global_batch_size // samples)
    if requested is not None and not 1 <= requested <= there:
        raise FlexError(f"microbatches={requested}: an iteration has {there} on each data parallel rank")
    return there if requested is None else requested


def _is_on_residual_stream(site: Site) -> bool:
    """Whether a site is on the residual stream itself, not on a tensor added to the stream."""
    return bool(RESIDUAL_NAMES.fullmatch(site.name))


def select_estimated_sites(sites: list[Site], patterns: Iterable[Pattern]) -> list[Site]:
    """The matching sites, hidden ones included; raises where the run would."""
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


def select_estimated_parameters(
    found: list[ParameterSite], patterns: Sequence[Pattern]
) -> list[ParameterSite]:
    """The matching parameters, without copies of other matching parameters."""
    as_sites = SiteTable(Site(p.name, p.layout, p.shape) for p in {p.name: p for p in found}.values())
    names = {s.name for pattern in patterns for s in as_sites.match(pattern)}
    return [p for p in found if p.name in names and p.copy_of not in names]


class TensorSizes:
    """Sizes of tensors in one run."""

    def __init__(
        self, model: ModelDescription, args: argparse.Namespace, microbatches: int, dump: Dump
    ) -> None:
        self.model, self.args, self.microbatches, self.gradients = model, args, microbatches, dump.gradients
        self.cast, self.config, self.sizes = dump.dtype, model.config, dict(model.mesh.sizes)
        self.lengths = {"s": args.seq_length, "b": args.micro_batch_size}
        self.lengths["heads"] = getattr(self.config, "linear_num_value_heads", None) or 0

    def activations(self, sites: Iterable[Site]) -> Iterator[EstimatedTensor]:
        """The activations at sites, and their gradients."""
        for site in sites:
            if site.hidden:
                continue
            routed = rows_of_experts(site)
            held = self._dense(site) if routed is None else self._rows(site, routed)
            dtype = self.dtype(site)
            for kind in ("value", "gradient") if self.gradients and dtype.is_floating_point else ("value",):
                layout = layout_in_pass(held["layout"], kind == "gradient")
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
        """Parameters after the step, and their reduced gradients."""
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
                    layout=p.layout if kind == "parameter" else find_stored_gradient(p.layout, reduced=True),
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
            self.model.padded_vocabulary if name == "v" and site.module == "output_layer" else n
            for name, n in zip(site.dims, shape, strict=True)
        )
        return {
            "layout": site.layout,
            "shape": shape,
            "local": compute_local_shape(site.layout, padded, self.sizes),
        }

    def _length(self, site: Site, dim_length: int | str) -> int:
        if isinstance(dim_length, int):
            return dim_length
        times = re.fullmatch(r"(\d*)([a-z]+)", dim_length)
        if times and self.lengths.get(times[2]):
            return int(times[1] or 1) * int(self.lengths[times[2]])
        raise FlexError(
            f"{site.name}: the length of its dim {dim_length!r} follows from no configuration; leave it out"
        )

    def _rows(self, site: Site, routed: RoutedRows) -> dict[str, Any]:
        """A tensor of experts, with the number of rows on each rank under even routing."""
        config, sizes = self.config, self.sizes
        mine = self.lengths["s"] * self.lengths["b"] / sizes["cp"]
        if config.sequence_parallel:
            mine /= sizes["tp"]
        rows = mine * config.moe_router_topk * sizes["etp"]
        where: tuple[tuple[str, int], ...] = ()
        if routed.expert is not None:
            each = config.num_moe_experts // sizes["ep"]
            rows, where = rows / each, (("ep", routed.expert // each),)
        local: list[float] = [rows]
        for dim in routed.layout.dims[1:]:
            width = site.shape[-1]
            assert isinstance(width, int), "the last dim of an expert's tensor is known"
            cut = 1
            for c in dim.cuts:
                cut *= sizes[c.axis]
            local.append(width // cut)
        shape = tuple(n if n == "t" else self._length(site, n) for n in site.shape)
        return {
            "layout": routed.layout,
            "shape": shape,
            "local": tuple(local),
            "replicated": ("etp",),
            "where": where,
            "expected": True,
        }

    def _calls(self, site: Site) -> int:
        """The number of calls for each microbatch: multi-token prediction calls the output layer too."""
        depths = getattr(self.config, "mtp_num_layers", None) or 0
        return 1 + depths if site.module in ("output_layer", "loss") else 1

    def _written(self, dtype: torch.dtype) -> torch.dtype:
        return self.cast if self.cast is not None and dtype.is_floating_point else dtype

    def dtype(self, site: Site) -> torch.dtype:
        """The dtype of a site's tensor in the model."""
        config, own = self.config, self.config.params_dtype
        role = site.module.rpartition(".")[2]
        if role in ("router", "experts") and site.point in INTEGER_DTYPES:
            return INTEGER_DTYPES[site.point]
        if (role, site.point) == ("word_embeddings", "input"):  # token ids
            return torch.int64
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


ROUTED_ROWS_REASON = "its rows go where the router sends them, which only the data tell"


def estimate_hooks(
    config: RunConfig,
    *,
    read: Sequence[str | HookSpec] | str = (),
    edit: Sequence[str | HookSpec] | str = (),
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    sequence_length: int | None = None,
    micro_batch_size: int | None = None,
    microbatches: int | None = None,
    links: Links | None = None,
    dump: Dump | None = None,
    statistics: Statistics | None = None,
) -> RunEstimate:
    """Estimate the cost of hooks in a Megatron run: bytes by link, collectives, memory, seconds.

    Megatron builds the model on meta tensors in this process, which must not have process groups and has none
    afterwards; `docs/contributing/performance.md` has the formulae.

    Args, in addition to those of `estimate_dump`:
        read: the captures, as text: `PATTERN`, `PATTERN@gradient`, `PATTERN@positions=-1`, `PATTERN@mean=s`.
        edit: the edits and their kinds: `PATTERN=general`, `PATTERN=local`, `PATTERN=linear:4`, or a preset
            as in `PATTERN=scale=1.01`, which determines its kind.
        microbatches: the number in a step; by default all of `global_batch_size`.
        links: the bandwidths of the links, and the number of ranks on a node.
        dump: the dump of a step that is dumped; activations only, without parameters.
        statistics: the statistics of a step that is measured; without parameters.

    Returns:
        The estimate.

    Raises:
        FlexError: the configuration is invalid; a pattern matches nothing, or only hidden sites; a hook is
            malformed or not possible at its site; the process has groups already.

    Examples:
        >>> from megatron_flex.launch.estimate import estimate_hooks
        >>> size = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
        >>> run = {**size, "micro_batch_size": 2, "max_position_embeddings": 32, "vocab_size": 256}
        >>> estimate = estimate_hooks(run, read="decoder.layers.*", mesh={"tp": 2})
        >>> estimate.slowest.role, estimate.slowest.moved.pcie  # bytes of a step
        ('leader', 65536)
    """
    hooks = [*_parse_hooks(read, parse_read_hook), *_parse_hooks(edit, parse_edit_hook)]
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, sequence_length, micro_batch_size))
        description = describe_model(args)
    uncounted: dict[str, str] = {}
    number, links = count_microbatches(args, microbatches), links or Links()
    found = list(_match_hooks_to_tensors(hooks, description, args, number, uncounted))
    more: list[HookEstimate] = []
    if dump is not None:
        tensors = TensorSizes(description, args, number, dump).activations(
            select_estimated_sites(description.sites, dump.sites)
        )
        more += estimate_registered_dump(dump, list(tensors), description.mesh)
    if statistics is not None:
        more.append(_estimate_statistics(statistics, description, links))
    return estimate_run(
        description.mesh, found, links, uncounted, description.config.num_attention_heads, more
    )


def _estimate_statistics(statistics: Statistics, description: ModelDescription, links: Links) -> HookEstimate:
    """The cost of statistics of sites."""
    sites = [s for s in select_estimated_sites(description.sites, statistics.sites) if not s.hidden]
    kinds: list[StatisticsKind] = ["value", "gradient"] if statistics.gradients else ["value"]
    entries = tuple(MomentEntry(s.name, kind, s.stage) for s in sites for kind in kinds)
    ranks = prod(a.size for a in description.mesh if a.name != "pp")
    table = MomentTable(entries, ranks, statistics.histogram)
    return estimate_statistics(f"statistics in {statistics.path}", table.sends, description.mesh, links)


def _parse_hooks(hooks: Sequence[str | HookSpec] | str, parse: object) -> list[HookSpec]:
    assert callable(parse)
    words = [hooks] if isinstance(hooks, str) else hooks
    return [parse(w) if isinstance(w, str) else w for w in words]


def _match_hooks_to_tensors(
    hooks: Iterable[HookSpec],
    description: ModelDescription,
    args: argparse.Namespace,
    microbatches: int,
    uncounted: dict[str, str],
) -> Iterator[tuple[HookSpec, Site, EstimatedTensor]]:
    """Each hook at each matching tensor whose size follows from the configuration."""
    table = SiteTable(description.sites)
    run = TensorSizes(description, args, microbatches, Dump("", "**", gradients=True))
    for hook in hooks:
        sites = table.match(hook.pattern, "output")
        bars = {s.name: ROUTED_ROWS_REASON if rows_of_experts(s) else s.hidden for s in sites}
        there = [s for s in sites if not bars[s.name]]
        if not there:
            raise SiteError(f"{sites[0].name}: it cannot be estimated: {bars[sites[0].name]}")
        uncounted.update({name: why for name, why in bars.items() if why})
        kind = "gradient" if hook.gradient else "value"
        by_name = {s.name: s for s in there}
        held = [h for h in run.activations(there) if h.kind == kind]
        if not held:
            raise SiteError(f"{there[0].name} has no gradient: its entries are whole numbers")
        for tensor in held:
            yield hook, by_name[tensor.name], tensor


def estimate_live_dump(flex: FlexModel, args: Namespace, dump: Dump) -> DumpEstimate:
    """Estimate the size of a dump. Collective over the mesh; the same result on all ranks.

    Args:
        flex: the model.
        args: Megatron's validated arguments.
        dump: the settings of the dump; samples that the dump leaves out are counted too.

    Raises:
        FlexError: on all ranks: a pattern matches nothing or only hidden sites, or a size does not follow
            from the configuration.
    """
    session = flex.session
    mesh, own = session.mesh, session.taps.own
    chosen = select_estimated_sites(list(session.sites), dump.sites)
    here = [*session.adapter.parameters(), *session.adapter.buffers()]
    all_parameters = [*session.parameters.index.all_copies(), *session.parameters.buffers.all_copies()]
    wanted = {p.name for p in select_estimated_parameters(all_parameters, dump.parameters)}
    numbers = range(args.iteration, args.train_iters or 0)
    run = TensorSizes(
        _describe_live_model(flex),
        args,
        sum(dump.wants_microbatch(n) for n in range(count_microbatches(args, None))),
        dump,
    )

    def ask() -> list[EstimatedTensor]:
        mine = [own[s.name] for s in chosen if s.name in own]
        return [*run.activations(mine), *run.parameters(p for p in here if p.name in wanted)]

    tensors_of_ranks = gather_distinct(run_or_raise_on_all(mesh, ask), mesh)
    held: dict[tuple[str, str], EstimatedTensor] = {}
    for tensor in (t for tensors in tensors_of_ranks for t in tensors):
        held.setdefault((tensor.name, tensor.kind), tensor)
    places = {name: n for n, name in enumerate([s.name for s in chosen] + [p.name for p in all_parameters])}
    return estimate_dump_size(
        mesh,
        sorted(held.values(), key=lambda t: places[t.name]),
        dump,
        iterations=sum(dump.wants_iteration(n) for n in numbers),
        hidden={s.name: s.hidden for s in chosen if s.hidden},
    )


def _describe_live_model(flex: FlexModel) -> ModelDescription:
    """The description of a model for estimates."""
    chunks: Any = [m for chunk in flex.chunks for m in chunk.modules() if hasattr(m, "config")]
    padded = max((int(getattr(m, "vocab_size", 0)) for m in chunks), default=0)
    return ModelDescription(flex.session.mesh, chunks[0].config, padded)


def make_configuration_page(
    config: RunConfig,
    *,
    match: Pattern = "**",
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    links: Links | None = None,
    title: str = "",
) -> Page:
    """The data of a page for a configuration, without weights, GPU or ranks.

    Args:
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        match: the pattern of the sites to show, as for `flex.sites()`.
        mesh: sizes that override the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: the number of ranks; by default from `dp`, or with the smallest data parallel size that
            fits.
        links: the number of ranks on a node.
        title: the title of the page; by default the model's sizes.

    Raises:
        FlexError: the configuration is invalid; the process has groups already; the pattern matches nothing.
    """
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, None, None))
        description = describe_model(args)
    sites = SiteTable(description.sites).match(match)
    run = TensorSizes(description, args, 1, Dump("", "**"))
    known: dict[object, EstimatedTensor | str] = {}

    def held(site: Site) -> EstimatedTensor | str:
        if rows_of_experts(site):
            return ROUTED_ROWS_REASON
        key = (site.module.rpartition(".")[2], site.point, site.layout, site.shape)
        if key not in known:
            try:
                known[key] = next(run.activations([site]))
            except FlexError as error:
                known[key] = str(error)
        return known[key]

    sizes = {axes: {a.name: a.size for a in getattr(description.mesh, axes)} for axes in ("axes", "experts")}
    grid = grid_of_sizes(sizes["axes"], sizes["experts"])
    heading = (
        title
        or f"{args.num_layers or sum(description.layers.values())} layers × {description.config.hidden_size}"
    )
    estimates = estimate_sites(sites, held, grid, links)
    return Page(heading, grid, [s.remote() for s in sites], estimates=estimates)
