"""The mathematics of presets on plain tensors, what they say of themselves, and what they refuse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import edits
from megatron_flex.layout import replicated
from megatron_flex.sites import Site
from tests.support.messages import raises

SITE = "decoder.layers.0:mid"
STREAM, HEADS, SCORES = "s b h", "s b n d", "b n s s"
VECTOR = torch.linspace(-1, 1, 6)
MODULES = nn.ModuleDict({"adapter": edits.LowRank(6, 2)})


def site(dims: str, shape: tuple[Any, ...] = ()) -> Site:
    names = tuple(dims.split())
    return Site(SITE, replicated(*names), shape or names)


def tensor(*shape: int, seed: int = 0, **kwargs: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, **kwargs)


def apply(edit: Any, x: Tensor, dims: str = STREAM, module: Any = None) -> Tensor:
    torch.manual_seed(0)
    return edit.for_site(site(dims))(module, x, None, MODULES)


class Configured(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_attention_heads": count})


def test_scale_and_its_parts() -> None:
    x = tensor(5, 2, 6)
    assert torch.equal(apply(edits.scale(3.0), x), x * 3)
    for positions in (-1, 4, [4], (-1,), slice(-1, None)):
        out = apply(edits.scale(3.0, positions=positions), x)
        assert torch.equal(out[-1], x[-1] * 3)
        assert torch.equal(out[:-1], x[:-1])
    out = apply(edits.scale(3.0, positions=slice(0, 4, 2), samples=1, features=[0, -1]), x)
    want = x.clone()
    for s in (0, 2):
        for f in (0, 5):
            want[s, 1, f] *= 3
    assert torch.equal(out, want)
    out = apply(edits.scale(3.0, positions=0), x.transpose(0, 1).contiguous(), "b s h")
    assert torch.equal(out[:, 0], x[0] * 3), "the site tells which dim is the sequence"


def test_zero_clamp_steer() -> None:
    x = tensor(5, 2, 6)
    assert not apply(edits.zero(), x).any()
    assert torch.equal(apply(edits.clamp(-0.5, 0.5), x), x.clamp(-0.5, 0.5))
    assert torch.equal(apply(edits.clamp(high=0.0), x), x.clamp(max=0.0))
    assert torch.allclose(apply(edits.steer(VECTOR, 4.0), x), x + 4 * VECTOR.double())
    out = apply(edits.steer(VECTOR, positions=[1, -1]), x)
    assert torch.equal(out[[0, 2, 3]], x[[0, 2, 3]])
    assert torch.allclose(out[[1, 4]], x[[1, 4]] + VECTOR.double())


def test_noise_comes_from_torchs_stream() -> None:
    x = tensor(50, 40, 6)
    first, again = apply(edits.noise(0.5), x), apply(edits.noise(0.5), x)
    assert torch.equal(first, again)
    assert abs(float((first - x).std()) - 0.5) < 0.02


@pytest.mark.parametrize("keep", [False, True])
def test_heads_wherever_they_are(keep: bool) -> None:
    chosen, others = ([1, 2], [0, 3]) if keep else ([0, 3], [1, 2])
    q, scores, packed = tensor(5, 2, 4, 3), tensor(2, 4, 5, 5), tensor(5, 2, 12)
    edit = edits.ablate_heads([0, -1], keep=keep)
    for x, dims, take in ((q, HEADS, lambda t, i: t[:, :, i]), (scores, SCORES, lambda t, i: t[:, i])):
        out = apply(edit, x, dims)
        assert not take(out, chosen).any()
        assert torch.equal(take(out, others), take(x, others))
    out = apply(edit, packed, "s b nd", Configured(4))
    assert torch.equal(out.view(5, 2, 4, 3), apply(edit, packed.view(5, 2, 4, 3), HEADS))
    assert torch.equal(apply(edits.ablate_heads([0, -1], keep, of=4), packed, "s b nd"), out)
    bare = edits.ablate_heads([0, -1], keep, dims=HEADS)(None, q, None, None)  # without a site
    assert torch.equal(bare, apply(edit, q, HEADS))
    half = apply(edits.scale(0.5, heads=1), q, HEADS)
    assert torch.equal(half[:, :, 1], q[:, :, 1] * 0.5)
    assert torch.equal(half[:, :, [0, 2, 3]], q[:, :, [0, 2, 3]])


def test_neurons() -> None:
    x = tensor(5, 2, 6)
    out, kept = (
        apply(edits.ablate_neurons([0, -1]), x),
        apply(edits.ablate_neurons(slice(0, 2), keep=True), x),
    )
    assert not out[..., [0, 5]].any()
    assert torch.equal(out[..., 1:5], x[..., 1:5])
    assert not kept[..., 2:].any()
    assert torch.equal(kept[..., :2], x[..., :2])


def test_mean(tmp_path: Path) -> None:
    x = tensor(5, 2, 6)
    assert torch.allclose(apply(edits.mean(), x), x.mean((0, 1)).expand_as(x))
    assert torch.allclose(apply(edits.mean("s"), x), x.mean(0, keepdim=True).expand_as(x))
    torch.save(VECTOR, tmp_path / "mean.pt")
    for given_mean in (VECTOR, tmp_path / "mean.pt"):
        out = apply(edits.mean(value=given_mean, positions=0), x)
        assert torch.allclose(out[0], VECTOR.double().expand(2, 6))
        assert torch.equal(out[1:], x[1:])


def test_resample_and_swap() -> None:
    x = tensor(5, 4, 6)
    for over, dim in (("b", 1), ("s", 0), ("h", 2)):
        out = apply(edits.resample(over), x)
        given_rows, rows = out.unbind(dim), x.unbind(dim)
        source = [next(j for j, r in enumerate(rows) if torch.equal(r, g)) for g in given_rows]
        assert sorted(source) == list(range(x.shape[dim]))
        assert all(i != j for i, j in enumerate(source)), "no one keeps its own"
    out = apply(edits.swap(0, -1), x)
    assert torch.equal(out, x[:, [3, 1, 2, 0]])


def test_projections() -> None:
    x = tensor(5, 2, 6)
    unit = VECTOR.double() / VECTOR.double().norm()
    part = (x @ unit)[..., None] * unit
    assert torch.allclose(apply(edits.project_out(VECTOR), x), x - part, atol=1e-6)
    assert torch.allclose(apply(edits.project(VECTOR * 7), x), part, atol=1e-6)
    two = torch.stack([VECTOR, VECTOR**2 + 1]).double()
    out = apply(edits.project_out(two), x)
    assert float((out @ two.T).abs().max()) < 1e-12
    assert torch.allclose(apply(edits.project(two), x) + out, x)


def test_files_of_safetensors(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    x, path = tensor(5, 2, 6), tmp_path / "vectors.safetensors"
    files.save_file({"one": VECTOR, "two": VECTOR * 2}, path)
    assert torch.allclose(apply(edits.steer(f"{path}#two"), x), x + 2 * VECTOR.double())
    with raises(mf.HookError, path, 2, f"{path}#name"):
        edits.steer(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(mf.HookError, tmp_path / "absent.pt"):
        edits.steer(tmp_path / "absent.pt")
    with raises(mf.HookError, "vector.npy", ".safetensors", ".pt"):
        edits.steer("vector.npy")
    (tmp_path / "v.safetensors").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with raises(mf.HookError, tmp_path / "v.safetensors", "pip install safetensors"):
        edits.steer(tmp_path / "v.safetensors")


def test_modules() -> None:
    x = tensor(5, 2, 6).float()
    adapter = MODULES["adapter"]
    assert torch.equal(apply(edits.low_rank("adapter"), x), x), "at first nothing changes"
    nn.init.normal_(adapter.up.weight)
    want = x + x @ adapter.down.weight.T @ adapter.up.weight.T
    assert torch.allclose(apply(edits.low_rank("adapter"), x), want)
    given_x = x.clone().requires_grad_()
    kept = apply(edits.splice("adapter", keep_error=True), given_x)
    assert torch.allclose(kept, x)
    (through,) = torch.autograd.grad(kept.sum(), given_x)
    (alone,) = torch.autograd.grad(adapter(given_x).sum(), given_x)
    assert torch.allclose(through, alone)
    with raises(mf.HookError, "low_rank('adaptor')", "adapter"):
        apply(edits.low_rank("adaptor"), x)


CONTINUOUS = [
    edits.scale(1.5, positions=[0, -1]),
    edits.zero(features=0),
    edits.clamp(-0.3, 0.4),
    edits.noise(0.1),
    edits.steer(VECTOR, 2.0, samples=0),
    edits.mean(),
    edits.mean("s", positions=0),
    edits.ablate_neurons([1, 2]),
    edits.project_out(VECTOR),
    edits.project(VECTOR, positions=slice(1, None)),
    edits.resample("s"),
    edits.swap(0, 1),
    edits.patch(VECTOR, positions=-1),
    edits.scale(2.0) | edits.mean("b") | edits.clamp(-1.0, 1.0),
]


@pytest.mark.parametrize("edit", CONTINUOUS, ids=repr)
def test_gradients(edit: Any) -> None:
    assert torch.autograd.gradcheck(partial(apply, edit), tensor(3, 2, 6, seed=5).requires_grad_())


def test_a_vector_may_be_trained() -> None:
    vector = nn.Parameter(VECTOR.clone())
    apply(edits.steer(vector, 3.0), tensor(5, 2, 6)).sum().backward()
    assert torch.allclose(vector.grad, torch.full((6,), 30.0))


ALL = [
    *CONTINUOUS,
    edits.scale(2.0),
    edits.zero(),
    edits.steer(torch.ones(1)),
    edits.steer(VECTOR),
    edits.mean(value=VECTOR),
    edits.ablate_heads([0], of=2),
    edits.resample(),
    edits.low_rank("adapter"),
    edits.scale(2.0) | edits.steer(VECTOR),
    edits.zero(heads=0, dims="s b nd"),
]


@pytest.mark.parametrize("edit", ALL, ids=repr)
def test_what_a_preset_declares_holds(edit: Any) -> None:
    dims, module = ("s b nd" if "heads" in repr(edit) else STREAM), Configured(2)
    x, y = (tensor(3, 4, 6, seed=seed).to(torch.float32) for seed in (0, 1))
    traits = edit.for_site(site(dims)).edit_traits
    run = partial(apply, edit, dims=dims, module=module)
    mixed = run(2 * x - 3 * y)
    assert torch.allclose(mixed, 2 * run(x) - 3 * run(y), atol=1e-4) or not traits.linear
    torch.manual_seed(1)
    again = edit.for_site(site(dims))(module, 2 * x - 3 * y, None, MODULES)
    assert torch.equal(mixed, again) or traits.uses_random_numbers
    if traits.returns_new_tensor:
        kept = x.clone()
        assert run(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert torch.equal(x, kept)


def test_what_a_chain_declares() -> None:
    together = (edits.scale(2.0) | edits.zero(positions=0)).edit_traits
    assert (together.linear, together.returns_new_tensor, together.needs_dim_names) == (True, True, True)
    assert (together.sums, together.changes_by_pass, together.uses_random_numbers) == (False, False, False)
    one = (edits.scale(2.0) | edits.mean("s") | edits.noise(0.1) | edits.patch([VECTOR])).edit_traits
    assert (one.sums, one.changes_by_pass, one.uses_random_numbers) == (True, True, True)
    plain = (edits.scale(2.0) | (lambda m, x, c, t: x)).edit_traits
    assert (plain.linear, plain.returns_new_tensor, plain.uses_random_numbers) == (False, False, True)


def test_a_preset_of_ones_own_declares_its_edit() -> None:
    with raises(mf.HookError, "undeclared", "declare", "unsharded_dims"):

        class undeclared(edits.scale):
            def edit(self, inputs: Tensor, module: Any, modules: Any) -> Tensor:
                return inputs.softmax(-1)

    class silent(edits.Edit):
        def declare(self) -> edits.EditTraits:
            return edits.EditTraits(linear=True)

        def edit(self, inputs: Tensor, module: Any, modules: Any) -> Tensor:
            return inputs

    with raises(mf.HookError, "silent", "unsharded_dims"):
        mf.HookFunction("x", editing_function=silent())
    assert edits.EditTraits(unsharded_dims="b h").unsharded_dims == {"b", "h"}
    with raises(mf.HookError, "unsharded_dims=[3]"):
        edits.EditTraits(unsharded_dims=[3])  # type: ignore[list-item]

    def wrong(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs

    wrong.edit_traits = {"linear": True}  # type: ignore[attr-defined]
    with raises(mf.HookError, "wrong", "dict", "edits.EditTraits"):
        mf.HookFunction("x", editing_function=wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("scale=2", "scale(2.0)"),
        ("zero", "zero()"),
        ("zero@positions=0:4", "zero(positions=0:4)"),
        ("ablate_heads=0,3@true", "ablate_heads([0, 3], True)"),
        ("clamp=-1@1", "clamp(-1.0, 1.0)"),
        ("clamp@high=2", "clamp(high=2.0)"),
        ("noise=0.1@positions=-1@samples=0,1", "noise(0.1, positions=-1, samples=[0, 1])"),
        ("swap=0@1", "swap(0, 1)"),
        ("mean=s b", "mean(['s', 'b'])"),
        ("splice=sae@keep_error=yes", "splice('sae', True)"),
        ("scale=2 | zero@features=-1", "scale(2.0) | zero(features=-1)"),
    ],
)
def test_presets_from_words(text: str, told: str) -> None:
    assert repr(edits.parse(text)) == told


def test_a_vector_from_words(tmp_path: Path) -> None:
    torch.save({"v": VECTOR, "w": VECTOR * 2}, tmp_path / "vector.pt")
    x = tensor(5, 2, 6)
    edit = edits.parse(f"steer={tmp_path}/vector.pt#w@4.0@positions=-1")
    assert torch.allclose(apply(edit, x)[-1], x[-1] + 8 * VECTOR.double())


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: edits.parse("scael=2"), ["scael", "scale", "steer", "splice"]),
        (lambda: edits.parse("scale=two"), ["scale", "factor='two'"]),
        (lambda: edits.parse("scale"), ["scale", "factor", "scale=..."]),
        (lambda: edits.parse("scale=2@3"), ["scale", "'3'", "positions", "factor"]),
        (lambda: edits.parse("scale=2@factr=3"), ["scale", "'factr'", "positions", "factor"]),
        (lambda: edits.parse("ablate_heads=a"), ["ablate_heads", "which='a'", "0:4"]),
        (lambda: edits.chain(), ["chain()"]),
        (lambda: edits.clamp(), ["clamp()", "low=", "high="]),
        (lambda: edits.scale(2.0, positions="last"), ["scale", "positions='last'"]),
        (lambda: edits.project_out(torch.zeros(6)), ["project_out(<tensor 6 #92b3fa>)", "[h]", "[k, h]"]),
        (lambda: edits.project_out(torch.ones(2, 6)), ["project_out(<tensor 2x6 #f23854>)"]),
        (lambda: apply(edits.scale(2.0, positions=5), tensor(5, 2, 6)), ["positions", 5, -5, 4]),
        (
            lambda: apply(edits.ablate_heads(0), tensor(5, 2, 6)),
            ["ablate_heads", SITE, "[s, b, h]", "core_attention:output"],
        ),
        (
            lambda: apply(edits.ablate_heads(0), tensor(5, 2, 6), "s b nd"),
            ["ablate_heads(0)", 6, "heads(..., of"],
        ),
        (lambda: apply(edits.scale(2.0, positions=0), tensor(5, 6), "t h"), ["scale", SITE, "[t, h]", "'s'"]),
        (lambda: apply(edits.mean("e"), tensor(5, 2, 6)), ["mean", SITE, "[s, b, h]", "'e'"]),
        (lambda: apply(edits.steer(torch.ones(5)), tensor(5, 2, 6)), ["(5,)", "(5, 2, 6)"]),
        (lambda: edits.steer(VECTOR).for_site(site(STREAM, ("s", "b", 32))), ["steer", SITE, 32]),
        (lambda: edits.project(VECTOR).for_site(site(STREAM, ("s", "b", 32))), ["project", SITE, 32]),
        (lambda: apply(edits.swap(0, 2), tensor(5, 2, 6)), ["swap(0, 2)", 2]),
        (lambda: apply(edits.scale(2.0), tensor(5, 6)), ["scale(2.0)", 2, "[s, b, h]"]),
    ],
)
def test_what_is_refused(make: Any, values: list[object]) -> None:
    with raises(mf.HookError, *values):
        make()


def test_presets_tell_what_they_are() -> None:
    def own(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs

    hook = mf.HookFunction("decoder", editing_function=edits.scale(2.0, positions=-1) | own)
    assert "scale(2.0, positions=-1) | test_presets_tell" in hook.describe()
    assert repr(own | edits.zero()).endswith("own | zero()")
    one, other = (repr(edits.steer(VECTOR * n)) for n in (1, 2))
    assert one.startswith("steer(<tensor 6 #")
    assert one != other, "ranks with other vectors are seen to differ"


def test_no_two_presets_mean_the_same() -> None:
    """Each in its simplest form gives another tensor than every other one; zero is zero of a NaN, too."""
    x, nans = tensor(5, 2, 6).float(), torch.full((5, 2, 6), torch.nan)
    forms: dict[str, tuple[Any, ...]] = {"zero": (), "mean": (), "resample": (), "scale": (2.0,)}
    forms |= dict.fromkeys(("steer", "project", "project_out", "patch"), (VECTOR,))
    forms |= {"clamp": (-0.5, 0.5), "noise": (0.5,), "linear_map": (torch.eye(6).flip(0),)}
    forms |= {"low_rank": ("adapter",), "ablate_neurons": ([0, 1, 2],)}
    made = {name: apply(edits.PRESETS[name](*arguments), x) for name, arguments in forms.items()}
    for one, a in made.items():
        for other, b in made.items():
            assert one == other or not torch.equal(a, b), (one, other)
    assert torch.equal(apply(edits.zero(), nans), torch.zeros(5, 2, 6))
    assert apply(edits.scale(0.0), nans).isnan().all()
    assert len(set(edits.PRESETS.values())) == len(edits.PRESETS)
