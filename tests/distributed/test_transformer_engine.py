"""Layers of Megatron's Transformer Engine specs, on Transformer Engine's own Python (`tests/support/te.py`).

Values, gradients, edits and parameters at every hook point are compared with one process of Megatron's local
layers. Nothing of this was run on a GPU: the compiled extension is plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import cells_of, judge, sharded
from tests.distributed.test_matrix import VERSION, check
from tests.support import gpt, local_layers, oracle, ssm, te
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes
from tests.unit.test_obstacles import on_every_road

pytest.importorskip("megatron.core")

CASES = [
    Case("TE, tp2 pp2", tp=2, pp=2, te=True, layers=2),
    Case(
        "TE, tp2 sp, gelu, bias, layernorm, learned positions",
        tp=2,
        sp=True,
        te=True,
        gated=False,
        rms=False,
        rope=False,
        bias=True,
        layers=2,
    ),
    Case("TE, tp4 sp, q/k norm, fewer groups", tp=4, sp=True, te=True, qk_norm=True, layers=2),
    Case("TE, tp2 sp, all recomputed", tp=2, sp=True, te=True, recompute=("full",), layers=2),
]
EVERYWHERE = Case("TE, tp2 sp", tp=2, sp=True, te=True, layers=2)


@pytest.mark.versions
def test_te_layers_on_every_version(cells: list[Any]) -> None:
    check(EVERYWHERE, cells)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_te_layers(case: Case, cells: list[Any]) -> None:
    check(case, cells)


RECOMPUTED = Case("TE, checkpoints of its own, tp2 sp", tp=2, sp=True, te=True, layers=2, recompute=("full",))


def recomputed(case: Case, *args: Any) -> dict[str, Any]:
    """`sharded`, with the checkpoints that Megatron takes from Transformer Engine for 8-bit layers."""
    gpt.runtime(case)
    gpt.initialize(case)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.extensions.transformer_engine import te_checkpoint

    calls: list[int] = []

    def checkpoint(function: Any, distribute: bool, *inputs: Any) -> Any:
        calls.append(len(inputs))
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(function, distribute, tracker, group, *inputs)

    changes.setattr(tensor_parallel, "checkpoint", checkpoint)
    answer = sharded(case, *args)
    assert calls, "Megatron has called it"
    return answer


def test_checkpoints_of_transformer_engine(cells: list[Any]) -> None:
    sites = oracle.sites_of(RECOMPUTED)
    edits = [s for s in oracle.edits_of(RECOMPUTED) if s.endswith((":mid", "mlp:input", "core_attention:q"))]
    truth = local_layers.truth_of(RECOMPUTED, sites, edits)
    answers = run(2, recomputed, RECOMPUTED, truth["state"], sites, edits, alone=True)
    judge(cells_of(RECOMPUTED, sites, edits, truth, answers), cells)


FUSED = [
    Case("TE, op fuser, tp2 sp", tp=2, sp=True, te=True, layers=2, extra={te.OP_FUSER: True}),
    Case(
        "TE, fused residual norm before experts, tp2 sp ep2",
        tp=2,
        sp=True,
        ep=2,
        te=True,
        layers=2,
        experts=4,
        extra={te.FUSED_RESIDUAL: True},
    ),
    Case(
        "TE, fused residual norm before latent attention, tp2 sp",
        tp=2,
        sp=True,
        te=True,
        mla="upstream",
        layers=2,
        extra={te.FUSED_RESIDUAL: True},
    ),
]


@pytest.mark.parametrize("case", FUSED, ids=lambda c: c.name)
def test_fused_operations(case: Case, cells: list[Any]) -> None:
    check(
        case,
        cells,
        None,
        [s for s in oracle.edits_of(case) if "norm" in s or s.endswith(("mlp:input", "mlp:output"))],
    )


COPYING = [("mlp", FUSED[0]), ("input_layernorm", FUSED[2])]


def copied_hooks(role: str, case: Case) -> tuple[list[str], int, list[int], list[str]]:
    """What is copied of a session's hooks and of a user's hook, and what Megatron warns of."""
    import megatron_flex as mf

    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    layers: Any = chunks[0].get_submodule("decoder.layers")
    called: list[int] = []
    getattr(layers[1], role).register_forward_pre_hook(lambda module, args: called.append(len(args)))
    at = f"decoder.layers.0.{role}"
    hooks = [mf.HookFunction(f"{at}:{p}", unpack_idx=i) for p, i in (("input", 0), ("output", 0))]
    with warnings.catch_warnings(record=True) as caught, mf.attach(chunks, hooks) as flex:
        warnings.simplefilter("always")
        gpt.step(case, chunks, 0)
        read = sorted(flex.output_dict)
    mine, users = (getattr(layers[n], role)._fused_impl[0] for n in (0, 1))
    copies = len(mine._forward_pre_hooks) + len(mine._forward_hooks)
    users_copies = len(users._forward_pre_hooks)
    messages = [str(w.message) for w in caught if "forward hook" in str(w.message)]
    return read, copies, [users_copies, *called], messages


@pytest.mark.parametrize(("role", "case"), COPYING)
def test_fused_operations_get_no_copy_of_a_sessions_hooks(role: str, case: Case) -> None:
    one = replace(case, microbatches=1)
    for _, copies, users, messages in run(2, copied_hooks, role, one):
        assert copies == 0
        assert users == [1, 1, 0], "the user's own hook is called, and its copy without tensors"
        assert len(messages) == 1, "of the user's hook"
    (read, *_), _ = run(2, copied_hooks, role, one)
    assert read == [f"decoder.layers.0.{role}:{p}" for p in ("input", "output")]


HYBRID = [
    Case("TE, attention and MLP, tp2 sp", tp=2, sp=True, te=True, layers=1, hybrid=True),
    Case("TE, M*- tp2 sp", tp=2, sp=True, te=True, pattern="M*-", extra=ssm.MAMBA),
    Case("TE, G- tp2 sp", tp=2, sp=True, te=True, pattern="G-", extra=ssm.DELTA),
]


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel's spec came with megatron-core 0.19")
@pytest.mark.parametrize("case", HYBRID, ids=lambda c: c.name)
def test_hybrid_models(case: Case, cells: list[Any]) -> None:
    check(case, cells, None, oracle.edits_of(case)[::4])


EXPERTS = Case(
    "TE, experts, tp2 sp ep2", tp=2, sp=True, ep=2, te=True, layers=2, experts=4, shared_experts=True
)
GROUPED = Case(
    "TE, grouped experts, tp2 sp ep2", tp=2, sp=True, ep=2, te=True, layers=2, experts=4, grouped=True
)


def test_experts_one_by_one(cells: list[Any]) -> None:
    edits = [s for s in oracle.edits_of(EXPERTS) if ".layers.1.mlp" in s]
    check(EXPERTS, cells, None, edits[::3])


def test_grouped_experts_are_those_of_local_layers(cells: list[Any]) -> None:
    """What local layers have too: not the tensors of all experts together between their two linears."""
    sites = [s for s in oracle.sites_of(GROUPED) if ".experts.linear_fc" not in s]
    at = "decoder.layers.1.mlp"
    edits = [f"{at}.experts:{p}" for p in ("dispatched", "weights", "output")] + [f"{at}.router:logits"]
    truth = local_layers.truth_of(GROUPED, sites, edits)
    answers = run(GROUPED.world, sharded, GROUPED, truth["state"], sites, edits, alone=True)
    judge(cells_of(GROUPED, sites, edits, truth, answers), cells)


def told(case: Case) -> dict[str, Any]:
    """What the library says of a model's sites and parameters, and of which classes its modules are."""
    import megatron_flex as mf
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    chunks = gpt.build(case)
    flex = mf.FlexModel(chunks)
    sites = {s.name: (s.hidden, s.layout.describe()) for s in flex.sites()}
    parameters = {p.name: p.layout.describe() for p in flex.session.adapter.parameters()}
    missing = {n for n, _ in gpt.global_names(chunks[0])} - set(parameters)
    classes = {n: f"{type(m).__module__}.{type(m).__name__}" for n, m in chunks[0].named_modules()}
    try:
        flex.session.hooks.add(mf.HookFunction("decoder.layers.0.input_layernorm:output"))
        refusal = ""
    except mf.FlexError as error:
        refusal = str(error)
    flex.restore()
    return {
        "sites": sites,
        "parameters": parameters,
        "missing": missing,
        "classes": classes,
        "refusal": refusal,
    }


