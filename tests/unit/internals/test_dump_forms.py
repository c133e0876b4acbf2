"""Dumps have the form of their schema, and nothing that does not have it is taken for a dump."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import megatron_flex as mf
from megatron_flex.checksums import ZERO_CHECKSUM, seal_json
from megatron_flex.dump import DumpWriter, Manifest, ShardEntry, SiteRecord, schema
from megatron_flex.dump.json_form import check_form, derive_form
from megatron_flex.dump.part_format import StoredPart, read_part
from megatron_flex.dump.reader import OpenDump
from megatron_flex.dump.reader.dump_reader import NoActivationError
from megatron_flex.dump.schema import PartIndex
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.errors import DumpError
from tests.support import dump_roads, dumps
from tests.support.dumps import SEQUENCE, WEIGHT, Given, random
from tests.support.messages import raises


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (Manifest, schema.FORMS["MANIFEST"]),
        (SiteRecord, derive_form(SiteRecord)),
        (ShardEntry, derive_form(ShardEntry)),
        (PartIndex, schema.FORMS["INDEX"]),
    ],
)
def test_the_form_has_what_is_written(kind: Any, form: dict[str, Any]) -> None:
    keys = {key for key in form if not key.endswith("?")} - {"format", "version"}
    keys -= {"checksum"} - {f.name for f in fields(kind)}
    assert keys <= {f.name for f in fields(kind)} <= {key.removesuffix("?") for key in form}


def test_what_is_written_has_the_form(dump: Path) -> None:
    told = json.loads((dump / "run-0000" / "manifest.json").read_text())
    check_form(told, schema.FORMS["MANIFEST"])
    form = schema.FORMS["INDEX"]
    for path in dump.rglob("*.safetensors"):
        check_form(json.loads(header_of(path)[0]["__metadata__"]["index"]), form)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return make(tmp_path / "dump")


def make(path: Path) -> Path:
    sites = {
        "a": Given(random(2, 4, 8, 4), SEQUENCE, random(2, 4, 8, 4, seed=1)),
        "b": Given(random(2, 4, 8, 4, seed=2)),
    }
    weights = {"w": Given(random(2, 8, 4, seed=3), WEIGHT)}
    dumps.write(path, sites, mesh={"dp": 2, "tp": 2}, parameters=weights, tokens=slice(0, 8, 2))
    return path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    body = path.read_bytes()
    length = struct.unpack("<Q", body[:8])[0]
    return json.loads(body[8 : 8 + length]), body[8 + length :]


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change a part's header, with a checksum that fits: what only someone with intent does."""
    told, rest = header_of(path)
    meta = told.pop("__metadata__")
    index = json.loads(meta["index"])
    change(index, told)
    meta["index"] = json.dumps(index, separators=(",", ":"))
    meta["checksum"] = ZERO_CHECKSUM.decode()
    body = json.dumps({"__metadata__": meta, **told}, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + seal_json(body) + rest)


def seal(path: Path, told: Any) -> None:
    """Write a manifest, with a checksum that fits if it has a place for one."""
    if isinstance(told, dict) and "checksum" in told:
        told = {**told, "checksum": ZERO_CHECKSUM.decode()}
    text = json.dumps(told).encode()
    with suppress(ValueError):
        text = seal_json(text)
    path.write_bytes(text)


