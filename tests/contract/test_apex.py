"""`apex.transformer`, where it is installed: what the adapter counts on, and a run against one process.

It was last in apex 25.09, which is on no package index; its Python files on PYTHONPATH are enough for these.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_flex as mf
from megatron_flex import cpu
from tests.distributed import test_pipelining
from tests.support import llama, proof
from tests.support import llama_apex as parallel
from tests.support.pool import run_alone as run


def _there() -> bool:
    return importlib.util.find_spec("apex") is not None and (
        importlib.util.find_spec("apex.transformer") is not None
    )


if not _there():
    pytest.skip("apex.transformer is not installed (last in apex 25.09)", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_names_that_the_adapter_uses() -> None:
    from apex.transformer import parallel_state
    from apex.transformer.tensor_parallel import layers, mappings

    from megatron_flex.adapters import apex as adapter

    for getter in (*adapter.GROUP_GETTERS.values(), "model_parallel_is_initialized"):
        assert callable(getattr(parallel_state, getter))
    for name in adapter.PARALLEL:
        assert getattr(layers, name).__module__ == adapter.LAYERS_MODULE
    assert callable(layers.reduce_from_tensor_model_parallel_region)
    assert callable(mappings.copy_to_tensor_model_parallel_region)
    gather = inspect.signature(mappings.gather_from_sequence_parallel_region)
    assert gather.parameters["to_model_parallel"].default is True
    multiply = inspect.signature(layers.linear_with_grad_accumulation_and_async_allreduce)
    assert {"input", "weight", "async_grad_allreduce", "sequence_parallel_enabled"} <= set(
        multiply.parameters
    )
    for name in (adapter.COLUMN, adapter.ROW):
        switches = inspect.signature(getattr(layers, name)).parameters
        assert {"skip_bias_add", "gradient_accumulation_fusion", adapter.SEQUENCE_PARALLEL} <= set(switches)


def test_the_wrapper_that_is_refused() -> None:
    if importlib.util.find_spec("apex.parallel") is None:
        pytest.skip("this apex has no apex.parallel (last in apex 25.05)")
    from apex.parallel import DistributedDataParallel

    from megatron_flex.adapters.detection import UNSUPPORTED

    package = UNSUPPORTED[DistributedDataParallel.__name__].package
    assert DistributedDataParallel.__module__.startswith(f"{package}.")


def test_norms_have_these_names() -> None:
    from apex import normalization
    from apex.transformer import layers

    from megatron_flex.adapters import apex as adapter

    found = {n for n in dir(normalization) if "Norm" in n} | {n for n in dir(layers) if "Norm" in n}
    assert found == set(adapter.NORMS)


def build(tp: int, switches: dict[str, bool]) -> proof.Built:
    from apex.transformer.tensor_parallel import layers

    parallel.initialize(tp)
    if switches.get("sequence"):
        cpu.enable()  # apex asks for the current CUDA device there
    if switches.get("fused"):
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = _Kernel
    model: Any = parallel.model(**switches)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        for parameter in model.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        logits = model(tokens)
        if switches.get("sequence"):
            from apex.transformer.tensor_parallel import mappings

            logits = mappings.gather_from_tensor_model_parallel_region(logits)
        loss = llama.loss_of(logits, labels)
        loss.backward()
        return loss

    def name(site: str) -> str:
        return site.replace("tok_embeddings", "tok_embeddings.inner") if switches.get("sequence") else site

    return proof.Built(model, step, name=name)


class _Kernel:
    """Does what the CUDA extension does, which no CPU runs."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradients: Tensor, main: Tensor) -> None:
        main.addmm_(gradients.t(), inputs)


CASES: dict[str, tuple[int, int, dict[str, bool]]] = {
    "tp2": (2, 1, {}),
    "tp2 dp2": (2, 2, {}),
    "tp2, fused weight gradients": (2, 1, {"fused": True}),
    "tp2, fused norms": (2, 1, {"norms": True}),
    "tp2, sequence parallel, fused norms": (2, 1, {"sequence": True, "norms": True}),
}
INPUTS = ("layers.0.attention.wq:input", "layers.1.feed_forward.w1:input", "output:input")


@pytest.mark.parametrize("case", CASES)
def test_matrix(case: str, cells: list[Any]) -> None:
    tp, dp, switches = CASES[case]
    sites = (*llama.SITES, *INPUTS)
    found = proof.compare(
        "apex", case, tp * dp, build, tp, switches, sites=sites, parameter=_plain, alone=True
    )
    proof.judge(found, cells)


def _plain(name: str) -> str:
    return name.replace(".inner", "")


# -- schedules ---------------------------------------------------------------------------------------------


