"""A notebook that is run, by a kernel: what stands at the end of a cell is shown as HTML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import dumps, measured
from tests.support.dumps import COLUMN, Given, random
from tests.support.markup import Shown

# Environments of older versions of Megatron have no notebooks; that of the newest, which CI makes, does.
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("megatron.core")

ROOT = Path(__file__).parents[2]
FC1 = "decoder.layers.0.mlp.linear_fc1:output"
CELLS = {  # code -> something that its last line shows
    """
import torch.distributed as dist
import megatron_flex as mf
from tests.support import gpt, ranks

dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
case = gpt.Case("one", layers=2)
chunks = ranks.start(case)
flex = mf.FlexModel(chunks)
flex.register_forward_hook(mf.HookFunction("decoder.layers.0.mlp.linear_fc1", groups=["probe"]))
flex
""": "linear_fc1",
    'flex.sites("decoder.layers.0.mlp.*")': FC1,
    "flex.sites(decoder_fc1)[0].layout": "gate|up",
    "gpt.step(case, chunks, 0)\nflex.output_dict[decoder_fc1.removesuffix(':output')][0].shape": "",
    'mf.open_dump(f"{folder}/dump")': "decoder.layers.0:output",
    'mf.open_dump(f"{folder}/dump")["decoder.layers.0:output"]': "iteration",
    'mf.open_statistics(f"{folder}/statistics")': "decoder.layers",
    'from megatron_flex.compare import compare\ncompare(f"{folder}/dump", f"{folder}/dump")': "equal",
}


def test_a_notebook_shows_what_is_at_the_end_of_a_cell(tmp_path: Path) -> None:
    dumps.write(tmp_path / "dump", {"decoder.layers.0:output": Given(random(2, 2, 4, 8), COLUMN)})
    measured.write(tmp_path / "statistics", range(3))
    book = nbformat.v4.new_notebook()
    first = f"folder, decoder_fc1 = {str(tmp_path)!r}, {FC1!r}"
    book.cells = [nbformat.v4.new_code_cell(code) for code in (first, *CELLS)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    client = nbclient.NotebookClient(book, timeout=120, kernel_name="python3")
    client.execute(env=os.environ | {"PYTHONPATH": path})
    for cell, wanted in zip(book.cells[1:], CELLS.values(), strict=True):
        (shown,) = [out["data"] for out in cell.outputs if out["output_type"] == "execute_result"]
        assert_shown(shown, wanted)


def assert_shown(data: dict[str, Any], wanted: str) -> None:
    """HTML without anything but markup, which says what is wanted; where nothing is, text alone."""
    if not wanted:
        assert data["text/plain"].startswith("torch.Size")
        assert "text/html" not in data
        return
    assert wanted in Shown(data["text/html"]).text
