"""Editing functions tried on a small tensor before a step: what they return, and whether they run."""

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
from megatron_flex.errors import FlexWarning, HookError, described
from megatron_flex.config import flex_config
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.debug.purity import is_pure
from megatron_flex.runtime.debugging.understanding import unwrap_function, read_source, warn_of_mistakes
from megatron_flex.runtime.editing import call_editing_function
from megatron_flex.runtime.hooks import HookFunction, describe_edit
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.runtime.streams import seed_generators
from megatron_flex.sites import Site

MAX_TRIAL_ENTRIES = 1 << 20  # entries of a tensor that is tried at a registration
DEFAULT_LENGTHS = {"b": 2}  # lengths that stand for those that only the data tell
DEFAULT_LENGTH = 8


class TrialSetup(NamedTuple):
    """What a trial needs to know of the model.

    Attributes:
        device: where its tensors are.
        dtypes: those that they may have, the usual one first.
        lengths: of `s` and `b`, as far as they are known for certain.
    """

    device: torch.device
    dtypes: Sequence[torch.dtype]
    lengths: Mapping[str, int]


def read_trial_setup(adapter: Adapter, parameters: Iterable[ParameterSite]) -> TrialSetup:
    """What trials need of a model: where its parameters are, and in which dtype."""
    own = [p.parameter for p in parameters if p.parameter is not None and p.parameter.is_floating_point()]
    device, dtype = (own[0].device, own[0].dtype) if own else (torch.device("cpu"), torch.float32)
    known: dict[str, int] = getattr(adapter, "lengths", dict)()
    return TrialSetup(device, list(dict.fromkeys([dtype, torch.float32])), known)


class DryRun:
    """Looks at what a person wrote before it runs; one for a session.

    Attributes:
        stage: what trials need to know of the model.
    """

    def __init__(self, adapter: Adapter, parameters: Iterable[ParameterSite], mesh: Mesh) -> None:
        self.stage, self._mesh = read_trial_setup(adapter, parameters), mesh

    def consider(self, entry: HookEntry) -> None:
        """Warn of what a hook's source says, and try it if that can do no harm.

        Raises:
            HookError: it would not do.
        """
        hook = entry.hook
        if hook.editing_function is not None:
            on_gpu, leads = self.stage.device.type == "cuda", hook.run == "leader"
            warn_of_mistakes(hook.editing_function, hook.describe, on_gpu, leads)
            if flex_config.dry_run:
                _try_or_warn(hook, entry.sites, self.stage)

    def all(
        self, entries: Iterable[HookEntry], own: Mapping[str, Site], modules: nn.ModuleDict
    ) -> list[tuple[TrialFailure, bool]]:
        """Try editing functions at the sites of this rank's stage, side effects and all.

        Collective over the mesh.

        Args:
            entries: the hooks.
            own: the sites of this rank, by name.
            modules: the trainable modules.

        Returns:
            What went wrong on any rank, once, and whether it would go wrong in a step.
        """
        mine: list[tuple[TrialFailure, bool]] = []
        context = Namespace()  # what they save in a trial is for trials
        for entry in entries:
            hook, here = entry.hook, [own[s.name] for s in entry.sites if s.name in own and s.shape]
            runs = hook.run == "replicated" or is_leader(self._mesh)
            if hook.editing_function is None or not here or not runs:
                continue
            shape, certain = choose_trial_shape(here[0], self.stage)
            module = getattr(here[0].tap, "module", None)
            failure = run_trial(hook, here[0], shape, self.stage, module, context, modules)
            if failure is not None:
                lacks = isinstance(failure.error, AttributeError)  # perhaps what another stage saves
                mine.append((failure._replace(error=None), failure.wrong or (certain and not lacks)))
        outcome = gather_objects(mine, self._mesh, [a.name for a in self._mesh])
        return list({f.text: (f, bad) for found in outcome for f, bad in found}.values())


def _try_or_warn(hook: HookFunction, sites: Sequence[Site], stage: TrialSetup) -> None:
    """Rehearse; what is left out where it fails is warned of alone."""
    try:
        try_if_harmless(hook, sites, stage)
    except Exception as error:  # a person's function, which steps would leave out as well
        if hook.on_error == "raise":
            raise
        warnings.warn(f"{error}; on_error='skip': passes where it fails are left unedited", FlexWarning, 6)


def try_if_harmless(hook: HookFunction, sites: Sequence[Site], stage: TrialSetup) -> None:
    """Try a hook's editing function at one of its sites, if that cannot do any harm.

    Raises:
        HookError: it returns something else than it has to; or it raises, and with these very lengths it
            would raise in a step.
    """
    edit = hook.editing_function
    if edit is None or not sites:
        return
    site = sites[0]
    shape, certain = choose_trial_shape(site, stage)
    if len(shape) != len(site.dims) or not shape or prod(shape) > MAX_TRIAL_ENTRIES:
        return
    pure = getattr(hook.editing_at(Key(site.name, 0, 0, 0, 0)), "pure", None)
    if pure is not None:  # it says so itself, and has seen the site
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
        raise HookError(outcome.text)
    if outcome.error is not None and not isinstance(outcome.error, IndexError):  # which may be that of a length
        file, line = outcome.place
        warnings.warn_explicit(outcome.text, FlexWarning, file, line)


class TrialFailure(NamedTuple):
    """What went wrong in a trial.

    Attributes:
        text: in words.
        wrong: whether what the function returned cannot be right; else it raised `error`.
        error: what it raised.
        place: the file and line of the user's that raised, or the function's own.
    """

    text: str
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
    """Run an editing function on random tensors, of each dtype that its site may have, until one is right."""
    found: TrialFailure | None = None
    for dtype in stage.dtypes:
        key = Key(site.name, 0, 0, 0, 0)
        full = torch.zeros(tuple(shape), dtype=dtype, device=stage.device)
        try:
            with seed_generators(key, 0, full), torch.enable_grad():
                full = _make_activation(full.normal_(0, 1), hook)
                call_editing_function(partial(hook.editing_at, key), module, full, context, modules)
        except Exception as error:
            found = found or _describe_failure(hook, site, shape, dtype, error)
        else:
            return None
    return found


def _make_activation(values: Tensor, hook: HookFunction) -> Tensor:
    """A tensor that is no leaf and needs a gradient, as activations are; gradients need none."""
    return values if hook.backward else values.requires_grad_() * 1


def choose_trial_shape(site: Site, stage: TrialSetup) -> tuple[tuple[int, ...], bool]:
    """The whole's shape for a trial, and whether that is certain."""
    known = [stage.lengths.get(n) if isinstance(n, str) else n for n in site.shape]
    shape = [DEFAULT_LENGTHS.get(str(n), DEFAULT_LENGTH) if k is None else k for n, k in zip(site.shape, known, strict=True)]
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
    what = described(error)
    where = f"{describe_edit(edit)} ({place[0]}:{place[1]})"
    text = f"hook ({hook.describe()}) tried at {site.name} on {dtype} {tuple(shape)}: {what}, in {where}"
    return TrialFailure(text, wrong, error, place)
