"""What every worker needs, imported once in the process that workers are forked from."""

import contextlib
import gc
import importlib
import os
import pkgutil
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed  # noqa: E402

import megatron_flex  # noqa: E402
from tests.support import fingerprint, rank  # noqa: E402, F401

torch.set_num_threads(1)

with contextlib.suppress(ImportError):  # without Megatron the unit tests still run
    from megatron_flex import cpu

    with cpu.runtime():
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.transformer.moe.moe_layer  # noqa: F401

# What hooks import when they are first used costs each new rank a tenth of a second.
for package in ("adapters", "collectives", "dump", "edits", "layout", "model", "runtime", "statistics"):
    for found in pkgutil.walk_packages(
        [f"{megatron_flex.__path__[0]}/{package}"], f"megatron_flex.{package}."
    ):
        with contextlib.suppress(ImportError):  # what some module needs is not installed
            importlib.import_module(found.name)

gc.collect()
gc.freeze()  # what is loaded here stays: a rank's own collections need not look at it
