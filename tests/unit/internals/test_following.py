"""What is followed of tensors through torch functions, against the same functions on whole tensors.

Every function is called for every way in which its operands can be cut over two ranks: what is said of the
results must be true, however little it is; and of what models do all day it must be said.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_flex.adapters.layout_rules import (
    FULL,
    Spread,
    SpreadOrUnknown,
    UnknownLayout,
    spread_from_json,
    spread_to_json,
)
from megatron_flex.adapters.propagation.function_call import iterate_tensors
from megatron_flex.adapters.propagation.function_rules import PARALLEL_REGIONS
from megatron_flex.adapters.propagation.layout_trace import LayoutTrace
from megatron_flex.adapters.propagation.shape_rules import target_dim
from megatron_flex.errors import LayoutError
from megatron_flex.layout import assemble, extract
from megatron_flex.mesh import Axis, Mesh

RANKS = 2
MESH = Mesh((Axis("tp", RANKS, 0, None, (0, 1)),))
Function = Callable[..., Any]


def cut(dim: int | None) -> Spread:
    return FULL if dim is None else Spread(((dim, "tp"),))


def run(
    function: Function, shards: Sequence[Tensor], told: Sequence[Spread]
) -> tuple[list[Tensor], SpreadOrUnknown]:
    """One rank's results, and what is said of them."""
    trace = LayoutTrace(nn.Module(), {}, MESH, {})
    for tensor, spread in zip(shards, told, strict=True):
        trace.marks.make(tensor, spread)
    with trace:
        out = function(*shards)
    made = list(iterate_tensors(out))
    return made, trace.mark(made[0]).spread


def judge(function: Function, wholes: Sequence[Tensor], dims: Sequence[int | None]) -> str:
    """Whether what is said is `right`, `wrong` or nothing (`unknown`); `error` if shards cannot be had so."""
    told = [cut(d) for d in dims]
    results = []
    for rank in range(RANKS):
        shards = [
            extract(s.layout(w.ndim), w, {"tp": rank}, {"tp": RANKS}).clone()
            for w, s in zip(wholes, told, strict=True)
        ]
        torch.manual_seed(0)
        try:
            results.append(run(function, shards, told))
        except (RuntimeError, IndexError, ValueError):
            return "error"
    if any(isinstance(t, UnknownLayout) for _, t in results):
        return "unknown"
    torch.manual_seed(0)
    want = list(iterate_tensors(function(*[w.clone() for w in wholes])))
    for i, whole in enumerate(want):
        pieces = [made[i] for made, _ in results]
        spread = results[0][1]
        assert isinstance(spread, Spread)
        layout = spread.layout(whole.ndim)
        if not spread.cuts:
            good = all(p.shape == whole.shape and torch.allclose(p, whole, 1e-4, 1e-5) for p in pieces)
        else:
            try:
                got = assemble(layout, pieces, {"tp": RANKS})
            except LayoutError:
                return "wrong"
            good = got.shape == whole.shape and torch.allclose(got.float(), whole.float(), 1e-4, 1e-5)
        if not good:
            return "wrong"
    return "right"


def repeat_heads(x: Tensor) -> Tensor:
    """Each key head for two query heads, as grouped-query attention repeats it; a rank may have one head."""
    batch, heads, *rest = x.shape
    return x[:, :, None].expand(batch, heads, 2, *rest).reshape(batch, heads * 2, *rest)


