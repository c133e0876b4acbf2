"""scripts/gpu: values, gradients and edits of every kind of hook point, against plain PyTorch on one process.

The truth is that of the tests (tests/support/oracle.py), which goes through nothing of the library, on the
same device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import Findings
from gpu_part import alone, prepare

from tests.distributed import matrix
from tests.distributed.matrix import Cell
from tests.support import oracle
from tests.support.gpt import Case

FP32 = matrix.BOUND
EPS = 2.0**-8  # of bf16: a rounding errs by half of it
SUMMANDS = 2  # of a gradient where the residual stream forks, twice in each layer forward and backward
HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
RANKS = 2
SECONDS = 170  # for the ranks of one case
SAME_KERNELS = (
    "Values must have the same bits: the same kernels run on the same device, and nothing is computed on a "
    "tensor's way to the reader. Gradients and edits may differ by "
)
WHY_FP32 = (
    f"{SAME_KERNELS}{FP32:g} of the greatest entry: fp32, where a hook's tensor has a second path of "
    "gradients these are summed in another order. TF32 is off, deterministic algorithms are on where torch "
    "has them."
)
WHY_BF16 = (
    f"{SAME_KERNELS}the roundings of bf16 where the residual stream forks, twice in each layer forward and "
    "backward: the two summands and their sum err by half an eps (1/256) each, of the greatest entry. It is "
    "the bound of the tests in bf16 (tests/distributed/test_precision.py)."
)
WHY_RANKS = (
    f"Everything may differ by {FP32:g} of the greatest entry: fp32, summed in another order. Both ranks "
    "share one device and talk by gloo, which goes through the host: this proves values, and says nothing of "
    "speed or of NCCL."
)


def cases(device: str, **extra: Any) -> list[Case]:
    """Models that together have every kind of hook point that Megatron's own layers have."""
    size = 2 if device == "cuda" else 1
    common: dict[str, Any] = {"layers": size, "microbatches": size, "device": device, "extra": extra}
    return [
        Case("gpt", qk_norm=True, **common),
        Case("gpt, biases, tied", gated=False, rms=False, rope=False, bias=True, tied=True, **common),
        Case("experts", experts=4, shared_experts=True, **common),
    ]


def values(device: str) -> Findings:
    """fp32."""
    return _against_plain(cases(device), FP32, WHY_FP32)


def bf16(device: str) -> Findings:
    """The same in bf16."""
    models = cases(device, **HALF)
    return _against_plain(models, models[0].layers * (2 + 2) * (SUMMANDS + 1) * EPS / 2, WHY_BF16)


def two_ranks(device: str) -> Findings:
    """Tensor parallel over two processes on one device."""
    findings = Findings(notes=[WHY_RANKS])
    alone()
    common: dict[str, Any] = {"layers": 1, "microbatches": 1, "device": device, "tp": RANKS}
    for case in (Case("tp2", **common), Case("tp2 sp", sp=True, **common)):
        sites, edits = oracle.sites_of(case), _some_edits()
        try:
            truth = _on_host(_truth(case.single(), sites, edits))
            answers = _ranks(case, truth["state"], sites, edits)
            cells = matrix.cells_of(case, sites, edits, truth, answers)
        except Exception as error:
            _failed(findings, case, error)
            continue
        judge(findings, case, cells, FP32, FP32)
    return findings


def judge(findings: Findings, case: Case, cells: Iterable[Cell], values: float, others: float) -> None:
    """Check each kind of cell by its worst, and name those that are beyond their bound.

    Args:
        findings: to be added to.
        case: the configuration.
        cells: of it.
        values: the bound of what is read.
        others: the bound of gradients and of what edits do.
    """
    kinds: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if not cell.hidden:
            kinds[cell.check].append(cell)
    rows = []
    for kind, found in kinds.items():
        worst, bound = max(c.error for c in found), values if kind == "value" else others
        far = [c.site for c in found if not c.error <= bound]
        named = f": {', '.join(far[:5])}" if far else ""
        findings.at_most(f"{case.name}, {kind}, {len(found)} compared{named}", worst, bound)
        same = sum(c.error == 0 for c in found)
        rows.append([kind, str(len(found)), str(same), f"{worst:.1e}", f"{bound:g}"])
    findings.holds(f"{case.name}: something was compared", bool(rows))
    findings.table(case.name, ["what", "compared", "same bits", "greatest difference", "bound"], rows)


def _against_plain(models: list[Case], bound: float, why: str) -> Findings:
    findings = Findings(notes=[why])
    alone()
    for case in models:
        sites, edits = oracle.sites_of(case), oracle.edits_of(case)
        try:
            truth = _truth(case, sites, edits)
            _forget_groups()
            answer = _on_host(matrix.sharded(case, truth["state"], sites, edits))
            cells = matrix.cells_of(case, sites, edits, _on_host(truth), [answer])
        except Exception as error:
            _failed(findings, case, error)
            continue
        finally:
            _forget_groups()
        judge(findings, case, cells, 0.0, bound)
    return findings


def _failed(findings: Findings, case: Case, error: Exception) -> None:
    # one model that cannot run must not hide what the others show
    findings.holds(f"{case.name}: it runs ({type(error).__name__}: {str(error)[-600:]})", False)


def _truth(case: Case, sites: list[str], edits: list[str]) -> Any:
    _forget_groups()
    return oracle.run(case, sites, edits)


def _forget_groups() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def _on_host(found: Any) -> Any:
    """The same with all tensors on the CPU; only there do both sides lie on one device."""
    return torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, found)


def _some_edits() -> list[str]:
    """One of each layout: sharded features, the residual stream, heads."""
    at = "decoder.layers.0"
    return [f"{at}.mlp.linear_fc1:output", f"{at}:output", f"{at}.self_attention.core_attention:q"]


def _ranks(case: Case, state: Any, sites: list[str], edits: list[str]) -> list[Any]:
    """What each rank of a case answers, from processes of their own.

    Raises:
        RuntimeError: one of them failed, or did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        torch.save((case, state, sites, edits), place / "task")
        command = [sys.executable, __file__, folder]
        logs = [(place / f"log{rank}").open("wb") for rank in range(RANKS)]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env={**os.environ, "RANK": str(rank)}, stdout=log, stderr=log
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for process, log in zip(processes, logs, strict=True):
                process.kill()
                process.wait()
                log.close()
        if any(codes):
            ends = [(place / f"log{r}").read_text(errors="replace")[-1500:] for r in range(RANKS)]
            raise RuntimeError(f"the ranks ended with {codes}: " + "\n---\n".join(ends))
        return [torch.load(place / f"answer{r}", weights_only=False) for r in range(RANKS)]


def _rank(folder: str, rank: int) -> None:
    place = Path(folder)
    case, state, sites, edits = torch.load(place / "task", weights_only=False)
    prepare(case.device)
    store = dist.FileStore(str(place / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
    )
    answer = _on_host(matrix.sharded(case, state, sites, edits))
    torch.save(answer, place / f"answer{rank}")
    dist.barrier()
    os._exit(0)  # connections of groups that the peer still has need not be taken down in order


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
