"""Modules of no framework: what hooks see and do there equals what torch's own hooks do on one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed import matrix
from tests.distributed.matrix import Cell, greatest, relative
from tests.support import handmade
from tests.support.handmade import IN, OUT, SAMPLES, TOKENS, WIDE
from tests.support.messages import assert_names
from tests.support.oracle import edit as mix
from tests.support.pool import run

PLACES = {  # the whole's shape, and whether it is cut
    "norm:output": ((None, None, IN), False),
    "up:input": (None, False),
    "up:output": ((None, None, WIDE), True),
    "act:output": ((TOKENS, SAMPLES, WIDE), True),
    "down:input": ((None, None, WIDE), True),
    "down:output": (None, False),
    "root:output": ((TOKENS, SAMPLES, OUT), False),
}
PARAMETERS = {
    "norm.weight": None,
    "norm.bias": None,
    "up.weight": (WIDE, IN),
    "up.bias": (WIDE,),
    "down.weight": (None, WIDE),
    "down.bias": (OUT,),
}


def mixed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return mix(inputs)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).sum()


# -- one process, by torch's own hooks -----------------------------------------------------------------


def truth(replica: int) -> dict[str, Any]:
    """Values, gradients and the effects of edits, with nothing of the library."""
    x = handmade.batch(replica).requires_grad_()
    out: dict[str, Any] = {"values": {}, "gradients": {}, "edited": {}, "turned": {}}
    for name in PLACES:
        model, seen = handmade.single(), {}
        _install(model, name, lambda t, s=seen: _keep(t, s))
        losses(model, x).backward()
        out["values"][name], out["gradients"][name] = seen["value"], seen["gradient"]
        model = handmade.single()
        _install(model, name, mix)
        out["edited"][name] = _effect(model, x)
        model = handmade.single()
        _install(model, name, _turn)
        out["turned"][name] = _effect(model, x)
    model = handmade.single()
    losses(model, x).backward()
    out["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    out["parameter gradients"] = {n: p.grad for n, p in model.named_parameters()}
    return out


def _install(model: nn.Module, name: str, visit: Any) -> None:
    path, _, point = name.partition(":")
    module = model if path == "root" else model.get_submodule(path)
    if point == "output":
        module.register_forward_hook(lambda m, a, out: visit(out))
    else:
        module.register_forward_pre_hook(lambda m, args: (visit(args[0]),))


def _keep(tensor: Tensor, seen: dict[str, Tensor]) -> Tensor:
    seen["value"] = tensor.detach().clone()
    tensor = tensor.clone()
    tensor.register_hook(lambda g: seen.update(gradient=g.clone()))
    return tensor


def _turn(tensor: Tensor) -> Tensor:
    """Edit the gradient."""
    tensor = tensor.clone()
    tensor.register_hook(mix)
    return tensor


def _effect(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = losses(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


# -- the same, cut over ranks --------------------------------------------------------------------------


def hooks_on(name: str, edit: Any = None, backward: bool = False) -> mf.HookFunction:
    kinds = ("full_backward", "full_backward_pre") if backward else ("forward_pre", "forward")
    kind = kinds[name.endswith("output")]
    return mf.HookFunction(name, edit, expected_shape=PLACES[name][0], hook_type=kind, save=edit is None)


def cut(tp: int) -> dict[str, Any]:
    model = handmade.parallel(tp)
    replica = dist.get_rank() // tp
    x = handmade.batch(replica).requires_grad_()
    flex = mf.FlexModel(model, tensor_parallel_size=tp)
    out: dict[str, Any] = {"replica": replica, "leader": flex.is_leader, "edited": {}, "turned": {}}
    for name in PLACES:
        flex.register_forward_hook(hook) if (hook := hooks_on(name)).hook_type == "forward" else (
            flex.register_forward_pre_hook(hook)
        )
        flex.session.hooks.add(hooks_on(name, backward=True))
    for name, shape in PARAMETERS.items():
        flex.register_hook(mf.HookFunction(name, expected_shape=shape))
    losses(flex, x).backward()
    out["read"] = {n: r[0] for n, r in flex.output_dict.items()}
    out["parameters"] = {n: flex.get_module_parameter(n, s) for n, s in PARAMETERS.items()}
    out["set"] = _set(flex)
    flex.restore()
    for name in PLACES:
        for kind, backward in (("edited", False), ("turned", True)):
            model.zero_grad()
            with mf.FlexModel(model, tensor_parallel_size=tp) as flex:
                flex.session.hooks.add(hooks_on(name, mixed, backward))
                loss = losses(flex, x)
                loss.backward()
                grads = [
                    flex.get_module_parameter(n, s, gradient=True, everywhere=True)
                    for n, s in PARAMETERS.items()
                ]
            out[kind][name] = [loss.detach(), *grads]
    return out


def _set(flex: Any) -> Tensor:
    value = torch.arange(WIDE * IN, dtype=torch.float32).reshape(WIDE, IN)
    before = flex.get_module_parameter("up.weight", (WIDE, IN), everywhere=True)
    flex.set_module_parameter("up.weight", value if flex.is_leader else None)
    after = flex.get_module_parameter("up.weight", (WIDE, IN), everywhere=True)
    flex.set_module_parameter("up.weight", before)
    assert torch.equal(after, value)
    return after


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_tensors_cut_by_hand_equal_those_of_one_process(world: int, tp: int, cells: list[Any]) -> None:
    answers = run(world, cut, tp)
    wanted = [truth(a["replica"]) for a in answers]
    assert [a["leader"] for a in answers] == [r % tp == 0 for r in range(world)]
    for answer, want in zip(answers, wanted, strict=True):
        if not answer["leader"]:
            assert answer["read"] == {}
            continue
        got = answer["read"]
        assert len(got) == 2 * len(PLACES) + len(PARAMETERS)
        for name in PLACES:
            torch.testing.assert_close(got[name], want["values"][name], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[f"{name}.grad"], want["gradients"][name], rtol=1e-5, atol=1e-5)
        for name in PARAMETERS:
            gradient = want["parameter gradients"][name]
            assert torch.equal(answer["parameters"][name], want["parameters"][name])
            torch.testing.assert_close(got[f"{name}.grad"], gradient, rtol=1e-5, atol=1e-5)
    for answer, want in zip(answers, wanted, strict=True):
        for kind in ("edited", "turned"):
            for name in PLACES:
                torch.testing.assert_close(answer[kind][name], want[kind][name], rtol=1e-5, atol=2e-5)
    case = f"tp{tp}" + (f" dp{world // tp}" if world > tp else "")
    both = list(zip(answers, wanted, strict=True))
    matrix.judge([*readings(case, [b for b in both if b[0]["leader"]]), *effects(case, both)], cells)


Both = list[tuple[dict[str, Any], dict[str, Any]]]  # of ranks what they say, and what is true


def readings(case: str, both: Both) -> list[Cell]:
    found = []
    for names, check, kind in (
        (PLACES, "value", "values"),
        (PLACES, "gradient", "gradients"),
        (PARAMETERS, "gradient", "parameter gradients"),
    ):
        for name in names:
            key = name if check == "value" else f"{name}.grad"
            found.append(cell(case, name, check, ((a["read"][key], w[kind][name]) for a, w in both)))
    return found


def effects(case: str, both: Both) -> list[Cell]:
    found = []
    for name in PLACES:
        for kind, site in (("edited", name), ("turned", f"{name}.grad")):
            pairs = [list(zip(a[kind][name], w[kind][name], strict=True)) for a, w in both]
            if kind == "edited":  # an edit of a gradient leaves the loss as it is
                found.append(cell(case, site, "edited loss", (p[0] for p in pairs)))
            rest = (one for p in pairs for one in p[1:])
            found.append(cell(case, site, "edited parameter gradients", rest))
    return found


def cell(case: str, site: str, check: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> Cell:
    """The greatest error of pairs of what was got and what is true."""
    error = greatest(relative(got.detach(), want.detach()) for got, want in pairs)
    return Cell(case, site, check, error, model="Plain modules")


# -- what goes wrong -----------------------------------------------------------------------------------


def told(act: Any) -> str:
    try:
        act()
    except mf.FlexError as error:
        return str(error)
    return ""


def wrong() -> dict[str, str]:
    model, x = handmade.parallel(2), handmade.batch(0)
    out: dict[str, str] = {}

    def say(what: str, act: Any, hook: mf.HookFunction) -> None:
        flex = mf.attach(model, [hook], tensor_parallel_size=2)
        out[what] = told(lambda: act(flex))
        flex.session.close()

    def step(flex: Any) -> None:
        losses(flex, x).backward()

    say("ratio", step, mf.HookFunction("up", expected_shape=(None, None, 24)))
    say("dims", step, mf.HookFunction("up", mixed, expected_shape=(None, WIDE)))
    say(
        "two dims",
        step,
        mf.HookFunction("up", expected_shape=(None, 2 * SAMPLES, WIDE), hook_type="full_backward_pre"),
    )
    say("leaf", step, mf.HookFunction("up", unpack_idx=1))
    say("parameter", step, mf.HookFunction("up.weight", expected_shape=(WIDE, 5), hook_type="tensor"))
    flex = mf.FlexModel(model, tensor_parallel_size=2)
    out["get"] = told(lambda: flex.get_module_parameter("up.weight", (WIDE + 1, IN)))
    out["set"] = told(lambda: flex.set_module_parameter("up.weight", torch.ones(3, IN)))
    losses(flex, x)
    out["sizes"] = told(lambda: mf.FlexModel(model, tensor_parallel_size=3))
    return out


def test_shapes_that_do_not_fit_are_told_on_all_ranks() -> None:
    first, second = run(2, wrong)
    words = {
        "ratio": ["(3, 4, 8)", "(None, None, 24)", "dim 2", "a 2th", "up:output", "on ranks 0-1"],
        "dims": ["(3, 4, 8)", "(None, 16)", "which has 2 dims"],
        "two dims": ["cut one dim, not 2"],
        "leaf": ["unpack_idx=1 is out of range: the hook point has 1 tensor"],
        "parameter": ["(8, 6)", "(16, 5)"],
        "get": ["up.weight", "(8, 6)", "(17, 6)"],
        "set": ["up.weight", "(8, 6)", "(3, 6)"],
        "sizes": ["tensor_parallel_size=3", "make 3 ranks, but there are 2"],
    }
    assert first == second
    for name, expected in words.items():
        for word in expected:
            assert word in first[name], (name, first[name])


class Uneven(nn.Module):
    """What one rank holds whole, the other holds a half of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if dist.get_rank() == 0 else x[:, :2] * 2


