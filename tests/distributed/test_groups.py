"""Groups of hooks: which are active in a scope, and that the others leave no trace in the model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
FC1, FC2, MID = (f"decoder.layers.{n}" for n in ("0.mlp.linear_fc1", "1.mlp.linear_fc2", "1:mid"))
PLACES = {"one": FC1, "two": FC2, "three": MID}


def halved(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5


def hooks() -> dict[str, Any]:
    import megatron_flex as mf

    return {
        "one": mf.HookFunction(FC1, groups=("probe", "mlp")),
        "two": mf.HookFunction(FC2, groups=("mlp",)),
        "three": mf.HookFunction(MID),
    }


def read(flex: Any, case: Case, chunks: list[Any]) -> set[str]:
    """Which of the hooks saw something in a step."""
    flex.output_dict.clear()
    gpt.step(case, chunks, 0)
    return {name for name, place in PLACES.items() if place in flex.output_dict}


def choices(case: Case) -> list[set[str]]:
    """What is read in one scope after the other."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    mine = hooks()
    with mf.attach(chunks, list(mine.values())) as flex:
        out = [read(flex, case, chunks)]
        for groups, complement in (
            (("probe",), False),
            (("probe", "mlp"), False),
            (("mlp", "-probe"), False),
            (("-mlp",), False),
            (("all",), False),
            (("probe",), True),
            (("all",), True),
        ):
            with flex.hooks(*groups, complement=complement):
                out.append(read(flex, case, chunks))
        with flex.hooks("probe"):
            with flex.hooks("-probe"):
                out.append(read(flex, case, chunks))
            out.append(read(flex, case, chunks))
        flex.add_to_groups(mine["three"], "probe", "stream")
        flex.remove_from_groups(mine["one"], "probe")
        with flex.hooks("probe"):
            out.append(read(flex, case, chunks))
        out.append({name for name in flex.groups if name in ("probe", "mlp", "stream")})
        flex.remove_from_groups(mine["three"], "probe", "stream")
        out.append(set(flex.groups))
        out.append(read(flex, case, chunks))
    return out


def test_groups_are_sets() -> None:
    every = {"one", "two", "three"}
    first, second = run(2, choices, TP2)
    assert first == [
        every,
        {"one"},
        {"one", "two"},
        {"two"},
        {"three"},
        every,
        {"two", "three"},
        set(),
        {"two", "three"},
        {"one"},
        {"three"},
        {"probe", "mlp", "stream"},
        {"mlp"},
        every,
    ]
    assert all(not found for found in second[:11]), "what is read arrives on the leader"


def traces(case: Case) -> tuple[bool, bool, float, float]:
    """Whether hooks that are not active leave a trace in the model, and do anything."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    plain = gpt.step(case, chunks, 0)[0]
    with mf.attach(chunks):
        gpt.step(case, chunks, 0)
        bare = ranks.fingerprint(chunks)
    editing = mf.HookFunction(FC1, editing_function=halved, save=False, groups=("steer",))
    with mf.attach(chunks, [editing]) as flex:
        with flex.hooks("-steer"):
            idle = gpt.step(case, chunks, 0)[0]
            names = [n for n, v in ranks.fingerprint(chunks).items() if bare.get(n) != v and "/decoder" in n]
            untouched = not names
        edited = gpt.step(case, chunks, 0)[0]
        touched = any(bare.get(n) != v for n, v in ranks.fingerprint(chunks).items() if "/decoder" in n)
    return untouched, touched, idle - plain, edited - plain


def test_hooks_that_are_not_active_are_not_there() -> None:
    for untouched, touched, idle, edited in run(2, traces, TP2):
        assert untouched
        assert touched, "the fingerprint sees hooks that are there"
        assert idle == 0.0
        assert edited != 0.0


def later(case: Case, scoped: bool) -> dict[str, Tensor]:
    """Parameter gradients of an edited call whose backward pass, with its replay, runs behind the scope."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.randomize(chunks[0])
    editing = mf.HookFunction(FC1, editing_function=halved, save=False, groups=("steer",))
    other = mf.HookFunction(FC2, editing_function=halved, save=False, groups=("other",))
    with mf.attach(chunks, [editing, other] if scoped else [editing]) as flex:
        if scoped:
            gpt.step(case, chunks, 0)
            for parameter in chunks[0].parameters():
                parameter.grad = None
            with flex.hooks("steer"):
                loss = ranks.call(chunks).sum()
        else:
            loss = ranks.call(chunks).sum()
        loss.backward()
    return {n: p.grad for n, p in chunks[0].named_parameters()}


