"""Our flags beside Megatron's own, in Megatron's own parser."""

from __future__ import annotations

import argparse

import pytest

import megatron_flex as mf
from megatron_flex.launch import settings_of
from megatron_flex.launch.flags import FLAGS, settings_from_argv
from tests.support import pages, typed


@pytest.mark.versions
def test_no_flag_of_megatrons_is_in_the_way() -> None:
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    theirs = {o for a in parser._actions for o in a.option_strings}
    mf.add_flex_args(parser)
    ours = ["--flex-sites", "a", "b", "--flex-stats", "--flex-edit=zero"]
    namespace = parser.parse_args(["--num-layers", "2", *ours, "--seq-length", "8"])
    assert (namespace.num_layers, namespace.seq_length) == (2, 8)
    assert settings_of(namespace, {}) == settings_from_argv(ours, {})[0]
    assert not theirs & {f.option for f in FLAGS}
    assert not [o for o in theirs if o.startswith("--flex-")], "the prefix is ours alone"


def test_the_flags_for_cpus_are_megatrons() -> None:
    pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    (shown,) = pages.mine(pages.ROOT / "docs" / "start.md", "text")
    assert "--transformer-impl" in shown
    typed.check_megatron(shown.split())
    with pytest.raises(AssertionError, match="--transformer-imp"):
        typed.check_megatron(["--transformer-imp"])
