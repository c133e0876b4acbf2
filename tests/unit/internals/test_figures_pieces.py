"""A logit lens that is computed in pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_flex import figures
from megatron_flex.figures import FigureError
from tests.support.dumps import NORM, WEIGHT, Given, write
from tests.support.messages import raises
from tests.unit.test_figures import MODEL, random, tell


def test_a_logit_lens_in_pieces_is_that_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flex.figures import lens_figure

    write(
        tmp_path,
        {"decoder.layers.0:output": Given(random(1, 2, 7, 6))},
        parameters={
            "decoder.final_layernorm.weight": Given(random(1, 6, seed=1), NORM),
            "output_layer.weight": Given(random(1, 12, 6, seed=2), WEIGHT),
        },
    )
    tell(tmp_path, MODEL)
    whole = figures.logit_lens(tmp_path, sample=1, top=20)
    assert whole.layers == (1,)
    assert whole.probabilities.shape == (1, 7, 12), "no more than there are"
    np.testing.assert_allclose(whole.probabilities.sum(-1), 1.0, rtol=1e-5)
    monkeypatch.setattr(lens_figure, "MAX_LOGITS", 25)  # two tokens at a time
    monkeypatch.setattr(lens_figure, "PIECE", 31)  # five words at a time
    pieces = figures.logit_lens(tmp_path, sample=1, top=20)
    np.testing.assert_allclose(pieces.probabilities, whole.probabilities, rtol=1e-5)
    assert np.array_equal(pieces.ids, whole.ids)
    with raises(FigureError, "positions=[0, 7]", "7"):
        figures.logit_lens(tmp_path, positions=[0, 7])
    with raises(FigureError, "positions=slice(7, None, None)", "7"):
        figures.logit_lens(tmp_path, positions=slice(7, None))
    with raises(FigureError, "top=0"):
        figures.logit_lens(tmp_path, top=0)
