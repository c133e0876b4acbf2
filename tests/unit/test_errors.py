"""The attributes of errors: what an error concerns, for code that handles it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

import megatron_flex as mf
from megatron_flex.errors import AbsentError, error_attributes
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
