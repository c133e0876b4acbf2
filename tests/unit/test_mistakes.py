"""Mistakes that people make: each is one line that names what was given, and what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import Dump, FlexError, FlexModel, HookError, HookFunction, SiteError, Statistics
from tests.support import dumps
from tests.support.dumps import Given, random
from tests.support.messages import any_names, assert_names, raises
from tests.support.pool import run

ROOT = Path(__file__).parents[2]


def edit(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs


def torch_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output


class Model(nn.Module):
    """Four layers whose names are as Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.decoder.layers:
            inputs = layer(inputs)
        return inputs


def hook() -> HookFunction:
    return HookFunction("decoder.layers.1")


ATTACH: dict[str, tuple[Callable[[nn.Module], Any], type[FlexError], tuple[str, ...]]] = {
    "names as hooks": (
        lambda m: mf.attach(m, ["decoder.layers.1"]),  # type: ignore[list-item]
        HookError,
        ("attach()", "'decoder.layers.1'", "HookFunction('decoder.layers.1')"),
    ),
    "a name as hooks": (
        lambda m: mf.attach(m, "decoder.layers.1"),  # type: ignore[arg-type]
        HookError,
        ("'decoder.layers.1'", "HookFunction('decoder.layers.1')"),
    ),
    "one hook without a list": (
        lambda m: mf.attach(m, hook()),  # type: ignore[arg-type]
        HookError,
        ("attach(model, [hook])", repr(hook())),
    ),
    "a function as a hook": (
        lambda m: mf.attach(m, [edit]),  # type: ignore[list-item]
        HookError,
        ("attach()", "edit", "HookFunction('decoder.layers.3', edit)"),
    ),
    "a dump as a hook": (
        lambda m: mf.attach(m, [Dump("x", ["decoder.layers.1"])]),  # type: ignore[list-item]
        HookError,
        ("<Dump of decoder.layers.1 to x>", "register_dump", "attach(..., dumps=...)"),
    ),
    "model and hooks swapped": (
        lambda m: mf.attach([hook()], m),  # type: ignore[arg-type]
        HookError,
        ("attach(model, hooks)",),
    ),
    "model and a hook swapped": (
        lambda m: mf.attach(hook(), m),  # type: ignore[arg-type]
        HookError,
        ("attach(model, hooks)",),
    ),
    "a folder as a dump": (
        lambda m: mf.attach(m, dumps="out"),  # type: ignore[arg-type]
        HookError,
        ("attach(dumps=...)", "'out'", "Dump('FOLDER', ['decoder.layers.3'])"),
    ),
    "a folder as statistics": (
        lambda m: mf.attach(m, statistics=["out"]),  # type: ignore[list-item]
        HookError,
        ("attach(statistics=...)", "'out'", "Statistics('FOLDER', ['decoder.layers.3'])"),
    ),
    "no model": (lambda m: mf.attach(None), FlexError, ("None", "nn.Module")),
    "a name as a model": (lambda m: FlexModel("gpt"), FlexError, ("'gpt'", "nn.Module")),
    "a FlexModel as a model": (lambda m: FlexModel(FlexModel(m)), FlexError, ("FlexModel", "restore()")),
    "name and function swapped": (
        lambda m: HookFunction(edit, "decoder.layers.1"),  # type: ignore[arg-type]
        HookError,
        ("editing_function='decoder.layers.1'", "HookFunction('decoder.layers.1', edit)"),
    ),
    "a shape as a function": (
        lambda m: HookFunction("decoder.layers.1", (None, 4)),  # type: ignore[arg-type]
        HookError,
        ("(None, 4)", "expected_shape=(None, 4)"),
    ),
    "a function as a shape": (
        lambda m: HookFunction("decoder.layers.1", expected_shape=edit),  # type: ignore[arg-type]
        HookError,
        ("expected_shape", "edit"),
    ),
    "a function as a name": (
        lambda m: HookFunction(edit),  # type: ignore[arg-type]
        HookError,
        ("module_name", "'inputs'", "HookFunction('decoder.layers.3', edit)"),
    ),
    "names as a name": (
        lambda m: HookFunction(["decoder.layers.1"]),  # type: ignore[arg-type]
        HookError,
        ("module_name=['decoder.layers.1']",),
    ),
    "a module as a name": (
        lambda m: HookFunction(m),  # type: ignore[arg-type]
        HookError,
        ("module_name", "Model", "flex.sites()"),
    ),
}

