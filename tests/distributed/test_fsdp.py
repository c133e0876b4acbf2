"""Models in PyTorch's FullyShardedDataParallel and under its `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import proof, wrapping


def flat(original: bool) -> proof.Built:
    return wrapping.built(wrapping.flat(original=original))


def hybrid() -> proof.Built:
    return wrapping.built(wrapping.hybrid())


def full(shape: tuple[int, ...], options: dict[str, Any]) -> proof.Built:
    return wrapping.built(wrapping.full(shape, **options))


CASES = {
    "FSDP1 dp2": (2, flat, True),
    "FSDP1 dp2, flat parameters only": (2, flat, False),
    "FSDP1 hybrid 2x2": (4, hybrid),
    "FSDP2 dp2": (2, full, (2,), {}),
    "FSDP2 dp4, not resharded after forward": (4, full, (4,), {"reshard_after_forward": False}),
    "HSDP 2x2": (4, full, (2, 2), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_against_one_process(case: str, cells: list[Any]) -> None:
    world, build, *args = CASES[case]
    proof.judge(
        proof.compare("PyTorch", case, world, build, *args, sites=wrapping.FEW, edits=wrapping.FEW[2:3]),
        cells,
    )
