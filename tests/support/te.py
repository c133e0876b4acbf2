"""Transformer Engine's own Python on a CPU, with its compiled extension in plain torch (`te_extension`).

The release that scripts/constraints.txt names comes from the package index when a test first asks for it, and
is kept beside the environments. Megatron is imported anew on it, so that Megatron's wrappers (`TELinear`,
`TERowParallelLinear`, ...) and layer specs run on Transformer Engine's real modules: their autograd
functions, collectives, parameters and order of calls. Nothing is shown of its kernels, of 8-bit numbers, or
of fused attention.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import te_extension

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
PACKAGE = "transformer_engine"
OP_FUSER = "use_transformer_engine_op_fuser"
FUSED_RESIDUAL = "fused_residual_rmsnorm"
HIDDEN = ("gemm_input", "partial", "scores", "probs")  # what its kernels keep to themselves


@cache
def version() -> str:
    pin = re.search(rf"^{PACKAGE}==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pin is not None, f"{CONSTRAINTS} must have {PACKAGE}"
    return pin.group(1).strip()


def folder() -> Path:
    """Where its Python is or will be: beside the environments, as it must not be importable in them."""
    venvs = Path(os.environ.get("FLEX_VENVS") or ROOT / ".venvs")
    return venvs / f"{PACKAGE}-{version()}"


@cache
def _fetch() -> str:
    """Have `folder()`; why it cannot be had, or nothing."""
    target = folder()
    if target.exists():
        return ""
    target.parent.mkdir(exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    pip = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary", ":all:", "--target", str(draft), f"{PACKAGE}=={version()}"]
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1]
        if not target.exists():  # another process may have been faster
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return ""


def require() -> None:
    """Skip the test where Transformer Engine's Python cannot be had."""
    if reason := _fetch():
        pytest.skip(f"{PACKAGE} {version()} cannot be fetched: {reason}")


# Kernels and exports, whose packages (triton, onnxscript) are not needed otherwise
KERNELS = ("cross_entropy", "grouped_dbias_dscales", "mhc", "pad", "permutation")
UNUSED = ("onnx_extensions", "triton", *(f"triton.{name}" for name in KERNELS))


class _Unused(ModuleType):
    """A module of Transformer Engine from which others import names that nothing here calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _on_any_device(owner: type, name: str) -> None:
    """Let a method of Transformer Engine, which refuses tensors that are not on a GPU, take any."""
    method = getattr(owner, name)

    @wraps(method)
    def on_any_device(*args: Any, **kwargs: Any) -> Any:
        if "is_cuda" in vars(torch.Tensor):  # attention calls the other method
            return method(*args, **kwargs)
        torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
        try:
            return method(*args, **kwargs)
        finally:
            del torch.Tensor.is_cuda

    setattr(owner, name, on_any_device)


def stand_in() -> None:
    """Let this process's Megatron find Transformer Engine; to be called before a model is built."""
    if PACKAGE in sys.modules:
        return
    imported = [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
    for name in imported:
        del sys.modules[name]
    sys.path.insert(0, str(folder()))
    sys.modules[te_extension.NAME] = te_extension.module()
    for name in (f"{PACKAGE}.pytorch.{n}" for n in UNUSED):
        sys.modules[name] = _Unused(name)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # load no library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it has not found its extension yet
        from transformer_engine import common
    del os.environ["NVTE_PROJECT_BUILDING"]
    common.load_framework_extension = lambda framework: None
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    _on_any_device(TransformerEngineBaseModule, "prepare_forward")
    _on_any_device(DotProductAttention, "forward")
    for name in imported:  # again, as a rank must be left with the modules that it had
        import_module(name)


def visible(sites: list[str], settings: dict[str, Any]) -> list[str]:
    """The sites that are left of a local model's when its layers are Transformer Engine's, by hand."""
    if settings.get(OP_FUSER):
        sites = [s for s in sites if ".mlp.linear_fc" not in s]
    latent = any("linear_kv_down_proj" in s for s in sites)  # there the first norm stands by itself
    fused = ("kv_layernorm:output", ".q_layernorm:output") if latent else ("input_layernorm:output",)
    experts = any(s.endswith("mlp.router:input") for s in sites)  # and here the second
    fused += () if experts else ("pre_mlp_layernorm:output",)
    mamba = re.compile(r"\.layers\.\d+\.norm:output")  # a norm inside Mamba's first linear
    in_layers = [s for s in sites if ".layers." in s]
    gone = {s for s in in_layers if s.partition(":")[2] in HIDDEN or s.endswith(fused) or mamba.search(s)}
    return [s for s in sites if s not in gone]
