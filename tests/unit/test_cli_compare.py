"""`megatron-flex compare` and `estimate`: verdicts, exit statuses, tables, and the meaning of options."""

import json

import pytest

from megatron_flex.compare.comparison import INDISTINGUISHABLE
from megatron_flex.dump import sampled
from megatron_flex.dump.dump_settings import parse_token_setting
from megatron_flex.errors import FlexError
from tests.support import dumps
from tests.support.commands import Command
from tests.support.dumps import SEQUENCE, Given, random
from tests.support.messages import any_names, assert_names, raises

pytest.importorskip("megatron_flex.cli", exc_type=ImportError)

GPT = [
    *("--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 128),
    *("--max-position-embeddings", 128, "--micro-batch-size", 1, "--global-batch-size", 16),
    *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
    *("--vocab-size", 1000, "--bf16"),
]  # fmt: skip
FC1 = "decoder.layers.*.mlp.linear_fc1"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def write(path, mesh, wrong: float = 0.0, scale: float = 1.0) -> None:
    given = {}
    for layer in range(4):
        value = random(1, 4, 8, 8, seed=layer) * scale
        if layer >= 2:
            value = value + wrong * random(1, 4, 8, 8, seed=99)
        given[f"decoder.layers.{layer}"] = Given(
            value, SEQUENCE, random(1, 4, 8, 8, seed=10 + layer), layer // 2
        )
    dumps.write(path, given, mesh=mesh, iterations=[10])


@pytest.fixture
def three(tmp_path) -> None:
    write(tmp_path / "a", {"pp": 2, "tp": 2})
    write(tmp_path / "wrong", {"pp": 2, "dp": 2}, wrong=0.1)
    write(tmp_path / "round", {"pp": 2, "cp": 2}, scale=1 + 1e-6)


@pytest.mark.parametrize("width", [80, 140])
def test_the_first_that_diverges_is_named(command, three, width):
    command.width(width)
    done = command("compare", "a", "wrong", "-t", "0.001")
    assert (done.status, done.err) == (1, "")
    assert any_names(done.out.splitlines(), "diverges", "decoder.layers.2", "(value)", 10)
    table = done.out.rpartition("\n\n")[2]
    assert max(map(len, table.splitlines())) <= width
    assert [line.split()[1] for line in table.splitlines() if line.startswith("→")] == ["decoder.layers.2"]
    assert any(line.startswith("marks: →") for line in table.splitlines())


@pytest.mark.parametrize(
    ("words", "status", "verdict"),
    [
        (["a"], 0, "equal"),
        (["round"], 0, INDISTINGUISHABLE),
        (["wrong"], 1, "diverges"),
        (["wrong", "--tolerance", "0.5"], 0, INDISTINGUISHABLE),
        (["round", "--tolerance", "1e-9"], 1, "diverges"),
        (["wrong", "-t", "decoder.layers.[23]=0.5"], 0, INDISTINGUISHABLE),
        (["wrong", "-t", "decoder.layers.2=0.5"], 1, "diverges"),
        (["wrong", "--tolerance-from", "round"], 1, "diverges"),
        (["round", "--tolerance-from", "round"], 0, INDISTINGUISHABLE),
    ],
)
def test_the_exit_status_is_the_verdict(command, three, words, status, verdict):
    done = command("compare", "a", *words, "--json")
    assert done.status == status
    assert json.loads(done.out)["verdict"] == verdict


def test_what_only_one_has_is_status_2_unless_it_is_allowed(command, three, tmp_path):
    dumps.write(tmp_path / "less", {"decoder.layers.0": Given(random(1, 4, 8, 8))}, iterations=[10])
    dumps.write(
        tmp_path / "more",
        {n: Given(random(1, 4, 8, 8)) for n in ("decoder.layers.0", "decoder.layers.1")},
        iterations=[10],
    )
    done = command("compare", "more", "less")
    assert done.status == 2
    assert any_names(done.out.splitlines(), "A", "decoder.layers.1")
    assert "--allow-missing" in done.out
    assert json.loads(command("compare", "more", "less", "--json").out)["verdict"] == "incomplete"
    assert command("view", "more", "less", "--out", "page.html").status == 0
    assert '"verdict":"incomplete"' in (tmp_path / "page.html").read_text().replace(": ", ":")
    assert command("compare", "more", "less", "--allow-missing").status == 0
    assert command("compare", "less", "less").status == 0


def test_what_cannot_be_compared_is_another_status(command, three, tmp_path):
    dumps.write(tmp_path / "other", {"encoder": Given(random(1, 4, 8, 8))}, iterations=[10])
    done = command("compare", "a", "other")
    assert done.status == 2
    assert done.err.count("\n") == 1


def test_a_damaged_dump_cannot_be_compared(command, three, tmp_path):
    part = next(p for p in sorted((tmp_path / "round").rglob("*")) if p.suffix == ".safetensors")
    content = bytearray(part.read_bytes())
    content[-5] ^= 0xFF
    part.write_bytes(content)
    done = command("compare", "a", "round")
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert part.name in done.err


def test_statistics_have_the_same_statuses_in_terminal_json_and_page(command, tmp_path):
    from tests.unit.internals.test_compare_statistics import NAMES, measured, near, tensors

    values = tensors()
    broken = {**values, NAMES[1]: values[NAMES[1]] * 1.01}
    measured(tmp_path / "a", values)
    measured(tmp_path / "near", near(values, 1e-7))
    measured(tmp_path / "broken", broken)
    measured(tmp_path / "less", {NAMES[0]: values[NAMES[0]]})
    measured(tmp_path / "other", {"encoder:output": values[NAMES[0]]})
    measured(tmp_path / "damaged", values)
    file = next((tmp_path / "damaged").glob("statistics-*"))
    file.write_text("{" + file.read_text())
    dumps.write(tmp_path / "dump", {n: Given(v, SEQUENCE) for n, v in values.items()}, mesh={"tp": 2})
    expected = {"a": (0, "equal"), "near": (0, INDISTINGUISHABLE)}
    expected |= {"broken": (1, "diverges"), "less": (2, "incomplete")}  # of one, which only A has
    for other, (status, verdict) in expected.items():
        done, shown = command("compare", "a", other, "--json"), command("compare", "a", other)
        assert (done.status, shown.status) == (status, status), (other, done.err)
        told = json.loads(done.out)
        assert (told["verdict"], told["exit_status"]) == (verdict, status)
        assert verdict in shown.out
        assert status != 2 or "--allow-missing" in shown.out
        assert status != 1 or any_names(shown.out.splitlines(), "diverges", NAMES[1])
        viewed = command("view", "a", other, "--out", "page.html")
        assert viewed.status == 0, viewed.err
        assert f'"{verdict}"' in (tmp_path / "page.html").read_text(), other
    for one, status in (("near", 0), ("broken", 1), ("less", 2)):
        assert command("compare", "dump", one).status == status, one
        assert command("compare", one, "dump", "--json").status == status, one
    for other in ("other", "damaged"):
        done = command("compare", "a", other)
        assert (done.status, done.out) == (2, ""), done
        assert_names(done.err.splitlines()[-1], "a", other)


def test_iterations_and_a_reference_on_the_command_line(command, three):
    assert command("compare", "a", "round", "--iterations", "10").status == 0
    assert command("compare", "a", "wrong", "--reference", "round").status == 1
    assert command("compare", "a", "round", "-i", "9:11").status == 0
    assert command("compare", "a", "round", "--iterations", "0:1000:10").status == 0
    for words, named in (("9,10", 9), ("x", "x"), ("5:3", "5:3"), ("11:19", "a")):
        done = command("compare", "a", "round", "--iterations", words)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert_names(done.err, named)


def test_an_estimate_of_flags_and_of_a_file_is_the_same(command, tmp_path):
    pytest.importorskip("megatron.core")
    words = [
        "estimate",
        "-s",
        FC1,
        "--world-size",
        16,
        "--iterations",
        1000,
        "--every",
        100,
        "--tokens",
        "::8",
    ]
    by_flags = command(*words, "--json", "--", *GPT)
    assert by_flags.status == 0
    told = json.loads(by_flags.out)
    whole = 16 * 128 // 8 * 256 * 2  # samples, kept tokens, features, bytes of bf16
    assert told["bytes"] == 4 * whole
    assert told["stages"] == [2 * whole] * 2
    assert told["total_bytes"] == 10 * told["bytes"]

    config = {k.removeprefix("--").replace("-", "_"): v for k, v in zip(GPT[:-1:2], GPT[1:-1:2], strict=True)}
    (tmp_path / "run.json").write_text(json.dumps({**config, "bf16": True}))
    by_file = command(*words, "--json", "--config", "run.json")
    assert json.loads(by_file.out) == told

    command.width(140)
    shown = command(*words, "--mesh", "pp=4", "--config", "run.json").out
    assert_names(shown, f"{FC1}:output", 0, 1, 2, 3)


def test_an_estimate_that_cannot_be_is_told_in_one_line(command):
    pytest.importorskip("megatron.core")
    for words, values in (
        (["-s", "decoder.layer.*"], ["decoder.layer.*"]),
        (["-s", FC1, "--mesh", "tp=x"], ["--mesh", "tp", "'x'"]),
        (["-s", FC1, "--tokens", "x"], ["--tokens 'x'"]),
        (["-s", FC1, "--config", "run.yaml"], ["--config FILE", "--"]),
    ):
        done = command("estimate", *words, "--", *GPT)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert_names(done.err, *values)


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (None, None),
        ("5", [5]),
        ("0,5", [0, 5]),
        ("::8", slice(None, None, 8)),
        ("4:16", slice(4, 16)),
        ("random:64", sampled(64)),
        ("0.1", 0.1),
    ],
)
def test_tokens_as_they_are_said(said, means):
    assert parse_token_setting(said) == means


@pytest.mark.parametrize("said", ["x", "1:2:3:4", "random:", "random:0", "1,,2", ""])
def test_tokens_that_cannot_be_said(said):
    with raises(FlexError, "--tokens", repr(said.removeprefix("random:"))):
        parse_token_setting(said)
