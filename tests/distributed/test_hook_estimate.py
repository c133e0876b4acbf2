"""What hooks send, counted at torch.distributed on real ranks: no call more than estimated, and no byte.

Counted is a step with a hook, less a step without, once both are warm. Calls are told as `(function, axis,
bytes)`: of its result on this rank, but for `gather`, of which it is what the rank hands in.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flex.errors import FlexError
from tests.distributed.test_docs import ROOT, blocks, execute
from tests.support import design, estimated, gpt, ranks
from tests.support.counting import Call, added, counting
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
needs_arguments = pytest.mark.skipif(
    VERSION < (0, 19), reason="megatron.training with its arguments came with 0.19"
)

Told = tuple[str, str, int]
FC1, FC2, LAYER = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2", "decoder.layers.0"
WIDE = 2 * gpt.FFN  # of fc1's output, gate and up
NAMES = {"all_gather_into_tensor": "all_gather"}
FLAGS = 256  # bytes of the message in which ranks compare flags along each axis after a step with hooks


def _told(calls: Counter[Call], axes: dict[tuple[int, ...], str]) -> Counter[Told]:
    out: Counter[Told] = Counter()
    for call, count in calls.items():
        op = NAMES.get(call.op, call.op)
        nbytes = call.sent if op == "gather" else max(call.sent, call.got)
        flags = op == "all_reduce" and call.dtype == "int64" and nbytes == FLAGS
        out["flags" if flags else op, axes[call.ranks], nbytes] += count
    return out


def count(case: Case, hooks: dict[str, Callable[[Any], None]]) -> dict[str, Any]:
    """On each rank: by name of a hook what a step has more with it."""
    from megatron_flex import FlexModel

    chunks = ranks.start(case)
    mine = ranks.mine(chunks)
    gpt.step(case, chunks, mine)
    with counting() as without:
        gpt.step(case, chunks, mine)
    out = {}
    for name, register in hooks.items():
        with FlexModel(chunks) as flex:
            mesh = flex.session.mesh
            axes = {a.ranks: a.name for a in mesh if a.size > 1} | {tuple(range(case.world)): "all"}
            axes |= {a.ranks: a.name for a in mesh if a.size > 1}
            register(flex)
            gpt.step(case, chunks, mine)  # whatever is set up, is set up in this one
            with counting() as calls:
                gpt.step(case, chunks, mine)
            out[name] = dict(_told(added(calls, without), axes))
    return out


# -- what the estimate says, and what is counted -----------------------------------------------------------


READS = (
    FC1,
    LAYER,
    f"{FC1}@gradient",
    f"{LAYER}@gradient",
    f"{FC2}:input",
    "output_layer",
    f"{LAYER}@positions=-1",
    f"{FC1}@neurons=0:9@mean=s",
)
EDITS = (
    f"{FC1}=general",
    f"{FC1}=local",
    f"{FC1}=linear:1",
    f"{FC1}=linear:3",
    f"{FC1}=scale=1.01",
    f"{FC1}@gradient=general",
    f"{LAYER}=general",
    f"{LAYER}=local",
    f"{LAYER}=scale=1.01 | clamp=-3@3",
    "decoder.layers.0.self_attention:k=general",
    "output_layer=general",
)
CASES = [
    Case("tp2 cp2 sp", tp=2, cp=2, sp=True, layers=1),
    Case("tp4, two groups", tp=4, layers=1),
    Case("tp2", tp=2, layers=1),
    Case("tp2 sp", tp=2, sp=True, layers=1),
    Case("tp8 sp", tp=8, sp=True, layers=1, groups=8, extra={"num_attention_heads": 8, "kv_channels": 4}),
]


def _part(case: Case, hooks: Iterable[str], among: list[Case]) -> list[str]:
    """Which hooks are counted in a case: each along every axis, and where some groups are copies."""

    def elements(number: int, hook: str) -> set[tuple[str, str]]:
        copies = {"copies"} if (among[number].groups or 0) < among[number].tp else set()
        return {(hook, axis) for axis in design.axes(among[number]) | copies}

    every = list(hooks)
    return design.part([every] * len(among), among.index(case), elements)


def _whole(module: Any, inputs: torch.Tensor, save_ctx: Any, modules: Any) -> torch.Tensor:
    """An edit of which nobody knows that it would do with a part."""
    return inputs * 1.01


def _directions(k: int, width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, k, generator=torch.Generator().manual_seed(5)))[0].T


def _said(words: str) -> Callable[[Any], None]:
    """What a person registers who means what is said to the estimate."""
    from megatron_flex import HookFunction, edits
    from megatron_flex.estimate import parse_read_hook

    given = words in EDITS
    place, _, how = words.replace("@gradient", "").partition("=")
    edit: Any = None
    if given:
        name, _, entries = how.partition(":")
        made: dict[str, Callable[[], Any]] = {
            "general": lambda: _whole,
            "local": lambda: edits.scale(1.5),
            "linear": lambda: edits.project_out(_directions(int(entries or 1), WIDE)),
        }
        edit = made[name]() if name in made else edits.parse(how)
    kind = "full_backward_pre" if "@gradient" in words else "forward"
    more: dict[str, Any] = {"editing_function": edit, "save": not given, "hook_type": kind}
    if not given:
        meant = parse_read_hook(words)
        place = str(meant.pattern)
        if meant.selection is not None:
            more.update(select=meant.selection.select, reduce=meant.selection.reduce)

    def register(flex: Any) -> None:
        hook = HookFunction(place, **more)
        if kind == "forward":
            flex.register_forward_hook(hook)
        else:
            flex.register_full_backward_pre_hook(hook)

    return register


def _counted(case: Case, words: list[str]) -> dict[str, Any]:
    return count(case, {w: _said(w) for w in words})


@needs_arguments
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_counted_is_what_the_estimate_says(case: Case) -> None:
    from megatron_flex.estimate import estimate_hooks

    words = _part(case, (*READS, *EDITS), CASES)
    answers = run(case.world, _counted, case, words, timeout=300)
    reads, changed = [w for w in words if w in READS], [w for w in words if w in EDITS]
    found = estimate_hooks(estimated.told(case), read=reads, edit=changed)
    want: dict[str, Counter[Told]] = {w: Counter() for w in words}
    for hook in found.hooks:
        for sent in hook.each.collectives:
            want[hook.hook.partition(" ")[2]][sent.op, sent.axis, sent.nbytes] += hook.times
    for hook in words:
        want[hook].update({("flags", a, FLAGS): 1 for a in ("tp", "cp") if found.mesh[a] > 1})
    for rank, answer in enumerate(answers):
        wrong = {w: (c, dict(want[w])) for w, c in answer.items() if c != want[w]}
        assert not wrong, f"counted, and estimated, on rank {rank}"


@needs_arguments
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_whole_of_an_edit_is_what_one_device_has(case: Case) -> None:
    """However many ranks hold copies of a head of keys and values."""
    from megatron_flex.estimate import estimate_hooks

    points = ("linear_qkv:q", "linear_qkv:k", "core_attention:q", "core_attention:k", "core_attention:v")
    edits = [f"decoder.layers.0.self_attention.{p}=general" for p in points]
    alone = replace(case, tp=1, cp=1, sp=False)
    found, want = (
        [c.each for c in estimate_hooks(estimated.told(c), edit=edits).hooks] for c in (case, alone)
    )
    assert [e.full for e in found] == [e.full for e in want]
    assert [e.device for e in found] == [2 * e.full + e.shard for e in found], (
        "gathered, edited, and put back"
    )
    assert len(want) == len(edits)


# -- what each kind of hook costs, held exactly --------------------------------------------------------


def _kinds(folder: str, width: int) -> dict[str, Callable[[Any], None]]:
    """One of each kind."""
    import megatron_flex as mf
    from megatron_flex import HookFunction, edits
    from tests.support import measuring

    def forward(*args: Any, **kwargs: Any) -> Callable[[Any], None]:
        return lambda flex: flex.register_forward_hook(HookFunction(*args, **kwargs))

    def edit(place: str, function: Any) -> Callable[[Any], None]:
        return forward(place, editing_function=function, save=False)

    def idle(flex: Any) -> None:
        flex.register_forward_hook(HookFunction(FC1, enabled=False))
        flex.register_forward_hook(HookFunction(LAYER, editing_function=_whole, enabled=False))

    return {
        "read, cut": forward(FC1),
        "read, replicated or cut by sequence parallelism": forward(LAYER),
        "read, two sites": lambda flex: [forward(FC1)(flex), forward(f"{FC2}:input")(flex)],
        "read, selected": forward(LAYER, select=mf.Select(positions=-1)),
        "read, reduced": forward(FC1, reduce=mf.reduce.mean("s")),
        "read of a gradient": lambda flex: flex.register_full_backward_pre_hook(
            HookFunction(FC1, hook_type="full_backward_pre")
        ),
        "local edit": edit(FC1, edits.scale(1.01)),
        "local edit of some neurons": edit(FC1, edits.zero(features=[0, 50])),
        "linear edit": edit(FC1, edits.project_out(_directions(1, width))),
        "general edit": edit(FC1, _whole),
        "general edit of the layer's output": edit(LAYER, _whole),
        "dump": lambda flex: flex.register_dump(mf.Dump(folder, [FC1, LAYER])),
        "statistics": lambda flex: flex.register_statistics(
            mf.Statistics("nowhere", [FC1, LAYER]), measuring.Kept()
        ),
        "idle": idle,
    }


def _these(folder: str, width: int, case: Case, names: list[str]) -> dict[str, Any]:
    every = _kinds(folder, width)
    return count(case, {n: every[n] for n in names})


NOTHING: dict[Told, int] = {}
TWO = {("flags", "tp", FLAGS): 1}
FOUR = {**TWO, ("flags", "cp", FLAGS): 1}
# By case and kind: what each rank calls in a step of two microbatches, where all call the same.
# Statistics carry 8 bytes beside their sums: the flag by which a rank's error reaches all.
HELD: dict[str, dict[str, dict[Told, int]]] = {
    "tp2": {
        "linear edit": {**TWO, ("all_reduce", "tp", 128): 4},
        "general edit": {**TWO, ("all_gather", "tp", 12288): 4},
        "general edit of the layer's output": TWO,
        "statistics": {("all_reduce", "tp", 2256): 1},
    },
    "tp2 sp": {
        "linear edit": {**TWO, ("all_reduce", "tp", 128): 4},
        "general edit": {**TWO, ("all_gather", "tp", 12288): 4},
        "general edit of the layer's output": {**TWO, ("all_gather", "tp", 4096): 4},
        "statistics": {("all_reduce", "tp", 2256): 1},
    },
    "tp2 cp2 sp": {
        "linear edit": {**FOUR, ("all_reduce", "tp", 64): 4},
        "general edit": {**FOUR, ("all_gather", "tp", 6144): 4, ("all_gather", "cp", 12288): 4},
        "general edit of the layer's output": {
            **FOUR,
            ("all_gather", "tp", 2048): 4,
            ("all_gather", "cp", 4096): 4,
        },
        "statistics": {("all_reduce", "all", 2288): 1},
    },
    "tp4, two groups": {
        "linear edit": {**TWO, ("all_reduce", "tp", 128): 4},
        "general edit": {**TWO, ("all_gather", "tp", 12288): 4},
        "general edit of the layer's output": TWO,
        "statistics": {("all_reduce", "tp", 2288): 1},
    },
}


@pytest.mark.parametrize("case", CASES[:4], ids=lambda c: c.name)
def test_no_hook_sends_more_than_it_did(case: Case, tmp_path: Path) -> None:
    kinds = _part(case, _kinds("nowhere", WIDE), CASES[:4])
    answers = run(case.world, _these, str(tmp_path / "dump"), WIDE, case, kinds, timeout=300)
    for rank, answer in enumerate(answers):
        assert list(answer) == kinds
        flags = FOUR if case.cp > 1 else TWO
        held = {k: NOTHING if k in ("dump", "statistics", "idle") else flags for k in kinds} | HELD[case.name]
        wrong = {k: (c, held[k]) for k, c in answer.items() if c != held[k]}
        assert not wrong, f"counted, and held, on rank {rank}"


# -- along the pipeline --------------------------------------------------------------------------------


def test_an_edit_that_saves_nothing_sends_nothing_along_the_pipeline() -> None:
    case = Case("tp2 pp2", tp=2, pp=2)
    answers = run(case.world, _along, case, timeout=300)
    assert any(axis == "pp" for _, axis, _ in answers[0]["read"]), "what is read goes there"
    for answer in answers:
        found = {n: {t: c for t, c in told.items() if t[1] == "pp"} for n, told in answer.items()}
        for name in ("sure", "general", "of a gradient"):  # did any rank's edit fail?
            assert found[name] == {("flags", "pp", FLAGS): 1}, name


def _along(case: Case) -> dict[str, Any]:
    words = {
        "read": FC1,
        "sure": f"{FC1}=local",
        "general": f"{FC1}=general",
        "of a gradient": f"{FC1}@gradient=general",
    }
    return count(case, {name: _said(said) for name, said in words.items()})


# -- what a live model says, and what is counted -------------------------------------------------------


def _mixed(folder: str, width: int) -> dict[str, Callable[[Any], None]]:
    """What stands together at one place, beside one of each kind."""
    import megatron_flex as mf
    from megatron_flex import HookFunction, edits

    def several(*hooks: dict[str, Any]) -> Callable[[Any], None]:
        def register(flex: Any) -> None:
            for given in hooks:
                hook = HookFunction(given.pop("at", FC1), **given)
                backward = hook.hook_type != "forward"
                (flex.register_full_backward_pre_hook if backward else flex.register_forward_hook)(hook)

        return register

    back: Any = "full_backward_pre"
    return _kinds(folder, width) | {
        "edit that saves": several({"editing_function": _whole}),
        "two edits of one whole": several(
            {"editing_function": _whole, "save": False}, {"editing_function": _other, "save": False}
        ),
        "a preset beside one that needs the whole": several(
            {"editing_function": edits.project_out(_directions(1, width)), "save": False},
            {"editing_function": _whole, "save": False},
        ),
        "presets": several(
            {"editing_function": edits.project_out(_directions(2, width)), "save": False},
            {"editing_function": edits.scale(0.5, positions=0), "save": False},
            {"keep_as": "last", "select": mf.Select(positions=-1)},
        ),
        "on one rank": several({"editing_function": _whole, "save": False, "run": "once"}),
        "of a gradient, on one rank": several(
            {"editing_function": _whole, "save": False, "run": "once", "hook_type": back}
        ),
        "of a gradient": several({"at": LAYER, "editing_function": _whole, "hook_type": back}),
    }


def _other(module: Any, inputs: torch.Tensor, save_ctx: Any, modules: Any) -> torch.Tensor:
    return inputs + 1


LIVE = [CASES[0], CASES[2], CASES[3]]


def _lived(case: Case, folder: str, names: list[str]) -> dict[str, Any]:
    """By name of a hook what is counted, what the live model said before, and of a dump what it writes."""
    said: dict[str, Any] = {}

    def asked(name: str, register: Callable[[Any], None]) -> Callable[[Any], None]:
        def both(flex: Any) -> None:
            register(flex)
            if name == "idle":
                with raises(FlexError):
                    flex.estimate(sequence_length=gpt.SEQUENCE, micro_batch_size=gpt.BATCH)
                return
            if name != "statistics":  # whose one sum is as long whatever they are of
                with raises(FlexError, "estimate()", "sequence_length=", "micro_batch_size="):
                    flex.estimate()
            said[name] = flex.estimate(
                sequence_length=gpt.SEQUENCE, micro_batch_size=gpt.BATCH, microbatches=case.microbatches
            )

        return both

    every = _mixed(folder, WIDE)
    counted = count(case, {n: asked(n, every[n]) for n in names})
    return {"counted": counted, "said": said}


@pytest.mark.parametrize("case", LIVE, ids=lambda c: c.name)
def test_counted_is_what_a_live_model_says(case: Case, tmp_path: Path) -> None:
    names = _part(case, _mixed("nowhere", WIDE), LIVE)
    answers = run(case.world, _lived, case, str(tmp_path / "dump"), names, timeout=300)
    everyones = "tp" if case.cp == 1 else "all"  # what all ranks are called when they are counted
    for rank, answer in enumerate(answers):
        for name, found in answer["said"].items():
            assert found == answers[0]["said"][name], "every rank says the same"
            want: Counter[Told] = Counter()
            for hook in found.hooks:
                for sent in hook.each.collectives:
                    axis = everyones if sent.axis == "all" else sent.axis
                    want[sent.op, axis, sent.nbytes] += hook.times
            if found.flags:
                want.update({("flags", a, FLAGS): 1 for a in ("tp", "cp") if found.mesh[a] > 1})
            counted = Counter(answer["counted"][name])
            if rank and name.endswith("on one rank"):  # ranks further along later axes hear of it later
                left = want - counted
                assert all(op == "broadcast" for op, *_ in left), left
                counted += left
            assert counted == want, f"counted, and said of {name!r}, on rank {rank}"


def test_a_live_model_says_what_its_dump_writes(tmp_path: Path) -> None:
    from safetensors import safe_open

    case, folder = CASES[3], tmp_path / "dump"
    found = run(case.world, _lived_dump, case, str(folder))[0]
    written = 0
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            # safetensors' file has keys() and is no mapping: it cannot be walked over itself
            written += sum(opened.get_tensor(n).nbytes for n in opened.keys())  # noqa: SIM118
    assert written == sum(case.world * c.times * c.each.rank.disk for c in found.hooks)
    assert all(r.moved.disk for r in found.roles)
    assert {row[1] for row in found.rows()} == {"dump"}


def _lived_dump(case: Case, folder: str) -> Any:
    import megatron_flex as mf

    chunks = ranks.start(case)
    dump = mf.Dump(folder, [FC1, LAYER], dtype="bf16", gradients=True)
    with mf.attach(chunks, dumps=dump) as flex:
        gpt.step(case, chunks, 0)
        return flex.estimate(
            sequence_length=gpt.SEQUENCE, micro_batch_size=gpt.BATCH, microbatches=case.microbatches
        )


def test_the_page_on_estimates_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "estimate.md")
    answers = run(4, execute, code)
    assert answers[1:] == answers[:1] * 3, "every rank says the same"
    assert gpt.SEQUENCE * gpt.BATCH * gpt.HIDDEN * 4 == 4 << 10
    assert answers[0][0] == "decoder.layers.*:output (4) read 4.00 KiB none"
