"""Registration of dumps, statistics and the search for values that are not finite: what they record."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from megatron_flex.adapters import training_writers
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.dump import Dump
from megatron_flex.errors import FlexWarning, HookError, list_some
from megatron_flex.gpt_names import layer_pattern
from megatron_flex.handles import Handle
from megatron_flex.layout import TENSOR_AXIS, is_partial
from megatron_flex.layout.gradient_layout import layout_in_pass
from megatron_flex.mesh import Mesh
from megatron_flex.model.argument_checks import check_sink, explain_other_names
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime import Session
from megatron_flex.runtime.dump_sink import DumpSelection, DumpSink, make_manifest
from megatron_flex.runtime.features.feature_exchange import OnFeatures
from megatron_flex.runtime.features.feature_plan import NAMED_RECEIVERS, FeatureRequest, Receivers
from megatron_flex.runtime.features.features import Features
from megatron_flex.runtime.features.receiving_ranks import is_group
from megatron_flex.runtime.nonfinite_sink import NonFiniteSink
from megatron_flex.runtime.parameter_selection import select_buffers, select_parameters
from megatron_flex.runtime.session_sinks import Sink as SessionSink
from megatron_flex.runtime.session_sinks import SinkSettings
from megatron_flex.runtime.sink_cycle import DUMP_PURPOSE, NONFINITE_PURPOSE, STATISTICS_PURPOSE, SinkPurpose
from megatron_flex.runtime.statistics_sink import (
    StatisticsSelection,
    StatisticsSink,
    make_header,
    open_on_all_ranks,
)
from megatron_flex.sites import GRADIENT_SUFFIX, Pattern, Site
from megatron_flex.statistics import Statistics, open_writers
from megatron_flex.statistics.statistics_records import Sink

INDEXED_POINT = re.compile(r"(.+:.+)\[(\d+)\]")  # a point, and the index of one of its tensors
MAX_NAMES_SHOWN = 8  # names in one warning
HALF_FLAGS = {"bfloat16": "bf16", "float16": "fp16"}  # dtypes, and the flags of Megatron's config for them


def select_sink_sites(
    session: Session,
    patterns: Sequence[Pattern],
    purpose: SinkPurpose,
    bars: Callable[[Site], str] | None = None,
) -> tuple[tuple[Site, ...], frozenset[str]]:
    """Return the hook points that patterns select, in model order, and which of them were named exactly.

    Hook points that match a pattern but are unavailable are left out, with a warning.

    Args:
        session: the session whose hook points are searched.
        patterns: names and patterns.
        purpose: the sink that uses the hook points.
        bars: returns a reason why a hook point is unavailable, or an empty string.

    Raises:
        SiteError: a pattern matches nothing.
        HookError: a named hook point, or all that a pattern matches, is unavailable.
    """
    local_sites = session.taps.local_sites
    selected: dict[str, set[int]] = {}
    exact: set[str] = set()
    barred: dict[str, str] = {}
    for pattern in patterns:
        name, index = _split_index(pattern)
        matched = session.sites.match(name, "output")
        why = {s.name: s.hidden or (bars(s) if bars else "") for s in matched}
        barred |= {site: reason for site, reason in why.items() if reason}
        free = [s for s in matched if not why[s.name]]
        if not free or (len(free) < len(matched) and not _is_glob(name)):
            first = next(s for s in matched if why[s.name])
            raise HookError(f"no hook can be registered at {first.name}: {why[first.name]}", site=first.name)
        for site in free:
            selected.setdefault(site.name, set()).add(index)
        exact |= set() if _is_glob(name) else {s.leaf(index).name for s in free}
    warn_left_out(barred, purpose)
    sites = [s.leaf(i) for s in session.sites if s.name in selected for i in sorted(selected[s.name])]
    _warn_assumed_replicated(session, sites, purpose)
    return tuple(
        replace(s, tap=local_sites[s.place].tap) if s.place in local_sites else s for s in sites
    ), frozenset(exact)


def warn_left_out(barred: dict[str, str], purpose: SinkPurpose) -> None:
    """Warn of the hook points that are left out, with the reasons."""
    if barred:
        reasons = list_some([f"{name}: {why}" for name, why in barred.items()], MAX_NAMES_SHOWN, "; ")
        warnings.warn(f"left out of {purpose.what}: {reasons}", FlexWarning, stacklevel=5)


def _warn_assumed_replicated(session: Session, sites: list[Site], purpose: SinkPurpose) -> None:
    """Warn of hook points of plain modules whose tensors may be shards, as no layout describes them."""
    expected, cut = session.registry.expected, session.mesh[TENSOR_AXIS].size > 1
    names = [s.name for s in sites if cut and s.inferred and not s.propagated and expected(s.name) is None]
    if names:
        warnings.warn(
            f"{names[0]} and other hook points of plain modules ({len(names)} in all) are {purpose.done} as "
            "if every tensor parallel rank had the full tensor; give a hook with expected_shape where it has "
            "a shard",
            FlexWarning,
            stacklevel=5,
        )


def _split_index(pattern: Pattern) -> tuple[Pattern, int]:
    """Split a pattern into the pattern without a tensor's index, and that index."""
    match = INDEXED_POINT.fullmatch(pattern) if isinstance(pattern, str) else None
    return (match.group(1), int(match.group(2))) if match else (pattern, 0)


