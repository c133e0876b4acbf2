"""`with flex.trace(tokens) as t`: places by short names, whose tensors are there when the block is over."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from megatron_flex.errors import HookError, SiteError
from megatron_flex.lens.editing import Edits
from megatron_flex.lens.lens_names import Alias, Names
from megatron_flex.lens.reading import Reading
from megatron_flex.lens.full_weights import WholeWeights
from megatron_flex.runtime import Session

MODULE_NAMES = (  # what short names are of ours
    (r"blocks\.(\d+)\.attn\b", r"decoder.layers.\1.self_attention"),
    (r"blocks\.(\d+)\.ln1\b", r"decoder.layers.\1.input_layernorm"),
    (r"blocks\.(\d+)\.ln2\b", r"decoder.layers.\1.pre_mlp_layernorm"),
    (r"blocks\.(\d+)\b", r"decoder.layers.\1"),
    (r"unembed\b", "output_layer"),
)
OUTPUT_NAMES = (  # of which modules the output is more than what the module returns
    (r"(blocks\.\d+)\.(attn|mlp)", r"\1.hook_\2_out"),
    (r"embed", "hook_embed"),
)


class Handle:
    """A tensor that will be there when the block is over.

    Attributes:
        name: the place.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The tensor, on the CPU of every rank: batch first, microbatches one behind the other.

        Raises:
            HookError: the block is not over, or nothing was run in it.
        """
        if self._value is None:
            raise HookError(
                f"{self.name} has no value yet; it is there when the `with flex.trace()` block is over"
            )
        return self._value

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {'no value yet' if self._value is None else tuple(self._value.shape)})"


class Place:
    """A module, or one of its points; its `input` and `output` are read by asking and edited by assigning."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    @property
    def input(self) -> Handle:
        """What enters; assign a tensor, or a function of one, to replace it."""
        return self._trace.handle(self._trace.alias(self._name, "input"))

    @input.setter
    def input(self, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        self._trace.assign(self._trace.alias(self._name, "input"), new)

    @property
    def output(self) -> Handle:
        """What leaves, or what passes at a point."""
        return self._trace.handle(self._trace.alias(self._name, "output"))

    @output.setter
    def output(self, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        self._trace.assign(self._trace.alias(self._name, "output"), new)


class Trace:
    """The places of one model for the time of a block. Every rank asks for the same, in the same order."""

    def __init__(self, session: Session, weights: WholeWeights) -> None:
        self.session, self.weights = session, weights
        self.edits = Edits(session, weights)
        self._handles: dict[str, Handle] = {}
        self._reading = Reading(session, weights)
        self._over = False

    def __getitem__(self, name: str) -> Place:
        """A place by a short name (`blocks.3`, `blocks.3.mlp`), one of TransformerLens' names, or ours."""
        return Place(self, name)

    @property
    def logits(self) -> Handle:
        """What the model returns, `[batch, sequence, vocabulary]`."""
        return self.handle(self.alias(self.session.adapter.logits, "output"))

    def alias(self, name: str, side: str) -> Alias:
        """The one place that a name means; `side` is `input` or `output`.

        Raises:
            SiteError: it means none, or several.
        """
        names = self.weights.names
        wanted = expand_name(names, name, side)
        aliases = names.matching(wanted)
        if len(aliases) != 1:
            raise SiteError(f"{name!r} means {len(aliases)} places; name one of them")
        return aliases[0]

    def handle(self, alias: Alias) -> Handle:
        """Read a place from now on."""
        if alias.name not in self._handles:
            self._open()
            self._reading.add([alias])
            self._handles[alias.name] = Handle(alias.name)
        return self._handles[alias.name]

    def assign(self, alias: Alias, new: Tensor | Callable[[Tensor], Tensor]) -> None:
        """Edit a place from now on."""
        self._open()
        if isinstance(new, Handle):
            raise HookError(
                f"a handle has no value before the run; assign a tensor or a function to {alias.name}"
            )
        self.edits.add(alias, lambda seen, _: new.to(seen) if isinstance(new, Tensor) else new(seen))

    def _open(self) -> None:
        if self._over:
            raise HookError("this trace is over; ask for places inside its block")

    def finish(self, real: int | None = None) -> None:
        """Fill the handles. Collective.

        Args:
            real: how many microbatches count; None for all.
        """
        self._reading.real = real
        for name, tensor in self._reading.collect().items():
            self._handles[name]._value = tensor

    def close(self) -> None:
        """Take everything out."""
        self._over = True
        self.edits.clear()
        self._reading.stop()


def expand_name(names: Names, name: str, side: str) -> str:
    """What a short name and a side are in full: one of TransformerLens' names, or a site's."""
    if name in names.aliases or ":" in name:
        if side == "input":
            raise SiteError(f"{name} is one tensor and has no input; ask for its output")
        return name
    if f"{name}:{side}" in names.sites:
        return f"{name}:{side}"
    for pattern, theirs in OUTPUT_NAMES if side == "output" else ():
        found = re.fullmatch(pattern, name)
        if found and found.expand(theirs) in names.aliases:
            return found.expand(theirs)
    name = re.sub(r"^ln_final\b", names.final_norm, name)
    for pattern, ours in MODULE_NAMES:
        name = re.sub("^" + pattern, ours, name)
    return f"{name}:{side}"
