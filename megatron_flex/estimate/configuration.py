"""Estimates before a run, from its configuration alone: the size of a dump, and what hooks cost.

Megatron builds the model on meta tensors, stage by stage, in this process, which must not have process groups
and has none afterwards; the adapter returns the hook points. Data parallel ranks are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from megatron_flex import cpu
from megatron_flex.dump import Dump
from megatron_flex.dump.dump_settings import check_fraction
from megatron_flex.errors import FlexError, SiteError, suggest_nearest
from megatron_flex.estimate.dump_estimate import DumpEstimate, estimate_dump_size
from megatron_flex.estimate.hook_estimate import Links
from megatron_flex.estimate.hook_notation import HookSpec, parse_edit_hook, parse_read_hook
from megatron_flex.estimate.megatron_arguments import AXIS_ARGUMENTS, RunConfig, parse_arguments
from megatron_flex.estimate.meta_model import describe_model, silence_megatron
from megatron_flex.estimate.run_estimate import (
    HookEstimate,
    RunEstimate,
    estimate_dump_rows,
    estimate_run,
    estimate_statistics,
)
from megatron_flex.estimate.tensor_sizes import (
    ROUTED_ROWS,
    EstimatedTensor,
    TensorSizes,
    count_microbatches,
    megatron_dtype,
    select_estimated_parameters,
    select_estimated_sites,
)
from megatron_flex.ranges import check_count, check_positive
from megatron_flex.sites import Pattern, Site, SiteTable
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.moments import MomentEntry, MomentTable
from megatron_flex.statistics.statistics_records import StatisticsKind

Hooks = Sequence[str | HookSpec] | str


class ConfiguredRun:
    """A run that has not begun, by its configuration.

    Args:
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        mesh: sizes that override the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: the number of ranks; by default from `dp`, or with the smallest data parallel size that
            fits.
        sequence_length, micro_batch_size: override the config's.
        microbatches: the number that each data parallel rank has in a step; by default all of
            `global_batch_size`.

    Attributes:
        args: Megatron's validated arguments.
        model: its mesh, hook points and parameters.
        sizes: of its tensors.

    Raises:
        FlexError: the configuration is invalid; the process has process groups already.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        mesh: Mapping[str, int] | None = None,
        world_size: int | None = None,
        sequence_length: int | None = None,
        micro_batch_size: int | None = None,
        microbatches: int | None = None,
    ) -> None:
        for axis in mesh or {}:
            if axis not in AXIS_ARGUMENTS:
                raise FlexError(
                    f"mesh has no axis {axis!r}{suggest_nearest(axis, AXIS_ARGUMENTS)}; its axes are "
                    f"{', '.join(AXIS_ARGUMENTS)}"
                )
        changes = {
            **(mesh or {}),
            "world_size": world_size,
            "seq_length": sequence_length,
            "max_position_embeddings": sequence_length,
            "micro_batch_size": micro_batch_size,
        }
        with cpu.runtime(force=True), silence_megatron():
            args = parse_arguments(config, changes)
            model = describe_model(args)
        self.args, self.model = args, model
        heads = getattr(model.config, "linear_num_value_heads", None) or 0
        self.sizes = TensorSizes(
            model.mesh.sizes,
            {"s": args.seq_length, "b": args.micro_batch_size, "heads": heads},
            partial(
                megatron_dtype,
                config=model.config,
                dtype=model.config.params_dtype,
                fp32_loss=not args.fp16_lm_cross_entropy,
            ),
            count_microbatches(args, microbatches),
            model.padded_vocabulary,
            model.config,
            even_routing=True,
            gradient_dtype=torch.float32 if args.accumulate_allreduce_grads_in_fp32 else None,
        )

    def estimate_dump(
        self,
        dump: Dump,
        *,
        share: float | None = None,
        iterations: int | None = None,
        disk_bytes_per_second: float | None = None,
    ) -> DumpEstimate:
        """The size of a dump.

        Args:
            dump: its settings.
            share: the fraction of the tokens that is kept, instead of the dump's `tokens`.
            iterations: the iterations of the run; one dumped iteration if None.
            disk_bytes_per_second: the bandwidth of all disks together, for the seconds of an iteration.

        Raises:
            FlexError: a pattern matches nothing, or only hidden sites.
        """
        runs = 1 if iterations is None else check_count("iterations", iterations)
        if disk_bytes_per_second is not None:
            check_positive("disk_bytes_per_second", disk_bytes_per_second)
        sites = select_estimated_sites(self.model.sites, dump.sites)
        parameters = select_estimated_parameters(self.model.parameters, dump.parameters)
        return estimate_dump_size(
            self.model.mesh,
            self.sizes.of_dump(sites, parameters, dump.gradients),
            dump,
            share=share,
            iterations=1 if iterations is None else -(-runs // dump.every),
            disk=disk_bytes_per_second,
            hidden={s.name: s.hidden for s in sites if s.hidden},
        )

    def estimate_hooks(
        self,
        read: Hooks = (),
        edit: Hooks = (),
        *,
        links: Links | None = None,
        dump: Dump | None = None,
        statistics: Statistics | None = None,
    ) -> RunEstimate:
        """The cost of hooks in a step; arguments as for the function `estimate_hooks`."""
        links, mesh = links or Links(), self.model.mesh
        specs = [*_parse_hooks(read, parse_read_hook), *_parse_hooks(edit, parse_edit_hook)]
        uncounted: dict[str, str] = {}
        hooks = [estimate for spec in specs for estimate in self._at_tensors(spec, uncounted)]
        sinks: list[HookEstimate] = []
        if dump is not None:
            sites = select_estimated_sites(self.model.sites, dump.sites)
            sinks += estimate_dump_rows(dump, list(self.sizes.of_dump(sites, (), dump.gradients)), mesh)
        if statistics is not None:
            sites = select_estimated_sites(self.model.sites, statistics.sites)
            kinds: list[StatisticsKind] = ["value", "gradient"] if statistics.gradients else ["value"]
            entries = tuple(
                MomentEntry(s.name, kind, s.stage) for s in sites if not s.hidden for kind in kinds
            )
            table = MomentTable(entries, prod(a.size for a in mesh if a.name != "pp"), statistics.histogram)
            sinks.append(estimate_statistics(statistics.path, table.sends, mesh, links))
        heads = self.model.config.num_attention_heads
        return estimate_run(mesh, hooks, links, uncounted, heads, sinks)

    def _at_tensors(
        self, hook: HookSpec, uncounted: dict[str, str]
    ) -> list[tuple[HookSpec, Site, EstimatedTensor]]:
        """A hook at each matching tensor whose size follows from the configuration."""
        sites = SiteTable(self.model.sites).match(hook.pattern, "output")
        out: list[tuple[HookSpec, Site, EstimatedTensor]] = []
        reasons: dict[str, str] = {}
        for site in sites:
            if site.hidden:
                reasons[site.name] = site.hidden
                continue
            tensor = self.sizes.activation(site, "gradient" if hook.gradient else "value")
            if tensor.expected:
                reasons[site.name] = ROUTED_ROWS
            elif tensor.dtype.is_floating_point or not hook.gradient:
                out.append((hook, site, tensor))
        if not out and len(reasons) == len(sites):
            raise SiteError(f"{sites[0].name}: it cannot be estimated: {reasons[sites[0].name]}")
        if not out:
            raise SiteError(f"{sites[0].name} has no gradient: its entries are whole numbers")
        uncounted.update(reasons)
        return out


def _parse_hooks(hooks: Hooks, parse: Callable[[str], HookSpec]) -> list[HookSpec]:
    several = [hooks] if isinstance(hooks, str) else hooks
    return [parse(hook) if isinstance(hook, str) else hook for hook in several]


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
        >>> from megatron_flex.estimate import estimate_dump
        >>> size = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
        >>> run = {**size, "micro_batch_size": 2, "max_position_embeddings": 32, "vocab_size": 256}
        >>> estimate = estimate_dump(run, "decoder.layers.*", mesh={"tp": 2, "dp": 4})
        >>> estimate.ranks, estimate.total_bytes
        (8, 262144)
    """
    share = check_fraction(tokens, "tokens") if isinstance(tokens, float) else None
    dump = Dump("dump", sites, tokens=tokens if share is None else None, **settings)
    run = ConfiguredRun(
        config,
        mesh=mesh,
        world_size=world_size,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
    )
    return run.estimate_dump(
        dump, share=share, iterations=iterations, disk_bytes_per_second=disk_bytes_per_second
    )


def estimate_hooks(
    config: RunConfig,
    *,
    read: Hooks = (),
    edit: Hooks = (),
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

    `docs/contributing/performance.md` has the formulae.

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
        >>> from megatron_flex.estimate import estimate_hooks
        >>> size = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
        >>> run = {**size, "micro_batch_size": 2, "max_position_embeddings": 32, "vocab_size": 256}
        >>> estimate = estimate_hooks(run, read="decoder.layers.*", mesh={"tp": 2})
        >>> estimate.slowest.role, estimate.slowest.moved.pcie  # bytes of a step
        ('leader', 65536)
    """
    run = ConfiguredRun(
        config,
        mesh=mesh,
        world_size=world_size,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
    )
    return run.estimate_hooks(read, edit, links=links, dump=dump, statistics=statistics)
