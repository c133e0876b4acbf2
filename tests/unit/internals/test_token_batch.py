"""The tokens of an alignment: padding goes to the end, and bad masks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flex.alignment.token_batch import prepare_batch
from megatron_flex.errors import FlexError
from tests.support.messages import raises


def test_padding_is_moved_to_the_end() -> None:
    ids = torch.tensor([[9, 9, 1, 2, 3], [4, 5, 6, 9, 9]])
    found = prepare_batch({"input_ids": ids, "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]}, 4)
    assert found.tokens[:, :3].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.real.tolist() == [[True] * 3 + [False] * 5] * 2
    assert len(found.notes) == 3


def test_tokens_alone_stay_as_they_are() -> None:
    ids = torch.arange(8).reshape(2, 4)
    found = prepare_batch(ids, 2)
    assert torch.equal(found.tokens, ids)
    assert bool(found.real.all())
    assert found.notes == ()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"labels": [[1]]}, ("labels", "input_ids")),
        (torch.ones(3), ("(3,)",)),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, ("(1, 1)", "input_ids (1, 2)")),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, ("attention_mask", 0)),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [0, 0]]}, ("attention_mask", 1)),
    ],
)
def test_bad_batches_are_refused(batch: Any, words: tuple[object, ...]) -> None:
    with raises(FlexError, *words):
        prepare_batch(batch, 1)
