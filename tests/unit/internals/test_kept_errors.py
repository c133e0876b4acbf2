"""Whatever our code raises in a forward or backward pass is kept, and raised on all ranks at the step's end.

One process: each function of ours that a step calls inside a pass is made to raise, one at a time, so that a
new way to fail cannot be forgotten. Several ranks: one kind after the other fails on some of them only.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

OURS = str(Path(megatron_flex.__file__).parent)
ONE = Case("one", layers=1, microbatches=1)
GRID = Case("tp2 pp2", tp=2, pp=2, layers=2)
LAYER = "decoder.layers.1.mlp.linear_fc1"  # on the last stage of two
FIRST = "decoder.layers.0.mlp.linear_fc1"
# Where the framework's passes enter our code, and what keeps errors there: made to raise they keep nothing.
ENTRIES = {"SiteDispatch.__call__", "GradientDispatcher.dispatch_parameter", "weak_hook.<locals>.call"}
KEEPS = {
    *(
        "SiteDispatch.__call__",
        "GradientDispatcher.attach",
        "GradientDispatcher._run_guarded",
        "GradientDispatcher.dispatch_parameter",
        "weak_hook.<locals>.call",
    ),
    *(
        "EditEnvironment.record_errors_of",
        "EditEnvironment.record_internal_error",
        "EditEnvironment.guard",
        "EditEnvironment.failed",
        "EditEnvironment.describe_failure",
        "EditEnvironment.record_error",
    ),
    *("PassBuilder._report_backward", "Session._await_backward"),
    # It raises in a backward pass of an editing function's own, which keeps it.
    "TrainableModules._contained",
}
MEETS = {"enter", "exit", "_choose_exchange"}  # other ranks are in the collective: raised at once
INSIDE = {"FullTensor.enter", "FullTensor.exit"}  # what these call


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.seen = inputs.detach().mean()
    return inputs * 2


def shifted(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


def hooks() -> list[Any]:
    """Every way through our code: reads, selections, edits of each kind, gradients, a parameter."""
    import megatron_flex as mf

    at = "decoder.layers.0"
    return [
        mf.HookFunction(f"{at}:input"),
        mf.HookFunction(f"{at}.mlp", expected_shape=(None, None, gpt.HIDDEN)),
        mf.HookFunction(f"{at}.mlp.linear_fc1", select=mf.Select(positions=[-1], neurons=3), keep_as="one"),
        mf.HookFunction(f"{at}:mid", reduce=mf.reduce.mean("s")),
        mf.HookFunction(f"{at}.self_attention", editing_function=doubled),
        mf.HookFunction(f"{at}.self_attention.linear_proj", editing_function=mf.edits.scale(2.0)),
        mf.HookFunction(f"{at}.input_layernorm", editing_function=doubled, run="once"),
        mf.HookFunction(f"{at}:output", editing_function=shifted),
        mf.HookFunction(f"{at}.mlp.linear_fc2", hook_type="tensor"),
        mf.HookFunction(f"{at}.self_attention.linear_qkv", hook_type="tensor", editing_function=doubled),
        mf.HookFunction(f"{at}.mlp.linear_fc1.weight", hook_type="tensor"),
    ]


def watched(see: Callable[[FrameType, set[str]], None]) -> Callable[[FrameType, str, Any], None]:
    """A profile function that hands on each call of ours inside a pass, with the names of its callers."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        above, one = set(), frame.f_back
        while one is not None:
            above.add(one.f_code.co_qualname)
            one = one.f_back
        if above & ENTRIES:
            see(frame, above)

    return profile


class Injected(RuntimeError):
    pass


def planned_hooks() -> list[Any]:
    """What later passes of sites execute: reads, selections, edits, gradients."""
    import megatron_flex as mf

    at = "decoder.layers.0"
    return [
        mf.HookFunction(f"{at}.mlp"),
        mf.HookFunction(f"{at}.mlp.linear_fc1", select=mf.Select(positions=[-1]), keep_as="one"),
        mf.HookFunction(f"{at}.self_attention", editing_function=shrunk),
        mf.HookFunction(f"{at}.self_attention.linear_proj", editing_function=mf.edits.scale(2.0)),
        mf.HookFunction(f"{at}.mlp.linear_fc2", hook_type="tensor"),
    ]


