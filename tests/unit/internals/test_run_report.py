"""The report of a launched run: its first line, the command."""

import pytest

from megatron_flex.launch.run_report import RunReport, hide_secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--wandb-api-key=abc --lr 1", "--wandb-api-key=*** --lr 1"),
        ("--hf-token abc --lr 1", "--hf-token *** --lr 1"),
        ("--password abc def --lr 1", "--password *** --lr 1"),
        ("-secret -abc --lr 1", "-secret *** --lr 1"),
        ("HF_TOKEN=abc --DB_PASSWORD abc", "HF_TOKEN=*** --DB_PASSWORD ***"),
        ("--tokenizer-model m --max-tokens 5 --moe-token-dispatcher-type alltoall",) * 2,
        ("--group-query-attention --seq-length 8 --apply-query-key-layer-scaling",) * 2,
        ("--auth-token --lr 1", "--auth-token --lr 1"),
    ],
)
def test_values_of_flags_that_look_like_secrets_are_hidden(words: str, shown: str) -> None:
    assert hide_secrets(words.split()) == shown


def test_a_report_does_not_have_the_secrets_of_the_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "abc123", "--lr", "1"])
    report = RunReport(tmp_path / "report.txt")
    report.note("a line")
    text = (tmp_path / "report.txt").read_text()
    assert "train.py" in text
    assert "--lr 1" in text
    assert "abc123" not in text
