"""The compatible FlexModel's other calls, on Megatron models."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import matrix
from tests.support import compat, gpt, oracle, ranks, truths, wrapped
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
PP2 = Case("pp2", pp=2, layers=2)
DP2 = Case("dp2", dp=2, layers=2)
FC1 = "decoder.layers.1.mlp.linear_fc1"
LATER = "decoder.final_layernorm"
STREAM = (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)


@cache
def truth() -> dict[str, Any]:
    return truths.of(TP2.single(), [f"{FC1}:output"], [f"{FC1}:output"])


def close(got: Any, want: Any) -> bool:
    return matrix.relative(got, want) <= matrix.BOUND


def said(do: Any, *args: Any, **kwargs: Any) -> str:
    from megatron_flex import FlexError

    try:
        do(*args, **kwargs)
    except FlexError as error:
        return str(error)
    return ""


# -- the constructor ---------------------------------------------------------------------------------


def constructed(case: Case) -> dict[str, Any]:
    from megatron_flex.compat import FlexModel

    chunks = compat.start(case)
    flex = FlexModel(chunks[0], {}, tensor_parallel_size=case.tp, pipeline_parallel_size=case.pp)
    own = dict(chunks[0].named_parameters())
    return {
        "wrong": said(FlexModel, chunks[0], {}),
        "group": said(compat.wrap, case, chunks, {}, process_group=torch.distributed.new_group([0])),
        "keys": set(flex.state_dict()) == {f"module.{n}" for n in chunks[0].state_dict()},
        "parameters": [n for n, _ in flex.named_parameters()] == list(own),
        "same": all(a is b for a, b in zip(flex.parameters(), own.values(), strict=True)),
        "buffers": list(flex.named_buffers()) == list(chunks[0].named_buffers()),
        "module": flex.module is chunks[0],
        "no passthrough": not hasattr(flex, "decoder"),
        "fmps": (flex.fmps.get_tensor_parallel_world_size(), flex.fmps.get_pipeline_parallel_world_size()),
    }


@pytest.mark.parametrize("case", [TP2, PP2], ids=lambda c: c.name)
def test_the_constructor_and_the_names_of_parameters(case: Case) -> None:
    for found in run(2, constructed, case):
        assert_names(found.pop("wrong"), "tp=2" if case.tp == 2 else "pp=2")
        assert_names(found.pop("group"), "process_group", 1, 2)
        assert found.pop("fmps") == (case.tp, case.pp)
        assert all(found.values()), found


def one_process() -> list[Any]:
    """As `python script.py`, with no launcher and no torch.distributed."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    from megatron_flex.compat import FlexModel, HookFunction

    torch.manual_seed(0)
    model, output = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), {}
    flex = FlexModel(model, output)
    flex.register_forward_hook(HookFunction("1"))
    inputs = torch.randn(5, 3)
    flex(inputs)
    return [torch.equal(output["1"][0], model[:2](inputs)), torch.distributed.is_initialized()]


def test_a_script_without_a_launcher_is_one_process() -> None:
    assert run(1, one_process, alone=True) == [[True, False]]


# -- names -------------------------------------------------------------------------------------------


def named(case: Case, ddp: bool) -> dict[str, Any]:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    local = [n for n, _ in chunks[0].named_modules()]
    model = wrapped.ddp(chunks) if ddp else chunks
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, model, output)
    flex.register_trainable_module("probe", nn.Linear(2, 2))
    out = {
        "wrapped": flex.wrapped_module_names,
        "local": local,
        "trainable": flex.trainable_modules_names,
        "all": flex.all_modules_names == [*flex.wrapped_module_names, "probe"],
        "keys": set(flex.state_dict()) - {f"module.{n}" for n in model[0].state_dict()},
    }
    prefix = "module." if ddp else ""
    written = (f"{prefix}{FC1}", f"module.module.{FC1}", FC1)
    for name in written:
        flex.register_forward_hook(HookFunction(name))
    flex.create_hook_group("text", f"{prefix}decoder.layers.0.mlp.linear")
    gpt.step(case, model, 0, forward_only=True)
    out["read"] = {n: len(t) for n, t in output.items()}
    rows = list(zip(*(output[w] for w in written), strict=True)) if ddp and output else []
    out["alike"] = [len({t.data_ptr() for t in row}) for row in rows]
    out["values"] = [torch.equal(row[0], other) for row in rows for other in row]
    flex.restore()
    return out


@cache
def names(ddp: bool) -> list[dict[str, Any]]:
    return run(2, named, PP2, ddp)


