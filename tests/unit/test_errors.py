"""The attributes of errors: what an error concerns, for code that handles it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.errors import MAX_MESSAGE, AbsentError, error_attributes, list_some, name_ranks
from megatron_flex.layout import Cut, assemble
from megatron_flex.sites import SiteTable
from tests.support.messages import raises


def test_an_error_without_attributes_names_nothing() -> None:
    error = mf.HookError("what went wrong")
    assert (error.site, error.hook, error.rank, error.ranks) == (None, None, None, ())
    assert str(error) == "what went wrong"


@pytest.mark.parametrize("kind", [mf.HookError, mf.SiteError, mf.DumpError, mf.LayoutError, AbsentError])
def test_a_pickled_error_keeps_its_attributes(kind: type[mf.FlexError]) -> None:
    """Its hook is left out: an editing function, such as a lambda, need not be picklable."""
    hook = mf.HookFunction("a", editing_function=lambda module, inputs, save_ctx, modules: inputs)
    error = kind("what went wrong", site="a:output", hook=hook, ranks=[2, 5])
    error.add_note("a note")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert (other.args, other.__notes__) == (error.args, ["a note"])
        assert (other.site, other.hook, other.rank, other.ranks) == ("a:output", None, 2, (2, 5))


def test_attributes_that_an_error_has_are_kept() -> None:
    outer = error_attributes(site="outer", ranks=(3,), path=Path("dump"))
    with raises(mf.HookError, site="inner", ranks=(3,)) as raised, outer:
        raise mf.HookError("what went wrong", site="inner")
    assert not hasattr(raised.value, "path"), "a HookError concerns no file"
    with raises(mf.DumpError, site=None, path="dump"), error_attributes(path=Path("dump")):
        raise mf.DumpError("what went wrong")


def test_errors_of_names_and_hooks_have_the_name() -> None:
    with raises(mf.HookError, "sideways", site="decoder"):
        mf.HookFunction("decoder", hook_type="sideways")  # type: ignore[arg-type]
    with raises(mf.SiteError, "decoder.layer", site="decoder.layer"):
        SiteTable([]).match("decoder.layer")


def test_an_error_of_a_dump_has_its_path(tmp_path: Path) -> None:
    with raises(mf.DumpError, tmp_path / "nothing", path=str(tmp_path / "nothing")):
        mf.open_dump(tmp_path / "nothing")


def test_an_error_of_a_layout_has_the_dim() -> None:
    layout = mf.Layout((mf.Dim("s"), mf.Dim("h", (Cut("tp"),))))
    with raises(mf.LayoutError, 4, 5, dim="s"):
        assemble(layout, [torch.zeros(4, 8), torch.zeros(5, 8)], {"tp": 2})


# --- length


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*(_subclasses(inner) for inner in kind.__subclasses__()))


def test_no_error_is_longer_than_its_limit_and_its_remedy_stays() -> None:
    for kind in _subclasses(mf.FlexError):
        if not kind.__module__.startswith("megatron_flex"):
            continue
        error = kind(f"site a: {list(range(10_000))} are wrong; pass fewer")
        assert len(str(error)) == MAX_MESSAGE
        assert str(error).startswith("site a: [0, 1")
        assert str(error).endswith("are wrong; pass fewer")
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert str(kind("short")) == "short"


LONG, MANY = "x" * 10_000, [True] * 10_000
TRIGGERS = {
    "Dump(sites)": lambda: mf.Dump("d"),
    "Dump(tokens)": lambda: mf.Dump("d", "a", tokens=MANY),
    "Dump(iterations)": lambda: mf.Dump("d", "a", iterations=[-1] * 10_000),
    "Dump(dtype)": lambda: mf.Dump("d", "a", dtype=LONG),
    "Dump(reduce)": lambda: mf.Dump("d", "a", reduce=LONG),
    "Dump(every)": lambda: mf.Dump("d", "a", every=-(10**5000)),
    "Select(positions)": lambda: mf.Select(positions=[LONG] * 999),
    "Select(dims)": lambda: mf.Select(dims={LONG: MANY}),
    "scale(positions)": lambda: mf.edits.scale(2.0, positions=[LONG] * 999),
    "HookFunction(hook_type)": lambda: mf.HookFunction("a", hook_type=LONG),
    "HookFunction(run)": lambda: mf.HookFunction("a", run=LONG),
    "edits.parse": lambda: mf.edits.parse(LONG),
    "edits.parse(argument)": lambda: mf.edits.parse(f"scale={LONG}"),
    "SiteTable.match": lambda: SiteTable([]).match(LONG),
    "open_dump": lambda: mf.open_dump(LONG),
    "open_statistics": lambda: mf.open_statistics(LONG),
    "compare(tolerance)": lambda: compare("a", "b", {LONG: LONG}),
    "compare(iterations)": lambda: compare("a", "b", iterations=MANY),
    "sampled": lambda: mf.dump.sampled(LONG),
    "assemble": lambda: assemble(
        mf.Layout((mf.Dim("s", (Cut("tp"),)),)), [torch.zeros(n, 1) for n in range(500)], {"tp": 500}
    ),
}


@pytest.mark.parametrize("name", TRIGGERS)
def test_an_error_about_a_long_value_is_one_short_line(name: str) -> None:
    with raises(mf.FlexError):
        TRIGGERS[name]()


def test_a_list_that_is_cut_short_counts_the_rest() -> None:
    assert list_some("abc") == "a, b, c"
    assert list_some([1, 2, 3, 4], 2) == "1, 2 and 2 more"
    assert list_some(["a: b", "c: d", "e: f"], 2, "; ") == "a: b; c: d; and 1 more"
    assert name_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert name_ranks([3]) == "rank 3"
