"""What a live model shows of itself: on the leader, with the hooks of all stages, and nothing is sent."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from typing import Any

import pytest

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.markup import Shown
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

WIDTH = 110
TP2PP2 = Case("tp2 sp pp2", tp=2, pp=2, sp=True, layers=4)
MESH = "pp=2 x tp=2"


def shows(case: Case) -> tuple[str, str, list[str], list[str], str]:
    """The whole tree, what a group shows, the sites, errors of what cannot be shown, the tree at a width."""
    import megatron_flex as mf

    os.environ.pop("COLUMNS", None)  # lines as long as they like
    chunks = ranks.start(case)
    hooks = [
        mf.HookFunction("decoder.layers.*.mlp.linear_fc1", groups=("probe",)),
        mf.HookFunction("decoder.layers.3:output", editing_function=mf.edits.scale(0.5), groups=("steer",)),
        mf.HookFunction("decoder.layers.1.mlp.linear_fc2:input", hook_type="tensor", enabled=False),
    ]
    with mf.attach(chunks, hooks) as flex:
        everything, group = io.StringIO(), io.StringIO()
        flex.report.show(file=everything)
        flex.report.show(group="steer", file=group)
        errors = []
        for wrong in ({"group": "stear"}, {"stage": 5}, {"pattern": "decodr.*"}):
            with pytest.raises(mf.SiteError) as error:
                flex.report.show(**wrong)  # type: ignore[arg-type]
            errors.append(str(error.value))
        narrow = io.StringIO()
        os.environ["COLUMNS"] = str(WIDTH)
        flex.report.show(file=narrow)
        names = [s.name for s in flex.sites()]
        gpt.step(case, chunks, 0)
        flex.select("none")
        gpt.step(case, chunks, 0)
        off: Any = io.StringIO()
        flex.report.show(group="probe", file=off)
        assert_names(off.getvalue(), "[probe]")
        flex.select()
        flex.remove_hook(hooks[2])
    return everything.getvalue(), group.getvalue(), names, errors, narrow.getvalue()


def test_a_model_shows_the_hooks_of_all_stages_on_every_rank_that_asks() -> None:
    told = run(4, shows, TP2PP2)
    assert len({everything for everything, *_ in told}) == 1
    everything, group, names, errors, narrow = told[0]
    assert max(map(len, narrow.splitlines())) <= WIDTH
    assert_names(everything.splitlines()[0], MESH, len(names), 0, 3)
    assert "decoder" in everything
    assert "0-3 x 4" in everything
    (fc1,) = [line for line in everything.splitlines() if "[probe]" in line]
    assert "● :output" in fc1
    assert_names(fc1, "gate|up/tp", "2")
    assert " at " not in fc1
    (steer,) = [line for line in everything.splitlines() if "[steer]" in line]
    assert_names(steer, "scale(0.5)", 3)
    lines = everything.splitlines()
    fc2 = next(n for n, line in enumerate(lines) if line.endswith("linear_fc2"))
    assert_names(lines[fc2 + 1], "input", 1)
    assert "linear_fc1" not in group
    assert "scale(0.5)" in group
    assert_names(errors[0], "stear", "steer")
    assert_names(errors[1], 5)
    assert_names(errors[2], "decodr.*")


def test_only_the_leader_prints() -> None:
    assert [told.count(MESH) for told in run(4, prints, TP2PP2)] == [1, 0, 0, 0]


def prints(case: Case) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex, redirect_stdout(io.StringIO()) as out:
        flex.report.show("decoder.layers.*")
    return out.getvalue()


def test_a_notebook_has_the_tree_on_the_leader_and_elsewhere_where_it_is() -> None:
    leader, *others = run(4, in_notebook, TP2PP2)
    told = Shown(leader)
    assert told.pieces[0] == "FlexModel"
    assert told.pieces[1].startswith(f"{MESH}: ")
    assert any("0-3 x 4" in s for s in told.summaries)
    assert_names(told.text, "[<b>probe</b>]")
    assert_names(told.text, "gate|up/tp", "2")
    for number, html in enumerate(others, 1):
        told = Shown(html)
        assert f"pp {number // 2}" in told.text
        assert "receiving rank" in told.text
        assert "flex.report.show(file=sys.stdout)" in told.text
        assert not told.summaries


def in_notebook(case: Case) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    hook = mf.HookFunction("decoder.layers.*.mlp.linear_fc1", groups=("<b>probe</b>",))
    with mf.attach(chunks, [hook]) as flex:
        html = flex._repr_html_()
        gpt.step(case, chunks, 0)
    return html
