"""Docstrings of what people use describe every argument, and no argument that is not there."""

import pytest

from tests.support.docstrings import gaps, public_callables

pytest.importorskip("numpy")


def test_public_callables_describe_their_arguments() -> None:
    found = list(public_callables())
    assert len(found) > 150
    assert {"FlexModel.set_module_parameter", "edits.steer", "attach", "OpenDump.entries"} <= {
        n for n, _ in found
    }
    assert [line for name, value in found for line in gaps(name, value)] == []


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
