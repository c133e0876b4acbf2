"""Rollouts beside dumps: how requests are found, what is compared, and bad input in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_flex.dump.json_form import load_json
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.rollout import compare_rollout
from tests.support import dumps, rollouts
from tests.support.commands import Command
from tests.support.dumps import Given
from tests.support.messages import assert_names, raises
from tests.support.pages import ROOT, mine

SAMPLES, TOKENS, WORDS, WIDTH = 4, 12, 16, 8
IDS, LOGITS, LOSS, LAYER = rollouts.SITES[0], "output_layer:output", "loss:output", "decoder.layers.{}:output"
SHARDED = Layout((Dim("s"), Dim("b"), Dim("v", (Cut("tp"),))))
STREAM = Layout((Dim("s"), Dim("b"), Dim("h")))
PLAIN = Layout((Dim("b"), Dim("s")))
MODEL = {"num_layers": 2, "hidden_size": WIDTH}


class Data:
    """Random tokens, logits and hidden states of a training run."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=generator)
        self.logits = torch.randn(SAMPLES, TOKENS, WORDS, generator=generator)
        self.hidden = torch.randn(2, SAMPLES, TOKENS, WIDTH, generator=generator)
        self.logprobs = rollouts.score(self.tokens, self.logits)

    def write(self, path: Path, *sites: str) -> Path:
        """A dump of two ranks with these hook points, or all."""
        losses = torch.cat([-self.logprobs, torch.ones(SAMPLES, 1)], 1)
        given = {
            IDS: Given(self.tokens[None], PLAIN),
            **{LAYER.format(n): Given(states[None], STREAM) for n, states in enumerate(self.hidden)},
            LOGITS: Given(self.logits[None], SHARDED),
            LOSS: Given(losses[None], PLAIN),
        }
        chosen = {name: given[name] for name in sites or given}
        dumps.write(path, chosen, mesh={"tp": 2}, microbatches=2, model=MODEL, order="blocks")
        return path

    def write_rows(self, path: Path, change: Callable[[list[dict[str, Any]]], object] = len) -> Path:
        """The table of a rollout with a change."""
        rollouts.write_table(path, self.tokens, self.logprobs)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def write_hidden(self, folder: Path, states: Tensor | None = None) -> Path:
        """vLLM's files, of the layers 1 and 2."""
        folder.mkdir()
        for number, tokens in enumerate(self.tokens):
            given = (self.hidden if states is None else states)[:, number].transpose(0, 1).contiguous()
            save_file(
                {"hidden_states": given, "token_ids": tokens.clone()}, folder / f"r{number}.safetensors"
            )
        return folder


@pytest.fixture(scope="module")
def data() -> Data:
    return Data()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_logits_and_losses_give_the_same_log_probabilities(data: Data, tmp_path: Path) -> None:
    table = data.write_rows(tmp_path / "rollout.jsonl")
    for sites in ((IDS, LOGITS), (IDS, LOSS)):
        found = compare_rollout(table, data.write(tmp_path / sites[1], *sites))
        assert (found.exit_status, found.compared, found.beyond) == (0, SAMPLES * (TOKENS - 1), 0)
        assert abs(found.greatest.difference) < 1e-6