def uneven(edit: bool) -> str:
    flex = mf.FlexModel(nn.Sequential(Uneven(), nn.Tanh()), tensor_parallel_size=2)
    flex.register_forward_hook(mf.HookFunction("0", mixed if edit else None, expected_shape=(3, 4)))
    said = told(lambda: flex(torch.ones(3, 4)))
    flex.session.close()
    return said


@pytest.mark.parametrize("edit", [False, True])
def test_ranks_that_infer_different_layouts_do_not_wait_for_each_other(edit: bool) -> None:
    for said in run(2, uneven, edit, timeout=60):
        assert_names(said, "expected_shape")


# -- groups and meshes ---------------------------------------------------------------------------------


def wrapped_often() -> tuple[int, int, int]:
    counts = [len(dist.distributed_c10d._world.pg_names)]
    for count in (1, 20):
        for _ in range(count):
            model = nn.Linear(4, 4)
            with mf.FlexModel(model, tensor_parallel_size=2) as flex:
                flex.register_forward_hook(mf.HookFunction("root"))
                flex(torch.ones(2, 4))
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return tuple(counts)


def test_wrapping_often_makes_groups_once() -> None:
    for before, once, often in run(4, wrapped_often, alone=True):
        assert (once - before, often) == (2, once)


def part_of_the_job() -> tuple[str, list[Any]]:
    """Ranks 1 to 3 of 4; one more group on some ranks makes torch's names for groups differ."""
    group, rank = dist.new_group([1, 2, 3]), dist.get_rank()
    if rank == 0:
        said = told(
            lambda: mf.FlexModel(nn.Linear(2, 2), process_group=dist.group.WORLD, data_parallel_size=3)
        )
        return said, []
    model = nn.Linear(4, 4)
    flex = mf.FlexModel(model, tensor_parallel_size=3, process_group=group)
    flex.register_forward_hook(mf.HookFunction("root", expected_shape=(None, 12)))
    flex(torch.full((2, 4), float(rank)))
    leader = flex.is_leader
    shapes = [tuple(t.shape) for t in flex.output_dict.values() for t in t]
    flex.restore()
    return flex.session.mesh.describe(), [leader, shapes]


