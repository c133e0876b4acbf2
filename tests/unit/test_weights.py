"""Digests of full parameters: corruptions of weights are named, and bad input is one line."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex.conversion.checkpoints import FolderWeights
from megatron_flex.dump.json_form import load_json
from megatron_flex.weights import compare_weights, digest_weights, parameter_digest, read_digest
from megatron_flex.weights.parameter_digest import ParameterForm, digest_parameter
from megatron_flex.weights.weight_sources import open_source
from megatron_flex.weights.weights_digest import digest_source
from tests.support import hugging_face
from tests.support.commands import Command
from tests.support.messages import assert_names, raises

pytest.importorskip("transformers")

Tensors = dict[str, Tensor]
HEADS, GROUPS, WIDTH = 4, 2, 16  # of queries, of keys, and features of a head
LAYER = "model.layers.2"
OURS = "decoder.layers.2"
QUERY, KEY, OUT = (f"{LAYER}.self_attn.{part}_proj.weight" for part in "qko")
QKV, PROJECTION = f"{OURS}.self_attention.linear_qkv.weight", f"{OURS}.self_attention.linear_proj.weight"
GATE = f"{LAYER}.mlp.experts.1.gate_proj.weight"
ROUTER, EMBEDDING = f"{OURS}.mlp.router.weight", "embedding.word_embeddings.weight"


def expert(number: int, part: str = "linear_fc1.weight[gate]") -> str:
    return f"{OURS}.mlp.experts.local_experts.{number}.{part}"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    into = tmp_path_factory.mktemp("weights") / "moe"
    hugging_face.make_model("qwen3_moe").save_pretrained(into)
    return str(into)


def changed(folder: str, into: Path, change: Callable[[Tensors], object]) -> str:
    """A copy of a folder with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, into)
    (file,) = into.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return str(into)


