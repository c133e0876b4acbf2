"""scripts/bench --scale: what a rank of a large job stores, sends, and keeps, on a fake process group.

One process is the first rank of the job: nothing is computed by others or sent to them. Where ranks compare
through the rendezvous store, the store lets the other ranks take part with the code that they run. Counted
are the bytes of collectives that leave or arrive on this rank, requests to the store, keys that stay there,
and files; sizes of tensors are small, the numbers of ranks are not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from bench_attach import Shape
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = {
    # 128 layers, where the model has 126: all stages have 8. Data parallel ranks fill the world.
    "405B, TP8 x PP16": Shape(8, 256, 832, 128, 8, 1024, tp=8, pp=16),
    "128 experts, TP8 x EP8": Shape(4, 64, 16, 32, 8, 1024, experts=128, tp=8, ep=8),
    "2 layers, TP8 x PP4": Shape(2, 64, 64, 8, 8, 128, tp=8, pp=4),
    "2 layers, TP8": Shape(2, 64, 64, 8, 8, 128, tp=8),  # of a test
}
WORLDS = (1024, 16384)
SEQUENCE = 8  # tokens
CHANGES = 100  # of hooks


class JobStore(dist.Store):
    """A store in one process that counts the requests of this rank, and has the other ranks compare too."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world, self._values, self._playing = world, dict[str, bytes](), False
        self.requests: Counter[str] = Counter()
        self.seconds_of_others = 0.0

    def _count(self, name: str) -> None:
        self.requests[name] += not self._playing

    def keys(self) -> list[str]:
        """The keys of megatron_flex that are in the store."""
        return [key for key in self._values if "megatron_flex/" in key]

    def set(self, key: str, value: Any) -> None:  # as torch's
        self._count("set")
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self._count("get")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._count("add")
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def check(self, keys: list[str]) -> bool:
        self._count("check")
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("compare_set")
        known = self._values.get(key, b"")
        if known == (expected if isinstance(expected, bytes) else expected.encode()):
            self._values[key] = desired if isinstance(desired, bytes) else desired.encode()
        return self._values[key]

    def delete_key(self, key: str) -> bool:
        self._count("delete_key")
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # the name by which torch's PrefixStore calls it

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=1)) -> None:
        self._count("wait")
        (key,) = keys
        if key not in self._values and key.endswith("/outcome"):
            self._let_others_compare(key.removesuffix("/outcome"))
        if key not in self._values:
            raise RuntimeError(f"nobody sets {key} within {timeout}")

    def _let_others_compare(self, prefix: str) -> None:
        from megatron_flex.collectives.store_round import StoreRound

        _, digest, values = self._values[f"{prefix}/first"].decode().split(" ")
        self._playing, began = True, process_time()
        others = [StoreRound(self, prefix, self._world, rank) for rank in range(1, self._world)]
        for other in others:
            other.arrive(digest, values, "")
        for other in others:
            other.leave()
        self._playing = False
        self.seconds_of_others += process_time() - began


@dataclass
class Traffic:
    """What this rank asked for and sent.

    Attributes:
        bytes: of the tensors that collectives read and write here.
        largest: bytes of the largest collective.
        requests: to the store.
        keys: of megatron_flex that stay in the store.
        files: that this rank wrote.
        seconds: of the processor.
        mib: by which the process has grown.
    """

    bytes: int
    largest: int
    requests: int
    keys: int
    files: int
    seconds: float
    mib: float


class CollectiveCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives of this process read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.sizes.append(sum(t.nbytes for t in tensors))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.gather_.default:
            _number_ranks(*args[0])
        return result


def _number_ranks(parts: list[torch.Tensor]) -> None:
    """Give gathered rows the numbers that ranks send, of which the fake group repeats this rank's.

    A row begins with the rank and its coordinates on `pp`, `dp`, `cp` and `tp`; the last are gathered first,
    and nothing is gathered along `cp`, of size 1.
    """
    for number, part in enumerate(parts):
        if part.dtype == torch.int64 and part.ndim == 2:
            part[:, 0] += number * len(part)
            column = next(c for c in (4, 2, 1) if not part[:, c].any())
            part[:, column] = number


