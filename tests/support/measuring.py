"""Statistics of a sharded Megatron run beside those of one process, taken by plain PyTorch in fp64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support import gpt, ranks, wrapped
from tests.support.rank import changes


class Kept:
    """A sink that keeps everything."""

    reads_statistics = True

    def __init__(self) -> None:
        self.rows: dict[int, list[Any]] = {}
        self.order: list[int] = []
        self.closed = 0

    def write(self, iteration: int, rows: Sequence[Any]) -> None:
        self.order.append(iteration)
        self.rows[iteration] = list(rows)

    def close(self) -> None:
        self.closed += 1


def measuring(case: gpt.Case, state: dict[str, Tensor], sites: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Steps without statistics, with those of values, and with those of gradients too.

    Args:
        case: the model.
        state: its weights.
        sites: which are measured.
        more: `ddp`, settings of Megatron's wrapper, under which parameters are measured too; `real`, how
            many tokens of the vocabulary are no padding.
    """
    import megatron_flex as mf
    from megatron_flex import cpu
    from megatron_flex.statistics import Statistics

    cpu.enable()
    if "real" in more:
        import megatron.training.global_vars as known

        changes.setattr(known, "_GLOBAL_TOKENIZER", SimpleNamespace(vocab_size=more["real"]))
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    chunks = wrapped.ddp(chunks, True, **more["ddp"]) if "ddp" in more else chunks
    rank, kept = ranks.mine(chunks), Kept()
    with ranks.counting() as plain:
        before = _step(case, chunks, rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", mf.FlexWarning)
        with mf.attach(chunks) as flex:
            values = Statistics("nowhere", sites)
            flex.register_statistics(values, kept)
            same = _same(before, _step(case, chunks, rank))
            flex.remove_statistics(values)
            kept.closed -= 1
            more_of = {"parameters": "**"} if "ddp" in more else {}
            flex.register_statistics(Statistics("nowhere", sites, gradients=True, **more_of), kept)
            with ranks.counting() as counts:
                _step(case, chunks, rank)
            gpt.step(case, chunks, rank, forward_only=True)
            _step(case, chunks, rank)
    return {
        "rows": kept.rows,
        "order": kept.order,
        "closed": kept.closed,
        "same": same,
        "more": {n: counts[n] - plain[n] for n in {*plain, *counts} if counts[n] != plain[n]},
        "said": [str(w.message) for w in said if issubclass(w.category, mf.FlexWarning)],
    }


def expected(
    truth: Any, rows: Any, microbatches: int, real: int | None, drops: bool = False
) -> dict[str, Tensor]:
    """All values of each site with a row, and of its gradient at the scale of a microbatch's own loss.

    With `drops` experts have a capacity: a slot without an expert, zeros in the full tensor, is not a value.
    """
    out = {}
    for end, found, factor in (("", truth["values"], 1), (".grad", truth["gradients"], microbatches)):
        for site, tensors in found.items():
            if site + end in rows:
                cut = real if site.startswith("output_layer:output") else None
                kept = tensors
                if drops and ".mlp.experts" in site:
                    kept = [t[(t != 0).any(-1)] for t in tensors]
                out[site + end] = torch.cat([t[..., :cut].reshape(-1) for t in kept]) * factor
    return out


def _step(case: gpt.Case, chunks: Any, rank: int) -> Any:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
    losses = gpt.step(case, chunks, rank)
    grads = {
        f"{n} {name}": (g if (g := getattr(p, "main_grad", None)) is not None else p.grad)
        for n, chunk in enumerate(chunks)
        for name, p in chunk.named_parameters()
    }
    return losses, {name: None if g is None else g.clone() for name, g in grads.items()}


def _same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all(
        (g is None and b[1][n] is None) or torch.equal(g, b[1][n]) for n, g in a[1].items()
    )


def numbers(values: Tensor) -> dict[str, Any]:
    """What a row has to say of all of some values, in the plainest way."""
    v = values.double().reshape(-1)
    mean, magnitudes = v.mean(), v.abs()
    spread = (v - mean).square().mean()
    return {
        "count": v.numel(),
        "mean": float(mean),
        "std": float(spread.sqrt()),
        "rms": float(v.square().mean().sqrt()),
        "norm": float(v.norm()),
        "absmax": float(magnitudes.max()),
        "zeros": float((v == 0).double().mean()),
        "kurtosis": float(((v - mean) ** 4).mean() / spread**2) if spread else None,
        "positive": int((v > 0).sum()),
        "rounded": int((magnitudes < 1e-6 * float(v.square().mean().sqrt())).sum()),
        "noise": int(((magnitudes < 1e-6 * float(v.square().mean().sqrt())) & (v != 0)).sum()),
        "small": int(((magnitudes < 0.5) & (v != 0)).sum()),
    }


def differences(row: Any, want: dict[str, Any], microbatches: int) -> list[str]:
    """What a row says otherwise, beyond what sums in another order make of a model's values."""
    from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, compute_bin_edges

    plain = ("std", "rms", "norm", "absmax")
    found = [n for n in plain if not math.isclose(getattr(row, n), want[n], rel_tol=1e-4, abs_tol=1e-9)]
    if abs(row.mean - want["mean"]) > 1e-4 * want["rms"] + 1e-9:
        found.append("mean")
    if want["kurtosis"] is not None and not math.isclose(row.kurtosis or 0, want["kurtosis"], rel_tol=1e-3):
        found.append("kurtosis")
    if row.count != want["count"] or row.nans or row.infinities:
        found.append("count")
    zeros = row.histogram[BINS_PER_SIGN]
    # A value that cancels is zero, or what rounding leaves: how many are zero depends on the order of sums.
    uncertain = want["noise"] and 2 * want["noise"] + 2
    same = abs(zeros - row.zeros * row.count) <= 1e-3
    if not same or abs(zeros - want["zeros"] * want["count"]) > uncertain + 1e-3:
        found.append("zeros")
    if row.microbatches != microbatches:
        found.append("microbatches")
    halves = [i for i, e in enumerate(compute_bin_edges()) if abs(e) == 0.5]
    small = sum(row.histogram[halves[0] : halves[1]]) - row.histogram[BINS_PER_SIGN]
    # That lie on the other side of an edge by rounding, which makes the signs of values near zero.
    near = 2 + want["count"] // 500
    if sum(row.histogram) != row.count or abs(small - want["small"]) > near + uncertain:
        found.append("histogram")
    if abs(sum(row.histogram[BINS_PER_SIGN + 1 :]) - want["positive"]) > near + want["rounded"]:
        found.append("signs")
    return [f"{row.site} {name}: {getattr(row, name, None)} and not {want.get(name)}" for name in found]