def add_noise(tensors: Tensors, *names: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for name in names:
        tensors[name] += 1e-3 * torch.randn(tensors[name].shape, generator=generator)


def exchange(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def exchange_heads(tensor: Tensor, dim: int) -> Tensor:
    heads = tensor.movedim(dim, 0).unflatten(0, (-1, WIDTH))
    order = [1, 0, *range(2, len(heads))]
    return heads[order].flatten(0, 1).movedim(0, dim)


def exchange_experts(tensors: Tensors) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        names = [f"{LAYER}.mlp.experts.{n}.{part}.weight" for n in (0, 3)]
        exchange(tensors, *names)


def change_entry(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][37, 11] += 1e-4


def set_(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


# Each: the change, the cause, and the parameters that must be named, no others.
PLANTED: dict[str, tuple[Callable[[Tensors], object], str, set[str]]] = {
    "stale": (lambda t: add_noise(t, GATE), "stale", {expert(1)}),
    "stale norm": (
        lambda t: add_noise(t, "model.layers.0.input_layernorm.weight"),
        "stale",
        {"decoder.layers.0.input_layernorm.weight"},
    ),
    "swapped layers": (
        lambda t: exchange(t, QUERY, QUERY.replace("layers.2", "layers.3")),
        "swapped",
        {f"{QKV}[q]", f"{QKV.replace('layers.2', 'layers.3')}[q]"},
    ),
    "gate and up": (
        lambda t: exchange(t, GATE, GATE.replace("gate", "up")),
        "swapped",
        {expert(1), expert(1, "linear_fc1.weight[up]")},
    ),
    "transposed": (set_(QUERY, lambda w: w.T.reshape(w.shape)), "transposed", {f"{QKV}[q]"}),
    "scaled": (set_(OUT, lambda w: w * 1.03), "scaled", {PROJECTION}),
    "scaled bias": (
        set_("model.norm.weight", lambda w: w * 2),
        "scaled",
        {"decoder.final_layernorm.weight"},
    ),
    "rounded": (set_(KEY, lambda w: w.bfloat16().float()), "rounded", {f"{QKV}[k]"}),
    "rounded to fp8": (
        set_(GATE, lambda w: w.bfloat16().to(torch.float8_e4m3fn).float()),
        "rounded",
        {expert(1)},
    ),
    "heads": (set_(QUERY, lambda w: exchange_heads(w, 0)), "permuted heads", {f"{QKV}[q]"}),
    "heads of keys": (set_(KEY, lambda w: exchange_heads(w, 0)), "permuted heads", {f"{QKV}[k]"}),
    "columns of heads": (set_(OUT, lambda w: exchange_heads(w, 1)), "permuted heads", {PROJECTION}),
    "experts": (
        exchange_experts,
        "permuted experts",
        {
            expert(n, part)
            for n in (0, 3)
            for part in ("linear_fc1.weight[gate]", "linear_fc1.weight[up]", "linear_fc2.weight")
        },
    ),
    "experts of the router": (
        set_(f"{LAYER}.mlp.gate.weight", lambda w: w[[3, 1, 2, 0]]),
        "permuted experts",
        {ROUTER},
    ),
    "one entry": (change_entry, "few entries", {EMBEDDING}),
    "zero": (set_(GATE, torch.zeros_like), "zero", {expert(1)}),
    "not loaded": (
        set_(GATE, lambda w: torch.randn(w.shape, generator=torch.Generator().manual_seed(5))),
        "unrelated",
        {expert(1)},
    ),
    "not finite": (set_(GATE, lambda w: w / 0), "not finite", {expert(1)}),
    "repeated keys": (
        set_(KEY, lambda w: torch.cat([w[:WIDTH], w[:WIDTH]])),
        "repeated",
        {f"{QKV}[k]"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_corruption_is_named(name: str, folder: str, tmp_path: Path) -> None:
    change, cause, parameters = PLANTED[name]
    other = changed(folder, tmp_path / "other", change)
    digests = digest_weights(folder), digest_weights(other)
    for found in (compare_weights(folder, other), compare_weights(*digests)):
        assert {d.name for d in found.differences} == parameters, str(found)
        assert {d.cause for d in found.differences} == {cause}, str(found)
        assert found.exit_status == 1


@pytest.mark.parametrize("family", ["gpt2", "llama3", "mixtral", "deepseek_v3"])
def test_a_file_of_digests_is_equal_to_its_source(family: str, tmp_path: Path) -> None:
    model = hugging_face.make_model(family)
    digest_weights(model).write(tmp_path / "digest.json")
    found = compare_weights(tmp_path / "digest.json", model)
    assert found.differences == ()
    assert found.exit_status == 0
    matrices = {name.partition("[")[0] for name in read_digest(tmp_path / "digest.json").parameters}
    assert found.compared > len(matrices), "queries, keys and values have digests of their own"


def test_a_transposed_matrix_may_have_another_shape(folder: str, tmp_path: Path) -> None:
    digest = digest_weights(folder)
    name = expert(1, "linear_fc2.weight")
    matrix = hugging_face.make_model("qwen3_moe").state_dict()
    packed = matrix["model.layers.2.mlp.experts.down_proj"][1].T.contiguous()
    form = ParameterForm(tuple(packed.shape), packed.dtype)
    turned = digest_parameter(name, form, lambda start, stop: packed[start:stop], digest.heads)
    other = replace(digest, parameters={**digest.parameters, name: turned})
    (found,) = compare_weights(digest, other).differences
    assert (found.name, found.cause) == (name, "transposed")
    assert_names(found.text, packed.shape[0], packed.shape[1])


def test_weights_of_two_dtypes_are_compared_in_the_narrower_one(folder: str, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    half = changed(folder, tmp_path / "half", narrow)
    found = compare_weights(folder, half)
    assert found.differences == ()
    assert found.converted == found.compared
    worse = changed(half, tmp_path / "worse", change_entry_much)
    (difference,) = compare_weights(folder, worse).differences
    assert (difference.name, difference.cause) == (EMBEDDING, "few entries")
    from_files = compare_weights(digest_weights(folder), half)
    assert {d.cause for d in from_files.differences} == {"rounded"}, "only the sample can be converted"


def change_entry_much(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][37, 11] += 1


def test_padding_of_a_vocabulary_is_not_compared(folder: str, tmp_path: Path) -> None:
    digest = digest_weights(folder)

    source = open_source(folder)
    shape = source.forms[EMBEDDING].shape
    form = source.forms[EMBEDDING]._replace(shape=(shape[0] + 8, shape[1]))
    source.forms = {**source.forms, EMBEDDING: form}
    padded = digest_source(source, source.heads, {**digest.forms})
    assert padded == digest


def test_the_command_names_what_differs(command: Command, folder: str, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other", PLANTED["heads"][0])
    command.width(200)
    written = command("weights", "digest", folder, "--out", "digest.json")
    assert written.status == 0, written.err
    done = command("weights", "compare", "digest.json", other)
    assert done.status == 1, done.err
    assert_names(done.out, f"{QKV}[q]", "permuted heads", "0<-1", "1<-0")
    same = command("weights", "compare", folder, "digest.json", "--json")
    assert same.status == 0
    assert load_json(same.out)["differences"] == []


def test_bad_input_is_one_line_before_values_are_read(
    command: Command, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {family: tmp_path / family for family in ("gpt2", "qwen3")}
    for family, into in others.items():
        hugging_face.make_model(family).save_pretrained(into)
    digest_weights(folder).write(tmp_path / "digest.json")
    text = (tmp_path / "digest.json").read_text()
    (tmp_path / "damaged.json").write_text(text.replace('"float32"', '"float64"', 1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("20")
    cases = {
        others["gpt2"]: (4, 2),
        others["qwen3"]: ("local_experts",),
        tmp_path / "damaged.json": (tmp_path / "damaged.json",),
        tmp_path / "absent": (tmp_path / "absent",),
        tmp_path / "empty": (tmp_path / "empty",),
        tmp_path / "old": ("iter_0000020",),
    }
    monkeypatch.setattr(FolderWeights, "read", None)  # no value is read
    for source, values in cases.items():
        done = command("weights", "compare", folder, source)
        assert done.status == 2, done.out
        assert done.err.count("\n") == 1, done.err
        assert not done.out
        text = done.err.replace("[", " ").replace(".", " ")
        for value in values:
            assert str(value).replace(".", " ") in text, done.err


def test_the_dump_of_a_model_has_its_digest(folder: str, tmp_path: Path) -> None:
    model = hugging_face.make_model("qwen3")
    with mf.attach(model, dumps=mf.Dump(tmp_path / "dump", "model.norm", parameters="**")):
        model(hugging_face.tokens())
    found = compare_weights(tmp_path / "dump", model)
    assert found.differences == ()
    assert found.compared == len(digest_weights(model).parameters)


def test_a_checkpoint_calls_nothing_that_it_names(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "called",)

    (tmp_path / "iter").mkdir()
    (tmp_path / "iter" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with raises(mf.FlexError, tmp_path / "iter" / ".metadata"):
        digest_weights(tmp_path / "iter")
    assert not (tmp_path / "called").exists()


def test_pieces_do_not_change_the_digest(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digest_weights(folder)
    monkeypatch.setattr(parameter_digest, "PIECE_BYTES", 200)  # one row or two
    assert digest_weights(folder) == whole


def test_a_transposed_vocabulary_is_named(tmp_path: Path) -> None:
    digest = digest_weights(hugging_face.make_model("llama"))
    table = digest.parameters[EMBEDDING]
    rows, width = table.shape
    turned = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    forms = [ParameterForm((rows, width), torch.float32), ParameterForm((width, rows), torch.float32)]
    a, b = (
        replace(
            digest,
            parameters={
                **digest.parameters,
                EMBEDDING: digest_parameter(EMBEDDING, form, lambda i, j, t=t: t[i:j], digest.heads),
            },
        )
        for form, t in zip(forms, (turned, turned.T.contiguous()), strict=True)
    )
    (found,) = compare_weights(a, b).differences
    assert (found.name, found.cause) == (EMBEDDING, "transposed")
