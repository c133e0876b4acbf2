"""Assertions on errors, warnings and texts: by class, attributes and the values that a message names.

A test never repeats a sentence, so a message can be reworded without an edit of a test. What a message
must keep are the values: names of hook points and files, ranks, shapes, arguments, flags, and the call that
is the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MAX_ERROR_LENGTH = 500  # characters of one error


def missing_values(text: str, *values: object) -> list[str]:
    """The values that a text does not name. A value is found as a whole word: 3 is not found in 13 or 3.5."""
    return [str(v) for v in values if not re.search(rf"(?<![\w.]){re.escape(str(v))}(?!\w|\.\d)", text)]


def assert_names(text: object, *values: object) -> None:
    """Assert that a text, such as an error or a command's output, names each value."""
    absent = missing_values(str(text), *values)
    assert not absent, f"{absent} not named in: {text}"


def any_names(texts: Iterable[object], *values: object) -> bool:
    """Whether one of the texts, such as notes or lines of output, names all of the values."""
    return any(not missing_values(str(text), *values) for text in texts)


@contextmanager
def raises(
    kind: type[BaseException], *values: object, **attributes: Any
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Assert that the block raises `kind`, naming each value, in one line of at most 500 characters.

    Args:
        kind: the class of the error.
        values: what the message names: a hook point, a rank, an argument, a shape, the remedy's call.
        attributes: attributes of the error and their values, such as `site="decoder.layers.0:output"`.
    """
    with pytest.raises(kind) as raised:
        yield raised
    text = str(raised.value)
    assert_names(text, *values)
    assert "\n" not in text, text
    assert len(text) <= MAX_ERROR_LENGTH, f"{len(text)} characters: {text}"
    for name, value in attributes.items():
        assert getattr(raised.value, name) == value, f"{name} is {getattr(raised.value, name)!r}: {text}"


@contextmanager
def warns(kind: type[Warning], *values: object) -> Iterator[pytest.WarningsRecorder]:
    """Assert that the block issues a warning of `kind` that names each value."""
    with pytest.warns(kind) as recorded:
        yield recorded
    texts = [str(w.message) for w in recorded if issubclass(w.category, kind)]
    assert any(not missing_values(t, *values) for t in texts), f"none names {values}: {texts}"
