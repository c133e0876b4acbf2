"""The order in which the sites of a model passed, over pipeline stages, from what ranks wrote."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_flex.dump.part_format import GRADIENT, VALUE
from megatron_flex.dump.manifest import SiteRecord
from megatron_flex.dump.reading.folders import StoredIteration
from megatron_flex.dump.reading.shards import PartFiles
from megatron_flex.sites import GRADIENT_SUFFIX

ExecutionTurn = tuple[int, int, int]  # microbatch, call, and the turn on the rank


def sort_by_execution(files: PartFiles, written: StoredIteration, places: Mapping[str, SiteRecord]) -> list[str]:
    """Names in the order of one microbatch: values stage by stage, then gradients the other way.

    A rank writes only what it owns; every rank counts what all of its stage see, so that their turns compare.
    """
    turns: dict[str, dict[str, ExecutionTurn]] = {VALUE: {}, GRADIENT: {}}
    for replica in written.run.replicas:
        for stage in written.run.stages:
            for rank in written.run.ranks(stage, replica):
                for path in written.paths(rank):
                    for entry in files.open(path).part.index.entries:
                        if entry.kind in turns and entry.site in places:
                            found = entry.microbatch, entry.call, entry.turn
                            first_turns = turns[entry.kind]
                            first_turns[entry.site] = min(found, first_turns.get(entry.site, found))
        if len(turns[VALUE]) == len(places):
            break  # further replicas have the same sites; only experts are spread over them
    model = {name: at for at, name in enumerate(places)}

    def key(name: str, first_turns: Mapping[str, ExecutionTurn], sign: int) -> tuple[int, ...]:
        place = places[name]
        return sign * place.chunk, sign * place.stage, *first_turns[name], model[name]

    values = sorted(turns[VALUE], key=lambda n: key(n, turns[VALUE], 1))
    gradients = sorted(turns[GRADIENT], key=lambda n: key(n, turns[GRADIENT], -1))
    return values + [n + GRADIENT_SUFFIX for n in gradients]