# A name; the ways to cut the operands, by the dim of each, in which something must be said of the results;
# shapes of the operands; the function.
X = (4, 2, 4)
EVERYWHERE: list[tuple[str, str, tuple[tuple[int, ...], ...], Function]] = [
    ("arithmetic", "00 11 22", (X, X), lambda x, y: (x + y) * 2 - y / (x.abs() + 1)),
    ("broadcast", "0- 10 21", (X, (2, 4)), lambda x, y: x * y),
    ("broadcast ones", "00 1- 22", (X, (4, 1, 4)), lambda x, y: x * y),
    ("reflected", "0 1 2", (X,), lambda x: 2.0 ** (1 - x)),
    ("compare", "00 11 22", (X, X), lambda x, y: torch.where(x > y, x, y)),
    ("masked_fill", "0- 10 21", (X, (2, 4)), lambda x, m: x.masked_fill(m > 0, -1.0)),
    ("activations", "0 1 2", (X,), lambda x: F.silu(F.gelu(x)).relu().sigmoid().tanh().float().clone()),
    ("in place", "00 11 22", (X, X), lambda x, y: x.add_(y).mul_(2)),
    ("clamp", "00 11 22", (X, X), lambda x, y: x.clamp(min=-0.5).maximum(y)),
    ("type_as", "0- 00 01 02 1- 10 11 12 2- 20 21 22", (X, X), lambda x, y: x.type_as(y)),
    ("copy", "00 11 22", (X, X), lambda x, y: x.copy_(y)),
    ("view split", "0 1 2", ((4, 2, 8),), lambda x: x.view(*x.shape[:2], -1, 4)),
    ("view joined", "0 1 2", ((4, 2, 2, 4),), lambda x: x.reshape(*x.shape[:2], -1)),
    ("view rows", "0 2", (X,), lambda x: x.reshape(-1, x.shape[-1])),
    ("repeated heads", "0 1 2 3", ((2, 2, 4, 4),), repeat_heads),
    ("repeated heads of one sample", "1 2 3", ((1, 2, 4, 4),), repeat_heads),
    ("view as it was", "0 1 2", ((2, 2, 4),), lambda x: x.view(x.shape)),
    ("view rows of heads", "0 2 3", ((4, 2, 2, 4),), lambda x: x.view(-1, *x.shape[2:])),
    ("view none", "0 2", (X,), lambda x: x.view(x.shape[0], 1, x.shape[1], -1)),
    ("flatten", "0 1", (X,), lambda x: x.flatten(1)),
    ("flatten all", "0", (X,), lambda x: x.flatten()),
    ("flatten front", "0 2", (X,), lambda x: x.flatten(0, 1)),
    ("unflatten", "0 1", ((2, 8),), lambda x: x.unflatten(-1, (-1, 4))),
    ("transpose", "0 1 2", (X,), lambda x: x.transpose(0, 2).contiguous()),
    ("permute", "0 1 2", (X,), lambda x: x.permute(2, 0, 1)),
    ("permute list", "0 1 2", (X,), lambda x: torch.permute(x, [1, 2, 0])),
    ("movedim", "0 1 2", (X,), lambda x: x.movedim(0, -1)),
    ("mT", "0 1 2", (X,), lambda x: x.mT),
    ("T", "0 1", ((2, 4),), lambda x: x.T + x.t()),
    ("unsqueeze", "0 1 2", (X,), lambda x: x.unsqueeze(1).unsqueeze(-1)),
    ("squeeze", "0 2", ((4, 1, 2),), lambda x: x.squeeze(1)),
    ("squeeze all", "0 2", ((4, 1, 4),), lambda x: x.squeeze()),
    ("expand", "", ((4, 1, 2),), lambda x: x.expand(3, 4, 5, 2)),
    ("expand -1", "0 2", ((4, 1, 2),), lambda x: x.expand(-1, 5, -1)),
    ("repeat", "0 2", (X,), lambda x: x.repeat(1, 3, 1)),
    ("repeat_interleave", "0 1 2", (X,), lambda x: x.repeat_interleave(3, 2)),
    ("repeat_interleave dim=", "0 1 2", (X,), lambda x: torch.repeat_interleave(x, 2, dim=0)),
    ("chunk", "0 1", (X,), lambda x: x.chunk(2, -1)),
    ("split", "1 2", (X,), lambda x: x.split(2, dim=0)),
    ("split sizes", "1 2", (X,), lambda x: torch.split(x, [1, 3], 0)),
    ("unbind", "0 2", (X,), lambda x: x.unbind(1)),
    ("narrow", "1 2", (X,), lambda x: x.narrow(0, 1, 1)),
    ("select", "0 2", (X,), lambda x: x.select(1, 0)),
    ("index number", "1 2", (X,), lambda x: x[0]),
    ("index last", "0 1", (X,), lambda x: x[..., -1]),
    ("index slices", "0 2", (X,), lambda x: x[:, :1]),
    ("index none", "0 1 2", (X,), lambda x: x[:, None, ..., None]),
    ("index rotary", "0 1", (X,), lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1)),
    ("index tensor", "0 2", (X,), lambda x: x[:, torch.tensor([1, 0])]),
    ("index mask", "1 2", (X,), lambda x: x[torch.tensor([True, False, True, False])]),
    ("index steps", "1 2", (X,), lambda x: x[::2]),
    ("index by operand", "1-", ((4, 2), (3,)), lambda x, i: x[i.abs().long() % x.shape[0]]),
    ("set number", "0 2", (X,), lambda x: x.__setitem__((slice(None), 0), 0.0) or x),
    ("set tensor", "00 21", (X, (4, 4)), lambda x, y: x.__setitem__((slice(None), 0), y) or x),
    (
        "set new",
        "0 1",
        ((4, 2),),
        lambda y: (z := torch.zeros(y.shape[0], 3, y.shape[1])).__setitem__((slice(None), 1), y) or z,
    ),
    ("set mask", "00 11 22", (X, X), lambda x, y: x.__setitem__(y > 0, 0.0) or x),
    ("new added", "0 1 2", (X,), lambda x: x + x.new_zeros(x.shape) + torch.zeros(x.shape)),
    ("set view", "00 21", (X, (4, 4)), lambda x, y: x[:, 0].copy_(y) is None or x),
    ("cat", "00 11", (X, X), lambda x, y: torch.cat([x, y], -1)),
    ("cat other", "00 22", (X, (4, 3, 4)), lambda x, y: torch.cat([x, y], 1)),
    ("stack", "00 11 22", (X, X), lambda x, y: torch.stack([x, y], 1)),
    ("pad", "0 2", (X,), lambda x: F.pad(x, (0, 0, 1, 1))),
    ("tril", "0", (X,), lambda x: x.tril()),
    ("softmax", "0 1", (X,), lambda x: F.softmax(x, dim=-1)),
    ("softmax method", "0 2", (X,), lambda x: x.softmax(1)),
    ("log_softmax", "1 2", (X,), lambda x: torch.log_softmax(x, 0)),
    ("cumsum", "0 2", (X,), lambda x: x.cumsum(1)),
    ("flip", "0 1", (X,), lambda x: x.flip(-1)),
    ("roll", "0 2", (X,), lambda x: x.roll(1, 1)),
    ("sort", "0 2", (X,), lambda x: x.sort(1)),
    ("topk", "0 2", (X,), lambda x: x.topk(1, dim=1)),
    ("sum", "0 2", (X,), lambda x: x.sum(1)),
    ("sum all", "", (X,), lambda x: x.sum()),
    ("mean kept", "0 1", (X,), lambda x: x.pow(2).mean(-1, keepdim=True)),
    ("mean dims", "1", (X,), lambda x: x.mean((0, -1))),
    ("amax", "1 2", (X,), lambda x: x.amax(dim=0)),
    ("max dim", "0 2", (X,), lambda x: x.max(1)),
    ("max two", "00 11 22", (X, X), lambda x, y: torch.max(x, y)),
    ("max all", "", (X,), lambda x: x.max()),
    ("argmax", "0 1", (X,), lambda x: x.argmax(-1)),
    ("var", "0 1", (X,), lambda x: x.var(-1, unbiased=False)),
    ("norm", "0 1", (X,), lambda x: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1)),
    ("normalize", "0 1", (X,), lambda x: F.normalize(x, dim=-1)),
    ("layer_norm", "0- 1-", (X, (4,)), lambda x, w: F.layer_norm(x, (4,), w)),
    ("rms_norm", "0- 1-", (X, (4,)), lambda x, w: F.rms_norm(x, (x.shape[-1],), w)),
    ("matmul", "-2 00 1-", (X, (4, 4, 2)), lambda x, y: x @ y),
    ("matmul shared", "-1 0- 1-", (X, (4, 6)), lambda x, y: torch.matmul(x, y)),
    ("matmul batch", "-2 0- 10 2-", ((2, 4, 2, 4), (4, 4, 2)), lambda x, y: x @ y),
    ("matmul vector", "0- 1-", (X, (4,)), lambda x, y: x @ y),
    ("bmm", "-2 00 1-", (X, (4, 4, 2)), torch.bmm),
    ("baddbmm", "000 11- 2-2", ((4, 2, 2), X, (4, 4, 2)), torch.baddbmm),
    ("outer", "-0 0-", ((4,), (2,)), torch.outer),
    ("linear", "-00 0-- 1--", (X, (6, 4), (6,)), F.linear),
    ("einsum", "-2 00 1-", (X, (4, 4, 2)), lambda x, y: torch.einsum("bij,bjk->bik", x, y)),
    ("einsum dots", "-0 0- 1-", (X, (4, 4)), lambda x, y: torch.einsum("...i,ji", x, y)),
    ("einsum pairs", "-1 00 1-", (X, X), lambda x, y: torch.einsum("bih,bjh->bij", x, y)),
    ("attention", "--3 111 2--", ((1, 4, 2, 4),) * 3, F.scaled_dot_product_attention),
    (
        "attention causal",
        "111",
        ((1, 4, 2, 3),) * 3,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    (
        "attention mask",
        "111-",
        (*((1, 4, 2, 3),) * 3, (1, 1, 2, 2)),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    ),
    ("embedding", "-1 0- 1-", ((2, 4), (4, 6)), lambda i, w: F.embedding(i.abs().long() % 4, w)),
    ("one_hot", "0 1", ((2, 4),), lambda i: F.one_hot(i.abs().long() % 4, 4)),
    ("gather", "00 22", (X, X), lambda x, i: x.gather(1, i.abs().long() % 2)),
    ("like", "0 1 2", (X,), lambda x: x + torch.ones_like(x)),
    ("complex", "0 1", ((2, 4, 2),), lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j)),
    ("detach", "0 1 2", (X,), lambda x: x.detach() + x.data),
    ("whole function", "", (X,), lambda x: torch.linalg.matrix_exp(x[..., :2])),
    ("new", "", (X,), lambda x: x.new_ones(x.shape[0], 3)),
    ("ops", "0 1 2", (X,), lambda x: torch.ops.aten.add(x, 1)),
]


