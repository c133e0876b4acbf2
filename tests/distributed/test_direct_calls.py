"""Models on several pipeline stages that no schedule runs: inference wrappers, evaluation by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import HookError
from tests.distributed import test_pipelining
from tests.support import gpt, handmade, llama, llama_fairscale, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pages import mine as blocks
from tests.support.pool import run, run_alone

ROOT = Path(__file__).parents[2]

FIRST, LAST = "decoder.layers.0:output", "decoder.layers.3:output"
SOON = 10.0  # seconds; ranks that wait for each other's hooks give up after 60
CASE = Case("tp2 pp2", tp=2, pp=2)


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with, at once."""
    started = time.monotonic()
    with pytest.raises(HookError) as caught:
        call()
    assert time.monotonic() - started < SOON
    return str(caught.value)


def halved(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5 + inputs.mean()


def hooks() -> list[mf.HookFunction]:
    """A reading on each stage, and an edit on the first one."""
    edit = mf.HookFunction("decoder.layers.1:output", editing_function=halved, save=False)
    return [mf.HookFunction(FIRST), edit, mf.HookFunction(LAST)]


def by_torch(root: nn.Module) -> dict[str, list[Tensor]]:
    """The same on one process, by torch's own hooks; what passes is put into what is returned."""
    found: dict[str, list[Tensor]] = {FIRST: [], LAST: []}

    def keep(name: str) -> Any:
        return lambda module, args, output: found[name].append(output[0].clone())

    layers = root.decoder.layers
    layers[0].register_forward_hook(keep(FIRST))
    layers[1].register_forward_hook(lambda m, a, output: (halved(m, output[0], None, None), *output[1:]))
    layers[3].register_forward_hook(keep(LAST))
    return found


def attached(chunks: list[nn.Module], state: dict[str, Tensor]) -> mf.FlexModel:
    gpt.load(chunks, state)
    return mf.attach(chunks, hooks())


def readings(flex: mf.FlexModel) -> dict[str, list[Tensor]]:
    return {name: list(tensors) for name, tensors in flex.output_dict.items()}


def same(got: dict[str, list[Tensor]], want: dict[str, list[Tensor]]) -> None:
    assert got.keys() == want.keys()
    for name, tensors in want.items():
        torch.testing.assert_close(got[name], tensors, rtol=1e-5, atol=1e-5)


# -- Megatron's inference wrappers ---------------------------------------------------------------------


def wrapper_of(chunk: nn.Module) -> Any:
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.transformer.enums import AttnBackend

    chunk.config.attention_backend = AttnBackend.local
    chunk.config.params_dtype = torch.float32
    return GPTInferenceWrapper(chunk, StaticInferenceContext(gpt.BATCH, gpt.SEQUENCE))


def generate(wrapper: Any) -> list[Tensor | None]:
    """A prompt and then two more tokens, with keys and values that are kept."""
    tokens = gpt.data(1)[0]["tokens"]
    wrapper.prep_model_for_inference()
    whole = wrapper.prep_inference_input(tokens)
    out, before = [], 0
    for until in (8, 9, 10):
        out.append(wrapper.run_one_forward_step(wrapper.get_batch_for_context_window(whole, before, until)))
        before = until
    return out


def generated_alone(case: Case) -> Any:
    (chunk,) = ranks.start(case)
    state = gpt.randomize(chunk)
    found = by_torch(chunk)
    return state, found, generate(wrapper_of(chunk))


def generated(case: Case, state: dict[str, Tensor], page: str) -> Any:
    chunks = ranks.start(case)
    wrapper = wrapper_of(chunks[0])
    flex = attached(chunks, state)
    text = refusal(lambda: generate(wrapper))
    prompt = wrapper.prep_inference_input(gpt.data(1)[0]["tokens"])
    wrapper.prep_model_for_inference()
    names = {"flex": flex, "wrapper": wrapper, "prompt": prompt, "before": 0}
    exec(page, names)
    out = names["logits"]
    read = readings(flex)
    flex.restore()
    plain = generate(wrapper)
    return text, read, out, plain


def test_an_inference_wrapper() -> None:
    ((state, want, logits),) = run(1, generated_alone, CASE.single())
    (page,) = blocks(ROOT / "docs" / "frameworks.md")
    answers = run(4, generated, CASE, state, page)
    for text, _, out, plain in answers:
        assert_names(text, "flex.step()")
        assert_names(text, "2")
        assert (out is None) == (plain[-1] is None)
        if out is not None:
            torch.testing.assert_close(out, logits[-1], rtol=1e-4, atol=1e-4)
            assert not torch.equal(out, plain[-1]), "the edit is gone"
    same(answers[0][1], want)
    assert len(want[FIRST]) == 3


# -- evaluation by hand --------------------------------------------------------------------------------


def hand_over(chunks: list[nn.Module], microbatches: int, check: Any = None) -> list[Tensor]:
    """Run microbatches through all virtual stages, each tensor sent by torch's own functions."""
    from megatron.core import parallel_state as state

    stage, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    after, before = (
        state.get_pipeline_model_parallel_next_rank(),
        state.get_pipeline_model_parallel_prev_rank(),
    )
    count, losses = stages * len(chunks), []
    positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
    for batch in gpt.data(microbatches):
        for number, chunk in enumerate(chunks):
            place = number * stages + stage
            if place:
                received = torch.empty(gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
                dist.recv(received, before)
                chunk.set_input_tensor(received)
            out: Any = torch.zeros(gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
            with torch.no_grad(), nullcontext() if check is None else check:
                out = chunk(batch["tokens"], positions, mask, labels=batch["labels"])
            if place < count - 1:
                dist.send(out, after)
            else:
                losses.append(out)
    return losses


class Refused:
    """A scope in which a call is refused, which the one who made it survives."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        assert isinstance(error, HookError)
        assert time.monotonic() - self._started < SOON
        self.texts.append(str(error))
        return True


def evaluated_alone(case: Case) -> Any:
    (chunk,) = ranks.start(case)
    state = gpt.randomize(chunk)
    found = by_torch(chunk)
    losses = []
    with torch.no_grad():
        for batch in gpt.data(2):
            positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
            mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
            losses.append(chunk(batch["tokens"], positions, mask, labels=batch["labels"]))
    return state, found, losses


def evaluated(case: Case, state: dict[str, Tensor]) -> Any:
    chunks = ranks.start(case)
    flex = attached(chunks, state)
    refused = Refused()
    hand_over(chunks, 1, refused)
    with flex.step():
        losses = hand_over(chunks, 2)
    keys = [(k.site, k.microbatch, k.call) for r in flex.output_dict.values() for k in r.keys]
    read = readings(flex)
    flex.restore()
    hand_over(chunks, 1)  # no hook is active: nothing of ours
    return refused.texts, read, keys, losses


@pytest.mark.parametrize(
    "case", [CASE, Case("pp2 vpp2", pp=2, vpp=2), Case("pp2, a list", pp=2)], ids=lambda c: c.name
)
def test_evaluation_by_hand(case: Case) -> None:
    """Each rank refuses in its own call; in step() a virtual chunk's calls are counted by themselves."""
    ((state, want, losses),) = run(1, evaluated_alone, case.single())
    answers = run(case.world, evaluated, case, state)
    for texts, _, _, found in answers:
        assert len(texts) == (case.vpp or 1)
        assert all("with flex.step():" in text for text in texts)
        for got, one in zip(found, losses, strict=False):
            torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)
    same(answers[0][1], want)
    assert answers[0][2] == [(site, m, 0) for site in (FIRST, LAST) for m in (0, 1)]


# -- other frameworks ----------------------------------------------------------------------------------


def stage_by_hand() -> Any:
    """A stage of a schedule of torch's, called without it."""
    schedule = test_pipelining.schedule_of("GPipe", 2, 1)
    (stage,) = test_pipelining.StageModules(schedule).stages
    tokens, _ = llama.batch(0)
    flex = mf.attach(schedule, [mf.HookFunction("layers.0")])
    refused = Refused()

    def call(scope: Any) -> None:
        x, out = tokens, torch.zeros(*tokens.shape, llama.HIDDEN)
        if dist.get_rank():
            x = out.clone()
            dist.recv(x, 0)
        with torch.no_grad(), scope:
            out = stage.submod(x)
        if dist.get_rank() == 0:
            dist.send(out, 1)

    call(refused)
    with flex.step():
        call(nullcontext())
    return refused.texts, {n: list(r) for n, r in flex.output_dict.items()}


def test_a_stage_of_torchs_pipelining() -> None:
    (first, read), (second, nothing) = run(2, stage_by_hand)
    for texts in (first, second):
        assert len(texts) == 1
        assert_names(texts[0], "flex.step()")
    whole = llama.single()
    want: list[Tensor] = []
    whole.layers["0"].register_forward_hook(lambda m, a, output: want.append(output.detach()))
    whole(llama.batch(0)[0])
    assert nothing == {}
    torch.testing.assert_close(read["layers.0:output"], want)


def halves() -> Any:
    """A pipeline by hand of plain modules, or of fairscale's groups: backward is part of the step."""
    whole, stage = handmade.single(), dist.get_rank()
    part = nn.Sequential(whole.norm, whole.up) if stage == 0 else nn.Sequential(nn.ReLU(), whole.down)
    named = nn.ModuleDict({f"part{stage}": part})
    named.forward = lambda x: part(x)
    flex = mf.attach(named, pipeline_parallel_size=2)
    flex.register_full_backward_pre_hook(mf.HookFunction("part*"))
    x = handmade.batch(0) if stage == 0 else torch.ones(*handmade.batch(0).shape[:2], handmade.WIDE)
    direct = refusal(lambda: named(x))
    with flex.step():
        out = named(x)
    late = refusal(lambda: out.sum().backward())
    with flex.step():
        named(x).sum().backward()
    return direct, late, {n: [tuple(t.shape) for t in r] for n, r in flex.output_dict.items()}


def test_a_backward_pass_after_its_step() -> None:
    (direct, late, read), (again, other, nothing) = run(2, halves)
    for text in (direct, again):
        assert_names(text, 2)
        assert_names(text, "flex.step()")
    for text in (late, other):
        assert_names(text, "flex.step()")
    assert set(read) == {"part0:output.grad", "part1:output.grad"}
    assert nothing == {}


def of_fairscale() -> Any:
    llama_fairscale.initialize(1, 2)
    stage = dist.get_rank()
    model = test_pipelining.stage_of(llama_fairscale.model(), stage, 2)
    x = torch.ones(2, 8, llama.HIDDEN) if stage else llama.batch(0)[0]
    plain = model(x)
    flex = mf.attach(model, [mf.HookFunction("layers.0")])
    text = refusal(lambda: model(x))
    with flex.step():
        model(x)
    flex.restore()
    return text, torch.equal(model(x), plain)


def test_fairscales_groups() -> None:
    pytest.importorskip("fairscale")
    for text, equal in run_alone(2, of_fairscale):
        assert_names(text, "flex.step()")
        assert equal
