"""Docstrings of what people use describe arguments and results, and have an example."""

import re
from collections.abc import Iterator

import pytest

from tests.support import examples
from tests.support.docstrings import (
    CALLED_BY,
    documented,
    example_gap,
    gaps,
    public_callables,
    raises_gap,
    result_gap,
)

pytest.importorskip("numpy")


def test_public_callables_describe_their_arguments() -> None:
    found = list(public_callables())
    assert len(found) > 150
    assert {"FlexModel.set_module_parameter", "edits.steer", "attach", "OpenDump.entries"} <= {
        n for n, _ in found
    }
    assert [line for name, value in found for line in gaps(name, value)] == []


def test_public_callables_have_examples_and_say_what_they_return() -> None:
    found = documented()
    assert len(found) > 300
    assert {"FlexModel.step", "model.Interp.trace", "lens.FullWeights.of", "handles.Handle"} <= set(found)
    assert [line for name, value in found.items() if (line := example_gap(name, value))] == []
    assert [line for name, value in found.items() if (line := result_gap(name, value))] == []
    for why, names in CALLED_BY.items():
        assert any(names.fullmatch(name) for name in found), f"no callable is left of which {why}"


def test_public_callables_say_what_they_raise() -> None:
    found = {n: v for n, v in documented().items() if not any(p.fullmatch(n) for p in CALLED_BY.values())}
    assert [line for name, value in found.items() if (line := raises_gap(name, value))] == []


def test_undocumented_errors_are_noticed() -> None:
    def bare(count: int) -> None:
        """Count."""
        if count < 0:
            raise ValueError(f"{count} is below 0")

    def described(count: int) -> None:
        """Count.

        Raises:
            ValueError: `count` is below 0.
        """
        if count < 0:
            raise ValueError(f"{count} is below 0")

    def inner() -> None:
        """Return."""

        def later() -> None:
            raise ValueError("later")

        later()

    assert raises_gap("bare", bare) == "bare raises ValueError, and has no section Raises"
    assert raises_gap("described", described) == raises_gap("inner", inner) == ""


def test_examples_have_one_form() -> None:
    found = dict(examples.docstrings())
    assert len(found) > 2000
    other = [name for name, text in found.items() if re.search(r"^Examples?::?$", text, re.MULTILINE)]
    assert sorted(set(other) - {e.name for e in examples.collect()}) == [], "write Examples: and >>>"


def test_gaps_are_noticed() -> None:
    def bare(a: int, b: int) -> None: ...

    def half(a: int, b: int, *more: int) -> None:
        """Do something.

        Args:
            a: the first.
            *more: others.
            c: a former argument.
        """

    def inline(one: int) -> None:
        """Return it."""

    def named(one: int, two: int) -> None:
        """Put `one` on `two`."""

    assert gaps("bare", bare) == ["bare has no docstring"]
    assert gaps("half", half) == ["half has no argument c", "half: b is not described"]
    assert gaps("inline", inline) == gaps("named", named) == []


def test_missing_examples_and_results_are_noticed() -> None:
    def bare() -> int:
        """Count.

        Examples:
            In a notebook: `bare()`.
        """

    def promised() -> Iterator[int]:
        """Count.

        Returns:
            Numbers.

        Examples:
            >>> promised()
        """

    def nothing() -> None:
        """Do it.

        Example:
            >>> nothing()
        """

    assert example_gap("bare", bare).startswith("bare has no example")
    assert example_gap("nothing", nothing).startswith("nothing has no example")
    assert result_gap("bare", bare).startswith("bare returns")
    assert example_gap("promised", promised) == result_gap("promised", promised) == ""
    assert result_gap("nothing", nothing) == ""
