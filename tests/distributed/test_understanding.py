"""What is known of an editing function before it runs, and what it may do when it does."""

# ruff: noqa: RET503
from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_errors import told
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
PP2 = Case("pp2", pp=2, layers=2)
MID = "decoder.layers.1:mid"
LINES = inspect.getsource(inspect.getmodule(told)).splitlines()


# -- edits in place ------------------------------------------------------------------------------------


def by_method(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.mul_(1.5).add_(0.25)


def by_index(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    inputs[3:5] = 0.5
    inputs[..., 0] *= 2
    return inputs


def by_operator(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    inputs += inputs.mean(0)
    return inputs


def by_out(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    with torch.no_grad():
        torch.mul(inputs, 2.0, out=inputs)
    return inputs


def plain_method(x: Tensor) -> Tensor:
    return x * 1.5 + 0.25


def plain_index(x: Tensor) -> Tensor:
    keep = torch.ones_like(x)
    keep[3:5] = 0
    twice = torch.ones_like(x)
    twice[..., 0] = 2
    return (x * keep + 0.5 * (1 - keep)) * twice


def plain_operator(x: Tensor) -> Tensor:
    return x + x.mean(0)


def plain_out(x: Tensor) -> Tensor:
    return x + x.detach()


PAIRS = [
    (by_method, plain_method),
    (by_index, plain_index),
    (by_operator, plain_operator),
    (by_out, plain_out),
]


def in_place(case: Case, run_on: str) -> list[tuple[Any, ...]]:
    """Losses, gradients and what is read, of edits in place and of the same ones that are not."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    answers = []
    for kind in ("forward", "full_backward_pre"):
        for edit, plain in PAIRS:
            found = []

            def other(m: Any, x: Tensor, c: Any, t: Any, plain: Callable[[Tensor], Tensor] = plain) -> Tensor:
                return plain(x)

            for function in (edit, other):
                hook = mf.HookFunction(MID, editing_function=function, run=run_on, hook_type=kind)
                with mf.attach(chunks, [hook]) as flex:
                    losses = gpt.step(case, chunks, 0)
                    read = list(flex.output_dict.values())[0] if flex.is_leader else []  # noqa: RUF015
                    gradients = [p.grad for p in chunks[0].parameters() if p.grad is not None]
                    found.append((losses, list(read), gradients))
            answers.append(tuple(found))
    return answers


@pytest.mark.parametrize("run_on", ["replicated", "once"])
def test_edits_in_place_are_edits_like_others(run_on: str) -> None:
    for answers in run(2, in_place, TP2, run_on):
        for edited, plain in answers:
            assert edited[0] == pytest.approx(plain[0], rel=1e-6)
            for got, want in zip(edited[1] + edited[2], plain[1] + plain[2], strict=True):
                assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (
                    "saved values are those before the edit"
                )


# -- warnings and trials -------------------------------------------------------------------------------


def may_be_none(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    if inputs.ndim == 3:
        return inputs


def collective(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    torch.distributed.barrier()
    return inputs


def of_another_size(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * torch.ones(16, 1, 1)  # as long as the sequence, which the model does not tell


def far_back(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * inputs[15]


def narrow(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs[..., :-1]


SEEN: list[str] = []


def stores(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    SEEN.append(type(module).__name__)
    return inputs[..., :-1]


def lines(caught: list[Any]) -> list[tuple[str, str]]:
    from megatron_flex import FlexWarning

    mine = [w for w in caught if issubclass(w.category, FlexWarning)]
    return [
        (str(w.message), inspect.getsource(inspect.getmodule(lines)).splitlines()[w.lineno - 1]) for w in mine
    ]


def registered(case: Case) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex, out = mf.FlexModel(chunks), {}
    for edit in (may_be_none, collective, of_another_size, far_back, narrow, stores):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hook = mf.HookFunction("decoder.layers.*:mid", editing_function=edit)
            error = told(lambda hook=hook: flex.register_forward_hook(hook))
        out[edit.__name__] = error, lines(caught), len(flex.session.registry.entries)
        if not error and edit is not stores:
            flex.remove_hook(hook)
    out["dry run"] = told(flex.dry_run)
    out["seen"] = SEEN
    flex.session.close()
    return out


@pytest.mark.versions
def test_what_is_said_at_registration() -> None:
    first, second = run(2, registered, PP2)
    assert first == second, "on all ranks alike, whichever stage the place is on"
    (error, ((text, line),), _) = first["may_be_none"]
    assert not error
    assert text
    assert line.strip() == "if inputs.ndim == 3:"
    (error, ((text, line),), _) = first["collective"]
    assert not error
    assert_names(text, "torch.distributed.barrier()")
    assert line.strip() == "torch.distributed.barrier()"
    (error, ((text, line),), _) = first["of_another_size"]
    assert not error
    assert_names(text, "decoder.layers.0:mid", "torch.float32 (8, 2, 32)", "RuntimeError")
    assert line.strip().startswith("return inputs * torch.ones(16")
    assert first["far_back"][:2] == ("", []), "an index may be right for the lengths of a step"
    error, warned, entries = first["narrow"]
    assert_names(error, "(8, 2, 31)", "(8, 2, 32)")
    assert "narrow (" in error
    assert "test_understanding.py:" in error
    assert (warned, entries) == ([], 0), "the hook is not there"
    assert first["stores"][:2] == ("", []), "what has side effects is not tried"
    assert_names(first["dry run"], "(8, 2, 31)")
    assert first["seen"] == ["TransformerLayer"], "the trial that was asked for has them, with the module"


def known_lengths(case: Case) -> tuple[str, str]:
    import sys
    import types

    import megatron_flex as mf
    from megatron_flex.config import flex_config

    chunks = ranks.start(case)
    state = types.ModuleType("megatron.training.global_vars")
    state._GLOBAL_ARGS = types.SimpleNamespace(seq_length=gpt.SEQUENCE, micro_batch_size=gpt.BATCH)
    changes.setitem(sys.modules, "megatron.training.global_vars", state)

    def wrong(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * torch.ones(17, 1, 1)

    said = told(lambda: mf.attach(chunks, [mf.HookFunction(MID, editing_function=wrong)]))
    heads = "decoder.layers.1.self_attention.core_attention:output"
    for place, edit in ((heads, mf.edits.ablate_heads(0)), (MID, mf.edits.scale(2.0, positions=12))):
        with mf.attach(chunks, [mf.HookFunction(place, editing_function=edit)]):
            pass
    beyond = mf.HookFunction(MID, editing_function=mf.edits.scale(2.0, positions=16))
    assert_names(told(lambda: mf.attach(chunks, [beyond])), "positions", 16)
    flex_config.dry_run = False
    later = told(lambda: mf.attach(chunks, [mf.HookFunction(MID, editing_function=wrong)]))
    return said, later


@pytest.mark.versions
def test_what_would_go_wrong_for_certain_is_an_error() -> None:
    ((said, later),) = run(1, known_lengths, Case("one", layers=2))
    assert_names(said, "torch.float32 (16, 2, 32)", "RuntimeError")
    assert "test_understanding.py:" in said
    assert later == "", "the knob turns it off"


# -- errors of the backward pass -----------------------------------------------------------------------


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, everywhere: bool) -> Tensor:
        ctx.everywhere = everywhere
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.everywhere or torch.distributed.get_rank() == 0:
            raise RuntimeError("no gradient today")
        return grad * 2, None


def backward(case: Case) -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out = []
    for everywhere, run_on in ((True, "replicated"), (False, "replicated"), (True, "once")):

        def edit(m: Any, x: Tensor, c: Any, t: Any, everywhere: bool = everywhere) -> Tensor:
            return Wrong.apply(x, everywhere) + x

        flex = mf.attach(chunks, [mf.HookFunction(MID, editing_function=edit, run=run_on, save=False)])
        out.append(ranks.step_says(case, chunks, flex))
    out.append(str(len(gpt.step(case, chunks, 0))))
    return out


@pytest.mark.versions
def test_an_autograd_function_that_raises_in_its_backward_pass() -> None:
    first, second = run(2, backward, TP2)
    assert first == second
    for said, where in zip(first[:3], ("ranks 0-1", "rank 0", "rank 0"), strict=True):
        assert_names(said, "RuntimeError: no gradient today", MID)
        assert f"(on {where})" in said
        assert "test_understanding.py:" in said
        assert "\n" not in said
    assert first[3] == str(TP2.microbatches), "the model runs on afterwards"
