"""What a run of a dump says of itself."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_flex.adapters import ParameterSite
from megatron_flex.dump import Dump, Manifest, SiteRecord, layout_to_json
from megatron_flex.layout import without_data_axis
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.dumps.dumped import DumpSelection
from megatron_flex.sites import Site
from megatron_flex.version import __version__

REPORTED_PACKAGES = ("torch", "megatron-core", "fairscale", "deepspeed", "transformers", "accelerate")


def make_manifest(
    dump: Dump,
    framework: str,
    mesh: Mesh,
    chosen: DumpSelection,
    parameters: Mapping[str, ParameterSite],
    config: Any,
) -> Manifest:
    """What a run says of itself, as far as every rank knows it.

    Args:
        dump: the settings.
        framework: the adapter's name.
        mesh: the axes of the run.
        chosen: what it is of.
        parameters: all of the model.
        config: the framework's of the model.
    """
    shapes = sorted((name, list(p.shape)) for name, p in parameters.items())
    return Manifest(
        run=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=collect_versions(),
        framework=framework,
        axes={a.name: a.size for a in mesh.axes},
        experts={a.name: a.size for a in mesh.experts},
        ranks=(),
        model=filter_plain_values(config),
        identity=hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        sites=tuple(_describe_site(s) for s in chosen.sites),
        parameters=() if chosen.parameters is None else tuple(chosen.parameters.places()),
        settings=dump.to_json(),
    )


def _describe_site(site: Site) -> SiteRecord:
    return SiteRecord(
        site.name, layout_to_json(without_data_axis(site.layout)), tuple(site.shape), site.stage, site.chunk, site.inferred
    )


def collect_versions() -> dict[str, str]:
    """Of this package, Python, and the frameworks that are imported."""
    out = {"megatron_flex": __version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        if package.replace("-core", "") in sys.modules:
            try:
                out[package] = version(package)
            except PackageNotFoundError:
                out[package] = "unknown"
    return out


def filter_plain_values(config: Any) -> dict[str, Any]:
    """The plain values of a config."""
    found = getattr(config, "__dict__", None) or {}
    return {k: v for k, v in sorted(found.items()) if isinstance(v, (bool, int, float, str, type(None)))}
