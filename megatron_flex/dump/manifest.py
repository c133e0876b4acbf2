"""The manifest of a run: mesh, model, sites, settings, versions. Plain JSON of a fixed form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from megatron_flex.dump.part_format import DUMP_FORMAT, MANIFEST_NAME, DUMP_VERSION
from megatron_flex.dump.json_form import CONTROL_CHARACTER, check_form, load_json
from megatron_flex.dump.json_form import MANIFEST_FORM as FORM
from megatron_flex.errors import DumpError


@dataclass(frozen=True, slots=True)
class SiteRecord:
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
        if CONTROL_CHARACTER.search(self.name):
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
    sites: Sequence[SiteRecord]
    parameters: Sequence[SiteRecord]
    settings: Mapping[str, Any]
    skipped: Sequence[str] = ()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Axis name to number of ranks."""
        return {**self.axes, **self.experts}

    def write(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        record = stringify_nonfinite({"format": DUMP_FORMAT, "version": DUMP_VERSION, **asdict(self)})
        path = folder / (MANIFEST_NAME + ".tmp")
        with path.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        path.rename(folder / MANIFEST_NAME)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read that of a run's folder.

        Raises:
            DumpError: there is none, or it is damaged or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            record = load_json(path.read_bytes())
            if record["format"] != DUMP_FORMAT:
                raise DumpError(f"{path}: no manifest of a dump")
            if record["version"] != DUMP_VERSION:
                raise DumpError(
                    f"{path}: version {str(record['version'])[:20]}; this megatron_flex reads version "
                    f"{DUMP_VERSION}: use the one that wrote it, or a newer one"
                )
            check_form(record, FORM)
            del record["format"], record["version"]
            record["sites"] = tuple(SiteRecord(**p) for p in record["sites"])
            record["parameters"] = tuple(SiteRecord(**p) for p in record["parameters"])
            record["ranks"] = tuple(_parse_rank(one) for one in record["ranks"])
            manifest = Manifest(**record)
            _check_ranks(manifest)
            return manifest
        except DumpError:
            raise
        except OSError as error:
            raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DumpError(f"{path}: no manifest of a dump, or a damaged one: {error!r}") from error


def stringify_nonfinite(value: Any) -> Any:
    """The same values with the floats that JSON does not have in words."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: stringify_nonfinite(one) for key, one in value.items()}
    return [stringify_nonfinite(one) for one in value] if isinstance(value, (list, tuple)) else value


def _parse_rank(record: Any) -> tuple[int, dict[str, int]]:
    check_form(record, "list")
    rank, coords = record
    check_form(rank, "int")
    check_form(coords, {"*": "int"})
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
