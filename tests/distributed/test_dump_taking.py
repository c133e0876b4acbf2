"""When a dump takes what: steps, calls, evaluation, failures; by whom; and that nothing is communicated."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import dumped, gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

FC1, OUT, LOSS = "decoder.layers.1.mlp.linear_fc1:output", "decoder.layers.1:output", "loss:output"
TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
PP2 = Case("tp2 pp2", tp=2, pp=2, layers=2)


def told(record: list[warnings.WarningMessage]) -> list[str]:
    import megatron_flex as mf

    return [str(w.message) for w in record if issubclass(w.category, mf.FlexWarning)]


def refused(do: Any) -> str:
    import megatron_flex as mf

    try:
        do()
    except mf.FlexError as error:
        return str(error)
    return ""


# -- who writes --------------------------------------------------------------------------------------


def whole(case: Case, path: str) -> None:
    import megatron_flex as mf

    chunks = ranks.start(case)
    dump = mf.Dump(path, "**:*", gradients=True, replicas=True, order="blocks")
    with mf.attach(chunks, dumps=dump):
        gpt.step(case, chunks, ranks.mine(chunks))


SPREAD = [
    TP2,
    Case("tp4, fewer groups", tp=4, layers=2),
    Case("cp2", cp=2, layers=2),
    Case("cp2 tp2", cp=2, tp=2, layers=2),
    Case("dp2 pp2", dp=2, pp=2, layers=2),
]


@pytest.mark.parametrize("case", SPREAD, ids=lambda c: c.name)
def test_each_byte_is_written_once_and_ranks_write_equally_much(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf

    run(case.world, whole, case, str(tmp_path / "d"))
    found = dumped.entries(tmp_path / "d")
    with mf.open_dump(tmp_path / "d") as dump:
        expected = {name: dump[name].nbytes * dumped.summands(dump, name) for name in dump.sites}
    got: Counter[str] = Counter()
    for one in found:
        if one.entry.kind != "replica":
            got[one.name] += one.nbytes
    assert got == expected
    written = [one for one in found if one.entry.kind != "replica"]
    load: Counter[Any] = Counter()
    for one in written:
        load[one.coords["pp"], one.coords["dp"], one.rank] += one.nbytes
    for stage in {key[:2] for key in load}:
        mine = [n for key, n in load.items() if key[:2] == stage]
        kinds = 1 + (case.tp > 1 and case.cp > 1) * 2  # over tp, over cp, over both
        assert len(mine) == case.tp * case.cp
        assert max(mine) - min(mine) <= kinds * max(one.nbytes for one in written)


@pytest.mark.parametrize("case", [TP2, Case("tp4, fewer groups", tp=4, layers=2)], ids=lambda c: c.name)
def test_replicas_have_the_checksum_of_what_was_written(case: Case, tmp_path: Path) -> None:
    run(case.world, whole, case, str(tmp_path / "d"))
    found = dumped.entries(tmp_path / "d")
    written = {}
    for one in found:
        if one.entry.kind != "replica":
            key = one.name, one.entry.microbatch, one.entry.call
            written.setdefault(key, set()).add(one.entry.checksum)
    replicas = [one for one in found if one.entry.kind == "replica"]
    assert len(replicas) > 20
    for one in replicas:
        assert one.entry.checksum in written[one.name, one.entry.microbatch, one.entry.call], one.name


def of_one_stage(case: Case, path: str, replicas: bool) -> int:
    """Two steps of a dump of the first layer alone: how many iterations this rank has written."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    dump = mf.Dump(path, "decoder.layers.0", gradients=True, replicas=replicas, when_full="drop")
    with mf.attach(chunks, dumps=dump) as flex:
        for _ in range(2):
            gpt.step(case, chunks, ranks.mine(chunks))
        (sink,) = flex.session.sinks.dumps
        flex.remove_dump(dump)
    return sink.tally.written


