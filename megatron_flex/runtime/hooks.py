"""HookFunction, and the list of hooks that a session holds."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from megatron_flex.adapters import ParameterSite
from megatron_flex.errors import HookError
from megatron_flex.runtime.groups import Selection, checked_tags
from megatron_flex.sites import Pattern, Site, SiteTable, in_words

HookType = Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"]
GradientScale = Literal["raw", "loss"]
Run = Literal["replicated", "leader"]
EditingFunction = Callable[[nn.Module | None, Tensor, Namespace, nn.ModuleDict], Tensor]
POINTS = {
    "forward": "output",
    "forward_pre": "input",
    "full_backward": "input",
    "full_backward_pre": "output",
    "tensor": "output",
}


class HookFunction:
    """What is wanted at a place: read the whole tensor, and edit it if an editing function is given.

    Args:
        module_name: a module's name (`decoder.layers.17.mlp.linear_fc1`), a site's name with its point
            (`...linear_proj:partial`), or a pattern over either: a glob (`*` within one step of the path,
            `**` across), a compiled regular expression, or a function of a Site that says yes or no (it is
            asked about every point).
        expected_shape: the whole's shape, None for a dim that may have any length. Checked, never needed.
        editing_function: single-device code `(current_module, inputs, save_ctx, modules) -> Tensor`, which
            returns a tensor of the shape and dtype it got. `run` says where.
        unpack_idx: which tensor of a tuple output; every site known so far is the first.
        hook_type: `forward` and `forward_pre` see a module's output and input, `full_backward` and
            `full_backward_pre` the gradients of its input and output, `tensor` the gradient of a site or of
            a parameter.
        save: whether what was seen, before the edit, is kept in `output_dict`.
        gradient_scale: of hooks on gradients. `raw` gives what the framework sends back: under Megatron's
            schedules the gradient of the microbatch's loss times loss scale and context parallel size over
            the number of microbatches (with `calculate_per_token_loss`, times loss scale alone). `loss`
            gives that of the microbatch's own loss, as one device without a schedule has it, and an edit's
            result goes back with the factor; fp16 gradients then come in fp32.
        run: `replicated`: every rank that holds a part of the tensor runs the editing function on the same
            whole tensor and the same random stream, and nothing is sent back. `leader`: one rank of each
            model replica's stage runs it, with its side effects, and the others get what it returns. Under
            activation recomputation either runs again in the backward pass.
        tags: names of groups that the hook belongs to; `flex.hooks()` chooses among them.
    """

    def __init__(
        self,
        module_name: Pattern,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int = 0,
        *,
        hook_type: HookType = "forward",
        save: bool = True,
        gradient_scale: GradientScale = "raw",
        run: Run = "replicated",
        tags: Iterable[str] = (),
    ) -> None:
        if hook_type not in POINTS:
            raise HookError(f"hook_type {hook_type!r} is none of {', '.join(POINTS)}")
        if editing_function is not None and not callable(editing_function):
            raise HookError(f"editing_function {editing_function!r} is not callable; pass a function or None")
        if editing_function is not None:
            check_signature(editing_function)
        if gradient_scale not in ("raw", "loss"):
            raise HookError(f"gradient_scale {gradient_scale!r} is none of raw, loss")
        if run not in ("replicated", "leader"):
            raise HookError(f"run {run!r} is none of replicated, leader")
        if unpack_idx != 0:
            raise HookError(
                f"unpack_idx={unpack_idx}: only an output's first tensor has a known layout; use unpack_idx=0"
            )
        if not save and editing_function is None:
            raise HookError(
                f"hook on {in_words(module_name)!r} neither saves nor edits; give it an editing_function"
            )
        self.module_name = module_name
        self.expected_shape = None if expected_shape is None else tuple(expected_shape)
        self.editing_function = editing_function
        self.hook_type: HookType = hook_type
        self.save = save
        self.gradient_scale: GradientScale = gradient_scale
        self.run: Run = run
        self.tags = checked_tags(tags)

    @property
    def where(self) -> str:
        """The pattern in words."""
        return in_words(self.module_name)

    @property
    def backward(self) -> bool:
        """Whether the hook sees gradients."""
        return self.hook_type in ("full_backward", "full_backward_pre", "tensor")

    @property
    def can_fail(self) -> bool:
        """Whether the hook does something that may go wrong on some rank: all ranks then ask each other."""
        return self.editing_function is not None or self.expected_shape is not None

    def describe(self) -> str:
        """Return what all ranks must have in common of this hook, in words."""
        edit = getattr(self.editing_function, "__qualname__", type(self.editing_function).__name__)
        scale = " on the loss's scale" if self.gradient_scale == "loss" else ""
        place = " on the leader" if self.run == "leader" else ""
        told = f" editing by {edit}{place}" if self.editing_function else ""
        return f"{self.hook_type} on {self.where}{scale}{told}"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Compare a whole tensor's shape with the expected one.

        Raises:
            HookError: they differ.
        """
        want = self.expected_shape
        if want is None:
            return
        if len(want) != len(shape) or any(w is not None and w != n for w, n in zip(want, shape, strict=True)):
            raise HookError(
                f"the tensor has shape {tuple(shape)}, not the expected {want}; drop expected_shape"
            )


def check_signature(editing_function: EditingFunction) -> None:
    """See whether a function takes what it will be given, before a step has begun.

    Raises:
        HookError: it does not.
    """
    try:
        signature = inspect.signature(editing_function)
    except (TypeError, ValueError):  # something built in that does not tell
        return
    try:
        signature.bind(None, None, None, None)
    except TypeError as error:
        name = getattr(editing_function, "__qualname__", type(editing_function).__name__)
        raise HookError(
            f"editing function {name}{signature} cannot be called with the four arguments (current_module, "
            f"inputs, save_ctx, modules): {error}; take all four, by position"
        ) from None


