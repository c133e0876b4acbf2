"""One random generator: calls for the CUDA generator use that of the CPU.

Megatron's tracker saves, seeds and restores the CUDA generator around the regions that must draw alike
(or unlike) over tensor parallel ranks, and replays it in recomputation. On a CPU the draws come from the
CPU generator, so it is the one to save, seed and restore. Without this dropout is silently mis-seeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import dataloader

from megatron_flex.cpu.patches import Patches

_TRACKER_LOGGER = "megatron.core.tensor_parallel.random"
_TRACKER_WARNING = "CPU RNG state changed"


class DefaultGenerators:
    """`torch.cuda.default_generators`: every index gives the CPU generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


class HostGenerator:
    """The second generator, which only data loaders use.

    On a GPU a data loader draws from the host's generator, and only the first tensor parallel rank has a
    loader. With one generator for both, that rank alone would move on, and dropout of a replicated
    activation would differ over the ranks. So loaders run on a state that is put away afterwards.
    """

    def __init__(self) -> None:
        self._state: Any = None

    def reset(self) -> None:
        """Forget the state: the next loader starts from the device's, as after `torch.manual_seed`."""
        self._state = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the host's state inside, and keep the device's unchanged."""
        device_state = torch.default_generator.get_state()
        if self._state is not None:
            torch.default_generator.set_state(self._state)
        try:
            yield
        finally:
            self._state = torch.default_generator.get_state()
            torch.default_generator.set_state(device_state)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, run inside `drawing()`."""

        def drawing(*args: Any, **kwargs: Any) -> Any:
            with self.drawing():
                return function(*args, **kwargs)

        return drawing


def _lazy_call(callback: Callable[[], Any], **_: Any) -> None:
    """`torch.cuda` keeps such calls until the driver is up, which never happens here: call now."""
    callback()


def _seeding_functions(host: HostGenerator) -> dict[str, Callable[..., Any]]:
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        # `torch.manual_seed` ends here after it seeded the CPU generator with the same number.
        generator.manual_seed(int(seed))
        host.reset()

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [generator.get_state()]

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for state in list(new_states)[:1]:
            generator.set_state(state)

    def seed() -> None:
        generator.seed()

    def seed_all() -> None:
        # `torch.seed` chose a seed for the CPU generator just before; a second choice would hide it.
        host.reset()

    def initial_seed() -> int:
        return generator.initial_seed()

    functions = (manual_seed, manual_seed_all, get_rng_state, set_rng_state, get_rng_state_all)
    return {f.__name__: f for f in (*functions, set_rng_state_all, seed, seed_all, initial_seed)}


def _not_the_tracker_warning(record: logging.LogRecord) -> bool:
    return _TRACKER_WARNING not in str(record.msg)


def install_random_generator(patches: Patches) -> None:
    """Map the CUDA generator onto the CPU's, and give data loaders a state of their own."""
    host = HostGenerator()
    for name, function in _seeding_functions(host).items():
        patches.set(torch.cuda.random, name, function)
        patches.set(torch.cuda, name, function)
    patches.set(torch.cuda, "default_generators", DefaultGenerators())
    patches.set(torch.cuda, "_lazy_call", _lazy_call)
    patches.set(torch.cuda.random, "_lazy_call", _lazy_call)
    loading = dataloader._BaseDataLoaderIter
    for name in ("__init__", "__next__"):
        patches.set(loading, name, host.around(vars(loading)[name]))
    # Megatron's tracker warns when the CPU generator moves inside a region that forks the CUDA one.
    logger = logging.getLogger(_TRACKER_LOGGER)
    logger.addFilter(_not_the_tracker_warning)
    patches.on_restore(lambda: logger.removeFilter(_not_the_tracker_warning))
