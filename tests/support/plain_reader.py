"""A reader of dumps that follows docs/dump-format.md, with numpy, json, struct and xxhash alone.

It loads all of a dump, has no selection, and is as short as the page allows.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

Array = NDArray[Any]
Coords = Mapping[str, int]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
BLOCK = 131_072


class Shard(NamedTuple):
    """An entry of a part, its values, and who wrote it when."""

    entry: dict[str, Any]
    layout: dict[str, Any]
    values: Array
    coords: Coords
    iteration: int
    microbatches: int


def check_seal(text: bytes, checksum: str) -> None:
    assert 0 < text.index(checksum.encode()) < 256
    assert xxhash.xxh3_64_hexdigest(text.replace(checksum.encode(), b"0" * 16, 1)) == checksum


def read_manifest(run: Path) -> dict[str, Any]:
    text = (run / "manifest.json").read_bytes()
    manifest: dict[str, Any] = json.loads(text)
    assert (manifest["format"], manifest["version"]) == ("megatron_flex.dump", 3)
    check_seal(text, manifest["checksum"])
    return manifest


def read_shards(run: Path) -> Iterator[Shard]:
    """All tensors of all parts of a run."""
    for path in sorted(run.glob("*/[0-9]*.safetensors")):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__")
        check_seal(content[8 : 8 + length], metadata["checksum"])
        index = json.loads(metadata["index"])
        assert path.name.startswith(f"{index['rank']:05d}-{index['part']:03d}")
        for entry in index["entries"]:
            if entry["kind"] == "replica":
                continue
            end = f"|{entry['span'][0]}" if "span" in entry else ""
            name = f"{entry['site']}|{entry['kind']}|{entry['microbatch']}|{entry['call']}{end}"
            first, last = (8 + length + n for n in header[name]["data_offsets"])
            data = content[first:last]
            blocks = [xxhash.xxh3_64_hexdigest(data[n : n + BLOCK]) for n in range(0, len(data), BLOCK)]
            assert "".join(blocks) == entry.get("blocks", "")
            assert xxhash.xxh3_64_hexdigest("".join(blocks).encode()) == entry["checksum"]
            values = numbers(data, entry["dtype"]).reshape(header[name]["shape"])
            layout = index["layouts"][entry["layout"]]
            yield Shard(entry, layout, values, index["coords"], index["iteration"], index["microbatches"])


def numbers(data: bytes, dtype: str) -> Array:
    if dtype == "BF16":  # the upper half of an fp32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, DTYPES[dtype])


# -- layouts -------------------------------------------------------------------------------------------


def parts(cut: Mapping[str, Any], sizes: Coords) -> int:
    return sizes.get(cut["axis"], 1) // int(cut.get("copies", 1))


def divide(entries: Array, cut: Mapping[str, Any], coord: int, sizes: Coords) -> Array:
    """The part of a rank, of the entries that are left after the cuts before."""
    if len(segments := cut.get("segments", [1])) > 1:
        one = {**cut, "segments": [1]}
        ends = np.cumsum(segments) * len(entries) // sum(segments)
        return np.concatenate([divide(e, one, coord, sizes) for e in np.split(entries, ends[:-1])])
    count, at = parts(cut, sizes), coord // int(cut.get("copies", 1))
    if cut.get("order") == "zigzag" and count > 1:
        pieces = np.split(entries, 2 * count)
        return np.concatenate([pieces[at], pieces[2 * count - 1 - at]])
    return np.split(entries, count)[at]


def held(dim: Mapping[str, Any], length: int, coords: Coords, sizes: Coords) -> Array:
    """The entries of a dim of the full tensor that a rank holds, in its order."""
    segments = dim.get("segments", [1])
    ends = np.cumsum(segments) * length // sum(segments)
    out = []
    for entries in np.split(np.arange(length), ends[:-1]):
        for cut in dim.get("cuts", ()):
            entries = divide(entries, cut, coords.get(cut["axis"], 0), sizes)
        out.append(entries)
    return np.concatenate(out)


def padded(dim: Mapping[str, Any], local: int, sizes: Coords) -> int:
    return local * int(np.prod([parts(cut, sizes) for cut in dim.get("cuts", ())]))


def assemble(shards: Sequence[tuple[Coords, Array]], layout: Mapping[str, Any], sizes: Coords) -> Array:
    """The full tensor, of which each shard was written by one rank."""
    dims = layout["dims"]
    shape = [padded(d, n, sizes) for d, n in zip(dims, shards[0][1].shape, strict=True)]
    full = np.zeros(shape, shards[0][1].dtype)
    for coords, values in shards:
        places = [held(d, n, coords, sizes) for d, n in zip(dims, shape, strict=True)]
        full[np.ix_(*places)] += values  # which sums what is partial; of all else one rank wrote each entry
    kept = full[tuple(slice(d.get("keep")) for d in dims)]
    return kept.transpose(layout.get("permute") or range(kept.ndim))


# -- selections ----------------------------------------------------------------------------------------


def numbers_of_samples(shard: Shard, count: int, manifest: Mapping[str, Any]) -> range:
    """The numbers in the global batch of the samples of a microbatch."""
    replica, microbatch = shard.coords.get("dp", 0), shard.entry["microbatch"]
    if manifest["settings"]["order"] == "interleaved":
        number = microbatch * manifest["axes"]["dp"] + replica
    else:
        number = replica * shard.microbatches + microbatch
    return range(number * count, (number + 1) * count)


def is_selected(number: int, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return number in range(number + 1)[slice(*wanted["slice"])]
    return wanted is None or number in wanted


def kept_positions(tokens: Any, length: int, iteration: int, sample: int) -> list[int]:
    if tokens is None:
        return list(range(length))
    if isinstance(tokens, list):
        return sorted({p + length if p < 0 else p for p in tokens if -length <= p < length})
    if "slice" in tokens:
        return list(range(length))[slice(*tokens["slice"])]
    assert tokens["method"] == "splitmix64"
    state = 0
    for number in (tokens["seed"], iteration, sample):
        state = mix(((state ^ (number & WORD)) + INCREMENT) & WORD)
    ranks = [mix((state + (position + 1) * INCREMENT) & WORD) for position in range(length)]
    return sorted(sorted(range(length), key=ranks.__getitem__)[: tokens["sampled"]])


WORD, INCREMENT = 2**64 - 1, 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def find(layout: Mapping[str, Any], name: str) -> int | None:
    return next((i for i, d in enumerate(layout["dims"]) if d["name"] == name), None)


def unpick(shard: Shard, manifest: Mapping[str, Any], sizes: Coords) -> Array:
    """The shard before the selection, with zeros for what was not selected."""
    shape, dims = shard.entry["shape"], shard.layout["dims"]
    token, sample = find(shard.layout, "s"), find(shard.layout, "b")
    out = np.zeros(shape, shard.values.dtype)
    front = np.moveaxis(out, [d for d in (sample, token) if d is not None], range(2 - (token is None)))
    rows = iter(shard.values)
    for at, number in enumerate(numbers_of_samples(shard, shape[sample], manifest)):
        if not is_selected(number, manifest["settings"]["samples"]):
            continue
        if token is None:
            front[at] = next(rows)
            continue
        length = padded(dims[token], shape[token], sizes)
        mine = held(dims[token], length, shard.coords, sizes)
        for position in kept_positions(manifest["settings"]["tokens"], length, shard.iteration, number):
            if position in mine:
                front[at, np.flatnonzero(mine == position)[0]] = next(rows)
    assert next(rows, None) is None
    return out


# -- experts -------------------------------------------------------------------------------------------


def place_of(coords: Coords) -> tuple[int, int, int]:
    return coords.get("edp", 0), coords.get("ep", 0), coords.get("etp", 0)


def by_token(shards: Sequence[Shard], routing: Sequence[Shard], replica: int, sizes: Coords) -> Array:
    """A tensor of experts `[s, b, slots, ...]`, of one expert `[s, b, ...]`, from the rows of its ranks."""
    route, expert = routing[0].entry["route"], shards[0].entry["route"]["expert"]
    experts, slots, stream = route["experts"], route["slots"], route["stream"]
    chosen = {
        place_of(r.coords): np.unpackbits(r.values, axis=1, bitorder="little")[:, :experts].astype(bool)
        for r in routing
    }
    rows = {}  # of the ranks at (edp, ep), whole over etp
    for place in {place_of(s.coords)[:2] for s in shards}:
        some = [s for s in shards if place_of(s.coords)[:2] == place]
        rows[place] = assemble([(s.coords, s.values) for s in some], some[0].layout, sizes)
    length, batch = (padded(d, n, sizes) for d, n in zip(stream["dims"], route["shape"], strict=True))
    features = next(iter(rows.values())).shape[1:]
    out = np.zeros((length * batch, 1 if expert is not None else slots, *features), np.float32)
    for (edp, ep), values in rows.items():
        at = 0
        for number in range(experts):
            if number // (experts // sizes.get("ep", 1)) != ep or expert not in (None, number):
                continue
            sources = [r for r in routing if place_of(r.coords)[0] == edp]
            sources.sort(key=lambda r: place_of(r.coords)[1:])
            if route["etp_outer"]:
                sources.sort(key=lambda r: place_of(r.coords)[2])
            for source in sources:
                own = chosen[place_of(source.coords)]
                s, b = (
                    held(d, n, source.coords, sizes)
                    for d, n in zip(stream["dims"], (length, batch), strict=True)
                )
                tokens = (s[:, None] * batch + b).reshape(-1)
                for token in np.flatnonzero(own[:, number]):
                    slot = 0 if expert is not None else own[token, :number].sum()
                    if source.coords.get("dp", 0) == replica:
                        out[tokens[token], slot] = values[at]
                    at += 1
        assert at == len(values)
    out = out.reshape(length, batch, *out.shape[1:])
    return out[:, :, 0] if expert is not None else out


# -- whole dumps ---------------------------------------------------------------------------------------


def read(run: Path) -> dict[tuple[str, str], dict[int, Any]]:
    """The tensors of a run, by name and kind, then by iteration.

    Returns:
        Of a parameter the array; of a site a mapping of the number of a sample, or of `(replica, microbatch)`
        where there are no samples, to the array `[token, ...]`, with the selected positions only.
    """
    manifest = read_manifest(run)
    sizes = {**manifest["axes"], **manifest["experts"]}
    groups: dict[tuple[Any, ...], list[Shard]] = defaultdict(list)
    for shard in read_shards(run):
        entry = shard.entry
        replica = None if entry["kind"].startswith("parameter") or "route" in entry else shard.coords["dp"]
        key = entry["site"], entry["kind"], shard.iteration, entry["microbatch"], entry["call"], replica
        groups[key].append(shard)
    out: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for (site, kind, iteration, microbatch, call, replica), shards in groups.items():
        if kind == "routing" or call:
            continue
        if kind.startswith("parameter"):
            out[site, kind][iteration] = assemble(join_pieces(shards, sizes), shards[0].layout, sizes)
            continue
        found = out[site, kind].setdefault(iteration, {})
        if "route" in shards[0].entry:
            routing = groups[shards[0].entry["route"]["of"], "routing", iteration, microbatch, call, None]
            for one in range(sizes["dp"]):
                full = by_token(shards, routing, one, sizes)
                first = next(r for r in routing if r.coords["dp"] == one)
                place = numbers_of_samples(first, full.shape[1], manifest)
                found.update(zip(place, np.swapaxes(full, 0, 1), strict=True))
            continue
        local = [unpick(s, manifest, sizes) if s.entry.get("picked") else s.values for s in shards]
        layout = shards[0].layout
        full = assemble([(s.coords, v) for s, v in zip(shards, local, strict=True)], layout, sizes)
        sample, token = find(layout, "b"), find(layout, "s")
        if sample is None:
            found[replica, microbatch] = full
            continue
        full = np.moveaxis(full, [d for d in (sample, token) if d is not None], range(2 - (token is None)))
        for number, value in zip(numbers_of_samples(shards[0], len(full), manifest), full, strict=True):
            if shards[0].entry.get("picked"):
                if not is_selected(number, manifest["settings"]["samples"]):
                    continue
                if token is not None:
                    tokens = manifest["settings"]["tokens"]
                    value = value[kept_positions(tokens, len(value), iteration, number)]
            found[number] = value
    return out


def join_pieces(shards: Sequence[Shard], sizes: Coords) -> list[tuple[Coords, Array]]:
    """Shards of parameters, of which ranks may have written flat pieces."""
    out = [(s.coords, s.values) for s in shards if "span" not in s.entry]
    axes = {cut["axis"] for dim in shards[0].layout["dims"] for cut in dim.get("cuts", ())}
    groups: dict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for shard in shards:
        if "span" in shard.entry:
            groups[tuple(shard.coords.get(a, 0) for a in sorted(axes))].append(shard)
    for pieces in groups.values():
        pieces.sort(key=lambda s: s.entry["span"][0])
        flat = np.concatenate([s.values for s in pieces])
        out.append((pieces[0].coords, flat.reshape(pieces[0].entry["shape"])))
    return out
