"""Runs the tests of FlexModel (2023) from a checkout, with `flex_model` aliased to `megatron_flex.compat`.

A plugin of pytest (`-p tests.support.flexmodel`) for its tests on one rank, and a script for those on several
(`torchrun ... -m tests.support.flexmodel MODULE REPORT [LEFT OUT]`): it calls every registered test, as the
project's own launcher does. Only what a test needs of its machine is replaced: the GPUs, by the runtime for
CPUs; the weights of OPT-350m on their cluster, by random ones in fp32 in a model with fewer of its modules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ALIASED, OURS = "flex_model", "megatron_flex.compat"
ORIGINAL = "FLEX_FLEXMODEL_ORIGINAL"  # set: run the original package instead, to compare
WEIGHTS = "/model-weights/opt-350m"
PROMPTS = (
    "It's a nice day we're having",
    "The capital of Canada is",
    "What should I eat for dinner tonight?",
    "There's about three people going to",
)


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `flex_model.x` as `megatron_flex.compat.x`: the same module object under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an aliased name; None for any other."""
        if fullname != ALIASED and not fullname.startswith(ALIASED + "."):
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Import the module that an aliased name stands for."""
        module = importlib.import_module(OURS + spec.name.removeprefix(ALIASED))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put back the module's own spec: the module has been executed under its own name."""
        module.__spec__ = self._spec


def save_small_opt(folder: Path) -> None:
    """Save a model with the modules of OPT-350m, five layers fewer, and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=15104,
        hidden_size=1024,
        num_hidden_layers=19,
        num_attention_heads=16,
        ffn_dim=64,
        word_embed_proj_dim=512,
        max_position_embeddings=128,
        do_layer_norm_before=False,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(PROMPTS, trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        folder
    )


def _read_from(folder: str) -> None:
    """Let `from_pretrained` read the folder instead of the one on their cluster."""
    import transformers

    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        original = loader.from_pretrained

        def load(name: str, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            kwargs.pop("torch_dtype", None)  # CPUs without instructions for bf16 take five times as long
            return _original(folder if name == WEIGHTS else name, *args, **kwargs)

        loader.from_pretrained = load


def _use_gloo(function: Any) -> Any:
    """A function of torch.distributed that makes gloo's process groups where nccl is asked for."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return function(*("gloo" if arg == "nccl" else arg for arg in args), **kwargs)

    return made


def _without_device(function: Any) -> Any:
    """The constructor of FullyShardedDataParallel without what needs a GPU."""
    import torch

    def made(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs | {"sync_module_states": False, "device_id": torch.device("cpu")})

    return made


def prepare() -> None:
    """Use a CPU for a GPU, gloo for nccl, and the aliases."""
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    from megatron_flex import cpu

    cpu.enable()
    sharded: Any = FullyShardedDataParallel
    sharded.__init__ = _without_device(sharded.__init__)
    for name in ("init_process_group", "new_group"):
        setattr(distributed, name, _use_gloo(getattr(distributed, name)))
    if not os.environ.get(ORIGINAL):
        sys.meta_path.insert(0, AliasFinder())


def pytest_configure(config: Any) -> None:
    """Called by pytest before it collects their tests."""
    prepare()
    folder = os.environ.get("FLEX_FLEXMODEL_WEIGHTS") or tempfile.mkdtemp(prefix="flex-opt-")
    if not (Path(folder) / "config.json").exists():
        save_small_opt(Path(folder))
    _read_from(folder)


def main(module: str, report: str, *left_out: str) -> None:
    """Run the tests of one module on this rank, and write what came of each: None, or its error."""
    prepare()
    folder, full = f"_test.multi_gpu.{module.rpartition('.')[0]}", f"_test.multi_gpu.{module}"
    package = ModuleType(folder)  # theirs imports all of its files, also those of internals
    package.__path__ = [str(Path(*folder.split(".")).resolve())]
    sys.modules[folder] = package
    importlib.import_module(full)
    from _test.multi_gpu.registry import get_multigpu_test_registry

    registered = [f for functions in get_multigpu_test_registry().values() for f in functions.values()]
    functions = {f.__name__: f for f in registered if f.__module__ == full and f.__name__ not in left_out}
    results: dict[str, str | None] = {}
    for name, function in functions.items():
        try:
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other ranks may be inside a collective
    Path(f"{report}.{os.environ['RANK']}").write_text(json.dumps([list(functions), results]), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