def _is_glob(pattern: Pattern) -> bool:
    return not isinstance(pattern, str) or re.search(r"[*?\[]", pattern) is not None


def register_dump(session: Session, dump: Dump, module: nn.Module) -> Handle:
    """Open a dump, and register its hooks. Collective.

    Args:
        session: the session of the model.
        dump: the settings.
        module: this rank's first module, whose configuration the dump records.
    """
    session.check_open()
    check_sink(dump, Dump, "register_dump")
    with explain_other_names(session, lambda: dump.sites):
        sites, exact = select_sink_sites(session, dump.sites, DUMP_PURPOSE)
    index, buffer_index = session.parameters.index, session.parameters.buffers
    buffers = select_buffers(buffer_index, dump.parameters)
    selected = select_parameters(index, dump.parameters, buffers=buffers.names)
    chosen = DumpSelection(
        sites,
        exact,
        selected if selected.names else None,
        buffers if buffers.names else None,
        {**selected.left_out, **buffers.left_out},
    )
    # A wrapper may have a config of its own: DeepSpeed's engine has that of DeepSpeed.
    config = getattr(unwrap(module), "config", getattr(session.adapter, "config", None))
    manifest = make_manifest(dump, session.adapter.name, session.mesh, chosen, index.first_copies(), config)
    opened = partial(DumpSink.open, dump, chosen, session.mesh, session.clock, manifest)
    return _register_hooks(session, session.sinks.add(DumpSink, dump.path, dump.describe(), opened))


def register_statistics(
    session: Session, statistics: Statistics, module: nn.Module, sink: Sink | None = None
) -> Handle:
    """Open statistics, and register their hooks. Collective. Arguments as for `register_dump`.

    `sink` receives the numbers instead of files, if one is given.
    """
    session.check_open()
    check_sink(statistics, Statistics, "register_statistics")
    mesh = session.mesh
    with explain_other_names(session, lambda: statistics.sites):
        values, exact = select_sink_sites(
            session, statistics.sites, STATISTICS_PURPOSE, partial(_explain_unmeasurable, mesh)
        )
    gradients = _select_gradients(mesh, values, exact) if statistics.gradients else ()
    parameters = select_parameters(session.parameters.index, statistics.parameters, STATISTICS_PURPOSE.what)
    selected = StatisticsSelection(values, gradients, exact, parameters if parameters.names else None)

    def opened() -> StatisticsSink:
        open_sink = (
            partial(_open_files, session, statistics, selected, module) if sink is None else lambda: sink
        )
        writers = open_on_all_ranks(open_sink, mesh)
        return StatisticsSink(statistics, selected, mesh, session.clock, session.sinks.reduction, writers)

    described = f"{statistics.describe()}: {selected.digest()}"
    return _register_hooks(session, session.sinks.add(StatisticsSink, statistics.path, described, opened))


def register_nonfinite(session: Session, settings: NonFinite) -> Handle:
    """Watch hook points for values that are not finite. Collective."""
    session.check_open()
    check_sink(settings, NonFinite, "register_nonfinite")
    if settings.sites:
        with explain_other_names(session, lambda: settings.sites):
            values, _ = select_sink_sites(session, settings.sites, NONFINITE_PURPOSE)
    else:
        local_sites = session.taps.local_sites
        free = [s for s in session.sites if not s.hidden]
        values = tuple(replace(s, tap=local_sites[s.name].tap) if s.name in local_sites else s for s in free)
    gradients = tuple(s for s in values if not s.read_only_reason) if settings.gradients else ()
    adapter = session.adapter

    def opened() -> NonFiniteSink:
        return NonFiniteSink(
            settings, values, gradients, session.parameters.index, session.clock, adapter.loss_scale
        )

    return _register_hooks(session, session.sinks.add(NonFiniteSink, None, settings.describe(), opened))


