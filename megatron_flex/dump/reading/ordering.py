"""The order in which the sites of a model passed, over pipeline stages, from what ranks wrote."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_flex.dump.files import GRADIENT, VALUE
from megatron_flex.dump.manifest import Place
from megatron_flex.dump.reading.folders import Written
from megatron_flex.dump.reading.shards import Files
from megatron_flex.sites import GRAD

Turn = tuple[int, int, int]  # microbatch, call, and the turn on the rank


def execution_order(files: Files, written: Written, places: Mapping[str, Place]) -> list[str]:
    """Names in the order of one microbatch: values stage by stage, then gradients the other way.

    A rank writes only what it owns; every rank counts what all of its stage see, so that their turns compare.
    """
    turns: dict[str, dict[str, Turn]] = {VALUE: {}, GRADIENT: {}}
    for replica in written.run.replicas:
        for stage in written.run.stages:
            for rank in written.run.ranks(stage, replica):
                for path in written.paths(rank):
                    for entry in files.open(path).part.index.entries:
                        if entry.kind in turns and entry.site in places:
                            found = entry.microbatch, entry.call, entry.turn
                            seen = turns[entry.kind]
                            seen[entry.site] = min(found, seen.get(entry.site, found))
        if len(turns[VALUE]) == len(places):
            break  # further replicas have the same sites; only experts are spread over them
    model = {name: at for at, name in enumerate(places)}

    def key(name: str, seen: Mapping[str, Turn], sign: int) -> tuple[int, ...]:
        place = places[name]
        return sign * place.chunk, sign * place.stage, *seen[name], model[name]

    values = sorted(turns[VALUE], key=lambda n: key(n, turns[VALUE], 1))
    gradients = sorted(turns[GRADIENT], key=lambda n: key(n, turns[GRADIENT], -1))
    return values + [n + GRAD for n in gradients]
