"""Random numbers in editing functions: the same stream on every rank, and again in recomputation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_flex.knobs import knobs
from megatron_flex.runtime.captures import Key


@contextmanager
def same_stream(key: Key, like: Tensor) -> Iterator[None]:
    """Seed torch's generators from the key for the time of an edit, and put them back.

    Args:
        key: which site, step, microbatch and call; each has a stream of its own.
        like: a tensor on the device whose generator the edit would use.
    """
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices, device_type="cuda"):
        name = zlib.crc32(f"{knobs.seed}/{key.site}/{key.step}/{key.microbatch}/{key.call}".encode())
        torch.default_generator.manual_seed(name)
        if devices:
            torch.cuda.manual_seed(name)
        yield
