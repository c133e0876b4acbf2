"""Selections that tests ask for, beside the same in plain code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# The site; what is selected there; what is made of it; the same of one process's tensor in plain code.
Wish = tuple[str, dict[str, Any], Callable[[Any], Any], Callable[[Tensor], Any]]


def wished(wishes: Mapping[str, Wish], kind: str) -> list[Any]:
    """A hook of this type for each wish, which keeps what it reads under the wish's name."""
    import megatron_flex as mf

    return [
        mf.HookFunction(
            site,
            hook_type=kind,
            select=mf.Select(**said) if said else None,
            reduce=made(mf.reduce),
            keep_as=name,
        )
        for name, (site, said, made, _) in wishes.items()
    ]
