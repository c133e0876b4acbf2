"""Weights of Hugging Face in Megatron models of every layout, against transformers on one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.conversion import checkpoints
from megatron_flex.conversion.checkpoints import FolderWeights
from tests.distributed.matrix import relative
from tests.support import gpt, hugging_face, wrapped
from tests.support.gpt import Case
from tests.support.hugging_face import FAMILIES
from tests.support.messages import assert_names
from tests.support.pages import blocks_in, mine
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "huggingface.md"
BOUND = 1e-5  # of the greatest logit
SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3")


LAYOUTS = {
    "one process": hugging_face.case("one process"),
    "tp2 pp2": hugging_face.case("tp2 pp2", tp=2, pp=2, sp=True),
    "tp2 ep2": hugging_face.case("tp2 ep2", tp=2, dp=2, ep=2, etp=1, sp=True),
    "ep2 etp2": hugging_face.case("ep2 etp2", tp=2, dp=2, ep=2, etp=2, sp=True),
    "pp2 vpp2": hugging_face.case("pp2 vpp2", pp=2, vpp=2),
    "tp4": hugging_face.case("tp4", tp=4, sp=True),
    "hybrid": hugging_face.case("hybrid", tp=2, pp=2, sp=True, hybrid=True),
}
CASES = [
    *(("one process", family) for family in FAMILIES),
    *(("tp2 pp2", family) for family in FAMILIES),
    *(("tp2 ep2", family) for family in SPARSE),
    ("ep2 etp2", "qwen3_moe"),
    *(("pp2 vpp2", family) for family in ("gpt2", "llama3", "deepseek_v3")),
    *(("tp4", family) for family in ("llama", "qwen3_moe")),  # fewer key and value heads than ranks
    *(("hybrid", family) for family in ("gpt2", "llama")),
]


class Truth(NamedTuple):
    """A model of transformers on one process: the folder that it wrote, and its logits."""

    folder: str
    logits: Tensor


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    out = {}
    for family in FAMILIES:
        model: Any = hugging_face.make_model(family)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        out[family] = Truth(str(folder), hugging_face.logits_of(model))
    return out


class Conversion(NamedTuple):
    """What a rank found: logits on the leader; the bytes of its shards, and what it read for them."""

    logits: Tensor | None
    shards: int
    read: dict[str, int]
    reported: int
    differences: tuple[str, ...]


def there_and_back(case: Case, folder: str, into: str) -> Conversion:
    """Load a folder, run the model, and write its weights."""
    arguments = mf.config_from_hf(folder, vocabulary_multiple=case.tp)
    chunks = hugging_face.build(case, arguments)
    read: dict[str, int] = {}
    true_read = FolderWeights.read

    def counted(self: FolderWeights, name: str, index: Any) -> Tensor:
        found = true_read(self, name, index)
        read[name] = read.get(name, 0) + found.nbytes
        return found

    changes.setattr(FolderWeights, "read", counted)
    loaded = mf.load_hf(chunks, folder)
    mf.to_hf(chunks, into, config=folder)
    shards = sum(t.nbytes for chunk in chunks for t in held(chunk).values())
    return Conversion(
        hugging_face.run_logits(case, chunks), shards, read, loaded.bytes_read, loaded.differences
    )


def held(chunk: nn.Module) -> dict[str, Tensor]:
    """The parameters of a chunk, and the biases of its routers."""
    buffers = {n: b for n, b in chunk.named_buffers() if n.endswith("expert_bias")}
    return {**dict(chunk.named_parameters()), **buffers}


def same_files(folder: str, other: str) -> bool:
    """Whether two folders have the same tensors, bit by bit."""
    from safetensors.torch import load_file

    first, second = (load_file(Path(f) / "model.safetensors") for f in (folder, other))
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_logits_and_bits(layout: str, family: str, truths: dict[str, Truth], tmp_path: Path) -> None:
    where, (folder, want) = LAYOUTS[layout], truths[family]
    found = run(where.world, there_and_back, where, folder, str(tmp_path / "back"))
    logits = found[0].logits[..., : want.shape[-1]]
    assert relative(logits, want) < BOUND
    assert found[0].logits[..., want.shape[-1] :].abs().sum() == 0  # rows that pad the vocabulary
    assert all(rank.differences == () for rank in found)
    assert same_files(folder, str(tmp_path / "back"))
    for number, rank in enumerate(found):
        last = number % where.tp == where.tp - 1  # of the vocabulary's rows
        padding = -hugging_face.ODD_VOCABULARY % where.tp if last and family == "gpt2" else 0
        assert rank.reported == sum(rank.read.values())
        assert rank.reported == rank.shards - 4 * gpt.HIDDEN * padding, "its shards, and no more"


# -- models in memory ------------------------------------------------------------------------------------


def through_models(case: Case, family: str, given: str) -> tuple[bool, bool]:
    """Load from a model in memory, and write to one: whether it equals the first, and whether it changed."""
    source = hugging_face.make_model(family)
    chunks = hugging_face.build(case, mf.config_from_hf(source))
    mf.load_hf(chunks, source)
    first = torch.distributed.get_rank() == 0
    target = hugging_face.make_model(family) if first or given == "everywhere" else None
    if target is not None:
        for tensor in target.state_dict().values():
            tensor.zero_()
    mf.to_hf(chunks, target)
    if target is None:
        return True, False
    pairs = zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs), True


@pytest.mark.parametrize("given", ["leader", "everywhere"])
def test_models_in_memory(given: str) -> None:
    where = LAYOUTS["tp2 ep2"]
    found = run(where.world, through_models, where, "mixtral", given)
    assert all(equal for equal, _ in found)
    assert [given == "everywhere" or rank == 0 for rank in range(where.world)] == [w for _, w in found]


def test_transformers_reads_what_was_written(truths: dict[str, Truth], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    where, (folder, want) = LAYOUTS["tp2 ep2"], truths["deepseek_v3"]
    run(where.world, write_in_files, where, folder, str(tmp_path / "back"))
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(hugging_face.logits_of(model), want)


def write_in_files(case: Case, folder: str, into: str) -> None:
    """Write a model in several files, and read it again into Megatron."""
    chunks = hugging_face.build(case, mf.config_from_hf(folder))
    mf.load_hf(chunks, folder)
    before = {n: t.clone() for n, t in held(chunks[0]).items()}
    changes.setattr(checkpoints, "MAX_FILE_BYTES", 100_000)
    mf.to_hf(chunks, into, config=folder)
    for tensor in held(chunks[0]).values():
        tensor.data.zero_()
    mf.load_hf(chunks, into)
    assert all(torch.equal(t, before[n]) for n, t in held(chunks[0]).items())


# -- optimizers ------------------------------------------------------------------------------------------


def step_of_optimizer(case: Case, folder: str, told: bool) -> bool:
    """Whether the weights are still there after a step with a learning rate of zero."""
    arguments = mf.config_from_hf(folder)
    chunks = hugging_face.build(case, arguments, bf16=True, params_dtype=torch.bfloat16)
    wrapped_chunks = wrapped.ddp([chunk.bfloat16() for chunk in chunks], use_distributed_optimizer=True)
    optimizer = wrapped.optimizer(wrapped_chunks, 0.0, bf16=True, use_distributed_optimizer=True)
    mf.load_hf(wrapped_chunks, folder, optimizer=optimizer if told else None)
    loaded = [p.detach().clone() for p in chunks[0].parameters()]
    optimizer.step()
    return all(torch.equal(p, before) for p, before in zip(chunks[0].parameters(), loaded, strict=True))


@pytest.mark.parametrize("told", [True, False])
def test_the_distributed_optimizer_keeps_the_weights(told: bool, truths: dict[str, Truth]) -> None:
    where = LAYOUTS["tp2 ep2"]
    kept = run(where.world, step_of_optimizer, where, truths["qwen3_moe"].folder, told)
    assert kept == [told] * where.world


# -- bad input -------------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Tensor], dict[str, Any]], None]


def _rename(old: str, new: str) -> Damage:
    def damage(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[new] = tensors.pop(old)

    return damage


def _remove(name: str) -> Damage:
    def damage(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[name]

    return damage


def _resize(name: str, *shape: int) -> Damage:
    return lambda tensors, config: tensors.update({name: torch.zeros(shape)})


UP, KEY = "model.layers.3.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"
NORM, WORDS = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
DAMAGES: dict[str, tuple[Damage, tuple[Any, ...]]] = {
    "missing": (_remove(UP), (UP,)),
    "extra": (
        _resize("model.layers.4.mlp.up_proj.weight", 48, 32),
        ("model.layers.4.mlp.up_proj.weight",),
    ),
    "misnamed": (_rename(NORM, f"{NORM}s"), (f"{NORM}s",)),
    "shape": (_resize(KEY, 32, 32), (KEY, (32, 32))),
    "columns": (_resize(UP, 48, 16), (UP, (48, 16))),
    "heads": (
        lambda tensors, config: config.update(num_attention_heads=8, num_key_value_heads=4),
        ("num_attention_heads", 4, 8),
    ),
    "vocabulary": (_resize(WORDS, 80, 32), (WORDS, 80)),
    "quantized": (
        lambda tensors, config: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}),
        (UP, "F8_E4M3"),
    ),
    "unknown": (lambda tensors, config: config.update(model_type="olmo"), ("olmo",)),
    "refused": (lambda tensors, config: config.update(model_type="gemma2"), ("gemma2",)),
}


def damaged(folder: str, into: Path, damage: Damage) -> str:
    """A copy of a folder, damaged."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, into)
    tensors, config = load_file(into / "model.safetensors"), json.loads((into / "config.json").read_text())
    damage(tensors, config)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    return str(into)


