"""Tries editing functions on a small tensor before a step: whether they run, and what they return."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_flex.adapters import Adapter, ParameterSite
from megatron_flex.collectives import gather_distinct, is_leader
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexWarning, HookError, describe_error
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.edit_environment import call_editing_function, seed_generators
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import (
    SYNCHRONIZES,
    computes_only,
    unwrap_function,
    warn_of_mistakes,
)
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.hooks import EditingFunction, HookFunction, describe_edit
from megatron_flex.sites import Site

MAX_TRIAL_ENTRIES = 1 << 20  # bounds the tensor of a trial at registration
DEFAULT_LENGTHS = {"b": 2}  # in place of lengths that depend on the data
DEFAULT_LENGTH = 8
WAITS = {"__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__"}  # methods without a name


class TrialFailure(NamedTuple):
    """The failure of a trial.

    Attributes:
        text: the message.
        site: the name of the hook point.
        wrong: whether the function's result is invalid; otherwise the function raised `error`.
        error: the exception.
        place: the file and line of the user's code that raised, or those of the function.
    """

    text: str
    site: str
    wrong: bool
    error: BaseException | None
    place: tuple[str, int]


class DryRun:
    """Tries editing functions; one for each session.

    Attributes:
        on_gpu: whether the model is on a device with asynchronous execution.
        lengths: the lengths of `s` and `b` that are certain.
        dtype: that the model's tensors usually have.
    """

    def __init__(self, adapter: Adapter, parameters: Iterable[ParameterSite], mesh: Mesh) -> None:
        tensors: list[Tensor] = [p.parameter for p in parameters if p.parameter is not None]
        tensor = next((t for t in tensors if t.is_floating_point()), torch.empty(0, dtype=torch.float32))
        self._device, self.dtype, self._mesh = tensor.device, tensor.dtype, mesh
        self.on_gpu = self._device.type == "cuda"
        self._dtypes = list(dict.fromkeys([self.dtype, torch.float32]))
        self.lengths: Mapping[str, int] = adapter.lengths()

    def consider(self, entry: HookEntry) -> None:
        """Warn of likely mistakes in a hook's function, and try the function if it only computes.

        Raises:
            HookError: the result is invalid; or the function raises, and the lengths are those of a step,
                where it would raise too.
        """
        hook = entry.hook
        edit = hook.editing_function
        if edit is None:
            return
        warn_of_mistakes(edit, hook.describe, self.on_gpu, hook.run == "once")
        if not flex_config.dry_run or not entry.sites:
            return
        try:
            self._try(hook, edit, entry.sites[0])
        except Exception as error:  # the user's function, which steps would skip as well
            if hook.on_error == "raise":
                raise
            text = f"{error}; on_error='skip': passes where it fails are left unedited"
            warnings.warn(text, FlexWarning, 6)

    def _try(self, hook: HookFunction, edit: EditingFunction, site: Site) -> None:
        shape, certain = self._choose_shape(site)
        if len(shape) != len(site.dims) or not shape or prod(shape) > MAX_TRIAL_ENTRIES:
            return
        pure = traits_of(edit).pure
        if pure is not None:  # one that has seen the site may need the module
            pure = certain and bool(traits_of(hook.editing_at(_key(site))).pure)
        if not (computes_only(edit) if pure is None else pure):
            return
        failure = self._run(hook, site, shape, None, Namespace(), nn.ModuleDict())
        if failure is None:
            return
        if failure.wrong or certain:
            raise HookError(failure.text, site=failure.site)
        if not isinstance(failure.error, IndexError):  # which may be the error of a length
            warnings.warn_explicit(failure.text, FlexWarning, *failure.place)

    def all(
        self, entries: Iterable[HookEntry], local_sites: Mapping[str, Site], modules: nn.ModuleDict
    ) -> list[tuple[TrialFailure, bool]]:
        """Run editing functions at the sites of this rank's stage, including their side effects.

        Collective over the mesh.

        Args:
            entries: the hooks.
            local_sites: the sites of this rank, by name.
            modules: the trainable modules.

        Returns:
            The failures on all ranks without repetition, and for each whether it would occur in a step.
        """
        failures: list[tuple[TrialFailure, bool]] = []
        context = Namespace()  # separate from `save_ctx` of the steps
        for entry in entries:
            hook = entry.hook
            sites = [s for e in entry.sites if (s := local_sites.get(e.name)) is not None and s.shape]
            runs = hook.run == "replicated" or is_leader(self._mesh)
            if hook.editing_function is None or not sites or not runs:
                continue
            shape, certain = self._choose_shape(sites[0])
            module = sites[0].tap and sites[0].tap.module
            failure = self._run(hook, sites[0], shape, module, context, modules)
            if failure is not None:
                lacks = isinstance(failure.error, AttributeError)  # perhaps another stage saves the value
                failures.append((failure._replace(error=None), failure.wrong or (certain and not lacks)))
        outcome = gather_distinct(failures, self._mesh)
        return list({f.text: (f, bad) for of_rank in outcome for f, bad in of_rank}.values())

    def _choose_shape(self, site: Site) -> tuple[tuple[int, ...], bool]:
        """The full tensor's shape for a trial, and whether the shape is certain."""
        known = [self.lengths.get(n) if isinstance(n, str) else n for n in site.shape]
        defaults = [DEFAULT_LENGTHS.get(str(n), DEFAULT_LENGTH) for n in site.shape]
        shape = (d if k is None else k for d, k in zip(defaults, known, strict=True))
        return tuple(shape), None not in known

    def _run(
        self,
        hook: HookFunction,
        site: Site,
        shape: Sequence[int],
        module: Any,
        context: Namespace,
        modules: nn.ModuleDict,
    ) -> TrialFailure | None:
        """Run an editing function on a random tensor of each possible dtype, until one succeeds.

        Generators and the buffers of modules are restored.
        """
        failure: TrialFailure | None = None
        key = _key(site)
        for dtype in self._dtypes:
            full = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
            try:
                with seed_generators(key, 0, full), _restore_buffers(module, modules), torch.enable_grad():
                    full.normal_(0, 1)
                    # A non-leaf tensor that requires a gradient, as activations do; gradients do not.
                    full = full if hook.backward else full.requires_grad_() * 1
                    with _Waits(hook) if self.on_gpu else nullcontext():
                        call_editing_function(partial(hook.editing_at, key), module, full, context, modules)
            except Exception as error:  # reported as the result
                failure = failure or _describe_failure(hook, site, shape, dtype, error)
            else:
                return None
        return failure


