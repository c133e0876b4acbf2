"""Tensors of every dtype and layout at a site: handled right on every road, or left out with a warning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.support.messages import warns

STORED = (
    *(
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
    ),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
)
NOT_STORED = (torch.complex32, torch.complex128)
UNFIT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "sparse rows": (lambda t: t.detach().to_sparse_csr(), "sparse"),
    "quantised": (lambda t: torch.quantize_per_tensor(t.detach(), 0.1, 0, torch.qint8), "qint8"),
    "nested": (lambda t: torch.nested.nested_tensor([t.detach()[:1], t.detach()[1:]]), "nested"),
    "ragged": (
        lambda t: torch.nested.nested_tensor([t.detach()[:1], t.detach()[1:]], layout=torch.jagged),
        "nested",
    ),
    "packed": (lambda t: t.detach().to(torch.uint8).view(torch.float4_e2m1fn_x2), "float4"),
    "meta": (lambda t: t.detach().to("meta"), "meta"),
}


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)


class Model(nn.Module):
    """What its part makes goes nowhere, so that it may be anything."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), Calling(function)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tensor: Tensor) -> Tensor:
        tensor = self.linear(tensor)
        self.made = self.part(tensor)
        return tensor.sum()


def same(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.detach().to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def on_every_road(
    function: Callable[[Tensor], Tensor], path: Path
) -> tuple[dict[str, Tensor], list[str], Tensor]:
    """What each road has of the part's output, what was warned of, and the output."""
    x, found = torch.arange(12.0).reshape(3, 4), {}
    model = Model(function)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for road, hook in (
            ("read", mf.HookFunction("part")),
            ("edit", mf.HookFunction("part", editing_function=same)),
            ("once", mf.HookFunction("part", editing_function=same, run="once")),
        ):
            with mf.attach(model, [hook], verify=True) as flex:
                model(x).backward()
                for tensors in flex.output_dict.values():
                    found[road] = tensors[0]
        with mf.attach(model, dumps=mf.Dump(path / "dump", ["linear", "part"])):
            model(x).backward()
        with mf.attach(model, statistics=mf.Statistics(path / "statistics", ["linear", "part"])):
            model(x).backward()
    opened = mf.open_dump(path / "dump")
    assert torch.equal(opened["linear"].torch()[0], x), "the others are there"
    with contextlib.suppress(mf.DumpError):
        found["dump"] = opened["part"].torch()[0]
    measured = mf.open_statistics(path / "statistics")
    assert measured["linear:output"].mean == [5.5]
    if "part:output" in measured.sites:
        found["statistics"] = torch.tensor(measured["part:output"].absmax)
    said = [str(w.message) for w in told if issubclass(w.category, mf.FlexWarning)]
    return found, said, model.made


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_dtypes_that_are_handled(dtype: torch.dtype, tmp_path: Path) -> None:
    found, said, made = on_every_road(cast(dtype), tmp_path)
    for road in ("read", "edit", "once", "dump"):
        assert found[road].dtype is dtype
        assert torch.equal(as_bytes(found[road]), as_bytes(made)), road
    if dtype.is_complex:
        assert "statistics" not in found
        assert any("part:output" in s and str(dtype) in s for s in said)
    else:
        assert found["statistics"].item() == made.double().nan_to_num().abs().max().item()
        assert said == []


@pytest.mark.parametrize("dtype", NOT_STORED, ids=str)
def test_dtypes_that_no_file_has(dtype: torch.dtype, tmp_path: Path) -> None:
    found, said, made = on_every_road(cast(dtype), tmp_path)
    assert set(found) == {"read", "edit", "once"}
    assert all(torch.equal(as_bytes(t), as_bytes(made)) for t in found.values())
    assert sum("part:output" in s and str(dtype) in s for s in said) >= 2, "of the dump and the statistics"


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_no_hook_can_have(name: str, tmp_path: Path) -> None:
    function, word = UNFIT[name]
    found, said, _ = on_every_road(function, tmp_path)
    assert found == {}
    said = [s for s in said if "part:output" in s and "torch." in s]
    assert len(said) == 5
    assert all(word in s for s in said)


def test_sparse_gradients_of_parameters() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    hook = mf.HookFunction("0.weight", hook_type="tensor")
    with (
        warns(mf.FlexWarning, "0.weight.grad"),
        mf.attach(model, [hook]),
    ):
        model(torch.tensor([[1, 2]])).sum().backward()
    assert model[0].weight.grad.is_sparse
