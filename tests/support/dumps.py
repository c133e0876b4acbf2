"""Dumps written in one process: whole tensors, scattered over the ranks of any mesh by the writer itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.checksums import ZERO_CHECKSUM, seal_json
from megatron_flex.dump import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    VALUE,
    Dump,
    DumpWriter,
    Manifest,
    Ownership,
    ShardEntry,
    SiteRecord,
    compute_partial_mean,
    create_run,
    describe_dims,
    layout_to_json,
    make_mean_layout,
    select_entries,
)
from megatron_flex.dump.file_names import format_part_name
from megatron_flex.dump.run_folders import find_missing_parts, list_parts
from megatron_flex.dump.token_selection import SAMPLE_DIM, TOKEN_DIM, find_dim, number_first_sample
from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.layout import Cut, Dim, Layout, count_parts, extract
from megatron_flex.mesh import Axis, Mesh

# Layouts as Megatron has them; `s` are tokens and `b` samples.
REPLICATED = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), Dim("h")))
SEQUENCE = Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("b"), Dim("h")))
COLUMN = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), Dim("4h", (Cut("tp"),))))
GATED = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), Dim("gate|up", (Cut("tp"),), (1, 1))))
SUMMED = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), Dim("h")), partial=("tp",))
WEIGHT = Layout((Dim("out", (Cut("tp"),)), Dim("in")))
NORM = Layout((Dim("h"),))


def complete_parts(folder: Path, ranks: Sequence[int]) -> dict[int, list[Path]] | None:
    """The parts of ranks in the folder of an iteration; None unless all of them have closed it."""
    parts, _ = list_parts(folder)
    if find_missing_parts(parts, ranks):
        return None
    return {rank: [folder / format_part_name(rank, *part) for part in parts[rank]] for rank in ranks}


@dataclass(frozen=True)
class Given:
    """A tensor to dump.

    Attributes:
        value: the whole: `[iteration, sample, token, *features]`, as far as the layout has such dims (of one
            without samples `[iteration, microbatch, ...]`, one for each microbatch of each replica); of a
            parameter `[iteration, *dims]`.
        layout: how ranks hold one microbatch of it.
        gradient: the whole gradient, of the same shape.
        stage: the pipeline stage that has it.
        calls: so many passes in each microbatch; further ones have the value times their number plus one.
    """

    value: Tensor
    layout: Layout = REPLICATED
    gradient: Tensor | None = None
    stage: int = 0
    calls: int = 1


def mesh_of(sizes: Mapping[str, int], coords: Mapping[str, int]) -> Mesh:
    """A mesh without process groups."""
    return Mesh(tuple(Axis(n, s, coords[n], None, tuple(range(s))) for n, s in sizes.items()))


def write(
    path: Path | str,
    sites: Mapping[str, Given],
    *,
    mesh: Mapping[str, int] | None = None,
    parameters: Mapping[str, Given] | None = None,
    microbatches: int = 1,
    iterations: Sequence[int] | None = None,
    training: bool = True,
    absent: Sequence[int] = (),
    passes: int = 1,
    versions: Mapping[str, str] | None = None,
    model: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (),
    **settings: Any,
) -> Manifest:
    """Write a run of a dump, rank by rank, with the real writer.

    Args:
        path: the dump's folder.
        sites: global names to tensors, in model order; they pass in this order.
        mesh: axis to size, from the outermost (`pp`, `dp`, `cp`, `tp`).
        parameters: likewise; a gradient is written if one is given.
        microbatches: of each data parallel rank; its samples are dealt out in the settings' `order`.
        iterations: their numbers; 0, 1, ... if not said.
        training: whether gradients were made.
        absent: ranks that were killed before they wrote anything.
        passes: runs of the schedule in each iteration; further ones have the value times their number + 1.
        versions: of packages, for the manifest.
        model: the model's config, for the manifest.
        lengths: tokens of the microbatches of each data parallel rank in turn; all tokens if there are none.
        settings: of `Dump`: tokens, samples, reduce, dtype, microbatches_kept (its `microbatches`), ...

    Returns:
        The manifest of the run.
    """
    sizes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, **(mesh or {})}
    parameters = parameters or {}
    if "microbatches_kept" in settings:
        settings["microbatches"] = settings.pop("microbatches_kept")
    graded = any(g.gradient is not None for g in (*sites.values(), *parameters.values()))
    settings = {"gradients": graded, **settings}
    dump = Dump(path, list(sites) or (), parameters=list(parameters), **settings)
    places = [dict(zip(sizes, at, strict=True)) for at in product(*(range(n) for n in sizes.values()))]
    manifest = create_run(
        Path(path),
        replace(
            _manifest(dump, sizes, places, sites, parameters, dict(versions or {}), bool(lengths)),
            model=dict(model or {}),
        ),
    )
    given = next(iter([*sites.values(), *parameters.values()]))
    numbers = list(range(len(given.value)) if iterations is None else iterations)
    for rank, coords in enumerate(places):
        if rank in absent:
            continue
        rank_of = _Rank(Path(path) / f"run-{manifest.run:04d}", rank, coords, sizes, dump, microbatches)
        rank_of.token_counts = lengths
        for at, number in enumerate(numbers):
            if f"{number:010d}" not in manifest.skipped and dump.wants_iteration(number):
                for run_of in range(passes):
                    rank_of.iteration(at, number, run_of, sites, parameters, training)
        rank_of.writer.close()
        if (trouble := rank_of.writer.trouble()) is not None:
            raise trouble
    return manifest


class _Rank:
    """One rank of the run."""

    def __init__(
        self, folder: Path, rank: int, coords: dict[str, int], sizes: dict[str, int], dump: Dump, many: int
    ) -> None:
        self.coords, self.sizes, self.dump, self.many = coords, sizes, dump, many
        self.token_counts: Sequence[int] = ()
        self.ownership = Ownership(mesh_of(sizes, coords))
        self.writer = DumpWriter(folder, rank, coords, dump)
        self.turn = 0

    def iteration(
        self,
        at: int,
        number: int,
        run_of: int,
        sites: Mapping[str, Given],
        parameters: Mapping[str, Given],
        training: bool,
    ) -> None:
        self.turn = 0
        self.writer.begin(number, run_of, training, self.many)
        for microbatch in range(self.many):
            if not self.dump.wants_microbatch(microbatch):
                continue
            passing = [
                (VALUE, n, g, g.value[at] * (run_of + 1) if run_of else g.value[at]) for n, g in sites.items()
            ]
            if training:
                passing += [
                    (GRADIENT, n, g, g.gradient[at])
                    for n, g in reversed(sites.items())
                    if g.gradient is not None
                ]
            for kind, name, given, whole in passing:
                if given.stage == self.coords["pp"]:
                    for call in range(given.calls):
                        self._pass(
                            kind, name, given, whole * (call + 1) if call else whole, microbatch, call, number
                        )
        for name, given in parameters.items():
            if given.stage == self.coords["pp"]:
                self._parameter(PARAMETER, name, given.layout, given.value[at])
                if given.gradient is not None and training:
                    self._parameter(PARAMETER_GRADIENT, name, given.layout.gradient(), given.gradient[at])
        self.writer.finish()

    def _pass(
        self, kind: str, name: str, given: Given, whole: Tensor, microbatch: int, call: int, number: int
    ) -> None:
        layout = given.layout.gradient() if kind == GRADIENT else given.layout
        order, replicas, replica = self.dump.order, self.sizes["dp"], self.coords["dp"]
        sampled = find_dim(layout, SAMPLE_DIM) is not None
        count = len(whole) // (replicas * self.many) if sampled else 1
        first = number_first_sample(order, microbatch, replica, replicas, self.many, count)
        assert first is not None
        block = whole[first : first + count] if sampled else whole[first]
        if self.token_counts and find_dim(layout, TOKEN_DIM) is not None:
            block = block[:, : self.token_counts[replica * self.many + microbatch]]
        block = _in_order(block, layout)
        local = extract(layout, block, self.coords, self.sizes, lengths=_lengths(layout, block, self.sizes))
        turn, self.turn = self.turn, self.turn + 1
        if not self.ownership.mine(layout, local.nbytes):
            return
        numbers = list(range(first, first + count)) if sampled else None
        dump, tokens = self.dump, self.dump.tokens
        if dump.reduce == "mean" and find_dim(layout, TOKEN_DIM) is not None:
            local = compute_partial_mean(local, layout, self.sizes, self.coords, tokens, number, numbers)
            layout, tokens = make_mean_layout(layout), None
        kept = dump.samples
        if isinstance(kept, slice):
            kept = frozenset(range(len(whole))[kept])
        picked = select_entries(tokens, kept, layout, local.shape, self.sizes, self.coords, number, numbers)
        shape = tuple(local.shape)
        if picked is not None:
            local = picked.select(local, layout)
        if dump.dtype is not None and local.is_floating_point():
            local = local.to(dump.dtype)
        entry = ShardEntry(name, kind, microbatch, call, 0, shape, "", picked is not None, turn=turn)
        self.writer.put(entry, layout, local)

    def _parameter(self, kind: str, name: str, layout: Layout, whole: Tensor) -> None:
        local = extract(layout, whole, self.coords, self.sizes)
        if self.ownership.mine(layout, local.nbytes, ("pp",)):
            self.writer.put(ShardEntry(name, kind, 0, 0, 0, tuple(local.shape), ""), layout, local)


def _lengths(layout: Layout, block: Tensor, sizes: dict[str, int]) -> dict[int, list[int]]:
    """Parts of uneven dims that differ by one entry at most."""
    out = {}
    order = layout.permute or tuple(range(len(layout.dims)))
    for index, dim in enumerate(layout.dims):
        if dim.uneven:
            count, length = count_parts(dim, sizes), block.shape[order.index(index)]
            out[index] = [length // count + (at < length % count) for at in range(count)]
    return out


def _in_order(block: Tensor, layout: Layout) -> Tensor:
    """From (sample, token, *features) to the order in which one device has the dims of the layout."""
    order = layout.permute or tuple(range(len(layout.dims)))
    front = [
        order.index(d) for d in (find_dim(layout, SAMPLE_DIM), find_dim(layout, TOKEN_DIM)) if d is not None
    ]
    return block.movedim(list(range(len(front))), front)


def _manifest(
    dump: Dump,
    sizes: dict[str, int],
    places: list[dict[str, int]],
    sites: Mapping[str, Given],
    parameters: Mapping[str, Given],
    versions: dict[str, str],
    varying: bool,
) -> Manifest:
    def place(name: str, given: Given) -> SiteRecord:
        shape: list[int | str] = list(given.value.shape[1:])
        names = [d.name for d in given.layout.dims]
        if varying and TOKEN_DIM in names:  # as of a run that does not know the lengths
            shape[names.index(TOKEN_DIM)] = TOKEN_DIM
        return SiteRecord(
            name, layout_to_json(given.layout), shape, given.stage, axes=describe_dims(given.layout)
        )

    return Manifest(
        run=0,
        created="2026-01-01T00:00:00+00:00",
        versions=versions,
        framework="synthetic",
        axes=sizes,
        experts={},
        ranks=tuple(enumerate(places)),
        model={},
        identity="synthetic",
        sites=tuple(place(n, g) for n, g in sites.items()),
        parameters=tuple(place(n, g) for n, g in parameters.items()),
        settings=dump.to_json(),
    )


def healthy(path: Path | str) -> None:
    """Hold that `dump verify` finds nothing in a dump that nobody damaged."""
    found = verify_dump(Path(path))
    assert found.good, found.findings
    assert found.tensors


def sealed_again(text: bytes) -> bytes:
    """A manifest that somebody changed, with the checksum that it then has."""
    return seal_json(re.sub(rb'("checksum": ")[0-9a-f]{16}', rb"\g<1>" + ZERO_CHECKSUM, text, count=1))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def partial_layout(layout: Layout, *axes: str) -> Layout:
    """The layout of summands over further axes."""
    return replace(layout, partial=(*layout.partial, *axes))
