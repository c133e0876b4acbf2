"""Whole parameters and gradients, read and set, against single-process Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.matrix import BOUND, relative
from tests.support import design, gpt, oracle, ranks, ssm, truths, wrapped
from tests.support.gpt import Case
from tests.support.messages import assert_names, warns
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
WORDS = "embedding.word_embeddings.weight"
NORM = "decoder.layers.1.pre_mlp_layernorm.weight"
SP_PP = Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2)
TIED = Case("tp2 sp pp2 tied", tp=2, sp=True, pp=2, layers=2, tied=True)
TIED_DP = Case("pp2 dp2 tied", pp=2, dp=2, layers=2, tied=True)
SP_DP = Case("tp2 sp dp2", tp=2, sp=True, dp=2, layers=2)
CHUNKS = Case("tp2 pp2 vpp2", tp=2, pp=2, vpp=2, layers=4)
PLAIN = Case("bias", tp=2, sp=True, gated=False, rms=False, rope=False, bias=True, layers=2)
NORMS = Case("tp4 q/k norm", tp=4, qk_norm=True, groups=4, layers=2)
EXPERTS = Case("experts tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2, experts=4, shared_experts=True, layers=2)
SPLIT_EXPERTS = Case("experts tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, experts=4, layers=2)
GROUPED = Case("grouped experts dp2 ep2", dp=2, ep=2, experts=4, te=True, grouped=True, layers=2)
CONTEXT = Case("tp2 sp cp2", tp=2, sp=True, cp=2, layers=2)
OTHERS = [
    EXPERTS,
    SPLIT_EXPERTS,
    GROUPED,
    Case("cp2 pp2", cp=2, pp=2, layers=2),
    Case("latent attention tp2 sp", tp=2, sp=True, mla="mended", q_rank=16, qk_norm=True, layers=2),
    Case("prediction tp2 pp2", tp=2, pp=2, layers=2, extra={"mtp_num_layers": 1}),
    Case("MG*E tp2 sp ep2", tp=2, sp=True, ep=2, pattern="MG*E", experts=4, extra=ssm.MAMBA | ssm.DELTA),
]
CASES = [SP_DP, CHUNKS, PLAIN, NORMS, *OTHERS]


def changed(value: Tensor) -> Tensor:
    """Another weight, in which every entry moves differently."""
    return value * 1.25 + 0.05 * torch.cos(torch.arange(value.numel()).reshape(value.shape))


def single(case: Case) -> dict[str, Any]:
    """Weights, losses, gradients; and losses with parameters changed, as `design.together` puts them."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    losses = gpt.step(case, chunks, 0)
    held = dict(gpt.global_names(chunks[0]))
    gradients = {n: p.grad.clone() for n, p in held.items()}
    after = {}
    for names in design.together(sorted(held)):
        for name in oracle.apart(names):
            held[name].data.copy_(changed(state[name]))
        after[names] = gpt.step(case, chunks, 0, forward_only=True)
        for name in oracle.apart(names):
            held[name].data.copy_(state[name])
    return {"state": state, "losses": losses, "gradients": gradients, "after": after}


# -- weights -----------------------------------------------------------------------------------------


