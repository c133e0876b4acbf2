"""Tries editing functions on a small tensor before a step: whether they run, and what they return."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Adapter, ParameterSite
from megatron_flex.collectives import gather_objects, is_leader
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexWarning, HookError, describe_error
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.debug.purity import is_pure
from megatron_flex.runtime.edit_environment import call_editing_function, seed_generators
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.function_analysis import read_source, unwrap_function, warn_of_mistakes
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.hooks import HookFunction, describe_edit
from megatron_flex.sites import Site

MAX_TRIAL_ENTRIES = 1 << 20  # bounds the tensor of a dry run at registration
DEFAULT_LENGTHS = {"b": 2}  # in place of lengths that depend on the data
DEFAULT_LENGTH = 8


class TrialSetup(NamedTuple):
    """The model's properties that a dry run uses.

    Attributes:
        device: the device of the tensors.
        dtypes: the possible dtypes, the usual one first.
        lengths: the lengths of `s` and `b` that are certain.
    """

    device: torch.device
    dtypes: Sequence[torch.dtype]
    lengths: Mapping[str, int]


def read_trial_setup(adapter: Adapter, parameters: Iterable[ParameterSite]) -> TrialSetup:
    """Read from a model the device and dtypes of its parameters."""
    own = [p.parameter for p in parameters if p.parameter is not None and p.parameter.is_floating_point()]
    device, dtype = (own[0].device, own[0].dtype) if own else (torch.device("cpu"), torch.float32)
    known = adapter.lengths()
    return TrialSetup(device, list(dict.fromkeys([dtype, torch.float32])), known)


class DryRun:
    """Checks editing functions before they run; one for each session.

    Attributes:
        stage: the model's properties that dry runs use.
    """

    def __init__(self, adapter: Adapter, parameters: Iterable[ParameterSite], mesh: Mesh) -> None:
        self.stage, self._mesh = read_trial_setup(adapter, parameters), mesh

    @property
    def lengths(self) -> Mapping[str, int]:
        """The lengths of `s` and `b` that are certain."""
        return self.stage.lengths

    @property
    def itemsize(self) -> int:
        """Bytes of an entry of the dtype that the model's tensors usually have."""
        return self.stage.dtypes[0].itemsize

    def consider(self, entry: HookEntry) -> None:
        """Warn of likely mistakes in a hook's source, and try the hook if that is safe.

        Raises:
            HookError: the editing function is invalid.
        """
        hook = entry.hook
        if hook.editing_function is not None:
            on_gpu, once = self.stage.device.type == "cuda", hook.run == "once"
            warn_of_mistakes(hook.editing_function, hook.describe, on_gpu, once)
            if flex_config.dry_run:
                _try_or_warn(hook, entry.sites, self.stage)

    def all(
        self, entries: Iterable[HookEntry], own: Mapping[str, Site], modules: nn.ModuleDict
    ) -> list[tuple[TrialFailure, bool]]:
        """Run editing functions at the sites of this rank's stage, including their side effects.

        Collective over the mesh.

        Args:
            entries: the hooks.
            own: the sites of this rank, by name.
            modules: the trainable modules.

        Returns:
            The failures on all ranks without repetition, and for each whether it would occur in a step.
        """
        mine: list[tuple[TrialFailure, bool]] = []
        context = Namespace()  # separate from `save_ctx` of the steps
        for entry in entries:
            hook, here = entry.hook, [own[s.name] for s in entry.sites if s.name in own and s.shape]
            runs = hook.run == "replicated" or is_leader(self._mesh)
            if hook.editing_function is None or not here or not runs:
                continue
            shape, certain = choose_trial_shape(here[0], self.stage)
            module = getattr(here[0].tap, "module", None)
            failure = run_trial(hook, here[0], shape, self.stage, module, context, modules)
            if failure is not None:
                lacks = isinstance(failure.error, AttributeError)  # perhaps another stage saves the value
                mine.append((failure._replace(error=None), failure.wrong or (certain and not lacks)))
        outcome = gather_objects(mine, self._mesh, [a.name for a in self._mesh])
        return list({f.text: (f, bad) for found in outcome for f, bad in found}.values())


