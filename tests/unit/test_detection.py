"""Which framework a model is taken for, what is told of that, and what others may add."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_flex as mf
from megatron_flex import FlexError, FlexWarning
from megatron_flex.adapters import FrameworkMatch, compose, detect, make_mesh
from megatron_flex.adapters.detection import TESTED_RANGES, Version, check_versions, parse_release
from megatron_flex.config import flex_config
from tests.support import distribution
from tests.support.messages import assert_names, raises, warns


class Special(nn.Linear):
    """What a made-up framework would have as its own layer."""


class Claiming:
    """A finder of models that have such a layer in them."""

    def __init__(self, name: str, before: tuple[str, ...] = (), around: bool = False) -> None:
        self.name, self.before, self.around = name, before, around

    def __call__(self, chunks: list[nn.Module], said: Any, process_group: Any) -> FrameworkMatch | None:
        if not any(isinstance(m, Special) for m in chunks[0].modules()):
            return None
        why = f"{self.name}'s Special is in it"
        make = lambda: compose(chunks[0], make_mesh(said, process_group), name=self.name)  # noqa: E731
        return FrameworkMatch(self.name, why, make, alone=True, around=self.around)


@pytest.fixture
def register() -> Iterator[Any]:
    handles = []

    def one(finder: Any, **kwargs: Any) -> None:
        handles.append(mf.register_adapter(finder, **kwargs))

    yield one
    for handle in handles:
        handle.remove()


def model() -> nn.Module:
    return nn.Sequential(Special(3, 3), nn.ReLU())


def test_a_plain_module_is_told_in_a_few_lines():
    found = mf.detect(nn.Linear(2, 2))
    assert found.framework == "plain"
    lines = str(found).splitlines()
    assert lines[0].startswith("plain: ")
    assert_names(found, "mesh", "megatron-core")
    assert not found.versions, "no framework, no version"


def test_a_list_of_chunks_is_taken_as_flexmodel_takes_it():
    assert mf.detect([nn.Linear(2, 2)]).framework == "plain"
    with raises(FlexError, 2, "Linear"):
        mf.detect([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_a_registered_adapter_is_used_and_can_be_taken_out(register: Any):
    handle = mf.register_adapter(Claiming("special"))
    found = mf.detect(model())
    assert (found.framework, found.why) == ("special", "special's Special is in it")
    assert mf.detect(nn.Linear(2, 2)).framework == "plain"
    assert detect([model()]).name == "special"
    with mf.attach(model(), [mf.HookFunction("0")]) as flex:
        assert flex.session.adapter.name == "special"
    handle.remove()
    handle.remove()
    assert mf.detect(model()).framework == "plain"


def test_two_names_for_two_adapters(register: Any):
    register(Claiming("special"))
    with raises(FlexError, "'special'", __name__):
        register(Claiming("special"))
    with raises(FlexError, "'megatron-core'"):
        register(Claiming("megatron-core"))


def test_two_claims_are_an_error_that_names_both(register: Any):
    register(Claiming("special"))
    register(Claiming("other"))
    for ask in (mf.detect, mf.FlexModel):
        with raises(FlexError, "special", "special's Special", "other", "other's Special", __name__):
            ask(model())


def test_an_adapter_may_come_before_another(register: Any):
    register(Claiming("special"))
    register(Claiming("better", before=("special",)))
    found = mf.detect(model())
    assert found.framework == "better"
    assert_names(dict(found.others)["special"], "better")


def test_what_is_around_a_model_gives_way_to_what_is_in_it(register: Any):
    register(Claiming("engine", around=True))
    assert mf.detect(model()).framework == "engine"
    register(Claiming("special"))
    found = mf.detect(model())
    assert found.framework == "special"
    assert_names(dict(found.others)["engine"], "special")


def test_two_that_come_before_each_other_are_two_claims(register: Any):
    register(Claiming("one"), before=("two",))
    register(Claiming("two"), before=("one",))
    with raises(FlexError, "one", "two", "one's Special", "two's Special"):
        mf.detect(model())


def test_a_refusal_of_an_adapter_is_its_own_words(register: Any):
    def refusing(chunks: list[nn.Module], said: Any, process_group: Any) -> FrameworkMatch | None:
        raise FlexError("switch the sharding of biases off")

    register(refusing)
    with raises(FlexError, "switch the sharding of biases off"):
        mf.FlexModel(model())


@pytest.mark.parametrize("answer", ["raises", "nonsense"])
def test_an_adapter_that_fails_is_told_and_harms_no_others(register: Any, answer: str):
    def broken(chunks: list[nn.Module], said: Any, process_group: Any) -> Any:
        return 1 / 0 if answer == "raises" else "special"

    register(broken)
    with warns(FlexWarning, "'broken'", __name__):
        found = mf.detect(nn.Linear(2, 2))
    assert found.framework == "plain"
    told = "ZeroDivisionError" if answer == "raises" else "FrameworkMatch or None"
    assert any(told in part.why for part in found.others)


# -- entry points


ADAPTER = """
from torch import nn
from megatron_flex.adapters import FrameworkMatch, compose, make_mesh