class _Waits(TorchFunctionMode):
    """Warns of methods of tensors that make the host wait, which operators and other functions call."""

    def __init__(self, hook: HookFunction) -> None:
        super().__init__()
        self._hook, self._function = hook, unwrap_function(hook.editing_function)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, function = getattr(func, "__name__", ""), self._function
        frame: FrameType | None = sys._getframe(1)
        if name not in WAITS or function is None:
            return func(*args, **(kwargs or {}))
        while frame is not None and frame.f_code is not function.__code__:
            frame = frame.f_back
        if frame is not None:
            text = f"hook ({self._hook.describe()}): Tensor.{name}(), which an `if`, a print or a "
            text += f"conversion calls, {SYNCHRONIZES}"
            place = function.__code__.co_filename, frame.f_lineno
            warnings.warn_explicit(text, FlexWarning, *place)
        return func(*args, **(kwargs or {}))


@contextmanager
def _restore_buffers(*modules: Any) -> Iterator[None]:
    """Restore the buffers of modules at the end, such as the statistics of a normalization."""
    buffers = [b for m in modules if isinstance(m, nn.Module) for b in m.buffers()]
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)


def _key(site: Site) -> Key:
    return Key(site.name, 0, 0, 0, 0)


def _describe_failure(
    hook: HookFunction, site: Site, shape: Sequence[int], dtype: torch.dtype, error: Exception
) -> TrialFailure:
    edit = hook.editing_function
    assert edit is not None
    function = unwrap_function(edit)
    start = (
        (function.__code__.co_filename, function.__code__.co_firstlineno) if function else ("<unknown>", 0)
    )
    wrong = isinstance(error, HookError)
    place = start if wrong else find_user_line(error) or start
    where = f"{describe_edit(edit)} ({place[0]}:{place[1]})"
    tensor = f"{dtype} {tuple(shape)}"
    text = f"hook ({hook.describe()}) tried at {site.name} on {tensor}: {describe_error(error)}, in {where}"
    return TrialFailure(text, site.name, wrong, error, place)
