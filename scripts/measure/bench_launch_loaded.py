"""What the ranks of scripts/bench --launch are forked with: all that a pretrain script imports."""

import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

from megatron_flex import cpu  # noqa: E402

torch.set_num_threads(1)

with cpu.runtime():
    import megatron.training.training  # noqa: F401
