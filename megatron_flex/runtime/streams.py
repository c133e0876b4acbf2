"""Random numbers in editing functions: the same stream on every rank, and again in recomputation."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_flex.config import flex_config
from megatron_flex.runtime.captures import Key


@contextmanager
def seed_generators(key: Key, index: int, like: Tensor) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python from the key for the time of an edit, and put them back.

    Generators that a person made are theirs.

    Args:
        key: which site, step, microbatch and call; each has a stream of its own.
        index: the place of the hook among those at its site; so has each of these.
        like: a tensor on the device whose generator the edit would use.
    """
    devices = [like.device] if like.device.type == "cuda" else []
    seed = zlib.crc32(f"{flex_config.seed}/{key.site}/{key.step}/{key.microbatch}/{key.call}/{index}".encode())
    with torch.random.fork_rng(devices, device_type="cuda"), _seed_other_generators(seed):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def _seed_other_generators(seed: int) -> Iterator[None]:
    """The global generators of Python and, where somebody has imported it, of numpy."""
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