@pytest.mark.versions
def test_what_transformer_engine_hides() -> None:
    told_of, *_ = run(2, told, EVERYWHERE)
    extension = "megatron.core.extensions.transformer_engine"
    attention, mlp = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
    assert told_of["classes"][f"{attention}.linear_qkv"] == f"{extension}.TELayerNormColumnParallelLinear"
    assert told_of["classes"][f"{mlp}.linear_fc2"] == f"{extension}.TERowParallelLinear"
    hidden = {n: why for n, (why, _) in told_of["sites"].items() if why and ".layers.0." in n}
    assert set(hidden) == {
        f"{attention}.linear_qkv:gemm_input",
        f"{attention}.linear_proj:partial",
        f"{attention}.core_attention:scores",
        f"{attention}.core_attention:probs",
        f"{mlp}.linear_fc1:gemm_input",
        f"{mlp}.linear_fc2:partial",
        "decoder.layers.0.input_layernorm:output",
        "decoder.layers.0.pre_mlp_layernorm:output",
    }
    assert all("--transformer-impl local" in why for why in hidden.values())
    assert_names(told_of["refusal"], "TELayerNormColumnParallelLinear")
    assert told_of["missing"] == set()
    assert told_of["parameters"][f"{mlp}.linear_fc1.layer_norm_weight"] == "[d0]"
    assert told_of["parameters"][f"{mlp}.linear_fc1.weight"] == "[out/tp in 2 segments, in]"
    assert told_of["parameters"][f"{attention}.linear_proj.weight"] == "[out, in/tp]"


