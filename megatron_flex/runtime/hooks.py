"""HookFunction: what a person wants at a place."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

from torch import Tensor, nn

from megatron_flex.errors import FlexError, HookError, described
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hook_groups import check_tags
from megatron_flex.runtime.selection import INDICES, Reduction, Select, CaptureSelection
from megatron_flex.runtime.takers import TensorSink
from megatron_flex.sites import EDITED_SUFFIX, GRADIENT_SUFFIX, Pattern, Site, describe_pattern

HookType = Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"]
GradientScale = Literal["raw", "loss"]
Run = Literal["replicated", "leader"]
OnError = Literal["raise", "skip"]
EditingFunction = Callable[[nn.Module | None, Tensor, Namespace, nn.ModuleDict], Tensor]
POINT_OF_TYPE = {
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
        expected_shape: the whole's shape, None for a dim that may have any length. Checked, never needed,
            but in a plain module whose tensors are cut: a dim that is a tensor parallel rank's part of the
            expected one is taken as cut.
        editing_function: single-device code `(current_module, inputs, save_ctx, modules) -> Tensor`, which
            returns a tensor of the shape and dtype it got. `run` says where. One with a method
            `for_site(site)` is asked for one to use at each site, and one with `for_pass(key)` at each pass.
        unpack_idx: which of the tensors that pass there, counted depth first through tuples, lists, mappings
            and dataclasses; arguments given by keyword come behind the others, and a negative number counts
            from the end. Not every one of a framework's has a known layout.
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
        on_error: what becomes of an exception in the editing function, or of a result of another shape, dtype
            or device. `raise`: all ranks raise it when the step is over. `skip`: that pass goes on unedited,
            on all ranks that hold the tensor (they tell each other, one flag for each pass), is counted in
            `flex.skipped`, and so goes its recomputation; what the function did to `save_ctx` and trainable
            modules is taken back, but for objects that it changed in place. Once the edited tensor has been
            used it is too late: an error in its backward pass, or in its recomputation alone, is raised.
        enabled: whether the hook is on before `flex.select()` switches it on.
        select: which entries of the whole are kept, all if None; it is taken from the shard, and no more is
            sent. An edit at the place has the whole all the same.
        reduce: what is kept of these, such as `reduce.mean("s")`.
        keep_as: kept under the site's name and this, `...:output.NAME`, so that several hooks may keep
            different things of one place.

    Attributes:
        wanted: `select` and `reduce`; None if all is kept.
        taker: the dump or statistics at work that is handed what passes, if the hook stands for one.
        behind: whether what leaves the edits at its place is kept too, under the site's name with EDITED.
        records: whether its editing function has tensors kept by itself.
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
        on_error: OnError = "raise",
        enabled: bool = True,
        select: Select | None = None,
        reduce: Reduction | None = None,
        keep_as: str = "",
    ) -> None:
        if hook_type not in POINT_OF_TYPE:
            raise HookError(f"hook_type {hook_type!r} is none of {', '.join(POINT_OF_TYPE)}")
        if editing_function is not None and not callable(editing_function):
            raise HookError(f"editing_function {editing_function!r} is not callable; pass a function or None")
        if editing_function is not None:
            check_signature(editing_function)
        if gradient_scale not in ("raw", "loss"):
            raise HookError(f"gradient_scale {gradient_scale!r} is none of raw, loss")
        if run not in ("replicated", "leader"):
            raise HookError(f"run {run!r} is none of replicated, leader")
        if on_error not in ("raise", "skip"):
            raise HookError(f"on_error {on_error!r} is none of raise, skip")
        if on_error == "skip" and editing_function is None:
            raise HookError("on_error='skip' leaves an edit out, and there is none; give an editing_function")
        if not isinstance(unpack_idx, int):
            raise HookError(f"unpack_idx {unpack_idx!r} is not a number; count tensors from 0")
        if not save and editing_function is None:
            raise HookError(
                f"hook on {describe_pattern(module_name)!r} neither saves nor edits; give it an editing_function"
            )
        check_capture(select, reduce, keep_as, save)
        self.module_name = module_name
        self.expected_shape = None if expected_shape is None else tuple(expected_shape)
        self.editing_function = editing_function
        self.unpack_idx = unpack_idx
        self.hook_type: HookType = hook_type
        self.save = save
        self.gradient_scale: GradientScale = gradient_scale
        self.run: Run = run
        self.on_error: OnError = on_error
        self.tags = check_tags(tags)
        self.enabled = enabled
        self.behind = self.records = False
        self.tensor_sink: TensorSink | None = None
        self.wanted = None if select is None and reduce is None else CaptureSelection(select or Select(), reduce)
        self.keep_as = keep_as
        self._sure = True
        self._at: dict[str, EditingFunction] = {}

    def stand(self, sites: Iterable[Site]) -> None:
        """Let an editing function that asks for it know where it stands.

        Raises:
            HookError: it says that it cannot stand there.
        """
        edit, sites = self.editing_function, list(sites)
        if self.wanted is not None:
            checked = [self.wanted.check(s) for s in sites]
            self._sure = all(checked)
        if edit is not None and hasattr(edit, "for_site"):
            self._at = {s.name: for_site(edit, s) for s in sites}

    def editing_at(self, key: Key) -> EditingFunction | None:
        """The editing function for one pass through a place."""
        edit = self.editing_of(key.site)
        return edit and for_pass(edit, key)

    def editing_of(self, site: str) -> EditingFunction | None:
        """The editing function at a place, for whichever pass."""
        return self._at.get(site.removesuffix(GRADIENT_SUFFIX), self.editing_function)

    @property
    def where(self) -> str:
        """The pattern in words."""
        return describe_pattern(self.module_name)

    @property
    def backward(self) -> bool:
        """Whether the hook sees gradients."""
        return self.hook_type in ("full_backward", "full_backward_pre", "tensor")

    @property
    def brings(self) -> bool:
        """Whether something that passes is kept for the leader; what a taker has stays on its rank."""
        return self.tensor_sink is None and (self.save or self.behind or self.records)

    @property
    def can_fail(self) -> bool:
        """Whether the hook does something that may go wrong on some rank: all ranks then ask each other."""
        asks = self.expected_shape is not None or self.unpack_idx != 0 or self.on_error == "skip"
        return asks or not self._sure or (self.editing_function is not None and not self._sure_edit)

    @property
    def _sure_edit(self) -> bool:
        known = bool(self._at) and all(getattr(e, "sure", False) for e in self._at.values())
        return known and self.run == "replicated"

    def describe(self) -> str:
        """Return what all ranks must have in common of this hook, in words."""
        edit = describe_edit(self.editing_function)
        scale = " on the loss's scale" if self.gradient_scale == "loss" else ""
        place = " on the leader" if self.run == "leader" else ""
        place += ", left out where it fails" if self.on_error == "skip" else ""
        wording = f" editing by {edit}{place}" if self.editing_function else ""
        leaf = f"[{self.unpack_idx}]" if self.unpack_idx else ""
        shape = f" expecting {self.expected_shape}" if self.expected_shape is not None else ""
        kept = f" keeping {self.wanted.describe()}" if self.wanted and self.save else ""
        kept += f" as {self.keep_as}" if self.keep_as else ""
        return f"{self.hook_type} on {self.where}{leaf}{scale}{shape}{wording}{kept}"

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


def for_site(edit: EditingFunction, site: Site) -> EditingFunction:
    """The editing function for a site, if it has a method `for_site(site)` that makes one; else itself."""
    bind = getattr(edit, "for_site", None)
    try:
        return edit if bind is None else cast(EditingFunction, bind(site))
    except FlexError:
        raise
    except Exception as error:  # what a person wrote, before any step: it never stands, whatever on_error
        raise HookError(
            f"{describe_edit(edit)} cannot stand at {site.name}: for_site raised {described(error)}"
        ) from error


def for_pass(edit: EditingFunction, key: Key) -> EditingFunction:
    """The editing function for one pass, if it has a method `for_pass(key)` that makes one; else itself."""
    bind = getattr(edit, "for_pass", None)
    return edit if bind is None else cast(EditingFunction, bind(key))


def describe_edit(edit: EditingFunction | None) -> str:
    """An editing function in words: what it says of itself, or its name."""
    wording = getattr(edit, "in_words", None)
    return str(wording()) if wording else getattr(edit, "__qualname__", type(edit).__name__)


def check_capture(select: object, reduce: object, keep_as: str, save: bool) -> None:
    """See whether what a hook is to keep can be understood.

    Raises:
        HookError: it cannot.
    """
    if select is not None and not isinstance(select, Select):
        raise HookError(f"select={select!r} is no Select; give one, as Select(positions=-1)")
    if reduce is not None and not isinstance(reduce, Reduction):
        raise HookError(f"reduce={reduce!r} is none of reduce.mean, sum, norm, topk, dot; give such a one")
    if (select or reduce or keep_as) and not save:
        raise HookError("select, reduce and keep_as say what is kept, and nothing is; leave out save=False")
    reserved = {n.removeprefix(".") for n in (GRADIENT_SUFFIX, EDITED_SUFFIX, INDICES)}
    if keep_as and (not keep_as.isidentifier() or keep_as in reserved):
        raise HookError(
            f"keep_as={keep_as!r} is no name; take letters, digits and _, and none of "
            + ", ".join(sorted(reserved))
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
        name = describe_edit(editing_function)
        raise HookError(
            f"editing function {name}{signature} cannot be called with the four arguments (current_module, "
            f"inputs, save_ctx, modules): {error}; take all four, by position"
        ) from None
