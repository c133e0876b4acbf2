"""scripts/bench align: the time of `align` against the forward passes of the two models, and what it does.

The Hugging Face model alone, the Megatron model alone, `align` and `align` with `isolate=True` take turns.
"""

from __future__ import annotations

import argparse
import statistics
from datetime import date
from time import perf_counter, process_time
from typing import Any

import torch
from bench_results import add_result_flags, check_page, command_line, publish

SECTION, HIDDEN = "align", 512  # other widths have sections of their own
LAYOUTS = {"one process": {}, "tp2": {"tp": 2, "sp": True}, "pp2": {"pp": 2}}
MIB = 1 << 20


def flags(words: list[str]) -> argparse.Namespace:
    """The command line behind align."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench align",
        description="Time align against the forward passes of the two models (three minutes).",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed of each (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 128 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="an even number (default %(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence (default %(default)s)")
    add_result_flags(parser)
    args = parser.parse_args(words)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.hidden % 128 or args.layers % 2 or args.seq % 2:
        parser.error(
            f"--hidden {args.hidden} --layers {args.layers} --seq {args.seq}: must be multiples of "
            "128, 2 and 2"
        )
    return args


def family(args: argparse.Namespace) -> Any:
    """A Llama of this size."""
    from tests.support import hugging_face

    sizes = {
        "vocab_size": 4096,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": args.hidden // 128,
        "head_dim": 64,
        "max_position_embeddings": args.seq,
    }
    llama = hugging_face.FAMILIES["llama"]
    return hugging_face.Family(llama.kind, {**llama.settings, **sizes})


def measure(sizes: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """All in turns, on one rank."""
    from megatron_flex.lens import read_prompts, run
    from megatron_flex.model import FlexModel
    from tests.support import aligned
    from tests.support.gpt import Case

    hf_model, chunks = aligned.rank_models(family(args), Case("measured", microbatches=1, **sizes))
    tokens = torch.randint(0, 4096, (2, args.seq), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[tuple[float, float]]] = {}
    counts: dict[str, Any] = {}
    with FlexModel(chunks) as flex:
        first = torch.distributed.get_rank() == 0

        def alone() -> None:
            if first:
                with torch.no_grad():
                    hf_model(tokens, use_cache=False)

        def compare(isolate: bool) -> None:
            found = flex_align(hf_model, flex, tokens, isolate=isolate)
            assert found.agrees, str(found)
            counts.update(
                sites=len(found.sites), entries=sum(torch.Size(s.shape).numel() for s in found.sites)
            )

        ways = {
            "Hugging Face": alone,
            "Megatron": lambda: run(flex.session, read_prompts(flex.session, tokens), None),
            "align": lambda: compare(False),
            "align, isolate": lambda: compare(True),
        }
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                torch.distributed.barrier()
                start, worked = perf_counter(), process_time()
                way()
                torch.distributed.barrier()
                if number:  # the first allocates
                    times.setdefault(name, []).append((perf_counter() - start, process_time() - worked))
    return {"times": times, **counts}


def flex_align(*args: Any, **options: Any) -> Any:
    """`align`, which is imported on the ranks only."""
    from megatron_flex.alignment import align

    return align(*args, **options)


def summarize(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For each way the seconds of each round: by the clock, and of all processors together."""
    out = {}
    for name in ranks[0]["times"]:
        rounds = zip(*(r["times"][name] for r in ranks), strict=True)
        out[name] = [(max(t[0] for t in one), sum(t[1] for t in one)) for one in rounds]
    return {"times": out, "sites": ranks[0]["sites"], "entries": ranks[0]["entries"]}


def ratio(times: dict[str, list[tuple[float, float]]], name: str, kind: int) -> float:
    """The median of a way's time over that of the two forward passes of its round."""
    passes = zip(times["Hugging Face"], times["Megatron"], times[name], strict=True)
    return statistics.median(way[kind] / (a[kind] + b[kind]) for a, b, way in passes)


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each layout."""
    from bench_report import _markdown

    rows = [
        [
            *("layout", "hook points", "MiB compared", "Hugging Face", "Megatron", "align"),
            *("over the two", "of CPU time", "with `isolate=True`", "of CPU time"),
        ]
    ]
    for layout, case in found.items():
        times = case["times"]
        rows.append(
            [
                *(layout, str(case["sites"]), f"{case['entries'] * 4 / MIB:.0f}"),
                *(
                    f"{statistics.median(t[0] for t in times[name]) * 1e3:.0f} ms"
                    for name in ("Hugging Face", "Megatron", "align")
                ),
                *(f"{ratio(times, name, k):.2f}" for name in ("align", "align, isolate") for k in (0, 1)),
            ]
        )
    return _markdown(rows)


def main(words: list[str]) -> None:
    """Measure, print, and write the requested files."""
    args = flags(words)
    from tests.support.pool import run_alone

    section = SECTION if args.hidden == HIDDEN else f"{SECTION}-{args.hidden}"
    check_page(args, section)
    found = {}
    for layout, sizes in LAYOUTS.items():
        world = sizes.get("tp", 1) * sizes.get("pp", 1)
        found[layout] = summarize(run_alone(world, measure, sizes, args, timeout=900))
    command = command_line()
    text = f"`{command}`, {date.today().isoformat()}, medians of {args.rounds} rounds.\n\n{table(found)}"
    publish(args, section, {"command": command, **found}, text)