LATENT = [
    Case("TE, mla tp2 sp", tp=2, sp=True, te=True, mla="upstream", layers=2),
    Case(
        "TE, mla tp2 sp, low-rank queries, norms",
        tp=2,
        sp=True,
        te=True,
        mla="upstream",
        q_rank=8,
        qk_norm=True,
        layers=2,
    ),
]


@pytest.mark.parametrize("case", LATENT, ids=lambda c: c.name)
def test_latent_attention_with_duplicated_projections(case: Case, cells: list[Any]) -> None:
    """With projections down that every rank has whole, and sequence parallel, upstream is right as it is."""
    check(case, cells)


def modules_called(case: Case) -> tuple[list[str], list[str]]:
    """Modules in the order in which a step calls hooks at their inputs; and in the order of a page."""
    import megatron_flex as mf
    from megatron_flex.page import Page, grid_of_mesh

    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    called: list[str] = []

    def at(module: str) -> mf.HookFunction:
        def note(current_module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
            called.append(module)
            return inputs

        return mf.HookFunction(f"{module}:input", editing_function=note, save=False)

    with mf.attach(chunks) as flex:
        page = Page("", grid_of_mesh(flex.session.mesh), flex.sites())
    shown = [s.module for s in page.sites if s.point == "input" and not s.hidden and not s.read_only_reason]
    shown = [m for m in shown if ".layers." in m]
    with mf.attach(chunks, [at(module) for module in reversed(shown)]):
        gpt.step(case, chunks, 0)
    return list(dict.fromkeys(called)), shown


def test_a_page_has_modules_in_the_order_in_which_a_step_calls_them() -> None:
    case = Case("TE, tp2 sp, one microbatch", tp=2, sp=True, te=True, layers=2, microbatches=1)
    for called, shown in run(2, modules_called, case):
        norm, mlp = (f"decoder.layers.1.{n}" for n in ("pre_mlp_layernorm", "mlp"))
        assert called.index(f"{norm}") < called.index(mlp)
        assert called.index("decoder.layers.1.self_attention.linear_proj") < called.index(norm)
        assert shown == called


def low_precision(case: Case, folder: str) -> tuple[dict[str, Tensor], list[str], Tensor]:
    """What hooks, dumps and statistics have of a tensor of 8 bits, the warnings, and the tensor's values."""
    gpt.runtime(case)
    gpt.initialize(case)
    from transformer_engine.pytorch import DType, Float8Tensor

    def rounded(tensor: Tensor) -> Tensor:
        data = (tensor.detach() * 4).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = torch.tensor([0.25])
        kind = DType.kFloat8E4M3
        return Float8Tensor(
            shape=data.shape, dtype=torch.float32, data=data, fp8_scale_inv=scale, fp8_dtype=kind
        )

    found, warned, made = on_every_road(rounded, Path(folder))
    return found, warned, made.dequantize()


def test_tensors_of_8_bits_are_read_and_left_as_they_are(tmp_path: Path) -> None:
    ((found, warned, values),) = run(1, low_precision, EVERYWHERE.single(), str(tmp_path), alone=True)
    assert set(found) == {"read", "dump", "statistics"}
    assert torch.equal(found["read"], values)
    assert torch.equal(found["dump"], values)
    assert found["statistics"].item() == values.abs().max().item() > 0
    edits = [w for w in warned if "part:output" in w]
    assert len(edits) == 2, "each edit is left out"
    assert all("Float8Tensor" in w for w in edits)


SINGLE_WEIGHT = replace(
    GROUPED,
    name="TE, one weight of all experts",
    tp=1,
    sp=False,
    ep=1,
    extra={te.OP_FUSER: True, "moe_single_grouped_weight": True},
)


def weights_of_experts(case: Case) -> tuple[dict[str, str], list[str], str]:
    """The parameters of experts that are listed without a layout, and with one; and why one is refused."""
    import megatron_flex as mf

    changes.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    changes.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    gpt.runtime(case)
    gpt.initialize(case)
    with mf.attach(gpt.build(case)) as flex:
        listed = {n: kind for n, kind in flex.parameters_without_layout().items() if ".experts." in n}
        known = [p.name for p in flex.session.adapter.parameters() if ".experts." in p.name]
        try:
            flex.get_module_parameter(next(iter(listed)))
            refusal = ""
        except mf.FlexError as error:
            refusal = str(error)
    return listed, known, refusal


def test_one_weight_of_all_experts_is_listed_and_not_read() -> None:
    ((listed, known, refusal),) = run(1, weights_of_experts, SINGLE_WEIGHT, alone=True)
    each = [f"decoder.layers.{n}.mlp.experts.linear_fc{i}.weight" for n in (0, 1) for i in (1, 2)]
    assert listed == dict.fromkeys(each, "GroupedTensor")
    assert known == []
    assert_names(refusal, each[0])


def rounding_errors(case: Case) -> dict[str, list[float]]:
    """How far layers in bf16 are from the same ones in fp32: outputs and gradients."""
    gpt.runtime(case)
    gpt.initialize(case)
    import transformer_engine.pytorch as upstream

    inputs, splits = torch.randn(6, 16), [1, 0, 5]
    made: dict[str, Callable[[torch.dtype], Any]] = {
        "linear": lambda dtype: upstream.Linear(16, 8, params_dtype=dtype, device="cpu"),
        "norm and linear": lambda dtype: upstream.LayerNormLinear(16, 8, params_dtype=dtype, device="cpu"),
        "grouped": lambda dtype: upstream.GroupedLinear(3, 16, 8, params_dtype=dtype, device="cpu"),
    }
    errors = {}
    for name, make in made.items():
        layers = [make(dtype) for dtype in (torch.float32, torch.bfloat16)]
        layers[1].load_state_dict(layers[0].state_dict())
        results = []
        for layer, dtype in zip(layers, (torch.float32, torch.bfloat16), strict=True):
            x = inputs.to(dtype, copy=True).requires_grad_()
            out = layer(x, splits) if name == "grouped" else layer(x)
            assert out.dtype is dtype
            (out * torch.arange(8)).sum().backward()
            results.append([out, x.grad, *(p.grad for p in layer.parameters())])
        pairs = zip(*results, strict=True)
        errors[name] = [float((b.float() - a).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs]
    return errors


def test_layers_in_bf16_are_those_in_fp32_rounded() -> None:
    (errors,) = run(1, rounding_errors, EVERYWHERE.single(), alone=True)
    greatest = {name: max(found) for name, found in errors.items()}
    assert all(0 < error < 2**-6 for error in greatest.values()), greatest
