"""Pairs of runs to compare: one process, and ranks with a planted bug or without, in four precisions."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from filelock import FileLock
from torch import Tensor, nn

from megatron_flex.compare import Comparison, compare
from tests.support import gpt, ranks, wrapped
from tests.support.bugs import BY_NAME, Bug
from tests.support.bugs.bug import Backwards, Straight
from tests.support.exam import PATCHES
from tests.support.exam.settings import SETTINGS
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.training import LOSS_SCALE, Trainer

BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
FP16 = {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16, "fp8": BF16}
WORDS = "embedding.word_embeddings.weight"
FEW = [  # sites of long runs
    "embedding",
    "decoder.layers.*",
    "decoder.layers.*.self_attention",
    "decoder.layers.*.mlp",
    "loss",
]
ROUTERS = "decoder.layers.*.mlp.router:*"
OUTSIDE = ["embedding", "decoder.final_layernorm", "output_layer"]  # of layers
AROUND = [*(f"{name}**:*" for name in OUTSIDE), "decoder.layers.*:output", "loss"]  # a layer


@dataclass(frozen=True)
class Pair:
    """What is compared with one process.

    Attributes:
        case: the sharded run.
        precision: one of `PRECISIONS`; `fp8` is bf16 with the inputs of the layers' linears rounded to e4m3,
            and the gradients of their outputs to e5m2.
        seed: of the weights and the data.
        steps: training steps; with more than one, Adam runs.
        few: whether only `FEW` is dumped.
        inside: a layer: only of it everything is dumped, of the others what comes out of them.
        routers: whether the routers are dumped besides.
        setting: of the training, one of `SETTINGS`.
    """

    case: Case
    precision: str = "fp32"
    seed: int = 0
    steps: int = 1
    few: bool = False
    inside: int | None = None
    routers: bool = False
    setting: str = ""

    @property
    def name(self) -> str:
        """A name for files."""
        parts = [self.case.name, self.precision, f"seed {self.seed}", f"{self.steps} steps"]
        inside = [] if self.inside is None else [f"inside {self.inside}"]
        words = [*parts, *["few"] * self.few, *inside, *["routers"] * self.routers, self.setting]
        return " ".join(words).strip()

    @property
    def sites(self) -> str | list[str]:
        """The patterns of the sites that are dumped."""
        if self.few:
            return [*FEW, *[ROUTERS] * self.routers]
        return "**:*" if self.inside is None else [*AROUND, f"decoder.layers.{self.inside}**:*"]

    @property
    def parameters(self) -> str | list[str]:
        """The patterns of the parameters that are dumped."""
        if self.inside is None:
            return "**"
        outside = [f"{name}.**" for name in OUTSIDE if name != "output_layer" or not self.case.tied]
        return [*outside, f"decoder.layers.{self.inside}.**"]

    @property
    def run(self) -> Case:
        """The case in its precision."""
        return replace(self.case, extra={**self.case.extra, **PRECISIONS[self.precision]})


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to an 8-bit float with a scale that is a power of two, the same on all ranks: 2^3."""
    limit = torch.finfo(dtype).max
    return ((tensor.float() * 8).clamp(-limit, limit).to(dtype).float() / 8).to(tensor.dtype)


