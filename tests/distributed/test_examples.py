"""The examples in docstrings run as they are written, and print what they claim to print."""

import pytest

from tests.support import examples
from tests.support.examples import Example
from tests.support.pool import run_alone

# Estimates refuse a process that has process groups, which every rank of a pool has.
ESTIMATES = "megatron_flex.estimate.configuration."


def test_examples_run() -> None:
    for module in (
        "megatron.core",
        "transformers",
        "safetensors",
        "matplotlib",
        "pandas",
        "rich",
        "pydantic",
    ):
        pytest.importorskip(module)
    on_a_rank = [e for e in examples.collect() if not e.name.startswith(ESTIMATES)]
    assert len(on_a_rank) > 250
    (failures,) = run_alone(1, examples.run_on_rank, examples.ONE, on_a_rank, timeout=300)
    assert "\n".join(failures) == ""


def test_examples_of_estimates_run() -> None:
    pytest.importorskip("megatron.training")
    found = [e for e in examples.collect() if e.name.startswith(ESTIMATES)]
    assert [e.name.removeprefix(ESTIMATES) for e in found] == ["estimate_dump", "estimate_hooks"]
    assert "\n".join(examples.run_without_groups(found)) == ""


def test_wrong_examples_are_noticed() -> None:
    wrong = [
        Example("output", ">>> 1 + 1\n3\n"),
        Example("output within a block", '>>> with flex.step():\n...     "ready"\n'),
        Example("error", ">>> flex.sites('nothing')\n"),
        Example("no statement", "Use it.\n"),
        Example("right", ">>> flex.restore() is chunks\nTrue\n"),
    ]
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    (failures,) = run_alone(1, examples.run_on_rank, examples.ONE, wrong, timeout=120)
    for example, failure in zip(wrong[:-1], failures, strict=True):
        assert example.name in failure
