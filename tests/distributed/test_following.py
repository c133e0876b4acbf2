"""Layouts between parallel modules, followed through a model that says nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import fairscaled, llama, proof
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("fairscale")

SMALL = ("layers.0.attention_norm:output", "layers.1.attention.wo:input", "layers.1:output")


def followed(model: nn.Module, size: int) -> mf.FlexModel:
    fairscaled.take_over()
    return mf.FlexModel(model, tensor_parallel_size=size)


def build(size: int, recomputes: str = "") -> proof.Built:
    fairscaled.take_over()
    model = fairscaled.llama_of(size)
    for layer in model.layers.values() if recomputes else ():
        forward = layer.attention.forward
        layer.attention.forward = lambda *args, f=forward: checkpoint(  # type: ignore[method-assign]
            f, *args, use_reentrant=recomputes == "reentrant"
        )

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, options={"tensor_parallel_size": size})


@pytest.mark.parametrize("size", [2, 4])
def test_the_model(size: int) -> None:
    few = {"sites": SMALL, "edits": ("layers.1.feed_forward.act:output",)} if size == 4 else {}
    found = proof.compare("fairscale", f"followed tp{size}", size, build, size, **few)
    assert not [c for c in found if not c.error < 1e-5]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recomputation(kind: str) -> None:
    sites = (*SMALL, "layers.1.attention.wq:output")
    found = proof.compare(
        "fairscale",
        f"followed tp2 {kind}",
        2,
        build,
        2,
        kind,
        sites=sites,
        edits=("layers.1.attention.wq:output",),
    )
    assert not [c for c in found if not c.error < 1e-5]


# -- inside of attention, and gradients that are shares ------------------------------------------------------


class Scores(nn.Module):
    """Attention's core, with a module wherever something may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.scores, self.probs, self.out = (nn.Identity() for _ in range(4))
        self.drop = nn.Dropout(0.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q = self.q(q).transpose(1, 2)
        scores = self.scores(torch.einsum("bnqd,bknd->bnqk", q, k) / q.shape[-1] ** 0.5 + bias)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        probs = self.drop(self.probs(F.softmax(scores, -1, dtype=torch.float32).type_as(q)))
        return self.out(probs @ v.permute(0, 2, 1, 3)).transpose(1, 2).contiguous().flatten(2)


class Model(nn.Module):
    """One attention layer whose norms, gains and biases every rank has whole."""

    def __init__(self, parts: llama.Parts) -> None:
        super().__init__()
        h, d = llama.HIDDEN, llama.HEAD
        self.embed = parts.embedding(llama.VOCABULARY, h)
        self.norm, self.q_norm = nn.LayerNorm(h), nn.LayerNorm(d)
        self.wq, self.wk, self.wv = (parts.linear("column", h, h) for _ in range(3))
        self.wo = parts.linear("row", h, h)
        self.gain, self.gained, self.core = nn.Linear(h, d), nn.Identity(), Scores()
        self.bias = nn.Parameter(torch.zeros(llama.TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        q, k, v = (w(x).unflatten(-1, (-1, llama.HEAD)) for w in (self.wq, self.wk, self.wv))
        gain = self.gained(self.gain(x.detach()))[:, :, None]
        return self.wo(self.core(self.q_norm(q) * gain, k, v, self.bias)) + x


PLACES = (
    "core.q:output",
    "core.scores:output",
    "core.probs:output",
    "core.out:output",
    "core:output",
    "gained:output",
    "gain:output",
    "q_norm:output",
    "norm:output",
    "root:output",
)


def single() -> Model:
    torch.manual_seed(5)
    model = Model(llama.Parts())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * inputs.mean() + inputs.flip(1)


CASES = (("", False), ("core.scores:output", False), ("gained:output", False), ("gain:output", True))


def _read(size: int) -> list[dict[str, Any]]:
    return [_case(size, *case) for case in CASES]


def _model(size: int) -> nn.Module:
    import torch.distributed as dist

    whole = single()
    if size == 1:
        return whole
    fairscaled.start(size)
    model = Model(fairscaled.parts())
    fairscaled.load(model, whole, size, dist.get_rank())
    return model


def _case(size: int, edited: str, backward: bool) -> dict[str, Any]:
    model = _model(size)
    out: dict[str, Any] = {}
    tokens, _ = llama.batch(0)
    with followed(model, size) as flex:
        for place in PLACES:
            function = edit if place == edited else None
            flex.register_forward_hook(
                mf.HookFunction(place, editing_function=None if backward else function)
            )
            flex.register_hook(mf.HookFunction(place, editing_function=function if backward else None))
        for _ in range(2):  # followed, and by what was found
            model.zero_grad()
            model(tokens).square().mean().backward()
            for name, tensors in flex.output_dict.items():
                out[name] = tensors[0].clone()
        out |= flex.named_full_parameters(gradients=True, everywhere=True)
        propagator = flex.session.adapter.propagator
        out["shared"] = None if propagator is None else dict(propagator.shared)
    return out


def test_inside_attention() -> None:
    names = {f"{p}{g}" for p in PLACES for g in ("", ".grad")} | {n for n, _ in single().named_parameters()}
    parts = ("q_norm.weight", "q_norm.bias", "gain.weight", "gain.bias", "bias")
    for case, want, got in zip(CASES, run(1, _read, 1)[0], run(2, _read, 2)[0], strict=True):
        assert names <= want.keys()
        errors = {n: proof.relative(got[n], want[n]) for n in names}
        assert not {n: e for n, e in errors.items() if not e < 1e-5}, case
        assert got["shared"] == dict.fromkeys(parts, ("tp",))


def _not_followed() -> str:
    model = _model(2)
    with followed(model, 2) as flex:
        model(llama.batch(0)[0]).square().mean().backward()
        try:
            flex.get_module_parameter("q_norm.weight", gradient=True)
        except mf.FlexError as error:
            return str(error)
        return ""


def test_shares_of_gradients_are_not_taken_for_wholes() -> None:
    for said in run(2, _not_followed):
        assert_names(said, "q_norm.weight")


# -- what is not known ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """What cannot be followed, or not rightly."""

    def __init__(self, parts: llama.Parts, rank: int) -> None:
        super().__init__()
        self.up = parts.linear("column", llama.HIDDEN, llama.FFN)
        self.sorted, self.own, self.after, self.twice = (nn.Identity() for _ in range(4))
        self.down = parts.linear("row", llama.FFN, llama.HIDDEN)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        unknown = self.sorted(wide.sort(-1)[0])
        half = x.chunk(2, -1)[self.rank]
        own = self.own(half.contiguous())
        self.twice(x)
        self.twice(wide)
        return self.down(wide) + (unknown.sum() + own.sum()) * self.after(torch.ones_like(x))


def _refused(place: str, **options: Any) -> tuple[str, Any]:
    import torch.distributed as dist

    fairscaled.start(2)
    torch.manual_seed(1)
    model = Odd(fairscaled.parts(), dist.get_rank())
    x = torch.randn(2, 3, llama.HIDDEN)
    with followed(model, 2) as flex:
        flex.register_forward_hook(mf.HookFunction(place, **options))
        try:
            model(x)
            with torch.no_grad():
                model.eval()(x)
        except mf.HookError as error:
            return str(error), None
        read = flex.output_dict.get(place)
        return "", None if read is None else tuple(read[0].shape)


def _all_refused() -> list[tuple[str, Any]]:
    return [
        _refused("sorted:output"),
        _refused("sorted:input", editing_function=edit),
        _refused("own:output"),
        _refused("sorted:output", expected_shape=(2, 3, llama.FFN)),
        _refused("own:output", expected_shape=(2, 3, llama.HIDDEN)),
        _refused("up:output", expected_shape=(2, 3, llama.FFN // 2)),
        _refused("root:input"),
        _refused("down:output", expected_shape=(2, None, llama.HIDDEN)),
        _refused("twice:input"),
    ]


def test_what_is_not_known() -> None:
    first, second = run(2, _all_refused)
    assert [m for m, _ in first] == [m for m, _ in second], "all ranks say the same"
    words = [m for m, _ in first]
    for message in words[:2]:
        assert "sorted:" in message
        assert_names(message, 2, "tp")
        assert "expected_shape" in message
    assert_names(words[2], "own:output", "[d0, d1, d2]", "tp")
    assert first[3] == ("", (2, 3, llama.FFN)), "a person knows better"
    assert "own:output" in words[4]
    assert words[5]
    assert first[6] == ("", (2, 3, llama.HIDDEN))
    assert first[7] == ("", (2, 3, llama.HIDDEN))
    assert first[8] == ("", (2, 3, llama.HIDDEN))


class Cube(torch.autograd.Function):
    """A function of somebody's own, through which no layout is followed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Cubed(nn.Module):
    """Two parallel linears, and between them a function that is not followed."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        parts, draw = fairscaled.parts(), torch.Generator().manual_seed(4)
        self.up, self.down = (
            parts.linear("column", llama.HIDDEN, llama.FFN),
            parts.linear("row", llama.FFN, llama.HIDDEN),
        )
        for dim, linear in enumerate((self.up, self.down)):
            full = torch.randn(linear.out_features, linear.in_features, generator=draw) / 4
            linear.weight.data.copy_(full.chunk(size, dim)[rank])
        self.after = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.after(Cube.apply(self.up(x))))
        return made


def centre(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """What needs the full tensor: each entry minus the mean of its token's."""
    return inputs - inputs.mean(-1, keepdim=True) + 0.1 * inputs.flip(-1)


def _cubed(size: int, edits: tuple[str, ...], shape: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    import torch.distributed as dist

    fairscaled.start(size)
    model = Cubed(size, dist.get_rank() if size > 1 else 0)
    x = torch.randn(2, 3, llama.HIDDEN, generator=torch.Generator().manual_seed(8)).requires_grad_()
    with followed(model, size) as flex:
        for name in ("up:output", "after:output"):
            for kind in ("forward", "tensor"):
                edit = {"editing_function": centre} if f"{name} {kind}" in edits else {}
                register = flex.register_forward_hook if kind == "forward" else flex.register_hook
                register(mf.HookFunction(name, expected_shape=shape, **edit))
        model(x).pow(2).sum().backward()
        read = {n: t.detach() for n, r in flex.output_dict.items() for t in r}
        full = dict(flex.named_full_parameters(gradients=True, everywhere=True, reduced=False))
        assert x.grad is not None
        return read, [x.grad, *(full[n] for n in sorted(full))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "edits", [(), ("up:output tensor",), ("after:output forward", "up:output tensor")], ids=len
)
def test_a_shape_tells_how_a_gradient_is_sharded(size: int, edits: tuple[str, ...]) -> None:
    """Where a tensor goes through a function that is not followed, no rule says it."""
    shape = (2, 3, llama.FFN)
    ((want, gradients),) = run(1, _cubed, 1, edits, shape)
    assert want.keys() == {f"{n}:output{e}" for n in ("up", "after") for e in ("", ".grad")}
    ranks = run(size, _cubed, size, edits, shape)
    leader = ranks[0][0]
    assert leader.keys() == want.keys()
    for name, tensor in want.items():
        assert leader[name].shape == tensor.shape == shape, name
        assert relative(leader[name], tensor) < 1e-5, name
    for _, found in ranks:
        for got, wanted in zip(found, gradients, strict=True):
            assert relative(got, wanted) < 1e-5


def _without_a_shape() -> str:
    import torch.distributed as dist

    fairscaled.start(2)
    model = Cubed(2, dist.get_rank())
    flex = followed(model, 2)
    flex.register_hook(mf.HookFunction("up:output"))
    loss = model(torch.randn(2, 3, llama.HIDDEN)).pow(2).sum()
    with pytest.raises(mf.HookError) as raised:
        loss.backward()
    flex.restore()
    return str(raised.value)


def test_a_gradient_that_is_not_known_needs_a_shape() -> None:
    first, second = run(2, _without_a_shape)
    assert first == second
    assert "gradient" in first
    assert "expected_shape" in first