def in_fp8(chunks: list[nn.Module]) -> None:
    """Round what the linears of the layers multiply, forward and backward, as a GEMM in fp8 would."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for chunk in chunks:
        # The dump says so. The layers keep their own config, as Megatron would call Transformer Engine.
        chunk.config = copy.copy(chunk.config)
        chunk.config.fp8 = "hybrid"
        for name, module in chunk.named_modules():
            if name.startswith("decoder.") and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module._forward_impl = _fp8_product(module._forward_impl)


def _fp8_product(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        small = [Straight.apply(t, lambda x: narrowed(x, torch.float8_e4m3fn)) for t in (input, weight)]
        # The gradient is small where the loss is a mean: 2^10 more than activations.
        return Backwards.apply(  # type: ignore[no-any-return]
            real(*small, *args, **kwargs), lambda g: narrowed(g * 1024, torch.float8_e5m2) / 1024
        )

    return forward


def dumped(pair: Pair, case: Case, path: str, weights: str, bug: str, magnitude: float) -> None:
    """Steps of this rank with a dump.

    Args:
        pair: what is compared.
        case: the pair's run, or its one process.
        path: the folder of the dump.
        weights: a file with the full model's weights; written if it is not there.
        bug: the name of the bug in this run, or of a row of the exam; empty for none.
        magnitude: of the bug.
    """
    import megatron_flex as mf

    with (
        patch.object(gpt, "WEIGHTS_SEED", 7 + pair.seed),
        patch.object(gpt, "DATA_SEED", 3 + pair.seed),
        SETTINGS[pair.setting]() if pair.setting else contextlib.nullcontext(),
    ):
        chunks = ranks.start(case)
        if Path(weights).exists():
            state = torch.load(weights)
            gpt.load(
                chunks, {"output_layer.weight": state[WORDS], **state}
            )  # which tied embeddings have twice
        else:
            state = gpt.randomize(chunks[0])
            torch.save(state, weights)
        if pair.precision == "fp8":
            in_fp8(chunks)
        models, step = _trained(pair, case, chunks)
        plant = BY_NAME[bug].patch if bug in BY_NAME else PATCHES.get(bug)
        with contextlib.nullcontext() if plant is None else plant(models, state, magnitude):
            settings: dict[str, Any] = {"gradients": True, "order": "blocks", "replicas": True}
            dump = mf.Dump(path, pair.sites, parameters=pair.parameters, **settings)
            flex = mf.attach(models, dumps=dump)
            for _ in range(pair.steps):
                step()
            flex.session.close()  # a place that a bug leaves out is no error here


def _trained(pair: Pair, case: Case, chunks: list[nn.Module]) -> tuple[list[Any], Callable[[], Any]]:
    """The model in its wrappers, and its step."""
    from megatron.core.transformer.module import Float16Module

    rank = ranks.mine(chunks)
    if pair.steps > 1:
        trainer = Trainer(case, chunks, rank, grad_reduce_in_fp32=True)
        return trainer.models, trainer.step
    half = "params_dtype" in case.extra
    inner = [Float16Module(c.config, c) for c in chunks] if half else chunks
    models = wrapped.ddp(inner, True, grad_reduce_in_fp32=True)
    if case.extra.get("fp16"):
        for model in models:
            model.config.grad_scale_func = lambda loss: loss * LOSS_SCALE

    def step() -> None:
        for model in models:
            model.zero_grad_buffer()
        gpt.step(case, models, rank)

    return models, step


class Bench:
    """Makes dumps in a folder and compares them; a dump of one process is made once.

    Args:
        folder: where dumps are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def alone(self, pair: Pair) -> tuple[Path, Path]:
        """The dump of one process, and the file of its weights."""
        single = pair.run.single()
        model = repr(sorted({**vars(single), "extra": repr(single.extra)}.items()))
        name = f"alone {pair.precision} {pair.seed} {pair.steps} {pair.few} {_digest(model)}"
        name += f" inside {pair.inside}" * (pair.inside is not None)
        name += " routers" * pair.routers + f" {pair.setting}" * bool(pair.setting)
        weights = self.folder / f"{name} weights"
        return self.made(pair, single, name, weights), weights

    def spread(self, pair: Pair, bug: str = "", magnitude: float = 0.0) -> Path:
        """The dump of the sharded run."""
        _, weights = self.alone(pair)
        name = f"{pair.name} {bug or 'right'} {magnitude:g}"
        return self.made(pair, pair.run, name, weights, bug, magnitude)

    def made(
        self, pair: Pair, case: Case, name: str, weights: Path, bug: str = "", magnitude: float = 0.0
    ) -> Path:
        """The dump of that name in the folder; made if it is not there."""
        path, draft = self.folder / name, self.folder / f"{name} draft"
        with FileLock(f"{path} lock", timeout=600):
            if not path.exists():
                shutil.rmtree(draft, ignore_errors=True)  # of a run that was ended
                run(case.world, dumped, pair, case, str(draft), str(weights), bug, magnitude, timeout=300)
                draft.rename(path)
        return path

    def compared(self, pair: Pair, bug: str = "", magnitude: float = 0.0, **settings: Any) -> Comparison:
        """The sharded run, with a bug or without, against one process."""
        return compare(self.alone(pair)[0], self.spread(pair, bug, magnitude), **settings)


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Judgement:
    """What a comparison said of a planted bug.

    Attributes:
        found: whether it diverges, or cannot be compared.
        localised: whether the first divergence is where the bug stands.
        hinted: whether the hints name its class and its group; None for a bug without a class to name.
        first: the first divergence.
        hints: what was said.
    """

    found: bool
    localised: bool
    hinted: bool | None
    first: str
    hints: str


def judge(bug: Bug, result: Comparison) -> Judgement:
    """Hold a comparison to what is known of the bug."""
    first = result.first
    begins = (bug.first,) if isinstance(bug.first, str) else bug.first
    there = first is not None and first.name.startswith(begins) and first.kind == bug.kind
    # A weight that is out of step is written by one of its ranks: the wrong one, or a right one.
    there |= first is not None and first.kind == "parameter" and first.name == bug.replica
    there |= first is None and bug.replica in {o.name for o in result.replicas}
    evidence = "" if first is None or not first.evidence else f"{first.test}: {first.evidence}"
    said = "; ".join(filter(None, [evidence, *result.hints, *map(str, result.replicas[:3])]))
    hinted = bool(re.search(bug.hint, said, re.IGNORECASE)) if bug.hint else None
    name = "" if first is None else f"{first.name} ({first.kind}, iteration {first.iteration})"
    return Judgement(result.exit_status != 0, bool(there), hinted, name, said)
