"""The page of scripts/gpu: a pure function of what its parts found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_defects import DECIDED, DEFECTS

SHOWN = 20  # failing checks of a part
NONE = "**No GPU has run this yet.** If you have one, run `scripts/gpu` first."
OF_A_CPU = (
    "**These figures are of a CPU.** They show that the command works, and nothing about a GPU: no GPU has "
    "run this."
)
OF_A_GPU = "Run on one {name}."
TRANSFORMER_ENGINE = (
    (
        "GPT: tensor, sequence and pipeline parallel, recomputed by Megatron or Transformer Engine",
        "values, gradients, edits, parameters",
    ),
    (
        "Multi-latent attention; attention and MLP, Mamba and gated delta net layers of HybridModel",
        "the same",
    ),
    (
        "Experts, one by one and grouped, expert parallel",
        "the same; the tensors between grouped linears against one process of Transformer Engine",
    ),
    (
        "Operation fuser (`TEFusedMLP`)",
        "the same; what is inside is hidden, and no hook of a session is copied into it",
    ),
    ("`--fused-residual-rmsnorm`", "the same; an edit before the norm leaves the residual stream alone"),
    ("Tensors of 8 bits", "read dequantized; edits are left out with a warning"),
    ("`--moe-single-grouped-weight`", "the weight is listed and not read"),
)
UNVERIFIED = (
    (
        "Hook points of Transformer Engine's layers",
        "Transformer Engine's kernels; the tests run its Python on plain torch",
    ),
    ("Older releases of Transformer Engine", "their Python in the tests"),
    ("fp8 and fp4", "Transformer Engine"),
    (
        "Attention inside flash and fused kernels, and the errors that name them",
        "Transformer Engine, flash-attn",
    ),
    ("Grouped experts (`--moe-grouped-gemm`)", "Transformer Engine or grouped_gemm"),
    ("Collectives of reads, edits and gradients over NCCL", "NCCL, which needs a GPU for each rank"),
    (
        "Tensor, sequence, context, pipeline, expert and data parallel ranks on GPUs of their own",
        "several GPUs",
    ),
    ("Reads through shared memory by ranks on several GPUs of a node", "several GPUs"),
    ("Overlap of copies and sums with NCCL's streams", "several GPUs"),
    ("Groups of a part of a job's ranks beside a bound communicator", "NCCL, three GPUs"),
    (
        "How long registering shared memory takes, which is in the first passes that capture",
        "a GPU, and several ranks on its node",
    ),
    ("Host time of a capture, and memory that copies occupy on the device", "a GPU"),
    ("Many ranks at the store and at the files of a dump", "a cluster; the tests count requests and bytes"),
    ("FSDP, DeepSpeed, fairscale and apex on GPUs", "NCCL, several GPUs"),
    ("Mamba and gated delta net kernels", "mamba-ssm, causal-conv1d, flash-linear-attention"),
    ("torch.compile and CUDA graphs beside hooks", "a run with either; hooks refuse CUDA graphs"),
)


def page(result: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """The page.

    Args:
        result: `machine`, as the machine says it, None where nothing ran; `parts`, by name, each as
            `gpu.py` keeps it.
        parts: what each part shows, in order.
    """
    machine, found = result["machine"], result["parts"]
    lines = ["# GPU status", "", _top(machine, found), ""]
    lines += [
        "`scripts/gpu` tests the package on one GPU and writes this page, and the raw figures to `gpu.json`. "
        "Each part is a process of its own with a time limit; a part that has finished is not run again. "
        "What hooks do on a GPU, and when the host waits: [what hooks cost](../estimate.md#on-a-gpu).",
        "",
        "```bash",
        "scripts/gpu                     # everything; run it again to resume",
        "scripts/gpu --part values bf16  # some parts",
        "scripts/gpu --carry wheels      # for a machine without network, here: collect what it lacks",
        "scripts/gpu --wheels wheels     # and there: with the torch that it has",
        "```",
        "",
    ]
    if machine is not None:
        lines += [*_table(["machine", ""], [[n, str(v)] for n, v in machine.items()]), ""]
    lines += ["## Parts", ""]
    lines += _table(
        ["part", "shows", "result", "seconds"], [_row(n, says, found.get(n)) for n, says in parts.items()]
    )
    for name in (n for n in parts if n in found):
        lines += ["", f"## {name}", "", *_part(found[name])]
    lines += ["", "## Transformer Engine without a GPU", ""]
    lines += [
        "Tests run Transformer Engine's own Python, with its compiled extension in plain torch, and compare "
        "it with one process of Megatron's local layers:",
        "",
    ]
    lines += _table(["layers", "compared"], TRANSFORMER_ENGINE)
    lines += ["", "## Defects found without a GPU", ""]
    lines += ["All are mended. A test fails if one comes back:", ""]
    lines += _table(["defect", "found by", "test"], [[d.what, d.source, f"`{d.test}`"] for d in DEFECTS])
    lines += ["", "Suspected, and decided:", ""]
    lines += [f"- {sentence}" for sentence in DECIDED]
    lines += ["", "## Unverified", "", "None of this has run on a GPU:", ""]
    lines += _table(["what", "it needs"], UNVERIFIED)
    return "\n".join(lines) + "\n"


def _top(machine: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str:
    if machine is None or not found:
        return NONE
    return OF_A_CPU if machine["device"] == "cpu" else OF_A_GPU.format(**machine)


def _row(name: str, says: str, part: Mapping[str, Any] | None) -> list[str]:
    if part is None:
        return [f"`{name}`", says, "not run", ""]
    good = sum(c["good"] for c in part["checks"])
    told = f"**{part['status']}**" if part["status"] != "passed" else "passed"
    return [f"`{name}`", says, f"{told}, {good} of {len(part['checks'])} checks", f"{part['seconds']:.0f}"]


def _part(part: Mapping[str, Any]) -> list[str]:
    lines = [f"- {note}" for note in part["notes"]]
    if part["error"]:
        lines.append(f"- It {part['status']}: {part['error']}")
    bad = [c for c in part["checks"] if not c["good"]]
    lines += [f"- **Failed:** {c['what']}: {c['found']:g}, at most {c['bound']:g}" for c in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"- {len(bad) - SHOWN} more failed.")
    for table in part["tables"]:
        lines += ["", f"{table['title']}:", "", *_table(table["head"], table["rows"])]
    return lines or ["All checks passed."]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]
