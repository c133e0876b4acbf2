"""Wrappers and layers that no adapter knows are refused by name, wherever they are and on every road."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import megatron_flex as mf
from megatron_flex.adapters.detection import UNSUPPORTED
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.training_run import TrainingRun
from tests.support import llama, sharded_ddp
from tests.support import llama_fairscale as parallel
from tests.support.messages import assert_names, missing_values
from tests.support.pool import run

KINDS: tuple[Literal["forward", "tensor"], ...] = ("forward", "tensor")


def said(call: Callable[[], Any]) -> str:
    """What an error says; empty if there is none."""
    try:
        call()
    except mf.FlexError as error:
        return str(error)
    return ""


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module of a class that cannot be made here: without a GPU, or without RPC."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def everywhere(module: Any) -> dict[str, str]:
    """What each road says."""
    return {
        "FlexModel": said(lambda: mf.FlexModel(module)),
        "attach": said(lambda: mf.attach(module)),
        "detect": said(lambda: mf.detect(module)),
        "launcher": said(lambda: TrainingRun(Settings()).attach([module])),
    }


def of_fairscale() -> dict[str, dict[str, str]]:
    """Each class of fairscale's, by itself or in something."""
    from fairscale.experimental.nn.ampnet_pipe.pipe import AMPnetPipe
    from fairscale.experimental.nn.data_parallel import SlowMoDistributedDataParallel
    from fairscale.experimental.nn.distributed_pipeline import DistributedPipeline
    from fairscale.experimental.nn.offload import OffloadModel
    from fairscale.nn import FullyShardedDataParallel
    from fairscale.nn.misc import FlattenParamsWrapper
    from fairscale.nn.moe import MOELayer, Top2Gate
    from fairscale.nn.pipe.async_pipe import AsyncPipe
    from fairscale.nn.pipe.rpc import PipeRPCWrapper

    def sharded(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, compute_device=torch.device("cpu"))

    parallel.initialize(2)
    inside = llama.single()
    inside.norm = sharded(inside.norm)  # type: ignore[assignment]
    layers = parallel.model()
    layers.norm = sharded(layers.norm)  # type: ignore[assignment]
    reduced, _ = sharded_ddp.wrapped(llama.single())
    around, _ = sharded_ddp.wrapped(
        nn.Sequential(nn.Linear(2, 2), sharded(nn.Linear(2, 2))), sync_models_at_startup=False
    )
    found = {
        "FullyShardedDataParallel": sharded(nn.Linear(4, 4)),
        "FullyShardedDataParallel in a plain model": inside,
        "FullyShardedDataParallel in a tensor parallel model": layers,
        "FullyShardedDataParallel around ShardedDataParallel": sharded(reduced),
        "FullyShardedDataParallel in ShardedDataParallel": around,
        "FullyShardedDataParallel in DistributedDataParallel": DistributedDataParallel(inside),
        "FlattenParamsWrapper": FlattenParamsWrapper(nn.Linear(4, 4)),
        "MOELayer": nn.Sequential(MOELayer(Top2Gate(4, 2), nn.Linear(4, 4))),
    }
    kinds: list[Any] = [SlowMoDistributedDataParallel, OffloadModel, AsyncPipe, PipeRPCWrapper]
    found |= {kind.__name__: bare(kind) for kind in (*kinds, DistributedPipeline)}
    found["AsyncPipe that AMPnet makes"] = bare(AMPnetPipe)
    return {name: everywhere(module) for name, module in found.items()}


def test_classes_of_fairscales() -> None:
    pytest.importorskip("fairscale")
    names = {name for name, refusal in UNSUPPORTED.items() if refusal.package == "fairscale"}
    for told in run(2, of_fairscale):
        assert names <= told.keys(), "each one that is refused was tried"
        for name, roads in told.items():
            kind = name.partition(" ")[0]
            for road, text in roads.items():
                assert missing_values(text, kind, "fairscale") == [], (name, road)
                assert UNSUPPORTED[kind].instead in text
        assert_names(told["FullyShardedDataParallel in a plain model"]["detect"], "norm")
        assert "fully_shard" in told["FullyShardedDataParallel"]["attach"]


def of_torch() -> dict[str, dict[str, str]]:
    """Replicas that torch makes without a wrapper, or in threads."""
    from torch.distributed._composable.replicate import replicate

    spread: Any = DataParallel(llama.single())
    alone = said(lambda: mf.FlexModel(spread).restore())
    spread.device_ids = [0, 1]  # as it has them where there are several GPUs
    part = nn.Sequential(llama.single())
    replicate(part[0])
    told = {"replicate": everywhere(part), "DataParallel": everywhere(spread)}
    return {**told, "on one device": {"FlexModel": alone}}


def test_replicas_of_torchs() -> None:
    for told in run(2, of_torch):
        assert told["on one device"] == {"FlexModel": ""}
        for road, text in told["replicate"].items():
            assert missing_values(text, "'0'", "DDP", "torch", "replicate()") == [], road
        for road, text in told["DataParallel"].items():
            assert missing_values(text, "DataParallel", [0, 1]) == [], road


def test_the_wrapper_of_apex() -> None:
    """It is found by its name; `tests/contract/test_apex.py` has the real one, where apex is installed."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    kind = type(
        "DistributedDataParallel",
        (nn.Module,),
        {"forward": forward, "__module__": "apex.parallel.distributed"},
    )
    for road, text in everywhere(nn.Sequential(kind())).items():
        assert missing_values(text, "DistributedDataParallel", "apex") == [], road
    assert said(lambda: mf.detect(nn.Linear(2, 2))) == ""


def kept() -> dict[str, Any]:
    """What fairscale's checkpoint_wrapper leaves of names, values and gradients; it wraps nothing."""
    from fairscale.nn import checkpoint_wrapper

    model = llama.single()
    for block in model.layers.values():
        checkpoint_wrapper(block)
    reduced, _ = sharded_ddp.wrapped(model)
    site = "layers.1.attention.wq:output"
    hooks = [mf.HookFunction(site, hook_type=kind) for kind in KINDS]
    with mf.attach(reduced, hooks) as flex:
        tokens, labels = llama.batch(dist.get_rank())
        llama.loss_of(reduced(tokens), labels).backward()
        out = {n: t.clone() for n, t in flex.named_full_parameters(gradients=True, everywhere=True)}
        if flex.is_leader:
            out |= {n: read[0] for n, read in flex.output_dict.items()}
    return out


def test_checkpointed_layers_keep_their_names() -> None:
    pytest.importorskip("fairscale")
    site = "layers.1.attention.wq:output"
    truth = llama.truth(2, [site], ())
    for rank, found in enumerate(run(2, kept)):
        assert torch.allclose(found.pop(site), truth[rank]["values"][site], atol=1e-6)
        assert torch.allclose(found.pop(f"{site}.grad"), truth[rank]["gradients"][site], atol=1e-6)
        for name, tensor in found.items():
            mean = torch.stack([t["parameter gradients"][name] for t in truth]).mean(0)
            assert torch.allclose(tensor, mean, atol=1e-6), name