def staged(
    pp: int, chunks: int, tp: int, microbatches: int, samples: int, sequence: bool = False
) -> proof.Built:
    """A model that apex's schedules run; with several chunks on a rank, the interleaved one."""
    from apex.transformer import parallel_state
    from apex.transformer.enums import ModelType
    from apex.transformer.pipeline_parallel import get_forward_backward_func, utils

    cpu.enable()  # the schedules ask for the current CUDA device, and synchronize it
    virtual = chunks if chunks > 1 else None
    parallel.initialize(tp, pp, virtual)
    replicas = dist.get_world_size() // (tp * pp)
    utils._reconfigure_microbatch_calculator(
        dist.get_rank(), None, samples * replicas, samples // microbatches, replicas
    )
    coord, group = parallel_state.get_pipeline_model_parallel_rank(), None
    models: list[Any] = []
    for turn in range(chunks):
        whole = parallel.model(kind=parallel.Stage, sequence=sequence)
        models.append(test_pipelining.stage_of(whole, turn * pp + coord, pp * chunks))
        models[-1].model_type = ModelType.encoder_or_decoder
    group = parallel_state.get_pipeline_model_parallel_group()

    def loss_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if sequence:
            from apex.transformer.tensor_parallel import mappings

            logits = mappings.gather_from_tensor_model_parallel_region(logits)
        loss = llama.loss_of(logits, labels)
        return loss, loss.detach()

    def forward_step(batch: list[Tensor], model: Any) -> Any:
        tokens, labels = batch
        return model(tokens), partial(loss_of, labels=labels)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        schedule = get_forward_backward_func(virtual, pp)
        losses = schedule(
            forward_step,
            [tokens, labels],
            models,
            forward_only=False,
            tensor_shape=(samples // microbatches, llama.TOKENS, llama.HIDDEN),
            dtype=torch.float32,
            sequence_parallel_enabled=sequence,
            batch_p2p_comm=False,  # of NCCL's only
        )
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        if pp > 1:
            dist.all_reduce(loss, group=group)
        return loss

    def name(site: str) -> str:
        return site.replace("tok_embeddings", "tok_embeddings.inner") if sequence else site

    return proof.Built(
        models, step, name=name, microbatches=microbatches, samples=samples, gradient_scale="loss"
    )


SCHEDULES: dict[str, tuple[Any, ...]] = {  # stages, chunks, shards, microbatches, samples, sequence
    "no pipelining, tp2": (1, 1, 2, 2, 2, False),
    "pp2": (2, 1, 1, 2, 2, False),
    "tp2 pp2": (2, 1, 2, 2, 2, False),
    "tp2 pp2, sequence parallel": (2, 1, 2, 1, 2, True),
    "pp3 interleaved (vpp2)": (3, 2, 1, 3, 3, False),
    "pp3 interleaved (vpp2), six microbatches": (3, 2, 1, 6, 6, False),
    "tp2 pp3 interleaved (vpp2)": (3, 2, 2, 3, 3, False),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules(case: str, cells: list[Any]) -> None:
    pp, chunks, tp, *more = SCHEDULES[case]
    found = proof.compare("apex", case, pp * tp, staged, pp, chunks, tp, *more, parameter=_plain, alone=True)
    proof.judge(found, cells)


INNER = {
    "tok_embeddings:output": "tok_embeddings:partial",
    "layers.0.attention.wq:input": "layers.0.attention.wq:gemm_input",
    "layers.1.attention.wo:output": "layers.1.attention.wo:partial",
    "output:input": "output:gemm_input",
    "output:output": "output:local",
}


def inside(tp: int, switches: dict[str, bool]) -> proof.Built:
    built = build(tp, switches)
    names = {k: v for k, v in INNER.items() if not (switches.get("sequence") and ":local" in v)}
    return replace(built, name=lambda site: built.name(names.get(site, site)))


@pytest.mark.parametrize("sequence", [False, True])
def test_inside(sequence: bool, cells: list[Any]) -> None:
    case = "tp2, inside" + (", sequence parallel" if sequence else "")
    switches = {"sequence": sequence}
    places = list(INNER)
    found = proof.compare(
        "apex", case, 2, inside, 2, switches, sites=places, edits=places, parameter=_plain, alone=True
    )
    proof.judge(found, cells)


def beside() -> list[Any]:
    """A bias that is returned beside the output, and a strided layer."""
    from apex.transformer import parallel_state, tensor_parallel

    parallel.initialize(2)
    torch.manual_seed(0)
    column = tensor_parallel.ColumnParallelLinear(
        4, 6, gather_output=False, skip_bias_add=True, use_cpu_initialization=True
    )
    with torch.no_grad():
        column.bias.copy_(torch.arange(6.0).split(3)[dist.get_rank()])
    flex = mf.FlexModel(column)
    flex.register_forward_hook(mf.HookFunction("root:output", unpack_idx=1))
    column(torch.randn(2, 2, 4))
    bias = flex.output_dict["root:output[1]"][0] if flex.is_leader else None
    flex.restore()
    torch.manual_seed(1)
    strided = tensor_parallel.ColumnParallelLinear(
        4, 8, stride=2, gather_output=False, use_cpu_initialization=True, keep_master_weight_for_test=True
    )
    flex = mf.FlexModel(strided)
    whole = dict(flex.named_full_parameters(everywhere=True))["weight"]
    out = [bias, torch.equal(whole, strided.master_weight), flex.sites("root:output")[0].hidden]
    flex.restore()
    with pytest.raises(mf.FlexError) as sizes:
        mf.FlexModel(column, tensor_parallel_size=4)
    with pytest.raises(mf.FlexError) as chunks:
        mf.FlexModel([column, strided])
    parallel_state.destroy_model_parallel()
    with pytest.raises(mf.FlexError) as groups:
        mf.FlexModel(column)
    return [*out, *(str(e.value) for e in (sizes, chunks, groups))]


def test_bias_beside_and_stride() -> None:
    (bias, equal, hidden, *refused), _ = run(2, beside)
    assert torch.equal(bias, torch.arange(6.0))
    assert equal
    assert "stride=2" in hidden
    sizes, chunks, groups = refused
    assert "tp=4 (found 2)" in sizes
    assert "both have a" in chunks
    assert "initialize_model_parallel" in groups
