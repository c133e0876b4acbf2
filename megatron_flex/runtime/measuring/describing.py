"""What a file of statistics says of the run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from megatron_flex.adapters import ParameterSite
from megatron_flex.dump import to_json
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.dumps.describing import versions
from megatron_flex.sites import Site, in_words
from megatron_flex.statistics import Header, Place, Statistics


def header_of(
    statistics: Statistics,
    framework: str,
    mesh: Mesh,
    sites: Sequence[Site],
    parameters: Sequence[ParameterSite] = (),
) -> Header:
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
    return Header(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        framework=framework,
        axes=dict(mesh.sizes),
        sites=tuple(Place(p.name, to_json(p.layout), tuple(p.shape)) for p in places),
        settings={
            "sites": [in_words(p) for p in s.sites],
            "parameters": [in_words(p) for p in s.parameters],
            "every": s.every,
            "gradients": s.gradients,
            "histogram": s.histogram,
        },
    )
