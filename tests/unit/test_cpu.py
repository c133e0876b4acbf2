"""The CPU runtime without Megatron: what it answers, and that nothing of it stays behind."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data import DataLoader, dataloader

from megatron_flex import cpu
from megatron_flex.errors import FlexError
from tests.support.messages import assert_names, raises

CLASSES = (torch.Tensor, DeviceContext, dataloader._BaseDataLoaderIter)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a GPU, whatever this one is; and nobody leaves the runtime on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not cpu.is_enabled()
    yield
    assert not cpu.is_enabled()


@pytest.fixture
def enabled() -> Iterator[None]:
    with cpu.runtime():
        yield


ROOT = Path(__file__).parents[2]


def everything() -> dict[tuple[str, str], Any]:
    """Every attribute of every imported module and of the classes that are touched; what is no attribute."""
    modules = [(n, m) for n, m in list(sys.modules.items()) if isinstance(m, ModuleType) and m is not sys]
    # hypothesis notes when the garbage collector runs, whoever's test it is.
    modules = [(n, m) for n, m in modules if n.partition(".")[0] != "hypothesis"]
    owners = [*modules, *((str(c), c) for c in CLASSES)]
    seen = {(name, key): value for name, owner in owners for key, value in list(vars(owner).items())}
    # An import inside a function adds a submodule to its package; that is no patch.
    seen = {at: value for at, value in seen.items() if not issubclass(type(value), ModuleType)}
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    lists = {"modes": _get_current_function_mode_stack(), "path": sys.meta_path, "filters": logger.filters}
    seen |= {("list", name): tuple(map(id, items)) for name, items in lists.items()}
    seen["compile", "disable"] = getattr(sys.modules.get("torch._dynamo.config"), "disable", None)
    return seen | {("environ", key): value for key, value in os.environ.items()}


def differences(before: dict[Any, Any], after: dict[Any, Any]) -> list[Any]:
    changed = [at for at, value in before.items() if at not in after or not _same(value, after[at])]
    owners = {owner for owner, _ in before}
    return changed + [at for at in after if at not in before and at[0] in owners]


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | tuple | bool | int) and one == other)


# --- on and off


def test_disable_restores_every_attribute():
    with cpu.runtime():  # once before, so that what torch imports on first use is there
        torch.zeros(1, device="cuda")
    import_module("torch._dynamo.config")
    before = everything()
    cpu.enable()
    on = everything()
    cpu.disable()

    touched = {owner for owner, _ in differences(before, on)}
    assert {"torch", "torch.cuda", "torch.cuda.random", "torch.distributed", "environ"} <= touched
    assert {"list", "torch.accelerator", "compile", *map(str, CLASSES)} <= touched
    assert differences(before, everything()) == []


def test_what_was_absent_is_removed_again():
    assert "record_stream" not in vars(torch.Tensor), "inherited: restoring must not copy it down"
    with cpu.runtime():
        assert "record_stream" in vars(torch.Tensor)
    assert "record_stream" not in vars(torch.Tensor)


def test_enabling_is_counted():
    original = torch.cuda.synchronize
    cpu.enable()
    stand_in = torch.cuda.synchronize
    with cpu.runtime():
        assert torch.cuda.synchronize is stand_in
    assert cpu.is_enabled()
    assert torch.cuda.synchronize is stand_in
    cpu.disable()
    assert torch.cuda.synchronize is original
    with raises(FlexError, "enable()"):
        cpu.disable()


def test_runtime_is_left_on_error():
    with pytest.raises(KeyError), cpu.runtime():
        raise KeyError
    assert not cpu.is_enabled()


def test_a_gpu_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = everything()
    with raises(FlexError, "GPU", "force=True"):
        cpu.enable()
    assert differences(before, everything()) == []
    with cpu.runtime(force=True):
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_another_thread_cannot_disable():
    def disable() -> FlexError:
        with pytest.raises(FlexError) as caught:
            cpu.disable()
        return caught.value

    with cpu.runtime():
        caught = in_a_thread(disable)
        assert cpu.is_enabled()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert_names(caught, "disable()")


def test_a_mode_pushed_later_stays():
    cpu.enable()
    with BaseTorchFunctionMode() as later:
        cpu.disable()
        assert _get_current_function_mode_stack()[-1] is later


# --- devices


@pytest.mark.usefixtures("enabled")
def test_cuda_means_the_cpu():
    made = [
        torch.empty(2, device="cuda"),
        torch.tensor([1.0], device="cuda:3"),
        torch.arange(3, device=torch.device("cuda", 1)),
        torch.zeros(2, device=0),
        torch.ones(2, device=torch.cuda.current_device()),
        torch.zeros(2, pin_memory=True).pin_memory(),
        torch.ones(1).cuda(),
        torch.ones(1).cuda(0, non_blocking=True),
        torch.ones(1).to("cuda", torch.float64),
        torch.ones(1).to(device=torch.device("cuda")),
        torch.ones(1).to(0),
        torch.ones(1).new_zeros(3, device="cuda"),
        *torch.nn.Linear(2, 2).cuda().to("cuda:0").parameters(),
    ]
    assert {t.device.type for t in made} == {"cpu"}
    assert made[8].dtype is torch.float64


@pytest.mark.usefixtures("enabled")
def test_cuda_means_the_cpu_in_every_thread():
    def make() -> list[torch.Tensor]:
        return [torch.zeros(2, device="cuda"), torch.ones(1).to("cuda:1"), torch.ones(1).cuda()]

    assert {t.device.type for t in in_a_thread(make)} == {"cpu"}


@pytest.mark.usefixtures("enabled")
def test_default_devices_mean_the_cpu():
    with torch.device("cuda"):
        assert torch.empty(2).device.type == torch.nn.Linear(1, 1).weight.device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device.type == "cpu"
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("enabled")
def test_meta_and_fake_tensors_are_redirected_too():
    meta = torch.empty(2, device="meta")
    assert meta.cuda() is meta.pin_memory() is meta
    assert torch.empty_like(meta, device="cuda").device.type == "cpu"
    with FakeTensorMode() as mode:
        made = [torch.empty(2, device="cuda"), torch.ones(1).to("cuda"), torch.ones(1).cuda()]
        made += [mode.from_tensor(torch.ones(2)).to(device="cuda:1", dtype=torch.float64)]
    assert all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in made)


def torch_functions() -> dict[str, Any]:
    """What a user finds in torch, by name."""
    namespaces = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.fft": torch.fft}
    namespaces |= {"torch.nested": torch.nested, "torch.nn.functional": torch.nn.functional}
    return {
        f"{space}.{name}": value
        for space, owner in namespaces.items()
        for name, value in ((name, getattr(owner, name)) for name in dir(owner) if name[0] != "_")
        if callable(value) and not isinstance(value, type)
    }


def test_every_function_that_takes_a_device_is_replaced_and_no_other():
    """A call of any other function runs the very object that torch has: no mode looks on."""
    before, modes = torch_functions(), _get_current_function_mode_stack()
    with cpu.runtime():
        after = torch_functions()
        assert _get_current_function_mode_stack() == modes
    replaced = {name for name, function in before.items() if after[name] is not function}

    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    operators = {
        s.name.removeprefix("aten::").removeprefix("fft_")
        for s in schemas
        if {"device", "pin_memory"} & {a.name for a in s.arguments}
    }
    with_device = {name for name in before if name.rpartition(".")[2] in operators}
    assert with_device - replaced == {"torch.Generator"} & before.keys()
    # written in Python or C++, without a schema; or about the device without an argument for it
    more = {f"torch.Tensor.{n}" for n in ("cuda", "new", "new_tensor", "type", "pin_memory", "record_stream")}
    more |= {"torch.asarray", "torch.nested.nested_tensor", "torch.nested.as_nested_tensor"}
    assert replaced - with_device == more - with_device
    # Not the copy that torch keeps: `from_pretrained` of transformers may have it made without linspace.
    constructors = _device_constructors.__wrapped__()
    assert {id(f) for f in constructors} <= {id(before[name]) for name in replaced}


def test_scripts_compile_with_the_functions_that_are_replaced():
    with cpu.runtime():
        inside = torch.jit.script(ones_of)
    assert torch.jit.script(also_ones_of)(2).sum() == inside(2).sum() == 2


def ones_of(size: int) -> torch.Tensor:
    return torch.ones(size)


def also_ones_of(size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.mark.usefixtures("enabled")
def test_other_devices_and_arguments_are_left_alone():
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(1).to("meta").device.type == "meta"
    assert torch.ones(1).to(torch.int8).dtype is torch.int8
    assert torch.ones(1).to(torch.ones(1, dtype=torch.float16)).dtype is torch.float16


def test_type_names_are_those_of_a_gpu():
    with cpu.runtime():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
        assert torch.ones(1).type(torch.float64).dtype is torch.float64
    assert torch.ones(1).type() == "torch.FloatTensor"


@pytest.mark.usefixtures("enabled")
def test_devices_hold_inside_backward():
    class Allocating(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.ones(1, device="cuda")

    x = torch.zeros(1, requires_grad=True)
    Allocating.apply(x).backward()
    torch.autograd.backward(Allocating.apply(x))
    (grad,) = torch.autograd.grad(Allocating.apply(x), x)
    assert x.grad == 4
    assert grad == 2


# --- streams, events, memory


@pytest.mark.usefixtures("enabled")
def test_the_device_answers():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).major == 8
    assert 0 < torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info()[1]
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None
    torch.cuda.set_device(5)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("enabled")
def test_device_count_is_the_number_of_local_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4


@pytest.mark.usefixtures("enabled")
def test_streams_have_finished():
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side), torch.cuda.device(0):
        x = torch.ones(3)
        x.record_stream(side)
        assert not torch.cuda.is_current_stream_capturing()
    side.wait_stream(torch.cuda.current_stream())
    side.wait_event(side.record_event(end))
    end.record()
    assert side.query()
    assert end.query()
    assert start.elapsed_time(end) > 0


@pytest.mark.usefixtures("enabled")
def test_each_name_has_a_function_of_its_own():
    functions = [
        v for v in vars(torch.cuda).values() if getattr(v, "__module__", "").startswith(cpu.__name__)
    ]
    assert len(functions) > 20
    assert len({id(f) for f in functions}) == len(functions)


def test_nothing_is_compiled_meanwhile():
    """In a process of its own: dynamo keeps the functions that torch had when dynamo was first used."""
    code = "from tests.unit.test_cpu import compile_before_and_after; compile_before_and_after()"
    there = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=there, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def compile_before_and_after() -> None:
    import_module("torch._dynamo")  # before, as a process has it that compiles
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def run() -> None:
        # code of its own each time: dynamo leaves alone for good what it once ran without compiling
        function = FunctionType(also_ones_of.__code__.replace(), globals())
        assert torch.compile(function, backend=backend)(2).sum() == 2

    with cpu.runtime():
        torch.compiler.allow_in_graph(torch.ones)  # dynamo looks functions up, and keeps what it found
        run()
        in_a_thread(run)
        assert compiled == []
    assert not sys.modules["torch._dynamo.config"].disable
    run()
    in_a_thread(run)
    assert len(compiled) == 2


# --- random numbers


@pytest.mark.usefixtures("enabled")
def test_states_go_round():
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.set_rng_state_all([state])
    assert torch.equal(torch.rand(3), first)
    torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), torch.cuda.get_rng_state(0))


@pytest.mark.usefixtures("enabled")
def test_seeds_are_those_of_the_cpu():
    torch.manual_seed(7)
    wanted = torch.rand(2)
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(7)
        assert torch.cuda.initial_seed() == 7
        assert torch.equal(torch.rand(2), wanted)


@pytest.mark.usefixtures("enabled")
def test_lazy_calls_run_at_once():
    called = []
    torch.cuda._lazy_call(lambda: called.append(1))
    assert called == [1]


@pytest.mark.usefixtures("enabled")
def test_dropout_is_replayed():
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64), 0.5), first)


class Drawing(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


@pytest.mark.usefixtures("enabled")
def test_data_loaders_draw_from_a_state_of_their_own():
    torch.manual_seed(1)
    device = torch.get_rng_state()
    one, two = iter(DataLoader(Drawing())), []
    for _ in range(2):
        two.append(next(one).item())
        assert torch.equal(torch.get_rng_state(), device), "only some ranks have a loader"
    assert two[0] != two[1]
    torch.manual_seed(1)
    assert next(iter(DataLoader(Drawing()))).item() == two[0], "a seed starts both generators over"


def test_pinned_loaders_do_not_warn(enabled: None, recwarn: pytest.WarningsRecorder):
    loader = DataLoader(torch.arange(4), pin_memory=True)
    assert len(list(loader)) == 4
    assert loader.pin_memory
    assert not recwarn.list


@pytest.mark.usefixtures("enabled")
def test_the_tracker_warning_is_silenced_and_no_other(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.warning("CPU RNG state changed within GPU RNG context")
    logger.warning("something else")
    assert [r.getMessage() for r in caplog.records] == ["something else"]


# --- norms


# --- patching and importing


# --- gloo


def _gloo_rank(rank: int, store: str, failures: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        with cpu.runtime():
            _send_and_forget(rank)
            _unequal_pieces(rank)
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        raise
    finally:
        dist.destroy_process_group()


def _send_and_forget(rank: int) -> None:
    size = 1 << 20
    for batched in (False, True):
        if rank == 0:
            sent = torch.full((size,), 3.0)
            if batched:
                (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1)])
            else:
                work = dist.isend(sent, 1)
            storage = sent.untyped_storage()
            sent.data = torch.empty(1)  # as Megatron does, to free the activation
            assert storage.data_ptr() != sent.data_ptr()
            del storage
            overwrite = [torch.zeros(size) for _ in range(4)]
            dist.barrier()
            work.wait()
            del overwrite
        else:
            dist.barrier()  # the receiver is late
            received = torch.empty(size)
            dist.recv(received, 0)
            assert received.min() == received.max() == 3


def _unequal_pieces(rank: int) -> None:
    sizes, mine = (1, 3), torch.full(((1, 3)[rank], 2), float(rank))
    whole = torch.empty(4, 2)
    dist.all_gather(list(torch.split(whole, sizes)), mine)
    assert whole[:, 0].tolist() == [0, 1, 1, 1]
    parts = [p.clone() for p in torch.split(torch.arange(4.0)[:, None] + rank, sizes)]
    kept = [p.clone() for p in parts]
    output = torch.empty(sizes[rank], 1)
    work = dist.reduce_scatter(output, parts, async_op=True)
    work.wait()
    assert output[:, 0].tolist() == [[1], [3, 5, 7]][rank]
    assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True)), "inputs are the caller's"


@pytest.mark.timeout(180)
def test_gloo_sends_aliases_and_takes_unequal_pieces(tmp_path: Path):
    context = torch.multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    ranks = [context.Process(target=_gloo_rank, args=(r, str(tmp_path / "store"), failures)) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(80)
    stuck = [process for process in ranks if process.is_alive()]
    for process in stuck:
        process.kill()
    said = [] if failures.empty() else [failures.get()]
    assert (stuck, said, [p.exitcode for p in ranks]) == ([], [], [0, 0])
