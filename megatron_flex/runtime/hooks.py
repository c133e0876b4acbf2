"""HookFunction, a user's request at a hook point, and the hooks by which dumps and statistics receive
tensors.

Also here: which tensors cannot be hooked, and why.
"""

from __future__ import annotations

import inspect
import re
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from megatron_flex.collectives import Route
from megatron_flex.errors import FlexError, FlexWarning, HookError, describe_error, error_attributes
from megatron_flex.layout import Layout
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_traits import needs_dim_names, traits_of
from megatron_flex.runtime.hook_groups import check_groups
from megatron_flex.runtime.selection import INDICES, CaptureSelection, Reduction, Select
from megatron_flex.runtime.sink_cycle import SinkCycle
from megatron_flex.sites import EDITED_SUFFIX, GRADIENT_SUFFIX, DimNames, Pattern, Site, describe_pattern


class TensorSink(Protocol):
    """An active dump or statistics on this rank, which receives tensors from hooks.

    Attributes:
        cycle: the steps that the sink records.
    """

    cycle: SinkCycle

    @property
    def needs_dim_names(self) -> bool:
        """Whether what it records depends on which dim is which."""

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Record what the sink needs of a local tensor. Nothing is communicated, and no error is raised.

        Args:
            key: the tensor's key; the site name of a gradient ends with GRAD.
            local: this rank's shard; it may be overwritten later.
            layout: the layout of the shard.
            route: the route of expert rows, whose `layout` is that of each row.
            factor: divides a gradient to get the gradient of the microbatch's own loss.

        Returns:
            Why the tensor cannot be recorded, if that is an error of the step (see `SinkCycle.omits_site`);
            otherwise empty.
        """


class FeatureTap(Protocol):
    """What takes the tensors that continue in the model as features, for ranks of another stage."""

    @property
    def joins_gradients(self) -> bool:
        """Whether gradients of the features are added to those of the tensors, in recomputation too."""

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        """Take this rank's tensor after all edits, and return the one that continues in the model."""


