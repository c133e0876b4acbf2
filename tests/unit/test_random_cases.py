"""Random cases: the same for a seed, possible, of every axis; and smaller ones that still fail."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import edit_table, failing, oracle, random_cases, wish_table
from tests.support.messages import assert_names
from tests.support.random_cases import KINDS, Draw, Hook, drawn, fitted, forbidden, matched
from tests.support.shrinker import shrink, simpler

ROOT = Path(__file__).parents[2]
MANY = 400


@pytest.fixture(scope="module")
def cases() -> list[Draw]:
    return list(itertools.islice(drawn(8, (1, 2, 4, 8)), MANY))


@pytest.fixture(scope="module")
def command() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location(
        "fuzz_layouts", ROOT / "scripts" / "dev" / "fuzz_layouts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


# -- drawing -----------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_cases(cases: list[Draw], command: Any) -> None:
    assert list(itertools.islice(drawn(8, (1, 2, 4, 8)), 20)) == cases[:20]
    assert list(itertools.islice(drawn(9, (1, 2, 4, 8)), 20)) != cases[:20]
    assert command.numbered(8, 13, [1, 2, 4, 8]) == cases[13], "each case by its number alone"
    assert len(set(cases)) > 0.95 * MANY


def test_every_case_is_possible(cases: list[Draw]) -> None:
    for draw in cases:
        assert not forbidden(draw), draw.text()
        have = set(oracle.sites_of(draw.case()))
        for hook in draw.hooks:
            assert hook.kind == "parameter" or set(matched(draw, hook)) <= have


def test_every_axis_is_drawn(cases: list[Draw], command: Any) -> None:
    seen = {name for draw in cases for name in command.features(draw)}
    wanted = {f"model {kind}" for kind in KINDS} | {f"ranks {n}" for n in (1, 2, 4, 8)}
    wanted |= {"tp", "pp", "vpp", "cp", "dp", "ep", "etp", "sp", "first", "padding"}
    wanted |= {"forward_only", "dropout", "bf16", "gathered", "verify", "dump", "statistics"}
    wanted |= {f"recompute {name}" for names in random_cases.RECOMPUTE.values() for name in names}
    wanted |= {f"hook {kind}" for kind in (*random_cases.VALUES, *random_cases.GRADIENTS)}
    wanted |= {f"edit {name}" for name in edit_table.TABLE} | {f"kept {name}" for name in wish_table.TABLE}
    wanted |= {f"failing {kind}" for kind in failing.KINDS} | {f"failing in {m}" for m in failing.MODES}
    wanted |= {"failing", "frozen", "frozen embedding", "frozen model"}
    wanted |= {"edit of a value", "edit of a gradient", "run replicated", "run once"}
    assert not wanted - seen
    for pair in itertools.combinations(("tp", "pp", "cp", "dp"), 2):
        assert any(getattr(d, pair[0]) > 1 and getattr(d, pair[1]) > 1 for d in cases), pair
    assert any(h.quiet for d in cases for h in d.hooks)
    assert any("*" in h.site and len(matched(d, h)) > 1 for d in cases for h in d.hooks)
    letters = {letter for d in cases for letter in d.pattern}
    assert letters == set("M*-GE+")


def test_a_case_is_one_line_that_can_be_read_again(cases: list[Draw]) -> None:
    for draw in cases:
        assert "\n" not in draw.text()
        assert Draw.read(draw.text()) == draw
    assert json.loads(Draw(tp=2).text()) == {"tp": 2}, "what is the default is left out"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sp": True}, "sequence parallelism divides"),
        ({"tp": 4, "heads": 6, "groups": 6}, "heads are divided"),
        ({"pp": 2}, "layers are divided"),
        ({"pp": 2, "vpp": 2, "layers": 4}, "the interleaved schedule"),
        ({"kind": "experts", "experts": 4, "tp": 2}, "want sequence parallelism"),
        ({"kind": "hybrid", "pattern": "*-", "cp": 2}, "the package refuses CP inside Mamba"),
        ({"forward_only": True, "hooks": (Hook("decoder:output", "tensor"),)}, "no backward pass"),
        ({"hooks": (Hook("decoder.layers.7:output"),)}, "no such site"),
        ({"hooks": (Hook("decoder:output", edit="heads"),)}, "no such edit"),
        ({"hooks": (Hook("decoder:output", quiet=True),)}, "the second step"),
        ({"hooks": ()}, "nothing is hooked"),
    ],
)
def test_what_cannot_be_says_why(changes: dict[str, Any], reason: str) -> None:
    plain = Draw(hooks=(Hook("decoder:output"),))
    assert forbidden(plain) == ""
    assert reason in forbidden(replace(plain, **changes))
    with pytest.raises(ValueError, match=reason):
        Draw.read(replace(plain, **changes).text())


# -- shrinking ---------------------------------------------------------------------------------------


def test_simpler_cases_are_possible(cases: list[Draw]) -> None:
    for draw in cases[:20]:
        for candidate in simpler(draw):
            assert candidate != draw
            assert not forbidden(candidate), candidate.text()
            assert fitted(candidate) == candidate


def test_a_planted_reason_is_found(cases: list[Draw]) -> None:
    """Whatever else is drawn, what is left is what the failure needs."""

    def fails(draw: Draw) -> bool:
        probing = any(h.site.endswith("mlp.linear_fc1:output") and not h.edit for h in draw.hooks)
        return draw.tp > 1 and draw.pp > 1 and probing

    large = [d for d in cases if fails(d)]
    assert len(large) >= 3
    for draw in large:
        small = shrink(draw, fails, 300).draw
        ((hook),) = small.hooks
        assert hook.site.endswith("mlp.linear_fc1:output")
        assert (small.tp, small.pp, small.vpp, small.cp, small.dp) == (2, 2, 1, 1, 1)
        assert small.layers == 2 or len(small.pattern) == 2
        assert (small.steps, small.microbatches) == (1, 1)
        assert not any((small.recompute, small.dropout, small.dump, small.statistics, small.verify))


def test_shrinking_ends_with_its_budget(cases: list[Draw]) -> None:
    ran: list[Draw] = []

    def fails(draw: Draw) -> bool:
        ran.append(draw)
        return True

    found = shrink(max(cases, key=lambda d: len(d.hooks)), fails, 5)
    assert found.runs == len(ran) == 5
    assert found.draw == ran[-1]


# -- the command -------------------------------------------------------------------------------------


def test_the_command_tells_what_failed_and_how_to_run_it_again(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.distributed.matrix import Cell
    from tests.support.random_proof import Verdict

    def proved(draw: Draw) -> Verdict:
        return Verdict(draw, [Cell(draw.layout, "decoder:output", "value", 1.0 if draw.tp > 1 else 0.0)])

    monkeypatch.setattr(command, "prove", proved)
    record = tmp_path / "cases.json"
    flags = ["--seed", "1", "--count", "12", "--json", str(record)]
    assert command.main(flags) == 1
    said = capsys.readouterr().out
    assert_names(said, "12 cases", "12 comparisons")
    assert_names(said, "decoder:output", "1.00e+00", "1e-05")
    kept = json.loads(record.read_text())["cases"]
    small = [Draw.read(c["smallest"]) for c in kept if not c["good"]]
    assert small
    assert all((d.tp, d.world) == (2, 2) for d in small)
    assert all(f"scripts/dev/fuzz_layouts --case '{d.text()}'" in said for d in small)
    assert command.main(["--case", small[0].text(), "--shrink", "0"]) == 1
    assert command.main(["--case", replace(small[0], tp=1, sp=False).text()]) == 0
    capsys.readouterr()
    assert command.main([*flags, "--stop-at-first", "--shrink", "0"]) == 1
    done = json.loads(record.read_text())["cases"]
    assert [c["good"] for c in done] == [True] * (len(done) - 1) + [False]