FOUR = "(current_module, inputs, save_ctx, modules)"
REGISTER: dict[str, tuple[Callable[[FlexModel], Any], type[FlexError], tuple[str, ...]]] = {
    "a function": (
        lambda f: f.register_forward_hook(edit),  # type: ignore[arg-type]
        HookError,
        ("register_forward_hook", "HookFunction('decoder.layers.3', edit)", FOUR),
    ),
    "torch's hook": (
        lambda f: f.register_full_backward_hook(torch_hook),  # type: ignore[arg-type]
        HookError,
        (
            "register_full_backward_hook",
            "HookFunction('decoder.layers.3', torch_hook)",
            FOUR,
        ),
    ),
    "torch's hook with a name": (
        lambda f: f.register_forward_pre_hook(
            HookFunction("decoder.layers.1", torch_hook)  # type: ignore[arg-type]
        ),
        HookError,
        ("torch_hook", "module", "args", "output", FOUR),
    ),
    "a name": (
        lambda f: f.register_hook("decoder.layers.1"),  # type: ignore[arg-type]
        HookError,
        ("register_hook", "'decoder.layers.1'", "HookFunction('decoder.layers.1')"),
    ),
    "a list": (
        lambda f: f.register_forward_hook([hook()]),  # type: ignore[arg-type]
        HookError,
        ("register_forward_hook", "HookFunction", "list", "attach()"),
    ),
    "a folder as a dump": (
        lambda f: f.register_dump("out"),  # type: ignore[arg-type]
        HookError,
        ("register_dump", "'out'", "Dump('FOLDER', ['decoder.layers.3'])"),
    ),
    "a folder as statistics": (
        lambda f: f.register_statistics("out"),  # type: ignore[arg-type]
        HookError,
        ("register_statistics", "'out'", "Statistics('FOLDER', ['decoder.layers.3'])"),
    ),
    "a layer that is not there": (
        lambda f: f.register_forward_hook(HookFunction("decoder.layers.9")),
        SiteError,
        ("'decoder.layers.9'", "decoder.layers", "0-3"),
    ),
    "a layer of a pattern": (
        lambda f: f.sites("decoder.layers.4:*"),
        SiteError,
        ("'decoder.layers.4:*'", "decoder.layers", "0-3"),
    ),
    "a layer of a parameter": (
        lambda f: f.get_module_parameter("decoder.layers.12.weight"),
        SiteError,
        ("'decoder.layers.12.weight'", "decoder.layers", "0-3"),
    ),
    "a dump of a layer that is not there": (
        lambda f: f.register_dump(Dump("x", ["decoder.layers.4"])),
        SiteError,
        ("'decoder.layers.4'", "decoder.layers", "0-3"),
    ),
    "statistics of a layer that is not there": (
        lambda f: f.register_statistics(Statistics("x", ["decoder.layers.4"])),
        SiteError,
        ("'decoder.layers.4'", "decoder.layers", "0-3"),
    ),
}


