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
import subprocess
import sys
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
        tp, pp: the ranks.
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


SHAPES = {
    "128 layers of 128 experts": Shape(128, 1024, 512, 16, 4, 32000, experts=128),
    "70B, TP8 x PP8": Shape(80, 8192, 28672, 64, 8, 128256, tp=8, pp=8),
}


def build(shape: Shape, rank: int) -> Any:
    """Be a rank of the run, and build its part of the model on the meta device."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.tp * shape.pp)
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


def measure(name: str, rank: int, places: int) -> dict[str, Any]:
    """Attach on one rank. The ranks of other stages report nothing, as no other process is there.

    Args:
        name: of the shape.
        rank: which rank of the run this process is.
        places: how often to attach; the least time counts.
    """
    import megatron_flex as mf
    from megatron_flex import cpu
    from megatron_flex.runtime import session

    logging_off()
    cpu.enable(force=True)
    shape = SHAPES[name]
    began = process_time()
    model = build(shape, rank)
    built = process_time() - began
    if dist.get_world_size() > 1:  # the other ranks of a fake group never answer
        session.gather_objects = lambda mine, *args: [mine]  # type: ignore[assignment]
    gc.collect()
    before, times, found = getrusage(RUSAGE_SELF).ru_maxrss, [], 0
    for _ in range(places):
        began = process_time()
        flex = mf.attach(model)
        times.append(process_time() - began)
        found = len(flex.sites())
        flex.session.close(failed=True)  # without a meeting of the ranks
    calls = count_calls(lambda: mf.attach(model).session.close(failed=True))
    return {
        "rank": rank,
        "modules": sum(1 for _ in model.modules()),
        "sites": found,
        "build_s": built,
        "attach_s": min(times),
        "us_per_site": min(times) / found * 1e6,
        "calls_per_site": calls / found,
        "memory_mib": (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024,
        "peak_mib": getrusage(RUSAGE_SELF).ru_maxrss / 1024,
    }


def logging_off() -> None:
    """Megatron warns of what does not matter here."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def run(places: int) -> list[dict[str, Any]]:
    """Measure every shape, each in a process of its own."""
    out = []
    for name, shape in SHAPES.items():
        for stage in sorted({0, shape.pp - 1}):
            words = [sys.executable, __file__, name, str(stage * shape.tp), str(places)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise RuntimeError(f"{name}, stage {stage}:\n{done.stderr[-2000:]}")
            out.append({"model": name, "stage": stage, **json.loads(done.stdout.splitlines()[-1])})
    return out


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
        print("| " + " | ".join(form.format(row[name]) for name, form in COLUMNS.items()) + " |")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
