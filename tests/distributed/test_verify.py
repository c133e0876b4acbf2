"""verify() is silent on a sound run, and names what is wrong, on all ranks, where something really is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import gpt, ranks, ssm
from tests.support.gpt import Case
from tests.support.messages import any_names, assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])
FEW_GROUPS = pytest.mark.skipif(VERSION < (0, 16), reason="fewer groups than ranks came with 0.16")

SP_PP = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2)
DP = Case("tp2 dp2", tp=2, dp=2, layers=2, microbatches=1)
SP = Case("tp2 sp", tp=2, sp=True, layers=2)
TIED = Case("tied, vpp", tp=2, pp=2, vpp=2, tied=True, layers=4)
HEADS = Case("tp4 of 2 groups", tp=4, groups=2, layers=2)


def told(case: Case, spoil: Callable[[list[nn.Module], int], Any]) -> list[str]:
    """The errors of two verified steps and a plain one, on a model that `spoil` was let loose on."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    spoil(chunks, torch.distributed.get_rank())
    gpt.step(case, chunks, ranks.mine(chunks))  # the first sets attributes of Megatron's own
    before = ranks.fingerprint(chunks)
    with mf.FlexModel(chunks) as flex:
        flex.verify(steps=2)
        out = [error(lambda: gpt.step(case, chunks, ranks.mine(chunks))) for _ in range(3)]
    return [*out, "" if before == ranks.fingerprint(chunks) else "something was left behind"]


def error(do: Callable[[], Any]) -> str:
    import megatron_flex as mf

    try:
        do()
    except mf.VerifyError as found:
        return str(found)
    return ""


def nothing(chunks: list[nn.Module], rank: int) -> None:
    pass


@pytest.mark.versions
@pytest.mark.parametrize(
    "case",
    [
        SP_PP,
        DP,
        pytest.param(HEADS, marks=FEW_GROUPS),
        Case("all recomputed", tp=2, sp=True, recompute=("full",), layers=2),
        TIED,
    ],
    ids=lambda c: c.name,
)
def test_a_sound_run_has_no_findings(case: Case) -> None:
    for answer in run(case.world, told, case, nothing):
        assert answer == ["", "", "", ""]