@pytest.mark.parametrize("mistake", ATTACH)
def test_arguments_of_attach(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, kind, values = ATTACH[mistake]
    model = Model()
    with raises(kind, *values):
        act(model)
    mf.attach(model, [hook()]).session.close(failed=True)  # the mistake left nothing behind


@pytest.mark.parametrize("mistake", REGISTER)
def test_arguments_of_register(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, kind, values = REGISTER[mistake]
    flex = FlexModel(Model())
    with raises(kind, *values):
        act(flex)
    assert not any(tmp_path.iterdir())
    flex.restore()


def test_patterns_of_every_kind_are_names() -> None:
    import re

    flex = FlexModel(Model())
    for pattern in ("decoder.layers.*", re.compile(r".*layers.1"), lambda site: site.point == "output"):
        with flex.register_forward_hook(HookFunction(pattern)):
            flex(torch.zeros(1, 4))
    flex.restore()


# -- names of TransformerLens, and tokens: a Megatron model ------------------------------------------------


HUGGING_FACE = {
    "model.layers.1.mlp.up_proj": "decoder.layers.1.mlp.linear_fc1",
    "model.layers.*.self_attn.o_proj:output": "decoder.layers.*.self_attention.linear_proj:output",
    "model.layers.0": "decoder.layers.0",
    "layers.1.post_attention_layernorm": "decoder.layers.1.pre_mlp_layernorm",
    "transformer.h.0.attn": "decoder.layers.0.self_attention",
    "lm_head": "output_layer",
}


def huggingface_names() -> list[str]:
    from tests.support import ranks
    from tests.support.gpt import Case

    (model,) = ranks.start(Case("one", layers=2))
    with FlexModel(model) as flex:
        said = []
        for name in (*HUGGING_FACE, "model.layers.7.mlp.up_proj"):
            try:
                flex.register_forward_hook(HookFunction(name))
            except FlexError as error:
                said.append(str(error))
        return said


def test_names_of_hugging_face_are_translated() -> None:
    pytest.importorskip("megatron.core")
    *said, of_no_layer = run(1, huggingface_names)[0]
    for message, (theirs, here) in zip(said, HUGGING_FACE.items(), strict=True):
        assert_names(message, repr(theirs), repr(here))
    assert not any_names([of_no_layer], "decoder.layers.7.mlp.linear_fc1")


def lens_mistakes() -> list[tuple[str, str]]:
    from tests.support import gpt, ranks
    from tests.support.gpt import Case

    (model,) = ranks.start(Case("one", layers=2))
    tokens = gpt.data(1)[0]["tokens"]
    flex = FlexModel(model)

    def same(tensor: Tensor, hook: Any) -> Tensor:
        return tensor

    acts: list[Callable[[], Any]] = [
        lambda: flex.register_forward_hook(HookFunction("blocks.0.hook_resid_pre")),
        lambda: flex.sites("blocks.1.attn.q.hook_out"),
        lambda: flex.register_dump(Dump("x", ["blocks.0.mlp.hook_post"])),
        lambda: flex.register_statistics(Statistics("x", ["blocks.0.hook_resid_post"])),
        lambda: flex.sites("blocks.7.hook_resid_pre"),
        lambda: flex.interp.run_with_cache(tokens, "blocks.7.hook_resid_pre"),
        lambda: flex.interp.run_with_cache("Hello world"),  # type: ignore[arg-type]
        lambda: flex.interp.run_with_hooks([1, 2, 3]),  # type: ignore[arg-type]
        lambda: flex.interp.run_with_hooks(tokens, "blocks.0.hook_mlp_out"),  # type: ignore[arg-type]
        lambda: flex.interp.run_with_hooks(tokens, ("blocks.0.hook_mlp_out", same)),  # type: ignore[arg-type]
        lambda: flex.interp.run_with_hooks(tokens, [hook()]),  # type: ignore[list-item]
    ]
    said = []
    for act in acts:
        try:
            act()
        except FlexError as error:
            said.append((type(error).__name__, str(error)))
        else:
            said.append(("no error", ""))
    logits, _ = flex.interp.run_with_cache(tokens, "blocks.0.hook_resid_pre")
    assert logits is not None
    flex.restore()
    return said


def test_names_of_transformer_lens_and_tokens() -> None:
    pytest.importorskip("megatron.core")
    (said,) = run(1, lens_mistakes)
    pairs = "[('blocks.0.hook_mlp_out', function)]"
    expected: list[tuple[str, ...]] = [
        ("run_with_cache", "run_with_hooks", "decoder.layers.0:input"),
        ("decoder.layers.1.self_attention.linear_qkv:q",),
        ("decoder.layers.0.mlp.linear_fc2:input",),
        ("decoder.layers.0:output",),
        ("blocks.7.hook_resid_pre", "flex.interp", "0-1"),
        ("blocks.7.hook_resid_pre", "0-1"),
        ("tokens='Hello world'", "[batch, sequence]", "tokenizer(text, return_tensors='pt').input_ids"),
        ("list", "[batch, sequence]", "torch.tensor([ids])"),
        ("fwd_hooks", "'blocks.0.hook_mlp_out'", pairs),
        ("fwd_hooks", "'blocks.0.hook_mlp_out'", pairs),
        (pairs, "register_forward_hook"),
    ]
    assert len(said) == len(expected)
    for (_, text), values in zip(said, expected, strict=True):
        assert_names(text, *values)
        assert "\n" not in text


# -- extras that are not installed -------------------------------------------------------------------------

BLOCKED = """
import sys, warnings
warnings.simplefilter("ignore")
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
sys.meta_path.insert(0, Blocked())
import torch
import megatron_flex as mf
flex = mf.FlexModel(torch.nn.Sequential(torch.nn.Linear(4, 4)))
def flags():
    mf.add_flex_args
def page():
    flex.report.to_html("page.html")
def plot():
    mf.plot.norms("dump")
for act in (flags, page, plot):
    try:
        act()
    except BaseException as error:
        print(act.__name__, type(error).__name__, " ".join(str(error).split()))
    else:
        print(act.__name__, "no error")
"""


def test_missing_extras_are_named(tmp_path: Path) -> None:
    given = {f"decoder.layers.{n}:output": Given(random(1, 2, 4, 4)) for n in range(2)}
    dumps.write(tmp_path / "dump", given)
    missing = ["pydantic", "yaml", "numpy", "matplotlib"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *missing],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == {"flags", "page", "plot"}, done.stderr
    assert_names(lines["flags"], "pip install 'megatron-flex[launch]'")
    assert lines["page"] == "no error"
    assert_names(lines["plot"], "pip install megatron-flex[plot]")
    assert all("Error " in lines[name] for name in ("flags", "plot"))


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps.write(tmp_path / "dump", {"decoder.layers.0:output": Given(random(1, 2, 4, 4))})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises(FlexError, "pip install megatron-flex[plot]"):
        mf.plot.norms(tmp_path / "dump")