def test_wrapped_module_names() -> None:
    first, second = names(False)
    assert first["wrapped"] == second["wrapped"], "the same on all stages"
    single = set(first["local"]) | {n.replace("layers.0", "layers.1") for n in second["local"]}
    assert set(first["wrapped"]) == single
    bare = first["wrapped"]
    first, _ = names(True)
    assert first["wrapped"] == ["", *(f"module.{n}" if n else "module" for n in bare)]


def test_trainable_and_all_modules_names() -> None:
    for found in names(False):
        assert found["trainable"] == ["probe"]
        assert found["all"]
        assert found["keys"] == {"trainable_modules.probe.weight", "trainable_modules.probe.bias"}


@pytest.mark.parametrize("ddp", [False, True])
def test_names_with_the_prefixes_of_wrappers(ddp: bool) -> None:
    """`output_ptr` has the person's own string; whatever stands twice is a copy."""
    first, second = names(ddp)
    prefix = "module." if ddp else ""
    mlp = f"{prefix}decoder.layers.0.mlp.linear_fc"
    wanted = {f"{prefix}{FC1}", f"module.module.{FC1}", FC1, f"{mlp}1", f"{mlp}2"}
    each = dict.fromkeys(wanted, PP2.microbatches)
    if not ddp:
        each[FC1] *= 2  # by two hooks
    assert first["read"] == each
    assert second["read"] == each
    if ddp:
        assert first["alike"] == [3] * PP2.microbatches
        assert all(first["values"])


# -- what functions share ----------------------------------------------------------------------------