@dataclass(slots=True)
class Registered:
    """A hook with the places it stands at, on whichever rank they are."""

    hook: HookFunction
    sites: list[Site] = field(default_factory=list)
    parameters: list[ParameterSite] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names of the places."""
        return {s.name for s in self.sites} | {p.name for p in self.parameters}


class Registry:
    """The hooks of a session in the order of registration; `version` changes whenever they do.

    Attributes:
        entries: all that are registered.
        active: those among them that stand in this step.
        selection: which groups are wanted; `adopt` makes it count.
    """

    def __init__(self, sites: SiteTable, parameters: dict[str, ParameterSite]) -> None:
        self._sites, self._parameters = sites, parameters
        self.entries: list[Registered] = []
        self.active: list[Registered] = []
        self.selection = Selection()
        self._adopted, self._stale = Selection(), False
        self.version = 0
        self._at: dict[str, list[HookFunction]] = {}

    def add(self, hook: HookFunction) -> Registered:
        """Register a hook everywhere its pattern matches.

        Raises:
            SiteError: nothing matches, or the configuration hides the place.
            HookError: the hook is registered already, or wants a gradient on a scale that cannot be.
        """
        if any(e.hook is hook for e in self.entries):
            raise HookError(f"this HookFunction on {hook.where!r} is registered already; make another one")
        entry = Registered(hook)
        name = hook.module_name
        if hook.hook_type == "tensor" and isinstance(name, str) and name in self._parameters:
            told = self._parameters[name]
            if told.hidden:
                raise HookError(f"no hook can stand at the gradient of {told.name}: {told.hidden}")
            entry.parameters = [told]
        else:
            entry.sites = self._sites.match(hook.module_name, POINTS[hook.hook_type])
            for site in entry.sites:
                if site.hidden:
                    raise HookError(f"no hook can stand at {site.name}: {site.hidden}")
                if site.fixed and (hook.backward or hook.editing_function is not None):
                    what = "has no gradient to be had" if hook.backward else "can be read and not edited"
                    raise HookError(f"{site.name} {what}: {site.fixed}")
        self._check_scale(entry)
        self._set([*self.entries, entry])
        return entry

    def _check_scale(self, entry: Registered) -> None:
        scale = entry.hook.gradient_scale
        if scale != "raw" and not entry.hook.backward:
            raise HookError(
                f"gradient_scale={scale!r} on {entry.hook.where!r}: a {entry.hook.hook_type} hook sees "
                "no gradient; drop it or choose a backward hook"
            )
        for name in sorted(entry.names) if entry.hook.backward else ():
            if any(h.backward and h.gradient_scale != scale for h in self.at(name)):
                raise HookError(
                    f"another hook has the gradient at {name} on another scale than {scale!r}; give both the "
                    "same gradient_scale"
                )

    def remove(self, hook: HookFunction) -> None:
        """Take a hook out again.

        Raises:
            HookError: it is not registered.
        """
        kept = [e for e in self.entries if e.hook is not hook]
        if len(kept) == len(self.entries):
            raise HookError(f"this HookFunction on {hook.where!r} is not registered; nothing to remove")
        self._set(kept)

    def clear(self) -> None:
        """Take all hooks out."""
        self._set([])

    def _set(self, entries: list[Registered]) -> None:
        self.entries = entries
        self._refresh()

    def _refresh(self) -> None:
        self.version += 1
        self.active = [e for e in self.entries if self._adopted.takes(e.hook.tags)]
        self._at = {}
        for entry in self.active:
            for name in entry.names:
                self._at.setdefault(name, []).append(entry.hook)

    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each group, in the order of registration; a group without any does not exist."""
        out: dict[str, list[HookFunction]] = {}
        for entry in self.entries:
            for tag in sorted(entry.hook.tags):
                out.setdefault(tag, []).append(entry.hook)
        return out

    def retagged(self) -> None:
        """Tags of hooks have changed, which counts from the next step on."""
        self._stale = True

    def adopt(self) -> bool:
        """Make the wanted selection count; whether that changes anything."""
        if self._adopted == self.selection and not self._stale:
            return False
        self._adopted, self._stale = self.selection, False
        self._refresh()
        return True

    def at(self, name: str) -> list[HookFunction]:
        """The active hooks at a site or parameter, in the order of registration."""
        return self._at.get(name, [])

    def describe(self) -> str:
        """Return all hooks in words, for comparing ranks."""
        idle = len(self.entries) - len(self.active)
        told = [e.hook.describe() for e in self.active] + ([f"{idle} not active"] if idle else [])
        return ", ".join(told)


def call_editing(
    hook: HookFunction, module: Any, whole: Tensor, context: Namespace, modules: nn.ModuleDict
) -> Tensor:
    """Run an editing function and check what it returns.

    Raises:
        HookError: it returns no tensor, or one of another shape, dtype or device.
    """
    assert hook.editing_function is not None
    shape, dtype, device = whole.shape, whole.dtype, whole.device
    out = hook.editing_function(module, whole, context, modules)
    if not isinstance(out, Tensor):
        raise HookError(
            f"the editing function returned {type(out).__name__}; return a tensor like the one it got"
        )
    for what, got, want in (
        ("shape", tuple(out.shape), tuple(shape)),
        ("dtype", out.dtype, dtype),
        ("device", out.device, device),
    ):
        if got != want:
            raise HookError(
                f"the editing function returned {what} {got} for {want}; return the {what} it got"
            )
    return out
