"""Dumps and pages for a browser: by Megatron itself on four ranks, from a configuration, damaged, hostile."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch

from tests.support import dumps, gpt
from tests.support.dumps import Given, random
from tests.support.gpt import Case
from tests.support.pool import run

TP2PP2 = Case("tp2 sp pp2", tp=2, pp=2, sp=True, layers=4)
ITERATIONS = 3
FC1 = "decoder.layers.*.mlp.linear_fc1"
PROBS = "decoder.layers.*.self_attention.core_attention:probs"
SITES = ("decoder.layers.*", FC1, PROBS, "loss:output")
PARAMETERS = ("decoder.final_layernorm.weight", "output_layer.weight")
WRONG = "decoder.layers.2.mlp.linear_fc2"  # what one of two runs scales
LARGE = [  # 16,384 ranks
    *("--num-layers", 100, "--hidden-size", 8192, "--num-attention-heads", 64, "--seq-length", 8192),
    *("--group-query-attention", "--num-query-groups", 8, "--swiglu", "--normalization", "RMSNorm"),
    *("--max-position-embeddings", 8192, "--micro-batch-size", 1, "--global-batch-size", 2048),
    *("--tensor-model-parallel-size", 8, "--pipeline-model-parallel-size", 4),
    *("--sequence-parallel", "--vocab-size", 128000, "--bf16"),
]  # fmt: skip
LARGE_RANKS, LARGE_LAYERS = 16_384, 100
HOSTILE = (
    "decoder.layers.0.<img src=x onerror=owned()>:output",
    "decoder.layers.1.</script><script>owned()</script>:output",
    "decoder.layers.2.\"'><svg onload=owned()>:output",
    "decoder.layers.3.${owned()}&lt;b&gt;\u2028<!--:output",
)


def train(case: Case, path: str, wrong: bool, page: str) -> None:
    """On each rank: some iterations with a dump; then, where one is wanted, the page of the live model."""
    import megatron_flex as mf
    from tests.support import ranks

    chunks = ranks.start(case)
    dump = mf.Dump(path, SITES, parameters=PARAMETERS, gradients=True)
    hooks = [mf.HookFunction(FC1, groups=("probe",))]
    if wrong:
        hooks.append(mf.HookFunction(WRONG, editing_function=mf.edits.scale(1.5)))
    with mf.attach(chunks, hooks, dumps=dump) as flex:
        for _ in range(ITERATIONS):
            flex.output_dict.clear()
            gpt.step(case, chunks, 0)
            with torch.no_grad():
                for parameter in (p for chunk in chunks for p in chunk.parameters()):
                    parameter.mul_(1.05)
        flex.remove_dump(dump)
        torch.distributed.barrier()
        if page:
            flex.report.to_html(page, dumps=[path])


def trained(folder: Path, *, wrong: bool = False, page: bool = False) -> Path:
    """A dump of TP2 x PP2 by Megatron, and its page beside it if that is wanted."""
    path = folder / "dump"
    run(TP2PP2.world, train, TP2PP2, str(path), wrong, str(folder / "page.html") if page else "")
    return path


def damaged(whole: Path, path: Path) -> Path:
    """A copy, of which iteration 1 has a wrong byte and iteration 2 lacks what a rank wrote."""
    shutil.copytree(whole, path)
    found = sorted((path / "run-0000" / f"{1:010d}").glob("*.safetensors"))[0]
    body = bytearray(found.read_bytes())
    body[-3] ^= 4
    found.write_bytes(bytes(body))
    sorted((path / "run-0000" / f"{2:010d}").glob("00003-*.safetensors"))[0].unlink()
    return path


def hostile(path: Path) -> Path:
    """A dump whose names are markup."""
    sites = {name: Given(random(2, 4, 8, 8, seed=n)) for n, name in enumerate(HOSTILE)}
    dumps.write(path, sites, mesh={"tp": 2}, iterations=[0, 1])
    return path


def broken(path: Path) -> Path:
    """A dump of six layers on one rank, each larger than the last; layer 3 has NaNs."""
    sites = {}
    for layer in range(6):
        value = random(2, 4, 8, 8, seed=layer) * (layer + 1)
        if layer == 3:
            value[:, 0, 0, 0] = float("nan")
        sites[f"decoder.layers.{layer}:output"] = Given(value)
        sites[f"decoder.layers.{layer}.mlp:output"] = Given(random(2, 4, 8, 8, seed=layer))
    dumps.write(path, sites, mesh={"tp": 1}, iterations=[0, 1])
    return path


MESHES = {
    "pp8": {"pp": 8},
    "pp16 dp128": {"pp": 16, "dp": 128},
    "pp16 dp1024": {"pp": 16, "dp": 1024},
    "tp8 pp8 dp4": {"pp": 8, "dp": 4, "tp": 8},
}
MESH_LAYERS = 32


def of_mesh(page: Path, sizes: dict[str, int]) -> Path:
    """A page of ranks, with a model of 32 layers."""
    from megatron_flex.estimate import TensorSizes
    from megatron_flex.estimate.site_estimates import estimate_sites
    from megatron_flex.page import Page, grid_of_sizes, write
    from megatron_flex.sites import Site

    grid = grid_of_sizes({"pp": 1, "dp": 1, "cp": 1, "tp": 1} | sizes)
    stages = sizes.get("pp", 1)
    sites = [
        Site(
            f"decoder.layers.{n}.mlp.linear_fc1:output",
            dumps.COLUMN,
            ("s", "b", 64),
            n * stages // MESH_LAYERS,
        )
        for n in range(MESH_LAYERS)
    ]
    sizes = TensorSizes(grid.sizes, {"s": 16, "b": 2}, lambda _: torch.bfloat16)
    estimates = estimate_sites(sites, sizes, grid.mesh())
    return write(Page("a mesh", grid, sites, estimates=estimates), page)


def empty(page: Path) -> Path:
    """A page of a dump of which nothing can be read."""
    from megatron_flex.page import Page, grid_of_sizes, write

    source = {
        "kind": "dump",
        "label": "A",
        "words": "a dump",
        "notes": [],
        "iterations": [],
        "names": [],
        "kinds": [],
    }
    tables: dict[str, object] = {"sites": [], "measures": {}, "state": [], "troubles": [], "texts": []}
    drawn: dict[str, object] = {"histograms": {}, "heats": {}, "attention": [], "lens": None, "lacks": {}}
    return write(Page("nothing", grid_of_sizes({}), (), data=[{**source, **tables, **drawn}]), page)


def viewed(page: Path, *words: object) -> Path:
    """The page that `megatron-flex view` makes. Paths are said from beside its folder: the same anywhere."""
    from megatron_flex.cli import main

    beside = page.parent.parent
    near = [os.path.relpath(w, beside) if isinstance(w, Path) else w for w in words]
    said = ["megatron-flex", "view", "--out", page, *near]
    with chdir(beside), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in said])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"{' '.join(map(str, said))}: status {ended.value.code}"
    return page
