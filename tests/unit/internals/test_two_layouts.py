"""The plan of the same weights in two layouts: flags, processes, and a vocabulary of one padded size."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from megatron_flex.errors import FlexError
from megatron_flex.launch.flags import settings_from_argv
from megatron_flex.launch.two_layouts import drop_flags, plan_two_layouts
from tests.support.messages import assert_names, raises

SCRIPT = (
    "pretrain_gpt.py --tensor-model-parallel-size 4 --sequence-parallel --train-samples 9 --vocab-size 50"
)


def values(words: tuple[str, ...], flag: str) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == flag]


def plan(against: str, script: str = SCRIPT, **more: object) -> tuple[tuple, list[tuple[str, ...]]]:
    found = plan_two_layouts(shlex.split(script), against, Path("out"), **more)
    return found.runs, [run.words for run in found.runs]


def test_three_runs_from_one_checkpoint() -> None:
    runs, words = plan("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2")
    assert [run.processes for run in runs] == [2, 4, 2], "the smaller layout saves"
    assert [values(w, "--tensor-model-parallel-size") for w in words] == [["1"], ["4"], ["1"]]
    assert [values(w, "--save") for w in words] == [["out/checkpoint"], [], []]
    assert [values(w, "--load") for w in words] == [[], ["out/checkpoint"], ["out/checkpoint"]]
    assert ["--finetune" in w for w in words] == [False, True, True]
    assert not any("--train-samples" in w for w in words)
    assert runs[0].variable == ""
    for run, folder in zip(runs[1:], ("first", "second"), strict=True):
        settings, rest = settings_from_argv(shlex.split(run.variable), {})
        assert rest == []
        assert settings.dumps[0].path == f"out/{folder}"
        assert settings.dumps[0].parameters == ("**",)
        assert settings.gradients


@pytest.mark.parametrize(("first", "second", "given"), [(4, 1, ""), (2, 3, ""), (4, 6, "64"), (8, 2, "100")])
def test_the_vocabulary_is_padded_to_one_size(first: int, second: int, given: str) -> None:
    """Megatron pads to a multiple of the flag times the tensor parallel size."""
    script = f"a.py --tensor-model-parallel-size={first}"
    script += f" --make-vocab-size-divisible-by {given}" if given else ""
    _, words = plan(f"--tensor-model-parallel-size {second}", script)
    sizes = [int(values(w, "--make-vocab-size-divisible-by")[0]) for w in words[1:]]
    assert sizes[0] * first == sizes[1] * second
    assert sizes[0] * first % (int(given or 128) * first) == 0


def test_flags_that_only_one_layout_has() -> None:
    _, words = plan("--tensor-model-parallel-size 1", without=["--sequence-parallel"])
    assert ["--sequence-parallel" in w for w in words] == [False, True, False]
    flags = ["a.py", "--x", "1", "2", "--y=3", "--z", "-4"]
    assert drop_flags(flags, ["--x", "--y"]) == ["a.py", "--z", "-4"]


def test_a_checkpoint_that_is_there_and_experts() -> None:
    runs, words = plan(
        "--expert-model-parallel-size 8", "a.py --pipeline-model-parallel-size 2", checkpoint=Path("saved")
    )
    assert [run.processes for run in runs] == [2, 16]
    assert [values(w, "--load") for w in words] == [["saved"], ["saved"]]


def test_only_the_number_of_replicas_differs() -> None:
    runs, words = plan("", "a.py --lr 1", processes=[4, 2])
    assert [run.processes for run in runs] == [2, 4, 2]
    assert all(w[:3] == ("a.py", "--lr", "1") for w in words)


@pytest.mark.parametrize(
    ("script", "against", "more", "said"),
    [
        ("--lr 1", "--tensor-model-parallel-size 1", {}, ("SCRIPT", "--against")),
        ("a.py", "", {}, ("--against",)),
        ("a.py", "--tensor-model-parallel-size x", {}, ("--tensor-model-parallel-size", "'x'", 1)),
        ("a.py", "", {"processes": [2, 2]}, ("--against",)),
        ("a.py", "--lr 1", {"processes": [2]}, ("--processes 2", "4,2")),
    ],
)
def test_what_cannot_be(script: str, against: str, more: dict[str, object], said: tuple[object, ...]) -> None:
    with raises(FlexError, *said):
        plan(against, script, **more)


@pytest.mark.parametrize("first", [["--"], []])
def test_the_command_prints_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, first: list[str]
) -> None:
    """Options may be anywhere, as in the documents; the script's flags stay as they are, and in order."""
    pytest.importorskip("typer")
    from tests.support.commands import Command

    command = Command(monkeypatch, capsys, tmp_path)
    script = [*SCRIPT.split(), "--seed", "-1", "-x", "3", "--flex-seed=4", "-abc"]
    options = ["--against", "--tensor-model-parallel-size 1", "--dry", "--out=there", "--no-parameters"]
    done = command("two-layouts", *first, *script[:-2], *options, *script[-2:])
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) == 4
    assert all(line.partition(" ")[0] == "torchrun" for line in lines[:1])
    assert " --seed -1 -x 3 --flex-seed=4 -abc " in lines[1]
    assert "--flex-dump-parameters" not in lines[1]
    assert lines[-1] == "megatron-flex compare there/first there/second"
    missing = command("two-layouts", *SCRIPT.split(), "--against")
    assert missing.status == 2
    assert_names(missing.err, "--against")


