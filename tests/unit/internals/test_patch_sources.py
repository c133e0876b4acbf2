"""What `patch` takes its tensors from, of the pass that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex import edits
from megatron_flex.runtime.captures import Captures, Key
from tests.support.messages import raises
from tests.unit.test_edits import STREAM, VECTOR, site, tensor


def key(microbatch: int = 0, call: int = 0, step: int = 0) -> Key:
    return Key("decoder.layers.0:mid", step, step, microbatch, call)


def patched(source: Any, x: Tensor, at: Key, **kwargs: Any) -> Tensor:
    return edits.patch(source, **kwargs).for_site(site(STREAM)).for_pass(at)(None, x, None, None)


def test_patch_from_whatever_holds_tensors(tmp_path: Path) -> None:
    x, found = tensor(5, 2, 6), [tensor(5, 2, 6, seed=n) for n in (1, 2, 3)]
    captures = Captures()
    for n, values in enumerate(found):
        captures.add(key(n, step=0), values * 0)
        captures.add(key(n, step=4), values)
    edits.write(captures, tmp_path / "run.pt")
    name = "decoder.layers.0:mid"
    sources = (
        found,
        {name: found},
        {"decoder.layers.0": found},
        captures,
        captures[name],
        str(tmp_path / "run.pt"),
    )
    for source in sources:
        for n in (2, 0, 1):
            assert torch.equal(patched(source, x, key(n)), found[n])
    assert torch.equal(patched(found[0], x, key(2)), found[0])
    assert torch.equal(patched(VECTOR.double(), x, key(2)), VECTOR.double().expand_as(x))
    out = patched(found, x, key(1), positions=-1, features=[0, 1])
    assert torch.equal(out[-1, :, :2], found[1][-1, :, :2])
    assert torch.equal(out[:-1], x[:-1])
    assert torch.equal(out[-1, :, 2:], x[-1, :, 2:])
    with raises(mf.HookError, 3, 0):
        patched(found, x, key(3))
    with raises(mf.HookError, name, "patch(<dict of 1>)", "edits.write()"):
        edits.patch({"decoder.layers.1:mid": found}).for_site(site(STREAM))
    with raises(mf.HookError, name, "patch(<Captures of 0>)", "edits.write()"):
        patched(Captures(), x, key())


def test_captures_in_a_file_of_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    x, captures = tensor(5, 2, 6), Captures()
    captures.add(key(), x)
    edits.write(captures, tmp_path / "run.safetensors")
    assert torch.equal(patched(tmp_path / "run.safetensors", x * 0, key()), x)
