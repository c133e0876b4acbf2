"""Two frameworks in one model, an untested version, a way of sharding without a rule: an error everywhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from megatron_flex.adapters.adapter_base import FrameworkMatch
from megatron_flex.config import flex_config
from tests.distributed import test_dtensor
from tests.distributed.test_errors import told
from tests.support import llama_fairscale, wrapping
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run


def _column(outputs: int = 8) -> nn.Module:
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear

    return ColumnParallelLinear(4, outputs, bias=False, gather_output=False)


def _tensor_parallel(model: nn.Module, how: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), how)


def two_frameworks() -> list[str]:
    from torch.distributed.tensor.parallel import ColwiseParallel

    llama_fairscale.initialize(2)
    model = nn.Sequential(nn.Linear(4, 4), _column())
    _tensor_parallel(model, {"0": ColwiseParallel()})
    return [told(lambda: mf.FlexModel(model)), told(lambda: mf.detect(model))]


def test_two_frameworks_claim_one_model() -> None:
    pytest.importorskip("fairscale")
    for answers in run(2, two_frameworks):
        for text in answers:
            assert_names(text, "fairscale", "ColumnParallelLinear", "PyTorch")
            assert_names(text, 0, "ColwiseParallel")


def untested() -> dict[str, str]:
    import fairscale

    llama_fairscale.initialize(2)
    model, own = nn.Sequential(_column()), fairscale.__version__
    fairscale.__version__ = "0.4.6"
    out = {"refused": told(lambda: mf.FlexModel(model)), "told": str(mf.detect(model))}
    flex_config.untested = True
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        mf.FlexModel(model).restore()
    out["warned"] = "; ".join(str(w.message) for w in shown if w.category is mf.FlexWarning)
    flex_config.untested, fairscale.__version__ = False, own
    out["tested"] = told(lambda: mf.FlexModel(model).restore())
    return out


def test_a_version_that_no_test_ran_on() -> None:
    pytest.importorskip("fairscale")
    for answer in run(2, untested):
        range_ = "fairscale 0.4.6, outside the tested range 0.4.13 to below 0.5"
        assert answer["refused"].startswith(range_)
        assert_names(answer["refused"], "fairscale>=0.4.13,<0.5", "FLEX_UNTESTED=1")
        assert f"  version: {range_}" in answer["told"]
        assert answer["warned"].startswith(range_)
        assert answer["tested"] == ""


def broken_adapter() -> dict[str, str]:
    def broken(chunks: list[nn.Module], said: Any, process_group: Any) -> FrameworkMatch | None:
        raise ImportError("cannot import name 'x' from 'toy'")

    handle = mf.register_adapter(broken)
    out = {"plain": told(lambda: mf.FlexModel(nn.Linear(2, 2)))}
    out["in DDP"] = told(lambda: mf.FlexModel(DistributedDataParallel(nn.Linear(2, 2))))
    llama_fairscale.initialize(2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        out["another's"] = told(lambda: mf.FlexModel(nn.Sequential(_column())).restore())
    out["warned"] = "; ".join(str(w.message) for w in shown if w.category is mf.FlexWarning)
    flex_config.adapters_off = "broken"
    out["off"] = told(lambda: mf.FlexModel(nn.Linear(2, 2)).restore())
    flex_config.adapters_off = ""
    handle.remove()
    out["out"] = told(lambda: mf.FlexModel(nn.Linear(2, 2)).restore())
    return out


def test_a_broken_adapter_may_hide_shards() -> None:
    """Whose model it is, only that adapter could say; where another one says it, it harms nobody."""
    pytest.importorskip("fairscale")
    for answer in run(2, broken_adapter):
        for case in ("plain", "in DDP"):
            assert_names(answer[case], "broken", "ImportError: cannot import name 'x'")
            assert "FLEX_ADAPTERS_OFF" in answer[case]
        assert answer["another's"] == answer["off"] == answer["out"] == ""
        assert_names(answer["warned"], "broken")


class Halved(torch.autograd.Function):
    """Some parallelism of one's own, of which nobody told anything: a rank's rows of what it gets."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.whole = tensor.shape
        return tensor[: len(tensor) // 2].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad, torch.zeros_like(grad)])


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Halved.apply(x)


def same(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs


def no_rule() -> dict[str, str]:
    """Reading and editing behind it, in fairscale's model and in torch's own tensor parallel one."""
    from torch.distributed.tensor.parallel import ColwiseParallel

    llama_fairscale.initialize(2)
    models = {
        "fairscale": nn.Sequential(_column(), Own(), nn.Identity()),
        "torch": _tensor_parallel(
            nn.Sequential(nn.Linear(4, 8), Own(), nn.Identity()), {"0": ColwiseParallel()}
        ),
    }
    out = {}
    for name, model in models.items():
        for site in ("1:output", "2:input"):
            for kind, edit in (("read", None), ("edited", same)):
                out[f"{name}, {kind}, {site}"] = told(lambda m=model, h=(site, edit): _attached(m, *h))
    return out


def _attached(model: nn.Module, site: str, edit: Any) -> None:
    with mf.attach(model, [mf.HookFunction(site, editing_function=edit)]) as flex:
        try:
            model(torch.ones(2, 4))
        finally:
            assert not flex.output_dict, "what is not known is not handed out"


def test_a_way_of_sharding_without_a_rule() -> None:
    pytest.importorskip("fairscale")
    for answer in run(2, no_rule):
        assert len(answer) == 8
        for case, text in answer.items():
            site = case.rpartition(" ")[2]
            assert_names(text, site, "Halved", "expected_shape")


def composites() -> list[str]:
    model = test_dtensor.parallel(test_dtensor.Plan(2, 2, wrapper="FSDP2"))
    out = [str(mf.detect(model, everywhere=True))]
    llama_fairscale.initialize(2)
    wrapped = DistributedDataParallel(
        llama_fairscale.model(), process_group=llama_fairscale_group(), broadcast_buffers=False
    )
    out.append(str(mf.detect(wrapped, everywhere=True)))
    out.append(str(mf.detect(wrapping.full((4,)), everywhere=True)))
    return out


def llama_fairscale_group() -> Any:
    from fairscale.nn.model_parallel.initialize import get_data_parallel_group

    return get_data_parallel_group()


def test_what_is_composed_is_told() -> None:
    pytest.importorskip("fairscale")
    for torchs, fairscale, sharded in run(4, composites):
        assert_names(torchs.splitlines()[0], "PyTorch")
        assert "tp=2" in torchs
        assert "dp=2" in torchs
        assert "fully_shard" in torchs
        assert_names(fairscale, "ParallelEmbedding", "dp=2 x tp=2")
        assert_names(fairscale, "DistributedDataParallel")
        assert_names(fairscale, "0.4.13")
        assert_names(sharded, "pytorch", "fully_shard", "dp=4")


def megatron() -> list[str]:
    from tests.support import ranks, same, wrapped

    chunks = ranks.start(same.CASES["tp2"])
    bare = str(mf.detect(chunks))
    return [bare, str(mf.detect(wrapped.ddp(chunks)))]


@pytest.mark.versions
def test_megatron_is_told_with_what_is_around_it() -> None:
    pytest.importorskip("megatron.core")
    for bare, inside in run(2, megatron):
        assert_names(bare, "megatron-core", "GPTModel", "tp=2", "0.12.3", "0.20")
        assert "DistributedDataParallel" not in bare
        assert_names(inside, "DistributedDataParallel")