def weights(case: Case, state: dict[str, Tensor], together: list[str]) -> dict[str, Any]:
    """Every parameter is set, read, and set to another value; the leader alone has the values."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    flex = mf.FlexModel(chunks)
    first = all(c == 0 for c in flex.session.mesh.coords.values())
    for name, value in state.items():
        flex.set_module_parameter(name, value if first else None)
    dp = flex.session.mesh["dp"].coord
    answer: dict[str, Any] = {"leader": flex.is_leader, "dp": dp, "losses": gpt.step(case, chunks, dp)}
    answer["read"] = {n: flex.get_module_parameter(n, tuple(t.shape)) for n, t in state.items()}
    answer["listed"] = dict(flex.named_full_parameters())
    answer["everywhere"] = dict(flex.named_full_parameters(everywhere=True))
    answer["after"] = {}
    for names in together:
        for name in oracle.apart(names):
            flex.set_module_parameter(name, changed(state[name]))
        answer["after"][names] = gpt.step(case, chunks, dp, forward_only=True)
        for name in oracle.apart(names):
            flex.set_module_parameter(name, state[name])
    answer["unknown"] = flex.parameters_without_layout()
    flex.restore()
    return answer


@pytest.mark.versions
@pytest.mark.parametrize("case", [SP_PP, TIED], ids=lambda c: c.name)
def test_every_weight_on_every_version(case: Case) -> None:
    check_weights(case)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_weight(case: Case) -> None:
    check_weights(case)


def check_weights(case: Case) -> None:
    truth = truths.once(single, case.single())
    state = truth["state"]
    assert sorted(n for names in truth["after"] for n in oracle.apart(names)) == sorted(state)
    answers = run(case.world, weights, case, state, list(truth["after"]), timeout=300)
    for answer in answers:
        assert answer["unknown"] == {}
        assert answer["everywhere"].keys() == state.keys()
        assert all(torch.equal(t, state[n]) for n, t in answer["everywhere"].items())
        if answer["leader"]:
            assert answer["listed"].keys() == state.keys()
            assert all(torch.equal(t, state[n]) for n, t in answer["listed"].items())
            assert all(torch.equal(t, state[n]) for n, t in answer["read"].items())
        else:
            assert answer["listed"] == {}
            assert all(t is None for t in answer["read"].values())
    assert sum(a["leader"] for a in answers) == case.dp
    last = [next(a for a in answers if a["dp"] == dp and a["losses"]) for dp in range(case.dp)]
    assert [x for a in last for x in a["losses"]] == pytest.approx(truth["losses"], rel=BOUND)
    for names, losses in truth["after"].items():
        assert [x for a in last for x in a["after"][names]] == pytest.approx(losses, rel=BOUND), names
        # what predicts further tokens has losses of its own, which do not come back with these
        own = all(n.startswith("mtp.") for n in oracle.apart(names))
        assert losses != truth["losses"] or own, names


# -- gradients ---------------------------------------------------------------------------------------


def gradients(
    case: Case, state: dict[str, Tensor], settings: dict[str, Any] | None, finalize: bool, said: bool | None
) -> dict[str, Any]:
    """Gradients of all parameters, and one that was set and read again.

    Args:
        case: the model.
        state: its weights.
        settings: for Megatron's DDP; None for a model without it.
        finalize: whether the schedule finalizes them.
        said: what is said of them.
    """
    import megatron_flex as mf

    chunks = ranks.start(case)
    if settings is not None:
        chunks = wrapped.ddp(chunks, finalize, **settings)
    flex = mf.FlexModel(chunks)
    for name, value in state.items():
        flex.set_module_parameter(name, value)
    dp = flex.session.mesh["dp"].coord
    for _ in range(2):  # what overlaps does so from the second step on
        for chunk in chunks if settings is not None else []:
            chunk.zero_grad_buffer()
        gpt.step(case, chunks, dp)
    answer: dict[str, Any] = {"leader": flex.is_leader, "reduced": flex.session.adapter.storage.reduced()}
    answer["listed"] = dict(flex.named_full_parameters(gradients=True, reduced=said))
    norm = NORM if NORM in state else "decoder.final_layernorm.weight"
    one = {n: flex.get_module_parameter(n, gradient=True, reduced=said) for n in (WORDS, norm)}
    answer["one"] = one
    answer["everywhere"] = flex.get_module_parameter(WORDS, gradient=True, reduced=said, everywhere=True)
    answer["again"] = {}
    for name in (WORDS, FC1 if FC1 in state else EXPERT, norm):
        flex.set_module_parameter(name, changed(state[name]), gradient=True, reduced=said)
        answer["again"][name] = flex.get_module_parameter(name, gradient=True, reduced=said)
    flex.restore()
    return answer


DISTRIBUTED = {"use_distributed_optimizer": True}
SMALL = {"bucket_size": 1500, "overlap_grad_reduce": True}
GRADIENTS = [
    pytest.param(SP_PP, None, False, None, id="no DDP"),
    pytest.param(TIED, None, False, None, id="no DDP, tied"),
    pytest.param(NORMS, None, False, None, id="no DDP, q/k norm"),
    pytest.param(SP_DP, None, False, False, id="no DDP, each replica's own"),
    pytest.param(SP_DP, {}, False, False, id="DDP, not finalized"),
    pytest.param(SP_DP, {}, True, None, id="DDP, finalized"),
    pytest.param(NORMS, {}, True, None, id="DDP, finalized, q/k norm"),
    pytest.param(TIED_DP, {}, True, None, id="DDP, finalized, tied"),
    pytest.param(TIED_DP, {}, False, False, id="DDP, not finalized, tied"),
    pytest.param(EXPERTS, {}, True, None, id="DDP, finalized, experts"),
    pytest.param(SPLIT_EXPERTS, DISTRIBUTED, True, None, id="distributed optimizer, finalized, experts"),
    pytest.param(CONTEXT, {}, True, None, id="DDP, finalized, context parallel"),
    pytest.param(CONTEXT, None, False, None, id="no DDP, context parallel"),
    pytest.param(SP_DP, {"overlap_grad_reduce": True}, True, None, id="DDP, finalized, overlapped"),
    pytest.param(
        SP_DP,
        DISTRIBUTED,
        True,
        None,
        id="distributed optimizer, finalized",
        marks=pytest.mark.versions,
    ),
    pytest.param(SP_DP, DISTRIBUTED, False, False, id="distributed optimizer, not finalized"),
    pytest.param(TIED_DP, DISTRIBUTED, True, None, id="distributed optimizer, finalized, tied"),
    pytest.param(SP_DP, DISTRIBUTED | SMALL, True, True, id="distributed optimizer, buckets, overlapped"),
]


@pytest.mark.parametrize(("case", "settings", "finalize", "said"), GRADIENTS)
def test_every_gradient(
    case: Case, settings: dict[str, Any] | None, finalize: bool, said: bool | None
) -> None:
    truth = truths.once(single, case.single())
    answers = run(case.world, gradients, case, truth["state"], settings, finalize, said)
    leaders = [a for a in answers if a["leader"]]
    want = truth["gradients"]
    assert all(a["listed"].keys() == (want.keys() if a["leader"] else set()) for a in answers)
    for name, true in want.items():
        found = [a["listed"][name] for a in leaders]
        # reduced, every replica has the average; not reduced, each has its own, and there Megatron has
        # multiplied the loss by the context parallel size, to average over those ranks later
        for got in found if finalize else [torch.stack(found).mean(0) / case.cp]:
            assert relative(got, true) < BOUND, name
    for answer in answers:
        for name, got in answer["one"].items():
            assert (got is not None) == answer["leader"]
            assert got is None or torch.equal(got, answer["listed"][name])
        assert any(torch.equal(answer["everywhere"], a["listed"][WORDS]) for a in leaders)
        for name, got in answer["again"].items():
            assert got is None or torch.equal(got, changed(truth["state"][name])), name


# -- what cannot be had ------------------------------------------------------------------------------


def said(do: Any) -> str:
    import megatron_flex as mf

    try:
        do()
    except mf.FlexError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(case: Case) -> dict[str, str]:
    """What each wrong request says, on this rank."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    if torch.distributed.get_rank() < 2:  # a module of somebody's own, on the first stage only
        chunks[0].decoder.layers[0].probe = torch.nn.Linear(4, 4)
    flex = mf.FlexModel(chunks)
    rank = torch.distributed.get_rank()
    one = torch.zeros(gpt.HIDDEN)
    get, put = flex.get_module_parameter, flex.set_module_parameter
    out = {
        "unknown": said(lambda: get("decoder.layers.1.mlp.linear_fc3.weight")),
        "shape": said(lambda: get(FC1, (2 * gpt.FFN, gpt.HIDDEN + 1))),
        "no layout": said(lambda: get("decoder.layers.0.probe.weight")),
        "no gradient": said(lambda: get(FC1, gradient=True)),
        "set unknown": said(lambda: put("decoder.layers.1.norm", one)),
        "set shape": said(lambda: put(NORM, torch.zeros(gpt.HIDDEN + 1))),
        "set dtype": said(lambda: put(NORM, one.double())),
        "set differing": said(lambda: put(NORM, one + rank)),
        "set nothing": said(lambda: put(NORM, None)),
        "set by one": said(lambda: put(NORM, one if rank == 1 else None)),
        "optimizer": said(lambda: put(NORM, one, optimizer=torch.optim.SGD([torch.zeros(1)]))),
        "without layout": str(flex.parameters_without_layout()),
    }
    with warns(UserWarning, "decoder.layers.0.probe.weight (Linear)"):
        out["listed"] = str("decoder.layers.0.probe.weight" in dict(flex.named_full_parameters()))
    flex.restore()
    return out