@contextmanager
def little_memory(megabytes: int = 1024) -> Iterator[None]:
    """Whatever asks for more than so much beyond what is in use fails with MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_all(path: Path, check: Any = "first") -> dict[str, torch.Tensor]:
    with mf.open_dump(path, check=check) as dump:
        out = {name: dump[name].torch() for name in dump.sites}
        return out | {name: dump.parameter(name).torch() for name in dump.parameters}


@contextmanager
def refusing() -> Iterator[None]:
    """What may end in a DumpError of one line, and in no other way, nor with much memory."""
    try:
        with little_memory():
            yield
    except DumpError as error:
        if "\n" in str(error):
            raise AssertionError(f"an error of many lines: {error}") from error


def is_refused(path: Path) -> bool:
    """Whether reading refuses some iteration of some tensor, which `verify` must then find."""
    try:
        with mf.open_dump(path) as dump:
            arrays = [dump[name] for name in dump.sites] + [dump.parameter(name) for name in dump.parameters]
            for array in arrays:
                for which in array.iteration_keys:
                    array.at(which).torch()
    except NoActivationError:
        return False
    except DumpError:
        return True
    return False


def assert_verify_agrees(path: Path) -> None:
    """What reading refuses is not good."""
    with little_memory():
        if is_refused(path):
            with suppress(DumpError):
                assert not verify_dump(path).good


def attempt(path: Path, right: dict[str, torch.Tensor]) -> bool:
    """Read it all: a DumpError, or what was written. Returns whether it read."""
    found = None
    with refusing():
        found = read_all(path)
    if found is None:
        return False
    for name, value in found.items():
        whole = right[name]
        assert value.shape[1:] == whole.shape[1:]
        # a file that was cut may hide an iteration, and never changes one
        assert any(torch.equal(value, whole[list(rows)]) for rows in ([0, 1], [0], [1], [])), name
    return True


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_flipped_and_cut_bytes(dump: Path, data: st.DataObject) -> None:
    right = read_all(dump)
    path = data.draw(st.sampled_from(sorted(p for p in dump.rglob("*") if p.is_file())))
    before = path.read_bytes()
    body = bytearray(before)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    if data.draw(st.booleans()):
        body += data.draw(st.binary(max_size=100))
    try:
        path.write_bytes(bytes(body))
        if not attempt(dump, right):
            return
        assert bytes(body) == before, "a changed file reads as if it were the one that was written"
    finally:
        path.write_bytes(before)


NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, 10**30, -1, -(10**30)]),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from(["../../etc/passwd", "a", "b", "dp", "tp", "s", "value", "F32", "I64", "zigzag", "\0"]),
    st.lists(st.integers(-2, 1 << 50), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def spots(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values in a tree."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from spots(one, (*at, key))


def mangle(data: st.DataObject, value: Any) -> Any:
    """Another value, or none, or one more, somewhere in a tree."""
    value = deepcopy(value)
    at = data.draw(st.sampled_from(list(spots(value))))
    if not at:
        return data.draw(NASTY)
    place = value
    for key in at[:-1]:
        place = place[key]
    act = data.draw(st.sampled_from(["set", "set", "drop", "add", "twice"]))
    if act == "drop":
        del place[at[-1]]
    elif act == "add" and isinstance(place, dict):
        place[data.draw(st.text(max_size=4))] = data.draw(NASTY)
    elif act == "twice" and isinstance(place, list):
        place.append(deepcopy(place[at[-1]]))
    else:
        place[at[-1]] = data.draw(NASTY)
    return value


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_headers_of_other_values(dump: Path, data: st.DataObject) -> None:
    """With right checksums: the reader says DumpError, or gives tensors, and never eats the memory."""
    path = data.draw(st.sampled_from(sorted(dump.rglob("*.safetensors"))))
    before = path.read_bytes()

    def change(index: dict[str, Any], told: dict[str, Any]) -> None:
        if data.draw(st.booleans()):
            found = mangle(data, told)
            told.clear()
            told.update(found if isinstance(found, dict) else {"x": found})
        else:
            found = mangle(data, index)
            index.clear()
            index.update(found if isinstance(found, dict) else {"x": found})

    try:
        rewrite(path, change)
        with refusing():
            read_all(dump, check="never")
        assert_verify_agrees(dump)
    finally:
        path.write_bytes(before)


@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_manifests_of_other_values(dump: Path, data: st.DataObject) -> None:
    path = dump / "run-0000" / "manifest.json"
    before = path.read_text()
    try:
        seal(path, mangle(data, json.loads(before)))
        with refusing():
            read_all(dump)
        assert_verify_agrees(dump)
    finally:
        path.write_text(before)


def test_a_name_with_a_control_character(dump: Path) -> None:
    """Neither the writer nor the reader has such a name, so that every message is one line."""
    with raises(DumpError, r"'a\nb'"):
        SiteRecord("a\nb", {}, ())
    path = dump / "run-0000" / "manifest.json"
    before = path.read_text()
    told = json.loads(before)
    told["sites"][0]["name"] = "\n"
    try:
        seal(path, told)
        with raises(DumpError, path, path=str(path)):
            mf.open_dump(dump)
    finally:
        path.write_text(before)


def test_listing_reads_the_names_once_and_not_for_each_name(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of two megabytes, with names that no part has, took half a minute to list."""
    path = dump / "run-0000" / "manifest.json"
    told = json.loads(path.read_text())
    asked = []
    manifests = OpenDump.manifests.fget
    monkeypatch.setattr(OpenDump, "manifests", property(lambda o: asked.append(o) or manifests(o)))
    counts = []
    for more in (10, 20):
        many = [told["sites"][0] | {"name": f"x{n}"} for n in range(more)]
        seal(path, told | {"sites": [*told["sites"], *many]})
        asked.clear()
        assert len(list_dump_contents(dump).tensors) > more
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