def shrunk(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5


def broken_step(
    chunks: list[Any], target: CodeType | None, kind: type[Exception], planned: bool = False
) -> tuple[Any, bool, set]:
    """A step in which a function raises at its first call; the error, whether all passes ran, all targets.

    With `planned` a step before it has made the plans of its sites.
    """
    import megatron_flex as mf

    found: set[tuple[CodeType, bool]] = set()
    done = []

    def see(frame: FrameType, above: set[str]) -> None:
        if target is None:
            found.add((frame.f_code, bool(above & MEETS) or frame.f_code.co_qualname in MEETS))
        elif frame.f_code is target:
            sys.setprofile(None)
            raise kind("on purpose")

    with mf.FlexModel(chunks) as flex:
        torch.manual_seed(0)
        if not planned:
            flex.register_trainable_module("probe", nn.Linear(gpt.HIDDEN, gpt.HIDDEN))
        for hook in planned_hooks() if planned else hooks():
            flex.session.hooks.add(hook)
        if planned:
            gpt.step(ONE, chunks, 0)
        handle = chunks[0].embedding.word_embeddings.weight.register_hook(lambda g: done.append(1))
        try:
            sys.setprofile(watched(see))
            gpt.step(ONE, chunks, 0)
        except Exception as error:
            return error, bool(done), found
        finally:
            sys.setprofile(None)
            handle.remove()
            flex.session.close()
    return None, bool(done), found


def injected(planned: bool) -> dict[str, list[str]]:
    from megatron_flex.config import flex_config
    from megatron_flex.errors import BrokenError, HookError, LayoutError

    flex_config.dry_run = False
    chunks = ranks.start(ONE)
    inside = set() if planned else INSIDE  # on one rank a planned edit gathers nothing
    broken_step(chunks, None, Injected, planned)  # what is found out once is
    error, done, targets = broken_step(chunks, None, Injected, planned)
    assert error is None
    assert done
    out: dict[str, list[str]] = {"tried": [], "left": [], "silent": [], "unnamed": [], "at once": []}
    codes = {code for code, _ in targets}
    assert {code.co_qualname for code in codes} >= inside, "these have other names now"
    for code in sorted(codes, key=lambda c: (c.co_filename, c.co_firstlineno)):
        name, meets = code.co_qualname, (code, True) in targets
        if name in KEEPS:
            continue
        kinds = [LayoutError, Injected] if name in inside else [LayoutError] if meets else [Injected]
        for kind in kinds:
            error, done, _ = broken_step(chunks, code, kind, planned)
            words = f"{name} in {code.co_filename.removeprefix(OURS)}, {kind.__name__}: {error!r:.200}"
            out["tried"].append(name)
            if isinstance(error, BrokenError) and kind is Injected and meets:
                out["at once"].append(words)
            elif error is None:
                out["silent"].append(words)
            elif type(error) is not HookError or not done:
                out["left"].append(words)
            elif "decoder.layers.0" not in str(error):
                out["unnamed"].append(words)
    assert gpt.step(ONE, chunks, 0)
    return out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="names functions by co_qualname")
@pytest.mark.parametrize(
    ("planned", "functions"), [(False, 60), (True, 25)], ids=["first pass", "later pass"]
)
def test_every_function_in_a_pass_may_raise(planned: bool, functions: int) -> None:
    (found,) = run(1, injected, planned, timeout=280)
    assert len(set(found["tried"])) > functions
    assert len(found["at once"]) == (0 if planned else len(INSIDE))
    assert not found["left"], "\n".join(found["left"])
    assert not found["unnamed"], "\n".join(found["unnamed"])
    assert not found["silent"], "\n".join(found["silent"])


# -- on some of many ranks -----------------------------------------------------------------------------


def raising(*_: Any, **__: Any) -> Any:
    raise Injected("on purpose")


