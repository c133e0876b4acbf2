"""The collectives of hooks in a pass: gather a site's full tensor, scatter it, mark errors inside
collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor

from megatron_flex.collectives import Route, gather_full, gather_rows, scatter_full, scatter_rows
from megatron_flex.errors import BrokenError, FlexError, describe_error
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.edit_failures import global_rank


def gather_at_site(local: Tensor, layout: Layout, route: Route | None, mesh: Mesh) -> Tensor:
    """Gather the full tensor of a site on every rank: expert rows by their route, others by the layout.

    Raises:
        FlexError: the tensor does not fit its layout, on all ranks that hold shards of it.
        BrokenError: the collective failed.
    """
    with guard_collective():
        return gather_rows(local, route) if route else gather_full(local, layout, mesh)


def scatter_at_site(full: Tensor, local: Tensor, layout: Layout, route: Route | None, mesh: Mesh) -> Tensor:
    """Return this rank's shard of a site's full tensor; errors as for `gather_at_site`."""
    with guard_collective():
        if route:
            return scatter_rows(full, local, route)
        return scatter_full(full, local, layout, mesh)


@contextmanager
def guard_collective() -> Iterator[None]:
    """Raise errors of a collective at once: if only this rank has the error, the others wait for this rank.

    Raises:
        BrokenError: an exception from inside, unless it follows from the layout.
    """
    try:
        yield
    except Exception as error:  # raised under its own name: the other ranks are in the collective
        raise_broken(error)


def raise_broken(error: Exception) -> NoReturn:
    """Raise an error that was raised inside a collective, so that this rank does not go on.

    Raises:
        FlexError: the error, if it follows from the layout.
        BrokenError: otherwise.
    """
    if isinstance(error, FlexError):
        raise error
    raise BrokenError(
        f"a collective of a hook failed, {describe_error(error)}; this rank cannot continue",
        ranks=[global_rank()],
    ) from error
