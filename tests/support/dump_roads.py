"""Dumps of every kind, and every road on which their values are read: no damaged byte passes on any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.dump import Dump, DumpWriter, Manifest, ShardEntry, SiteRecord, create_run, layout_to_json
from megatron_flex.dump.export import ExportColumn, export_arrays, read_blocks
from megatron_flex.dump.part_format import read_part
from megatron_flex.dump.reader import DumpArray, open_damaged_dump
from megatron_flex.dump.tools.dump_contents import get_named_array, list_parameter_names, list_site_names
from megatron_flex.dump.tools.value_summary import summarize_values
from megatron_flex.errors import DumpError
from megatron_flex.layout import extract
from megatron_flex.page.tensor_tables import read_cell
from tests.support import dumps
from tests.support.dumps import COLUMN, GATED, NORM, SEQUENCE, SUMMED, WEIGHT, Given, random

FIXTURE = Path(__file__).parents[1] / "data" / "version_3"  # a dump, its values, and statistics
Outcome = dict[str, Tensor | DumpError]
Road = Callable[[Path, Path], Outcome]


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    tensor: str
    first: int
    size: int


def stored(path: Path) -> list[Stored]:
    """Every tensor that some file of a dump has."""
    parts = [(file, read_part(file)) for file in sorted(path.rglob("*.safetensors"))]
    return [Stored(file, name, at[2], at[3]) for file, part in parts for name, at in part.where.items()]


def flip(file: Path, at: int, bit: int = 4) -> None:
    """Change a bit of a file."""
    with file.open("r+b") as handle:
        handle.seek(at)
        was = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([was ^ bit]))


# -- dumps -----------------------------------------------------------------------------------------------


def spread(path: Path) -> None:
    """Shards of several blocks on two stages of two tensor parallel ranks, and small ones."""
    sites = {
        "a.fc1": Given(random(1, 2, 96, 400), GATED, random(1, 2, 96, 400, seed=1)),
        "a.column": Given(random(1, 2, 96, 300, seed=2), COLUMN),
        "b.sequence": Given(random(1, 2, 96, 8, seed=3), SEQUENCE, stage=1),
        "b.summed": Given(random(1, 2, 96, 24, seed=4), SUMMED, stage=1),
    }
    weights = {
        "a.weight": Given(random(1, 256, 300, seed=5), WEIGHT),
        "a.norm": Given(random(1, 7, seed=6), NORM),
    }
    dumps.write(path, sites, mesh={"pp": 2, "tp": 2}, parameters=weights)


def picked(path: Path) -> None:
    """Some tokens and samples, over two replicas."""
    sites = {"a": Given(random(1, 8, 64, 1200), SEQUENCE), "b": Given(random(1, 8, 64, 16, seed=1), GATED)}
    dumps.write(path, sites, mesh={"dp": 2, "tp": 2}, tokens=slice(0, 64, 3), samples=[0, 2, 3, 7])


def flat(path: Path) -> None:
    """A gradient of which ranks have flat pieces that overlap no border of a row."""
    sizes, whole = {"dp": 3, "tp": 2}, random(400, 300)
    places = [{"dp": d, "tp": t} for d in range(3) for t in range(2)]
    dump, place = (
        Dump(path, parameters=["w"], gradients=True),
        SiteRecord("w", layout_to_json(WEIGHT), (400, 300)),
    )
    manifest = Manifest(
        0, "", {}, "x", sizes, {}, tuple(enumerate(places)), {}, "", (), (place,), dump.to_json()
    )
    create_run(path, manifest)
    for rank, coords in enumerate(places):
        local = extract(WEIGHT, whole, coords, sizes).flatten()
        edges = [0, 20_001, 40_003, local.numel()]
        span = edges[coords["dp"]], edges[coords["dp"] + 1]
        writer = DumpWriter(path / "run-0000", rank, coords, dump)
        writer.begin(0, 0, True, 1)
        entry = ShardEntry("w", "parameter_gradient", 0, 0, 0, (200, 300), "", span=span)
        writer.put(entry, WEIGHT, local[slice(*span)])
        if coords["dp"] == 0:
            writer.put(ShardEntry("w", "parameter", 0, 0, 0, (200, 300), ""), WEIGHT, local.view(200, 300))
        writer.finish()
        writer.close()


def experts(path: Path) -> None:
    """The committed dump: experts, a gated projection and parameters, on two stages of two ranks."""
    shutil.copytree(FIXTURE / "dump", path)


KINDS: dict[str, Callable[[Path], None]] = {
    "spread": spread,
    "picked": picked,
    "flat": flat,
    "experts": experts,
}


# -- roads -----------------------------------------------------------------------------------------------


def _arrays(path: Path, **kwargs: Any) -> Iterator[tuple[str, DumpArray]]:
    with mf.open_dump(path, **kwargs) as dump:
        for name in [*list_site_names(dump), *list_parameter_names(dump)]:
            yield name, get_named_array(dump, name)


def _each(path: Path, read: Callable[[DumpArray], Any], **kwargs: Any) -> Outcome:
    """What each array gives, or the error."""
    out: Outcome = {}
    for name, array in _arrays(path, **kwargs):
        try:
            out[name] = torch.as_tensor(read(array))
        except DumpError as error:
            out[name] = error
    return out


def _slices(path: Path, _: Path) -> Outcome:
    keys: dict[str, Callable[[DumpArray], Any]] = {
        "first": lambda a: (0, 0),
        "column": lambda a: (..., slice(-1, None)),
        "steps": lambda a: (..., slice(None, None, 3)),
        "rows": lambda a: (slice(None), slice(None, None, 2)),
        "list": lambda a: (..., [a.shape[-1] - 1, 0, a.shape[-1] // 2]),
        "entry": lambda a: tuple(n // 2 for n in a.shape),
        "nothing": lambda a: (slice(0, 0),),
    }
    out: Outcome = {}
    for label, key in keys.items():
        found = _each(path, lambda a, key=key: a[key(a)].torch())  # type: ignore[misc]
        out |= {f"{name}[{label}]": value for name, value in found.items()}
    return out


def _rows(path: Path, _: Path) -> Outcome:
    """A map-style dataset's rows one by one, and batches of an iterable one."""
    out: Outcome = {}
    with mf.open_dump(path) as dump:
        for name in dump.sites:
            for label, read in {
                "dataset": lambda n: torch.stack(
                    [d[i] for d in [dump.dataset(n)] for i in range(0, len(d), 7)]
                ),
                "loader": lambda n: torch.cat(list(islice(dump.rows(n, 50, shuffle=True, block=16), 9))),
            }.items():
                try:
                    if dump[name].dims[1] != "sample":
                        continue
                    out[f"{name} {label}"] = read(name)
                except DumpError as error:
                    out[f"{name} {label}"] = error
    return out


