"""What the CPU runtime is made of: patches that are undone, import hooks, Megatron's norms."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flex import cpu
from megatron_flex.cpu.megatron import build_norm
from megatron_flex.cpu.patches import AfterImportFinder, Patches
from megatron_flex.errors import FlexError
from tests.support.messages import raises
from tests.unit.test_cpu import differences, everything, no_gpu

__all__ = ["no_gpu"]


def test_failing_to_enable_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    from megatron_flex.cpu import megatron

    before = everything()
    with monkeypatch.context() as patch:
        patch.setattr(megatron, "loaded_modules", lambda packages: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cpu.enable()
        patch.undo()
    assert differences(before, everything()) == []


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("kind", "of"), [("LayerNorm", torch.nn.LayerNorm), ("RMSNorm", torch.nn.RMSNorm)])
def test_norms_carry_sequence_parallel(kind: str, of: Any, zero_centered: bool):
    config = SimpleNamespace(
        normalization=kind, sequence_parallel=True, layernorm_zero_centered_gamma=zero_centered
    )
    norm, x = build_norm(config, 8, eps=1e-3), torch.randn(2, 3, 8)
    assert all(p.sequence_parallel is True for p in norm.parameters())
    assert torch.equal(norm(x), of(8, eps=1e-3)(x))
    norm.weight.data += 1
    plain = of(8, eps=1e-3)
    plain.weight.data += 1
    assert torch.equal(norm(x), plain(x))


def test_an_unknown_norm_is_named():
    config = SimpleNamespace(normalization="BatchNorm", sequence_parallel=False)
    with raises(FlexError, "'BatchNorm'", "LayerNorm", "RMSNorm"):
        build_norm(config, 8)


def test_patches_restore_what_the_owner_held():
    class Base:
        inherited = 1

    class Owner(Base):
        own = staticmethod(len)

    before, environment = dict(vars(Owner)), {"kept": "a"}
    patches = Patches()
    patches.set(Owner, "own", 2)
    patches.set(Owner, "own", 3)
    patches.set(Owner, "inherited", 4)
    patches.set_present(Owner, "nowhere", 5)
    patches.set_item(environment, "kept", "b")
    patches.set_item(environment, "added", "c")
    assert (Owner.own, Owner.inherited, hasattr(Owner, "nowhere")) == (3, 4, False)
    patches.restore()
    assert vars(Owner)["own"] is before["own"]
    assert "inherited" not in vars(Owner)
    assert environment == {"kept": "a"}


def test_names_bound_by_import_follow(monkeypatch: pytest.MonkeyPatch):
    source = SimpleNamespace(call=lambda: "original")
    early, late = ModuleType("pack.early"), ModuleType("pack.late")
    monkeypatch.setitem(sys.modules, "pack.early", early)
    monkeypatch.setitem(sys.modules, "pack.late", late)
    early.bound, patches = source.call, Patches()
    patches.set(source, "call", lambda: "stand-in")
    patches.rebind([early])
    late.bound = source.call
    assert early.bound() == late.bound() == "stand-in"
    patches.restore(("pack",))
    assert early.bound() == late.bound() == "original"


def test_after_import_leaves_the_loader_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "flexpack").mkdir()
    (tmp_path / "flexpack" / "__init__.py").write_text("seen = __loader__, __spec__.loader\n")
    (tmp_path / "flexpack" / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []
    finder = AfterImportFinder("flexpack", lambda module: loaded.append(module.__name__))
    sys.meta_path.insert(0, finder)
    try:
        assert import_module("flexpack.inner").value == 1
        import_module("json")
    finally:
        sys.meta_path.remove(finder)
        package = sys.modules.pop("flexpack")
        sys.modules.pop("flexpack.inner")
    assert loaded == ["flexpack", "flexpack.inner"]
    assert package.seen == (package.__loader__, package.__spec__.loader)
    assert package.__spec__.loader is package.__loader__
    assert type(package.__loader__).__module__ != AfterImportFinder.__module__
