"""The ways to hook that scripts/bench hook-cost counts, each beside a hook by hand.

The model is as small as can be: layers that negate a tensor of 4 KiB, which is sharded over two tensor
parallel ranks. torch's fake process group stands for the other rank, so that one process runs everything
and nothing waits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.adapters import FrameworkMatch, ModuleAdapter, make_axis
from megatron_flex.adapters.taps import module_output
from megatron_flex.collectives.transport.segments import SegmentPool
from megatron_flex.collectives.transport.shared_memory import Member, SharedMemoryTransport
from megatron_flex.config import flex_config
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime import dump_sink
from megatron_flex.sites import Site, Tap

MANY = 32  # sites of a step with many reads
SHARD = (8, 2, 64)  # of fp32: 4 KiB
RANKS = 2
FEATURES = SHARD[-1] * RANKS
FACTOR = 1.01
RANK = 8  # of the trainable module
SITES = "layers.*"
LAYOUT = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),))))


class Layer(nn.Module):
    """The cheapest operation with a gradient."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.neg(inputs)


class Model(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class ShardedLayers(ModuleAdapter):
    """The outputs of the layers are sharded, as an adapter of a framework declares."""

    def sites(self) -> list[Site]:
        """The outputs of the layers."""
        own = [(n, m) for n, m in self.root.named_modules() if isinstance(m, Layer)]
        shape = (*SHARD[:-1], FEATURES)
        return [Site(f"{n}:output", LAYOUT, shape, tap=Tap(module_output, m)) for n, m in own]


def find_model(chunks: list[nn.Module], axis_sizes: Any, process_group: Any) -> FrameworkMatch | None:
    """The finder of the adapter."""
    if not isinstance(chunks[0], Model):
        return None
    # The rendezvous store would wait for the other rank: the mesh lists the ranks that compare hooks.
    mesh = replace(Mesh((make_axis("tp", dist.group.WORLD),)), ranks=(0,))
    return FrameworkMatch("counted", "a Model", lambda: ShardedLayers(chunks[0], mesh, name="counted"))


# -- a way ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A way in place.

    Attributes:
        step: the context of a step.
        forget: discards what the step recorded.
    """

    step: Callable[[], AbstractContextManager[Any]]
    forget: Callable[[], None] = lambda: None


Way = Callable[[Model], AbstractContextManager[Prepared]]


@contextmanager
def _no_step(end: Callable[[], None] | None = None) -> Iterator[None]:
    yield
    if end is not None:
        end()


@contextmanager
def nothing(model: Model) -> Iterator[Prepared]:
    """No hook."""
    yield Prepared(_no_step)


# -- by hand -------------------------------------------------------------------------------------------------


def _hooked(model: Model, hook: Callable[..., Any]) -> ExitStack:
    stack = ExitStack()
    for layer in model.layers:
        stack.callback(layer.register_forward_hook(hook).remove)
    return stack


@contextmanager
def reads_by_hand(take: Callable[[Tensor], Tensor], model: Model) -> Iterator[Prepared]:
    """A hook that keeps what `take` returns."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        kept.append(take(output.detach()))

    with _hooked(model, hook):
        yield Prepared(_no_step, kept.clear)


@contextmanager
def gradient_by_hand(model: Model) -> Iterator[Prepared]:
    """A hook that keeps the gradient."""
    kept: list[Tensor] = []

    def keep(grad: Tensor) -> None:
        kept.append(grad.clone())

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(keep)

    with _hooked(model, hook):
        yield Prepared(_no_step, kept.clear)


@contextmanager
def edits_by_hand(change: Callable[[Tensor], Tensor], model: Model) -> Iterator[Prepared]:
    """A hook that replaces the shard."""

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return change(output)

    with _hooked(model, hook):
        yield Prepared(_no_step)


@contextmanager
def dump_by_hand(model: Model) -> Iterator[Prepared]:
    """A hook that clones; the step ends with a file."""
    kept: dict[str, Tensor] = {}

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        kept["shard"] = output.detach().clone()

    with tempfile.TemporaryDirectory() as folder, _hooked(model, hook):
        yield Prepared(partial(_no_step, lambda: save_file(kept, Path(folder) / "step.safetensors")))


@contextmanager
def statistics_by_hand(model: Model) -> Iterator[Prepared]:
    """A hook that calls torch for each figure."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        values = output.detach().float()
        found = values.sum(), values.square().sum(), values.abs().max(), values.isnan().sum()
        kept.append(torch.stack([*found, values.isinf().sum(), (values == 0).sum()]))

    def end() -> None:
        total = torch.stack(kept)
        dist.all_reduce(total)
        kept.clear()

    with _hooked(model, hook):
        yield Prepared(partial(_no_step, end))


@contextmanager
def trainable_by_hand(model: Model) -> Iterator[Prepared]:
    """The gathered edit by a module of low rank."""
    module = mf.edits.LowRank(FEATURES, RANK)

    def change(shard: Tensor) -> Tensor:
        full: Tensor = Whole.apply(shard)
        edited: Tensor = Part.apply(module(full))
        return edited

    with edits_by_hand(change, model):
        yield Prepared(_no_step, partial(module.zero_grad, True))


class Whole(torch.autograd.Function):
    """The full tensor; backward the own part."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return _gather(shard)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _part(grad)


class Part(torch.autograd.Function):
    """The own part; backward the full tensor."""

    @staticmethod
    def forward(ctx: Any, full: Tensor) -> Tensor:
        return _part(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gather(grad)


class Sum(torch.autograd.Function):
    """The sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def _gather(shard: Tensor) -> Tensor:
    shards = [torch.empty_like(shard) for _ in range(RANKS)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards, dim=-1)


def _part(full: Tensor) -> Tensor:
    return full.chunk(RANKS, dim=-1)[0].contiguous()


def doubled(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """A person's editing function, of which nothing is declared."""
    return inputs * FACTOR


def _direction() -> Tensor:
    found = torch.randn(FEATURES, generator=torch.Generator().manual_seed(5))
    return found / found.norm()


def _without_direction(mine: Tensor, shard: Tensor) -> Tensor:
    return shard - Sum.apply(shard @ mine) @ mine.T


# -- megatron_flex -------------------------------------------------------------------------------------------


@contextmanager
def attached(hooks: Callable[[], list[mf.HookFunction]], model: Model) -> Iterator[Prepared]:
    """Hooks."""
    with mf.attach(model, hooks()) as flex:
        yield Prepared(flex.step, flex.output_dict.clear)


@contextmanager
def reads(options: dict[str, Any], model: Model) -> Iterator[Prepared]:
    """Reads through memory that the ranks of a node share, as is the default."""
    with (
        mock.patch.object(SharedMemoryTransport, "open", _share_memory),
        mf.attach(model, [mf.HookFunction(SITES, **options)]) as flex,
    ):
        yield Prepared(flex.step, flex.output_dict.clear)


def _share_memory(mesh: Mesh, watch: Any, name: str) -> SharedMemoryTransport:
    """The transport of the first of two ranks of a node, as `SharedMemoryTransport.open` returns it."""
    members = [Member(rank, {"tp": rank}, "node") for rank in range(RANKS)]
    pool = SegmentPool(flex_config.shared_folder, 1 << 28)
    transport = SharedMemoryTransport(members, 0, mesh, pool, watch=watch)
    transport.collect([0], "the first segment")
    return transport


def _reads(**options: Any) -> Way:
    return partial(reads, options)


def _edits(function: Callable[[], Any]) -> Way:
    return partial(attached, lambda: [mf.HookFunction(SITES, editing_function=function(), save=False)])


@contextmanager
def trains(model: Model) -> Iterator[Prepared]:
    """A module of low rank, trained in a hook."""
    hook = mf.HookFunction(SITES, editing_function=mf.edits.low_rank("added"), save=False)
    with mf.attach(model, [hook]) as flex:
        module = mf.edits.LowRank(FEATURES, RANK)
        flex.register_trainable_module("added", module)
        yield Prepared(flex.step, partial(module.zero_grad, True))


@contextmanager
def statistics(model: Model) -> Iterator[Prepared]:
    """Statistics of one site."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mf.attach(model, statistics=mf.Statistics(folder, [SITES])) as flex,
    ):
        yield Prepared(flex.step)


@contextmanager
def dumps(model: Model) -> Iterator[Prepared]:
    """A dump of one site."""
    with tempfile.TemporaryDirectory() as folder, mf.attach(model) as flex:
        with mock.patch.object(dump_sink, "gather_numbers_to_first", _number_ranks):
            flex.register_dump(mf.Dump(Path(folder) / "dump", [SITES]))
        yield Prepared(flex.step)


def _number_ranks(numbers: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Let each rank answer as this one; a rank's number and its tensor parallel coordinate are its own."""
    place = 1 + list(mesh.coords).index("tp")
    return [[rank, *numbers[1:place], rank, *numbers[place + 1 :]] for rank in range(dist.get_world_size())]


def _one_position(shard: Tensor) -> Tensor:
    return shard[-1:].clone()


@dataclass(frozen=True)
class Pair:
    """What is compared.

    Attributes:
        ours: the way of this package.
        hand: the hook by hand.
        layers: how many layers the model has, each of which is hooked.
    """

    ours: Way
    hand: Way
    layers: int = 1


IDLE = partial(attached, list)
WAYS = {
    "idle": Pair(IDLE, nothing),
    "read": Pair(_reads(), partial(reads_by_hand, Tensor.clone)),
    "read of a position": Pair(_reads(select=mf.Select(positions=-1)), partial(reads_by_hand, _one_position)),
    "read of 32 sites": Pair(_reads(), partial(reads_by_hand, Tensor.clone), layers=MANY),
    "read of 32 sites by collectives": Pair(
        partial(attached, lambda: [mf.HookFunction(SITES)]),
        partial(reads_by_hand, Tensor.clone),
        layers=MANY,
    ),
    "local edit": Pair(
        _edits(lambda: mf.edits.scale(FACTOR)), partial(edits_by_hand, lambda shard: shard * FACTOR)
    ),
    "edit with a reduction": Pair(
        _edits(lambda: mf.edits.project_out(_direction())),
        partial(edits_by_hand, partial(_without_direction, _direction()[: SHARD[-1], None])),
    ),
    "gathered edit": Pair(
        _edits(lambda: doubled),
        partial(edits_by_hand, lambda shard: Part.apply(Whole.apply(shard) * FACTOR)),
    ),
    "statistics": Pair(statistics, statistics_by_hand),
    "dump": Pair(dumps, dump_by_hand),
    "trainable module": Pair(trains, trainable_by_hand),
    "gradient": Pair(_reads(hook_type="tensor"), gradient_by_hand),
}
