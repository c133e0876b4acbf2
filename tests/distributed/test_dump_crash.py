"""Processes that write a dump are killed again and again: nothing whole is lost, and nothing torn is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_flex.dump.schema import ShardEntry
from tests.support import gpt, killing, ranks
from tests.support.gpt import Case

ITERATIONS, KILLS = 150, 200
SHAPE = 3, 4, 8


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def given(iteration: int, rank: int) -> Tensor:
    return torch.full(SHAPE, float(iteration)) + torch.arange(8) / 16 + rank / 128


def fed(iteration: int, rank: int, entry: ShardEntry) -> Tensor:
    """What passed at a place; the loss is the sum of the outputs, times the iteration and one."""
    x = given(iteration, rank)
    return {
        ("twice:output", "value"): x * 2,
        ("twice:output", "gradient"): torch.full(SHAPE, (iteration + 1) / 2),
        ("halve:output", "value"): x,
        ("halve:output", "gradient"): torch.full(SHAPE, iteration + 1.0),
    }[entry.site, entry.kind]


def plain(begun: Callable[[], None], path: str) -> None:
    import torch.distributed as dist

    import megatron_flex as mf

    model = nn.Sequential()
    model.add_module("twice", Doubled())
    model.add_module("halve", Halved())
    rank = dist.get_rank()
    dump = mf.Dump(path, ["twice", "halve"], gradients=True, part_bytes=800, queue_bytes=4000)
    with mf.attach(model, dumps=dump) as flex:
        begun()
        for number in range(ITERATIONS):
            with flex.step():
                (model(given(number, rank).requires_grad_()).sum() * (number + 1)).backward()


class Plain(killing.Watch):
    def names(self, rank: int) -> set[str]:
        sites = "twice:output", "halve:output"
        return {f"{site}|{kind}|0|0" for site in sites for kind in ("value", "gradient")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_leave_no_torn_iteration_and_lose_none(tmp_path: Path) -> None:
    chance = random.Random(6)
    kills = stories = inside = torn = opening = restarts = 0
    while kills < KILLS:
        path = tmp_path / str(stories)
        watch = Plain(path, fed)
        for _ in range(12):
            world = chance.choice([2, 3, 4])
            kills += killing.killed(world, plain, (str(path),), killing.moments(chance, world, 0.4))
            watch.look()
            restarts += 1
        killing.killed(2, plain, (str(path),), None)
        watch.look()
        assert {int(name) for _, name in watch.whole} == set(range(ITERATIONS))
        stories, inside = stories + 1, inside + watch.inside
        torn, opening = torn + watch.torn, opening + watch.opening
    print(
        f"{kills} kills in {restarts} runs of {stories} dumps: {inside} while a file was being written, "
        f"{opening} while a run was being opened; {torn} iterations were torn, and none was seen"
    )
    assert inside
    assert torn


CASE = Case("tp2 sp", tp=2, sp=True)
SITES = ["decoder.layers.*", "decoder.layers.*.mlp.linear_fc1"]
FEW = 12


def megatron(begun: Callable[[], None], path: str) -> None:
    import megatron_flex as mf

    chunks = ranks.start(CASE)
    weight = chunks[0].embedding.word_embeddings.weight
    first = weight.detach().clone()
    dump = mf.Dump(path, SITES, gradients=True, part_bytes=3000, queue_bytes=20000)
    with mf.attach(chunks, dumps=dump):
        begun()
        for number in range(FEW):
            with torch.no_grad():
                weight.copy_(first * (1 + number / 8))
            gpt.step(CASE, chunks, 0)


class Like(killing.Watch):
    """Equal to what a run wrote that nobody killed."""

    def __init__(self, path: Path, other: Path) -> None:
        from megatron_flex.dump.part_format import read_part

        self.known: dict[tuple[int, int, str], Tensor] = {}
        self.tensors: dict[int, set[str]] = {}
        for file in other.glob("run-0000/*/*.safetensors"):
            part, content = read_part(file), file.read_bytes()
            rank = part.index.rank
            for name, (dtype, shape, first, nbytes) in part.where.items():
                data = torch.frombuffer(bytearray(content[first : first + nbytes]), dtype=dtype)
                self.known[part.index.iteration, rank, name] = data.view(shape)
                self.tensors.setdefault(rank, set()).add(name)
        super().__init__(path, lambda number, rank, entry: self.known[number, rank, entry.tensor])

    def names(self, rank: int) -> set[str]:
        return self.tensors[rank]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_of_megatron_go_on_where_they_were(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    chance = random.Random(7)
    killing.killed(2, megatron, (str(tmp_path / "whole"),), None)
    watch = Like(tmp_path / "killed", tmp_path / "whole")
    assert len({number for number, _, _ in watch.known}) == FEW
    assert any((tmp_path / "whole").glob("run-0000/*/*-002.safetensors"))  # of several parts
    kills = 0
    for _ in range(8):
        kills += killing.killed(2, megatron, (str(watch.path),), killing.moments(chance, 2, 0.5))
        watch.look()
    killing.killed(2, megatron, (str(watch.path),), None)
    watch.look()
    assert {int(name) for _, name in watch.whole} == set(range(FEW))
    print(
        f"{kills} kills of Megatron's ranks: {watch.inside} files half written, {watch.torn} torn iterations"
    )