@pytest.mark.parametrize("replicas", [False, True])
def test_ranks_of_a_stage_of_which_nothing_is_dumped_write_no_files(replicas: bool, tmp_path: Path) -> None:
    import megatron_flex as mf
    from megatron_flex.dump.tools.dump_verification import verify_dump

    assert run(PP2.world, of_one_stage, PP2, str(tmp_path / "d"), replicas) == [2] * PP2.world
    parts = sorted((tmp_path / "d").rglob("*.safetensors"))
    writers = {int(path.name.split("-")[0]) for path in parts}
    assert writers == ({0, 1, 2, 3} if replicas else {0, 1})
    assert verify_dump(tmp_path / "d").findings == []
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [0, 1]
        assert dump["decoder.layers.0:output"][1].shape[-1] == gpt.HIDDEN
    parts[-1].unlink()
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [0]


# -- what it costs -----------------------------------------------------------------------------------


def counted(case: Case, path: str) -> list[Counter[str]]:
    """Collectives of a step without hooks, with a dump at all places, and with one that rests."""
    import megatron_flex as mf

    chunks, out = ranks.start(case), []
    rank = ranks.mine(chunks)
    with mf.attach(chunks) as flex:
        gpt.step(case, chunks, rank)
        with ranks.counting() as plain:
            gpt.step(case, chunks, rank)
        out.append(plain)
        bare = ranks.fingerprint(chunks)
        dump = mf.Dump(path, "**:*", gradients=True, parameters="**", iterations=slice(0, 4), replicas=True)
        if case.dp > 1:
            dump.parameters = []
        flex.register_dump(dump)
        gpt.step(case, chunks, rank)  # where ranks compare their hooks
        for _ in range(2):
            with ranks.counting() as counts:
                gpt.step(case, chunks, rank)
            out.append(counts)
        assert ranks.fingerprint(chunks) == bare, "nothing stands in the model in a step that is not dumped"
    return out


@pytest.mark.parametrize("case", [PP2, Case("cp2 dp2", cp=2, dp=2, layers=2)], ids=lambda c: c.name)
def test_nothing_is_communicated(case: Case, tmp_path: Path) -> None:
    import megatron_flex as mf

    for plain, dumping, resting in run(case.world, counted, case, str(tmp_path / "d")):
        assert plain == dumping == resting
        assert sum(plain.values()) > 0
    with mf.open_dump(tmp_path / "d") as dump:
        assert dump.iterations == [2, 3]


# -- steps and calls ---------------------------------------------------------------------------------


def called(case: Case, path: str) -> list[str]:
    """Calls with and without backward passes, together and alone."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with mf.attach(chunks, dumps=mf.Dump(path, [OUT, LOSS], gradients=True)) as flex:
            ranks.call(chunks).mean().backward()
            with torch.no_grad():
                ranks.call(chunks)
            with flex.step():
                for _ in range(3):
                    ranks.call(chunks).mean().backward()
            late, now = ranks.call(chunks), ranks.call(chunks)
            (late.mean() + now.mean()).backward()
            ranks.call(chunks).mean().backward()
    return told(record)


def test_calls_outside_a_schedule(tmp_path: Path) -> None:
    import megatron_flex as mf

    (found, other) = run(2, called, TP2, str(tmp_path / "d"))
    assert found == other
    assert len(found) == 1
    assert_names(found[0], 3, "with flex.step():")
    with mf.open_dump(tmp_path / "d") as dump:
        assert [dump[OUT].at(i).shape[1] // gpt.BATCH for i in dump.iterations] == [1, 1, 3, 1, 1, 1]
        name = f"{OUT}.grad"
        assert 1 not in dump[name].iterations
        assert [dump[name].at(i).shape[1] // gpt.BATCH for i in (0, 2, 4, 5)] == [1, 3, 1, 1]
        with raises(mf.DumpError, name, 3):
            dump[name].at(3).torch()
        assert torch.equal(dump[name].at(0).torch(), dump[name].at(5).torch())


def failing(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Raise in a step; where hooks are tried out beforehand nothing is differentiated."""
    if torch.is_grad_enabled() and inputs.requires_grad:
        raise RuntimeError("broken on purpose")
    return inputs