HookType = Literal["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"]
GradientScale = Literal["raw", "loss"]
Run = Literal["replicated", "once"]
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
    """A request at a hook point: capture the full tensor, and edit it if an editing function is given.

    Args:
        module_name: a module's name (`decoder.layers.17.mlp.linear_fc1`), a site's name with its point
            (`...linear_proj:partial`), or a pattern over either: a glob (`*` within one component of the
            path, `**` across components), a compiled regular expression, or a predicate on a Site (called for
            every point).
        editing_function: single-device code `(current_module, inputs, save_ctx, modules) -> Tensor`, which
            returns a tensor of the shape and dtype of `inputs`. `run` selects the ranks that run it. An
            object with a method `for_site(site)` returns a function for each site, with `for_pass(key)` for
            each pass.
        expected_shape: the full tensor's shape, None for a dim of any length. Optional, and checked; required
            only for a plain module with sharded tensors: a dim whose local length is the expected length
            divided by the tensor parallel size is inferred to be sharded.
        unpack_idx: the index of the tensor at the hook point, counted depth first through tuples, lists,
            mappings and dataclasses; keyword arguments follow the positional ones, and a negative index
            counts from the end. Not every tensor of a framework's modules has a known layout.
        hook_type: `forward` and `forward_pre` see a module's output and input, `full_backward` and
            `full_backward_pre` the gradients of its input and output, `tensor` the gradient of a site or of
            a parameter.
        save: whether the tensor before the edit is captured in `output_dict`.
        gradient_scale: for hooks on gradients. `raw` is the gradient that the framework propagates: under
            Megatron's schedules the gradient of the microbatch's loss times loss scale and context parallel
            size over the number of microbatches (with `calculate_per_token_loss`, times loss scale alone).
            `loss` is the gradient of the microbatch's own loss, as on one device without a schedule; the
            result of an edit is multiplied by the factor again. fp16 gradients are then fp32.
        run: `replicated`: every rank that holds a shard of the tensor runs the editing function on the same
            full tensor with the same random stream, and nothing is sent back. `once`: one rank of each model
            replica's stage runs it, with its side effects, and the other ranks receive the result. Under
            activation recomputation either runs again in the backward pass.
        groups: names of groups that the hook belongs to; `flex.hooks()` selects groups.
        on_error: the handling of an exception in the editing function, or of a result of another shape, dtype
            or device. `raise`: all ranks raise it at the end of the step. `skip`: all ranks that hold the
            tensor leave it unedited in that pass and in its recomputation (they exchange one flag for each
            pass), and `flex.skipped` counts the pass; changes of `save_ctx` and trainable modules by the
            function are undone, except for objects changed in place. Once the edited tensor has been used
            this is no longer possible: an error in its backward pass, or in its recomputation alone, is
            raised.
        enabled: whether the hook is on before `flex.select()` switches it on.
        select: the entries of the full tensor to capture, None for all. Each rank selects from its shard and
            sends no more than that. An edit at the hook point still sees the full tensor.
        reduce: the reduction of the selected entries to capture, such as `reduce.mean("s")`.
        keep_as: the suffix of the capture's name, `...:output.NAME`, so that several hooks may capture
            different things at one hook point.

    Attributes:
        selection: `select` and `reduce`; None if the full tensor is captured.
        tensor_sink: the dump or statistics that receives the tensors, if the hook belongs to one.
        feature_tap: what takes the tensors as features, if the hook belongs to some.
        captures_edited: whether the tensor after all edits of the hook point is captured too, with the suffix
            EDITED.
        records: whether the editing function itself captures tensors.
        registrations: the number of models in which the hook is registered; while there is one, the other
            attributes cannot be assigned.

    Raises:
        HookError: an argument has a value that it cannot have, name and function are swapped, the editing
            function cannot be called with four arguments, or the hook neither captures nor edits.

    Examples:
        >>> HookFunction("decoder.layers.*.mlp.linear_fc1")  # captures the output of a module in every layer
        <HookFunction forward on decoder.layers.*.mlp.linear_fc1>
        >>> HookFunction("decoder.layers.2", edits.scale(2.0), hook_type="forward_pre")
        <HookFunction forward_pre on decoder.layers.2 editing by scale(2.0)>
        >>> HookFunction("decoder.layers.2:mid", select=Select(positions=-1), reduce=reduce.norm("h"))
        <HookFunction forward on decoder.layers.2:mid keeping positions -1, then norm(h)>
    """

    def __init__(
        self,
        module_name: Pattern,
        editing_function: EditingFunction | None = None,
        *,
        expected_shape: Sequence[int | None] | None = None,
        unpack_idx: int = 0,
        hook_type: HookType = "forward",
        save: bool = True,
        gradient_scale: GradientScale = "raw",
        run: Run = "replicated",
        groups: Iterable[str] = (),
        on_error: OnError = "raise",
        enabled: bool = True,
        select: Select | None = None,
        reduce: Reduction | None = None,
        keep_as: str = "",
    ) -> None:
        named = isinstance(module_name, (str, re.Pattern))
        with error_attributes(site=describe_pattern(module_name) if named else None):
            check_name(module_name, editing_function, expected_shape)
            words = (
                ("hook_type", hook_type, tuple(POINT_OF_TYPE)),
                ("gradient_scale", gradient_scale, get_args(GradientScale)),
                ("run", run, get_args(Run)),
                ("on_error", on_error, get_args(OnError)),
            )
            for name, word, allowed in words:
                if word not in allowed:
                    raise HookError(f"{name} {word!r} is not one of {', '.join(allowed)}")
            if editing_function is not None and not callable(editing_function):
                raise HookError(
                    f"editing_function {editing_function!r} is not callable; pass a function or None"
                )
            if editing_function is not None:
                check_signature(editing_function)
                traits_of(editing_function)  # raises for an invalid declaration
            if on_error == "skip" and editing_function is None:
                raise HookError("on_error='skip' skips an edit, but there is no editing_function; pass one")
            if not isinstance(unpack_idx, int):
                raise HookError(f"unpack_idx {unpack_idx!r} is not a number; count tensors from 0")
            if not save and editing_function is None:
                raise HookError(
                    f"hook on {describe_pattern(module_name)!r} neither saves nor edits; give it an "
                    "editing_function"
                )
            check_capture(select, reduce, keep_as, save)
            selected_groups = check_groups(groups)
        self.module_name = module_name
        self.expected_shape = None if expected_shape is None else tuple(expected_shape)
        self.editing_function = editing_function
        self.unpack_idx = unpack_idx
        self.hook_type: HookType = hook_type
        self.save = save
        self.gradient_scale: GradientScale = gradient_scale
        self.run: Run = run
        self.on_error: OnError = on_error
        self.groups = selected_groups
        self.enabled = enabled
        self.captures_edited = self.records = False
        self.tensor_sink: TensorSink | None = None
        self.feature_tap: FeatureTap | None = None
        self.selection = (
            None if select is None and reduce is None else CaptureSelection(select or Select(), reduce)
        )
        self.keep_as = keep_as
        self._at: dict[str, EditingFunction] = {}
        self._known_dims: dict[str, DimNames] = {}
        self.registrations: int = 0  # models whose passes are made from these attributes

    def __setattr__(self, name: str, value: object) -> None:
        public = not name.startswith("_") and name != "registrations"
        if public and vars(self).get("registrations") and getattr(self, name, None) != value:
            raise HookError(
                f"the hook on {self.where!r} is registered, so that {name} cannot become {value!r}: what "
                "runs at its hook points is made already; remove the hook, and register another one",
                hook=self,
            )
        super().__setattr__(name, value)

    @property
    def needs_dim_names(self) -> bool:
        """Whether the hook depends on the names of the dims, so that calls are traced where those vary."""
        edit = self.editing_function
        named = edit is not None and needs_dim_names(edit)
        selects = self.selection is not None and self.selection.needs_dim_names
        return named or selects or (self.tensor_sink is not None and self.tensor_sink.needs_dim_names)

    def name_dims(self, site: Site, known: DimNames) -> None:
        """Bind the editing function to what is known of the dims of the tensor that passes a site.

        Raises:
            HookError: a dim that the editing function needs is unknown.
        """
        if self._known_dims.get(site.name) != known:
            edit = self.editing_function
            if edit is not None and hasattr(edit, "for_site"):
                self._at[site.name] = for_site(edit, replace(site, known=known))
            self._known_dims[site.name] = known

    def known_dims(self, capture: str) -> DimNames | None:
        """What is known of the dims of a tensor that is captured under a name; None if its layout tells."""
        return self._known_dims.get(self.site_of(capture)) if self._known_dims else None

    def site_of(self, capture: str) -> str:
        """The site of a tensor that is captured under a name."""
        name = capture.removesuffix(f".{self.keep_as}") if self.keep_as else capture
        return name.removesuffix(EDITED_SUFFIX).removesuffix(GRADIENT_SUFFIX)

    def bind_sites(self, sites: Iterable[Site]) -> None:
        """Bind the hook's sites: call `for_site` of the editing function, and check `select` and `reduce`.

        Raises:
            HookError: the editing function cannot be used at a site.

        Examples:
            >>> hook = HookFunction("decoder.layers.*", edits.zero(positions=0))
            >>> hook.bind_sites(flex.sites("decoder.layers.*"))
        """
        edit, sites = self.editing_function, list(sites)
        self._known_dims = {}
        if self.selection is not None:
            for site in sites:
                self.selection.check(site)
        if edit is not None and hasattr(edit, "for_site"):
            self._at = {s.name: for_site(edit, s) for s in sites}

    def editing_at(self, key: Key) -> EditingFunction | None:
        """Return the editing function for one pass through a site; None without one.

        Examples:
            >>> from megatron_flex.runtime import Key
            >>> hook = HookFunction("decoder.layers.0", edits.zero())
            >>> hook.editing_at(Key("decoder.layers.0:output", step=0, iteration=0, microbatch=0, call=0))
            zero()
        """
        edit = self.editing_of(key.site)
        return edit and for_pass(edit, key)

    def editing_of(self, site: str) -> EditingFunction | None:
        """Return the editing function at a site, for any pass; None without one.

        Examples:
            >>> hook = HookFunction("decoder.layers.0", edits.zero())
            >>> hook.editing_of("decoder.layers.0:output")
            zero()
        """
        return self._at.get(site.removesuffix(GRADIENT_SUFFIX), self.editing_function)

    @property
    def where(self) -> str:
        """The pattern as text."""
        return describe_pattern(self.module_name)

    @property
    def backward(self) -> bool:
        """Whether the hook sees gradients."""
        return self.hook_type in ("full_backward", "full_backward_pre", "tensor")

    @property
    def sends_captures(self) -> bool:
        """Whether captures are sent to the leader; what a sink records stays on its rank."""
        return self.tensor_sink is None and (self.save or self.captures_edited or self.records)

    @property
    def can_fail(self) -> bool:
        """Whether ranks exchange at the end of a step whether the hook failed. True for a user's hooks.

        False for a dump or statistics: a tensor that cannot be recorded is omitted, or the sink reports the
        failure itself. Exception: the first step of a site that the user named.
        """
        return self.tensor_sink is None or self.unpack_idx != 0 or self.tensor_sink.cycle.is_strict

    def __repr__(self) -> str:
        return f"<HookFunction {self.describe()}>"

    def describe(self) -> str:
        """Return a text that must be the same for this hook on all ranks.

        Examples:
            >>> hook = HookFunction("decoder.layers.2", edits.scale(2.0), run="once")
            >>> hook.describe()
            'forward on decoder.layers.2 editing by scale(2.0) once'
        """
        edit = describe_edit(self.editing_function)
        scale = " on the loss's scale" if self.gradient_scale == "loss" else ""
        place = " once" if self.run == "once" else ""
        place += ", left out where it fails" if self.on_error == "skip" else ""
        wording = f" editing by {edit}{place}" if self.editing_function else ""
        leaf = f"[{self.unpack_idx}]" if self.unpack_idx else ""
        shape = f" expecting {self.expected_shape}" if self.expected_shape is not None else ""
        capture = f" keeping {self.selection.describe()}" if self.selection and self.save else ""
        capture += f" as {self.keep_as}" if self.keep_as else ""
        return f"{self.hook_type} on {self.where}{leaf}{scale}{shape}{wording}{capture}"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Compare a full tensor's shape with the expected one.

        Raises:
            HookError: the shapes differ.

        Examples:
            >>> hook = HookFunction("decoder.layers.2", expected_shape=(16, None, 32))
            >>> hook.check_shape((16, 2, 32))
        """
        want = self.expected_shape
        if want is None:
            return
        if len(want) != len(shape) or any(w is not None and w != n for w, n in zip(want, shape, strict=True)):
            raise HookError(
                f"the tensor has shape {tuple(shape)}, not the expected {want}; drop expected_shape"
            )


def for_site(edit: EditingFunction, site: Site) -> EditingFunction:
    """The editing function for a site: the result of its method `for_site(site)`, or itself without one."""
    bind = getattr(edit, "for_site", None)
    try:
        return edit if bind is None else cast(EditingFunction, bind(site))
    except FlexError:
        raise
    except Exception as error:  # a user's code: the hook is not registered, whatever on_error
        raise HookError(
            f"{describe_edit(edit)} cannot be used at {site.name}: for_site raised {describe_error(error)}",
            site=site.name,
        ) from error


def for_pass(edit: EditingFunction, key: Key) -> EditingFunction:
    """The editing function for one pass: the result of its method `for_pass(key)`, or itself without one."""
    bind = getattr(edit, "for_pass", None)
    return edit if bind is None else cast(EditingFunction, bind(key))


def describe_edit(edit: EditingFunction | None) -> str:
    """An editing function as text: the result of its method `agreement_text()`, or its name."""
    wording = getattr(edit, "agreement_text", None)
    return str(wording()) if wording else getattr(edit, "__qualname__", type(edit).__name__)


def check_capture(select: object, reduce: object, keep_as: str, save: bool) -> None:
    """Validate what a hook captures.

    Raises:
        HookError: an argument is invalid.
    """
    if select is not None and not isinstance(select, Select):
        raise HookError(f"select={select!r} is not a Select; pass one, such as Select(positions=-1)")
    if reduce is not None and not isinstance(reduce, Reduction):
        raise HookError(
            f"reduce={reduce!r} is not one of reduce.mean, sum, norm, topk, dot; give one of them"
        )
    if (select or reduce or keep_as) and not save:
        raise HookError("select, reduce and keep_as need a capture; leave out save=False")
    reserved = {n.removeprefix(".") for n in (GRADIENT_SUFFIX, EDITED_SUFFIX, INDICES)}
    if keep_as and (not keep_as.isidentifier() or keep_as in reserved):
        raise HookError(
            f"keep_as={keep_as!r} is not a name; take letters, digits and _, and none of "
            + ", ".join(sorted(reserved))
        )


def name_function(function: object) -> str:
    """The name of a function, to be shown in an example of a call."""
    name = str(getattr(function, "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]
    return "function" if "<" in name else name


def check_name(module_name: object, editing_function: object, expected_shape: object) -> None:
    """Check that the arguments of a HookFunction are not in each other's places.

    Raises:
        HookError: name and function are swapped, the function or the shape is in the place of the other, or
            the name is a list, a module or something else.
    """
    if isinstance(editing_function, str) and callable(module_name):
        raise HookError(
            f"editing_function={editing_function!r} is a name, and the name is first: "
            f"HookFunction({editing_function!r}, {name_function(module_name)})"
        )
    if isinstance(editing_function, (tuple, list, torch.Size)):
        raise HookError(
            f"editing_function={editing_function!r} is a shape: "
            f"HookFunction(name, expected_shape={tuple(editing_function)!r})"
        )
    if isinstance(expected_shape, str) or callable(expected_shape):
        raise HookError(f"expected_shape={expected_shape!r} is not a shape; give a tuple of lengths, or None")
    if isinstance(module_name, (str, re.Pattern)):
        return
    if isinstance(module_name, nn.Module):
        raise HookError(
            f"module_name is a {type(module_name).__name__}; give its name, as flex.sites() lists it, such "
            "as 'decoder.layers.3'"
        )
    if not callable(module_name):
        raise HookError(
            f"module_name={module_name!r} is not a name; give one name or pattern, such as "
            "'decoder.layers.3' or 'decoder.layers.*'; several names are several hooks"
        )
    try:
        inspect.signature(module_name).bind(None)
    except TypeError as error:
        name = name_function(module_name)
        raise HookError(
            f"module_name is the function {name}, which cannot be called with a Site ({error}); an editing "
            f"function is given as HookFunction('decoder.layers.3', {name})"
        ) from None
    except ValueError:  # a builtin without a signature
        return


def check_signature(editing_function: EditingFunction) -> None:
    """Check, before a step begins, that a function accepts the four arguments of an editing function.

    Raises:
        HookError: it does not accept them.
    """
    try:
        signature = inspect.signature(editing_function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, None, None, None)
    except TypeError as error:
        name = describe_edit(editing_function)
        raise HookError(
            f"editing function {name}{signature} cannot be called with the four arguments (current_module, "
            f"inputs, save_ctx, modules): {error}; take all four, by position"
        ) from None


class SinkHook(HookFunction):
    """A hook that captures nothing and edits nothing, and passes each tensor to its sink."""

    def __init__(
        self,
        tensor_sink: TensorSink,
        description: str,
        places: frozenset[str],
        hook_type: HookType,
        index: int,
        groups: Iterable[str],
    ) -> None:
        def chosen(site: Site) -> bool:
            return site.name in places

        chosen.__qualname__ = f"{description}: {len(places)} hook points"
        super().__init__(chosen, hook_type=hook_type, groups=groups, unpack_idx=index)
        self.save, self.tensor_sink = False, tensor_sink


def make_sink_hooks(
    tensor_sink: TensorSink,
    description: str,
    values: Sequence[Site],
    gradients: Sequence[Site],
    groups: Iterable[str],
) -> list[HookFunction]:
    """Make the hooks of a sink, as few as possible.

    Args:
        tensor_sink: the sink that receives the tensors.
        description: a text for the sink, the same on all ranks.
        values: the sites whose tensors the sink receives.
        gradients: the sites whose gradients the sink receives.
        groups: groups that the hooks belong to.
    """
    out: list[HookFunction] = []
    kinds: tuple[tuple[HookType, Sequence[Site]], ...] = (("forward", values), ("tensor", gradients))
    for kind, sites in kinds:
        for index in sorted({s.index for s in sites}):
            places = frozenset(s.place for s in sites if s.index == index)
            out.append(SinkHook(tensor_sink, description, places, kind, index, groups))
    return out


class FeatureHook(HookFunction):
    """A hook that captures nothing and edits nothing, and passes each tensor to its features."""

    def __init__(self, feature_tap: FeatureTap, description: str, places: frozenset[str]) -> None:
        def chosen(site: Site) -> bool:
            return site.name in places

        chosen.__qualname__ = description
        super().__init__(chosen)
        self.save, self.feature_tap = False, feature_tap


FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # not in every version of torch


@lru_cache(64)
def is_low_precision(kind: type) -> bool:
    """Whether a class is one of Transformer Engine's for 8 or 4 bits, whose tensors report a wider dtype."""
    return any(c.__module__.startswith("transformer_engine.") for c in kind.__mro__)


