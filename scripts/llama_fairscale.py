"""What scripts/llama_fairscale runs: the training in four processes, the same in one, and a table of both."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

import megatron_flex as mf  # noqa: E402
from tests.support import llama  # noqa: E402

MODEL_PARALLEL, REPLICAS = 2, 2
BOUND = 1e-5  # of the greatest entry
LEARNING_RATE = 0.3
READ = (
    "layers.1.attention.wq:output",
    "layers.1.feed_forward.act:output",
    "layers.1.feed_forward.w2:output",
    "layers.1:output",
    "output:output",
)
ABLATED = "layers.1.feed_forward.act:output"
Results = dict[str, Tensor]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Counting by ones, twos or threes: tokens and the ones that follow."""
    draw = torch.Generator().manual_seed(100 * step + replica)
    start, stride = torch.randint(llama.VOCABULARY, (8, 1), generator=draw), 1 + torch.arange(8)[:, None] % 3
    counted = (start + stride * torch.arange(llama.TOKENS + 1)) % llama.VOCABULARY
    return counted[:, :-1].contiguous(), counted[:, 1:].contiguous()


def ablate(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Zero the eight neurons that fire most, of all of them: no shard can tell which these are."""
    most = inputs.detach().abs().mean((0, 1)).topk(8).indices
    mask = torch.ones(inputs.shape[-1])
    mask[most] = 0
    return inputs * mask


def train(model: nn.Module, replicas: list[int], steps: int) -> Tensor:
    """Plain gradient descent; the loss of each step, averaged over these replicas."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        mean = torch.zeros(())
        for replica in replicas:
            tokens, labels = batch(step, replica)
            loss = llama.loss_of(model(tokens), labels) / len(replicas)
            loss.backward()
            mean += loss.detach()
        losses.append(mean)
        optimizer.step()
    return torch.stack(losses)


def look(model: nn.Module) -> tuple[Results, bool]:
    """Capture tensors and gradients, and ablate neurons; and whether this rank received the captures."""
    tokens, labels = batch(1000, 0)
    hooks = [mf.HookFunction(site, hook_type=kind) for site in READ for kind in ("forward", "tensor")]
    with mf.attach(model, hooks) as flex:
        llama.loss_of(model(tokens), labels).backward()
        found = {name: read[0].clone() for name, read in flex.output_dict.items()}
        leads = flex.is_leader
    with mf.attach(model, [mf.HookFunction(ABLATED, editing_function=ablate, save=False)]), torch.no_grad():
        found["loss, ablated"] = llama.loss_of(model(tokens), labels)
    return found, leads


def work(rank: int, folder: str, steps: int) -> None:
    """One of the processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    world = MODEL_PARALLEL * REPLICAS
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    from fairscale.nn.model_parallel import initialize

    from tests.support import llama_fairscale

    with contextlib.redirect_stdout(io.StringIO()):
        initialize.initialize_model_parallel(MODEL_PARALLEL)
    group, replica = initialize.get_data_parallel_group(), initialize.get_data_parallel_rank()
    model = DistributedDataParallel(llama_fairscale.model(), process_group=group)
    losses = train(model, [replica], steps)
    dist.all_reduce(losses, group=group)
    with mf.FlexModel(model) as flex:
        weights = {name: whole.clone() for name, whole in flex.named_full_parameters(everywhere=True)}
    found, leads = look(model)
    if leads and replica == 0:
        torch.save((weights, found | ends(losses / REPLICAS)), f"{folder}/parallel")
    dist.barrier()
    dist.destroy_process_group()


def ends(losses: Tensor) -> Results:
    """How training began and ended."""
    return {"loss, first step": losses[0], "loss, last step": losses[-1]}


def alone(steps: int, weights: Results) -> tuple[Results, Results]:
    """The same in this process: plain torch modules, trained likewise, then looked at with these weights."""
    model = llama.single()
    losses = train(model, list(range(REPLICAS)), steps)
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.load_state_dict(weights)
    return trained, look(model)[0] | ends(losses)


def report(parallel: Results, single: Results) -> bool:
    """Print the table; whether all agree."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("full tensor", "shape", "greatest entry", "difference", box=box.SIMPLE)
    good = parallel.keys() == single.keys()
    for name, want in single.items():
        got = parallel[name]
        most = want.abs().max().item()
        error = (got - want).abs().max().item() / most if got.shape == want.shape else float("inf")
        good = good and error <= BOUND
        shape = " × ".join(map(str, want.shape)) or "a number"
        table.add_row(name, shape, f"{most:.4f}", f"{error:.1e}", style="" if error <= BOUND else "bold red")
    console = Console(width=100)
    console.print(table)
    told = f"{len(single)} tensors {'all agree' if good else 'do NOT all agree'} to {BOUND:g} relative"
    console.print(f"{told}: {MODEL_PARALLEL * REPLICAS} processes against one")
    return good


def main(words: list[str] | None = None) -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(prog="scripts/llama_fairscale", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of training (default %(default)s)")
    args = parser.parse_args(words)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    torch.set_num_threads(1)
    print(
        f"training a LLaMA-style model of fairscale's layers, {args.steps} steps: model parallel "
        f"{MODEL_PARALLEL} x data parallel {REPLICAS}, gloo",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        get_context("forkserver").set_forkserver_preload(["megatron_flex", "tests.support.llama"])
        mp.start_processes(work, (folder, args.steps), MODEL_PARALLEL * REPLICAS, start_method="forkserver")
        weights, parallel = torch.load(f"{folder}/parallel")
    trained, single = alone(args.steps, weights)
    name = "layers.1.attention.wo.weight"
    return 0 if report(parallel | {name: weights[name]}, single | {name: trained[name]}) else 1


if __name__ == "__main__":
    sys.exit(main())