@pytest.mark.versions
def test_what_is_refused_is_refused_on_all_ranks() -> None:
    for told in run(4, refused, SP_PP):
        assert_names(told["unknown"], "decoder.layers.1.mlp.linear_fc3.weight")
        assert_names(told["shape"], (2 * gpt.FFN, gpt.HIDDEN), (2 * gpt.FFN, gpt.HIDDEN + 1))
        assert_names(told["no layout"], "decoder.layers.0.probe.weight", "Linear")
        assert_names(told["no gradient"], FC1)
        assert_names(told["set unknown"], "SiteError", "'decoder.layers.1.norm'")
        assert_names(told["set shape"], f"({gpt.HIDDEN},)")
        assert "torch.float64" in told["set dtype"]
        for case in ("set differing", "set nothing", "set by one"):
            assert_names(told[case], NORM)
        assert_names(told["optimizer"], "SGD", "reload_model_params()")
        assert_names(told["without layout"], "decoder.layers.0.probe.bias", "Linear")
        assert told["listed"] == "False"


def set_in_a_loop(everywhere: bool) -> tuple[int, list[str], bool]:
    """How many parameters the loop had, what was refused in it, and whether a parameter is read after it."""
    import megatron_flex as mf

    chunks = ranks.start(Case("tp2", tp=2, layers=1))
    with mf.FlexModel(chunks) as flex:
        count, refused = 0, []
        for name, full in flex.named_full_parameters(everywhere=everywhere):
            count += 1
            try:
                flex.set_module_parameter(name, full)
            except mf.HookError as error:
                refused.append(str(error))
        read = flex.get_module_parameter("output_layer.weight", everywhere=True)
    return count, refused, read is not None