def first_part(dump: Path) -> Path:
    return sorted(dump.rglob("*.safetensors"))[0]


def with_header(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'{"a":1,"a":2}', []),
        (b'{"a":NaN}', ["NaN"]),
        (b"[" * 100_000, []),
        (b'{"__metadata__":' + b"9" * 10_000 + b"}", []),
        (b"[]", []),
        (b'{"__metadata__":{"format":"other/9","index":"","crc":"0"}}', ["'other/9'"]),
        (
            b'{"__metadata__":{"format":"megatron_flex.dump/9","index":"","crc":"0"}}',
            [9, 3],
        ),
        (b"\xff\xfe{}", []),
    ],
)
def test_headers_that_are_none(dump: Path, text: bytes, values: list[str]) -> None:
    with_header(first_part(dump), text)
    with raises(DumpError, first_part(dump), *values, path=str(first_part(dump))):
        read_part(first_part(dump))


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_lengths_that_are_none(dump: Path, length: int) -> None:
    path = first_part(dump)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with little_memory(256), raises(DumpError, path, path=str(path)):
        read_part(path)


def test_a_header_that_says_something_else_has_another_checksum(dump: Path) -> None:
    """All of it is as it may be, but for what was written."""
    path = first_part(dump)
    whole = path.read_bytes()
    assert rb"\"iteration\":0" in whole
    path.write_bytes(whole.replace(rb"\"iteration\":0", rb"\"iteration\":1"))
    with raises(DumpError, path, path=str(path)):
        read_part(path)


def test_overlapping_tensors(dump: Path) -> None:
    def change(index: dict[str, Any], told: dict[str, Any]) -> None:
        names = list(told)
        told[names[1]]["data_offsets"] = list(told[names[0]]["data_offsets"])

    rewrite(first_part(dump), change)
    with raises(DumpError, path=str(first_part(dump))):
        read_part(first_part(dump))


def test_a_part_of_another_rank(dump: Path) -> None:
    first, second, *_ = sorted(dump.rglob("0000000000/*.safetensors"))
    first.write_bytes(second.read_bytes())
    with raises(DumpError, first, path=str(first)):
        read_all(dump)


def test_values_that_json_lacks_are_words(tmp_path: Path, dump: Path) -> None:
    manifest = replace(Manifest.read(dump / "run-0000"), model={"clip": float("inf"), "x": [float("nan")]})
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path).model == {"clip": "inf", "x": ["nan"]}


def test_a_part_is_what_was_written(dump: Path) -> None:
    part = read_part(first_part(dump))
    assert isinstance(part, StoredPart)
    assert [e.turn for e in part.index.entries if e.kind == "value"] == [0, 1]


