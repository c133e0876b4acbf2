"""The compatible interface on plain modules: torch's own hooks on one process are the truth."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from megatron_flex.compat import DummyModule, FlexModel, HookFunction
from tests.support import compat_plain as plain
from tests.support.messages import assert_names, raises
from tests.support.pool import run

PLACES = {
    "forward": "0.fc1",
    "forward_pre": "0.fc2",
    "full_backward": "1.fc2",
    "full_backward_pre": "1.fc1",
    "tensor": "0.fc1.weight",
}


def close(got: Any, want: Any) -> bool:
    return bool(torch.allclose(got, want, rtol=1e-4, atol=1e-6))


@pytest.mark.parametrize("editing", [False, True])
@pytest.mark.parametrize("kind", PLACES)
def test_registered_hooks_in_one_process(kind: str, editing: bool) -> None:
    name = PLACES[kind]
    want = plain.truth(kind, name, plain.mix if editing else None)
    got = plain.hooked(kind, name, plain.edit if editing else None, "", (6,))
    assert [torch.equal(a, b) for a, b in zip(got["seen"][name], want["seen"], strict=True)] == [True]
    assert close(got["output"], want["output"])
    assert all(close(a, b) for a, b in zip(got["grads"], want["grads"], strict=True))


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)], ids=["even", "uneven"])
@pytest.mark.parametrize("wrapper", ["", "ddp"])
@pytest.mark.parametrize("kind", [k for k in PLACES if k != "tensor"])
def test_samples_of_data_parallel_ranks(kind: str, wrapper: str, sizes: tuple[int, ...]) -> None:
    name = PLACES[kind]
    want = plain.truth(kind, name, plain.mix)
    first, second = run(2, plain.hooked, kind, name, plain.edit, wrapper, sizes)
    (seen,) = first["seen"][first["name"]]
    assert close(seen, want["seen"][0])
    assert torch.equal(second["seen"][second["name"]][0], seen)
    assert close(torch.cat([first["output"], second["output"]]), want["output"])
    for a, b, w in zip(first["grads"], second["grads"], want["grads"], strict=True):
        assert close(a * 2 if wrapper else a + b, w), "DDP averages what a sum gives one process"


def each(kind: str) -> list[Any]:
    """A parameter's gradient is each replica's own; that of the first one is kept."""
    got = plain.hooked(kind, PLACES[kind], None, "", (3, 3))
    root = plain.model()
    plain.loss_of(root(plain.data()[:3]), 6).backward()
    return [[close(t, root.get_parameter(PLACES[kind]).grad) for t in ts] for ts in got["seen"].values()]


def test_a_parameters_gradient_on_data_parallel_ranks() -> None:
    assert run(2, each, "tensor") == [[[True]], [[True]]]


# -- what outputs and calls look like ----------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


class Giving(nn.Module):
    """Returns two tensors in whatever a test wants."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: Tensor, extra: Any = None) -> Any:
        return self.make(inputs, inputs + 1)


class Around(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.giving = Giving(make)

    def forward(self, inputs: Tensor) -> Any:
        return self.giving(extra=None, inputs=inputs)


def test_unpack_idx_counts_tensors_depth_first() -> None:
    for index, offset in ((0, 0.0), (1, 1.0), (-1, 1.0), (-2, 0.0)):
        output: dict[str, list[Tensor]] = {}
        flex = FlexModel(Around(lambda a, b: (None, 3, [a, {"x": (b,)}])), output)
        flex.register_forward_hook(HookFunction("giving", unpack_idx=index))
        flex(torch.zeros(2))
        assert [float(t[0]) for t in output["giving"]] == [offset]
        flex.restore()


def test_unpack_idx_out_of_range() -> None:
    flex = FlexModel(Around(lambda a, b: (a, None, b)), {})
    flex.register_forward_hook(HookFunction("giving", unpack_idx=2))
    with raises(IndexError, "unpack_idx=2", "2"):
        flex(torch.zeros(2))


def test_expected_shape_is_checked() -> None:
    flex = FlexModel(plain.model(), {})
    flex.register_forward_hook(HookFunction("0.fc1", (None, 20)))
    flex(plain.data())
    flex.register_forward_hook(HookFunction("1.fc1", (None, 21)))
    with raises(ValueError, "(6, 20)", "(None, 21)"):
        flex(plain.data())


def local_batch() -> list[Any]:
    """People wrote the batch of their own rank, or None."""
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(plain.model(), output, data_parallel_size=2)
    flex.register_forward_hook(HookFunction("0.fc1", (3, 20)))
    flex.register_forward_hook(HookFunction("1.fc1", (None, 20), plain.edit))
    flex(plain.data()[:3])
    return [tuple(t.shape) for ts in output.values() for t in ts]


def test_expected_shape_with_a_ranks_own_batch() -> None:
    assert run(2, local_batch) == [[(6, 20)] * 2] * 2


def test_dummy_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dummy = DummyModule()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.dummy(inputs * 2) + 1

    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Model(), output)
    flex.register_forward_hook(HookFunction("dummy", editing_function=plain.edit))
    made = flex(torch.ones(2))
    assert torch.equal(output["dummy"][0], torch.full((2,), 2.0))
    assert torch.equal(made, torch.full((2,), 5.0))
    thing = object()
    assert DummyModule()(thing) is thing


