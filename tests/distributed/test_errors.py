"""Bad input: one line with the value, the rule and the fix, on all ranks, and no hang."""

from __future__ import annotations

import pickle
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_flex.config import flex_config
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

TP2 = Case("tp2 sp", tp=2, sp=True)
GRID = Case("tp2 pp2", tp=2, pp=2)
LAYER = "decoder.layers.3.mlp.linear_fc1"  # on the last stage of two


def told(act: Any) -> str:
    """What `act` raises, in words; it must be an error of ours and fit on one line."""
    from megatron_flex import FlexError

    try:
        act()
    except FlexError as error:
        text = str(error)
        assert "\n" not in text, text
        return text
    return ""


def at_registration(case: Case) -> dict[str, str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.FlexModel(chunks)
    hook = mf.HookFunction(LAYER)
    flex.register_forward_hook(hook)
    out = {
        "no site": told(
            lambda: flex.register_forward_hook(mf.HookFunction("decoder.layer.3.mlp.linear_fc1"))
        ),
        "no match": told(lambda: flex.sites("encoder.*")),
        "no point": told(
            lambda: flex.register_forward_hook(mf.HookFunction("decoder.layers.3.mlp.linear_fc1:partial"))
        ),
        "beyond the last": told(lambda: mf.attach(chunks, [mf.HookFunction("decoder.layers.9")])),
        "twice": told(lambda: flex.register_forward_hook(hook)),
        "not there": told(lambda: flex.remove_hook(mf.HookFunction(LAYER))),
        "sizes": told(lambda: mf.FlexModel(chunks, tensor_parallel_size=4, data_parallel_size=1)),
        "framework": told(lambda: mf.FlexModel([nn.Linear(2, 2), nn.Linear(2, 2)])),
        "parallel layers": told(lambda: mf.FlexModel(chunks[0].decoder)),
        "kind": told(lambda: mf.HookFunction(LAYER, hook_type="sideways")),
        "callable": told(lambda: mf.HookFunction(LAYER, editing_function=3)),
        "leaf": told(lambda: flex.register_forward_hook(mf.HookFunction(LAYER, unpack_idx=2))),
        "idle": told(lambda: mf.HookFunction(LAYER, save=False)),
    }
    chunks[0].config.cuda_graph_impl = "local"
    out["graphs"] = told(lambda: mf.FlexModel(chunks))
    chunks[0].config.cuda_graph_impl = "none"
    for name, value in (("hybrid_context_parallel", True), ("gtp_weight_remat_size", 2)):
        kept = getattr(chunks[0].config, name, None)
        setattr(chunks[0].config, name, value)
        out[name] = told(lambda: mf.FlexModel(chunks))
        setattr(chunks[0].config, name, kept)
    kept = chunks[0].decoder.layers[0].mlp.linear_fc1
    chunks[0].decoder.layers[0].mlp.linear_fc1 = nn.Linear(2, 2)
    out["rule"] = told(lambda: mf.attach(chunks, [mf.HookFunction("decoder.layers.*.mlp.linear_fc1")]))
    chunks[0].decoder.layers[0].mlp.linear_fc1 = kept
    chunks[0].config.fused_single_qkv_rope = True
    other = mf.FlexModel(chunks)
    out["fused"] = told(
        lambda: other.register_forward_hook(mf.HookFunction("decoder.layers.0.self_attention:q"))
    )
    return out


def test_bad_input_is_told_at_once_on_all_ranks() -> None:
    answers = run(4, at_registration, GRID)
    assert all(a == answers[0] for a in answers), "the same on every rank"
    expected: dict[str, tuple[object, ...]] = {
        "no site": ("decoder.layer.3.mlp.linear_fc1", "decoder.layers.3.mlp.linear_fc1"),
        "no match": ("encoder.*", "decoder"),
        "no point": ("'partial'", "gemm_input", "input", "output"),
        "beyond the last": ("decoder.layers.9", "decoder.layers", "0-3"),
        "twice": ("HookFunction", LAYER),
        "not there": ("HookFunction", LAYER),
        "sizes": ("tp=4", 2, "pp=2 x tp=2"),
        "framework": ("Linear", 2),
        "parallel layers": ("TransformerBlock", "RowParallelLinear", "GPTModel", "tensor_parallel_size"),
        "kind": ("'sideways'", "forward_pre"),
        "callable": ("editing_function", 3, "None"),
        "leaf": ("unpack_idx=2", f"{LAYER}:output", "0, 1", f"{LAYER}:input"),
        "idle": (LAYER, "editing_function"),
        "graphs": ("cuda_graph_impl='local'", "--cuda-graph-impl none"),
        "hybrid_context_parallel": ("hybrid_context_parallel=True", "--context-parallel-size"),
        "gtp_weight_remat_size": ("gtp_weight_remat_size=2", 1, "tensor_parallel_num_weight_shards"),
        "rule": ("Linear", "ColumnParallelLinear", "--transformer-impl local"),
        "fused": ("decoder.layers.0.self_attention:q", "fused_single_qkv_rope=True", "False"),
    }
    assert expected.keys() == answers[0].keys()
    for name, values in expected.items():
        assert_names(answers[0][name], *values)


# -- at the end of a step ------------------------------------------------------------------------------


def wrong_shape(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs[..., :-1]


def wrong_dtype(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.double()


def wrong_device(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.to("meta")


def a_tuple(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    return inputs, None


def nothing(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> None:
    return None


def raises(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs / torch.zeros(5)


def raises_on_one(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    if torch.distributed.get_rank() == 3:
        raise RuntimeError("only here")
    return inputs * 2


def in_a_step(case: Case) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    gpt.step(case, chunks, rank)
    out: dict[str, Any] = {}
    for edit in (wrong_shape, wrong_dtype):
        attach = partial(mf.attach, chunks, [mf.HookFunction(LAYER, editing_function=edit)])
        out[f"{edit.__name__} at once"] = told(attach)
    flex_config.dry_run = False
    for edit in (wrong_shape, wrong_dtype, wrong_device, a_tuple, nothing, raises, raises_on_one):
        flex = mf.attach(chunks, [mf.HookFunction(LAYER, editing_function=edit)])
        out[edit.__name__] = told(lambda: gpt.step(case, chunks, rank))
        flex.session.close()
    for kind in ("full_backward", "full_backward_pre"):
        flex = mf.attach(chunks, [mf.HookFunction(LAYER, editing_function=raises_on_one, hook_type=kind)])
        out[kind] = told(lambda: gpt.step(case, chunks, rank))
        flex.session.close()
    flex = mf.attach(chunks, [mf.HookFunction(LAYER, expected_shape=(None, 7, None))])
    out["expected"] = told(lambda: gpt.step(case, chunks, rank))
    flex.session.close()
    flex = mf.attach(chunks, [mf.HookFunction(LAYER, hook_type="full_backward")])
    gpt.step(case, chunks, rank, forward_only=True)
    out["silent"] = told(flex.restore)
    out["after"] = len(gpt.step(case, chunks, rank)) == (2 if rank == 0 and out and _last(chunks) else 0)
    return out


def _last(chunks: list[Any]) -> bool:
    return bool(chunks[-1].post_process)


def test_what_goes_wrong_in_a_step_is_raised_by_all_ranks_at_its_end() -> None:
    answers = run(4, in_a_step, GRID)
    expected: dict[str, tuple[object, ...]] = {
        "wrong_shape": (f"{LAYER}:output", "(16, 2, 95)", "(16, 2, 96)", "iteration 0", "microbatch 0"),
        "wrong_dtype": ("torch.float64", "torch.float32", "ranks 2-3"),
        "wrong_shape at once": ("wrong_shape", "test_errors.py", f"{LAYER}:output", "(8, 2, 95)"),
        "wrong_dtype at once": ("wrong_dtype", "torch.float64", "torch.float32"),
        "wrong_device": ("meta", "cpu", "ranks 2-3"),
        "a_tuple": ("a_tuple", "tuple", "ranks 2-3"),
        "nothing": ("nothing", "NoneType", "ranks 2-3"),
        "raises": ("RuntimeError", "test_errors.py", "ranks 2-3"),
        "raises_on_one": ("RuntimeError", "only here", "rank 3"),
        "full_backward": ("only here", "rank 3", f"{LAYER}:input.grad"),
        "full_backward_pre": ("only here", "rank 3", f"{LAYER}:output.grad"),
        "expected": ("(16, 2, 96)", "(None, 7, None)", "expected_shape"),
        "silent": ("full_backward", LAYER),
    }
    assert {*expected, "after"} == answers[0].keys()
    for name, values in expected.items():
        assert len({a[name] for a in answers}) == 1, name
        assert_names(answers[0][name], *values)
    assert all(a["after"] for a in answers), "the model runs on afterwards"


def raises_on_the_second(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("only here")
    return inputs * 2


def attributes(case: Case) -> list[dict[str, Any]]:
    """The attributes of the error that each type of hook raises at the end of a step."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    changes.setattr(flex_config, "dry_run", False)
    out = []
    for kind in ("forward", "full_backward_pre"):
        hooks = [
            mf.HookFunction("decoder.layers.2"),
            mf.HookFunction(LAYER, editing_function=raises_on_the_second, hook_type=kind),
        ]
        flex = mf.attach(chunks, hooks)
        with pytest.raises(mf.HookError) as raised:
            gpt.step(case, chunks, 0)
        flex.session.close()
        error = raised.value
        out.append(
            {
                "site": error.site,
                "rank": error.rank,
                "ranks": error.ranks,
                "hook": error.hook is hooks[1],
                "pickled": pickle.loads(pickle.dumps(error)).ranks,
            }
        )
    return out


def test_an_error_of_one_rank_has_its_hook_point_hook_and_rank_on_all_ranks() -> None:
    sites = (f"{LAYER}:output", f"{LAYER}:output.grad")
    expected = [{"site": s, "rank": 1, "ranks": (1,), "hook": True, "pickled": (1,)} for s in sites]
    assert run(2, attributes, TP2) == [expected, expected]


# -- hooks on some ranks only --------------------------------------------------------------------------


def on_some(case: Case, when: str) -> tuple[str, float]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = torch.distributed.get_rank()
    if when == "attach":
        flex = mf.attach(chunks, [mf.HookFunction(LAYER)] if rank == 0 else [])
    else:
        flex = mf.FlexModel(chunks)
        if when == "later":
            gpt.step(case, chunks, 0)
            torch.distributed.barrier()
        if rank == 0:
            flex.register_forward_hook(mf.HookFunction(LAYER))
        if when == "later":
            time.sleep(1 + rank)  # rank 0 comes first and says what it has
    started = time.monotonic()
    return told(lambda: gpt.step(case, chunks, 0)), time.monotonic() - started


@pytest.mark.parametrize("when", ["attach", "before", "later"])
def test_a_hook_on_some_ranks_only(when: str) -> None:
    for text, seconds in run(2, on_some, TP2, when):
        assert_names(text, "rank 0", LAYER, "rank 1")
        assert seconds < 20


def too_late() -> str:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_flex as mf

    chunks = ranks.start(Case("one"))
    fetched = get_forward_backward_func()
    mf.FlexModel(chunks).register_forward_hook(mf.HookFunction(LAYER))
    return told(
        lambda: fetched(
            forward_step_func=gpt.forward_step,
            data_iterator=iter(gpt.data(1)),
            model=chunks[0],
            num_microbatches=1,
            seq_length=gpt.SEQUENCE,
            micro_batch_size=gpt.BATCH,
        )
    )


def test_a_schedule_fetched_before_attaching_is_refused() -> None:
    (text,) = run(1, too_late)
    assert_names(text, "get_forward_backward_func()")


def packed(case: Case, **pack: Any) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction("decoder:output")])
    batch = SimpleNamespace(qkv_format="thd", **{"cu_seqlens_q": torch.tensor([0, 6, 16]), **pack})

    def pack(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "packed_seq_params": batch}

    def unpack(module: Any, args: Any, kwargs: Any) -> Any:  # attention on a CPU cannot run it
        return args, {k: v for k, v in kwargs.items() if k != "packed_seq_params"}

    chunks[0].register_forward_pre_hook(pack, with_kwargs=True, prepend=True)
    chunks[0].register_forward_pre_hook(unpack, with_kwargs=True)
    return ranks.step_says(case, chunks, flex)


def packs(case: Case, several: list[dict[str, Any]], sent: bool) -> list[str]:
    if sent:
        flex_config.pending_bytes = flex_config.shared_bytes = 0
    return [packed(case, **pack) for pack in several]


@pytest.mark.parametrize("sent", [False, True], ids=["in shared memory", "sent within the step"])
def test_packed_sequences_that_no_layout_describes(sent: bool) -> None:
    """Every rank raises, those of later stages too, and none before its peers have what they wait for."""
    lengths = torch.tensor
    refused: list[tuple[dict[str, Any], tuple[object, ...]]] = [
        ({}, ("[6, 10]", "0", 6, "context_parallel_size=2", "cu_seqlens_q_padded")),
        ({"cu_seqlens_q_padded": lengths([0, 8, 18])}, ("[8, 10]", "1", 10, "cu_seqlens_q_padded")),
        ({"local_cp_size": 1}, ("local_cp_size=1",)),
        ({"cu_seqlens_q": None}, ("cu_seqlens_q", "qkv_format='thd'")),
        ({"cu_seqlens_q": lengths([0, 9, 3])}, ("cu_seqlens_q=[0, 9, 3]",)),
        ({"cu_seqlens_q_padded": lengths([0, 4, 16])}, ("[6, 10]", "[4, 12]", "cu_seqlens_q_padded")),
        ({"cu_seqlens_q_padded": lengths([0, 16])}, ("cu_seqlens_q", 3, "cu_seqlens_q_padded", 2)),
    ]
    packings = [pack for pack, _ in refused]
    for said in run(4, packs, Case("cp2 pp2", cp=2, pp=2, layers=2), packings, sent):
        for text, (_, values) in zip(said, refused, strict=True):
            assert_names(text, *values)
    padded = {"cu_seqlens_q_padded": torch.tensor([0, 8, 20])}
    assert run(1, packs, Case("cp1", layers=2), [{}, padded], sent) == [["", ""]]


# -- edits without a file, and errors without a text --------------------------------------------------


SOURCE = """
def edit(module, inputs, save_ctx, modules):
    if fails:
        raise error
    return inputs
"""


class Mute(Exception):
    """An error of a person's own, whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def without_a_file(case: Case, file: str, error: Exception, stage: int) -> str:
    """What a step says whose edit, compiled from a text, fails on one stage; dry runs do not find it."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex_config.dry_run = False
    names = {"fails": False, "error": error}
    exec(compile(SOURCE, file, "exec"), names)
    flex = mf.FlexModel(chunks)
    edit: Any = names["edit"]
    flex.register_forward_hook(mf.HookFunction(f"decoder.layers.{1 + 2 * stage}", editing_function=edit))
    names["fails"] = True
    return ranks.step_says(case, chunks, flex)


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "script.py", "./script.py", "", "<frozen mine>"])
def test_an_edit_without_a_folder_fails_on_all_ranks(file: str) -> None:
    """As of `python -c`, a prompt, `exec`, and a script that is run by a relative path."""
    for stage in (0, 1):
        answers = run(4, without_a_file, GRID, file, ValueError("on purpose"), stage, timeout=60)
        assert len(set(answers)) == 1
        assert_names(answers[0], "ValueError", "on purpose")
        if not file.startswith("<frozen"):
            assert f"{file}:4" in answers[0]


def test_an_error_without_a_text_is_raised_on_all_ranks() -> None:
    answers = run(4, without_a_file, GRID, __file__, Mute(), 0, timeout=60)
    assert len(set(answers)) == 1
    assert_names(answers[0], "Mute", "decoder.layers.1:output")