def test_a_loop_that_is_empty_elsewhere_sets_nothing_and_hangs_nobody() -> None:
    (count, refused, read), other = run(2, set_in_a_loop, False)
    assert len(refused) == count > 5
    assert_names(refused[0], "embedding.word_embeddings.weight", "everywhere=True")
    assert read
    assert other == (0, [], True)
    everywhere = run(2, set_in_a_loop, True)
    assert everywhere == [(count, [], True)] * 2


def lies(case: Case, settings: dict[str, Any], finalize: bool) -> dict[str, str]:
    """What is said when somebody says the wrong thing of gradients."""
    import megatron_flex as mf

    bare = ranks.start(case)
    chunks = wrapped.ddp(bare, finalize, **settings)
    flex = mf.FlexModel(chunks)
    gpt.step(case, chunks, flex.session.mesh["dp"].coord)

    def ask(reduced: bool | None, model: Any = flex) -> str:
        return said(lambda: list(model.named_full_parameters(gradients=True, reduced=reduced)))

    out = {"nothing": ask(None), "reduced": ask(True), "unreduced": ask(False)}
    flex.restore()
    with mf.FlexModel(bare) as unwrapped:
        out["bare"] = ask(True, unwrapped)
    if not finalize:
        return out
    with mf.FlexModel(chunks) as called:
        chunks[0].zero_grad_buffer()
        ranks.call(chunks).mean().backward()
        out["called"] = ask(None, called)
    return out


def test_a_gradient_is_never_given_for_what_it_is_not() -> None:
    for told in run(4, lies, SP_DP, {}, False):
        assert_names(told["nothing"], "finalize_model_grads_func")
        assert_names(told["reduced"], "tp, dp", "finalize_model_grads()", "reduced=False")
        assert told["unreduced"] == ""
        assert_names(told["bare"], "DistributedDataParallel", "FlexModel")
    for told in run(4, lies, SP_DP, {"overlap_grad_reduce": True}, True):
        assert told["nothing"] == told["reduced"] == ""
        assert_names(told["unreduced"], "reduced=False")
        assert_names(told["called"], "reduced=True", "reduced=False")
    for told in run(4, lies, SP_DP, {"overlap_grad_reduce": True}, False):
        assert_names(told["unreduced"], "overlap_grad_reduce=True")


# -- the optimizer's own copies ----------------------------------------------------------------------


