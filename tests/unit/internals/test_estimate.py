"""Plans without a run: who writes what, what is kept, what a configuration says and may not say."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex import Dim, Dump, FlexError, Layout, Mesh, SiteError
from megatron_flex.dump import Ownership, sampled, select_entries
from megatron_flex.estimate import DumpEstimate, EstimatedTensor
from megatron_flex.estimate.dump_estimate import StageLoad, estimate_dump_size
from megatron_flex.estimate.tensor_sizes import compute_local_shape
from megatron_flex.layout import Cut, replicated
from megatron_flex.mesh import Axis
from megatron_flex.progress import format_bytes
from tests.support.messages import raises

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "vocab_size": 100,
    "bf16": True,
}


def mesh_at(sizes: Mapping[str, int], coords: Mapping[str, int]) -> Mesh:
    def axis(name: str) -> Axis:
        size = sizes.get(name, 1)
        return Axis(name, size, coords.get(name, 0), None, tuple(range(size)))

    return Mesh(tuple(map(axis, ("pp", "dp", "cp", "tp"))), tuple(map(axis, ("edp", "ep", "etp"))))


def held(layout: Layout, local: tuple[float, ...], **kwargs: Any) -> EstimatedTensor:
    return EstimatedTensor(
        **{"name": "x:output", "kind": "value", "shape": (8, 2, 4), "dtype": torch.float32, **kwargs},
        layout=layout,
        local=local,
    )


STREAM = replicated("s", "b", "h")
CUT = Layout((Dim("s", (Cut("cp", "zigzag"), Cut("tp"))), Dim("b"), Dim("h")))
SUMS = Layout((Dim("s"), Dim("b"), Dim("h")), partial=("tp",))
COPIES = Layout((Dim("s"), Dim("b"), Dim("g", (Cut("tp", copies=2),))))


# -- who writes what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_every_rank_writes_what_the_writer_lets_it(times: int) -> None:
    sizes = {"dp": 3, "cp": 2, "tp": 4}
    tensors = [(STREAM, 40), (CUT, 8), (COPIES, 24), (SUMS, 16), (STREAM, 56), (COPIES, 4), (STREAM, 4)]
    stage = StageLoad(mesh_at(sizes, {}))
    for layout, size in tensors:
        stage.add(layout, size, times, ("cp", "tp"))
    stage.deal()
    for rank, at in enumerate(product(range(3), range(2), range(4))):
        one = Ownership(mesh_at(sizes, dict(zip(("dp", "cp", "tp"), at, strict=True))))
        mine = [n for _ in range(times) for layout, n in tensors if one.mine(layout, n)]
        assert stage.bytes[rank] == sum(mine), at


@pytest.mark.parametrize(
    ("layout", "writers"),
    [(STREAM, 3), (CUT, 24), (SUMS, 12), (COPIES, 6), (COPIES.gradient(), 12), (SUMS.gradient(), 3)],
)
def test_each_shard_is_written_once_and_each_summand(layout: Layout, writers: int) -> None:
    """On three data parallel ranks, two context and four tensor parallel ones."""
    stage = StageLoad(mesh_at({"dp": 3, "cp": 2, "tp": 4}, {}))
    assert stage.add(layout, 100, 1, ("cp", "tp")) == 100 * writers
    stage.deal()
    assert stage.bytes.sum() == 100 * writers
    assert sorted(stage.bytes)[-writers:] == [100] * writers


def test_parameters_are_spread_over_data_parallel_ranks_and_experts_over_theirs() -> None:
    stage = StageLoad(mesh_at({"dp": 8, "edp": 4, "ep": 2}, {}))
    for _ in range(16):
        stage.add(replicated("out", "in"), 10, 1, ("dp", "cp", "tp"))
    stage.add(replicated("out", "in"), 10, 4, ("edp", "etp"), (("ep", 1),))
    stage.deal()
    assert stage.bytes.tolist() == [20, 30] * 4


def size_of(
    mesh: Mesh,
    tensors: list[EstimatedTensor],
    *,
    share: float | None = None,
    iterations: int = 1,
    disk: float | None = None,
    **settings: Any,
) -> DumpEstimate:
    dump = Dump("folder", "**", **settings)
    return estimate_dump_size(mesh, tensors, dump, share=share, iterations=iterations, disk=disk)


def test_least_most_and_files() -> None:
    mesh = mesh_at({"pp": 2, "tp": 2}, {})
    estimate = size_of(
        mesh, [held(SUMS, (8, 2, 4), stage=1, times=3)], every=5, iterations=4, disk=768.0, part_bytes=500
    )
    assert (estimate.bytes, estimate.least.bytes, estimate.most.bytes, estimate.mean) == (1536, 0, 768, 384)
    assert estimate.most.coords["pp"] == 1
    assert estimate.stages == (0, 1536)
    assert estimate.files == 1 + 1 + 2 + 2
    assert (estimate.total_bytes, estimate.bytes_per_iteration, estimate.seconds) == (6144, 307.2, 2.0)


@pytest.mark.parametrize(("mib", "files"), [(16, 1), (17, 2), (48, 2), (49, 3), (96, 4)])
def test_the_first_file_is_half_as_large_where_files_are_large(mib: int, files: int) -> None:
    tensor = held(STREAM, (mib, 1 << 10, 1 << 8), shape=(mib, 1 << 10, 1 << 8))
    assert size_of(mesh_at({}, {}), [tensor], part_bytes=32 << 20).files == files


# -- what is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(0,), (-1, 3, 4, 5, 99), slice(None, None, 3), slice(10, 20)])
def test_kept_tokens_are_those_that_are_picked(tokens: Any) -> None:
    sizes = {"cp": 2, "tp": 2}
    whole = (24, 2, 4)
    local = compute_local_shape(CUT, whole, sizes)
    estimate = size_of(mesh_at(sizes, {}), [held(CUT, local)], tokens=tokens)
    stage, loads = StageLoad(mesh_at(sizes, {})), []
    for rank in range(stage.count):
        coords = {n: int(c[rank]) for n, c in stage.coords.items()}
        found = select_entries(tokens, None, CUT, local, sizes, coords, 0, [0, 1])
        assert found is not None
        assert found.token is not None
        loads.append(len(found.token) * 4 * 4)
    assert estimate.bytes == sum(loads) > 0
    assert (estimate.least.bytes, estimate.most.bytes) == (min(loads), max(loads))


def test_random_tokens_fractions_and_means() -> None:
    mesh = mesh_at({"cp": 2, "tp": 2}, {})
    tensor = [held(CUT, (6, 2, 4))]
    assert size_of(mesh, tensor, tokens=sampled(8)).bytes == 8 * 2 * 4 * 4
    assert size_of(mesh, tensor, share=0.5).bytes == 12 * 2 * 4 * 4
    assert size_of(mesh, tensor, tokens=sampled(99)).bytes == size_of(mesh, tensor).bytes
    assert (
        size_of(mesh, [held(CUT, (6, 2, 4), dtype=torch.bfloat16)], reduce="mean").bytes == 4 * 2 * 4 * 4
    )  # fp32 summands


# -- words ---------------------------------------------------------------------------------------------


def test_rows_put_layers_together_and_json_has_everything() -> None:
    layers = [held(STREAM, (8, 2, 4), name=f"decoder.layers.{n}:output", stage=n // 2) for n in range(4)]
    estimate = size_of(
        mesh_at({"pp": 2}, {}), [*layers, held(STREAM, (8, 2, 4), name="decoder:output", stage=1)]
    )
    assert estimate.rows() == [
        ("decoder.layers.*:output (4)", "0-1", "8x2x4", "[s, b, h]", "256 B", "1.00 KiB"),
        ("decoder:output", "1", "8x2x4", "[s, b, h]", "256 B", "256 B"),
    ]
    assert [row[0] for row in estimate.rows(most=1)] == ["decoder.layers.*:output (4)"]
    told = json.loads(json.dumps(estimate.to_json()))
    assert told["total_bytes"] == estimate.bytes == 1280
    assert [site["name"] for site in told["sites"]] == [s.name for s in estimate.sites]
    assert dict(estimate.summary())["ranks"] == "2 (pp=2)"


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**50, "1.00 PiB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert format_bytes(count) == words


def test_an_estimate_of_nothing_says_so() -> None:
    with raises(FlexError, "decoder.layers.*"):
        size_of(mesh_at({}, {}), [])


# -- configurations ------------------------------------------------------------------------------------


def dump_estimate(config: Any, *args: Any, **kwargs: Any) -> DumpEstimate:
    pytest.importorskip("megatron.core")
    if tuple(map(int, importlib.metadata.version("megatron-core").split(".")[:2])) < (0, 19):
        pytest.skip("megatron.training came with 0.19")
    from megatron_flex.estimate import estimate_dump

    return estimate_dump(config, *args, **kwargs)


def test_files_flags_and_mappings_say_the_same(tmp_path: Path) -> None:
    config = {
        **BASE,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "swiglu": True,
        "world_size": 8,
    }
    (tmp_path / "a.json").write_text(json.dumps(config))
    (tmp_path / "a.yaml").write_text(
        "\n".join(f"{k.replace('_', '-')}: {json.dumps(v)}" for k, v in config.items())
    )
    flags = [
        w for k, v in config.items() for w in (["--" + k.replace("_", "-")] + ([] if v is True else [str(v)]))
    ]
    wanted = dump_estimate(config, "decoder.layers.*")
    assert wanted.ranks == 8
    for other in (tmp_path / "a.json", str(tmp_path / "a.yaml"), flags):
        assert dump_estimate(other, "decoder.layers.*") == wanted


def test_what_megatron_derives_is_derived() -> None:
    found = dump_estimate(
        BASE, ["decoder.layers.0.mlp.linear_fc2:input", "output_layer"], mesh={"tp": 2}, world_size=4
    )
    fc2, logits = found.sites
    assert fc2.shape == (32, 2, 4 * 64)
    assert logits.shape == (32, 2, 100)
    assert logits.local == (32, 2, 256 // 2)  # padded to a multiple of 128 times the tensor parallel size
    assert found.mesh["dp"] == 2
    assert found.bytes == 2 * (32 * 2 * 256 + 32 * 2 * 256) * 2  # two replicas, in bf16


def test_sixteen_thousand_ranks() -> None:
    config = {
        **BASE,
        "num_layers": 64,
        "hidden_size": 1024,
        "num_attention_heads": 64,
        "global_batch_size": 1024,
    }
    mesh = {"tp": 8, "pp": 16, "cp": 2, "dp": 64}
    found = dump_estimate(
        {**config, "sequence_parallel": True}, ["decoder.layers.*", "decoder:output"], mesh=mesh
    )
    assert found.ranks == 16384
    assert len(found.sites) == 65
    assert found.bytes == 65 * 1024 * 32 * 1024 * 2  # each sample once, whatever the layout
    assert [s.stage for s in found.sites] == [*(n // 4 for n in range(64)), 15]
    assert found.most.coords["pp"] == 15
    assert found.least.bytes == 4 * 8 * (32 // 16) * 2 * 1024 * 2


def test_casts_gradients_and_iterations() -> None:
    one = dump_estimate(BASE, "decoder.layers.0")
    assert dump_estimate(BASE, "decoder.layers.0", dtype="fp32", gradients=True).bytes == 4 * one.bytes
    assert dump_estimate(BASE, "decoder.layers.0", every=10, iterations=95).total_bytes == 10 * one.bytes
    assert dump_estimate(BASE, "decoder.layers.0", tokens=slice(None, None, 8)).bytes == one.bytes / 8
    assert dump_estimate(BASE, "decoder.layers.0", tokens=0.25).bytes == one.bytes / 4
    assert dump_estimate({**BASE, "global_batch_size": 8}, "decoder.layers.0").bytes == 4 * one.bytes
    assert (
        dump_estimate({**BASE, "global_batch_size": 8}, "decoder.layers.0", microbatches=3).bytes
        == 3 * one.bytes
    )
    weight = dump_estimate(BASE, parameters="embedding.word_embeddings.weight", mesh={"tp": 2, "dp": 4})
    assert weight.bytes == 100 * 64 * 2 + 156 * 64 * 2  # with its padding, once


WRONG = [
    ({"num_layer": 3}, ["'num_layer'", "num_layers"]),
    ({"num_attention_heads": 5}, ["num_attention_heads=5", 2]),
    ({"hidden_size": 66}, ["hidden_size=66", 4, "num_attention_heads"]),
    ({"context_parallel_size": 3}, ["seq_length=32", 6, 36]),
    ({"world_size": 7}, ["world_size=7", 2, 6]),
    ({"global_batch_size": 3}, ["global_batch_size=3", 2]),
    ({"normalization": "Norm"}, ["--normalization", "'Norm'"]),
    ({"num_layers": "many"}, ["--num-layers", "'many'"]),
    ({"vocab_size": None}, ["vocab_size", "padded_vocab_size"]),
    ({"pipeline_model_parallel_size": 3}, ["Megatron"]),
    ({"num_experts": 4, "expert_model_parallel_size": 3}, ["num_experts=4", 3]),
    ({"tensor_model_parallel_size": 0}, ["tensor_model_parallel_size", 1]),
    ({"bf16": True, "fp16": True}, ["Megatron", "`assert not args.bf16`"]),
]


@pytest.mark.parametrize(("change", "values"), WRONG, ids=lambda x: str(x)[:40])
def test_what_cannot_be_says_value_rule_and_fix(change: dict[str, Any], values: list[object]) -> None:
    with raises(FlexError, *values):
        dump_estimate({**BASE, "tensor_model_parallel_size": 2, **change}, "decoder.layers.*")


def test_wrong_words_of_an_estimate(tmp_path: Path) -> None:
    with raises(SiteError, site="encoder.layers.*"):
        dump_estimate(BASE, "encoder.layers.*")
    with raises(FlexError, "TEDotProductAttention"):
        dump_estimate(BASE, "decoder.layers.0.self_attention.core_attention:scores")
    with raises(FlexError, "'--num-layer'", "--num-layers"):
        dump_estimate(["--num-layer", "3"], "decoder.layers.*")
    with raises(FlexError, "'tensor'"):
        dump_estimate(BASE, "decoder.layers.*", mesh={"tensor": 2})
    with raises(FlexError, 1.5):
        dump_estimate(BASE, "decoder.layers.*", tokens=1.5)
    with raises(FlexError, "microbatches=2", 1):
        dump_estimate(BASE, "decoder.layers.*", microbatches=2)
    with raises(FlexError, tmp_path / "none.yaml", os.strerror(errno.ENOENT)):
        dump_estimate(tmp_path / "none.yaml", "decoder.layers.*")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with raises(FlexError, tmp_path / "list.yaml", "list"):
        dump_estimate(tmp_path / "list.yaml", "decoder.layers.*")
    (tmp_path / "torn.json").write_text("{")
    with raises(FlexError, tmp_path / "torn.json", "JSON", "YAML"):
        dump_estimate(tmp_path / "torn.json", "decoder.layers.*")


def test_nothing_is_left_behind() -> None:
    import torch.distributed as dist

    from megatron_flex import cpu

    dump_estimate(BASE, "decoder.layers.*")
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.training import global_vars

    before = {n: v for n, v in vars(transformer_engine).items() if n.startswith("TE")}
    dump_estimate({**BASE, "pipeline_model_parallel_size": 2}, "decoder.layers.*")
    assert {n: v for n, v in vars(transformer_engine).items() if n.startswith("TE")} == before
    assert not cpu.is_enabled()
    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_RANK is None
    assert global_vars._GLOBAL_ARGS is None


def test_an_estimate_needs_a_process_without_groups() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with raises(FlexError):
            dump_estimate(BASE, "decoder.layers.*")
    finally:
        dist.destroy_process_group()


def test_local_shapes() -> None:
    sizes = {"tp": 2, "cp": 2}
    assert compute_local_shape(CUT, (24, 2, 4), sizes) == (6, 2, 4)
    turned = Layout((Dim("s", (Cut("tp"),)), Dim("b"), Dim("h")), permute=(1, 0, 2))
    assert compute_local_shape(turned, (2, 24, 4), sizes) == (12, 2, 4)
    assert prod(compute_local_shape(COPIES, (4, 4, 2), {"tp": 4})) == 16
    with raises(FlexError, 25):
        compute_local_shape(CUT, (25, 2, 4), sizes)


# -- what hooks cost -----------------------------------------------------------------------------------

FC1, WHOLE = "decoder.layers.*.mlp.linear_fc1", 32 * 2 * 256 * 2  # bytes


def hook_estimate(config: Any, **kwargs: Any) -> Any:
    dump_estimate(config, "decoder.layers.0")  # skips where there is no megatron.training
    from megatron_flex.estimate import estimate_hooks

    return estimate_hooks(config, **kwargs)


def test_memory_of_a_rank_depends_on_no_number_of_replicas_or_stages() -> None:
    config = {**BASE, "num_layers": 16, "num_attention_heads": 8, "sequence_parallel": True}
    hooks = {"read": ["decoder.layers.*"], "edit": [f"{FC1}=general", f"{FC1}=linear:2"]}
    few = hook_estimate(config, mesh={"tp": 4, "pp": 2, "dp": 8}, microbatches=1, **hooks)
    many = hook_estimate(config, mesh={"tp": 4, "pp": 16, "dp": 256}, microbatches=1, **hooks)
    assert (few.ranks, many.ranks) == (64, 16384)
    assert {c.name: (c.each.device, c.each.host, c.each.leader_host) for c in few.hooks} == {
        c.name: (c.each.device, c.each.host, c.each.leader_host) for c in many.hooks
    }
    assert {r.device for r in few.roles} == {r.device for r in many.roles}
    assert [r.role.partition("stage")[2] for r in many.roles] == [" 0", "s 0-15", "s 1-15"], (
        "alike in one row"
    )
    wide = hook_estimate(config, mesh={"tp": 8, "pp": 2, "dp": 8}, microbatches=1, read=["decoder.layers.*"])
    read = [c for c in few.hooks if c.each.action == "read"]
    assert read[0].each.device == 2 * wide.hooks[0].each.device == 32 * 2 * 64 * 2 / 4


def test_rows_are_named_as_they_were_asked_for() -> None:
    read = [
        "decoder.layers.*@positions=-1",
        "decoder.layers.9",
        f"{FC1}@gradient",
        "decoder.layers.[4-6].mlp*",
    ]
    found = hook_estimate({**BASE, "num_layers": 12}, read=read, edit=["decoder.layers.3=scale=2"])
    assert [row[0] for row in found.rows()] == [
        "decoder.layers.*@positions=-1 (12)",
        "decoder.layers.9",
        f"{FC1}@gradient (12)",
        "decoder.layers.[4-6].mlp* (3)",
        "decoder.layers.3",
    ]
    two = hook_estimate({**BASE, "num_layers": 12}, read=["decoder.layers.[49]**@samples=0"])
    names = {row[0] for row in two.rows()}
    assert "decoder.layers.{4,9}.mlp:output@samples=0 (2)" in names
    assert str(found).splitlines()[1].startswith("tensor ")
    dumped = dump_estimate({**BASE, "num_layers": 12}, "decoder.layers.9", gradients=True)
    assert [row[0] for row in dumped.rows()] == ["decoder.layers.9:output", "decoder.layers.9:output.grad"]
    assert "decoder.layers.9:output.grad" in str(dumped)


def test_links_by_kind_of_hook_and_by_node() -> None:
    config = {**BASE, "num_layers": 1}
    for node, near, far in ((8, WHOLE / 2 * 2, 0), (1, 0, WHOLE / 2 * 2)):
        from megatron_flex.estimate import Links

        links = Links(gpus_per_node=node)
        hooks = {"read": [FC1], "edit": [f"{FC1}=general", f"{FC1}=local", f"{FC1}=scale=1.01"]}
        found = hook_estimate(config, mesh={"tp": 2}, links=links, **hooks)
        read, general, local, scale = (c.each for c in found.hooks)
        assert (general.rank.nvlink, general.rank.network) == (near, far)
        assert local.rank == scale.rank == type(local.rank)()
        assert (read.rank.nvlink, read.rank.pcie, read.rank.shared) == (0, WHOLE / 2, WHOLE / 2)
        assert read.rank.network == read.leader.network == (0 if node == 8 else WHOLE / 2)
        assert found.to_json()["slowest"]["seconds"] == found.slowest.seconds > 0


def test_dumps_and_statistics_are_rows_beside_hooks() -> None:
    import megatron_flex as mf

    config, more = {**BASE, "num_layers": 1}, {"mesh": {"tp": 2, "pp": 1}}
    dump = mf.Dump("there", [FC1, "decoder.layers.0"], tokens=slice(None, None, 2))
    found = hook_estimate(config, read=FC1, dump=dump, statistics=mf.Statistics("numbers", FC1), **more)
    read, stream, wide, numbers = found.hooks
    assert (read.each.action, wide.each.action, stream.each.action, numbers.each.action) == (
        "read",
        "dump",
        "dump",
        "statistics",
    )
    assert wide.each.rank == wide.each.leader
    assert (wide.each.rank.pcie, wide.each.rank.disk) == (WHOLE / 4, WHOLE / 4), "half of its part"
    assert stream.each.rank.disk * 2 * 2 == stream.each.full, "both have all; each writes half of a half"
    assert [(s.op, s.axis, s.ranks) for s in numbers.each.collectives] == [("all_reduce", "all", 2)]
    assert found.slowest.moved.disk == wide.each.rank.disk + stream.each.rank.disk
    assert found.slowest.moved.nvlink == numbers.each.collectives[0].nbytes
    assert [row[8] for row in found.rows()][1:3] != ["0 B", "0 B"]


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"read": "decoder.layers.0@position=3"}, ("'position=3'", "positions")),
        ({"read": "decoder.layers.0@positions=a"}, ("decoder.layers.0@positions=a", "'a'")),
        ({"read": "@positions=3"}, ("@positions=3",)),
        ({"edit": "decoder.layers.0"}, ("decoder.layers.0", "PATTERN=general")),
        ({"edit": "decoder.layers.0=scal=2"}, ("'scal'", "scale")),
        ({"read": "decoder.layers.0@heads=1"}, ("heads",)),
        ({"read": "encoder.*"}, ("encoder.*",)),
        ({}, ("--read",)),
    ],
)
def test_wrong_words_of_hooks(hooks: dict[str, str], said: tuple[str, ...]) -> None:
    with raises(FlexError, *said):
        hook_estimate(BASE, **hooks)


def test_links_are_numbers_above_zero() -> None:
    from megatron_flex.estimate import Links

    with raises(FlexError, "nvlink=0"):
        Links(nvlink=0)