def life(case: Case, path: str) -> dict[str, Any]:
    """Groups, edits, removal, failures, twice in one process."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank, answer = ranks.mine(chunks), {}
    edit = mf.HookFunction(OUT, editing_function=lambda m, x, c, s: x * 2, save=False)
    plain = mf.Dump(f"{path}/plain", [OUT])
    grouped = mf.Dump(f"{path}/grouped", [OUT, LOSS], groups=["now"])
    with mf.attach(chunks, dumps=[plain, grouped]) as flex:
        with flex.hooks("-now"):
            gpt.step(case, chunks, rank)
        flex.register_forward_hook(edit)
        with flex.hooks("-now"):
            gpt.step(case, chunks, rank)
        gpt.step(case, chunks, rank)
        answer["same"] = refused(lambda: flex.register_dump(mf.Dump(f"{path}/plain", [LOSS])))
        flex.remove_dump(plain)
        answer["gone"] = refused(lambda: flex.remove_dump(plain))
        gpt.step(case, chunks, rank)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with mf.attach(chunks, dumps=mf.Dump(f"{path}/plain", [OUT])):
            for _ in range(4):
                gpt.step(case, chunks, rank)
    answer["again"] = told(record)
    broken = mf.HookFunction(OUT, editing_function=failing, save=False)
    with mf.attach(chunks, dumps=mf.Dump(f"{path}/failed", [OUT])) as flex:
        gpt.step(case, chunks, rank)
        flex.register_forward_hook(broken)
        answer["failed"] = refused(lambda: gpt.step(case, chunks, rank))
        flex.remove_hook(broken)
        gpt.step(case, chunks, rank)
    with mf.attach(chunks, dumps=mf.Dump(f"{path}/eval", [OUT, LOSS], gradients=True)):
        gpt.step(case, chunks, rank, forward_only=True)
    return answer


def test_the_life_of_dumps(tmp_path: Path) -> None:
    import megatron_flex as mf

    answers = run(PP2.world, life, PP2, str(tmp_path))
    for answer in answers:
        assert_names(answer["same"], tmp_path)
        assert_names(answer["gone"], tmp_path)
        assert "broken on purpose" in answer["failed"]
    (told_again,) = answers[0]["again"]
    assert_names(told_again, tmp_path / "plain", "iterations 0 to 2", "run-0000", "run-0001")
    assert not any(answer["again"] for answer in answers[1:]), "what is alike on all ranks is printed once"
    with mf.open_dump(tmp_path / "plain") as dump:
        assert dump.iterations == [0, 1, 2, 3]
        assert len(dump.manifests) == 2
        values = dump[OUT].torch()
        for later in values[1:]:
            assert torch.equal(values[0], later), "what passes is written as it is before edits"
    with mf.open_dump(tmp_path / "grouped") as dump:
        assert dump.iterations == [2, 3]
    with mf.open_dump(tmp_path / "failed") as dump:
        assert dump.iterations == [0, 2], "an iteration in which a hook failed is absent"
    with mf.open_dump(tmp_path / "eval") as dump:
        assert dump.iterations == [0]
        assert dump[OUT].shape[0] == 1
        assert f"{OUT}.grad" not in dump.sites


def runs(case: Case, path: str) -> list[str]:
    """A loop that counts iterations: training, evaluation, and one that is trained twice."""
    import sys
    import types

    import megatron_flex as mf

    state: Any = types.ModuleType("megatron.training.global_vars")
    state._GLOBAL_ARGS = types.SimpleNamespace(curr_iteration=7)
    changes.setitem(sys.modules, "megatron.training.global_vars", state)
    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    dumps = [mf.Dump(f"{path}/{r}", [LOSS], runs=r, every=7) for r in ("first", "all")]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with mf.attach(chunks, dumps=dumps):
            for number, evaluates in (
                (7, False),
                (7, True),
                (8, False),
                (14, False),
                (14, False),
                (14, False),
            ):
                state._GLOBAL_ARGS.curr_iteration = number
                gpt.step(case, chunks, rank, forward_only=evaluates)
    return told(record)


def test_runs_of_an_iteration(tmp_path: Path) -> None:
    import megatron_flex as mf

    (first,), second = run(2, runs, TP2, str(tmp_path))
    assert_names(first, 14)
    assert second == [], "what is alike on all ranks is printed once"
    with mf.open_dump(tmp_path / "first") as dump:
        assert dump.iterations == [7, 14]
    folders = sorted(p.name for p in (tmp_path / "all" / "run-0000").iterdir() if p.is_dir())
    assert folders == [f"{n:010d}{r}" for n, r in ((7, ""), (7, ".1"), (14, ""), (14, ".1"), (14, ".2"))]


# -- places ------------------------------------------------------------------------------------------


def places(case: Case, path: str) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank, answer = ranks.mine(chunks), {}
    with mf.attach(chunks) as flex:
        hidden = [s.name for s in flex.sites() if s.hidden]
        answer["hidden"] = hidden
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            flex.register_dump(mf.Dump(f"{path}/all", "**:*"))
            gpt.step(case, chunks, rank)
        answer["told"] = told(record)
        for name, dump in {
            "exact": mf.Dump(f"{path}/exact", [hidden[0]]),
            "none": mf.Dump(f"{path}/none", ["decoder.layer.*"]),
            "parameter": mf.Dump(f"{path}/parameter", parameters=["decoder.nothing"]),
            "differs": mf.Dump(f"{path}/differs{rank}{flex.session.mesh['tp'].coord}", [OUT]),
        }.items():
            answer[name] = refused(lambda d=dump: flex.register_dump(d))
    answer["left"] = [p.name for p in Path(path).iterdir()]
    return answer


def test_hidden_places_are_left_out_or_refused(tmp_path: Path) -> None:
    case = Case("te tp2", tp=2, te=True, layers=2)
    for answer in run(2, places, case, str(tmp_path)):
        assert answer["hidden"]
        assert len(answer["told"]) == 1
        assert all(name in answer["told"][0] for name in answer["hidden"][:8])
        assert_names(answer["exact"], answer["hidden"][0])
        assert_names(answer["none"], "decoder.layer.*")
        assert "decoder.nothing" in answer["parameter"]
        assert "differ" in answer["differs"]
        assert answer["left"] == ["all"]


def together(case: Case, path: str) -> None:
    import megatron_flex as mf

    chunks = ranks.start(case)
    hooks = [mf.HookFunction(OUT), mf.HookFunction(OUT, hook_type="tensor")]
    for name, joint in (("apart", False), ("joint", True)):
        dump = mf.Dump(f"{path}/{name}", [OUT, LOSS, "embedding:output"], gradients=True, order="blocks")
        with mf.attach(chunks, hooks if joint else [], dumps=dump, gather_data_parallel=joint):
            gpt.step(case, chunks, ranks.mine(chunks))


def test_replicas_whose_samples_are_read_together_write_their_own(tmp_path: Path) -> None:
    import megatron_flex as mf

    run(4, together, Case("dp2 tp2", dp=2, tp=2, layers=2), str(tmp_path))
    with mf.open_dump(tmp_path / "apart") as apart, mf.open_dump(tmp_path / "joint") as joint:
        assert joint.sites == apart.sites
        assert len(joint.sites) == 6
        for name in joint.sites:
            assert torch.equal(joint[name].torch(), apart[name].torch()), name
