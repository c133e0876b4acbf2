"""Comparing dumps of given tensors: alignment, statistics, tolerances, patterns; written in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.compare import Comparison, compare
from megatron_flex.compare.comparison import INCOMPARABLE, INDISTINGUISHABLE
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import dumps
from tests.support.dumps import Given
from tests.support.messages import any_names, assert_names, raises

FIRST, SECOND = "decoder.layers.0:output", "decoder.layers.1:output"
SAMPLES, TOKENS, WIDTH = 8, 16, 4
SIZES = {"dp": 2, "cp": 2, "tp": 2}


def tensor(seed: int = 0, iterations: int = 1) -> Tensor:
    return dumps.random(iterations, SAMPLES, TOKENS, WIDTH, seed=seed)


def given(value: Tensor, layout: Layout = dumps.SEQUENCE, **more: Any) -> Given:
    return Given(value, layout, **more)


def both(tmp_path: Path, a: dict[str, Given], b: dict[str, Given], **settings: Any) -> tuple[Path, Path]:
    """A on one rank, B on eight."""
    dumps.write(tmp_path / "a", a, **settings)
    dumps.write(tmp_path / "b", b, mesh=SIZES, microbatches=2, **settings)
    return tmp_path / "a", tmp_path / "b"


def of_one(tmp_path: Path, a: Tensor, b: Tensor, layout: Layout = dumps.SEQUENCE, **said: Any) -> Comparison:
    """One site compared."""
    return compare(*both(tmp_path, {FIRST: given(a, layout)}, {FIRST: given(b, layout)}), **said)


# -- verdicts ------------------------------------------------------------------------------------------


def test_equal_bit_by_bit_whatever_the_layout(tmp_path: Path) -> None:
    sites = {FIRST: given(tensor()), SECOND: given(tensor(1), dumps.COLUMN)}
    result = compare(*both(tmp_path, sites, sites))
    assert result.verdict == "equal"
    assert result.exit_status == 0
    assert result.first is None
    assert [r.name for r in result.rows] == [FIRST, SECOND]
    assert all(r.equal and r.worst is None and r.cosine == 1 for r in result.rows)
    assert result.rows[0].count == SAMPLES * TOKENS * WIDTH
    assert any_names(result.summary(), "equal", 2)


def test_round_off_is_told_from_a_bug(tmp_path: Path) -> None:
    value = tensor()
    near = value * (1 + 1e-7 * dumps.random(*value.shape, seed=5))
    result = of_one(tmp_path, value, near)
    assert result.verdict == INDISTINGUISHABLE
    assert 0 < result.rows[0].error < result.rows[0].tolerance < 1e-3
    far = value.clone()
    far[0, 3, 5, 2] += 1e-2
    result = of_one(tmp_path / "far", value, far)
    assert result.verdict == "diverges"
    assert result.exit_status == 1


def test_one_entry_among_many_is_enough(tmp_path: Path) -> None:
    value = dumps.random(1, SAMPLES, 64, 16)
    other = value.clone()
    other[0, 3, 5, 2] += 1e-4 * float(value.abs().max())
    result = of_one(tmp_path, value, other)
    assert result.first is not None
    assert result.first.relative < result.first.tolerance < result.first.error


def test_first_in_the_order_of_execution_and_whose_it_was(tmp_path: Path) -> None:
    values = {FIRST: tensor(), SECOND: tensor(1)}
    a = {n: given(v, gradient=v + 1) for n, v in values.items()}
    wrong = values[FIRST] + 1
    wrong[0, 5, 9, 1] += 0.5  # the gradient of the first one: it comes last
    b = {FIRST: given(values[FIRST], gradient=wrong), SECOND: a[SECOND]}
    result = compare(*both(tmp_path, a, b, order="blocks"))
    assert [r.name for r in result.rows] == [FIRST, SECOND, f"{SECOND}.grad", f"{FIRST}.grad"]
    first = result.first
    assert first is result.rows[3]
    assert first.kind == "gradient"
    assert first.max_abs == pytest.approx(0.5)
    worst = first.worst
    assert worst is not None
    assert (worst.sample, worst.token, worst.index) == (5, 9, (1,))
    assert (worst.a, worst.b) == pytest.approx((float(wrong[0, 5, 9, 1]) - 0.5, float(wrong[0, 5, 9, 1])))
    # Samples 4 to 7 are dp 1's. Of 16 tokens cp 1 has 4 to 11, of which tp 1 the second half.
    assert_names(worst.ranks_b, 7, "dp 1", "cp 1", "tp 1")
    assert_names(worst.ranks_a, 0)
    assert any_names(result.hints, "1 of 8", 5)
    assert any_names(result.hints, "tp", "1 of 2", "B")


def test_iterations_before_sites(tmp_path: Path) -> None:
    a = {FIRST: tensor(0, 3), SECOND: tensor(1, 3)}
    b = {n: v.clone() for n, v in a.items()}
    b[FIRST][2] += 1
    b[SECOND][1] += 1
    result = compare(
        *both(tmp_path, {n: given(v) for n, v in a.items()}, {n: given(v) for n, v in b.items()})
    )
    assert result.first is not None
    assert (result.first.name, result.first.iteration) == (SECOND, 1)


def test_parameters_come_first_and_are_exact(tmp_path: Path) -> None:
    weight, name = dumps.random(1, 8, 4), "decoder.layers.0.mlp.linear_fc1.weight"
    grad = dumps.random(1, 8, 4, seed=4)
    value = {FIRST: given(tensor(), gradient=tensor(3))}
    for folder, factor in (("a", 1.0), ("b", 1 + 1e-6)):
        dumps.write(
            tmp_path / folder,
            value,
            parameters={name: Given(weight * factor, dumps.WEIGHT, grad)},
            mesh={"tp": 2} if folder == "b" else None,
        )
    result = compare(tmp_path / "a", tmp_path / "b")
    assert [r.kind for r in result.rows] == ["parameter", "value", "gradient", "parameter_gradient"]
    assert result.first is result.rows[0], "nothing was computed: even a last digit is too much"


def test_not_a_number(tmp_path: Path) -> None:
    value = tensor()
    broken = value.clone()
    broken[0, 2, 3] = math.nan
    result = of_one(tmp_path, value, broken)
    assert result.first is not None
    assert result.first.error == math.inf
    assert result.first.worst is not None
    assert math.isnan(result.first.worst.b)
    assert any_names(result.hints, "4 of 512", "NaN")
    assert any_names(result.hints, "1 of 16", 3)
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert told["first"]["error"] == "inf"
    assert told["rows"][0]["diverges"] is True
    same = of_one(tmp_path / "same", broken, broken)
    assert same.verdict == "equal", "a NaN in the same place of both is no difference"


def test_zeros(tmp_path: Path) -> None:
    value = tensor()
    zero = torch.zeros_like(value)
    assert of_one(tmp_path, zero, zero).verdict == "equal"
    result = of_one(tmp_path / "one", value, zero)
    assert result.verdict == "diverges"
    assert result.first is not None
    assert result.first.cosine == 0
    assert any_names(result.hints, "B", 0)


def test_whole_numbers_are_the_same_or_not(tmp_path: Path) -> None:
    value = torch.arange(SAMPLES * TOKENS * WIDTH).reshape(1, SAMPLES, TOKENS, WIDTH)
    other = value.clone()
    other[0, 0, 0, :2] += 1
    result = of_one(tmp_path, value, other)
    assert result.first is not None
    assert result.first.error == pytest.approx(2 / 512)
    assert_names(result.hints[0], "2 of 512")


# -- what only one has ---------------------------------------------------------------------------------


def test_what_only_one_has_is_told(tmp_path: Path) -> None:
    value = tensor(0, 3)
    dumps.write(tmp_path / "a", {FIRST: given(value), SECOND: given(value)}, tokens=slice(0, None, 2))
    dumps.write(tmp_path / "b", {FIRST: given(value[1:])}, iterations=[1, 2], samples=slice(0, 4))
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "incomplete"
    assert [r.iteration for r in result.rows] == [1, 2]
    assert result.rows[0].count == 4 * 8 * WIDTH
    assert any_names(result.notes, "A", "4 of 8")
    assert any_names(result.notes, "B", "8 of 16")
    assert len(result.missing) == 2
    assert_names(result.missing[0], "A", SECOND)
    assert_names(result.missing[1], "A", 0)
    assert set(result.missing) <= set(result.notes)
    assert result.incomplete
    assert result.exit_status == 2
    assert any(line.startswith("incomplete: ") for line in result.summary())
    assert any_names(result.summary(), "equal", 2)
    assert result.to_json()["incomplete"] is True
    assert result.to_json()["verdict"] == "incomplete"
    assert "Comparison · incomplete" in result._repr_html_()
    allowed = compare(tmp_path / "a", tmp_path / "b", allow_missing=True)
    assert (allowed.verdict, allowed.exit_status, allowed.missing) == ("equal", 0, result.missing)
    assert not [line for line in allowed.summary() if line.startswith("incomplete: ")]
    assert compare(tmp_path / "b", tmp_path / "b").missing == ()


def test_selected_tokens_keep_their_numbers(tmp_path: Path) -> None:
    value, other = tensor(), tensor()
    other[0, 6, 11, 0] += 1
    dumps.write(tmp_path / "a", {FIRST: given(value)}, tokens=[3, 7, 11])
    dumps.write(tmp_path / "b", {FIRST: given(other)}, tokens=slice(5, None), mesh={"cp": 2})
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None
    assert result.first.count == SAMPLES * 2 * WIDTH
    assert result.first.worst is not None
    assert (result.first.worst.sample, result.first.worst.token) == (6, 11)


@pytest.mark.parametrize("tokens", [None, slice(0, 12)], ids=["all", "some"])
def test_tokens_drawn_by_sample(tmp_path: Path, tokens: slice | None) -> None:
    from megatron_flex.dump import sampled

    value, other = tensor(), tensor()
    dumps.write(tmp_path / "a", {FIRST: given(value)}, tokens=sampled(6))
    dumps.write(tmp_path / "b", {FIRST: given(other)}, tokens=tokens, mesh={"tp": 2})
    same = compare(tmp_path / "a", tmp_path / "b")
    assert same.verdict == "equal"
    assert same.rows[0].count <= SAMPLES * 6 * WIDTH

    with mf.open_dump(tmp_path / "a") as dump:
        drawn = dump[FIRST].tokens[0, 5].tolist()
    place = next(t for t in drawn if t < 12)
    other[0, 5, place, 1] += 1
    dumps.write(tmp_path / "c", {FIRST: given(other)}, tokens=tokens, mesh={"tp": 2})
    result = compare(tmp_path / "a", tmp_path / "c")
    assert result.first is not None
    assert result.first.worst is not None
    assert (result.first.worst.sample, result.first.worst.token) == (5, place)


def test_nothing_in_common(tmp_path: Path) -> None:
    value = tensor()
    dumps.write(tmp_path / "a", {FIRST: given(value)})
    dumps.write(tmp_path / "b", {SECOND: given(value)})
    dumps.write(tmp_path / "c", {FIRST: given(value)}, iterations=[7])
    with raises(DumpError, tmp_path / "a", tmp_path / "b", FIRST, SECOND):
        compare(tmp_path / "a", tmp_path / "b")
    with raises(DumpError, tmp_path / "a", tmp_path / "c", 0, 7):
        compare(tmp_path / "a", tmp_path / "c")
    wide = dumps.random(1, SAMPLES, TOKENS, 2 * WIDTH)
    dumps.write(tmp_path / "d", {FIRST: given(wide)})
    with raises(DumpError, tmp_path / "a", tmp_path / "d", 4, "'h'", 8):
        compare(tmp_path / "a", tmp_path / "d")


def test_calls_are_told_apart(tmp_path: Path) -> None:
    value = tensor()
    a, b = both(tmp_path, {FIRST: given(value, calls=2)}, {FIRST: given(value, calls=3)})
    result = compare(a, b)
    assert [r.name for r in result.rows] == [FIRST, f"{FIRST}#1"]
    assert any_names(result.notes, "B", f"{FIRST}#2")


# -- tolerances ----------------------------------------------------------------------------------------


def test_tolerances_that_are_said(tmp_path: Path) -> None:
    value = tensor()
    paths = both(tmp_path, {FIRST: given(value)}, {FIRST: given(value * 1.01)})
    assert compare(*paths).verdict == "diverges"
    assert compare(*paths, tolerance=0.02).verdict == INDISTINGUISHABLE
    assert compare(*paths, tolerance={"decoder.layers.*": 0.02}).verdict == INDISTINGUISHABLE
    assert compare(*paths, tolerance={"embedding*": 0.02}).verdict == "diverges"
    for wrong in (-1.0, "much", {"**": -1}):
        with raises(FlexError, "tolerance="):
            compare(*paths, tolerance=wrong)  # type: ignore[arg-type]
    with raises(FlexError, "tolerance_from"):
        compare(*paths, tolerance=0.1, tolerance_from=paths[0])


def test_tolerance_measured_from_a_third_run(tmp_path: Path) -> None:
    value = tensor()
    noise = [value * (1 + 1e-3 * dumps.random(*value.shape, seed=n)) for n in (7, 8)]
    paths = both(tmp_path, {FIRST: given(value)}, {FIRST: given(noise[0])})
    dumps.write(tmp_path / "c", {FIRST: given(noise[1])})
    assert compare(*paths).verdict == "diverges"
    measured = compare(*paths, tolerance_from=tmp_path / "c")
    assert measured.verdict == INDISTINGUISHABLE
    assert 1e-3 < measured.rows[0].tolerance < 2e-2
    dumps.write(tmp_path / "bug", {FIRST: given(noise[0] * 1.1)})
    for a, b in ((paths[0], tmp_path / "bug"), (tmp_path / "bug", paths[0])):
        assert compare(a, b, tolerance_from=tmp_path / "c").verdict == "diverges", "whichever has the bug"


def test_a_cast_dump_is_known_as_such(tmp_path: Path) -> None:
    value = tensor()
    dumps.write(tmp_path / "a", {FIRST: given(value)})
    dumps.write(tmp_path / "b", {FIRST: given(value)}, dtype="bf16")
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == INDISTINGUISHABLE
    assert 2**-9 < result.rows[0].tolerance < 2**-5
    dumps.write(tmp_path / "c", {FIRST: given(value * 1.05)}, dtype="bf16")
    assert compare(tmp_path / "a", tmp_path / "c").verdict == "diverges"


def test_tolerance_grows_with_depth_and_on_the_way_back(tmp_path: Path) -> None:
    names = ["embedding:output", *(f"decoder.layers.{n}:output" for n in range(8)), "output_layer:output"]
    sites = {n: given(tensor(), gradient=tensor()) for n in names}
    rows = compare(*both(tmp_path, sites, sites)).rows
    allowed = [r.tolerance for r in rows]
    assert allowed == sorted(allowed)
    assert len(set(allowed)) == len(allowed)
    assert 2 < allowed[-1] / allowed[1] < 10


# -- bounded memory ------------------------------------------------------------------------------------


# -- patterns ------------------------------------------------------------------------------------------


def test_a_constant_factor_has_a_name(tmp_path: Path) -> None:
    value = tensor()
    result = of_one(tmp_path, value, value / 8)
    assert any_names(result.hints, 0.125, "1 / (dp x cp x tp)")
    result = of_one(tmp_path / "no", value, value * 3)
    assert any_names(result.hints, "B", "A", 3)


def test_zigzag_taken_for_contiguous(tmp_path: Path) -> None:
    value = tensor()
    zig = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])
    wrong = torch.empty_like(value)
    wrong[:, :, zig] = value  # contiguous parts where the layout says zigzag
    result = of_one(tmp_path, value, wrong)
    assert any_names(result.hints, "B", "cp=2", "zigzag")


def test_rows_at_other_places(tmp_path: Path) -> None:
    value = tensor()
    result = of_one(tmp_path, value, value[:, [0, 2, 1, 3, 4, 5, 6, 7]])
    assert any_names(result.hints, "(B<-A)", "1<-2, 2<-1")
    result = of_one(tmp_path / "again", value, value[:, [0, 1, 2, 3, 0, 1, 2, 3]])
    assert any_names(result.hints, "(B<-A)", "4..7<-0..3")


def borders(hints: tuple[str, ...]) -> list[str]:
    """The hints that name an axis and no number: of what is between ranks, not on one of them."""
    return [h for h in hints if any_names([h], "tp", "B") and not any(c.isdigit() for c in h)]


def test_errors_at_borders(tmp_path: Path) -> None:
    value, other = dumps.random(1, 2, 64, 4), dumps.random(1, 2, 64, 4)
    other[:, :, [31, 32]] += 1
    layout = Layout((Dim("s", (Cut("tp"),)), Dim("b"), Dim("h")))
    dumps.write(tmp_path / "a", {FIRST: given(value, layout)})
    dumps.write(tmp_path / "b", {FIRST: given(other, layout)}, mesh={"tp": 2})
    result = compare(tmp_path / "a", tmp_path / "b")
    assert len(borders(result.hints)) == 1
    other[:, :, 20] += 1
    dumps.write(tmp_path / "c", {FIRST: given(other, layout)}, mesh={"tp": 2})
    assert borders(compare(tmp_path / "a", tmp_path / "c").hints) == []
    ends = value.clone()
    ends[:, :, [0, 63]] += 1  # of the sequence, and of no border between ranks
    dumps.write(tmp_path / "d", {FIRST: given(ends, layout)}, mesh={"tp": 2})
    assert borders(compare(tmp_path / "a", tmp_path / "d").hints) == []


def test_gradients_of_keys_that_were_not_summed_name_cp(tmp_path: Path) -> None:
    """Queries stay on their rank: their gradient needs no sum."""
    core, values = "decoder.layers.0.self_attention.core_attention", tensor()
    grads = {p: tensor(n) for n, p in enumerate("qkv", 2)}
    wrong = {**grads, "v": grads["v"] * torch.linspace(0.2, 1, TOKENS)[:, None]}
    sites = [{f"{core}:{p}": given(values, gradient=g) for p, g in found.items()} for found in (grads, wrong)]
    result = compare(*both(tmp_path, *sites))
    assert result.first is not None
    assert result.first.name == f"{core}:v.grad"
    assert any_names(result.hints, "cp")


PER_TOKEN = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b")))  # of a loss


def loss_of_ranks(tmp_path: Path, a: Tensor, b: Tensor) -> Comparison:
    """The loss of each token, whose sequence two context parallel ranks share."""
    dumps.write(tmp_path / "a", {"loss:output": given(a, PER_TOKEN)})
    dumps.write(tmp_path / "b", {"loss:output": given(b, PER_TOKEN)}, mesh={"cp": 2})
    return compare(tmp_path / "a", tmp_path / "b")


def test_ranks_that_weigh_their_tokens_differently(tmp_path: Path) -> None:
    """Each sample has factors of its own, and the ranks too."""
    value, wrong = dumps.random(1, 2, 64), dumps.random(1, 2, 64)
    value[:, :, :5] = wrong[:, :, :5] = 0  # tokens that do not count
    first = torch.tensor([*range(16), *range(48, 64)])  # of the first rank
    wrong[:, 0, first] *= 0.875
    wrong[:, 1] *= 1.25
    wrong[:, 1, first] *= 2
    result = loss_of_ranks(tmp_path, value, wrong)
    assert result.causes == ["constant factor"]
    assert any_names(result.hints, "cp", "0.875, 1", 0, "2.5, 1.25", 1), result.hints
    wrong[:, 1, 20:30] *= 3  # of some tokens of a rank
    assert loss_of_ranks(tmp_path / "no", value, wrong).causes == []


def test_a_number_added_to_the_loss_of_all_tokens(tmp_path: Path) -> None:
    value = 3 + dumps.random(1, 2, 64).abs()
    result = loss_of_ranks(tmp_path, value, value + math.log(2))
    assert result.causes == ["same vector"]
    assert any_names(result.hints, "B", "A", 0.693147, "cp"), result.hints
    result = loss_of_ranks(tmp_path / "factor", torch.ones(1, 2, 64), torch.full((1, 2, 64), 2.0))
    assert result.causes == ["constant factor"], "of equal entries a factor is named, as before"


def test_entries_that_one_run_left_out_are_zero_beside_round_off(tmp_path: Path) -> None:
    value = tensor()
    wrong = value * (1 + 1e-7 * tensor(9))
    wrong[..., ::3] = 0
    result = of_one(tmp_path, value, wrong)
    assert result.causes == ["zero"]


@pytest.mark.parametrize(
    ("site", "behind", "cut"),
    [
        ("self_attention.linear_qkv:v", "self_attention.linear_qkv:q", Cut("tp", copies=2)),
        ("self_attention.linear_qkv:k", "self_attention.linear_qkv:q", None),
        ("self_attention.linear_kv_down_proj:output", "self_attention.core_attention:k", None),
    ],
    ids=["a head of several ranks", "all heads on each rank", "latent attention"],
)
def test_gradients_of_keys_that_ranks_share_name_tp(
    tmp_path: Path, site: str, behind: str, cut: Cut | None
) -> None:
    values, path = tensor(), "decoder.layers.0."
    grad = tensor(2)
    wrong = grad * torch.linspace(0.2, 1, TOKENS)[:, None]
    layout = Layout((Dim("s"), Dim("b"), Dim("h", (cut,) if cut else ())))
    plain = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),))))
    for name, of_site in (("a", grad), ("b", wrong)):
        sites = {path + site: given(values, layout, gradient=of_site)}
        sites[path + behind] = given(values, plain, gradient=tensor(3))
        dumps.write(tmp_path / name, sites, mesh={"tp": 2} if name == "b" else None)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None
    assert result.first.name == f"{path}{site}.grad"
    assert result.causes == ["keys and values"]
    assert any_names(result.hints, "tp", f"{path}{behind}.grad"), result.hints


def test_gradients_of_keys_of_a_ranks_own_heads_need_no_sum(tmp_path: Path) -> None:
    values, path, grad = tensor(), "decoder.layers.0.self_attention.linear_qkv:", tensor(2)
    layout = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),))))
    for name, of_keys in (("a", grad), ("b", grad * torch.linspace(0.2, 1, TOKENS)[:, None])):
        sites = {path + "k": given(values, layout, gradient=of_keys)}
        sites[path + "q"] = given(values, layout, gradient=tensor(3))
        dumps.write(tmp_path / name, sites, mesh={"tp": 2} if name == "b" else None)
    assert "keys and values" not in compare(tmp_path / "a", tmp_path / "b").causes


def test_all_tokens_but_those_that_agree_are_named(tmp_path: Path) -> None:
    """Round-off everywhere does not hide that the first token is right: angles of position 0 are zero."""
    value = tensor()
    wrong = value + 1e-3 * tensor(9) * value.abs().max()
    wrong[:, :, 1:] += tensor(10)[:, :, 1:]
    hints = of_one(tmp_path, value, wrong).hints
    assert any_names(hints, f"{TOKENS - 1} of {TOKENS}", "1, 2, 3"), hints


# -- what people see -----------------------------------------------------------------------------------


def test_table_and_progress(tmp_path: Path) -> None:
    rich = pytest.importorskip("rich.console")
    names = [f"decoder.layers.{n}:output" for n in range(40)]
    a, b = {n: given(tensor()) for n in names}, {n: given(tensor()) for n in names}
    b[names[20]] = given(tensor(1))
    seen: list[tuple[int, int, str]] = []
    result = compare(*both(tmp_path, a, b), progress=lambda *told: seen.append(told))
    assert seen == [(n, 40, name) for n, name in enumerate(names)]
    shown = [r.name for r in result.shown(10)]
    assert len(shown) == 10
    assert names[20] in shown
    console = rich.Console(width=200, record=True)
    console.print(result.table())
    assert names[20] in console.export_text()
    assert any_names(result.summary(), "diverges", names[20], "(value)", 0)


# -- runs that cannot be compared ------------------------------------------------------------------------


def test_other_tokens_cannot_be_compared(tmp_path: Path) -> None:
    """Vectors of the same embedding in other places are other data; those of no token are a fault."""
    table, generator = dumps.random(1, 64, WIDTH), torch.Generator().manual_seed(1)
    words = "embedding.word_embeddings"
    ids = [torch.randint(0, 64, (SAMPLES, TOKENS), generator=generator) for _ in range(2)]
    shifted = torch.roll(ids[0], 1, 1)
    shifted[:, 0] = ids[1][:, 0]
    zeroed = table[:, ids[0]].clone()
    zeroed[0, 2, 4:6] = 0
    given_values = {
        "a": table[:, ids[0]],
        "other": table[:, ids[1]],
        "order": table[:, ids[0]][:, torch.randperm(SAMPLES, generator=generator)],
        "shifted": table[:, shifted],
        "zeroed": zeroed,
    }
    for name, value in given_values.items():
        parameters = {f"{words}.weight": given(table, Layout((Dim("v", (Cut("tp"),)), Dim("h"))))}
        mesh = None if name == "a" else SIZES
        dumps.write(
            tmp_path / name,
            {f"{words}:output": given(value)},
            parameters=parameters,
            mesh=mesh,
            microbatches=1 if name == "a" else 2,
        )
    result = compare(tmp_path / "a", tmp_path / "other")
    assert (result.verdict, result.exit_status) == (INCOMPARABLE, 2)
    assert_names(result, "8 of 8")
    told = json.loads(json.dumps(result.to_json()))
    assert (told["verdict"], told["exit_status"]) == (result.verdict, 2)
    assert result.verdict in result._repr_html_()
    for name in ("order", "shifted", "zeroed"):
        found = compare(tmp_path / "a", tmp_path / name)
        assert (found.verdict, found.exit_status) == ("diverges", 1), name


# -- other weights, and dumps that were continued -------------------------------------------------------


def test_other_weights_are_told_first(tmp_path: Path) -> None:
    """Before the verdict, with the command that loads one checkpoint in both layouts."""
    sites = {FIRST: given(tensor())}
    right, other = ({"a.weight": given(tensor(7)), "b.weight": given(tensor(seed))} for seed in (8, 9))
    for name, parameters in (("a", right), ("b", other), ("c", right)):
        dumps.write(tmp_path / name, sites, parameters=parameters)
    told = compare(tmp_path / "a", tmp_path / "b").summary()
    assert_names(told[0], "1 of 2", 0, "b.weight", "megatron-flex two-layouts")
    assert not any_names(compare(tmp_path / "a", tmp_path / "c").summary(), "megatron-flex two-layouts")


def test_a_dump_that_was_continued_in_another_layout(tmp_path: Path) -> None:
    """Each divergence is explained by the mesh of its own iteration, and the heading has both meshes."""
    value = tensor()
    wrong = value.clone()
    wrong[..., WIDTH // 2 :] *= 2  # what the second of two tensor parallel ranks holds
    dumps.write(tmp_path / "a", {FIRST: given(value, dumps.COLUMN)}, iterations=[0])
    dumps.write(tmp_path / "a", {FIRST: given(value, dumps.COLUMN)}, iterations=[1])
    dumps.write(tmp_path / "b", {FIRST: given(value, dumps.COLUMN)}, iterations=[0])
    dumps.write(tmp_path / "b", {FIRST: given(wrong, dumps.COLUMN)}, mesh={"tp": 2}, iterations=[1])
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None
    assert result.first.iteration == 1
    assert_names(result.b, 0, "tp=2", 1)
    assert_names(result.a, 2)
    assert "tp" not in Path(result.a).name
    assert result.first.worst is not None
    assert "tp 1" in result.first.worst.ranks_b[0]
    assert any("tp" in hint for hint in result.hints)