def refusals(case: Case, folder: str, sources: dict[str, list[str]]) -> dict[str, tuple[str, bool]]:
    """The error of each source, and whether a parameter changed."""
    chunks = hugging_face.build(case, mf.config_from_hf(folder))
    before = {n: t.clone() for n, t in held(chunks[0]).items()}
    out = {}
    for name, paths in sources.items():
        try:
            mf.load_hf(chunks, paths[torch.distributed.get_rank() % len(paths)])
            message = "no error"
        except mf.FlexError as error:
            message = str(error)
        changed = any(not torch.equal(t, before[n]) for n, t in held(chunks[0]).items())
        out[name] = message, changed
    return out


def test_bad_input_is_named_on_all_ranks_and_changes_nothing(
    truths: dict[str, Truth], tmp_path: Path
) -> None:
    folder = truths["llama"].folder
    sources = {n: [damaged(folder, tmp_path / n, damage)] for n, (damage, _) in DAMAGES.items()}
    values = {name: named for name, (_, named) in DAMAGES.items()}
    sources["one rank"], values["one rank"] = [folder, sources["missing"][0]], (UP,)
    sources["no folder"], values["no folder"] = [folder, str(tmp_path / "none")], (tmp_path / "none",)
    whole = Path(shutil.copytree(folder, tmp_path / "cut")) / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])
    sources["cut"], values["cut"] = [str(tmp_path / "cut")], (whole,)
    tokens = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 64}]}
    with_tokens = Path(shutil.copytree(folder, tmp_path / "tokens"))
    (with_tokens / "tokenizer.json").write_text(json.dumps(tokens))
    sources["tokens"], values["tokens"] = [str(with_tokens)], (65,)
    half = Path(shutil.copytree(folder, tmp_path / "half"))
    (half / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    sources["half"], values["half"] = [str(half)], ("model-00002.safetensors",)
    where = LAYOUTS["tp2 pp2"]
    first, *others = run(where.world, refusals, where, folder, sources)
    assert all(other == first for other in others)
    for name, (message, changed) in first.items():
        assert_names(message, *values[name])
        assert "\n" not in message, name
        assert not changed, name
    shown = next(b for b in blocks_in(PAGE.read_text(encoding="utf-8"), str(PAGE)) if b.language == "text")
    assert shown.text == f"{first['shape'][0]}\n"


def test_a_folder_with_weights_is_not_overwritten(truths: dict[str, Truth]) -> None:
    folder = truths["llama"].folder
    before = (Path(folder) / "model.safetensors").read_bytes()
    first, second = run(2, write_over, hugging_face.case("tp2", tp=2), folder)
    assert first == second
    there, tied, layers = first
    assert_names(there, Path(folder) / "model.safetensors")
    assert_names(tied, "share_embeddings_and_output_weights", False, True, "config_from_hf")
    assert_names(layers, "num_layers", 4, 2, "config_from_hf")
    assert (Path(folder) / "model.safetensors").read_bytes() == before


def write_over(case: Case, folder: str) -> list[str]:
    """The errors of a folder that has weights, and of configurations of other models."""
    import transformers

    chunks = hugging_face.build(case, mf.config_from_hf(folder))
    out = []
    for more in ({}, {"tie_word_embeddings": True}, {"num_hidden_layers": 2}):
        with pytest.raises(mf.FlexError) as raised:
            mf.to_hf(chunks, folder, config=transformers.AutoConfig.from_pretrained(folder, **more))
        out.append(str(raised.value))
    return out


# -- settings --------------------------------------------------------------------------------------------


def test_settings_that_differ_are_reported(truths: dict[str, Truth]) -> None:
    found, other = run(2, load_into_another, hugging_face.case("tp2", tp=2), truths["llama"].folder)
    assert found == other
    (text,) = found
    assert_names(text, "layernorm_epsilon", 0.001, 1e-06)


def load_into_another(case: Case, folder: str) -> tuple[str, ...]:
    import warnings

    chunks = hugging_face.build(case, mf.config_from_hf(folder), layernorm_epsilon=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = mf.load_hf(chunks, folder)
    told = [str(w.message) for w in caught if issubclass(w.category, mf.FlexWarning)]
    first = torch.distributed.get_rank() == 0
    text = f"the Megatron model differs from the configuration of Hugging Face: {loaded.differences[0]}"
    assert told == ([text] if first else [])
    return loaded.differences


# -- the page --------------------------------------------------------------------------------------------


def run_page(case: Case, code: str, names: dict[str, str]) -> list[str]:
    gpt.runtime(case)
    gpt.initialize(case)
    printed: list[str] = []
    exec(code, {**names, "print": lambda *words: printed.append(" ".join(map(str, words)))})
    return printed


WRITE_AGAIN = "mf.to_hf(chunks, hybrid_folder, config=folder)"


def test_the_page_runs(truths: dict[str, Truth], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    there_and_back_again, hybrid = mine(PAGE)
    (own,) = mine(DOCS / "contributing" / "extend.md")
    folder = truths["llama"].folder
    names = {"folder": folder, "other_folder": str(tmp_path / "a"), "fused_folder": str(tmp_path / "b")}
    names["hybrid_folder"] = str(tmp_path / "c")
    code = "\n".join([there_and_back_again, own, hybrid, WRITE_AGAIN])
    first, second = run(2, run_page, hugging_face.case("tp2", tp=2), code, names)
    assert first == second == [f"{6 * hugging_face.LAYERS + 3} () ()"]
    assert same_files(folder, str(tmp_path / "a"))
    assert same_files(folder, str(tmp_path / "c")), "the HybridModel has them all"
    from safetensors.torch import load_file

    separate, fused = (load_file(Path(f) / "model.safetensors") for f in (folder, names["fused_folder"]))
    attention = "model.layers.1.self_attn"
    parts = [separate[f"{attention}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(fused[f"{attention}.qkv_proj.weight"], torch.cat(parts))
