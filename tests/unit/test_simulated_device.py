"""The simulated accelerator of the tests does what a device does, and notices what one would not allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.accelerator import CUDA, DeviceTensor, Recording, Waits, move, simulated


@pytest.fixture
def recording() -> Iterator[Recording]:
    with simulated() as recording:
        yield recording


def of_package(source: str) -> Callable[..., Any]:
    """A function that seems to be one of megatron_flex."""
    names: dict[str, Any] = {"__name__": "megatron_flex.probe", "torch": torch}
    exec(f"def probe(x):\n    return {source}", names)
    return names["probe"]


WAITING = (
    *("x[0].item()", "bool(x.any())", "x.tolist()", "x.cpu()", "x.to('cpu')", "x.nonzero()", "x[x > 1]"),
    *("torch.equal(x, x)", "x.unique()", "x[[0, 1]]", "x[torch.tensor([1])]", "torch.ones(2).cuda()"),
    *(
        "torch.tensor([1], device='cuda')",
        "x.copy_(torch.zeros(3))",
        "float(x.sum())",
        "torch.allclose(x, x)",
    ),
    *("torch.cuda.synchronize()", "torch.cuda.current_stream().synchronize()", "x.masked_select(x > 1)"),
    *("torch.cuda.Event().synchronize()", "torch.empty(3).copy_(x, non_blocking=True)"),
)
NOT_WAITING = (
    *("x * 2 + 1", "x[0]", "x[1:] - x.mean()", "x.masked_fill(x > 1, 0)", "x.to('cpu', non_blocking=True)"),
    *("torch.arange(3, device='cuda')", "torch.ones(1).to('cuda', non_blocking=True)", "x.to(x.device)"),
    *("torch.where(x > 1, x, 0)", "x.sort()", "x.index_fill(0, torch.zeros(1, device=x.device).long(), 1)"),
    *("torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)", "x.sum() + torch.tensor(1.0)"),
)


@pytest.mark.parametrize("source", WAITING)
def test_what_makes_the_host_wait_is_counted(recording: Recording, source: str) -> None:
    value = torch.tensor([1.0, 2.0, 3.0], device=CUDA)
    recording.begin_step()
    of_package(source)(value)
    assert recording.count() == Waits(passes=0, end=1), recording.waits
    assert recording.waits[0].place == "megatron_flex.probe:probe"


@pytest.mark.parametrize("source", NOT_WAITING)
def test_what_does_not_make_the_host_wait_is_not_counted(recording: Recording, source: str) -> None:
    value = torch.tensor([1.0, 2.0, 3.0], device=CUDA)
    recording.begin_step()
    of_package(source)(value)
    assert recording.waits == []


def test_only_waits_of_the_package_count(recording: Recording) -> None:
    recording.begin_step()
    assert torch.ones(1, device=CUDA).item() == 1
    assert recording.waits == []


def test_tensors_are_on_the_device_and_have_its_values(recording: Recording) -> None:
    module = move(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    plain.load_state_dict({n: p.cpu() for n, p in module.state_dict().items()})
    inputs = torch.linspace(-1, 1, 12).view(3, 4)
    out = module(inputs.to(CUDA))
    assert type(out) is DeviceTensor
    assert (out.device, out.is_cuda, out.is_cpu, out.type()) == (CUDA, True, False, "torch.cuda.FloatTensor")
    wanted = plain(inputs)
    assert torch.equal(out.cpu(), wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for got, want in zip(module.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.equal(got.grad.cpu(), want.grad)
    made = (torch.zeros_like(out), out.new_ones(2), out[0], torch.rand(3, device="cuda"), out.float())
    assert {t.device for t in made} == {CUDA}
    assert torch.empty_like(out, device="cpu").device.type == "cpu"


MIXED = (
    "x + torch.ones(3)",
    "torch.where(torch.ones(3) > 0, x, x)",
    "x.index_select(0, torch.tensor([0]))",
    "torch.ones(3).add_(x)",
    "torch.ones(3)[x.long() * 0]",
    "x.numpy()",
    "torch.cat([x, torch.ones(1)])",
    "x.index_put_((x.long() * 0,), torch.ones(3))",
)


@pytest.mark.parametrize("source", MIXED)
def test_tensors_of_both_devices_together_are_refused(recording: Recording, source: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        of_package(source)(torch.ones(3, device=CUDA))


def pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, pin_memory=True)


def copied_beside(source: Tensor, wait: bool = True) -> tuple[Tensor, Any]:
    """Begin a copy to the host on a stream of its own."""
    side, target = torch.cuda.Stream(), pinned(source)
    if wait:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    return target, side


def test_a_copy_is_there_when_its_stream_has_been_waited_for(recording: Recording) -> None:
    ones = torch.ones(4)
    source = ones.to(CUDA)
    for wait in ("stream", "event", "device", "query"):
        target, side = copied_beside(source)
        assert not torch.equal(target, ones), "read too early"
        event = side.record_event()
        if wait == "stream":
            side.synchronize()
        elif wait == "event":
            event.synchronize()
        elif wait == "device":
            torch.cuda.synchronize()
        else:
            while not event.query():
                assert not torch.equal(target, ones)
        assert torch.equal(target, ones), wait


def test_a_source_that_is_overwritten_or_freed_is_not_what_arrives(recording: Recording) -> None:
    source, ones = torch.ones(4, device=CUDA), torch.ones(4)
    target, side = copied_beside(source)
    source.add_(1)
    side.synchronize()
    assert torch.equal(target, 2 * ones), "overwritten before the copy"

    target, side = copied_beside(source)
    torch.cuda.current_stream().wait_stream(side)
    source.add_(1)
    side.synchronize()
    assert torch.equal(target, 2 * ones), "overwritten after the copy, as the streams are ordered"

    target = pinned(source)
    target.copy_(source, non_blocking=True)
    source.add_(1)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(target, 3 * ones), "overwritten later on the same stream"

    target, side = copied_beside(source * 1)
    side.synchronize()
    assert not torch.equal(target, 4 * ones), "freed before the copy"

    temporary = source * 1
    target, side = copied_beside(temporary)
    temporary.record_stream(side)
    del temporary
    side.synchronize()
    assert torch.equal(target, 4 * ones), "kept for the stream"

    target, side = copied_beside(source * 1, wait=False)
    side.synchronize()
    assert not torch.equal(target, 4 * ones), "not made yet, for that stream"
    assert recording.violations == []


def test_operations_that_do_not_wait_for_another_stream_are_noticed(recording: Recording) -> None:
    side, value = torch.cuda.Stream(), torch.ones(4, device=CUDA)
    with torch.cuda.stream(side):
        value.sum()
    assert len(recording.violations) == 1
    recording.violations.clear()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = value.sum()
    event = side.record_event()
    event.wait()
    assert total.item() == 4
    assert recording.violations == []


def test_a_source_of_the_host_that_is_reused_too_early_is_noticed(recording: Recording) -> None:
    host = pinned(torch.ones(4)).fill_(1)
    on_device = host.to(CUDA, non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(2)
    assert recording.violations == []
    on_device.copy_(host, non_blocking=True)
    host.fill_(3)
    torch.cuda.synchronize()
    assert len(recording.violations) == 1


def test_backward_passes_run_in_a_thread_of_their_own(recording: Recording) -> None:
    seen: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.append(threading.current_thread().name)
            of_package("x[0].item()")(gradient)
            if len(seen) > 1:
                raise ValueError("on purpose")
            return gradient * 2

    inputs = torch.ones(2, device=CUDA, requires_grad=True)
    recording.begin_step()
    Noted.apply(inputs).sum().backward()
    of_package("x[0].item()")(inputs)
    assert seen != [threading.current_thread().name]
    assert recording.count() == Waits(passes=1, end=1)
    with pytest.raises(ValueError, match="on purpose"):
        torch.autograd.grad(Noted.apply(inputs).sum(), inputs)


def held() -> list[Any]:
    owners = (torch, Tensor, torch.cuda, torch.distributed, torch.autograd.Variable)
    return [dict(vars(owner)) for owner in owners]


def test_nothing_is_left_behind() -> None:
    before = held()
    with simulated():
        assert torch.cuda.is_available()
        assert torch.ones(1, device="cuda").device == CUDA
    assert held() == before
