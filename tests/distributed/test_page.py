"""A page of a live model: made by the leader alone, without a message, with the hooks of all stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.test_docs import ROOT, blocks, execute
from tests.support import gpt, ranks
from tests.support.counting import counting
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run
from tests.unit.test_page import Elements

pytest.importorskip("megatron.core")

TP2PP2 = Case("tp2 sp pp2", tp=2, pp=2, sp=True, layers=4)
TP2DP2 = Case("tp2 dp2", tp=2, dp=2)
FC1 = "decoder.layers.*.mlp.linear_fc1"


def pages(case: Case, folder: str) -> dict[str, Any]:
    """What a rank wrote, said and raised."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    hooks = [
        mf.HookFunction(FC1, groups=("probe",)),
        mf.HookFunction("decoder.layers.3:output", editing_function=mf.edits.scale(0.5), groups=("steer",)),
        mf.HookFunction("decoder.layers.1.mlp.linear_fc2:input", enabled=False),
    ]
    path = Path(folder)
    out: dict[str, Any] = {"rank": dist.get_rank()}
    with mf.attach(chunks, hooks) as flex:
        with counting() as calls:
            before = flex.report.to_html(path / f"before-{dist.get_rank()}.html")
        gpt.step(case, chunks, 0)
        with counting() as more:
            after = flex.report.to_html(path / f"after-{dist.get_rank()}.html", title="after a step")
        out["calls"] = len(calls) + len(more)
        out["written"] = [str(p.name) for p in (before, after) if p is not None]
        out["sites"] = [s.name for s in flex.sites()]
        with raises(mf.SiteError, "decodr.*"):
            flex.report.to_html(path / "never.html", pattern="decodr.*")
        flex.remove_hook(hooks[2])
    return out


def read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(Elements(path.read_text(encoding="utf-8")).scripts[0])
    return told


def states(told: dict[str, Any]) -> dict[str, int]:
    return dict(zip(told["sites"]["name"], told["sites"]["state"], strict=True))


def test_the_leader_alone_writes_a_page_with_the_hooks_of_all_stages(tmp_path: Path) -> None:
    told = run(4, pages, TP2PP2, str(tmp_path))
    assert [one["written"] for one in told] == [["before-0.html", "after-0.html"], [], [], []]
    assert [one["calls"] for one in told] == [0] * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["after-0.html", "before-0.html"]
    before, after = read(tmp_path / "before-0.html"), read(tmp_path / "after-0.html")
    names = after["sites"]["name"]
    assert sorted(names) == sorted(told[0]["sites"])
    ends = [
        "decoder.layers.3:output",
        "decoder.final_layernorm:input",
        "decoder:output",
        "output_layer:output",
    ]
    assert [names.index(n) for n in ends] == sorted(names.index(n) for n in ends), "in the order of execution"
    assert after["mesh"]["experts"] == []
    assert after["mesh"]["axes"] == [
        {"name": "pp", "size": 2, "stride": 2},
        {"name": "dp", "size": 1, "stride": 1},
        {"name": "cp", "size": 1, "stride": 1},
        {"name": "tp", "size": 2, "stride": 1},
    ]
    for layer in range(4):
        name = f"decoder.layers.{layer}.mlp.linear_fc1:output"
        assert (states(before)[name], states(after)[name]) == (1, 2)
    assert states(after)["decoder.layers.1.mlp.linear_fc2:input"] == 0
    assert states(after)["decoder.layers.3:output"] == 2
    assert set(after["groups"]) == {"probe", "steer"}
    stages = dict(zip(after["sites"]["name"], after["sites"]["stage"], strict=True))
    assert stages["decoder.layers.3:output"] == 1


def test_what_hooks_send_is_known_once_something_was_read(tmp_path: Path) -> None:
    run(4, pages, TP2PP2, str(tmp_path))
    before, after = read(tmp_path / "before-0.html"), read(tmp_path / "after-0.html")
    name = before["sites"]["name"].index("decoder.layers.2.mlp.linear_fc1:output")
    why = before["estimates"][before["sites"]["estimate"][name]]["read"]["why"]
    assert_names(why, "s", "b")
    estimate = after["estimates"][after["sites"]["estimate"][name]]
    assert estimate["read"]["whole"] == gpt.SEQUENCE * gpt.BATCH * 2 * gpt.FFN * 4
    assert estimate["edit"]["sent"][0][:3] == ["all_gather", "tp", 2]


def test_one_replica_writes(tmp_path: Path) -> None:
    told = run(4, pages_of_replicas, TP2DP2, str(tmp_path))
    assert told == [True, False, False, False]


def pages_of_replicas(case: Case, folder: str) -> bool:
    import megatron_flex as mf

    with mf.attach(ranks.start(case)) as flex:
        return flex.report.to_html(Path(folder) / f"{dist.get_rank()}.html") is not None


def test_the_page_on_pages_runs(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "view.md")
    answers = run(4, execute, f"folder = {str(tmp_path)!r}\n{code}")
    assert answers == [["page.html True"], [], [], []]
    assert read(tmp_path / "page.html")["title"] == "after a step"