def test_parquet_and_json_lines_are_the_same_table(data: Data, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = data.write_rows(tmp_path / "rollout.jsonl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rollout.parquet")
    dump = data.write(tmp_path / "dump")
    one, other = (compare_rollout(tmp_path / f"rollout.{kind}", dump) for kind in ("jsonl", "parquet"))
    assert (one.tokens, one.uncompared) == (other.tokens, other.uncompared)
    assert one.compared == SAMPLES * (TOKENS - 1)


def test_one_token_that_differs_is_the_first_and_the_greatest(data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[2 * TOKENS + 7]["logprob"] -= 0.5

    found = compare_rollout(data.write_rows(tmp_path / "r.jsonl", change), data.write(tmp_path / "dump"))
    assert (found.exit_status, found.beyond, found.first) == (1, 1, found.greatest)
    assert found.first[:3] == ("r2", 7, int(data.tokens[2, 7]))
    assert found.first.difference == pytest.approx(0.5, abs=1e-5)
    assert found.causes == ()


def test_tokens_after_a_jump_are_held_to_the_noise_before_it(data: Data, tmp_path: Path) -> None:
    dump, later = data.write(tmp_path / "dump"), 3 * TOKENS + 2
    clean = compare_rollout(data.write_rows(tmp_path / "clean.jsonl"), dump)
    (bound,) = [token.bound for token in clean.tokens if token[:2] == ("r3", 2)]

    def change(rows: list[dict[str, Any]]) -> None:
        rows[2 * TOKENS + 7]["logprob"] -= 0.5
        rows[later]["logprob"] -= 1.3 * bound

    found = compare_rollout(data.write_rows(tmp_path / "r.jsonl", change), dump)
    assert [token[:2] for token in found.tokens] == [("r2", 7), ("r3", 2)]


def test_a_token_that_differs_ends_the_comparison_of_its_request(data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[TOKENS + 8]["token"] = (rows[TOKENS + 8]["token"] + 1) % WORDS

    found = compare_rollout(data.write_rows(tmp_path / "r.jsonl", change), data.write(tmp_path / "dump"))
    assert [cause.name for cause in found.causes] == ["tokens differ"]
    assert_names(found.causes[0].text, "r1", 8, int(data.tokens[1, 8]))
    assert found.compared == SAMPLES * (TOKENS - 1) - 4
    assert sum(found.uncompared.values()) == SAMPLES + 4


def test_requests_of_another_prompt_are_not_compared(data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows[:TOKENS]:
            row["token"] = (row["token"] * 7 + 3) % WORDS

    found = compare_rollout(data.write_rows(tmp_path / "r.jsonl", change), data.write(tmp_path / "dump"))
    assert [cause.name for cause in found.causes] == ["tokens differ"]
    assert found.compared == (SAMPLES - 1) * (TOKENS - 1)


def test_responses_alone_are_found_in_any_order(data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in reversed(rows) if row["position"] >= 5]

    found = compare_rollout(data.write_rows(tmp_path / "r.jsonl", change), data.write(tmp_path / "dump"))
    assert (found.exit_status, found.compared) == (0, SAMPLES * (TOKENS - 5))


def test_a_log_probability_after_the_last_token_needs_logits(data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        value = float(data.logits[0, -1].log_softmax(-1)[3])
        rows.append({"request": "r0", "position": TOKENS, "token": 3, "logprob": value})

    table = data.write_rows(tmp_path / "r.jsonl", change)
    for sites, more in (((IDS, LOGITS), 1), ((IDS, LOSS), 0)):
        found = compare_rollout(table, data.write(tmp_path / sites[1], *sites))
        assert (found.exit_status, found.compared) == (0, SAMPLES * (TOKENS - 1) + more)


def test_logits_of_the_padding_are_left_out(data: Data, tmp_path: Path) -> None:
    padded = Data()
    padded.logits = torch.cat([padded.logits, torch.full((SAMPLES, TOKENS, 4), 2.0)], -1)
    dump = padded.write(tmp_path / "dump", IDS, LOGITS)
    table = data.write_rows(tmp_path / "r.jsonl")
    assert compare_rollout(table, dump).exit_status == 1
    assert compare_rollout(table, dump, vocabulary=WORDS).exit_status == 0


def test_hidden_states_of_one_request_that_differ_are_named(data: Data, tmp_path: Path) -> None:
    states = data.hidden.clone()
    states[1, 2, 5] *= 1.01
    hidden = data.write_hidden(tmp_path / "hidden", states)
    table, dump = data.write_rows(tmp_path / "r.jsonl"), data.write(tmp_path / "dump")
    found = compare_rollout(table, dump, hidden=hidden, layers=[1, 2])
    assert (found.exit_status, found.beyond) == (1, 0)
    assert found.site[:4] == (LAYER.format(1), 2, "r2", 5)
    assert found.site.error == pytest.approx(0.01, rel=1e-3)
    swapped = compare_rollout(table, dump, hidden=hidden, layers=[2, 1])
    assert swapped.site[:2] == (LAYER.format(0), 1), "the files are in the order of the layers that are named"


def test_the_command_prints_the_result(command: Command, data: Data, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[7]["logprob"] -= 0.5

    data.write(tmp_path / "dump")
    command.width(160)
    data.write_rows(tmp_path / "bad.jsonl", change)
    data.write_rows(tmp_path / "good.jsonl")
    data.write_hidden(tmp_path / "hidden")
    done = command("rollout", "bad.jsonl", "dump")
    assert done.status == 1, done.err
    assert_names(done.out, "r0", 7, int(data.tokens[0, 7]), "0.5", "k1", "k3")
    done = command("rollout", "good.jsonl", "dump", "--hidden", "hidden", "--layers", "1:3", "--json")
    assert done.status == 0, done.err
    assert load_json(done.out)["compared"] == SAMPLES * (TOKENS - 1)
    assert list(load_json(done.out)["layers"]) == [LAYER.format(0), LAYER.format(1)]


def set_row(column: str, value: object) -> Callable[[list[dict[str, Any]]], object]:
    return lambda rows: rows[5].update({column: value})


BAD_ROWS: dict[str, tuple[Callable[[list[dict[str, Any]]], object], tuple[object, ...]]] = {
    "no position": (lambda rows: rows[5].pop("position"), ("position", 6)),
    "a position twice": (set_row("position", 4), ("r0", 4)),
    "a positive log-probability": (set_row("logprob", 0.25), ("logprob", 0.25)),
    "no number": (set_row("logprob", float("nan")), ("logprob", "nan")),
    "a token that is text": (set_row("token", "the"), ("token", "'the'")),
    "a negative position": (set_row("position", -1), ("position", -1)),
    "no rows": (lambda rows: rows.clear(), ("rows",)),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_table_that_cannot_be_read_is_one_line(name: str, data: Data, tmp_path: Path) -> None:
    change, named = BAD_ROWS[name]
    table = data.write_rows(tmp_path / "r.jsonl", change)
    with raises(FlexError, *named):
        compare_rollout(table, data.write(tmp_path / "dump"))


def test_bad_input_is_one_line(
    command: Command, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, dump = data.write_rows(tmp_path / "r.jsonl"), data.write(tmp_path / "dump")
    (tmp_path / "r.csv").write_text("request,position\n")
    data.write(tmp_path / "no-ids", LOGITS)
    data.write(tmp_path / "no-logits", IDS)
    data.write(tmp_path / "losses", IDS, LOSS)
    data.write_hidden(tmp_path / "hidden")
    data.write_hidden(tmp_path / "wide", torch.randn(2, SAMPLES, TOKENS, WIDTH + 1))
    other = Data()
    other.tokens = other.tokens.flip(1)
    other.write_hidden(tmp_path / "other")
    states = ("--hidden", "hidden", "--layers")
    cases: dict[tuple[object, ...], tuple[object, ...]] = {
        ("r.csv", dump): ("r.csv", ".jsonl", ".parquet"),
        ("none.jsonl", dump): ("none.jsonl",),
        (table, tmp_path / "no-ids"): (IDS,),
        (table, tmp_path / "no-logits"): (LOGITS, LOSS),
        (table, tmp_path / "losses", "--temperature", "0.7"): (0.7, LOGITS),
        (table, dump, "--temperature", "0"): ("temperature", 0),
        (table, dump, "--iteration", "3"): (3,),
        (table, dump, "--vocabulary", WORDS + 1): (WORDS, WORDS + 1),
        (table, dump, "--dtype", "int8"): ("int8", "bf16"),
        (table, dump, "--layers", "1,2"): ("[1, 2]",),
        (table, dump, *states, "1"): ("r0.safetensors", 2, 1),
        (table, dump, *states, "2,3"): (3, 2),
        (table, dump, *states, "0,1"): ("embedding:output",),
        (table, dump, "--hidden", "wide", "--layers", "1,2"): (WIDTH, WIDTH + 1, LAYER.format(0)),
        (table, dump, "--hidden", "other", "--layers", "1,2"): ("r0.safetensors", int(data.tokens[0, 0])),
        (table, dump, "--hidden", "no-ids", "--layers", "1,2"): ("no-ids",),
    }

    def refuse(*given: Any, **more: Any) -> None:
        raise AssertionError("logits were read")

    monkeypatch.setattr("megatron_flex.rollout.training_dump.TrainingDump.read_logprobs", refuse)
    for words, named in cases.items():
        done = command("rollout", *words)
        assert done.status == 2, (words, done.err)
        assert done.err.count("\n") == 1, done.err
        assert_names(done.err, *named)


def test_the_page_on_rollouts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "rollout.md"
    (table,), (code,) = mine(page, "text"), mine(page)
    monkeypatch.chdir(tmp_path)
    Path("rollout.jsonl").write_text(table)
    rows = [json.loads(line) for line in table.splitlines()]
    data = Data()
    data.tokens[0, : len(rows)] = torch.tensor([row["token"] for row in rows])
    data.logits[0] = 0.0
    data.write(tmp_path / "dump")
    printed: list[str] = []
    exec(code, {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    verdict, causes = printed
    assert verdict.startswith("diverges 2 TokenDifference(request='a', position=2, token=7")
    d = torch.tensor([0.0, -torch.log(torch.tensor(16.0)) - rows[2]["logprob"]], dtype=torch.float64)
    assert causes == f"[] {float((d.exp() - 1 - d).mean()):.3f}"
