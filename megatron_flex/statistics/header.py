"""What a file of statistics says of the run that wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_flex.statistics.measured import HIGHEST_EXPONENT, LOWEST_EXPONENT

STATISTICS_FORMAT = "megatron_flex statistics"
STATISTICS_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredSite:
    """A site, or a parameter, that is measured.

    Attributes:
        name: its global name.
        layout: how ranks held it, in JSON's values.
        shape: of the whole; a name (`s`, `b`) where only the data tell.
    """

    name: str
    layout: Mapping[str, Any]
    shape: Sequence[int | str]


@dataclass(frozen=True, slots=True)
class StatisticsHeader:
    """What one start of a run says of itself.

    Attributes:
        created: when, in UTC, ISO 8601.
        versions: of the packages that made it.
        framework: the adapter's name.
        axes: the mesh, name to size, that of experts included.
        sites: what is measured, in model order, then parameters.
        settings: of the Statistics.
    """

    created: str
    versions: Mapping[str, str]
    framework: str
    axes: Mapping[str, int]
    sites: Sequence[MeasuredSite]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """In plain values; with the exponents of the histogram's first and last bins."""
        bins = {"lowest": LOWEST_EXPONENT, "highest": HIGHEST_EXPONENT}
        return {"format": STATISTICS_FORMAT, "version": STATISTICS_VERSION, "bins": bins, **asdict(self)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> StatisticsHeader:
        """The header that `to_json` told.

        Raises:
            ValueError: it is none, or of another version, which the message says.
            KeyError, TypeError: a damaged one.
        """
        if record["format"] != STATISTICS_FORMAT:
            raise ValueError("no statistics")
        version, bins = record["version"], (record["bins"]["lowest"], record["bins"]["highest"])
        if version != STATISTICS_VERSION or bins != (LOWEST_EXPONENT, HIGHEST_EXPONENT):
            raise ValueError(
                f"version {str(version)[:20]}; this megatron_flex reads version {STATISTICS_VERSION}: use the one that "
                "wrote it, or a newer one"
            )
        sites = tuple(
            MeasuredSite(
                str(s["name"]),
                dict(s["layout"]),
                tuple(int(n) if isinstance(n, int) else str(n) for n in s["shape"]),
            )
            for s in record["sites"]
        )
        plain = {name: dict(record[name]) for name in ("versions", "axes", "settings")}
        return StatisticsHeader(created=str(record["created"]), framework=str(record["framework"]), sites=sites, **plain)
