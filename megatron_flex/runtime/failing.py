"""What went wrong on some ranks, raised on all."""

from __future__ import annotations

from typing import NoReturn

from megatron_flex.collectives import everyone
from megatron_flex.errors import AbsentError, HookError
from megatron_flex.mesh import Mesh


def raise_everywhere(failure: tuple[str, BaseException] | None, mesh: Mesh) -> NoReturn:
    """Raise what any rank says. Collective over the mesh, once some rank has something to say.

    Args:
        failure: this rank's, in words, and the error; None if it has none.
        mesh: the axes.

    Raises:
        HookError: on every rank.
    """
    told = everyone(failure and failure[0], mesh, [a.name for a in mesh])
    messages = list(dict.fromkeys(m for m in told if m))
    count = f" (on {sum(m is not None for m in told)} of {len(told)} ranks)" if len(told) > 1 else ""
    kind = type(failure[1]) if failure and isinstance(failure[1], AbsentError) else HookError
    raise kind("; ".join(messages) + count) from (failure and failure[1])