def trained(case: Case, low: bool, settings: dict[str, Any], tell: bool) -> list[float]:
    """How far a weight is from what it was set to, before and after a step with a learning rate of 0."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    if low:
        chunks = [c.bfloat16() for c in chunks]
    chunks = wrapped.ddp(chunks, **settings)
    distributed = bool(settings.get("use_distributed_optimizer"))
    overlap = bool(settings.get("overlap_param_gather"))
    kind = {"bf16": low, "use_distributed_optimizer": distributed, "overlap_param_gather": overlap}
    kind["params_dtype"] = torch.bfloat16 if low else torch.float32
    optimizer = wrapped.optimizer(chunks, lr=0.0, **kind)

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        gpt.step(case, chunks, flex.session.mesh["dp"].coord)
        assert optimizer.step()[0]

    with mf.FlexModel(chunks) as flex:
        step()
        value = flex.get_module_parameter(FC1, everywhere=True) * 2
        flex.set_module_parameter(FC1, value, optimizer=optimizer if tell else None)
        out = []
        for _ in range(3):
            got = flex.get_module_parameter(FC1, everywhere=True)
            out.append(float((got - value).abs().max() / value.abs().max()))
            step()
    return out


OPTIMIZERS = [
    pytest.param(True, {}, id="bf16"),
    pytest.param(True, DISTRIBUTED, id="bf16, distributed"),
    pytest.param(
        True,
        DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True},
        id="bf16, distributed, overlapped",
    ),
]


@pytest.mark.versions
@pytest.mark.parametrize(("low", "settings"), OPTIMIZERS)
def test_a_weight_that_was_set_survives_the_next_step(low: bool, settings: dict[str, Any]) -> None:
    case = Case("tp2 dp2", tp=2, dp=2, layers=2, extra={"bf16": low, "params_dtype": torch.bfloat16})
    for answer in run(4, trained, case, low, settings, True):
        assert answer == [0.0, 0.0, 0.0]
    for answer in run(4, trained, case, low, settings, False):
        assert answer == [0.0, 0.5, 0.5], "the optimizer wrote its own copy back"


def test_a_distributed_optimizer_of_full_precision_has_no_copies() -> None:
    case = Case("tp2 dp2", tp=2, dp=2, layers=2)
    for tell in (True, False):
        for answer in run(4, trained, case, False, DISTRIBUTED, tell):
            assert answer == [0.0, 0.0, 0.0]


# -- parameters that some ranks of a stage own -------------------------------------------------------


def owned(case: Case) -> list[Any]:
    """Two weights beside the model's, each on the ranks of one expert parallel coordinate."""
    import megatron_flex as mf
    from megatron_flex.adapters import ParameterSite
    from megatron_flex.adapters.megatron_core import MegatronAdapter
    from megatron_flex.layout import Cut, Dim, Layout, extract

    chunks = ranks.start(case)
    layout = Layout((Dim("out", (Cut("etp"),)), Dim("in")))
    upstream = MegatronAdapter.parameters

    def parameters(self: MegatronAdapter) -> list[ParameterSite]:
        out, mesh = upstream(self), self.mesh
        for number, whole in enumerate(EXPERTS):
            shard = extract(layout, whole, mesh.coords, mesh.sizes)
            mine = torch.nn.Parameter(shard) if mesh["ep"].coord == number else None
            stage, name = mesh["pp"].coord, f"decoder.layers.{mesh['pp'].coord}.expert{number}"
            out.append(
                ParameterSite(
                    name,
                    layout,
                    (8, 4),
                    mine,
                    stage,
                    owner=(("ep", number),),
                    local=tuple(mine.shape) if mine is not None else (),
                )
            )
        return out

    changes.setattr(MegatronAdapter, "parameters", parameters)
    flex = mf.FlexModel(chunks)
    names = [f"decoder.layers.{stage}.expert{number}" for stage in range(case.pp) for number in (0, 1)]
    first = [flex.get_module_parameter(n, (8, 4)) for n in names]
    everywhere = [flex.get_module_parameter(n, everywhere=True) for n in names]
    for number, name in enumerate(names):
        flex.set_module_parameter(name, EXPERTS[0] + number if torch.distributed.get_rank() == 0 else None)
    after = [flex.get_module_parameter(n, everywhere=True) for n in names]
    unreduced = said(lambda: flex.get_module_parameter(names[0], gradient=True))
    return [flex.is_leader, first, everywhere, after, unreduced]


MOE = {"num_moe_experts": 2}
EXPERTS = [torch.arange(32.0).reshape(8, 4), -torch.arange(32.0).reshape(8, 4)]


@pytest.mark.parametrize(
    "case",
    [
        Case("ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, layers=2, extra=MOE),
        Case("ep2 over tp", tp=2, sp=True, dp=2, ep=2, layers=2, extra=MOE),
        Case("ep2 pp2", pp=2, dp=2, ep=2, layers=2, extra=MOE),
    ],
    ids=lambda c: c.name,
)
def test_a_parameter_that_some_ranks_own(case: Case) -> None:
    for leader, first, everywhere, after, unreduced in run(4, owned, case):
        for number in range(2 * case.pp):
            true = EXPERTS[number % 2]
            assert torch.equal(first[number], true) if leader else first[number] is None
            assert torch.equal(everywhere[number], true)
            assert torch.equal(after[number], EXPERTS[0] + number)
        assert_names(unreduced, "reduced=True")
