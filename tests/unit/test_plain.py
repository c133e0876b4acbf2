"""Any nn.Module in one process: the same as torch's own hooks, whatever modules get and return."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_flex as mf
from megatron_flex import HookError, HookFunction, SiteError
from megatron_flex.sites import SiteTable
from megatron_flex.statistics import Statistics
from tests.support.messages import assert_names, raises

Edit = Callable[[Tensor], Tensor]


def by(edit: Edit) -> Any:
    def run(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return edit(inputs)

    return run


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


class Pair(NamedTuple):
    hidden: Tensor
    size: int


@dataclass
class Result:
    pair: Pair
    more: dict[str, Any]
    none: Any = None


class Nest(nn.Module):
    """Gets tensors by position and by keyword, nested; returns them in a record."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, first: Any, scale: float = 1.0, *, extra: Any, mask: Any = None) -> Result:
        x = self.a(first["x"]) * scale
        y = self.b(extra[0])
        z = self.c(x + y)
        return Result(Pair(x, 4), {"list": [None, y, 3], "z": z})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.nest, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.nest = Nest()

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).tanh()
        r = self.nest({"x": h, "n": 1}, 2.0, extra=(h * 0.5, None), mask=None)
        assert isinstance(r, Result)
        assert isinstance(r.pair, Pair)
        assert r.more["list"][::2] == [None, 3]
        return self.out(r.pair.hidden + r.more["list"][1] * 3 + r.more["z"].sin())


def data() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = (model(x) ** 2).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def change(visit: Edit, leaf: str) -> Callable[[nn.Module], None]:
    """Put `visit` at a tensor of Nest by plain means."""

    def after(module: nn.Module, args: Any, out: Result) -> Result:
        x, y, z = out.pair.hidden, out.more["list"][1], out.more["z"]
        x, y, z = (visit(t) if leaf == n else t for n, t in (("x", x), ("y", y), ("z", z)))
        return Result(Pair(x, 4), {"list": [None, y, 3], "z": z})

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        first, extra = args[0]["x"], kwargs["extra"][0]
        first, extra = visit(first) if leaf == "first" else first, visit(extra) if leaf == "extra" else extra
        return ({"x": first, "n": 1}, args[1]), {"extra": (extra, None), "mask": None}

    def install(model: nn.Module) -> None:
        if leaf in ("x", "y", "z"):
            model.nest.register_forward_hook(after)
        else:
            model.nest.register_forward_pre_hook(before, with_kwargs=True)

    return install


LEAVES = [("x", 0, True), ("y", 1, True), ("y", -2, True), ("z", 2, True), ("z", -1, True)]
LEAVES += [("first", 0, False), ("extra", 1, False), ("extra", -1, False)]


