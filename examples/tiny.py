"""What the examples share: a tiny model that adds, and the comparison with one process.

The model is a Llama of four layers and 40,000 parameters, which continues `5 +3 8 +2` with `10`. Tokens 0 to
31 are numbers, modulo 32; tokens 32 to 39 are the steps +0 to +7. `adding/` has the weights in the format of
Hugging Face, and the script that trained them.
"""

# ruff: noqa: E402  # the environment and the CPU runtime are set before Megatron is imported

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the examples run on a CPU
for category in (UserWarning, FutureWarning):  # that Apex is not installed; that torch has a newer name
    warnings.filterwarnings("ignore", category=category, module="megatron|torch")

from megatron_flex import cpu

cpu.enable()  # before Megatron is imported; leave it out on GPUs

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import megatron_flex as mf

ADDING = Path(__file__).parent / "adding"
NUMBERS, STEPS = 32, 8
SCRIPT = Path(sys.argv[0])
OUT = Path("out", SCRIPT.stem)  # where an example writes
LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2)}  # processes -> tensor and pipeline parallel size


def start() -> tuple[int, int]:
    """Start torch.distributed: in the processes of torchrun, or in this one alone.

    Returns:
        The tensor and the pipeline parallel size.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return LAYOUTS[dist.get_world_size()]


def load_model(folder: Path = ADDING, sequence_parallel: bool = True) -> list[GPTModel]:
    """Build this rank's part of a Llama and load its weights, from a folder of Hugging Face."""
    tensor, pipeline = start()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    arguments = mf.config_from_hf(folder, vocabulary_multiple=tensor)
    config = TransformerConfig(
        **arguments.transformer,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=sequence_parallel and tensor > 1,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **arguments.model,
    )
    mf.load_hf([model], folder)
    return [model]


def sums(starts: Tensor, steps: Tensor) -> Tensor:
    """Sequences of numbers and steps, `[batch, 2 * steps]`: `sums([5], [[3, 2]])` is `5 +3 8 +2`."""
    numbers = (starts[:, None] + steps.cumsum(1) - steps) % NUMBERS
    return torch.stack([numbers, NUMBERS + steps], 2).flatten(1)


def random_sums(batch: int, seed: int, length: int = 8) -> Tensor:
    """Random sequences of `length` numbers and steps, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(NUMBERS, (batch,), generator=generator)
    return sums(starts, torch.randint(STEPS, (batch, length), generator=generator))


def show(tokens: Tensor) -> str:
    """A sequence as text."""
    return " ".join(word(token) for token in tokens.tolist())


def word(token: int) -> str:
    """A token as text: `7`, or `+3`."""
    return f"+{token - NUMBERS}" if token >= NUMBERS else str(token)


def mean_loss(losses: Tensor, tokens: Tensor) -> Tensor:
    """The model's own loss of a microbatch."""
    return losses.mean()


def train_step(
    chunks: list[GPTModel], tokens: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
) -> None:
    """Run a forward and a backward pass of Megatron's schedule, in two microbatches.

    Args:
        chunks: this rank's parts of the model.
        tokens: the sequences of the step.
        loss: of a microbatch, from the loss of each of its tokens and the tokens; called on the last stage.
    """
    microbatches = iter(tokens.chunk(2))
    positions = torch.arange(tokens.shape[1]).expand(len(tokens) // 2, -1)

    def forward_step(data: Iterator[Tensor], chunk: GPTModel) -> tuple[Tensor, Any]:
        inputs = next(data)
        losses = chunk(inputs, positions, None, labels=inputs.roll(-1, 1))
        return losses, lambda losses: (loss(losses, inputs), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=microbatches,
        model=chunks,
        num_microbatches=2,
        seq_length=tokens.shape[1],
        micro_batch_size=len(tokens) // 2,
        forward_only=False,
    )


def processes() -> str:
    """The number of processes, in words."""
    size = dist.get_world_size()
    return "one process" if size == 1 else f"{size} processes"


def empty_folder() -> Path:
    """A folder of this example for this number of processes; what an earlier run left in it is deleted."""
    folder = OUT / processes().replace(" ", "-")
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def save(figure: Any, name: str = "") -> None:
    """Write a picture of this example."""
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{name or SCRIPT.stem}.png"
    figure.savefig(file, dpi=100)
    print(f"wrote {file}")


def compare_with_one_process(name: str, figure: float, tolerance: float = 1e-4) -> None:
    """Assert that a figure is that of the same script on one process, and print both.

    Args:
        name: what the figure is.
        figure: of this run.
        tolerance: the greatest relative difference.
    """
    expected = of_one_process(figure)
    print(f"{name}: {figure:.4f} on {processes()}, expected {expected:.4f}")
    assert abs(figure - expected) <= tolerance * abs(expected), f"{figure} differs from {expected}"


def of_one_process(figure: float) -> float:
    """Return the figure of the same script on one process: run it there, unless that has been done."""
    file = OUT / "one_process.json"
    if dist.get_world_size() == 1:
        OUT.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figure), encoding="utf-8")
    elif not file.exists() or file.stat().st_mtime < SCRIPT.stat().st_mtime:
        torchrun = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(file.read_text(encoding="utf-8")))