def test_a_scope_counts_for_the_backward_pass_behind_it() -> None:
    case = Case("all recomputed", layers=2, recompute=("full",))
    (scoped,), (alone,) = run(1, later, case, True), run(1, later, case, False)
    assert scoped.keys() == alone.keys()
    assert all(torch.equal(scoped[n], alone[n]) for n in alone)


def refused(case: Case) -> dict[str, str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    mine = hooks()
    out = {}

    def told(name: str, do: Any) -> None:
        try:
            do()
        except mf.FlexError as error:
            out[name] = str(error)

    with mf.attach(chunks, list(mine.values())) as flex:

        def scope(*groups: str) -> None:
            with flex.hooks(*groups):
                pass

        told("unknown", lambda: scope("prob"))
        told("unknown without", lambda: scope("-steer"))
        told("not there", lambda: flex.remove_from_groups(mine["two"], "probe"))
        told("all", lambda: flex.remove_from_groups(mine["two"], "all"))
        told("group all", lambda: mf.HookFunction(FC1, groups=("all",)))
        told("group minus", lambda: mf.HookFunction(FC1, groups=("-mlp",)))
        told("regex", lambda: flex.register_forward_hook(mf.HookFunction(re.compile(r"decoder\.mlp"))))
        told("function", lambda: flex.register_forward_hook(mf.HookFunction(lambda site: False)))
        gpt.step(case, chunks, 0)
    return out


def test_what_is_refused() -> None:
    for said in run(2, refused, TP2):
        assert_names(said["unknown"], "prob", "probe")
        assert_names(said["unknown without"], "steer")
        assert_names(said["not there"], "probe", "['mlp']")
        assert_names(said["all"], "all")
        assert_names(said["group all"], "all")
        assert_names(said["group minus"], "-")
        assert_names(said["regex"], "flex.sites()")
        assert_names(said["function"], "flex.sites()")


def apart(case: Case) -> str:
    """One rank chooses other hooks than the other."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.attach(chunks, list(hooks().values()))
    gpt.step(case, chunks, 0)
    try:
        with flex.hooks("probe" if torch.distributed.get_rank() else "mlp"):
            gpt.step(case, chunks, 0)
    except mf.HookError as error:
        return str(error)
    finally:
        flex.session.close()
    return ""


def test_ranks_that_choose_differently_all_raise() -> None:
    for said in run(2, apart, TP2):
        assert_names(said, "rank 0", FC2, "rank 1", FC1)


def patterns(case: Case) -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    places = [
        re.compile(r"decoder\.layers\.\d+\.mlp\.linear_fc[12]"),
        re.compile(r".*:mid"),
        lambda site: site.point == "probs" and ".1." in site.module,
    ]
    with mf.attach(chunks, [mf.HookFunction(p) for p in places]) as flex:
        gpt.step(case, chunks, 0)
        return sorted(flex.output_dict)


def test_regular_expressions_and_functions_name_places() -> None:
    layers = [f"decoder.layers.{n}" for n in range(2)]
    wanted = [f"{layer}.mlp.linear_fc{n}:output" for layer in layers for n in (1, 2)]
    wanted += [f"{layer}:mid" for layer in layers]
    wanted += ["decoder.layers.1.self_attention.core_attention:probs"]
    assert run(2, patterns, TP2) == [sorted(wanted), []]