OTHERS = [
    Case("experts tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, experts=4, layers=2),
    Case("grouped experts dp2 ep2", dp=2, ep=2, experts=4, te=True, grouped=True, layers=2),
    Case("tp2 sp cp2", tp=2, sp=True, cp=2, layers=2),
    Case("latent attention tp2 sp", tp=2, sp=True, mla="mended", q_rank=16, qk_norm=True, layers=2),
    Case("prediction tp2 pp2", tp=2, pp=2, layers=2, extra={"mtp_num_layers": 1}),
    Case("MG*E tp2 sp ep2", tp=2, sp=True, ep=2, pattern="MG*E", experts=4, extra=ssm.MAMBA | ssm.DELTA),
]


@pytest.mark.skipif(VERSION < (0, 19), reason="the models are those of 0.19")
@pytest.mark.parametrize("case", OTHERS, ids=lambda c: c.name)
def test_a_sound_run_of_another_model_has_no_findings(case: Case) -> None:
    for answer in run(case.world, told, case, nothing):
        assert answer == ["", "", "", ""]


def desynchronise(chunks: list[nn.Module], rank: int) -> None:
    if rank == 1:
        chunks[0].decoder.layers[0].pre_mlp_layernorm.weight.data[3] += 1e-6


@pytest.mark.parametrize("case", [SP_PP, DP], ids=lambda c: c.name)
def test_a_norm_that_drifted_apart(case: Case) -> None:
    for answer in run(4, told, case, desynchronise):
        name = "parameter decoder.layers.0.pre_mlp_layernorm.weight"
        assert_names(answer[0], name)
        assert name in answer[1]
        assert answer[2:] == ["", ""], "verifying is over after two steps"


def drift_over_dp(chunks: list[nn.Module], rank: int) -> None:
    if rank >= 2:
        chunks[0].decoder.layers[1].mlp.linear_fc1.weight.data *= 1.001


def test_a_shard_that_drifted_apart_over_data_parallel_ranks() -> None:
    for answer in run(4, told, DP, drift_over_dp):
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        assert_names(answer[0], "1 finding", name)


def drift_of_a_copy(chunks: list[nn.Module], rank: int) -> None:
    if rank >= 2:
        chunks[-1].output_layer.weight.data[0] += 1e-6


def test_a_tied_output_layer_that_drifted_apart() -> None:
    for answer in run(4, told, TIED, drift_of_a_copy):
        name = "embedding.word_embeddings.weight"
        assert_names(answer[0], "1 finding", name)


def corrupt(chunks: list[nn.Module], rank: int) -> None:
    """One rank's output of attention is a little off: a race, a broken link, a bit that flipped."""
    if rank == 1:

        def hook(_: nn.Module, __: Any, output: tuple[Tensor, ...]) -> Any:
            return (output[0] + 1e-4, *output[1:])

        chunks[0].decoder.layers[0].self_attention.register_forward_hook(hook)


def test_an_activation_that_differs() -> None:
    for answer in run(2, told, Case("tp2", tp=2, layers=2), corrupt):
        first = answer[0].partition(": ")[2].partition(": ")[2]
        assert first.startswith("decoder.layers.0.self_attention:output, microbatch 0: ")
        assert_names(first, "tp")


def wrong_layout(case: Case, cut: bool) -> list[str]:
    """A rule for the residual stream that takes it for cut where it is not, or the other way about."""
    from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
    from megatron_flex.layout import Dim, Layout

    def stream(self: ModelLayouts, sequence_parallel: bool | None = None) -> Layout:
        return Layout((self.sequence(cut), Dim("b"), Dim("h")))

    changes.setattr(ModelLayouts, "stream", stream)
    return told(case, nothing)


def test_a_layout_that_takes_shards_for_wholes() -> None:
    length = gpt.SEQUENCE // 2
    for answer in run(2, wrong_layout, SP, False):
        name = "embedding:output, microbatch 0: local shape"
        assert_names(answer[0], name, (length, gpt.BATCH, gpt.HIDDEN), "[s, b, h]")
        assert_names(answer[0], length, gpt.SEQUENCE)


def test_a_layout_that_takes_wholes_for_shards() -> None:
    length = gpt.SEQUENCE
    for answer in run(2, wrong_layout, Case("tp2", tp=2, layers=2), True):
        assert f"makes ({2 * length}, {gpt.BATCH}, {gpt.HIDDEN})" in answer[0]


def wrong_width(case: Case) -> list[str]:
    from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
    from megatron_flex.layout import Dim, Layout

    uncut = (Dim("b"), Dim("n"), Dim("d"))
    changes.setattr(ModelLayouts, "heads", lambda self: Layout((self.sequence(), *uncut)))
    return told(case, nothing)


def test_a_layout_that_forgets_a_cut() -> None:
    for answer in run(2, wrong_width, Case("tp2", tp=2, layers=2)):
        wanted = (
            f"decoder.layers.0.self_attention:q, microbatch 0: local shape ({gpt.SEQUENCE}, {gpt.BATCH}, 2"
        )
        assert wanted in answer[0]
        assert_names(answer[0], gpt.HEADS // 2, gpt.HEADS)


def uncopied(chunks: list[nn.Module], rank: int) -> None:
    """The second of the two copies of a key head goes its own way."""
    if rank == 1:
        attention = chunks[0].decoder.layers[0].self_attention
        original = attention.get_query_key_value_tensors

        def changed(*args: Any, **kwargs: Any) -> Any:
            query, key, value, *rest = original(*args, **kwargs)
            return (query, key * 1.5, value, *rest)

        attention.get_query_key_value_tensors = changed


@FEW_GROUPS
def test_copies_of_a_head_that_differ() -> None:
    for answer in run(4, told, HEADS, uncopied):
        first = answer[0].partition(": ")[2].partition(": ")[2]
        assert first.startswith("decoder.layers.0.self_attention:k, microbatch 0: ")


def doubled(case: Case) -> list[str]:
    """A tap that was put in twice."""
    from megatron_flex.adapters.taps import module_output
    from megatron_flex.sites import Tap, TapCallbacks

    install = Tap.install

    def twice(self: Tap, callbacks: TapCallbacks) -> Any:
        undos = [install(self, callbacks) for _ in range(2 if self.function is module_output else 1)]
        return lambda: [undo() for undo in undos]

    changes.setattr(Tap, "install", twice)
    return told(case, nothing)


def test_a_tap_that_fires_twice() -> None:
    for answer in run(2, doubled, SP):
        assert_names(answer[0], "embedding:output", "microbatch 0")


def switches() -> list[str]:
    import megatron_flex as mf

    case = Case("one", layers=2)
    chunks = ranks.start(case)
    out = []
    with mf.attach(chunks, [mf.HookFunction("decoder.layers.0")], verify=True) as flex:
        out.append(error(lambda: gpt.step(case, chunks, 0)))
        out.append(len(flex.output_dict["decoder.layers.0"]))
    flex = mf.attach(chunks, verify=True)
    try:
        flex.restore()
    except mf.HookError as problem:
        out.append(str(problem))
    return out


def test_the_flag_of_attach() -> None:
    ((clean, count, unverified),) = run(1, switches)
    assert clean == ""
    assert count == 2
    assert_names(unverified, "verify()")


def one_rank_only() -> str:
    import megatron_flex as mf

    chunks = ranks.start(SP)
    flex = mf.FlexModel(chunks)
    if torch.distributed.get_rank() == 0:
        flex.verify()
    try:
        gpt.step(SP, chunks, 0)
    except mf.HookError as problem:
        return str(problem)
    return ""


def test_verify_on_one_rank_only_is_told() -> None:
    for text in run(2, one_rank_only):
        assert any_names([text], "rank 0") or any_names([text], "rank 1")


def rows_of_an_expert(case: Case, verify: bool) -> tuple[list[Tensor], list[str]]:
    """The rows of one expert in four steps, two of them verified; then the layers still watched."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    place = "decoder.layers.0.mlp.experts.local_experts.1:input"
    read = []
    with mf.attach(chunks, [mf.HookFunction(place)]) as flex:
        if verify:
            flex.verify(steps=2)
        for _ in range(4):
            gpt.step(case, chunks, ranks.mine(chunks))
            read += [t.clone() for t in dict(flex.output_dict).get(place, [])]
            flex.output_dict.clear()
    return read, [path for path, module in chunks[0].named_modules() if "_flex_watch" in vars(module)]


def test_a_hook_still_reads_after_verify_has_ended() -> None:
    """Both install the same tap of a layer of experts, and `verify()` removes its own only."""
    case = Case("experts dp2 ep2", dp=2, ep=2, experts=4, layers=1)
    plain, verified = (run(2, rows_of_an_expert, case, verify) for verify in (False, True))
    assert sum(len(read) for read, _ in plain) == 4 * case.microbatches * case.dp
    for (want, _), (got, left) in zip(plain, verified, strict=True):
        assert len(got) == len(want)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert left == []