# -- who runs it -------------------------------------------------------------------------------------


def subsets() -> list[Any]:
    """One FlexModel on all ranks and one on each alone, by process_group."""
    rank = dist.get_rank()
    alone = [dist.new_group([n]) for n in range(2)][rank]
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(plain.model(), output, process_group=alone)
    flex.register_forward_hook(HookFunction("0.fc1"))
    flex(plain.data()[rank : rank + 1])
    fmps = flex.fmps
    return [
        [tuple(t.shape) for t in output["0.fc1"]],
        (fmps.get_local_rank(), fmps.get_local_world_size(), fmps.get_subset_rank()),
    ]


def test_process_group() -> None:
    assert run(2, subsets) == [[[(1, 20)], (0, 1, 0)], [[(1, 20)], (0, 1, 1)]]


def wrong_sizes() -> str:
    try:
        FlexModel(plain.model(), {}, tensor_parallel_size=2, data_parallel_size=2)
    except ValueError as error:
        return str(error)
    return ""


def test_sizes_must_make_up_the_ranks() -> None:
    for said in run(2, wrong_sizes):
        assert_names(said, "4")


class Columns(nn.Module):
    """Made by hand: each tensor parallel rank has a part of the columns, and a sum ends it."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        whole = plain.Block()
        self.fc1 = nn.Linear(10, 20 // size)
        self.fc2 = nn.Linear(20 // size, 10, bias=False)
        with torch.no_grad():
            self.fc1.weight.copy_(whole.fc1.weight.chunk(size)[rank])
            self.fc1.bias.copy_(whole.fc1.bias.chunk(size)[rank])
            self.fc2.weight.copy_(whole.fc2.weight.chunk(size, dim=1)[rank])

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.fc2(self.fc1(inputs))
        if dist.get_world_size() > 1:
            dist.all_reduce(out)
        return out


def sharded() -> list[Any]:
    torch.manual_seed(0)
    size = dist.get_world_size()
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Columns(size, dist.get_rank()), output, tensor_parallel_size=size)
    flex.register_forward_hook(HookFunction("fc1", (None, 20), plain.edit))
    with torch.no_grad():
        made = flex(plain.data())
    weight = flex.get_module_parameter("fc1.weight", (20, None))
    answer = [list(output.get("fc1", [])), made, weight]
    flex.register_forward_hook(HookFunction("fc2"))  # a partial sum on each rank
    with raises(ValueError, "fc2:output"), torch.no_grad():
        flex(plain.data())
    return answer


def test_expected_shape_says_what_tensor_parallel_ranks_share() -> None:
    torch.manual_seed(0)
    whole = plain.Block()
    with torch.no_grad():
        seen, weight = whole.fc1(plain.data()), whole.fc1.weight
        made = nn.functional.linear(plain.mix(seen), whole.fc2.weight)
    first, second = run(2, sharded)
    for read, other, theirs in (first, second):
        assert torch.allclose(read[0], seen, atol=1e-6)
        assert torch.allclose(other, made, atol=1e-5)
        assert torch.equal(theirs, weight)


def sharding(module: nn.Module) -> FullyShardedDataParallel:
    """A module in torch's wrapper, which without a GPU has to be told that there is none."""
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def wrapped(how: str) -> list[Any]:
    root: Any = plain.model()
    if how == "wrapper":
        root = sharding(nn.Sequential(*(sharding(m) for m in root)))
        name = "_fsdp_wrapped_module.0._fsdp_wrapped_module.fc1"
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*root, root):
            fully_shard(module, mesh=mesh)
        name = "0.fc1"
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(root, output, data_parallel_size=dist.get_world_size())
    flex.register_forward_hook(HookFunction(name, (None, None), plain.edit))
    rank = dist.get_rank()
    with torch.no_grad():
        made = flex(plain.data()[3 * rank : 3 * rank + 3])
    whole = flex.get_module_parameter(f"{name}.weight", (20, 10))
    try:
        flex.register_hook(HookFunction(f"{name}.weight"))
        error = ""
    except ValueError as said:
        error = str(said)
    return [output.get(name, []), made, whole, error]


@pytest.mark.parametrize("how", ["wrapper", "fully_shard"])
def test_fully_sharded_data_parallel(how: str) -> None:
    """What modules return is read and edited, parameters are whole; their gradients come past any hook."""
    want = plain.truth("forward", "0.fc1", plain.mix)
    first, second = run(2, wrapped, how)
    for found in (first, second):
        assert close(found[0][0], want["seen"][0])
    assert close(torch.cat([first[1], second[1]]), want["output"])
    for _, _, whole, error in (first, second):
        assert torch.equal(whole, plain.model()[0].fc1.weight)
        assert_names(error, "get_module_parameter(name, gradient=True)")