def sharing(case: Case) -> dict[str, Any]:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case, None)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    out: dict[str, Any] = {"given": []}

    def keep(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.count = getattr(save_ctx, "count", 0) + 1
        save_ctx.stream = inputs
        out["given"].append((type(current_module).__name__, "probe" in modules, save_ctx is flex.save_ctx))
        return inputs

    def use(module: Any, grad: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        out["tensor"] = module, tuple(grad.shape), modules is flex.trainable_modules
        return grad

    def add(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        out["graph"] = save_ctx.stream.requires_grad
        return inputs + save_ctx.stream

    first = HookFunction("decoder.layers.0", editing_function=keep)
    flex.register_forward_hook(first)
    flex.register_trainable_module("probe", nn.Linear(gpt.HIDDEN, gpt.HIDDEN))
    flex.register_forward_hook(HookFunction("decoder.final_layernorm", editing_function=add))
    flex.register_hook(HookFunction(f"{FC1}.weight", editing_function=use))
    for _ in range(2):
        ranks.call(chunks, model=flex).sum().backward()
    state = first._shared_state
    out["state"] = (
        state.output_ptr is output,
        state.save_ctx is flex.save_ctx,
        state.modules is flex.trainable_modules,
    )
    out["count"] = flex.save_ctx.count
    flex.restore()
    return out


@cache
def shared() -> dict[str, Any]:
    return run(2, sharing, TP2)[1]


def test_editing_functions_get_four_arguments() -> None:
    assert shared()["given"] == [("TransformerLayer", True, True)] * 2
    assert shared()["tensor"] == (None, (2 * gpt.FFN, gpt.HIDDEN), True)


def test_save_ctx_persists_and_keeps_graphs() -> None:
    assert shared()["count"] == 2
    assert shared()["graph"]


def test_shared_state_of_a_hook() -> None:
    assert shared()["state"] == (True, True, True)


def through_save_ctx(case: Case, state: dict[str, Tensor] | None) -> Any:
    """What layer 0 returned is added before the last norm: gradients flow through save_ctx."""
    from megatron_flex.compat import HookFunction

    def keep(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.stream = inputs
        return inputs

    def add(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs + oracle.edit(save_ctx.stream)

    if state is None:
        chunks = ranks.start(case)
        state = gpt.randomize(chunks[0])
        held: dict[str, Tensor] = {}

        def hold(tensor: Tensor) -> Tensor:
            held["stream"] = tensor
            return tensor

        oracle.install(chunks[0], "decoder.layers.0:output", hold)
        oracle.install(chunks[0], "decoder.final_layernorm:input", lambda t: t + oracle.edit(held["stream"]))
        losses = gpt.step(case, chunks, 0)
        return state, losses, {n: p.grad for n, p in chunks[0].named_parameters()}
    chunks = compat.start(case, state)
    flex = compat.wrap(case, chunks, {})
    flex.register_forward_hook(HookFunction("decoder.layers.0", editing_function=keep))
    flex.register_forward_pre_hook(HookFunction("decoder.final_layernorm", editing_function=add))
    mesh = flex._flex.session.mesh
    flex.save_ctx.stream = torch.zeros(())  # of an earlier step: that of this microbatch counts
    losses = gpt.step(case, chunks, 0)
    gradients = matrix._gradients(flex._flex, chunks)
    return {"coords": mesh.coords, "sizes": mesh.sizes, "dp": 0, "edited": {"it": (losses, gradients)}}


ACROSS = (
    TP2,
    PP2,
    Case("tp2 pp2", tp=2, pp=2, layers=2),
    Case("pp2 vpp2", pp=2, vpp=2, layers=4),
    Case("pp2 recompute", pp=2, layers=2, recompute=("full",)),
)


@pytest.mark.parametrize("case", ACROSS, ids=lambda c: c.name)
def test_save_ctx_between_layers_equals_one_process(case: Case) -> None:
    ((state, losses, gradients),) = run(1, through_save_ctx, case.single(), None)
    answers = run(case.tp * case.pp, through_save_ctx, case, state)
    found = matrix.whole_gradients(answers, lambda a: a["edited"]["it"][1])
    (got,) = {tuple(a["edited"]["it"][0]) for a in answers} - {()}
    assert torch.allclose(torch.tensor(got), torch.tensor(losses))
    assert max(matrix.relative(found[n], gradients[n]) for n in gradients) <= matrix.BOUND


def passed_on(case: Case) -> dict[str, Any]:
    """Functions at three layers append to a list, count, and read in the backward pass what they saved."""
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})
    out: dict[str, list[Any]] = {"forward": [], "backward": [], "after": [], "log": []}

    def note(name: str, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        if name == "first":
            save_ctx.log.append(name)  # a list that was there before
            save_ctx.seen, save_ctx.count, save_ctx.gone = [], 0, name
        elif hasattr(save_ctx, "gone"):
            del save_ctx.gone
        save_ctx.seen.append(name)  # changed in place
        save_ctx.count += 1
        out["forward"].append((name, list(save_ctx.seen), save_ctx.count, hasattr(save_ctx, "gone")))
        out["log"].append(len(save_ctx.log))
        return inputs

    def look(module: Any, grad: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        out["backward"].append((list(save_ctx.seen), save_ctx.count))
        return grad

    for name, place in (("first", "decoder.layers.0"), ("second", "decoder.layers.1"), ("third", LATER)):
        flex.register_forward_hook(HookFunction(place, editing_function=partial(note, name)))
    flex.register_full_backward_pre_hook(HookFunction("decoder.layers.0.mlp", editing_function=look))
    flex.save_ctx.log = []
    gpt.step(case, chunks, 0)
    out["after"] = [flex.save_ctx.seen]
    flex.restore()
    return out


def test_save_ctx_of_a_microbatch_is_passed_from_stage_to_stage() -> None:
    first, second = run(2, passed_on, PP2)
    count = PP2.microbatches
    assert first["forward"] == [("first", ["first"], 1, True)] * count
    assert (
        second["forward"]
        == [
            ("second", ["first", "second"], 2, False),
            ("third", ["first", "second", "third"], 3, False),
        ]
        * count
    )
    assert first["backward"] == [(["first", "second", "third"], 3)] * count
    assert second["after"] == [["first", "second", "third"]]
    assert second["log"] == [n for n in range(1, count + 1) for _ in ("second", "third")]


# -- trainable modules -------------------------------------------------------------------------------


def lens() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(gpt.HIDDEN, gpt.HIDDEN)


def trained(case: Case, state: dict[str, Tensor] | None) -> Any:
    """A trainable layer in the residual stream and one optimizer step, the model frozen or not."""
    from megatron_flex.compat import HookFunction

    def apply(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs + modules["lens"](inputs)

    layer = lens()
    if state is None:
        chunks = ranks.start(case)
        state = gpt.randomize(chunks[0])
        oracle.install(chunks[0], "decoder.layers.0:output", lambda t: t + layer(t))
        gpt.step(case, chunks, 0)
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        return state, [p.detach().clone() for p in layer.parameters()]
    chunks = compat.start(case, state)
    flex = compat.wrap(case, chunks, {})
    flex.register_forward_hook(HookFunction("decoder.layers.0", editing_function=apply))
    flex.register_trainable_module("lens", layer)
    flex.wrapped_module_requires_grad(False)
    optimizer = torch.optim.SGD(flex.trainable_modules.parameters(), lr=0.1)
    gpt.step(case, chunks, ranks.mine(chunks))
    optimizer.step()
    frozen = all(p.grad is None for p in chunks[0].parameters())
    flex.wrapped_module_requires_grad(True)
    return [p.detach() for p in flex.trainable_modules["lens"].parameters()], frozen, flex.training


@pytest.mark.parametrize("case", [TP2, DP2], ids=lambda c: c.name)
def test_register_trainable_module(case: Case) -> None:
    from dataclasses import replace

    single = replace(case.single(), microbatches=case.microbatches, joint=case.dp)
    ((state, wanted),) = run(1, trained, single, None)
    for got, frozen, _ in run(2, trained, case, state):
        assert all(close(g, w) for g, w in zip(got, wanted, strict=True))
        assert frozen


def frozen(case: Case) -> list[bool]:
    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})
    flex.wrapped_module_requires_grad(False)
    out = [any(p.requires_grad for p in chunks[0].parameters())]
    flex.wrapped_module_requires_grad(True)
    out.append(all(p.requires_grad for p in chunks[0].parameters()))
    flex.wrapped_module_requires_grad(False)
    flex.restore()
    return [*out, all(p.requires_grad for p in chunks[0].parameters())]


def test_wrapped_module_requires_grad() -> None:
    assert run(1, frozen, TP2.single()) == [[False, True, True]]


# -- parameters --------------------------------------------------------------------------------------


def parameters(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    chunks = compat.start(case, state)
    flex = compat.wrap(case, chunks, {})
    get = flex.get_module_parameter
    wide = (2 * gpt.FFN, None)
    return {
        "whole": get(f"{FC1}.weight", wide),
        "prefixed": get(f"module.{FC1}.weight", wide),
        "shape": said(get, f"{FC1}.weight", (gpt.FFN, None)),
        "name": said(get, "decoder.layers.1.mlp.linear_fc9.weight", None),
    }


@pytest.mark.versions
@pytest.mark.parametrize("case", [TP2, PP2], ids=lambda c: c.name)
def test_get_module_parameter(case: Case) -> None:
    state = truth()["state"]
    for found in run(2, parameters, case, state):
        whole = found["whole"]
        assert torch.equal(whole, state[f"{FC1}.weight"])
        assert torch.equal(whole, found["prefixed"])
        assert whole.device.type == "cpu"
        assert not whole.requires_grad
        assert_names(found["shape"], "expected_shape")
        assert_names(found["name"], "decoder.layers.1.mlp.linear_fc9.weight")


# -- the end -----------------------------------------------------------------------------------------


def ended(case: Case) -> dict[str, Any]:
    import warnings

    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    before = ranks.fingerprint(chunks)
    flex = compat.wrap(case, chunks, {})
    for call, (name, _) in compat.KINDS.items():
        getattr(flex, call)(HookFunction(name, editing_function=compat.edit))
    out: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks.call(chunks, model=flex)  # no backward pass
        with ranks.counting() as counts:
            out["module"] = flex.restore() is chunks[0] and flex.restore() is chunks[0]
        out["sent"] = sum(counts.values())
        out["warned"] = [str(w.message) for w in caught if "never fired" in str(w.message)]
    out["restored"] = ranks.fingerprint(chunks) == before
    out["late"] = said(flex.register_forward_hook, HookFunction(FC1))
    return out


def test_restore_takes_everything_out() -> None:
    for found in run(2, ended, TP2):
        assert found["module"]
        assert found["sent"] == 0
        assert len(found["warned"]) == 1
        assert "full_backward" in found["warned"][0]
        assert found["restored"]
        assert_names(found["late"], "FlexModel")


def dropped(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    """What a compatible and a native FlexModel do that nobody holds any more."""
    import megatron_flex as mf
    from megatron_flex.compat import FlexModel, HookFunction

    chunks = compat.start(case, state)
    answer: dict[str, Any] = {"coords": {}, "sizes": {}}
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    flex.register_forward_hook(HookFunction(FC1, editing_function=compat.edit))
    seen = [weakref.ref(flex), weakref.ref(flex._flex)]
    answer["compat"] = gpt.step(case, chunks, 0)
    answer["read"] = len(output.get(FC1, ()))
    del flex
    gc.collect()
    answer["plain"] = gpt.step(case, chunks, 0)
    native = mf.FlexModel(chunks)
    native.register_forward_hook(
        mf.HookFunction(LATER, editing_function=lambda m, x, c, t: oracle.edit(x), save=False)
    )
    answer["native"] = gpt.step(case, chunks, 0)
    seen.append(weakref.ref(native))
    del native
    gc.collect()
    answer["dropped"] = gpt.step(case, chunks, 0)
    answer["after"] = len(output.get(FC1, ()))
    answer["collected"] = all(s() is None for s in seen)
    answer["class"] = isinstance(chunks[0], FlexModel)
    return answer


@pytest.mark.parametrize("case", [TP2, PP2], ids=lambda c: c.name)
def test_hooks_of_a_collected_compatible_model_go_and_native_ones_stay(case: Case) -> None:
    single = truths.of(case.single(), [f"{FC1}:output"], [f"{FC1}:output"])
    one, _ = single["edited"][f"{FC1}:output"]
    microbatches = len(one)
    for found in run(2, dropped, case, single["state"]):
        assert found["collected"]
        assert not found["class"]
        if found["compat"]:  # the last stage
            assert close(torch.tensor(found["compat"]), torch.tensor(one))
            assert close(torch.tensor(found["plain"]), torch.tensor(single["losses"]))
            assert not close(torch.tensor(found["native"]), torch.tensor(single["losses"]))
            assert found["dropped"] == found["native"]
        assert found["read"] == found["after"] == microbatches


# -- what is kept, and where -------------------------------------------------------------------------


def kept(case: Case, everywhere: bool) -> dict[str, Any]:
    from megatron_flex.compat import HookFunction
    from megatron_flex.compat import distributed as fm

    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output, everywhere=everywhere)
    places = {
        fm.CPUPinnedMemoryOffloadStrategy: "decoder.layers.0",
        fm.CPUPagedMemoryOffloadStrategy: "decoder.layers.1",
        fm.GPUMemoryOffloadStrategy: "decoder.layers.0.mlp",
        fm.NullMemoryOffloadStrategy: "decoder.layers.1.mlp",
    }
    hooks = [HookFunction(name) for name in places.values()]
    default = hooks[0].offload_strategy
    for hook, strategy in zip(hooks, places, strict=True):
        hook.offload_strategy = strategy
        flex.register_forward_hook(hook)
    gpt.step(case, chunks, 0, forward_only=True)
    gpt.step(case, chunks, 0, forward_only=True)
    out = {
        "default": default is fm.CPUPinnedMemoryOffloadStrategy,
        "kept": {n: len(t) for n, t in output.items()},
        "apart": len({t.data_ptr() for ts in output.values() for t in ts}),
        "sum": {n: float(torch.stack(t).double().sum()) for n, t in output.items()},
        "native": len(flex._flex.output_dict),
    }
    flex.restore()
    return out


def test_offload_strategies() -> None:
    first, second = run(2, kept, PP2, False)
    each = 2 * PP2.microbatches
    assert first["default"]
    assert first["kept"] == dict.fromkeys(
        ["decoder.layers.0", "decoder.layers.1", "decoder.layers.0.mlp"], each
    )
    assert first["apart"] == 3 * each
    assert first["native"] == 0, "what is cleared by the person is gone"
    assert second["kept"] == {}


def test_every_rank() -> None:
    first, second = run(2, kept, PP2, True)
    assert second["kept"] == first["kept"]
    assert second["sum"] == first["sum"]


def custom(case: Case) -> list[Any]:
    """A strategy of a person's own, set between registration and the first call."""
    from megatron_flex.compat import HookFunction
    from megatron_flex.compat.distributed import BaseOffloadStrategy

    seen: list[Any] = []

    class Means(BaseOffloadStrategy):
        @classmethod
        def initialize(cls, name: str, output_ptr: Any) -> Means:
            return cls(lambda t: seen.append((name, float(t.mean()))))

    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})
    hook = HookFunction(FC1)
    flex.register_forward_hook(hook)
    hook.offload_strategy = Means
    ranks.call(chunks, model=flex)
    return [seen, flex.output_ptr, isinstance(hook.offload_strategy, Means)]


def test_an_offload_strategy_of_ones_own() -> None:
    (first, empty, made), (second, *_) = run(2, custom, TP2)
    assert [name for name, _ in first] == [FC1]
    assert empty == {}
    assert made
    assert second == first


def divided(case: Case, settings: dict[str, bool], editing: bool) -> Any:
    from megatron_flex.compat import FlexModel, HookFunction

    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(chunks[0], output, case.tp, case.pp, case.dp, **settings)
    seen: list[Tensor] = []

    def look(module: Any, grad: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        seen.append(grad)
        return grad

    edit = {"editing_function": look} if editing else {}
    flex.register_full_backward_hook(HookFunction("decoder.layers.0.mlp", **edit))
    gpt.step(case, chunks, ranks.mine(chunks))
    grads = [p.grad.clone() for p in chunks[0].parameters()]
    return output.get("decoder.layers.0.mlp", []), seen, grads


@pytest.mark.parametrize("editing", [False, True])
def test_gradients_divided_by_the_data_parallel_size(editing: bool) -> None:
    whole = run(2, divided, DP2, {"divide_gradients_by_dp": False}, editing)
    half = run(2, divided, DP2, {}, editing)
    assert len(whole[0][0]) == DP2.microbatches
    assert all(torch.equal(w / 2, h) for w, h in zip(whole[0][0], half[0][0], strict=True))
    assert all(torch.equal(w / 2, h) for w, h in zip(whole[1][1], half[1][1], strict=True))
    for a, b in zip(whole, half, strict=True):
        assert all(torch.allclose(x, y) for x, y in zip(a[2], b[2], strict=True))


# -- the rest ----------------------------------------------------------------------------------------


def debugging(case: Case) -> list[Any]:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    os.environ["FLEXMODEL_DEBUG"] = "loud"
    wrong = said(compat.wrap, case, chunks, {})
    os.environ["FLEXMODEL_DEBUG"] = "debug"
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_flex").addHandler(handler)
    flex = compat.wrap(case, chunks, {})
    flex.register_forward_hook(HookFunction("decoder.layers.0"))
    ranks.call(chunks, model=flex)
    return [wrong, lines]


def test_flexmodel_debug() -> None:
    ((wrong, lines),) = run(1, debugging, TP2.single())
    assert_names(wrong, "loud", "FLEXMODEL_DEBUG", "debug", "info")
    assert_names(lines, "decoder.layers.0", STREAM)


def chunked(case: Case, state: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case, state)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    flex.register_forward_hook(HookFunction(FC1))
    flex.register_forward_hook(HookFunction("decoder.layers.3"))
    gpt.step(case, chunks, 0)
    assert flex.restore() is chunks
    return output


def test_virtual_pipeline_chunks() -> None:
    case = Case("pp2 vpp2", pp=2, vpp=2)
    found = truths.of(case.single(), [f"{FC1}:output", "decoder.layers.3:output"], [])
    first, second = run(2, chunked, case, found["state"])
    assert second.keys() == first.keys()
    for name, got in [*first.items(), *second.items()]:
        wanted = found["values"][f"{name}:output"]
        assert all(close(g, w) for g, w in zip(got, wanted, strict=True))
    assert len(first) == 2


def several(case: Case) -> dict[str, Any]:
    """Several hooks at one place: each sees, and keeps, what those before it made."""
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    name = "decoder.layers.0"

    def twice(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * 2

    flex.register_forward_pre_hook(HookFunction(name))
    for function in (None, twice, twice, None):
        flex.register_forward_hook(HookFunction(name, editing_function=function))
    ranks.call(chunks, model=flex)
    flex.restore()
    return output


def test_hooks_at_one_place_see_what_those_before_made() -> None:
    first, second = run(2, several, TP2)
    entered, *left = first["decoder.layers.0"]
    assert entered.shape == STREAM
    assert [float((t / left[0]).nanmedian()) for t in left] == [1.0, 1.0, 2.0, 4.0]
    assert all(map(torch.equal, second["decoder.layers.0"], first["decoder.layers.0"]))
    assert not torch.equal(entered, left[0])


def failing(case: Case) -> str:
    from megatron_flex.compat import HookFunction

    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})

    def wrong(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs[:1]

    def broken(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        raise KeyError("mine")

    flex.register_forward_hook(HookFunction(FC1, editing_function=wrong))
    first = said(partial(ranks.call, chunks, model=flex))
    flex.restore()
    flex = compat.wrap(case, chunks, {})
    flex.register_forward_hook(HookFunction(FC1, editing_function=broken))
    return first + said(partial(ranks.call, chunks, model=flex))


def test_what_an_editing_function_does_wrong_is_told_with_its_line() -> None:
    for text in run(2, failing, TP2):
        assert_names(text, "failing.<locals>.broken")
        assert_names(text, "KeyError", "mine")
        assert "test_compat_api.py:" in text