@pytest.mark.parametrize(("leaf", "index", "output"), LEAVES)
def test_every_tensor_of_a_nested_call(leaf: str, index: int, output: bool) -> None:
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen["value"] = tensor.detach().clone()
        tensor = tensor.clone()
        tensor.register_hook(lambda g: seen.update(gradient=g.clone()))
        return tensor

    def turned(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.register_hook(torch.cos)
        return tensor

    plain = Model()
    change(keep, leaf)(plain)
    gradients(plain, data())
    forward, backward = ("forward", "full_backward_pre") if output else ("forward_pre", "full_backward")
    model = Model()
    flex = mf.FlexModel(model)
    for kind in (forward, backward):
        flex.session.hooks.add(HookFunction("nest", expected_shape=(5, 4), unpack_idx=index, hook_type=kind))
    gradients(flex, data())
    name = f"nest:{'output' if output else 'input'}" + (f"[{index}]" if index else "")
    assert torch.equal(flex.output_dict[name][0], seen["value"])
    torch.testing.assert_close(flex.output_dict[f"{name}.grad"][0], seen["gradient"])
    flex.restore()
    for kind, visit, edit in ((forward, torch.sin, torch.sin), (backward, turned, torch.cos)):
        plain, model = Model(), Model()
        change(visit, leaf)(plain)
        hook = HookFunction("nest", by(edit), unpack_idx=index, hook_type=kind)
        with mf.attach(model, [hook]):
            torch.testing.assert_close(gradients(model, data()), gradients(plain, data()))


def test_gradients_are_those_of_torchs_full_backward_hooks() -> None:
    for path in ("0", "1", "2"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        seen: dict[str, Tensor] = {}
        module = model.get_submodule(path)
        module.register_full_backward_hook(lambda m, i, o, s=seen: s.update(input=i[0].clone()))
        module.register_full_backward_pre_hook(lambda m, o, s=seen: s.update(output=o[0].clone()))
        flex = mf.FlexModel(model)
        flex.register_full_backward_hook(HookFunction(path))
        flex.register_full_backward_pre_hook(HookFunction(path))
        flex(data().requires_grad_()).square().sum().backward()
        for point in ("input", "output"):
            torch.testing.assert_close(flex.output_dict[f"{path}:{point}.grad"][0], seen[point])
        flex.restore()


def test_a_gradient_of_a_parameter_read_and_edited() -> None:
    plain, model = Model(), Model()
    plain.inp.weight.register_hook(double)
    want = gradients(plain, data())
    flex = mf.FlexModel(model)
    flex.register_hook(HookFunction("inp.weight", by(double), expected_shape=(4, 4)))
    got = gradients(flex, data())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(flex.output_dict["inp.weight.grad"][0] * 2, model.inp.weight.grad)
    flex.restore()


# -- names ---------------------------------------------------------------------------------------------


def test_names_are_those_of_named_modules_in_their_order() -> None:
    model = nn.ModuleDict({"b": nn.Sequential(nn.Linear(2, 2)), "layers": nn.ModuleList([nn.ReLU()])})
    names = [s.name for s in mf.FlexModel(model).sites()]
    assert names == [f"{m}:{p}" for m in ("b", "b.0", "layers.0") for p in ("input", "output")]
    model = Model()
    assert mf.FlexModel(model).sites()[0].name == "root:input"
    model.root = nn.ReLU()
    assert [s.module for s in mf.FlexModel(model).sites("root")] == ["root", "root"]


def test_places_by_glob_regular_expression_and_function() -> None:
    model = Model()
    for pattern in ("nest.*", re.compile(r"nest\.[abc]"), lambda s: s.name.startswith("nest.")):
        with mf.attach(model, [HookFunction(pattern)]) as flex:
            model(data())
            outputs = {n for n in flex.output_dict if n.endswith(":output")}
            assert outputs == {f"nest.{n}:output" for n in "abc"}


# -- order, calls --------------------------------------------------------------------------------------


def test_hooks_at_one_place_run_in_the_order_of_registration() -> None:
    model, x = Model(), data()
    edits: list[Edit] = [lambda t: t + 1, lambda t: t * 3]
    for order in (edits, edits[::-1]):
        hooks = [HookFunction("nest", by(e), unpack_idx=1) for e in order]
        with mf.attach(model, hooks):
            got = model(x)
        plain = Model()
        change(lambda t, o=order: o[1](o[0](t)), "y")(plain)
        torch.testing.assert_close(got, plain(x))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.double(), ("torch.float64", "torch.float32")),
        (lambda t: t[:2], ("(2, 2)", "(5, 2)")),
        (lambda t: None, ("NoneType",)),
    ],
)
def test_an_edit_returns_what_is_like_what_it_got(edit: Any, said: tuple[str, ...]) -> None:
    calls: list[int] = []

    def late(tensor: Tensor) -> Any:
        calls.append(0)  # so that it is not tried before the step
        return edit(tensor)

    flex = mf.attach(Model(), [HookFunction("out", by(late))])
    with raises(mf.HookError, "out:output", *said):
        flex(data())
    flex.session.close()