def _sum_equal_ranks(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Let a sum be that over ranks which all have this rank's numbers; the fake group leaves them alone."""

    def sum_ranks(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        work = all_reduce(tensor, op, group, **kwargs)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return work

    return sum_ranks


def _name_other_stages(layers: int, gather: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Let the hook points and parameters that other stages report be those of their layers.

    The fake group repeats this stage's report for every stage.
    """

    def renumber(described: Any, stage: int) -> Any:
        if "layers." not in described.name:
            return None  # the embedding is on the first stage alone
        name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + stage * layers}", described.name)
        return replace(described, name=name)

    def gather_reports(value: Any, mesh: Any, axes: list[str]) -> list[Any]:
        reports = gather(value, mesh, axes)
        for stage in range(1, len(reports)):
            *described, layouts = reports[stage]
            renamed = [[d for one in kind if (d := renumber(one, stage))] for kind in described]
            reports[stage] = (*renamed, layouts)
        return reports

    return gather_reports


class Meter:
    """Takes down what each part of a run costs this rank.

    Args:
        store: of the job.
        folder: in which files are counted.
    """

    def __init__(self, store: JobStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self.parts: dict[str, Traffic] = {}

    def run(self, name: str, part: Callable[[], Any]) -> Any:
        """Run a part, and note what it costs."""
        before, peak, files = self._store.requests.total(), _peak(), _count_files(self._folder)
        began = process_time()
        with CollectiveCounter() as collectives:
            result = part()
        seconds = process_time() - began - self._store.seconds_of_others
        self._store.seconds_of_others = 0.0
        self.parts[name] = Traffic(
            bytes=sum(collectives.sizes),
            largest=max(collectives.sizes, default=0),
            requests=self._store.requests.total() - before,
            keys=len(self._store.keys()),
            files=_count_files(self._folder) - files,
            seconds=seconds,
            mib=_peak() - peak,
        )
        return result


def build(shape: Shape, world: int, store: JobStore) -> Any:
    """Be the first rank of the job, and build its part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    new_group = dist.new_group
    absent: Any = dist.GroupMember.NON_GROUP_MEMBER  # what torch returns for groups without this rank

    def join(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return absent if ranks is not None and 0 not in ranks else new_group(ranks)

    dist.new_group = join
    try:
        parallel_state.initialize_model_parallel(
            shape.tp,
            shape.pp,
            expert_model_parallel_size=shape.ep,
            expert_tensor_parallel_size=1 if shape.experts else None,
            create_gloo_process_groups=False,
        )
    finally:
        dist.new_group = new_group
    model_parallel_cuda_manual_seed(1)
    several = {"num_moe_experts": shape.experts, "moe_router_topk": 8} if shape.experts else {}
    config = TransformerConfig(
        num_layers=shape.layers * shape.pp,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=1 if shape.experts else None,
        sequence_parallel=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **several,
    )
    experts = {"num_experts": shape.experts, "moe_grouped_gemm": False} if shape.experts else {}
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", **experts),
        vocab_size=shape.vocabulary,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        post_process=shape.pp == 1,
    )


def measure(shape: Shape, world: int, folder: Path, changes: int) -> dict[str, Traffic]:
    """Attach on one rank of the job, change hooks, run steps, dump and verify.

    Args:
        shape: the model.
        world: the ranks of the job.
        folder: for the dump.
        changes: how often hooks change; half as many steps run.
    """
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable(force=True)
    store = JobStore(world)
    model = build(shape, world, store)
    meter = Meter(store, folder)
    numbers = torch.arange(SEQUENCE).reshape(1, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    labels = numbers if shape.pp == 1 else None  # which only the last stage has

    def step() -> None:
        with flex.step():
            model(numbers, numbers, mask, labels=labels).sum().backward()

    flex = meter.run("attach", lambda: mf.attach(model))
    flex.register_forward_hook(mf.HookFunction("decoder.layers.*", save=False, editing_function=_keep))
    meter.run("first step", step)
    meter.run("step", step)

    def change() -> None:
        for number in range(changes):
            flex.select("all" if number % 2 else "none")
            step()

    meter.run(f"{changes} changes of hooks", change)
    flex.select("all")
    step()  # which compares this change
    dump = mf.Dump(folder / "dump", "decoder.layers.*")
    meter.run("open a dump", lambda: flex.register_dump(dump))
    meter.run("dumped step", lambda: (step(), flex.remove_dump(dump)))  # which waits for the files
    statistics = mf.Statistics(folder / "statistics", "decoder.layers.*")
    meter.run("open statistics", lambda: flex.register_statistics(statistics))
    meter.run("step with statistics", step)
    meter.run("close statistics", lambda: flex.remove_statistics(statistics))
    flex.verify()
    meter.run("verified step", step)
    meter.run("parameters", lambda: sum(1 for _ in flex.named_full_parameters()))
    meter.run("restore", flex.restore)
    return meter.parts


def _keep(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * 1.0


def _count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def _peak() -> float:
    """The most memory that this process has had, in MiB."""
    return getrusage(RUSAGE_SELF).ru_maxrss / 1024


def main(words: list[str]) -> None:
    """Measure all shapes, each in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench --scale", description=str(__doc__))
    parser.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", default=list(SHAPES)[:2], choices=list(SHAPES)
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(words)
    results: dict[str, dict[int, dict[str, Traffic]]] = {}
    for name in args.shapes:
        results[name] = {world: _measure_apart(name, world) for world in WORLDS}
        print(format_table(name, results[name]), flush=True)
    if args.json:
        figures = {
            name: {world: {part: asdict(t) for part, t in parts.items()} for world, parts in worlds.items()}
            for name, worlds in results.items()
        }
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _measure_apart(name: str, world: int) -> dict[str, Traffic]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, folder, str(CHANGES), str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    (parts,) = json.loads(done.stdout.splitlines()[-1]).values()
    return {part: Traffic(**figures) for part, figures in parts.items()}


def format_table(name: str, worlds: dict[int, dict[str, Traffic]]) -> str:
    """The figures of a shape, each for all sizes of the job."""
    rows = [f"{name}; each figure for {' and '.join(f'{world:,}' for world in worlds)} ranks"]
    columns = list(Traffic.__dataclass_fields__)
    rows.append(f"{'':24}" + "".join(f"{column:>22}" for column in columns))
    for part in next(iter(worlds.values())):
        cells = (
            " ".join(f"{round(getattr(parts[part], column), 2):,}" for parts in worlds.values())
            for column in columns
        )
        rows.append(f"{part:24}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(rows)


def _measure_here(name: str, folder: str, changes: str, *worlds: str) -> None:
    """Measure a shape in jobs of several sizes, one after the other, and print the figures as JSON."""
    from megatron.core import parallel_state

    from megatron_flex.runtime import session

    dist.all_reduce = _sum_equal_ranks(dist.all_reduce)
    session.gather_objects = _name_other_stages(SHAPES[name].layers, session.gather_objects)
    out = {}
    for world in worlds:
        parts = measure(SHAPES[name], int(world), Path(folder, world), int(changes))
        out[world] = {part: asdict(traffic) for part, traffic in parts.items()}
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    print(json.dumps(out))


if __name__ == "__main__":
    _measure_here(*sys.argv[1:])
