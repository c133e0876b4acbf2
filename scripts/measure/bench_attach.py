"""scripts/bench --attach: what attaching to a large model takes, on meta tensors and a fake process group.

One process is one rank of the run: nothing is computed or sent. Two models of Megatron's: 128 layers of 128
experts, all on this rank, which has the most sites; and one of the size of Llama 3 70B on the ranks of each
pipeline stage. CPU time of this process is counted, and the interpreter's own calls, which a busy machine
does not change.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Shape:
    """A model and the ranks that it is on.

    Attributes:
        layers, hidden, ffn, heads, groups, vocabulary: of the model.
        experts: of each layer; 0 for a dense model.
        tp, pp, ep: the ranks.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    experts: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1


SHAPES = {
    "128 layers of 128 experts": Shape(128, 1024, 512, 16, 4, 32000, experts=128),
    "2 layers of 64 experts": Shape(2, 64, 32, 4, 2, 128, experts=64),  # a test counts its calls
    "70B, TP8 x PP8": Shape(80, 8192, 28672, 64, 8, 128256, tp=8, pp=8),
}


def build(shape: Shape, rank: int) -> Any:
    """Be a rank of the run, and build its part of the model on the meta device."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=shape.tp * shape.pp)
    parallel_state.initialize_model_parallel(shape.tp, shape.pp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    several = {"num_moe_experts": shape.experts, "moe_router_topk": 8} if shape.experts else {}
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        pipeline_dtype=torch.float32,
        sequence_parallel=shape.tp > 1,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **several,
    )
    experts = {"num_experts": shape.experts, "moe_grouped_gemm": False} if shape.experts else {}
    with torch.device("meta"):
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm", **experts),
            vocab_size=shape.vocabulary,
            max_sequence_length=8192,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )


def count_calls(function: Any) -> int:
    """How often Python calls a function of Python or C in a call of `function`."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def measure(name: str, rank: int, repeats: int, folder: str) -> dict[str, Any]:
    """Attach on one rank, show the hook points, register hooks, and estimate what they cost.

    Args:
        name: of the shape.
        rank: which rank of the run this process is.
        repeats: how often to attach; the least time counts.
        folder: with what the stages tell each other, as `tell` writes it.
    """
    import megatron_flex as mf
    from megatron_flex.runtime import session

    model, built = _be(name, rank)
    stages = SHAPES[name].pp
    if stages > 1:  # the other ranks of a fake group never answer: this is what they would have sent
        sent = [pickle.loads((Path(folder) / f"{stage}").read_bytes()) for stage in range(stages)]
        stage = rank // SHAPES[name].tp
        # mypy refuses to assign to a function of a module; the collective itself cannot run in one process.
        session.gather_objects = lambda mine, *args: [  # type: ignore[assignment]
            mine if number == stage else one for number, one in enumerate(sent)
        ]
    gc.collect()
    before, times, found = _peak(), [], 0
    for _ in range(repeats):
        began = process_time()
        flex = mf.attach(model)
        times.append(process_time() - began)
        found = len(flex.sites())
        flex.session.close(failed=True)  # without a meeting of the ranks
        del flex
        gc.collect()  # the next call has its memory, and needs no new one
    memory = _peak() - before
    calls = count_calls(lambda: mf.attach(model).session.close(failed=True))
    return {
        "rank": rank,
        "modules": sum(1 for _ in model.modules()),
        "sites": found,
        "build_s": built,
        "attach_s": min(times),
        "us_per_site": min(times) / found * 1e6,
        "calls_per_site": calls / found,
        "memory_mib": memory,
        "peak_mib": _peak(),
        **(_plan(mf.attach(model)) if stages > 1 else {}),
    }


def _plan(flex: Any) -> dict[str, float]:
    """The CPU time and memory of what a person does before a run: look, register hooks, and estimate."""
    import megatron_flex as mf

    out: dict[str, float] = {}

    def timed(what: str, function: Any) -> Any:
        before, began = _peak(), process_time()
        result = function()
        out[f"{what}_s"] = process_time() - began
        out[f"{what}_mib"] = _peak() - before
        return result

    timed("show", lambda: str(flex.sites()))
    timed("register", lambda: _register(flex, mf))
    found = timed(
        "estimate", lambda: flex.estimate(sequence_length=8192, micro_batch_size=1, microbatches=64)
    )
    out["estimated"] = len(found.hooks)
    timed("table", lambda: str(found))
    return out


def _register(flex: Any, mf: Any) -> None:
    """A read of every residual stream, MLP and attention, and an edit of every MLP that gathers."""
    for pattern in ("decoder.layers.*", "decoder.layers.*.mlp", "decoder.layers.*.self_attention"):
        flex.register_forward_hook(mf.HookFunction(pattern))
    flex.register_forward_hook(
        mf.HookFunction("decoder.layers.*.mlp.linear_fc1", lambda x, *rest: x.softmax(-1))
    )


def tell(name: str, rank: int, folder: str) -> dict[str, Any]:
    """Write what the stage of a rank tells the other stages when a model is attached."""
    import megatron_flex as mf
    from megatron_flex.runtime import session

    model, _ = _be(name, rank)

    def write(mine: Any, *args: Any) -> list[Any]:
        (Path(folder) / str(rank // SHAPES[name].tp)).write_bytes(pickle.dumps(mine))
        return [mine]

    session.gather_objects = write  # type: ignore[assignment]  # a module's function, as above
    mf.attach(model).session.close(failed=True)
    return {}


def _be(name: str, rank: int) -> tuple[Any, float]:
    """The part of a rank of a shape's model, and the CPU time that building it took."""
    from megatron_flex import cpu

    logging_off()
    cpu.enable(force=True)
    began = process_time()
    return build(SHAPES[name], rank), process_time() - began


def _peak() -> float:
    """The most memory that this process has had, in MiB."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 1024


def logging_off() -> None:
    """Megatron warns of what does not matter here."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def run(repeats: int) -> list[dict[str, Any]]:
    """Measure every shape, each rank in a process of its own."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            for stage in range(shape.pp) if shape.pp > 1 else ():
                run_part("tell", name, str(stage * shape.tp), folder)
            for stage in sorted({0, shape.pp - 1}):
                found = run_part("measure", name, str(stage * shape.tp), str(repeats), folder)
                out.append({"model": name, "stage": stage, **found})
    return out


def run_part(*words: str) -> dict[str, Any]:
    """Call `tell` or `measure` in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


COLUMNS = {
    "model": "{}",
    "stage": "{}",
    "modules": "{}",
    "sites": "{}",
    "attach_s": "{:.2f}",
    "us_per_site": "{:.1f}",
    "calls_per_site": "{:.0f}",
    "memory_mib": "{:.0f}",
    "peak_mib": "{:.0f}",
    "show_s": "{:.3f}",
    "register_s": "{:.3f}",
    "estimate_s": "{:.3f}",
    "estimate_mib": "{:.1f}",
}


def main(words: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench --attach", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="attach so often (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args(words)
    found = run(args.repeats)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in found:
        print(
            "| "
            + " | ".join(form.format(row[name]) if name in row else "" for name, form in COLUMNS.items())
            + " |"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    part, name, rank, *rest = sys.argv[1:]
    if part == "tell":
        print(json.dumps(tell(name, int(rank), *rest)))
    else:
        print(json.dumps(measure(name, int(rank), int(rest[0]), *rest[1:])))