def test_an_edit_that_draws_leaves_all_generators_as_they_were() -> None:
    def noisy(tensor: Tensor) -> Tensor:
        return tensor + torch.rand_like(tensor) + random.random() + numpy.random.rand()

    model, x = Model(), data()
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with mf.attach(model, [HookFunction("inp", by(noisy))]):
        model(x)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_hooks_on_one_gradient_run_in_the_order_of_registration() -> None:
    edits: list[Edit] = [lambda t: t + 1, lambda t: t * 3]
    for order in (edits, edits[::-1]):
        model, x = Model(), data()
        hooks = [HookFunction("out", by(e), hook_type="full_backward_pre") for e in order]
        with mf.attach(model, hooks):
            model(x).sum().backward()
        plain = Model()
        plain.out.register_full_backward_pre_hook(lambda m, g, o=order: (o[1](o[0](g[0])),))
        plain(x).sum().backward()
        torch.testing.assert_close(model.out.weight.grad, plain.out.weight.grad)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.same = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.same(x).sin())


def test_two_passes_through_one_module_are_kept_apart() -> None:
    model, seen, x = Twice(), [], data()
    model.same.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    flex = mf.FlexModel(model)
    flex.register_forward_hook(HookFunction("same"))
    flex.register_full_backward_pre_hook(HookFunction("same"))
    y = flex(x)
    y.square().sum().backward()
    read = flex.output_dict["same:output"]
    assert [k.call for k in read.keys] == [0, 1]
    assert all(torch.equal(a, b) for a, b in zip(read, seen, strict=True))
    back = flex.output_dict["same:output.grad"]
    assert [k.call for k in back.keys] == [0, 1]
    torch.testing.assert_close(back[1], 2 * y.detach(), msg="calls are numbered as they went forward")
    flex.restore()


# -- what goes wrong -----------------------------------------------------------------------------------


def test_a_tensor_that_is_not_there() -> None:
    model = Model()
    with raises(HookError, "nest:output[3]", "unpack_idx=3", "3 tensors"):
        _run(model, HookFunction("nest", unpack_idx=3))
    with raises(HookError, "inp:input[-2]", "unpack_idx=-2", "1 tensor"):
        _run(model, HookFunction("inp", unpack_idx=-2, hook_type="forward_pre"))
    with raises(HookError, "unpack_idx=1", "inp.weight"):
        _run(model, HookFunction("inp.weight", unpack_idx=1, hook_type="tensor"))


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> tuple[None, int]:
        return None, 3


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.names = Nothing(), nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.nothing(x)
        return self.names(x)


def test_a_hook_that_cannot_fire_says_why() -> None:
    tokens = torch.tensor([1, 2])
    with raises(HookError, "nothing"):
        _run(Caller(), HookFunction("nothing"), tokens)
    with raises(HookError, "full_backward", "names"):
        _run(Caller(), HookFunction("names", hook_type="full_backward"), tokens)


def test_what_the_model_itself_returns_is_there_behind_the_call() -> None:
    model = Model()
    with mf.attach(model, [HookFunction("root"), HookFunction("root", hook_type="forward_pre")]) as flex:
        y = model(data())
        assert torch.equal(flex.output_dict["root:output"][0], y)
        assert torch.equal(flex.output_dict["root:input"][0], data())


def test_a_model_that_returns_nothing_is_read_even_so() -> None:
    model = Caller()
    model.forward = lambda x: print(model.names(x).shape)
    flex = mf.attach(model, [HookFunction("names")])
    assert model(torch.tensor([1, 2])) is None
    assert len(flex.output_dict["names"]) == 1
    flex.restore()


