"""The LLaMA-style model in PyTorch's wrappers that shard parameters over data parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support import llama, proof

FEW = ("tok_embeddings:output", "layers.1.attention.wq:output", "layers.1:output", "output:output")  # sites


def built(model: nn.Module) -> proof.Built:
    """What the comparison with one process needs of a model that averages its gradients itself."""

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, averaged=True)


def flat(model: nn.Module | None = None, original: bool = True, **options: Any) -> nn.Module:
    """FSDP1, a wrapper about each layer and one about all; `original` keeps the original parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model or llama.single(),
        auto_wrap_policy=ModuleWrapPolicy({llama.Block}),
        device_id=torch.device("cpu"),
        use_orig_params=original,
        **options,
    )


def hybrid() -> nn.Module:
    """FSDP1 over two shards and two replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return flat(device_mesh=over, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def full(shape: tuple[int, ...], model: nn.Module | None = None, **options: Any) -> nn.Module:
    """FSDP2 over a mesh of one dim, or of replicas and shards; on each layer and on all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    over = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = model or llama.single()
    for module in model.modules():
        if isinstance(module, llama.Block):
            fully_shard(module, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)
