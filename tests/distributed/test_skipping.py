"""`on_error="skip"`: where an edit fails, on whichever rank, all that hold the tensor train on unedited."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.edits import EditTraits
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

GRID = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2)
AGAIN = Case("tp2 sp, all recomputed", tp=2, sp=True, layers=2, recompute=("full",))
MOE = Case("moe tp2 ep2 etp1", tp=2, sp=True, ep=2, etp=1, experts=4, layers=2)
MID = "decoder.layers.1:mid"  # replicated but for sequence parallelism; on ranks 2 and 3 of the grid
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1:output"

Act = Callable[[Tensor, bool], Any]


class Edit:
    """Doubles what passes; in the second microbatch does what it is given, on the ranks it is to fail on."""

    edit_traits = EditTraits(pure=False, uses_context=False)  # not tried at registration

    def __init__(self, act: Act, on: tuple[int, ...]) -> None:
        self.act, self.on, self.microbatch = act, on, 0

    def for_pass(self, key: Any) -> Edit:
        self.microbatch = key.microbatch
        return self

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
        if self.microbatch == 1:
            return self.act(inputs, dist.get_rank() in self.on)
        return inputs * 2


def raising(inputs: Tensor, here: bool) -> Tensor:
    if here:
        raise RuntimeError("only here")
    return inputs * 3


def in_place(inputs: Tensor, here: bool) -> Tensor:
    inputs *= 3
    return raising(inputs, here)


def odd_shape(inputs: Tensor, here: bool) -> Tensor:
    return inputs[..., :-1] if here else inputs * 3


def odd_type(inputs: Tensor, here: bool) -> Any:
    return None if here else inputs * 3


def unedited(inputs: Tensor, here: bool) -> Tensor:
    return inputs


def digest(case: Case, chunks: list[nn.Module], losses: list[float]) -> str:
    """The losses and all gradients of this rank, bit for bit."""
    found = hashlib.sha256(repr(losses).encode())
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                found.update(name.encode() + parameter.grad.numpy().tobytes())
    return found.hexdigest()


def stepped(case: Case, chunks: list[nn.Module], **hook: Any) -> tuple[str, dict[Any, Any], list[str]]:
    """Bits of a step with one hook, what was skipped on this rank, and the warnings."""
    import megatron_flex as mf

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mf.attach(chunks, [mf.HookFunction(save=False, **hook)]) as flex:
            bits = digest(case, chunks, gpt.step(case, chunks, 0))
            skipped = [(s.count, s.first) for s in flex.skipped.values()]
    return bits, skipped, [str(w.message) for w in caught if issubclass(w.category, mf.FlexWarning)]


WAYS = (
    ("forward", "replicated", (3,), (raising, in_place, odd_shape, odd_type)),
    ("forward", "once", (2,), (in_place,)),
    ("forward", "once", (3,), (raising,)),  # which does not run it
    ("full_backward_pre", "replicated", (3,), (in_place,)),
    ("full_backward_pre", "once", (2,), (raising,)),
)


def all_ways(case: Case) -> list[Any]:
    chunks = ranks.start(case)
    out = []
    for kind, run_on, failing_on, acts in WAYS:
        place = MID if kind == "forward" else "decoder.layers.1.mlp.linear_fc1"
        common = {"module_name": place, "hook_type": kind, "run": run_on}
        want = stepped(case, chunks, editing_function=Edit(unedited, ()), **common)[0]
        for act in acts:
            found = stepped(case, chunks, editing_function=Edit(act, failing_on), on_error="skip", **common)
            out.append((want, act.__name__, *found))
    return out


def test_a_pass_that_fails_on_one_rank_is_unedited_on_all_that_hold_the_tensor() -> None:
    ways = [(run_on, on) for _, run_on, on, acts in WAYS for _ in acts]
    answers = run(4, all_ways, GRID)
    for rank, answer in enumerate(answers):
        for (run_on, (on,)), (want, act, bits, skipped, said) in zip(ways, answer, strict=True):
            happens = run_on == "replicated" or on == 2
            assert (bits == want) == happens, (run_on, on, act, rank)
            holds = happens and (rank == 2 or (rank == 3 and run_on == "replicated"))
            assert [n for n, _ in skipped] == [1] * holds, (run_on, on, act, rank)
            assert len(said) == (2 if happens and rank == 0 else 0), said
            if said:
                for word in (f"(on rank {on})", "iteration", "microbatch 1", "flex.skipped"):
                    assert word in said[0], said
                assert_names(said[1], "1")
            if said and act == "raising":
                assert_names(said[0], "RuntimeError: only here")
                assert "test_skipping.py:" in said[0]
    assert answers[2][0][3][0][1]
    assert_names(answers[3][0][3][0][1], "RuntimeError: only here")


# -- recomputation, and what comes too late --------------------------------------------------------------


class Once(Edit):
    """Fails in the first pass, or in its recomputation, alone."""

    def __init__(self, fails_in_replay: bool, microbatch: int = 1) -> None:
        super().__init__(raising, (1,))
        self.fails_in_replay, self.at = fails_in_replay, microbatch

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
        from megatron_flex.adapters import is_recomputing

        if (
            self.microbatch == self.at
            and is_recomputing() == self.fails_in_replay
            and dist.get_rank() in self.on
        ):
            raise RuntimeError("only in one of them")
        return inputs * 2


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no gradient today")
        return grad * 2


def late(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return Late.apply(inputs)


def again(case: Case) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    out: dict[str, Any] = {
        "want": stepped(case, chunks, module_name=MID, editing_function=Edit(unedited, ()))
    }
    common = {"module_name": MID, "on_error": "skip"}
    out["first"] = stepped(case, chunks, editing_function=Once(False), **common)
    flex = mf.attach(chunks, [mf.HookFunction(editing_function=Once(True), save=False, **common)])
    out["replay"] = ranks.step_says(case, chunks, flex)
    flex = mf.attach(chunks, [mf.HookFunction(editing_function=late, save=False, **common)])
    out["backward"] = ranks.step_says(case, chunks, flex)
    out["runs on"] = len(gpt.step(case, chunks, 0))
    return out | beside(case, chunks) | counted(case, chunks)


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run(2, again, AGAIN)


def test_recomputation_does_as_the_first_pass_did_and_what_is_too_late_is_raised(
    answers: list[dict[str, Any]],
) -> None:
    for answer in answers:
        assert answer["first"][0] == answer["want"][0], "the gradient is that of what went on"
        assert [n for n, _ in answer["first"][1]] == [1]
        assert answer["replay"] == answers[0]["replay"]
        assert answer["backward"] == answers[0]["backward"]
        assert answer["runs on"] == AGAIN.microbatches
    for name, error in (("replay", "only in one of them"), ("backward", "no gradient today")):
        assert_names(answers[0][name], error, MID, "iteration 0", "microbatch", "rank 1", "on_error='skip'")


# -- what an edit did beside -----------------------------------------------------------------------------


def beside(case: Case, chunks: list[nn.Module]) -> dict[str, Any]:
    """An edit that saves a value, trains a module and counts in a buffer before it fails on one rank."""
    import megatron_flex as mf

    module = nn.Linear(gpt.HIDDEN, 1, bias=False)
    module.register_buffer("seen", torch.zeros(1))
    flex = mf.FlexModel(chunks)
    flex.register_trainable_module("probe", module)
    seen: list[bool] = []

    def edit(m: Any, x: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.value = x.detach().sum()
        save_ctx.run.last = 1
        modules["probe"].seen += 1
        modules["probe"](x.detach()).square().mean().backward()
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return x * 2

    def reader(m: Any, x: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        seen.append("value" in save_ctx or "last" in save_ctx.run)
        return x

    flex.register_forward_hook(mf.HookFunction(MID, editing_function=edit, save=False, on_error="skip"))
    flex.register_forward_hook(
        mf.HookFunction("decoder.layers.1:output", editing_function=reader, save=False, on_error="skip")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = gpt.step(case, chunks, 0)
        probe = flex.trainable_modules["probe"]
        out = {
            "seen": seen,
            "gradient": probe.weight.grad is not None,
            "buffer": float(probe.seen),
            "run": list(flex.save_ctx),
            "losses": losses,
        }
        flex.restore()
    out["plain"] = gpt.step(case, chunks, 0)
    return out


# -- what it costs, and experts --------------------------------------------------------------------------


def counted(case: Case, chunks: list[nn.Module]) -> dict[str, int]:
    import megatron_flex as mf

    out = {}
    for on_error in ("raise", "skip"):
        hook = mf.HookFunction(
            "decoder.layers.1:output", editing_function=double, save=False, on_error=on_error
        )
        with mf.attach(chunks, [hook]) as flex:
            gpt.step(case, chunks, 0)
            with ranks.counting() as counts:
                gpt.step(case, chunks, 0)
            out[on_error] = sum(counts.values())
            assert flex.skipped == {}
    return out


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def test_what_a_pass_that_is_left_out_did_beside_is_taken_back(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["seen"]
        assert not any(answer["seen"])
        assert not answer["gradient"]
        assert answer["buffer"] == 0.0
        assert answer["run"] == []
        assert answer["losses"] == answer["plain"]


def test_ranks_tell_each_other_by_one_flag_for_each_pass_and_only_if_asked(
    answers: list[dict[str, Any]],
) -> None:
    for answer in answers:
        assert answer["skip"] - answer["raise"] == AGAIN.microbatches, "none in recomputation"


def experts(case: Case) -> tuple[bool, int]:
    """Rows of an expert that one of two tensor parallel ranks has; all of them hold their tokens' whole."""
    chunks = ranks.start(case)
    found = stepped(case, chunks, module_name=EXPERT, editing_function=Edit(in_place, (0,)), on_error="skip")
    want = stepped(case, chunks, module_name=EXPERT, editing_function=Edit(unedited, ()), run="once")
    return found[0] == want[0], found[1][0][0]


def test_rows_of_an_expert() -> None:
    assert run(2, experts, MOE) == [(True, 1)] * 2


def wrong() -> list[str]:
    import megatron_flex as mf

    said = []
    for arguments in ({"on_error": "ignore", "editing_function": double}, {"on_error": "skip"}):
        with pytest.raises(mf.HookError) as error:
            mf.HookFunction(MID, **arguments)
        said.append(str(error.value))
    return said


def test_values_of_on_error() -> None:
    ignore, nothing = wrong()
    assert_names(ignore, "on_error", "ignore")
    assert_names(nothing, "on_error='skip'", "editing_function")
