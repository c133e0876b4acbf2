"""Edits that sum over what is cut: all values and gradients are one process's, by one small all-reduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import matrix
from tests.support import gpt, oracle, ranks, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

FC1 = "decoder.layers.1.mlp.linear_fc1:output"
FC2 = "decoder.layers.3.mlp.linear_fc2"
ATTENTION = "decoder.layers.2.self_attention"
MID = "decoder.layers.0:mid"
TOKENS = gpt.SEQUENCE * gpt.BATCH
MICROBATCHES = 2


def matrix_of(rows: int, columns: int, seed: int = 4) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / rows**0.5


def through(x: Tensor, directions: Tensor) -> Tensor:
    """By the normal equations, and not by an orthogonal basis."""
    a = directions.double()
    return (x.double() @ a.T @ torch.linalg.inv(a @ a.T) @ a).to(x.dtype)


def put(x: Tensor, where: Any, new: Tensor) -> Tensor:
    out = x.clone()
    out[where] = new[where]
    return out


@dataclass(frozen=True)
class Row:
    """An edit at a place.

    Attributes:
        site: the place.
        make: the preset.
        formula: what it is.
        numbers: how many are summed over ranks for each token.
        over: the dim that they are sums over.
        backward: whether the gradient is edited, and not the tensor.
    """

    site: str
    make: Callable[[], Any]
    formula: Callable[[Tensor], Tensor]
    numbers: int = 0
    over: str = ""
    backward: bool = False


def rows() -> dict[str, Row]:
    from megatron_flex import edits as e

    wide, narrow, heads = matrix_of(3, 2 * gpt.FFN), matrix_of(1, gpt.HIDDEN), matrix_of(2, gpt.HIDDEN, 6)
    down, up = matrix_of(gpt.FFN, 2), matrix_of(2, gpt.FFN, 8)
    packed = (slice(None), slice(None), [0, 3])
    return {
        "gate and up": Row(FC1, lambda: e.project_out(wide), lambda x: x - through(x, wide), 3, "gate|up"),
        "some tokens": Row(
            FC1,
            lambda: e.project(wide[0], positions=packed[2]),
            lambda x: put(x, packed[2], through(x, wide[:1])),
            1,
            "gate|up",
        ),
        "heads side by side": Row(
            f"{ATTENTION}.core_attention:output",
            lambda: e.project(heads) | e.scale(2.0, features=[0, -1]),
            lambda x: put(through(x, heads), (..., [0, -1]), 2 * through(x, heads)),
            2,
            "n*d",
        ),
        "low rank": Row(
            f"{FC2}:input", lambda: e.linear_map(down, up, add=True), lambda x: x + x @ down @ up, 2, "f"
        ),
        "summands": Row(f"{FC2}:partial", lambda: e.project_out(narrow), lambda x: x - through(x, narrow)),
        "the stream": Row(MID, lambda: e.project_out(narrow), lambda x: x - through(x, narrow)),
        "logits": Row(
            "output_layer:output",
            lambda: e.mean("v", features=slice(3, 40)),
            lambda x: put(x, (..., slice(3, 40)), x.mean(-1, keepdim=True).expand_as(x)),
            1,
            "v",
        ),
        "mean of keys": Row(
            f"{ATTENTION}:k",
            lambda: e.mean("g", positions=slice(0, 9)),
            lambda x: put(x, slice(0, 9), x.mean(2, keepdim=True).expand_as(x)),
            gpt.HIDDEN // gpt.HEADS,
            "g",
        ),
        "mean of tokens": Row(
            f"{ATTENTION}:v", lambda: e.mean("s"), lambda x: x.mean(0, keepdim=True).expand_as(x), over="s"
        ),
        "a gradient": Row(
            FC1, lambda: e.project_out(wide), lambda g: g - through(g, wide), 3, "gate|up", backward=True
        ),
        "a gradient of summands": Row(  # those of copies of keys
            f"{ATTENTION}:k",
            lambda: e.mean("g", samples=0),
            lambda g: put(g, (slice(None), 0), g.mean(2, keepdim=True).expand_as(g)),
            gpt.HIDDEN // gpt.HEADS,
            "g",
            backward=True,
        ),
    }


def truth(case: Case) -> dict[str, Any]:
    """Each formula on one process of plain Megatron."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    out: dict[str, Any] = {"state": state, "edited": {}, "seen": {}}
    for name, row in rows().items():
        fresh = gpt.build(case)
        gpt.load(fresh, state)
        seen: list[Tensor] = []

        def visit(x: Tensor, row: Row = row) -> Tensor:
            if not row.backward:
                return row.formula(x)
            x = x.clone()
            x.register_hook(row.formula)
            return x

        def note(x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x.detach().clone())
            return x

        oracle.install(fresh[0], row.site, visit)
        oracle.install(fresh[0], "decoder:output", note)
        out["edited"][name] = oracle._step(case, fresh)
        out["seen"][name] = seen
    return out


