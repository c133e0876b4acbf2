"""Layouts at places of plain modules: what hooks' `expected_shape` says, and whether ranks infer the same."""

from __future__ import annotations

import zlib
from functools import partial

from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import any_rank
from megatron_flex.errors import HookError
from megatron_flex.layout import AXIS, Layout, declared
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.editing import Editing
from megatron_flex.runtime.registry import Registry
from megatron_flex.sites import Site

BITS = 0x7FFFFFFF  # of a number that ranks compare
DIFFER = (
    "tensor parallel ranks have parts of different shapes, not all the whole and not all equal parts of the "
    "expected_shape; hook a place where they have"
)


class Declared:
    """Infers layouts where no framework tells them.

    A layout follows from a rank's own tensor. Before an edit the ranks compare what they inferred, as they
    go on to send by it; what is only read is compared when the step is over.
    """

    def __init__(self, registry: Registry, editing: Editing, mesh: Mesh) -> None:
        self._registry, self._editing = registry, editing
        self._tp = Mesh((mesh[AXIS],))
        self._size = mesh[AXIS].size
        self._inferred = 0

    def layout(self, site: Site | ParameterSite, key: Key, local: Tensor) -> Layout:
        """The layout of a tensor at a site, alike on all tensor parallel ranks.

        Collective over `tp` if a hook with an editing function stands there and one expects a shape.
        """
        whole = self._registry.expected(site.name)
        if whole is None or self._size == 1:
            return declared(local.shape, None, 1)
        hooks = self._registry.at(site.name)
        hook = next((h for h in hooks if h.expected_shape is not None), hooks[0])
        found = self._editing.guard(hook, key, partial(declared, local.shape, whole, self._size))
        code = _code(found)
        if not any(h.editing_function for h in hooks):
            self._inferred = zlib.crc32(f"{self._inferred} {key.site} {code}".encode()) & BITS
        elif self._differ(code):
            self._editing.guard(hook, key, _refuse)
            found = None
        return found or declared(local.shape, None, 1)

    def differ(self) -> bool:
        """Whether ranks inferred different layouts for what they read in this step. Collective over `tp`."""
        code, self._inferred = self._inferred, 0
        return self._registry.expects and self._differ(code)

    def _differ(self, code: int) -> bool:
        most, least = any_rank([code, -code], self._tp)
        return most != -least


def _code(layout: Layout | None) -> int:
    """A number that says which dims are cut."""
    return 0 if layout is None else 1 + sum(2**i for i, d in enumerate(layout.dims) if d.cuts)


def _refuse() -> None:
    raise HookError(DIFFER)
