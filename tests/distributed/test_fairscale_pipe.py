"""Fairscale's Pipe: microbatches through the partitions of one process, recomputed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import Cell, judge, relative

pytest.importorskip("fairscale")
CHUNKS, ROWS = 3, 2
PLACES = ("0", "1", "2", "3")
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2 + inputs.flip(-1)


def truth(edited: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Values, their gradients and those of parameters, of the whole batch."""
    model, values = plain(), {}

    def keep(name: str, out: Tensor) -> Tensor:
        out = out * 2 + out.flip(-1) if edited and name == "1" else out
        out.retain_grad()
        values[name] = out
        return out

    for name, module in model.named_children():
        module.register_forward_hook(lambda m, a, out, name=name: keep(name, out))
    model(batch()).pow(2).sum().backward()
    parameters = {n: p.grad for n, p in model.named_parameters()}
    return {n: t.detach() for n, t in values.items()}, {n: t.grad for n, t in values.items()}, parameters


def batch() -> Tensor:
    return torch.randn(CHUNKS * ROWS, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("edited", [False, True])
def test_matrix(checkpoint: str, edited: bool, cells: list[Any]) -> None:
    from fairscale.nn import Pipe

    model = Pipe(plain(), balance=[2, 2], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint=checkpoint)
    values, gradients, parameters = truth(edited)
    hooks = [mf.HookFunction(p, hook_type=kind) for p in PLACES for kind in ("forward", "tensor")]
    hooks.append(mf.HookFunction("root"))
    if edited:
        hooks.insert(0, mf.HookFunction("1", editing_function=double, save=False))
    with mf.attach(model, hooks) as flex:
        assert {s.module for s in flex.sites()} == {"root", *PLACES}
        model(batch()).pow(2).sum().backward()
        read = {name: list(of) for name, of in flex.output_dict.items()}
        keys = [k for name, of in flex.output_dict.items() if name[0] != "r" for k in of.keys]
        assert [(k.microbatch, k.call) for k in keys] == [(n, 0) for n in range(CHUNKS)] * 8
        found = {n: t.clone() for n, t in flex.named_full_parameters(gradients=True)}
    assert tuple(found) == NAMES
    case = f"Pipe, {checkpoint} recomputed" + (", edited" if edited else "")
    out = []
    for place in PLACES:
        if not (edited and place == "1"):  # read as it was before the edit
            out.append(cell(case, place, "value", torch.cat(read[f"{place}:output"]), values[place]))
            whole = torch.cat(read[f"{place}:output.grad"])
            out.append(cell(case, place, "gradient", whole, gradients[place]))
        assert len(read[f"{place}:output"]) == CHUNKS
    (whole,) = read["root:output"]
    out.append(cell(case, "root", "value", whole, values["3"]))
    out += [cell(case, n, "parameter gradients", found[n], parameters[n]) for n in NAMES]
    judge(out, cells)
    assert type(model.partitions[0]._call_impl).__name__ == "method", "nothing is left behind"


def cell(case: str, site: str, check: str, got: Tensor, want: Tensor) -> Cell:
    return Cell(case, site, check, relative(got, want), model="fairscale")
