"""scripts/bench --conversion: loading weights of Hugging Face against safetensors alone, and a rank's memory.

Two ways take turns: `load_hf`, and slices of safetensors copied into tensors of the same size, each rank
its part of every tensor. Files are in the page cache. Memory is anonymous: pages of files can be dropped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_results import add_result_flags, check_page, command_line, publish
from torch import Tensor

SECTION = "conversion"
MIB = 1 << 20
LAYOUTS = {
    "one process": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 ep2": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
}
MODELS = {"llama": ("one process", "tp2", "pp2"), "qwen3_moe": ("one process", "tp2 ep2")}
SAMPLE_SECONDS = 1e-3  # between two looks at the memory


class Figures(NamedTuple):
    """What a rank measured: seconds of each round (of the clock, of the processor), bytes, added memory."""

    ours: list[tuple[float, float]]
    plain: list[tuple[float, float]]
    shards: int
    peak: int


def flags(words: list[str]) -> argparse.Namespace:
    """The command line behind --conversion."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --conversion",
        description="Time load_hf against safetensors alone, for models of random weights (two minutes).",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed of each (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 256 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="an even number (default %(default)s)")
    add_result_flags(parser)
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.hidden % 256 or args.layers % 2:
        parser.error(f"--hidden {args.hidden} --layers {args.layers}: must be multiples of 256 and 2")
    return args


def write_model(family: str, hidden: int, layers: int, folder: Path) -> int:
    """Write a model in bf16; returns the bytes of its greatest tensor."""
    import transformers

    common = {
        "vocab_size": 16384,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 16, "moe_intermediate_size": hidden // 2, "num_experts_per_tok": 2}
    kinds = {"llama": ("LlamaConfig", {}), "qwen3_moe": ("Qwen3MoeConfig", experts)}
    kind, more = kinds[family]
    config = getattr(transformers, kind)(**common, **more)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return max(t.nbytes for t in model.state_dict().values())


def measure(sizes: dict[str, int], folder: str, rounds: int) -> Figures:
    """Both in turns, on one rank."""
    import megatron_flex as mf
    from tests.support import hugging_face
    from tests.support.gpt import Case

    chunks = hugging_face.build(
        Case("measured", **sizes), mf.config_from_hf(folder), params_dtype=torch.bfloat16
    )
    shards = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    copies = allocate(folder, shards)
    ours, plain, peak = [], [], 0
    for number in range(rounds + 1):
        seconds, added = watched(lambda: mf.load_hf(chunks, folder))
        again, _ = watched(lambda: copy_parts(folder, copies))
        if number:  # the first fills the page cache
            ours.append(seconds)
            plain.append(again)
            peak = max(peak, added)
    return Figures(ours, plain, shards, peak)


def allocate(folder: str, shards: int) -> dict[str, Tensor]:
    """A tensor for a part of every tensor of the file, together as large as this rank's shards."""
    from safetensors import safe_open

    path, out, left = Path(folder) / "model.safetensors", {}, shards
    share = shards / path.stat().st_size
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file has no iterator
            shape = file.get_slice(name).get_shape()
            row = 2 * torch.Size(shape[1:]).numel()
            rows = min(shape[0], math.ceil(shape[0] * share), left // row)
            out[name] = torch.ones(rows, *shape[1:], dtype=torch.bfloat16)
            left -= rows * row
    return out


def copy_parts(folder: str, copies: dict[str, Tensor]) -> None:
    """safetensors alone: the first rows of every tensor, copied once."""
    from safetensors import safe_open

    with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
        for name, copy in copies.items():
            copy.copy_(file.get_slice(name)[: len(copy)])


def watched(action: Callable[[], Any]) -> tuple[tuple[float, float], int]:
    """The seconds of an action, and the bytes of anonymous memory that it added at most."""
    dist.barrier()
    before, most, done = anonymous(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, anonymous())
            sleep(SAMPLE_SECONDS)

    watcher = threading.Thread(target=look)
    watcher.start()
    start, worked = perf_counter(), thread_time()
    action()
    seconds = perf_counter() - start, thread_time() - worked
    done.set()
    watcher.join()
    return seconds, max(0, most - before)


def anonymous() -> int:
    """Bytes of this process' memory that are no pages of files."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")))


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each model and layout."""
    from bench_report import _markdown

    rows = [
        [
            *("model", "layout", "MiB of the model", "load_hf", "safetensors and one copy"),
            *("ratio", "ratio of CPU time", "MiB that a rank adds"),
        ]
    ]
    for case in found.values():
        ours, plain = case["ours"], case["plain"]
        clock, processor = (
            statistics.median(a[kind] / b[kind] for a, b in zip(ours, plain, strict=True)) for kind in (0, 1)
        )
        rows.append(
            [
                *(case["model"], case["layout"], f"{case['bytes'] / MIB:.0f}"),
                *(f"{statistics.median(a[0] for a in times) * 1e3:.0f} ms" for times in (ours, plain)),
                *(f"{clock:.2f}", f"{processor:.2f}"),
                f"{case['peak'] / MIB:.1f}; the greatest tensor has {case['greatest'] / MIB:.0f}",
            ]
        )
    return _markdown(rows)


def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every model in its layouts."""
    from tests.support.pool import run_alone

    out = {}
    for family, layouts in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            greatest = write_model(family, args.hidden, args.layers, Path(folder))
            size = (Path(folder) / "model.safetensors").stat().st_size
            for layout in layouts:
                sizes = LAYOUTS[layout]
                world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
                ranks = run_alone(world, measure, sizes, folder, args.rounds, timeout=600)
                out[f"{family}, {layout}"] = {
                    **{"model": family, "layout": layout, "bytes": size, "greatest": greatest},
                    "ours": slowest([r.ours for r in ranks]),
                    "plain": slowest([r.plain for r in ranks]),
                    "shards": [r.shards for r in ranks],
                    "peak": max(r.peak for r in ranks),
                }
    return out


def slowest(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """For each round the seconds of the slowest rank, by the clock and of the processor."""
    rounds = zip(*ranks, strict=True)
    return [(max(clock for clock, _ in one), max(cpu for _, cpu in one)) for one in rounds]


def main(words: list[str]) -> None:
    """Measure, print, and write the requested files."""
    args = flags(words)
    check_page(args, SECTION)
    found = run(args)
    command = command_line()
    text = f"`{command}`, {date.today().isoformat()}, medians of {args.rounds} rounds.\n\n{table(found)}"
    publish(args, SECTION, {"command": command, **found}, text)
