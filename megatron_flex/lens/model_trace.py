"""`with flex.interp.trace(tokens) as t`: hook points by short names; their tensors exist after it."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from megatron_flex.errors import HookError, SiteError
from megatron_flex.gpt_names import GPT_FINAL_NORM, NAMESPACE
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.lens_names import Alias, LensNames
from megatron_flex.lens.stop_point import StopPoint
from megatron_flex.lens.temporary_hooks import TemporaryCaptures, TemporaryEdits
from megatron_flex.runtime import Session

OUTPUT_NAMES = (  # modules whose hook points include more than the return value
    (r"(blocks\.\d+)\.(attn|mlp)", r"\1.hook_\2_out"),
    (r"embed", "hook_embed"),
)


class TracedTensor:
    """A tensor that is available after the block.

    Attributes:
        name: the hook point.

    Examples:
        >>> with flex.interp.trace(tokens) as trace:
        ...     stream = trace["blocks.1"].output
        >>> stream.name, stream.value.shape
        ('decoder.layers.1:output', torch.Size([2, 16, 32]))
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The tensor, on the CPU of every rank: batch first, microbatches concatenated.

        Raises:
            HookError: the block has not ended, or nothing was run in it.
        """
        if self._value is None:
            raise HookError(
                f"{self.name} has no value yet; it is available after the `with flex.interp.trace()` block"
            )
        return self._value

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {'no value yet' if self._value is None else tuple(self._value.shape)})"


class TracedModule:
    """A module, or one of its points; get `input` and `output` to read them, set them to edit."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    @property
    def input(self) -> TracedTensor:
        """The input; set it to a tensor, or a function of one, to replace it."""
        return self._trace.handle(self._trace.alias(self._name, "input"))

    @input.setter
    def input(self, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        self._trace.assign(self._trace.alias(self._name, "input"), new)

    @property
    def output(self) -> TracedTensor:
        """The output, or the tensor at a point."""
        return self._trace.handle(self._trace.alias(self._name, "output"))

    @output.setter
    def output(self, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        self._trace.assign(self._trace.alias(self._name, "output"), new)


class Trace:
    """The hook points of one model for the duration of a block. Every rank uses the same ones, in order.

    Examples:
        >>> with flex.interp.trace(tokens) as trace:
        ...     stream = trace["blocks.1"].output
        ...     trace["blocks.2.hook_mlp_out"].output = lambda tensor: 0 * tensor
        >>> stream.value.shape
        torch.Size([2, 16, 32])
    """

    def __init__(self, session: Session, weights: FullWeights, stop: StopPoint | None = None) -> None:
        self.session, self.weights, self._stop = session, weights, stop
        self.edits = TemporaryEdits(session, weights)
        self._handles: dict[str, TracedTensor] = {}
        self._reading = TemporaryCaptures(session, weights)
        self._over = False

    def __getitem__(self, name: str) -> TracedModule:
        """A hook point by a short name (`blocks.3`, `blocks.3.mlp`), a TransformerLens name, or a site's."""
        return TracedModule(self, name)

    @property
    def logits(self) -> TracedTensor:
        """The model's output, `[batch, pos, vocabulary]`; the residual stream where the run stops."""
        names, stop = self.weights.names, self._stop
        return self.handle(names.logits(self.session.adapter.logits) if stop is None else stop.residual)

    def alias(self, name: str, side: str) -> Alias:
        """Return the one hook point of a name; `side` is `input` or `output`.

        Raises:
            SiteError: the name matches none, or several.
        """
        names = self.weights.names
        expanded = expand_name(names, name, side)
        aliases = names.matching(expanded)
        if len(aliases) != 1:
            raise SiteError(f"{name!r} means {len(aliases)} hook points; name one of them")
        if self._stop is not None:
            self._stop.check(aliases)
        return aliases[0]

    def handle(self, alias: Alias) -> TracedTensor:
        """Start reading a hook point.

        Returns:
            The tensor, which has a value when the trace has finished.
        """
        if alias.name not in self._handles:
            self._open()
            self._reading.add([alias])
            self._handles[alias.name] = TracedTensor(alias.name)
        return self._handles[alias.name]

    def assign(self, alias: Alias, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        """Start editing a hook point."""
        self._open()
        if isinstance(new, TracedTensor):
            raise HookError(
                f"a handle has no value before the run; assign a tensor or a function to {alias.name}"
            )
        self.edits.add(alias, lambda current, _: new.to(current) if isinstance(new, Tensor) else new(current))

    def _open(self) -> None:
        if self._over:
            raise HookError("this trace is over; name hook points inside its block")

    def finish(self, real: int | None = None, mask: Tensor | None = None) -> None:
        """Fill the handles. Collective.

        Args:
            real: how many microbatches to keep; None for all.
            mask: `[batch, pos]`, 0 at padding; None if no mask was given.
        """
        self._reading.real, self._reading.mask = real, mask
        for name, tensor in self._reading.collect().items():
            self._handles[name]._value = tensor

    def close(self) -> None:
        """Remove all hooks."""
        self._over = True
        self.edits.remove()
        self._reading.remove()


def expand_name(names: LensNames, name: str, side: str) -> str:
    """The full name of a short name and a side: one of TransformerLens' names, or a site's."""
    name = names.resolve(name)
    prefix = NAMESPACE if names.sites.has_gpt_prefix(name) else ""
    inner = name.removeprefix(prefix)
    if name in names.aliases or ":" in inner:
        if side == "input":
            raise SiteError(f"{name} is one tensor and has no input; ask for its output")
        return name
    if f"{name}:{side}" in names.sites:
        return f"{name}:{side}"
    for pattern, template in OUTPUT_NAMES if side == "output" else ():
        matched = re.fullmatch(pattern, inner)
        full = names.resolve(prefix + matched.expand(template)) if matched else ""
        if full in names.aliases:
            return full
    return f"{prefix}{expand_module(names, inner, prefix)}:{side}"


def expand_module(names: LensNames, name: str, prefix: str) -> str:
    """The path of a module for its short name, such as `blocks.3.attn`; other names as they are."""
    if names.made_of is None:
        return name
    paths = names.paths
    parts = {f".{part}": f".{norm.module}" for part, norm in paths.norms.items()}
    for part, path in {".attn": f".{paths.attention}", **parts, "": ""}.items():
        name = re.sub(rf"^blocks\.(\d+){re.escape(part)}\b", rf"{paths.layers}.\1{path}", name)
    final_norm = GPT_FINAL_NORM if prefix else names.final_norm
    return re.sub(r"^unembed\b", paths.head, re.sub(r"^ln_final\b", final_norm, name))
