"""The callback for Megatron-Bridge: fired by Bridge's manager, where it is installed, and by its contract."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

TP2 = Case("tp2", tp=2, layers=2)
FC1 = "decoder.layers.0.mlp.linear_fc1"
EVENTS = [
    f"on_{what}_{when}"
    for what in ("train", "train_step", "eval", "eval_step", "test", "test_step")
    for when in ("start", "end")
]


def bridges_own() -> Path | None:
    """Bridge's module of callbacks, which is light; the package that it is in is not."""
    found = (Path(p) / "megatron/bridge/training/callbacks.py" for p in sys.path)
    return next((p for p in found if p.is_file()), None)


class Base:
    def on_train_start(self, context: Any) -> None: ...


class Contract:
    """What Bridge says of its manager: methods of an object that are not Callback's own, in order."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {event: [] for event in EVENTS}

    def add(self, callbacks: list[Any]) -> None:
        for callback in callbacks:
            for event in EVENTS:
                method = getattr(callback, event, None)
                if method is not None and method.__func__ is not getattr(Base, event, None):
                    self.found[event].append(method)

    def fire(self, event: str, context: Any) -> None:
        for function in self.found[event]:
            function(context)


def manager(real: bool) -> tuple[Any, Any]:
    """An empty manager, and what makes a context."""
    if not real:
        return Contract(), SimpleNamespace
    path = bridges_own()
    assert path is not None
    spec = importlib.util.spec_from_file_location("bridges_callbacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bridges_callbacks"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module.normalize_callbacks([]), module.CallbackContext


def train(fire: Any, chunks: list[nn.Module], state: Any, until: int) -> list[float]:
    """A loop as Bridge's: the schedule is fetched first, an evaluation comes after the second step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = get_forward_backward_func()

    def step(forward_only: bool) -> float:
        found = schedule(
            forward_step_func=gpt.forward_step,
            data_iterator=iter(gpt.data(2)),
            model=chunks,
            num_microbatches=2,
            seq_length=gpt.SEQUENCE,
            micro_batch_size=gpt.BATCH,
            forward_only=forward_only,
        )
        return sum(float(item["loss"]) for item in found)

    losses = []
    fire("on_train_start")
    while state.train_state.step < until:
        fire("on_train_step_start")
        losses.append(step(False))
        fire("on_train_step_end")
        state.train_state.step += 1
        if state.train_state.step == until - 1:
            fire("on_eval_start")
            losses.append(step(True))
            fire("on_eval_end")
    fire("on_train_end")
    return losses


def bridged(case: Case, real: bool, folder: Path) -> dict[str, Any]:
    import megatron_flex as mf
    from megatron_flex.launch.launch_settings import DumpSettings, EditSettings, Settings
    from megatron_flex.launch.megatron_bridge import FlexCallback

    chunks = ranks.start(case)
    state = SimpleNamespace(train_state=SimpleNamespace(step=0))
    quiet = train(lambda event: None, chunks, state, 1)[0]
    with mf.attach(chunks, [mf.HookFunction(FC1, editing_function=mf.edits.parse("scale=0.5"), save=False)]):
        edited = sum(gpt.step(case, chunks, 0))

    before = ranks.fingerprint(chunks)
    callbacks, context = manager(real)
    settings = Settings(
        sites=("decoder.layers.*:mid",),
        edits=(EditSettings(edit="scale=0.5", site=FC1),),
        dumps=(DumpSettings(path=str(folder / "dump")),),
    )
    flex = FlexCallback(settings)
    callbacks.add([flex])
    state.train_state.step = 7  # as after a restart from a checkpoint

    def fire(event: str) -> None:
        callbacks.fire(event, context(state=state, model=chunks, user_state={}))

    losses = train(fire, chunks, state, 10)
    said = ""
    try:
        fire("on_train_start")
    except mf.FlexError as error:
        said = str(error)
    restored = {n for n, value in ranks.fingerprint(chunks).items() if before.get(n) != value}
    after = train(lambda event: None, chunks, state, 11)[0]
    return {
        "edited": [loss == edited for loss in losses],
        "quiet": (quiet != edited, after == quiet),
        "restored": restored,
        "said": said,
    }


@pytest.mark.parametrize("real", [False, True], ids=["contract", "bridge"])
def test_a_training_by_bridges_events(real: bool, tmp_path: Path) -> None:
    import megatron_flex as mf

    if real and bridges_own() is None:
        pytest.skip("megatron-bridge is not installed")
    for answer in run(2, bridged, TP2, real, tmp_path):
        assert answer["edited"] == [True] * 4, "in the evaluation too"
        assert answer["quiet"] == (True, True)
        assert answer["restored"] == set()
        assert_names(answer["said"], "FlexCallback", "pretrain()")
    assert list(mf.open_dump(tmp_path / "dump").iterations) == [7, 8, 9]


def test_settings_that_bridge_has_no_use_for() -> None:
    import megatron_flex as mf
    from megatron_flex.launch.launch_settings import Settings
    from megatron_flex.launch.megatron_bridge import FlexCallback

    with raises(mf.FlexError, "Megatron-Bridge", "megatron-flex estimate"):
        FlexCallback(Settings(estimate=True))