@pytest.mark.parametrize(("name", "known", "shapes", "function"), EVERYWHERE, ids=[e[0] for e in EVERYWHERE])
def test_what_is_said_is_true(
    name: str, known: str, shapes: tuple[tuple[int, ...], ...], function: Function
) -> None:
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(s, generator=generator) * 3 for s in shapes]
    ways = [[None, *(d for d, n in enumerate(s) if n % RANKS == 0)] for s in shapes]
    found = {_way(dims): judge(function, wholes, dims) for dims in itertools.product(*ways)}
    assert "wrong" not in found.values(), [d for d, f in found.items() if f == "wrong"]
    assert found["-" * len(shapes)] == "right"
    assert [d for d, f in found.items() if f == "right" and d.strip("-")] == known.split()


def _way(dims: Sequence[int | None]) -> str:
    return "".join("-" if d is None else str(d) for d in dims)


def whole(trace: LayoutTrace, tensor: Tensor, dim: int | None = None) -> Tensor:
    trace.marks.make(tensor, cut(dim))
    return tensor


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_reshaping(data: st.DataObject) -> None:
    """Whatever shape a tensor is given by -1, what is said is true."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = torch.arange(2.0 * torch.Size(shape).numel()).view(*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
    steps = data.draw(st.lists(st.sampled_from(["flatten", "split", "unsqueeze", "transpose"]), max_size=4))

    def function(t: Tensor) -> Tensor:
        for step in steps:
            if step == "flatten" and t.ndim > 1:
                t = t.reshape(-1, *t.shape[2:])
            elif step == "split":
                t = t.unflatten(-1, (-1, 2))
            elif step == "unsqueeze":
                t = t.unsqueeze(1)
            elif t.ndim > 1:
                t = t.transpose(0, 1)
        return t

    assert judge(function, [x], [dim]) in ("right", "unknown", "error")


def told_of(function: Function, *dims: int | None, shape: tuple[int, ...] = (2, 4)) -> SpreadOrUnknown:
    return run(function, [torch.randn(shape) for _ in dims], [cut(d) for d in dims])[1]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@pytest.mark.parametrize(
    ("function", "dims", "words"),
    [
        (lambda x: x.sum(-1), (1,), "sum"),
        (lambda x, y: x @ y.T, (1, 1), "matmul"),
        (lambda x: torch.linalg.qr(x), (0,), "linalg_qr"),
        (lambda x: torch.linalg.qr(x * 1)[0] + 1, (0,), "linalg_qr"),
        (lambda x, y: x + y, (1, None), "add"),
        (lambda x, y: x + y, (0, 1), "add"),
        (
            lambda x: x.numpy() is None or x.detach() + torch.from_numpy(x.numpy()),
            (0,),
            "torch",
        ),
    ],
)
def test_what_is_not_said(function: Function, dims: tuple[int | None, ...], words: str) -> None:
    found = told_of(function, *dims)
    assert isinstance(found, UnknownLayout)
    assert words in found.why


def test_changed_unseen() -> None:
    trace = LayoutTrace(nn.Module(), {}, MESH, {})
    x = whole(trace, torch.randn(4), 0)
    x.add_(1)  # where nothing is followed
    found = trace.mark(x).spread
    assert isinstance(found, UnknownLayout)


def test_written_through_a_view() -> None:
    trace = LayoutTrace(nn.Module(), {}, MESH, {})
    x, y = whole(trace, torch.randn(4, 4)), whole(trace, torch.randn(4), 0)
    with trace:
        x[0].copy_(y)
    found = trace.mark(x).spread
    assert isinstance(found, UnknownLayout)
    assert "view" in found.why


def gradient_of(function: Callable[[Tensor, Tensor], Tensor]) -> set[Any]:
    """What is said of the gradient of the first operand, whole, of which the second one is cut."""
    trace = LayoutTrace(nn.Module(), {}, MESH, {})
    x, y = torch.randn(4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    whole(trace, x)
    whole(trace, y, 0)
    window = trace.window(x, None)
    with trace:
        out = function(x, y)
    trace.mark(out).node.ends.append(frozenset())
    return set(window.find_ends())


def test_gradients() -> None:
    tp, none = frozenset({"tp"}), frozenset()
    assert gradient_of(lambda x, y: x * 2) == {none}
    assert gradient_of(lambda x, y: y * x) == {tp}
    assert gradient_of(lambda x, y: (x * 2).exp() * y) == {tp}
    assert gradient_of(lambda x, y: y * 2) == set()
    assert gradient_of(lambda x, y: y * x.detach()) == set()
    assert gradient_of(lambda x, y: y * (x > 0)) == set()

    def both(x: Tensor, y: Tensor) -> Tensor:
        (y * x).sum(1)
        return x * (x + 1).exp_()[0]

    assert gradient_of(both) == {none}


def test_places() -> None:
    assert target_dim("view", (2, 3, 8), 2, (2, 3, 2, 4)) == 2
    assert target_dim("view", (2, 1, 8), 2, (2, 1, 2, 4)) == 2
    assert target_dim("view", (2, 3, 1, 4), 2, (2, 3, 4), 2) == 2
    assert target_dim("view", (2, 3, 8), 2, (6, 8)) == 1
    assert target_dim("view", (2, 3, 8), 1, (6, 8)) is None


# -- ways into and out of tensor parallel regions --------------------------------------------------------

PARTIAL = Spread(partial=("tp",))
# What a region makes of a matrix's parts on two ranks: `whole` of the results is what one process has.
MADE: dict[str, list[tuple[SpreadOrUnknown, SpreadOrUnknown | None]]] = {
    "_CopyToModelParallelRegion": [(FULL, FULL), (cut(1), cut(1))],
    "_ReduceFromModelParallelRegion": [(PARTIAL, FULL), (FULL, FULL)],
    "_GatherFromModelParallelRegion": [(cut(1), FULL), (cut(0), None)],
    "_ScatterToModelParallelRegion": [(FULL, cut(1)), (cut(0), None)],
    "_GatherFromSequenceParallelRegion": [(cut(0), FULL), (cut(1), None)],
    "_ScatterToSequenceParallelRegion": [(FULL, cut(0)), (cut(1), None)],
    "_ReduceScatterToSequenceParallelRegion": [(PARTIAL, cut(0)), (cut(1), None)],
}


@pytest.mark.parametrize("name", MADE)
def test_regions_lead_from_one_layout_to_another(name: str) -> None:
    """None: what comes of such parts is nothing that one process has, and is not said to be."""
    assert MADE.keys() == PARALLEL_REGIONS.keys()
    unknown = UnknownLayout("as it was")
    for before, behind in MADE[name]:
        told = PARALLEL_REGIONS[name](before, 2)
        assert isinstance(told, UnknownLayout) if behind is None else told == behind
    if name != "_ReduceFromModelParallelRegion":
        assert PARALLEL_REGIONS[name](unknown, 2) is unknown


@pytest.mark.parametrize(
    "told",
    [FULL, PARTIAL, UnknownLayout("why not"), Spread(((0, "cp"), (-1, "tp")), shared=("tp",), uneven=True)],
)
def test_what_is_told_of_a_tensor_goes_by_json(told: Any) -> None:
    assert spread_from_json(json.loads(json.dumps(spread_to_json(told)))) == told
