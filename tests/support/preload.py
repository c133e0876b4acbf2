"""What every worker needs, imported once in the process that workers are forked from."""

import contextlib
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed  # noqa: E402

import megatron_flex  # noqa: E402, F401

torch.set_num_threads(1)

with contextlib.suppress(ImportError):  # without Megatron the unit tests still run
    from megatron_flex import cpu

    with cpu.runtime():
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.pipeline_parallel.schedules  # noqa: F401