def explain_unhookable(tensor: Tensor) -> str:
    """Why a tensor cannot be hooked; empty if it can. An edit alone may get a tensor without values."""
    if tensor.is_nested:
        return f"it is a nested tensor of {tensor.dtype}, whose parts have shapes of their own"
    if tensor.layout is not torch.strided:
        return f"it is a sparse tensor ({tensor.layout}, {tensor.dtype}); make it dense (to_dense())"
    if tensor.is_quantized:
        return f"it is a quantised tensor ({tensor.dtype}); hook what dequantize() gives"
    if is_low_precision(type(tensor)):
        return f"it is a {type(tensor).__name__} of Transformer Engine, which hooks can only read"
    if tensor.dtype is FLOAT4:
        return f"it is of {FLOAT4}, two values in a byte, of which torch computes nothing"
    if tensor.is_meta:
        return f"it is on the meta device ({tensor.dtype}) and has no values"
    return ""


def explain_unmeasurable(tensor: Tensor) -> str:
    """Why a tensor cannot have statistics; empty if it can."""
    if tensor.is_complex():
        return f"it is of {tensor.dtype}, which has no order"
    return ""


def warn_unhookable(site: str, why: str, known: set[str]) -> None:
    """Warn, once for each site, that its hooks are omitted."""
    if site not in known:
        known.add(site)
        warnings.warn(f"hooks at {site} are left out: {why}", FlexWarning, stacklevel=2)