def remove_sink(session: Session, settings: SinkSettings) -> None:
    """Remove the hooks of a sink, once all is written. Collective."""
    session.check_open()
    for hook in session.sinks.remove(settings).hooks:
        session.hooks.remove(hook)


def _register_hooks(session: Session, sink: SessionSink) -> Handle:
    """Register the hooks of a sink; the handle removes them."""
    settings = sink.settings
    for hook in sink.hooks:
        session.hooks.add(hook)
    remove = partial(remove_sink, session, settings)
    return Handle(remove, repr(settings), lambda: session.open and session.sinks.has(settings))


def _open_files(
    session: Session, statistics: Statistics, selected: StatisticsSelection, module: nn.Module
) -> Sink:
    """Open the files, on the first rank, and the framework's writers, on the ranks that have them."""
    copies = session.parameters.index.first_copies()
    parameters = [copies[name] for name in ([] if selected.parameters is None else selected.parameters.names)]
    model = _describe_model(session, module)
    header = make_header(statistics, session.adapter.name, session.mesh, selected.values, parameters, model)
    first = session.mesh.is_first(a.name for a in session.mesh)
    return open_writers(statistics, header, first, training_writers)


def _describe_model(session: Session, module: nn.Module) -> dict[str, Any]:
    """The compute dtype, width, depth and layers of the model, as far as the framework has them."""
    config = getattr(module, "config", getattr(session.adapter, "config", None))
    half = next((n for n, attribute in HALF_FLAGS.items() if getattr(config, attribute, False)), None)
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = half or ("" if weight is None else str(weight.dtype).removeprefix("torch."))
    sizes = {n: getattr(config, n, None) for n in ("hidden_size", "num_layers")}
    layers = layer_pattern(session.parameters.index.sites)
    return {"dtype": dtype, **{n: v for n, v in sizes.items() if isinstance(v, int)}, "layers": layers}


def _explain_unmeasurable(mesh: Mesh, site: Site) -> str:
    """Why a hook point cannot be measured; empty if it can."""
    if not site.inferred and is_partial(site.layout, mesh.sizes):
        sums = ", ".join(site.layout.partial)
        return f"the tensor is partial over {sums}, and no rank has the sum; measure :output instead"
    return ""


def _select_gradients(mesh: Mesh, values: tuple[Site, ...], exact: frozenset[str]) -> tuple[Site, ...]:
    """The hook points whose gradients can be measured."""
    out, barred = [], {}
    for site in values:
        layout = layout_in_pass(site.layout, backward=True)
        if site.read_only_reason:
            continue
        if not site.inferred and is_partial(layout, mesh.sizes):
            why = f"it is partial ({layout.describe(mesh.sizes)})"
            if site.name in exact:
                raise HookError(
                    f"the gradient at {site.name} cannot be measured: {why}; measure another", site=site.name
                )
            barred[site.name + GRADIENT_SUFFIX] = why
        else:
            out.append(site)
    warn_left_out(barred, STATISTICS_PURPOSE)
    return tuple(out)


def register_features(
    session: Session,
    layers: Sequence[int],
    to: Receivers,
    full: bool,
    gradients: bool,
    at: str,
    on_features: OnFeatures | None,
) -> Features:
    """Take hidden states of layers. Collective. Arguments as for `FlexModel.features`."""
    session.check_open()
    numbers = [n for n in layers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if not numbers or len(set(numbers)) < len(layers):
        raise HookError(
            f"features(layers={layers!r}): give different numbers of layers from 0, such as [2, 17]"
        )
    if not (isinstance(to, (tuple, list)) or is_group(to) or to in NAMED_RECEIVERS):
        raise HookError(
            f"features(to={to!r}): give one of {', '.join(NAMED_RECEIVERS)}, a list of pipeline stages, or a "
            "process group"
        )
    if on_features is not None and not callable(on_features):
        raise HookError(f"features(on_features={on_features!r}): give a function of (features, microbatch)")
    if at.count("{}") != 1:
        raise HookError(f"features(at={at!r}): give a name with {{}} for the number of the layer")
    sites = {}
    for number in numbers:
        (sites[number], *_) = session.sites.match(at.replace("{}", str(number)), "output")
        if sites[number].hidden:
            raise HookError(
                f"no features of {sites[number].name}: {sites[number].hidden}", site=sites[number].name
            )
    request = FeatureRequest(sites, to, full, gradients)
    return session.features.add(request, on_features, session.agreement.compare)