def test_shapes_that_contradict() -> None:
    model = Model()
    flex = mf.FlexModel(model)
    flex.register_forward_hook(HookFunction("inp", expected_shape=(None, 4)))
    flex.register_forward_hook(HookFunction("inp", expected_shape=(5, None)))
    with raises(HookError, "inp:output", "(5, 3)", "(5, 4)"):
        flex.register_forward_hook(HookFunction("inp", expected_shape=(5, 3)))
    with raises(HookError, "inp:output", "(5, 4, 1)", "(5, 4)"):
        flex.register_full_backward_pre_hook(HookFunction("inp", expected_shape=(5, 4, 1)))
    flex.restore()
    with raises(HookError, "inp:output", "(5, 4)", "(5, 3)", "expected_shape"):
        _run(model, HookFunction("inp", expected_shape=(5, 3)))


def test_what_cannot_be_taken() -> None:
    with raises(mf.FlexError, "RecursiveScriptModule", "torch.jit.script"):
        mf.FlexModel(torch.jit.script(nn.Linear(2, 2)))
    with raises(mf.FlexError, "tensor_parallel_size=2", 2, 1):
        mf.FlexModel(nn.Linear(2, 2), tensor_parallel_size=2)
    with raises(SiteError, "inpp", "inp"):
        mf.attach(Model(), [HookFunction("inpp")])


def _run(model: nn.Module, hook: HookFunction, x: Tensor | None = None) -> None:
    flex = mf.attach(model, [hook])
    try:
        flex(data() if x is None else x).sum().backward()
        flex.restore()
    finally:
        flex.session.close()


# -- in place, recomputed, autocast --------------------------------------------------------------------


def test_a_tensor_changed_in_place_behind_the_hook() -> None:
    def make(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=inplace), nn.Linear(4, 4))

    for edit in (None, double):
        results = []
        for inplace in (False, True):
            model = make(inplace)
            flex = mf.FlexModel(model)
            flex.register_forward_hook(HookFunction("0", edit and by(edit)))
            flex.register_full_backward_pre_hook(HookFunction("0"))
            got = gradients(flex, data())
            results.append([*got, flex.output_dict["0:output"][0], flex.output_dict["0:output.grad"][0]])
            flex.restore()
        torch.testing.assert_close(results[0], results[1])
        assert (results[1][-2] < 0).any(), "what was read is from before the change"