class Layer(nn.Linear):
    pass

def find(chunks, said, process_group):
    if not any(isinstance(m, Layer) for m in chunks[0].modules()):
        return None
    make = lambda: compose(chunks[0], make_mesh(said), name="thirds")
    return FrameworkMatch("thirds", "a Layer is in it", make)
"""


def test_an_installed_distribution_brings_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(
        distribution.install(tmp_path, "flex_thirds", ADAPTER, "thirds = flex_thirds:find")
    )
    monkeypatch.delitem(sys.modules, "flex_thirds", raising=False)
    assert mf.detect(nn.Linear(2, 2)).framework == "plain"
    layer: Any = sys.modules["flex_thirds"].Layer  # found by looking at a model, not before
    assert mf.detect(layer(2, 2)).framework == "thirds"
    with mf.attach(nn.Sequential(layer(2, 2)), [mf.HookFunction("0")]) as flex:
        flex.session.adapter.root(torch.ones(1, 2))
        assert flex.session.adapter.name == "thirds"
        assert list(flex.output_dict) == ["0:output"]


@pytest.mark.parametrize(
    ("code", "told"), [("import no_such_package", "no_such_package"), ("x = 1", "'find'")]
)
def test_a_broken_entry_point_is_told_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, told: str
):
    monkeypatch.syspath_prepend(
        distribution.install(tmp_path, "flex_broken", code, "broken = flex_broken:find")
    )
    monkeypatch.delitem(sys.modules, "flex_broken", raising=False)
    with warns(FlexWarning, "'broken'", "flex-broken 1.2", told):
        mf.FlexModel(nn.Linear(2, 2)).restore()
    monkeypatch.setattr(flex_config, "adapters_off", "other, broken")
    assert "broken" not in {part.name for part in mf.detect(nn.Linear(2, 2)).others}


def test_importing_looks_for_no_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An adapter is loaded when a model is looked at."""
    import os
    import subprocess

    folder = distribution.install(
        tmp_path, "flex_loud", "raise SystemExit('loaded')", "loud = flex_loud:find"
    )
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": path}
    for code, loaded in (("", False), ("; import torch; megatron_flex.detect(torch.nn.ReLU())", True)):
        done = subprocess.run(
            [sys.executable, "-c", f"import megatron_flex{code}"],
            env=environment,
            capture_output=True,
            timeout=120,
        )
        assert (b"loaded" in done.stderr) is loaded, done.stderr


# -- versions


@pytest.mark.parametrize(
    ("package", "text", "inside"),
    [
        ("megatron", "0.12.3", True),
        ("megatron", "0.14.0", True),
        ("megatron", "0.16.1", True),
        ("megatron", "0.19.2+be23c61", True),
        ("megatron", "0.12.2", False),
        ("megatron", "0.11.0", False),
        ("megatron", "0.20.0rc1", False),
        ("megatron", "core_r0.15", None),
        ("megatron", "", None),
        ("fairscale", "0.4.13", True),
        ("fairscale", "0.4.12", False),
        ("torch", "2.13.0+cu130", True),
        ("torch", "2.3.1", False),
        ("torch", "2.14.1+cu130", True),
        ("torch", "2.15.0", False),
    ],
)
def test_the_tested_range(package: str, text: str, inside: bool | None):
    assert Version(TESTED_RANGES[package], text).inside is inside


@pytest.mark.parametrize(
    ("text", "early"),
    [("0.20.0rc1", True), ("0.20.dev3+x", True), ("0.20.0", False), ("0.20.1rc1", False), ("0.20+x", False)],
)
def test_a_pre_release_behind_the_range_is_no_error(text: str, early: bool):
    version = Version(TESTED_RANGES["megatron"], text)
    assert version.early is early
    assert version.inside is False
    if early:
        with warns(FlexWarning, version.text):
            check_versions((version,))
    else:
        with raises(FlexError, version.text, "FLEX_UNTESTED=1"):
            check_versions((version,))


def test_release_numbers():
    assert parse_release("0.12.0") == parse_release("0.12") == (0, 12)
    assert parse_release("1!2.3.post1") == (2, 3)
    assert parse_release("unknown") == ()


def test_a_version_outside_the_range_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _refused(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))), monkeypatch)
    finally:
        dist.destroy_process_group()


def _refused(sharded: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    (version,) = mf.detect(sharded).versions
    assert version.inside
    assert_names(version, f"torch {torch.__version__}", 2.13, 2.15)
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with raises(FlexError, "torch 2.3.1", 2.13, "FLEX_UNTESTED=1"):
        mf.FlexModel(sharded)
    found = mf.detect(sharded)
    assert not found.versions[0].inside, "it is told, not refused, where it is asked"
    assert_names(found, "torch 2.3.1")
    mf.FlexModel(nn.Linear(2, 2)).restore()  # torch alone is no framework
    mf.FlexModel(nn.DataParallel(nn.Linear(2, 2))).restore()  # nor are wrappers that it promises to keep
    monkeypatch.setattr(flex_config, "untested", True)
    with warns(FlexWarning, "torch 2.3.1"):
        check_versions(found.versions)
