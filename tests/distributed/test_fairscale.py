"""A LLaMA-style model of fairscale's layers, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_flex as mf
from tests.support import llama, proof
from tests.support import llama_fairscale as parallel
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("fairscale")


def build(tp: int, wrapped: bool = False, switches: dict[str, Any] | None = None) -> proof.Built:
    parallel.initialize(tp)
    model: Any = parallel.model(**switches or {})
    if wrapped:
        from fairscale.nn.model_parallel.initialize import get_data_parallel_group

        model = DistributedDataParallel(model, process_group=get_data_parallel_group())

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, averaged=wrapped)


CASES = {
    "mp1 dp1": (1, 1, False, {}),
    "mp2": (2, 1, False, {}),
    "mp4": (4, 1, False, {}),
    "mp1 dp2": (1, 2, False, {}),
    "mp2 dp2": (2, 2, False, {}),
    "mp2 dp2, DDP": (2, 2, True, {}),
    "mp4 dp2, DDP": (4, 2, True, {}),
    "mp2, gathered": (2, 1, False, {"gather": True}),
    "mp2, vocabulary": (2, 1, False, {"vocabulary": True}),
    "mp4, gathered, vocabulary": (4, 1, False, {"gather": True, "vocabulary": True}),
}
INPUTS = ("layers.0.attention.wq:input", "layers.1.feed_forward.w1:input", "output:input")


@pytest.mark.parametrize("case", CASES)
def test_matrix(case: str, cells: list[Any]) -> None:
    tp, dp, wrapped, switches = CASES[case]
    sites = (*llama.SITES, *INPUTS)
    found = proof.compare("fairscale", case, tp * dp, build, tp, wrapped, switches, sites=sites)
    proof.judge(found, cells)


@pytest.mark.parametrize("attention", ["meta", "cached"])
@pytest.mark.parametrize("tp", [2, 4])
def test_attention_as_meta_writes_it(tp: int, attention: str, cells: list[Any]) -> None:
    """With 4 heads of keys and values on 4 ranks each has one; a cache is changed in place."""
    places = ("wq:output", "wk:output", "wv:output", "wo:input")
    sites = [f"layers.{n}.attention.{place}" for n in range(llama.LAYERS) for place in places]
    edits = [f"layers.1.attention.{place}" for place in places]
    case = f"mp{tp}, attention {attention}"
    found = proof.compare(
        "fairscale", case, tp, build, tp, False, {"attention": attention}, sites=sites, edits=edits
    )
    proof.judge(found, cells)


INNER = {  # a place inside, by the place of the single process that has the same tensor
    "tok_embeddings:output": "tok_embeddings:local",
    "layers.0.attention.wq:input": "layers.0.attention.wq:gemm_input",
    "layers.1.attention.wo:input": "layers.1.attention.wo:gemm_input",
    "layers.1.attention.wo:output": "layers.1.attention.wo:partial",
    "layers.1.feed_forward.w1:output": "layers.1.feed_forward.w1:local",
    "layers.2.feed_forward.w2:output": "layers.2.feed_forward.w2:partial",
    "output:input": "output:gemm_input",
    "output:output": "output:local",
}


def inside(tp: int, wrapped: bool, switches: dict[str, bool]) -> proof.Built:
    embedding = {"tok_embeddings:output": "tok_embeddings:partial"} if switches.get("vocabulary") else {}
    return replace(build(tp, wrapped, switches), name=lambda site: {**INNER, **embedding}.get(site, site))


@pytest.mark.parametrize("vocabulary", [False, True])
def test_inside(vocabulary: bool, cells: list[Any]) -> None:
    switches = {"gather": True, "vocabulary": vocabulary}
    case = f"mp2 dp2, inside, {'vocabulary' if vocabulary else 'width'}"
    found = proof.compare(
        "fairscale", case, 4, inside, 2, True, switches, sites=list(INNER), edits=list(INNER)
    )
    proof.judge(found, cells)


def staged(stages: int) -> proof.Built:
    """A pipeline by hand: forward through the stages, and backward from the last."""
    from fairscale.nn.model_parallel import initialize

    parallel.initialize(2, stages)
    ranks = initialize.get_pipeline_parallel_ranks()
    me = ranks.index(dist.get_rank())
    first, last = me == 0, me == stages - 1
    model = parallel.stage(me, stages)
    shape = (llama.SAMPLES, llama.TOKENS, llama.HIDDEN)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        given = tokens
        if not first:
            given = torch.empty(shape)
            dist.recv(given, ranks[me - 1])
            given.requires_grad_()
        out = model(given)
        loss = llama.loss_of(out, labels) if last else torch.zeros(())
        if last:
            loss.backward()
        else:
            dist.send(out.detach(), ranks[me + 1])
            back = torch.empty(shape)
            dist.recv(back, ranks[me + 1])
            out.backward(back)
        if not first:
            dist.send(given.grad, ranks[me - 1])
        told = loss.detach().clone()
        dist.broadcast(told, ranks[-1], group=initialize.get_pipeline_parallel_group())
        return told

    return proof.Built(model, step, stepped=True)


def test_stages(cells: list[Any]) -> None:
    """Fairscale numbers ranks by data, pipeline and model parallel place, in this order."""
    proof.judge(proof.compare("fairscale", "mp2 pp2 dp2", 8, staged, 2), cells)


def cut_logits() -> proof.Built:
    """The loss is computed from cut logits, by fairscale's function, which writes into them."""
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy

    built = build(2)
    built.model.output.gather_output = False

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = vocab_parallel_cross_entropy(built.model(tokens), labels).mean()
        loss.backward()
        return loss

    return replace(built, step=step)


def test_logits_that_are_overwritten(cells: list[Any]) -> None:
    places = ["output:output"]
    found = proof.compare("fairscale", "mp2, cut logits", 2, cut_logits, sites=places, edits=places)
    proof.judge(found, cells)


def refused() -> list[str]:
    """What is said where groups and model do not fit."""
    from fairscale.nn.model_parallel import initialize, layers
    from fairscale.nn.moe import MOELayer, Top2Gate

    def said(module: Any, **options: Any) -> str:
        with pytest.raises(mf.FlexError) as error:
            mf.FlexModel(module, **options)
        return str(error.value)

    parallel.initialize(2)
    column = layers.ColumnParallelLinear(4, 4)
    out = [said(column, tensor_parallel_size=4), said([column, nn.Linear(4, 4)])]
    experts = nn.Sequential(column, MOELayer(Top2Gate(4, 2), nn.Linear(4, 4)))
    out.append(said(experts))
    initialize.destroy_model_parallel()
    out.append(said(column))
    parallel.initialize(1)
    out.append(said(column))
    return out


def test_refusals() -> None:
    for told in run(2, refused):
        sizes, chunks, experts, groups, again = told
        assert_names(sizes, "tp=4", "2")
        assert "2 " in chunks
        assert "MOELayer" in experts
        assert "initialize_model_parallel" in groups
        assert_names(again, "ColumnParallelLinear", 2, 4)


def sharded() -> tuple[str, str]:
    from fairscale.nn import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4), compute_device=torch.device("cpu"))
    with pytest.raises(KeyError) as upstream:
        model(torch.zeros(1, 4))
    with pytest.raises(mf.FlexError) as ours:
        mf.FlexModel(model)
    return f"{type(upstream.value).__name__}: {upstream.value}", str(ours.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it has streams")
def test_its_sharded_data_parallel_does_not_run() -> None:
    for upstream, ours in run(2, sharded):
        assert upstream in ours
        assert "fully_shard" in ours