class Recomputed(nn.Module):
    """Blocks that are recomputed, the same one twice, with what saves tensors behind the last one."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def noise(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * torch.randn_like(inputs) * inputs.exp()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_reads_once_and_replays_edits(reentrant: bool) -> None:
    found = []
    for mode in (None, reentrant):
        model = Recomputed(mode)
        flex = mf.FlexModel(model)
        flex.register_forward_hook(HookFunction("blocks.*", noise))
        flex.register_forward_hook(HookFunction("blocks.*.0"))
        flex.register_full_backward_pre_hook(HookFunction("blocks.0.1"))
        flex.register_full_backward_hook(HookFunction("blocks.1", by(double)))
        got = gradients(flex, data().requires_grad_())
        read = {n: (r.keys, list(r)) for n, r in flex.output_dict.items()}
        found.append((got, read))
        flex.restore()
    assert all(len(tensors) == 1 for _, tensors in found[1][1].values())
    assert found[0][1].keys() == found[1][1].keys()
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, (keys, tensors) in found[0][1].items():
        assert found[1][1][name][0] == keys
        torch.testing.assert_close(found[1][1][name][1], tensors)


@pytest.mark.parametrize("reentrant", [True, False])
def test_one_module_in_two_recomputed_parts(reentrant: bool) -> None:
    """They are recomputed last to first, and each pass must get the random numbers that it had."""
    found = []
    for mode in (None, reentrant):
        model = Recomputed(mode)
        model.blocks[1] = model.blocks[0]
        flex = mf.FlexModel(model)
        flex.register_forward_hook(HookFunction("blocks.0.0", noise))
        flex.register_full_backward_pre_hook(HookFunction("blocks.0.1"))
        got = gradients(flex, data().requires_grad_())
        found.append([*got, *flex.output_dict["blocks.0.1:output.grad"]])
        flex.restore()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_whole_model_recomputed_is_one_step(reentrant: bool) -> None:
    model = Model()
    flex = mf.FlexModel(model)
    flex.register_forward_hook(HookFunction("inp"))
    flex.register_full_backward_pre_hook(HookFunction("inp"))
    checkpoint(flex, data().requires_grad_(), use_reentrant=reentrant).sum().backward()
    flex(data()).sum().backward()
    for name in ("inp:output", "inp:output.grad"):
        assert [k.step for k in flex.output_dict[name].keys] == [0, 1]
        torch.testing.assert_close(*flex.output_dict[name])
    flex.restore()


def test_modules_inside_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain, model = Model(), Model()
        change(torch.sin, "z")(plain)
        hook = HookFunction("nest", by(torch.sin), unpack_idx=2)
        flex = mf.attach(model, [hook, HookFunction("nest", unpack_idx=2, hook_type="full_backward_pre")])
        want, got = gradients(plain, data()), gradients(flex, data())
    assert flex.output_dict["nest:output[2]"][0].dtype == torch.bfloat16
    assert flex.output_dict["nest:output[2].grad"][0].dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    flex.restore()


# -- nothing is left -----------------------------------------------------------------------------------


def test_restore_leaves_the_model_as_it_was() -> None:
    model = Model()
    before = {n: (tuple(vars(m)), *map(len, _dicts(m))) for n, m in model.named_modules()}
    flex = mf.FlexModel(model)
    for index in (0, 1):
        flex.register_forward_hook(HookFunction("nest", unpack_idx=index))
    flex.register_full_backward_hook(HookFunction("out"))
    flex.register_hook(HookFunction("inp.bias"))
    gradients(flex, data())
    assert flex.restore() is model
    assert before == {n: (tuple(vars(m)), *map(len, _dicts(m))) for n, m in model.named_modules()}


def _dicts(module: nn.Module) -> list[Any]:
    return [v for n, v in sorted(vars(module).items()) if isinstance(v, dict)]


def test_calls_in_a_scope_are_microbatches_of_one_step() -> None:
    model = Model()
    flex = mf.FlexModel(model)
    flex.register_forward_hook(HookFunction("inp"))
    flex.register_full_backward_pre_hook(HookFunction("inp"))
    with flex.step():
        outs = [flex(data() * n) for n in (1, 2)]
        assert not flex.output_dict
        for out in reversed(outs):
            out.sum().backward()
    for name in ("inp:output", "inp:output.grad"):
        assert [(k.step, k.microbatch, k.call) for k in flex.output_dict[name].keys] == [(0, 0, 0), (0, 1, 0)]
    with raises(HookError, "step()"), flex.step(), flex.step():
        pass
    flex(data())
    assert [k.step for k in flex.output_dict["inp:output"].keys] == [0, 0, 2]
    flex.restore()


def test_a_scope_that_raises_has_no_captures_and_the_next_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with mf.attach(model) as flex:
        flex.register_forward_hook(HookFunction("0"))
        with pytest.raises(ZeroDivisionError), flex.step():
            model(torch.ones(2, 4)).sum().item() // 0
        assert not flex.output_dict
        with flex.step():
            model(torch.ones(2, 4))
        assert [key.step for key in flex.output_dict["0:output"].keys] == [1]


class Parts(nn.Module):
    """A part that returns no tensor, one that returns a number, and one that is not called."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Tanh()])
        self.nothing, self.mean, self.unused = self.Nothing(), self.Mean(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.nothing(x)
        return x + self.mean(x)


@pytest.mark.parametrize("size", [None, 2])
def test_a_cache_of_everything_has_the_outputs_of_all_modules(size: int | None) -> None:
    model, x = Parts(), torch.randn(4, 3, 4)
    seen: dict[str, list[Tensor]] = {}
    for name in ("", "blocks.0", "blocks.1", "mean"):
        module = model.get_submodule(name)
        keep = seen.setdefault(f"{name or 'root'}:output", [])
        module.register_forward_hook(lambda m, a, out, keep=keep: keep.append(out.detach()))
    with torch.no_grad():
        for part in x.split(size or 4):
            model(part)
    wanted = {n: torch.cat([t if t.ndim else t[None] for t in found]) for n, found in seen.items()}
    with mf.FlexModel(model) as flex:
        out, cache = flex.interp.run_with_cache(x, microbatch_size=size)
        _, some = flex.interp.run_with_cache(x, lambda name: name.startswith("blocks."), microbatch_size=size)
        _, one = flex.interp.run_with_cache(x, "blocks.0", microbatch_size=size)
        with flex.interp.trace(x, microbatch_size=size) as trace:
            traced = trace["blocks.0"].output
        with raises(HookError, "unused:output"):
            flex.interp.run_with_cache(x, "unused")
        assert not flex.output_dict
    assert out is not None
    assert torch.equal(out, wanted["root:output"])
    assert cache.keys() == wanted.keys()
    assert all(torch.equal(cache[n], wanted[n]) for n in wanted)
    assert torch.equal(cache["blocks.1"], wanted["blocks.1:output"])
    assert list(some) == ["blocks.0:output", "blocks.1:output"]
    assert torch.equal(one["blocks.0:output"], traced.value)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        return self.second(self.first(x)) * scale + (0.0 if shift is None else shift)


def _pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_model_has_no_hooks(copied: Any) -> None:
    model, x = Scaled(), torch.ones(2, 4)
    plain, signature = model(x, 2.0), inspect.signature(model.forward)
    hooks = [mf.HookFunction("first", editing_function=by(double)), mf.HookFunction("second:input")]
    hooks += [mf.HookFunction("second", hook_type="tensor"), mf.HookFunction("root:input")]
    with mf.attach(model, hooks) as flex:
        assert inspect.signature(model.forward) == signature
        twin = copied(model)
        assert torch.equal(twin(x, 2.0), plain)
        assert not flex.output_dict, "what the copy does is not read"
        assert not torch.equal(model(x, 2.0), plain)
        model(x).sum().backward()
        with mf.attach(twin, [mf.HookFunction("first")]) as other:
            twin(x)
            assert list(other.output_dict) == ["first:output"]
        with raises(HookError, "FlexModel"):
            copied(flex)
    assert torch.equal(twin(x, 2.0), plain)
    assert torch.equal(copied(model)(x, 2.0), plain)


def test_a_restored_model_takes_no_hook_and_its_session_no_more() -> None:
    model = Scaled()
    flex = mf.FlexModel(model)
    flex.register_forward_hook(mf.HookFunction("first"))
    model(torch.ones(2, 4))
    flex.restore()
    for register in (
        lambda: flex.register_forward_hook(mf.HookFunction("second")),
        lambda: flex.register_trainable_module("probe", nn.Linear(4, 4)),
        lambda: flex.register_dump(mf.Dump("nowhere", ["first:output"])),
        lambda: flex.register_statistics(Statistics("nowhere", ["first:output"])),
        flex.verify,
    ):
        with raises(HookError, "FlexModel"):
            register()
    assert list(flex.output_dict) == ["first:output"], "what was read stays"
    assert not model.second._forward_hooks


def test_hooks_without_names_are_none() -> None:
    model, x = Scaled(), torch.ones(2, 4)
    plain = model(x)
    with mf.attach(model, [mf.HookFunction("first", editing_function=by(double), save=False)]) as flex:
        with flex.hooks():
            assert torch.equal(model(x), plain)
        for names, complement in ((("all",), False), ((), True)):
            with flex.hooks(*names, complement=complement):
                assert not torch.equal(model(x), plain)


def test_a_state_dict_is_the_models() -> None:
    model = Scaled()
    want = {n: t.clone() for n, t in model.state_dict().items()}
    with mf.FlexModel(model) as flex:
        assert list(flex.state_dict()) == list(want)
        probe = nn.Linear(4, 4)
        flex.register_trainable_module("probe", probe)
        found = flex.state_dict()
        more = [f"trainable_modules.probe.{n}" for n in ("weight", "bias")]
        assert list(found) == [*want, *more]
        missing, over = flex.load_state_dict({n: t + 1 for n, t in found.items()})
        assert missing == over == []
        assert all(torch.equal(t, want[n] + 1) for n, t in model.state_dict().items())
        assert torch.equal(flex.trainable_modules.probe.weight, probe.weight)
        with pytest.raises(RuntimeError, match="second"):
            flex.load_state_dict({n: t for n, t in found.items() if not n.startswith("second")})
        assert flex.load_state_dict(want | {"third": probe.weight}, strict=False) == (more, ["third"])
        holder = nn.ModuleDict({"inside": flex})
        assert list(holder.state_dict()) == [f"inside.{n}" for n in found]


def test_warnings_point_at_the_line_that_caused_them(tmp_path: Path) -> None:
    def fails(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flex = mf.FlexModel(model)
    session = flex.session
    session.sites = SiteTable([replace(s, hidden="fused" * (s.module == "1")) for s in session.sites])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        flex.register_dump(mf.Dump(tmp_path / "dump", ["*"]))
        flex.register_statistics(Statistics(tmp_path / "statistics", ["*"]))
        flex.register_forward_hook(HookFunction("0", editing_function=fails, on_error="skip"))
        model(torch.ones(2, 4))
        flex.restore()
    own = [(str(w.message), w.lineno) for w in found if w.filename == __file__]
    values = (("1:output",), ("1:output",), ("0:output", "ValueError"), ("0:output", "ValueError"))
    for (text, _), named in zip(own, values, strict=True):
        assert_names(text, *named)
    lines = [line - fails.__code__.co_firstlineno for _, line in own]
    assert lines == [9, 10, 1, 13]


class Repeated(nn.Module):
    """Holds one activation under three names, and one block under two."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        block = nn.Sequential(nn.Linear(4, 4), self.act)
        self.layers = nn.ModuleList([block, nn.Sequential(nn.Linear(4, 4), self.act), block])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


@pytest.mark.parametrize(
    ("name", "site", "calls"),
    [
        ("act", "act", 3),
        ("layers.1.1", "act", 3),
        ("layers.2.1", "act", 3),
        ("layers.2.0", "layers.0.0", 2),
        ("layers.[12].0:input", "layers.1.0", 1),
    ],
)
def test_a_module_that_is_held_several_times_has_all_of_its_names(name: str, site: str, calls: int) -> None:
    model, expected = Repeated(), []
    handle = model.get_submodule(site).register_forward_hook(lambda m, i, o: expected.append((i[0], o)))
    with mf.attach(model, [HookFunction(name)]) as flex:
        model(torch.randn(2, 4))
        (key,) = [key for key in flex.output_dict if key.startswith(f"{site}:")]
        captured = flex.output_dict[key]
    handle.remove()
    assert len(captured) == len(expected) == calls
    for tensor, pair in zip(captured, expected, strict=True):
        assert torch.equal(tensor, pair[key.endswith("output")])


def test_modules_that_hold_each_other_have_finitely_many_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential())
    model[1].loop = model[1]
    with mf.FlexModel(model) as flex:
        (site,) = flex.sites("0:output")
        assert site.aliases == ()


@pytest.mark.parametrize(
    "method",
    ["accumulated_resid", "decompose_resid", "compute_head_results", "stack_head_results", "logit_lens"],
)
def test_methods_of_the_residual_stream_say_that_a_model_has_no_decoder(method: str) -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with mf.FlexModel(model) as flex:
        _, cache = flex.interp.run_with_cache(inputs)
        with raises(mf.FlexError, method, "decoder.layers.*", "cache['root:output']"):
            getattr(cache, method)(*[inputs] * (method == "logit_lens"))