def test_a_failure_shows_the_exception_and_not_the_launchers() -> None:
    pytest.importorskip("typer")
    from megatron_flex.cli.two_layouts_command import find_failure

    trace = [f"[rank{rank}]:     line {n}" for n in range(50) for rank in (1, 0)]
    errors = ["[rank1]: ValueError: heads do not divide", "[rank0]: RuntimeError: connection closed"]
    launcher = ["Traceback (most recent call last):", *["  in torchrun"] * 500, "ChildFailedError: "]
    lines = find_failure("\n".join(["starting", *trace, *errors, *launcher])).splitlines()
    assert lines[-1] == errors[0]
    assert 5 < len(lines) < 20
    assert all(line.startswith("[rank1]: ") for line in lines)
    launcher[0] = "E1127 api.py:1002] failed (exitcode: 2) local_rank: 0 (pid: 7)"
    own = "megatron-flex: error: no sites are named"
    assert find_failure("\n".join([own, *launcher])) == f"{own}\n"
    assert find_failure(own) == f"{own}\n"


@pytest.mark.parametrize(
    ("flags", "scale"),
    [
        ("--fp16", ["65536"]),
        ("--bf16", []),
        ("--fp16 --loss-scale 8", []),
        ("--fp16 --initial-loss-scale=8", []),
    ],
)
def test_fp16_has_a_loss_scale_that_does_not_overflow(flags: str, scale: list[str]) -> None:
    _, words = plan("--tensor-model-parallel-size 1", f"a.py --tensor-model-parallel-size 2 {flags}")
    assert [values(w, "--initial-loss-scale") for w in words] == [scale] * 3


@pytest.mark.parametrize("glued", [False, True])
def test_a_schedule_of_batch_sizes_has_samples_for_its_largest(glued: bool) -> None:
    schedule = "0:8 1K:32 2K:16"
    flag = [f"--step-batch-size-schedule={schedule}"] if glued else ["--step-batch-size-schedule", schedule]
    words = ["train.py", *flag, "--train-samples", "1000000"]
    plan = plan_two_layouts(words, "--tensor-model-parallel-size 2", Path("o"), iterations=3)
    for run, count in zip(plan.runs, (1, 3, 3), strict=True):
        assert "--train-iters" not in run.words
        assert schedule in " ".join(run.words)
        assert run.words[run.words.index("--train-samples") + 1] == str(32 * count)
        assert run.words[run.words.index("--exit-interval") + 1] == str(count)
