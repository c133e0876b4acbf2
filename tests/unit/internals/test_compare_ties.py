"""Tied tokens against bounds that are given here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flex.compare.tensor_tests import TensorTester
from tests.support.messages import any_names
from tests.unit.internals.test_compare_rerouted import off_by
from tests.unit.test_compare_routing import IN_BF16, MLP, compared


@pytest.mark.parametrize(("tokens", "status"), [(2, 0), (8, 1)])
def test_tied_tokens_below_the_bound_of_a_token_may_exceed_that_of_the_norm_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, status: int
) -> None:
    monkeypatch.setattr(TensorTester, "_bounds", lambda *_: (0.02, 0.25))
    value, other = off_by([0.19] * tokens)
    found = compared(tmp_path, {MLP: value}, {MLP: other}, IN_BF16)
    assert found.exit_status == status, str(found)
    assert any_names(found.notes, MLP, "2 of 128") is (status == 0)
