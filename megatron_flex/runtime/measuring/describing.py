"""What a file of statistics says of the run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from megatron_flex.adapters import ParameterSite
from megatron_flex.dump import layout_to_json
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.dumps.describing import collect_versions
from megatron_flex.sites import Site, describe_pattern
from megatron_flex.statistics import StatisticsHeader, MeasuredSite, Statistics


def make_header(
    statistics: Statistics,
    framework: str,
    mesh: Mesh,
    sites: Sequence[Site],
    parameters: Sequence[ParameterSite] = (),
) -> StatisticsHeader:
    """What a start of a run says of itself, as far as every rank knows it.

    Args:
        statistics: the settings.
        framework: the adapter's name.
        mesh: the axes of the run.
        sites: what is measured, in model order.
        parameters: whose gradients' norms are.
    """
    s = statistics
    places: list[Site | ParameterSite] = [*sites, *parameters]
    return StatisticsHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=collect_versions(),
        framework=framework,
        axes=dict(mesh.sizes),
        sites=tuple(MeasuredSite(p.name, layout_to_json(p.layout), tuple(p.shape)) for p in places),
        settings={
            "sites": [describe_pattern(p) for p in s.sites],
            "parameters": [describe_pattern(p) for p in s.parameters],
            "every": s.every,
            "gradients": s.gradients,
            "histogram": s.histogram,
        },
    )
