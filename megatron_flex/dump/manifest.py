"""The manifest of a run: mesh, model, sites, settings, versions. Plain JSON of a fixed form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from megatron_flex.dump.files import FORMAT, MANIFEST, VERSION
from megatron_flex.dump.forms import CONTROL, check, loads
from megatron_flex.dump.forms import MANIFEST as FORM
from megatron_flex.errors import DumpError


@dataclass(frozen=True, slots=True)
class Place:
    """A site, or a parameter, of the dump.

    Attributes:
        name: its global name.
        layout: in JSON's values.
        shape: of the whole; a name (`s`, `b`) where only the data tell.
        stage: the pipeline stage that owns it.
        chunk: which of that stage's virtual chunks it is in.
        inferred: whether nothing told its layout beforehand; the parts say what was found.
    """

    name: str
    layout: dict[str, Any]
    shape: Sequence[int | str]
    stage: int = 0
    chunk: int = 0
    inferred: bool = False

    def __post_init__(self) -> None:
        if CONTROL.search(self.name):
            raise DumpError(f"{self.name!r} cannot be dumped: it has a control character; rename the module")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run of a dump says of itself; its form belongs to the version.

    Attributes:
        run: its number.
        created: when, in UTC, ISO 8601.
        versions: of the packages that made it.
        framework: the adapter's name.
        axes: the mesh, name to size, from the outermost to the innermost.
        experts: the second division of the ranks, as layers of experts have it.
        ranks: each rank's number and coordinates.
        model: the framework's config of the model, as far as it is plain values.
        identity: a digest of the names and whole shapes of all parameters.
        sites: what is dumped, in model order.
        parameters: likewise.
        settings: of the Dump.
        skipped: iterations that earlier runs have whole, and this one does not write.
    """

    run: int
    created: str
    versions: Mapping[str, str]
    framework: str
    axes: Mapping[str, int]
    experts: Mapping[str, int]
    ranks: Sequence[tuple[int, Mapping[str, int]]]
    model: Mapping[str, Any]
    identity: str
    sites: Sequence[Place]
    parameters: Sequence[Place]
    settings: Mapping[str, Any]
    skipped: Sequence[str] = ()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis name to number of ranks."""
        return {**self.axes, **self.experts}

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        told = finite({"format": FORMAT, "version": VERSION, **asdict(self)})
        path = folder / (MANIFEST + ".tmp")
        with path.open("w", encoding="utf-8") as file:
            json.dump(told, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        path.rename(folder / MANIFEST)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read that of a run's folder.

        Raises:
            DumpError: there is none, or it is damaged or of another version.
        """
        path = folder / MANIFEST
        try:
            told = loads(path.read_bytes())
            if told["format"] != FORMAT:
                raise DumpError(f"{path}: no manifest of a dump")
            if told["version"] != VERSION:
                raise DumpError(
                    f"{path}: version {str(told['version'])[:20]}; this megatron_flex reads version "
                    f"{VERSION}: use the one that wrote it, or a newer one"
                )
            check(told, FORM)
            del told["format"], told["version"]
            told["sites"] = tuple(Place(**p) for p in told["sites"])
            told["parameters"] = tuple(Place(**p) for p in told["parameters"])
            told["ranks"] = tuple(_rank(one) for one in told["ranks"])
            manifest = Manifest(**told)
            _check_ranks(manifest)
            return manifest
        except DumpError:
            raise
        except OSError as error:
            raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DumpError(f"{path}: no manifest of a dump, or a damaged one: {error!r}") from error


def finite(value: Any) -> Any:
    """The same values with the floats that JSON does not have in words."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def _rank(told: Any) -> tuple[int, dict[str, int]]:
    check(told, "list")
    rank, coords = told
    check(rank, "int")
    check(coords, {"*": "int"})
    return rank, coords


def _check_ranks(manifest: Manifest) -> None:
    """Every rank has a place on the mesh, and the mesh has no more places than there are ranks."""
    ranks, sizes = manifest.ranks, manifest.sizes
    if len({rank for rank, _ in ranks}) != len(ranks) or any(rank < 0 for rank, _ in ranks) or not ranks:
        raise ValueError("a rank that is there twice, or none at all")
    for axes in (manifest.axes, manifest.experts):
        if min(axes.values(), default=1) < 1 or prod(axes.values()) > len(ranks):
            raise ValueError(f"axes {dict(axes)} of {len(ranks)} ranks")
    for rank, coords in ranks:
        if any(not 0 <= at < sizes.get(axis, 0) for axis, at in coords.items()):
            raise ValueError(f"rank {rank} at {coords} of {dict(sizes)}")
    if len({tuple(coords.get(a, 0) for a in manifest.axes) for _, coords in ranks}) != len(ranks):
        raise ValueError("two ranks at one place")
