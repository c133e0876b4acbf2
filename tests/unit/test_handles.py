"""What registering returns takes it back, and what people print says what it is."""

from pathlib import Path

import pytest
import torch
from torch import nn

import megatron_flex as mf
from megatron_flex.errors import HookError
from megatron_flex.handles import Handle
from tests.support.messages import assert_names, raises


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def twice() -> mf.HookFunction:
    return mf.HookFunction("0", editing_function=lambda module, x, ctx, modules: 2 * x)


X = torch.ones(2, 3)


def test_a_handle_removes_once():
    calls: list[int] = []
    handle = Handle(lambda: calls.append(1), "a thing")
    active = repr(handle)
    assert_names(active, "Handle", "a thing")
    handle.remove()
    handle.remove()
    assert calls == [1]
    assert repr(handle) != active
    assert_names(repr(handle), "Handle", "a thing")
    with Handle(lambda: calls.append(2), "another"):
        assert calls == [1]
    assert calls == [1, 2]
    Handle(lambda: calls.append(3), "what is gone", lambda: False).remove()
    assert calls == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_hook",
    ],
)
def test_every_hook_has_a_handle(name: str):
    with mf.attach(model()) as flex:
        hook = mf.HookFunction("0", groups=["mine"])
        handle = getattr(flex, name)(hook)
        assert flex.groups["mine"] == [hook]
        handle.remove()
        assert "mine" not in flex.groups
        handle.remove()


def test_an_edit_ends_with_its_block():
    whole = model()
    plain = whole(X)
    with mf.attach(whole) as flex:
        with flex.register_forward_hook(twice()):
            assert not torch.equal(whole(X), plain)
        assert torch.equal(whole(X), plain)


def test_what_was_removed_by_hand_or_with_the_model():
    flex = mf.attach(model())
    hook = mf.HookFunction("0")
    handle = flex.register_forward_hook(hook)
    flex.remove_hook(hook)
    handle.remove()
    with raises(HookError, "HookFunction", "0"):
        flex.remove_hook(hook)
    late = flex.register_forward_hook(mf.HookFunction("1"))
    flex.session.close()
    late.remove()


@pytest.mark.parametrize(
    ("name", "value"), [("editing_function", None), ("save", False), ("enabled", False), ("on_error", "skip")]
)
def test_a_registered_hook_does_not_change(name, value):
    whole, hook = model(), twice()
    plain = whole(X)
    flex = mf.attach(whole)
    flex.register_forward_hook(hook)
    edited = whole(X)
    with raises(HookError, hook.where, name, repr(value)):
        setattr(hook, name, value)
    assert torch.equal(whole(X), edited)
    assert not torch.equal(edited, plain)
    flex.remove_hook(hook)
    setattr(hook, name, value)
    flex.restore()
    mf.attach(whole, [other := twice()]).restore()
    other.enabled = False


def test_detach_is_restore():
    whole = model()
    flex = mf.attach(whole)
    assert flex.detach() is whole
    with raises(HookError, "FlexModel"):
        flex.register_forward_hook(mf.HookFunction("0"))


def test_sinks_have_handles(tmp_path: Path):
    whole = model()
    with mf.attach(whole) as flex:
        dump = flex.register_dump(mf.Dump(tmp_path / "dump", "0"))
        statistics = flex.register_statistics(mf.Statistics(tmp_path / "statistics", "0"))
        whole(X)
        dump.remove()
        statistics.remove()
        whole(X)
        dump.remove()
        statistics.remove()
        assert not flex.session.sinks.groups
    with mf.open_dump(tmp_path / "dump") as found:
        assert found["0:output"].shape[0] == 1
        assert repr(found) == f"<OpenDump {tmp_path / 'dump'}: 1 site, 0 parameters, 1 run>"
    assert len(mf.open_statistics(tmp_path / "statistics").iterations) == 1


def test_a_trainable_module_is_removed():
    whole, adapter = model(), nn.Linear(3, 3)
    with mf.attach(whole) as flex:
        handle = flex.register_trainable_module("adapter", adapter)

        def edit(module, x, ctx, modules):
            return x + modules["adapter"](x) if "adapter" in modules else x

        flex.register_forward_hook(mf.HookFunction("0", editing_function=edit, save=False))
        whole(X).sum().backward()
        first = adapter.weight.grad.clone()
        assert first.abs().sum() > 0
        handle.remove()
        assert not flex.trainable_modules
        adapter(X).sum().backward()  # it is the person's again
        assert torch.equal(adapter.weight.grad, first + X.sum(0).expand(3, 3))
        adapter.weight.grad = None
        whole(X).sum().backward()
        assert adapter.weight.grad is None
        handle.remove()
        with raises(HookError, "adapter"):
            flex.remove_trainable_module("adapter")


def test_people_can_print_what_they_made(tmp_path: Path):
    hook = mf.HookFunction("0", save=False, editing_function=print)
    assert_names(repr(hook), "HookFunction", "forward", 0, "print")
    assert_names(repr(mf.Dump(tmp_path, ["0", "1"])), "Dump", 0, 1, tmp_path)
    assert repr(mf.Statistics(tmp_path, "0")) == f"<Statistics of 0 in {tmp_path}>"


def test_dir_has_the_public_names_and_nothing_else():
    assert dir(mf) == sorted(mf.__all__)
    assert {"plot", "open_dump", "edits"} <= set(dir(mf))
    for name in dir(mf):
        getattr(mf, name)
