"""What hooks do beside being right: what they send, what they leave behind, what keeps readings apart."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

FC1 = "decoder.layers.1.mlp.linear_fc1"
FC2 = "decoder.layers.1.mlp.linear_fc2"


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


# -- what is sent ------------------------------------------------------------------------------------


def counts(case: Case) -> Any:
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = ranks.mine(chunks)

    def ours(hooks: list[mf.HookFunction], base: Counter[str] | None = None) -> dict[str, int]:
        flex = mf.attach(chunks, hooks)
        gpt.step(case, chunks, rank)  # hooks are compared before the first step
        with ranks.counting() as seen:
            gpt.step(case, chunks, rank)
        flex.restore()
        seen.subtract(base or {})
        return {n: c for n, c in seen.items() if c}

    with ranks.counting() as plain:
        gpt.step(case, chunks, rank)
    return {
        "idle": ours([], plain),
        "replicated": ours([mf.HookFunction("decoder.layers.1:output")], plain),
        "sharded": ours([mf.HookFunction(FC1)], plain),
        "sharded twice": ours([mf.HookFunction(FC1), mf.HookFunction("output_layer")], plain),
        "sum": ours([mf.HookFunction(f"{FC2}:partial")], plain),
        "gradient": ours([mf.HookFunction(FC1, hook_type="full_backward_pre")], plain),
        "replicated edit": ours(
            [mf.HookFunction("decoder.layers.1", editing_function=double, save=False)], plain
        ),
        "sharded edit": ours([mf.HookFunction(FC1, editing_function=double, save=False)], plain),
    }


def test_what_each_hook_sends() -> None:
    """With two microbatches: reads go by shared memory, but for partial sums; one collective for each edit
    forward and backward.
    """
    for answer in run(2, counts, Case("tp2", tp=2)):
        assert answer["idle"] == {}
        asked = {"all_reduce": 1}  # did anything go wrong on any rank?
        for read in ("replicated", "sharded", "sharded twice", "gradient"):
            assert answer[read] == asked, read
        assert answer["sum"] == asked | {"reduce": 1}
        assert answer["replicated edit"] == asked
        assert answer["sharded edit"] == {"all_gather_into_tensor": 4, "all_reduce": 1}


def test_idle_sends_nothing_over_a_pipeline() -> None:
    for answer in run(4, counts, Case("tp2 pp2", tp=2, pp=2)):
        assert answer["idle"] == {}


# -- what is left behind -----------------------------------------------------------------------------


def restored(case: Case) -> Any:
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    gpt.step(case, chunks, rank)
    before, wanted = ranks.fingerprint(chunks), gpt.step(case, chunks, rank)
    flex = mf.FlexModel(chunks)
    hooks = [mf.HookFunction("**:*"), mf.HookFunction("**:*", editing_function=double, save=False)]
    hooks += [mf.HookFunction("**:*", hook_type="tensor")]
    parameter = "decoder.layers.0.mlp.linear_fc1.weight"
    hooks += [mf.HookFunction(parameter, hook_type="tensor")]
    for hook in hooks:
        flex.session.hooks.add(hook)
    edited = gpt.step(case, chunks, rank)
    during = ranks.fingerprint(chunks)
    flex.remove_hook(hooks[0])
    flex.remove_hook(hooks[1])
    unedited = gpt.step(case, chunks, rank)
    given = flex.restore()
    after, again = ranks.fingerprint(chunks), gpt.step(case, chunks, rank)
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    return changed, during != before, wanted, edited, unedited, again, given is chunks


@pytest.mark.parametrize(
    "case", [Case("tp2 sp", tp=2, sp=True), Case("pp2 vpp2", pp=2, vpp=2)], ids=lambda c: c.name
)
def test_restore_leaves_nothing(case: Case) -> None:
    for changed, differed, wanted, edited, unedited, again, same in run(2, restored, case):
        assert changed == []
        assert differed
        assert same
        assert wanted == again == unedited
        assert not wanted or edited != wanted


# -- keys --------------------------------------------------------------------------------------------


def keyed(case: Case, pending: int) -> Any:
    import megatron_flex as mf
    from megatron_flex.config import flex_config

    flex_config.pending_bytes = pending
    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    flex = mf.FlexModel(chunks)
    flex.register_forward_hook(mf.HookFunction("decoder.layers.*.mlp.linear_fc1"))
    flex.register_full_backward_pre_hook(mf.HookFunction(FC1))
    gpt.step(case, chunks, rank)
    gpt.step(case, chunks, rank)
    for chunk in chunks:
        chunk.eval()
    gpt.step(case, chunks, rank, forward_only=True)
    out = {
        n: ([tuple(k[1:]) for k in r.keys], [t.double().sum().item() for t in r])
        for n, r in flex.output_dict.items()
    }
    by = len(flex.output_dict[FC1].at(step=1)) if out else None, len(flex.output_dict[FC1]) if out else None
    flex.restore()
    absent = ""
    if not flex.is_leader:
        with pytest.raises(KeyError) as error:
            flex.output_dict[FC1]
        absent = str(error.value)
    return out, by, flex.is_leader, absent


@pytest.mark.parametrize("pending", [1 << 30, 0])
def test_every_microbatch_is_kept_apart(pending: int) -> None:
    case = Case("tp2 pp2 vpp2, recomputed", tp=2, pp=2, vpp=2, microbatches=4, recompute=("full",))
    answers = run(4, keyed, case, pending)
    assert [bool(a[0]) for a in answers] == [a[2] for a in answers] == [True, False, False, False]
    for answer in answers[1:]:
        assert_names(answer[3], FC1, "rank 0", "flex.is_leader")
    found = answers[0][0]
    assert len(found) == case.layers + 1
    steps = [(s, s, m, 0) for s in range(3) for m in range(4)]
    for name, (keys, sums) in found.items():
        gradient = name.endswith(".grad")
        assert keys == (steps[:8] if gradient else steps), name
        assert len(set(sums[:4])) == 4, "microbatches differ"
        assert sums[:4] == sums[4:8]
    assert answers[0][1] == (4, 12)


# -- calling the model by itself ---------------------------------------------------------------------


def direct() -> Any:
    import megatron_flex as mf

    case = Case("tp2 sp", tp=2, sp=True)
    chunks = ranks.start(case)
    flex = mf.FlexModel(chunks[0], tensor_parallel_size=2)
    parameter = "decoder.layers.0.mlp.linear_fc1.weight"
    flex.register_forward_hook(mf.HookFunction(FC1, expected_shape=(None, None, 2 * gpt.FFN)))
    flex.register_forward_pre_hook(mf.HookFunction(f"{FC2}"))
    flex.register_full_backward_hook(mf.HookFunction(FC1))
    flex.register_hook(mf.HookFunction(parameter))
    loss = ranks.call(chunks, model=flex)
    forward = {n: tuple(r[0].shape) for n, r in flex.output_dict.items()}
    loss.mean().backward()
    all_ = {n: tuple(r[0].shape) for n, r in flex.output_dict.items()}
    weight = chunks[0].decoder.layers[0].mlp.linear_fc1.weight.grad.clone()
    whole = flex.output_dict[parameter + ".grad"][0] if all_ else None
    names = dict(flex.named_full_parameters())
    kept = {n: r[0].clone() for n, r in flex.output_dict.items()}
    with torch.no_grad():
        chunks[0].decoder.layers[0].mlp.linear_fc1.weight.mul_(2)
    ranks.call(chunks, model=flex).mean().backward()
    still = all(torch.equal(flex.output_dict[n][0], t) for n, t in kept.items())
    new = all(not torch.equal(flex.output_dict[n][1], t) for n, t in kept.items())
    restored = flex.restore()
    shapes = {n: tuple(t.shape) for n, t in names.items()}
    return forward, all_, weight, whole, restored is chunks[0], shapes, (still, new)


def test_a_model_called_without_a_schedule() -> None:
    first, second = run(2, direct)
    s, b = gpt.SEQUENCE, gpt.BATCH
    forward = {f"{FC1}:output": (s, b, 2 * gpt.FFN), f"{FC2}:input": (s, b, gpt.FFN)}
    assert first[0] == forward
    weight = "decoder.layers.0.mlp.linear_fc1.weight.grad"
    assert first[1] == {**forward, f"{FC1}:input.grad": (s, b, gpt.HIDDEN), weight: (2 * gpt.FFN, gpt.HIDDEN)}
    assert second[0] == second[1] == {}
    half = gpt.FFN // 2
    gate_up = [a[2][part * half : (part + 1) * half] for part in (0, 1) for a in (first, second)]
    assert torch.equal(first[3], torch.cat(gate_up))
    assert first[4]
    assert first[5]["embedding.word_embeddings.weight"] == (gpt.VOCABULARY, gpt.HIDDEN)
    assert second[5] == {}
    assert first[6] == (True, True), "a later step does not overwrite what was read"


# -- reading is bitwise ------------------------------------------------------------------------------


def local_and_whole() -> Any:
    import megatron_flex as mf

    case = Case("tp2 sp", tp=2, sp=True)
    chunks = ranks.start(case)
    taken: dict[str, Tensor] = {}
    layer = chunks[0].decoder.layers[1]
    layer.mlp.linear_fc1.register_forward_hook(lambda m, a, out: taken.update(fc1=out[0].detach().clone()))
    layer.register_forward_hook(lambda m, a, out: taken.update(layer=out[0].detach().clone()))
    with mf.attach(chunks, [mf.HookFunction(FC1), mf.HookFunction("decoder.layers.1")]) as flex:
        ranks.call(chunks)
        return taken, {n: r[0] for n, r in flex.output_dict.items()}


def test_gathering_is_bitwise() -> None:
    (first, whole), (second, _) = run(2, local_and_whole)
    halves = [
        t[..., p * gpt.FFN // 2 : (p + 1) * gpt.FFN // 2]
        for p in (0, 1)
        for t in (first["fc1"], second["fc1"])
    ]
    assert torch.equal(whole[f"{FC1}:output"], torch.cat(halves, -1))
    assert torch.equal(whole["decoder.layers.1:output"], torch.cat([first["layer"], second["layer"]]))


# -- editing gradients, random numbers, several hooks ------------------------------------------------


def several() -> Any:
    import megatron_flex as mf

    case = Case("tp2 sp", tp=2, sp=True)
    chunks = ranks.start(case)
    seen: list[Tensor] = []

    def noise(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.run.first = torch.randn(4)
        numpys = torch.from_numpy(np.random.standard_normal(inputs.shape)).to(inputs.dtype)
        save_ctx.noise = torch.randn_like(inputs) + numpys + random.random()
        save_ctx.keep("noise")
        return inputs + save_ctx.noise

    def look(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        seen.append(inputs.detach().clone())
        save_ctx.run.second = torch.randn(4)
        return inputs

    def zero(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return torch.zeros_like(inputs)

    torch.manual_seed(torch.distributed.get_rank())  # the ranks' own streams differ, as Megatron's do
    np.random.seed(torch.distributed.get_rank())
    random.seed(torch.distributed.get_rank())
    state, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    flex = mf.FlexModel(chunks[0])
    flex.register_forward_hook(mf.HookFunction("decoder.layers.0", editing_function=noise))
    flex.register_forward_hook(mf.HookFunction("decoder.layers.0", editing_function=look))
    ranks.call(chunks, model=flex)
    untouched = torch.equal(state, torch.get_rng_state()) and pythons == random.getstate()
    untouched = untouched and np.array_equal(numpys[1], np.random.get_state()[1])
    before = flex.output_dict["decoder.layers.0"][0] if flex.output_dict else None
    drawn = flex.save_ctx.noise
    untouched = untouched and not torch.equal(flex.save_ctx.run.first, flex.save_ctx.run.second)
    flex.restore()
    flex = mf.FlexModel(chunks[0])
    flex.register_full_backward_pre_hook(mf.HookFunction("decoder.layers.1", editing_function=zero))
    ranks.call(chunks, model=flex).mean().backward()
    grads = [chunks[0].decoder.layers[n].mlp.linear_fc1.weight.grad.abs().sum().item() for n in (1, 2)]
    flex.restore()
    return drawn, seen[0], before, untouched, grads


def test_several_hooks_one_stream_of_random_numbers_and_edited_gradients() -> None:
    first, second = run(2, several)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2] + first[0], first[1]), "hooks run in order; what is saved is from before them"
    assert first[3]
    assert first[4][0] == 0 < first[4][1]


# -- wrapped models ----------------------------------------------------------------------------------


def wrapped() -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    import megatron_flex as mf

    case = Case(
        "tp2, bf16",
        tp=2,
        extra={"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    )
    chunks = ranks.start(case)
    inside = Float16Module(chunks[0].config, chunks[0].bfloat16())
    model = DistributedDataParallel(chunks[0].config, DistributedDataParallelConfig(), inside)
    flex = mf.FlexModel(model)
    flex.register_forward_hook(mf.HookFunction(FC1))
    ranks.call(chunks, model=flex)
    want = {
        name: value + 1 if torch.is_tensor(value) else value for name, value in model.state_dict().items()
    }
    flex.load_state_dict(flex.state_dict() | want)
    loaded = all(
        torch.equal(value, want[name]) for name, value in model.state_dict().items() if torch.is_tensor(value)
    )
    return flex.sites(FC1)[0].name, flex.output_dict[FC1][0].dtype if flex.output_dict else None, loaded


def test_names_do_not_show_wrappers_and_their_state_dicts_load() -> None:
    first, _ = run(2, wrapped)
    assert first[0].startswith(FC1)
    assert first[1] == torch.bfloat16
    assert first[2]