def on_three(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    if torch.distributed.get_rank() == 3:
        raise Injected("on purpose")
    return inputs * 2


def reads_missing(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * save_ctx.missing


def through_a_module(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Injected("on purpose")


def fails_backward(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return Backward.apply(inputs) if torch.distributed.get_rank() == 3 else inputs * 1


def in_a_replay(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    from megatron_flex.adapters import is_recomputing

    return on_three(module, inputs, save_ctx, modules) if is_recomputing() else inputs * 2


def kinds() -> dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]]:
    """By name: hooks, what is made to raise on which ranks, and a word of the error."""
    from megatron_flex.layout import Dim, Layout
    from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher
    from megatron_flex.runtime.recorder import Recorder
    from megatron_flex.runtime.site_pass import Pass

    here, back, flat = (
        {"module_name": LAYER},
        {"module_name": LAYER, "hook_type": "tensor"},
        Layout((Dim("s"),)),
    )
    patched = {"ranks": [3]}
    return {
        "a rule of a stage": ([here], {"layout": flat, "ranks": [2, 3]}, "has 3 dims"),
        "a rule of a stage, where a shape is expected": (
            [{**here, "expected_shape": (None, None, None)}],
            {"layout": flat, "ranks": [2, 3]},
            "has 3 dims",
        ),
        "a rule of one rank": ([here], {"layout": flat, **patched}, "has 3 dims"),
        "a rule where a stage edits": (
            [{**here, "editing_function": on_three}],
            {"layout": flat, "ranks": [2, 3]},
            "has 3 dims",
        ),
        "a rule backward": ([back], {"layout": flat, **patched}, "has 3 dims"),
        "recording": ([here], {"owner": Recorder, "name": "shard", **patched}, "on purpose"),
        "a gradient": ([back], {"owner": GradientDispatcher, "name": "run_hooks", **patched}, "on purpose"),
        "a pass": ([here], {"owner": Pass, "name": "__call__", **patched}, "on purpose"),
        "an edit": ([{**here, "editing_function": on_three}], {}, "on purpose"),
        "an edit of the leader": (
            [{**here, "module_name": f"{LAYER}:input", "editing_function": reads_missing, "run": "once"}],
            {},
            "missing",
        ),
        "a value that is not there": ([{**here, "editing_function": reads_missing}], {}, "missing"),
        "an edited gradient": ([{**back, "editing_function": on_three}], {}, "on purpose"),
        "a backward pass": ([{**here, "editing_function": fails_backward}], {}, "on purpose"),
        "a trainable module": (
            [{**here, "editing_function": through_a_module}],
            {"module": True},
            "on purpose",
        ),
        "a replay": ([{**here, "editing_function": in_a_replay}], {"recompute": True}, "on purpose"),
    }


class Fails(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return raising() if torch.distributed.get_rank() == 3 else inputs * 0


def failing(case: Case, name: str) -> dict[str, Any]:
    import megatron_flex as mf
    from megatron_flex.config import flex_config

    flex_config.dry_run = False
    hooks, broken, _ = kinds()[name]
    chunks = ranks.start(case)
    gpt.step(case, chunks, 0)
    before, here = ranks.fingerprint(chunks), torch.distributed.get_rank() in broken.get("ranks", ())
    flex = mf.FlexModel(chunks)
    if broken.get("module"):
        flex.register_trainable_module("probe", Fails(2, 2))
    if here and "layout" in broken:
        own = flex.session.taps.local_sites
        own[f"{LAYER}:output"] = replace(own[f"{LAYER}:output"], layout=broken["layout"])
    if here and "owner" in broken:
        changes.setattr(broken["owner"], broken["name"], raising)
    for hook in hooks:
        flex.session.hooks.add(mf.HookFunction(**hook))
    start = time.monotonic()
    try:
        gpt.step(case, chunks, 0)
        text = ""
    except mf.HookError as error:
        text = str(error)
    seconds = time.monotonic() - start
    changes.undo()
    flex.session.close()
    with mf.attach(chunks, [mf.HookFunction(LAYER)]) as flex:
        gpt.step(case, chunks, 0)
        read = len(flex.output_dict[f"{LAYER}:output"]) if flex.is_leader else case.microbatches
    return {"text": text, "seconds": seconds, "read": read, "same": before == ranks.fingerprint(chunks)}


@pytest.mark.parametrize("name", kinds())
def test_one_kind_on_some_ranks(name: str) -> None:
    case = GRID if name != "a replay" else replace(GRID, name="tp2 pp2 recomputed", recompute=("full",))
    answers = run(4, failing, case, name, timeout=60)
    _, _, word = kinds()[name]
    text = answers[0]["text"]
    assert all(a["text"] == text for a in answers)
    assert LAYER in text
    assert word in text
    at = ("a rule of a stage", "a rule where a stage edits", "a value that is not there")
    at_rank = (
        "ranks 2-3" if name.startswith(at) else "rank 2" if name == "an edit of the leader" else "rank 3"
    )
    assert f"(on {at_rank})" in text
    assert all(a["seconds"] < 20 and a["read"] == case.microbatches and a["same"] for a in answers)


# -- in steps of sinks alone, at whose ends the ranks exchange no failure ------------------------------------


def recorded(case: Case, folder: str, broken: str) -> dict[str, Any]:
    """Three steps with a sink, of which the second fails on one rank in a backward or forward pass."""
    import megatron_flex as mf
    from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
    from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher

    owner, name = {
        "a gradient": (GradientDispatcher, "_dispatch_activation"),
        "a tensor": (CaptureDispatcher, "feed_sinks"),
    }[broken]
    chunks, errors = ranks.start(case), {}
    sites = ["decoder.layers.*.mlp"]
    dump = mf.Dump(f"{folder}/dump", sites, gradients=True)
    statistics = mf.Statistics(f"{folder}/statistics", sites, gradients=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flex = mf.attach(chunks, dumps=dump, statistics=statistics)
        for number in range(4):
            if number == 1 and torch.distributed.get_rank() == 1:
                changes.setattr(owner, name, raising)
            try:
                gpt.step(case, chunks, 0)
            except mf.HookError as error:
                errors[number] = str(error)
            changes.undo()
        flex.restore()
    return {"errors": errors, "warnings": [str(w.message) for w in caught if w.category is mf.FlexWarning]}


@pytest.mark.parametrize("broken", ["a gradient", "a tensor"])
def test_a_sink_reports_what_it_could_not_record(broken: str, tmp_path: Path) -> None:
    import megatron_flex as mf

    first, second = run(2, recorded, Case("tp2", tp=2, layers=1), str(tmp_path), broken, timeout=60)
    assert first["errors"] == second["errors"]
    ((number, text),) = first["errors"].items()
    assert number == 2, "the sums of a step are known at the end of the next one"
    site = "decoder.layers.0.mlp:output"
    assert_names(text, site, "iteration 1", "on purpose", "rank 1")
    assert any(_names(text, site, "iteration 1", "on purpose") for text in second["warnings"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.FlexWarning)
        with mf.open_dump(tmp_path / "dump") as dump:
            assert dump.iterations == [0, 2, 3]


def _names(text: str, *values: str) -> bool:
    return all(value in text for value in values)
