"""Handles hooks at a site whose tensor is not available: an error, a warning, or an omission from a dump."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.errors import AbsentError, HookError
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.hooks import HookFunction, warn_unhookable
from megatron_flex.sites import Site
from megatron_flex.wording import count_words


class SiteRejection:
    """Handles hooks at a site whose tensor is not available."""

    def __init__(self, editing: EditEnvironment) -> None:
        self.editing = editing
        self._obstacles: set[str] = set()  # sites with tensors that cannot be hooked

    def omit_hooks(self, name: str, why: str, hooks: list[HookFunction]) -> None:
        """Omit the hooks of a tensor that cannot be hooked, with a warning and no error."""
        self.editing.fired.update(hooks)
        warn_unhookable(name, why, self._obstacles)

    def reject(self, hook: HookFunction, name: str, key: Key, why: str, refuse: Callable[[], None]) -> None:
        """Reject a tensor of unknown layout: an error for a hook; a dump selected by a pattern omits the
        tensor.
        """
        self.editing.fired.add(hook)
        if hook.tensor_sink is None or not hook.tensor_sink.cycle.omits_site(name, why):
            self.editing.guard(hook, key, refuse)


def raise_no_layout(site: Site, why: str) -> None:
    """Raise that no rule has a layout for the tensor."""
    raise HookError(
        f"the layout of {site.name} is not known: {why}; hook another point, or give expected_shape"
    )


def raise_absent(site: Site, count: int) -> None:
    """Raise that a call had fewer tensors than the hook's index requires."""
    raise AbsentError(
        f"unpack_idx={site.index} is out of range: the hook point has {count_words(count, 'tensor')}; None "
        "and numbers do not count"
    )


def raise_captured(name: str) -> None:
    """Raise that a CUDA graph is being captured."""
    raise HookError(
        f"{name} is reached while a CUDA graph is captured (torch.cuda.graph, make_graphed_callables, "
        "mode='reduce-overhead'), and its replays run no hook; remove the hooks first, or capture no graph "
        "around this module",
        site=name,
    )


def raise_partial_gradient(name: str, why: str) -> None:
    """Raise that each rank has only a part of the gradient of a trainable module."""
    raise HookError(f"the gradient at {name} is not complete, {why}; use trainable modules elsewhere")


def raise_no_gradient_layout(name: str, why: str, takes_shape: bool = False) -> None:
    """Raise that the layout of a gradient is not known.

    Args:
        name: the site or parameter.
        why: the reason.
        takes_shape: whether the full shape of the tensor would tell the layout.
    """
    shape = "give its full shape as the hook's expected_shape, or " if takes_shape else ""
    raise HookError(
        f"the layout of the gradient at {name} is not known: {why}; {shape}hook the gradient elsewhere"
    )