@pytest.mark.parametrize("shape", [[1 << 40, 4, 4], [8, 4, 8], [1 << 40, 0, 4], []], ids=str)
def test_shapes_that_their_bytes_do_not_have(tmp_path: Path, shape: list[int]) -> None:
    path = tmp_path / "d"
    dumps.write(path, {"a": Given(random(1, 4, 8, 4)), "b": Given(random(1, 4, 8, 0))})

    def change(index: dict[str, Any], told: dict[str, Any]) -> None:
        index["entries"][0 if 0 not in shape else 1]["shape"] = shape

    rewrite(first_part(path), change)
    with little_memory(256), raises(DumpError, path=str(first_part(path))):
        read_part(first_part(path))


def test_picked_tokens_of_shapes_that_nobody_has(dump: Path) -> None:
    def change(index: dict[str, Any], told: dict[str, Any]) -> None:
        index["entries"][0]["shape"][:2] = [1 << 20, 1 << 20]

    rewrite(first_part(dump), change)
    with little_memory(256), raises(DumpError, path=str(first_part(dump))):
        read_all(dump)


# -- versions ----------------------------------------------------------------------------------------------


def test_the_committed_dump_reads_as_it_did() -> None:
    """Its values are those that the code read that wrote it."""
    want = load_file(dump_roads.FIXTURE / "values.safetensors")
    path = dump_roads.FIXTURE / "dump"
    with mf.open_dump(path) as dump:
        found = {name: dump[name] for name in dump.sites}
        found |= {name: dump.parameter(name) for name in dump.parameters}
        assert found.keys() == want.keys()
        for name, array in found.items():
            assert torch.equal(array.torch(), want[name]), name
            assert torch.equal(array[..., 1::2].torch(), want[name][..., 1::2]), name
    assert verify_dump(path).findings == []


@pytest.mark.parametrize("version", [1, 2, 4, "3", None])
def test_another_version_is_refused_by_name(dump: Path, version: Any) -> None:
    """In a manifest, with or without the checksum of its version, and in a part."""
    path = dump / "run-0000" / "manifest.json"
    told = json.loads(path.read_text())
    for record in ({**told, "version": version}, {"format": told["format"], "version": version}):
        seal(path, record)
        with raises(DumpError, version, 3, "dump again", path=str(path)):
            mf.open_dump(dump)
    part = first_part(dump)
    content, rest = header_of(part)
    content["__metadata__"] = {"format": f"megatron_flex.dump/{version}", "crc": "1", "index": "{}"}
    if version != "3":
        body = json.dumps(content).encode()
        part.write_bytes(struct.pack("<Q", len(body)) + body + rest)
        with raises(DumpError, version, 3, "dump again", path=str(part)):
            read_part(part)


def test_requests_and_axes_are_kept(tmp_path: Path) -> None:
    """What a record may say beside its place: the request that it belongs to, and what its dims are."""
    path = tmp_path / "d"
    dumps.write(path, {"a": Given(random(1, 2, 3, 4))})
    writer = DumpWriter(path / "run-0000", 0, {"pp": 0, "dp": 0, "cp": 0, "tp": 0}, mf.Dump(path, "a"))
    writer.begin(1, 0, False, 1)
    axes = {"s": "sequence", "b": "batch", "h": "hidden"}
    entry = ShardEntry("a", "value", 0, 0, 0, (3, 2, 4), "", request="chat-7", axes=axes)
    writer.put(entry, dumps.REPLICATED, random(3, 2, 4))
    writer.finish()
    writer.close()
    with mf.open_dump(path) as dump:
        assert [(p.iteration, p.request) for p in dump["a"].microbatch_arrays()] == [(0, None), (1, "chat-7")]
        assert dump.axes("a") == axes
        assert dump.site_record("a").axes == axes


@pytest.mark.parametrize("key", ["a\nb", "\u2028", "\x85"])
def test_a_key_that_breaks_lines_is_escaped(key: str) -> None:
    with raises(ValueError, "'1'", "str") as caught:
        check_form({key: 1}, {"*": "str"})
    assert len(str(caught.value).splitlines()) == 1