def test_a_process_group_is_the_ranks_that_count() -> None:
    answers = run(4, part_of_the_job)
    assert_names(answers[0][0], 3, 4)
    assert answers[1] == ("tp=3", [True, [(2, 12)]])
    assert answers[2] == answers[3] == ("tp=3", [False, []])


def split_part() -> tuple[Any, ...]:
    group = dist.new_group([0, 1, 2, 3])
    if dist.get_rank() == 4:
        return ()
    flex = mf.FlexModel(nn.Linear(2, 2), tensor_parallel_size=2, process_group=group)
    mesh = flex.session.mesh
    return tuple((a.name, a.coord, a.ranks) for a in mesh)


@pytest.mark.versions
def test_a_process_group_divided_twice() -> None:
    answers = run(5, split_part)
    for rank, answer in enumerate(answers[:4]):
        first, other = rank - rank % 2, rank % 2
        dp, tp = ("dp", rank // 2, (other, other + 2)), ("tp", other, (first, first + 1))
        assert answer == (("pp", 0, (rank,)), dp, tp)


def replicas() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    replica = dist.get_rank()
    x = handmade.batch(replica)
    model = handmade.single()
    wrapped = DistributedDataParallel(model)
    flex = mf.FlexModel(wrapped)
    flex.register_forward_hook(mf.HookFunction("up", mixed))
    flex.register_full_backward_pre_hook(mf.HookFunction("up"))
    losses(flex, x).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    read = {n: r[0] for n, r in flex.output_dict.items()}
    names = [n for n, _ in flex.named_full_parameters(gradients=True)]
    gradient = flex.get_module_parameter("up.weight", gradient=True, reduced=True, everywhere=True)
    flex.verify()
    flex(x)
    flex.restore()
    return flex.is_leader, grads, read, names, gradient


def test_wrapped_in_distributed_data_parallel(cells: list[Any]) -> None:
    answers = run(2, replicas)
    want = [truth(r)["edited"]["up:output"][1:] for r in (0, 1)]
    mean = [(a + b) / 2 for a, b in zip(*want, strict=True)]
    for replica, (leader, grads, read, names, gradient) in enumerate(answers):
        assert leader, "each replica has its own"
        torch.testing.assert_close(grads, mean, rtol=1e-5, atol=1e-5)
        value = truth(replica)["values"]["up:output"]
        torch.testing.assert_close(read["up:output"], value)
        assert set(read) == {"up:output", "up:output.grad"}
        assert names == [n for n, _ in handmade.single().named_parameters()]
        torch.testing.assert_close(gradient, grads[2])
    case, site = "dp2, DistributedDataParallel", "up:output"
    values = ((a[2][site], truth(r)["values"][site]) for r, a in enumerate(answers))
    effect = (pair for a in answers for pair in zip(a[1], mean, strict=True))
    matrix.judge(
        [cell(case, site, "value", values), cell(case, site, "edited parameter gradients", effect)], cells
    )


# -- stages --------------------------------------------------------------------------------------------


def stages() -> Any:
    """A pipeline by hand: the second stage computes on what the first one sends, gradients go back."""
    whole, stage = handmade.single(), dist.get_rank()
    same = told(lambda: mf.FlexModel(nn.Sequential(nn.Linear(2, 2)), pipeline_parallel_size=2))
    parts = nn.ModuleDict({"norm": whole.norm, "up": whole.up} if stage == 0 else {"down": whole.down})

    def forward(x: Tensor) -> Tensor:
        return whole.up(whole.norm(x)) if stage == 0 else whole.down(x.relu())

    parts.forward = forward
    flex = mf.FlexModel(parts, pipeline_parallel_size=2)
    flex.register_forward_hook(mf.HookFunction("up", mixed))
    flex.register_full_backward_pre_hook(mf.HookFunction("down"))
    flex.register_forward_hook(mf.HookFunction("stage*"))
    with flex.step():
        for number in (0, 1):
            if stage == 0:
                out = flex(handmade.batch(number))
                dist.send(out.detach(), 1)
                grad = torch.empty_like(out)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                x = torch.empty(TOKENS, SAMPLES, WIDE)
                dist.recv(x, 0)
                x.requires_grad_()
                flex(x).square().sum().backward()
                dist.send(x.grad, 0)
    read = {n: list(r) for n, r in flex.output_dict.items()}
    weight = flex.get_module_parameter("down.weight", everywhere=True)
    grads = [p.grad for _, p in parts.named_parameters()]
    flex.restore()
    return same, read, weight, grads


@pytest.mark.versions
def test_stages_of_a_pipeline_written_by_hand(cells: list[Any]) -> None:
    (same, read, weight, first), (other, none, again, last) = run(2, stages)
    assert same == other
    assert_names(same, 0, 1)
    assert none == {}
    whole = handmade.single()
    outs = []
    for number in (0, 1):
        up = whole.up(whole.norm(handmade.batch(number)))
        out = whole.down(mix(up).relu())
        out.retain_grad()
        out.square().sum().backward()
        outs.append((up.detach(), out.detach(), out.grad))
    assert torch.equal(weight, whole.down.weight)
    assert torch.equal(again, weight)
    torch.testing.assert_close([*first, *last], [p.grad for p in whole.parameters()], rtol=1e-5, atol=1e-5)
    assert set(read) == {"up:output", "down:output.grad", "stage0:output", "stage1:output"}
    for number, (up, out, grad) in enumerate(outs):
        torch.testing.assert_close(read["up:output"][number], up)
        torch.testing.assert_close(read["stage1:output"][number], out)
        torch.testing.assert_close(read["down:output.grad"][number], grad)
    places = (("up:output", "value", 0), ("stage1:output", "value", 1), ("down:output", "gradient", 2))
    parameters = zip([*first, *last], (p.grad for p in whole.parameters()), strict=True)
    found = [cell("pp2 by hand", "up:output", "edited parameter gradients", parameters)]
    for site, check, which in places:
        got = read[site if check == "value" else f"{site}.grad"]
        found.append(cell("pp2 by hand", site, check, zip(got, (o[which] for o in outs), strict=True)))
    matrix.judge(found, cells)