def _try_or_warn(hook: HookFunction, sites: Sequence[Site], stage: TrialSetup) -> None:
    """Try a hook; with `on_error="skip"` only warn of a failure."""
    try:
        try_if_harmless(hook, sites, stage)
    except Exception as error:  # the user's function, which steps would skip as well
        if hook.on_error == "raise":
            raise
        warnings.warn(f"{error}; on_error='skip': passes where it fails are left unedited", FlexWarning, 6)


def try_if_harmless(hook: HookFunction, sites: Sequence[Site], stage: TrialSetup) -> None:
    """Try a hook's editing function at one of its sites, if the function has no side effects.

    Raises:
        HookError: the result is invalid; or the function raises, and the lengths are those of a step, where
            it would raise too.
    """
    edit = hook.editing_function
    if edit is None or not sites:
        return
    site = sites[0]
    shape, certain = choose_trial_shape(site, stage)
    if len(shape) != len(site.dims) or not shape or prod(shape) > MAX_TRIAL_ENTRIES:
        return
    pure = traits_of(hook.editing_at(Key(site.name, 0, 0, 0, 0))).pure
    if pure is not None:  # the function declares it, and has seen the site
        if not (pure and certain):
            return
    else:
        source = read_source(edit)
        if source is None or not is_pure(source):
            return
    outcome = run_trial(hook, site, shape, stage, None, Namespace(), nn.ModuleDict())
    if outcome is None:
        return
    if outcome.wrong or certain:
        raise HookError(outcome.text, site=outcome.site)
    if outcome.error is not None and not isinstance(
        outcome.error, IndexError
    ):  # which may be the error of a length
        file, line = outcome.place
        warnings.warn_explicit(outcome.text, FlexWarning, file, line)


class TrialFailure(NamedTuple):
    """The failure of a dry run.

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


def run_trial(
    hook: HookFunction,
    site: Site,
    shape: Sequence[int],
    stage: TrialSetup,
    module: Any,
    context: Namespace,
    modules: nn.ModuleDict,
) -> TrialFailure | None:
    """Run an editing function on random tensors, of each dtype that its site may have, until one succeeds."""
    found: TrialFailure | None = None
    for dtype in stage.dtypes:
        key = Key(site.name, 0, 0, 0, 0)
        full = torch.zeros(tuple(shape), dtype=dtype, device=stage.device)
        try:
            with seed_generators(key, 0, full), torch.enable_grad():
                full = _make_activation(full.normal_(0, 1), hook)
                call_editing_function(partial(hook.editing_at, key), module, full, context, modules)
        except Exception as error:  # reported as the result
            found = found or _describe_failure(hook, site, shape, dtype, error)
        else:
            return None
    return found


def _make_activation(values: Tensor, hook: HookFunction) -> Tensor:
    """A non-leaf tensor that requires a gradient, as activations do; gradients do not."""
    return values if hook.backward else values.requires_grad_() * 1


def choose_trial_shape(site: Site, stage: TrialSetup) -> tuple[tuple[int, ...], bool]:
    """The full tensor's shape for a dry run, and whether the shape is certain."""
    known = [stage.lengths.get(n) if isinstance(n, str) else n for n in site.shape]
    shape = [
        DEFAULT_LENGTHS.get(str(n), DEFAULT_LENGTH) if k is None else k
        for n, k in zip(site.shape, known, strict=True)
    ]
    return tuple(shape), None not in known


def _describe_failure(
    hook: HookFunction, site: Site, shape: Sequence[int], dtype: torch.dtype, error: Exception
) -> TrialFailure:
    edit = hook.editing_function
    assert edit is not None
    function = unwrap_function(edit)
    own = (function.__code__.co_filename, function.__code__.co_firstlineno) if function else ("<unknown>", 0)
    wrong = isinstance(error, HookError)
    place = own if wrong else find_user_line(error) or own
    what = describe_error(error)
    where = f"{describe_edit(edit)} ({place[0]}:{place[1]})"
    text = f"hook ({hook.describe()}) tried at {site.name} on {dtype} {tuple(shape)}: {what}, in {where}"
    return TrialFailure(text, site.name, wrong, error, place)
