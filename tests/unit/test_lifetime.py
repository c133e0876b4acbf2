"""How long hooks are on a model, natively and in the compatible interface: until `restore()`, no longer."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import HookError, compat
from megatron_flex.statistics import Statistics
from tests.support.messages import raises


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        return self.second(self.first(x)) * scale + (0.0 if shift is None else shift)


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def native(model: nn.Module) -> Any:
    flex = mf.FlexModel(model)
    flex.register_forward_hook(mf.HookFunction("second", editing_function=double, groups={"edit"}))
    return flex


def compatible(model: nn.Module, output: dict[str, list[Tensor]] | None = None) -> Any:
    flex = compat.FlexModel(model, {} if output is None else output)
    flex.create_hook_group("edit", "second", editing_function=double)
    return flex


BOTH = pytest.mark.parametrize("attached", [native, compatible])


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def test_hooks_stay_when_the_flex_model_is_collected() -> None:
    model, x = Model(), torch.ones(2, 4)
    plain = model(x)
    flex = native(model)
    gone = weakref.ref(flex)
    del flex
    gc.collect()
    assert gone() is None
    assert torch.equal(model(x), plain * 2)
    for other in (native, compatible):
        beside = other(model)
        assert torch.equal(model(x), plain * 4), "one beside the other"
        beside.restore()
        assert torch.equal(model(x), plain * 2), "each takes its own hooks out"


def test_hooks_of_a_collected_compatible_model_are_removed_at_once() -> None:
    """As FlexModel did; it is part of no reference cycle, so all ranks remove them at the same place."""
    model, x, output = Model(), torch.ones(2, 4), {}
    plain, hooks = model(x), {id(m): dict(m._forward_hooks) for m in model.modules()}
    gc.disable()
    try:
        flex = compatible(model, output)
        flex.register_trainable_module("probe", nn.Linear(4, 4))
        assert torch.equal(flex(x), plain * 2)
        module = flex.module
        del flex
        assert module is model
        assert torch.equal(model(x), plain)
    finally:
        gc.enable()
    assert {id(m): dict(m._forward_hooks) for m in model.modules()} == hooks
    assert {n: len(t) for n, t in output.items()} == {"second": 1}


def test_a_collected_compatible_model_sees_the_backward_pass_that_is_due() -> None:
    model, x, output = Model(), torch.ones(2, 4), {}
    hooks = {id(m): dict(m._forward_hooks) for m in model.modules()}

    def called() -> Tensor:
        flex = compat.FlexModel(model, output)
        flex.register_full_backward_pre_hook(compat.HookFunction("second"))
        made: Tensor = flex(x)
        return made

    called().sum().backward()
    assert [t.tolist() for t in output["second"]] == [torch.ones(2, 4).tolist()]
    assert {id(m): dict(m._forward_hooks) for m in model.modules()} == hooks
    model(x).sum().backward()
    assert len(output["second"]) == 1


@BOTH
def test_restore_may_be_called_again(attached: Callable[[nn.Module], Any]) -> None:
    model, x = Model(), torch.ones(2, 4)
    plain, before = model(x), dict(vars(model))
    flex = attached(model)
    assert torch.equal(flex(x), plain * 2)
    assert flex.restore() is model
    assert flex.restore() is model
    assert dict(vars(model)) == before
    assert torch.equal(flex(x), plain), "it is the model alone"
    assert list(flex.state_dict())


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_hooked_model_is_copied_without_its_hooks(
    attached: Callable[[nn.Module], Any], copied: Any
) -> None:
    model, x = Model(), torch.ones(2, 4)
    plain, signature = model(x, 2.0, shift=x), inspect.signature(model.forward)
    flex = attached(model)
    assert inspect.signature(model.forward) == signature
    twin = copied(model)
    assert torch.equal(twin(x, 2.0, shift=x), plain)
    assert not torch.equal(model(x, 2.0, shift=x), plain)
    assert inspect.signature(twin.forward) == signature
    with raises(HookError, "FlexModel"):
        copied(flex)
    flex.restore()
    assert inspect.signature(model.forward) == signature


@BOTH
def test_a_scope_without_names_selects_no_hook(attached: Callable[[nn.Module], Any]) -> None:
    model, x = Model(), torch.ones(2, 4)
    plain = model(x)
    flex = attached(model)
    with flex.hooks():
        assert torch.equal(model(x), plain)
    with flex.hooks(complement=True):
        assert torch.equal(model(x), plain * 2)
    assert torch.equal(model(x), plain * 2)
    flex.restore()


REGISTER = (
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_hook"),
)
# By name, what would act on a native model: with a hook that is registered, and a new one.
NATIVE: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{name: lambda flex, old, new, name=name: getattr(flex, name)(new) for name in REGISTER},
    "remove_hook": lambda flex, old, new: flex.remove_hook(old),
    "add_to_groups": lambda flex, old, new: flex.add_to_groups(old, "more"),
    "remove_from_groups": lambda flex, old, new: flex.remove_from_groups(old, "edit"),
    "select": lambda flex, old, new: flex.select("all"),
    "hooks": lambda flex, old, new: flex.hooks().__enter__(),
    "register_trainable_module": lambda flex, old, new: flex.register_trainable_module(
        "probe", nn.Linear(4, 4)
    ),
    "remove_trainable_module": lambda flex, old, new: flex.remove_trainable_module("probe"),
    "register_dump": lambda flex, old, new: flex.register_dump(mf.Dump("nowhere", ["first:output"])),
    "remove_dump": lambda flex, old, new: flex.remove_dump(mf.Dump("nowhere", ["first:output"])),
    "register_nonfinite": lambda flex, old, new: flex.register_nonfinite("warn"),
    "features": lambda flex, old, new: flex.features([0]),
    "register_statistics": lambda flex, old, new: flex.register_statistics(
        Statistics("nowhere", ["first:output"])
    ),
    "remove_statistics": lambda flex, old, new: flex.remove_statistics(
        Statistics("nowhere", ["first:output"])
    ),
    "verify": lambda flex, old, new: flex.verify(),
    "freeze": lambda flex, old, new: flex.freeze(),
    "dry_run": lambda flex, old, new: flex.dry_run(),
    "debug": lambda flex, old, new: flex.debug(),
    "step": lambda flex, old, new: flex.step().__enter__(),
    "set_module_parameter": lambda flex, old, new: flex.set_module_parameter("first.bias", torch.ones(4)),
    "interp.run_with_cache": lambda flex, old, new: flex.interp.run_with_cache(torch.ones(2, 4)),
    "interp.run_with_hooks": lambda flex, old, new: flex.interp.run_with_hooks(torch.ones(2, 4)),
    "interp.hooks": lambda flex, old, new: flex.interp.hooks(()).__enter__(),
    "interp.trace": lambda flex, old, new: flex.interp.trace().__enter__(),
    "interp.generation": lambda flex, old, new: flex.interp.generation("first").__enter__(),
    "interp.stop_at_layer": lambda flex, old, new: flex.interp.stop_at_layer(1).__enter__(),
}
# What does not act on it: what was read, what the model is, and what puts it back.
READS = {
    *("estimate", "explain", "forward", "get_module_parameter", "named_full_parameters", "restore"),
    *(
        "parameters_without_layout",
        "sites",
        "trainable_parameters",
        "detach",
        "unfreeze",
        "report.show",
        "report.to_html",
        "report.tree",
    ),
}
COMPATIBLE: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{name: lambda flex, old, new, name=name: getattr(flex, name)(new) for name in REGISTER},
    "create_hook_group": lambda flex, old, new: flex.create_hook_group("more", "first"),
    "update_hook_groups": lambda flex, old, new: flex.update_hook_groups(old, "more"),
    "remove_hook_groups": lambda flex, old, new: flex.remove_hook_groups(old, "edit"),
    "register_trainable_module": lambda flex, old, new: flex.register_trainable_module(
        "probe", nn.Linear(4, 4)
    ),
    "wrapped_module_requires_grad": lambda flex, old, new: flex.wrapped_module_requires_grad(False),
    "hooks": lambda flex, old, new: flex.hooks().__enter__(),
    "forward": lambda flex, old, new: flex(torch.ones(2, 4), groups="edit"),
}
COMPATIBLE_READS = {
    *("get_group_hook_functions", "get_hook_function_groups", "get_module_parameter", "named_buffers"),
    *("named_parameters", "restore"),
}


def methods(kind: type) -> set[str]:
    """What a FlexModel can do, beside what every nn.Module can."""
    own = [c for c in kind.__mro__ if c.__module__.startswith("megatron_flex.")]
    found = {n for c in own for n, f in vars(c).items() if inspect.isfunction(f) and not n.startswith("_")}
    return found - {"state_dict", "load_state_dict"}


def methods_of_namespaces(kind: type) -> set[str]:
    """What the namespaces of a FlexModel can do, as `interp.trace`."""
    spaces = {name: held for name, held in vars(kind).items() if isinstance(held, cached_property)}
    found = {
        name: inspect.get_annotations(held.func, eval_str=False)["return"] for name, held in spaces.items()
    }
    return {f"{name}.{n}" for name, space in found.items() for n in methods(getattr(mf.model, space))}


def test_every_method_is_held_against_a_restored_model() -> None:
    assert methods(mf.FlexModel) | methods_of_namespaces(mf.FlexModel) == NATIVE.keys() | READS
    assert methods(compat.FlexModel) == COMPATIBLE.keys() | COMPATIBLE_READS


@pytest.mark.parametrize("name", NATIVE)
def test_a_restored_model_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = Model(), torch.ones(2, 4)
    state, plain, before = copy.deepcopy(model.state_dict()), model(x), dict(vars(model))
    flex = native(model)
    (hook,) = flex.groups["edit"]
    model(x)
    flex.restore()
    site = "first.weight" if name == "register_hook" else "first"
    with raises(HookError, "FlexModel"):
        NATIVE[name](flex, hook, mf.HookFunction(site))
    assert torch.equal(model(x), plain)
    assert dict(vars(model)) == before
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert not list(tmp_path.iterdir())
    assert list(flex.output_dict) == ["second:output"], "what was read stays"


@pytest.mark.parametrize("name", COMPATIBLE)
def test_a_restored_module_is_left_alone_in_the_compatible_interface(name: str) -> None:
    model, x, output = Model(), torch.ones(2, 4), {}
    plain, before = model(x), dict(vars(model))
    flex = compatible(model, output)
    (hook,) = flex.get_group_hook_functions("edit")
    flex(x)
    flex.restore()
    site = "first.weight" if name == "register_hook" else "first"
    with raises(HookError, "FlexModel"):
        COMPATIBLE[name](flex, hook, compat.HookFunction(site))
    assert torch.equal(model(x), plain)
    assert dict(vars(model)) == before
    assert all(p.requires_grad for p in model.parameters())
    assert {n: len(t) for n, t in output.items()} == {"second": 1}


def test_namespaces_are_made_once_and_keep_no_flex_model() -> None:
    flex = native(Model())
    state, before = list(flex.state_dict()), set(vars(flex))
    submodules = [id(module) for module in flex.modules()]
    interp, report = flex.interp, flex.report
    assert flex.interp is interp
    assert flex.report is report
    assert set(vars(flex)) - before == {"interp", "report"}
    assert list(flex.state_dict()) == state
    assert [id(module) for module in flex.modules()] == submodules
    gone = weakref.ref(flex)
    gc.collect()
    gc.disable()
    try:
        del flex
        assert gone() is None, "no cycle holds it"
    finally:
        gc.enable()
    assert "second" in report._repr_html_(), "a namespace goes on alone"
