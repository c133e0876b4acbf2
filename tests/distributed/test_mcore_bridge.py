"""Models of mcore-bridge, on Transformer Engine's Python: its bridge converts them by the same calls."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import gpt, hugging_face
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run  # it changes functions of Megatron for good

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(
    find_spec("mcore_bridge") is None or find_spec("transformers") is None,
    reason="needs mcore-bridge: the extra mcore-bridge",
)

CASE = Case("TE, tp2", tp=2, te=True, microbatches=1, layers=hugging_face.LAYERS)
GLM4 = {**hugging_face.COMMON, "head_dim": 8}  # norms after attention and MLP, which Megatron does not have


def build(case: Case, config: Any) -> list[Any]:
    gpt.runtime(case)
    gpt.initialize(case)
    true_find = importlib.util.find_spec

    def find(name: str, *args: Any) -> Any:
        return None if name.startswith("transformer_engine") else true_find(name, *args)

    importlib.util.find_spec = find  # peft looks for the kernels of Transformer Engine
    import mcore_bridge

    wanted = {
        **mcore_bridge.hf_to_mcore_config(config),
        "tensor_model_parallel_size": case.tp,
        "padded_vocab_size": gpt.VOCABULARY,
        "params_dtype": torch.float32,
        "bf16": False,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
    }
    models: list[Any] = mcore_bridge.get_mcore_model(mcore_bridge.ModelConfig(**wanted))
    return models


def there_and_back(case: Case, folder: str, into: str, other: str) -> tuple[Tensor | None, str, str]:
    import transformers

    chunks = build(case, transformers.AutoConfig.from_pretrained(folder))
    loaded = mf.load_hf(chunks, folder)
    assert len(loaded.parameters) == 9 * hugging_face.LAYERS + 3, loaded.parameters
    assert loaded.bytes_read is None
    mf.to_hf(chunks, into, config=folder)
    errors = []
    for call in (lambda: mf.load_hf(chunks, other), lambda: mf.to_hf(chunks, into, config=folder)):
        with pytest.raises(mf.FlexError) as raised:
            call()
        errors.append(str(raised.value))
    return hugging_face.run_logits(case, chunks), errors[0], errors[1]


def test_an_architecture_outside_the_table(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Glm4Config(**GLM4)).eval()
    model.save_pretrained(tmp_path / "glm4")
    llama = transformers.LlamaConfig(**hugging_face.COMMON)
    llama.save_pretrained(tmp_path / "llama")
    folders = [str(tmp_path / name) for name in ("glm4", "back", "llama")]
    first, second = run(2, there_and_back, CASE, *folders, timeout=200)
    assert relative(first[0], hugging_face.logits_of(model)) < 1e-5
    assert first[1:] == second[1:]
    assert_names(first[1], folders[2], "llama", "glm4")
    assert folders[0] in first[2] or folders[1] in first[2]
    ours, back = (load_file(tmp_path / name / "model.safetensors") for name in ("glm4", "back"))
    for name, tensor in ours.items():
        parts = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]  # as it writes them
        found = back[name] if name in back else torch.cat([back[part] for part in parts])
        assert torch.equal(found, tensor), name