@contextmanager
def summed() -> Iterator[Counter[int]]:
    """Count all-reduces by how many numbers they sum; not those of flags, which are whole numbers."""
    counts: Counter[int] = Counter()
    kept = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[tensor.numel()] += int(tensor.is_floating_point())
        return kept(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield counts
    finally:
        dist.all_reduce = kept


COUNTED = "tp2"  # the case in whose second steps all collectives are counted


def sharded(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    import megatron_flex as mf
    from megatron_flex import edits as e

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    answer: dict[str, Any] = {"edited": {}, "seen": {}, "sent": {}, "dp": ranks.mine(chunks)}
    # An edit that sends nothing but the flags of a step in which something may go wrong.
    plain = {b: Row(FC1, lambda: e.scale(0.5, positions=0), lambda x: x, backward=b) for b in (False, True)}
    nothing = {}
    for name, row in {False: plain[False], True: plain[True], **rows()}.items():
        kind: Any = "tensor" if row.backward else "forward"
        hook = mf.HookFunction(row.site, editing_function=row.make(), save=False, hook_type=kind)
        with mf.attach(chunks, [hook, mf.HookFunction("decoder:output")]) as flex:
            if case.name == COUNTED:  # in a first pass ranks also meet before each sum
                gpt.step(case, chunks, 0)
            with ranks.counting() as calls, summed() as numbers:
                losses = gpt.step(case, chunks, 0)
            if isinstance(name, bool):
                nothing[name] = calls, numbers  # as it sends nothing itself
                continue
            mesh = flex.session.mesh
            answer |= {"coords": dict(mesh.coords), "sizes": dict(mesh.sizes)}
            answer["plain"] = answer["edited"][name] = losses, matrix._gradients(flex, chunks)
            answer["seen"][name] = list(flex.output_dict.get("decoder:output", []))[-MICROBATCHES:]
        before = nothing[row.backward]
        assert set(before[0] - calls) <= {"all_reduce"}
        answer["sent"][name] = calls - before[0], numbers - before[1]
    return answer


def wanted(case: Case, row: Row) -> Counter[int]:
    """By how many numbers each sums: the all-reduces of one step on all ranks together."""
    axis = case.cp if row.over == "s" else case.tp
    if not row.over or axis == 1:
        return Counter()
    groups = max(gpt.GROUPS // case.tp, 1)
    size = (
        gpt.BATCH * groups * gpt.HIDDEN // gpt.HEADS if row.over == "s" else TOKENS // case.cp * row.numbers
    )
    return Counter({size: case.tp * case.cp * MICROBATCHES * (1 if row.backward else 2)})


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return truths.once(truth, Case("one process"))


@pytest.mark.parametrize(
    "case",
    [
        Case("tp2", tp=2),
        Case("tp2 sp", tp=2, sp=True),
        Case("tp4, copies of keys", tp=4),
        Case("cp2 x tp2", cp=2, tp=2),
        Case("pp2 vpp2 x tp2", pp=2, vpp=2, tp=2),
    ],
    ids=lambda c: c.name,
)
def test_as_on_one_process(case: Case, one_process: dict[str, Any], cells: list[Any]) -> None:
    names = list(rows())
    answers = run(case.world, sharded, case, one_process["state"])
    last = one_process["edited"][names[-1]]
    want = one_process | {"losses": last[0], "parameters": last[1]}
    found = [c for c in matrix._effects(case, names, want, answers) if c.site != "(none)"]
    assert len(found) == 2 * len(names)
    for name in names:
        (got,) = (a["seen"][name] for a in answers if a["seen"][name])
        far = [matrix.relative(g, w) for g, w in zip(got, one_process["seen"][name], strict=True)]
        found.append(matrix.Cell(case.name, name, "value behind the edit", matrix.greatest(far)))
    matrix.judge([replace(c, model="GPT, linear edits") for c in found], cells)
    for name, row in rows().items():
        numbers = sum((a["sent"][name][1] for a in answers), Counter())
        assert numbers == wanted(case, row), name
        calls = sum((a["sent"][name][0] for a in answers), Counter())
        if case.name == COUNTED:
            assert calls == Counter(all_reduce=numbers.total()) - Counter(), name
        else:
            assert set(calls) <= {"all_reduce"}, name