def _pieces(path: Path, _: Path) -> Outcome:
    return _each(path, lambda a: torch.cat([p.array.torch().flatten() for p in a.microbatch_arrays()]))


def _statistics(path: Path, _: Path) -> Outcome:
    def numbers(array: DumpArray) -> Tensor:
        found = summarize_values(lambda: read_blocks(array, 1 << 14))
        return torch.tensor([found.mean, found.std, found.absmax, *found.counts], dtype=torch.float64)

    return _each(path, numbers)


def _page(path: Path, _: Path) -> Outcome:
    def shown(array: DumpArray) -> Tensor:
        found = read_cell(array, array.iterations[0], 1 << 22)
        if found.text or found.statistics is None:
            raise DumpError(found.text)
        return torch.tensor([found.statistics.mean, found.statistics.absmax], dtype=torch.float64)

    return _each(path, shown)


def _exported(to: str) -> Road:
    def road(path: Path, scratch: Path) -> Outcome:
        out: Outcome = {}
        for number, (name, array) in enumerate(_arrays(path)):
            target = scratch / f"{number}.{to}"
            try:
                if to == "datasets" and array.dims[1:3] != ("sample", "token"):
                    continue
                export_arrays([ExportColumn(name, array)], target, to)  # type: ignore[arg-type]
                out[name] = _loaded(target, to, name)
            except DumpError as error:
                assert not target.exists(), "a file of an export that failed"
                out[name] = error
        return out

    return road


def _loaded(target: Path, to: str, name: str) -> Tensor:
    if to == "safetensors":
        from safetensors.torch import load_file

        return load_file(target)[name]
    if to == "zarr":
        import zarr

        return torch.from_numpy(zarr.open_group(str(target), mode="r")[name][...])  # type: ignore[index]
    import datasets

    return torch.tensor(datasets.load_from_disk(str(target))[name][:])


def _compared(good: Path) -> Road:
    def road(path: Path, _: Path) -> Outcome:
        try:
            found = compare(good, path)
        except DumpError as error:
            return {"compare": error}
        return {"compare": torch.tensor([[r.relative, r.max_abs] for r in found.rows])}

    return road


def roads(good: Path, slow: bool = True) -> dict[str, Road]:
    """Every road, by name.

    Args:
        good: the dump as it was before it was damaged.
        slow: those too that take a tenth of a second.
    """
    out: dict[str, Road] = {
        "whole": lambda path, _: _each(path, lambda a: a.torch()),
        "first": lambda path, _: _each(path, lambda a: a[..., :1].torch(), check="first"),
        "rest": lambda path, _: _remains(path),
        "slices": _slices,
        "rows": _rows,
        "pieces": _pieces,
        "statistics": _statistics,
        "page": _page,
        "compare": _compared(good),
        "safetensors": _exported("safetensors"),
    }
    return {**out, "zarr": _exported("zarr"), "datasets": _exported("datasets")} if slow else out


def _remains(path: Path) -> Outcome:
    out: Outcome = {}
    with open_damaged_dump(path) as rest:
        for name in rest.sites:
            try:
                out[name] = rest[name].torch()
            except DumpError as error:
                out[name] = error
    return out
