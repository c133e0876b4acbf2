"""Temporary hooks by TransformerLens' names: captures that every rank gets, and hook functions
`fn(tensor, hook)` on its shapes.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters import Prompts
from megatron_flex.collectives import broadcast_in_buckets
from megatron_flex.config import flex_config
from megatron_flex.errors import HookError
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.lens_names import Alias, Filter
from megatron_flex.lens.prompt_inputs import clear_padding, guess_dims
from megatron_flex.lens.stop_point import StopPoint
from megatron_flex.runtime import HookFunction, Key, Session
from megatron_flex.runtime.edit_traits import EditTraits
from megatron_flex.sites import EDITED_SUFFIX, GRADIENT_SUFFIX, Site

SiteTensors = dict[str, list[Tensor]]  # by site, a tensor for each microbatch


class TemporaryHooks:
    """Hooks that are active until they are removed together, whatever groups of hooks are switched off."""

    def __init__(self, session: Session, weights: FullWeights) -> None:
        self.session, self.weights = session, weights
        self._hooks: list[HookFunction] = []

    def install(self, hook: HookFunction) -> None:
        """Register a hook. Every rank registers the same ones."""
        self.session.hooks.add(hook, always=True)
        self._hooks.append(hook)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            self.session.hooks.remove(hook)
        self._hooks = []


class TemporaryCaptures(TemporaryHooks):
    """Captures the sites of some aliases in the steps that run between `add` and `remove`.

    Every rank creates one alike. Other hooks and their captures are not affected.

    Attributes:
        aliases: what to capture, in the order of the requests.
        real: how many microbatches of a step to keep, set after it ran; None for all.
        mask: `[batch, pos]`, 0 at padding, whose entries are zeros in what is returned; set for each run.
    """

    def __init__(self, session: Session, weights: FullWeights) -> None:
        super().__init__(session, weights)
        self.aliases: list[Alias] = []
        self.real: int | None = None
        self.mask: Tensor | None = None
        self._since = session.clock.step

    @property
    def sites(self) -> set[str]:
        return {a.site for a in self.aliases}

    def add(self, aliases: Sequence[Alias]) -> None:
        """Add aliases, after fetching the weights that their views need. Collective."""
        self.weights.assemble(w for a in aliases for w in a.view.weights)
        new = {a.site for a in aliases} - self.sites
        self.aliases += aliases
        if new:
            hook = HookFunction(match_sites(new))
            hook.captures_edited = True
            self.install(hook)

    def collect(self, everywhere: bool = True) -> dict[str, Tensor]:
        """The last captures of each alias, microbatches concatenated. Collective.

        Args:
            everywhere: return them on every rank of the model replica; else on its leader only.

        Raises:
            HookError: on all ranks, if a site was not reached.
        """
        read = self.gather(everywhere)
        return {
            alias.name: self.clear_padding(alias, concatenate(tensors))
            for alias, tensors in self._convert(read)
        }

    def gather(self, everywhere: bool) -> SiteTensors:
        """The last captures of each site. Collective.

        Args:
            everywhere: return them on every rank of the model replica; else on its leader only.

        Raises:
            HookError: on all ranks, if a site was not reached.
        """
        return self._distribute(self._take_last_step(), everywhere)

    def collect_calls(self, everywhere: bool = True) -> dict[str, list[Tensor]]:
        """The captures of each alias in all calls of the model, one tensor for each call. Collective.

        Args:
            everywhere: as for `collect`.

        Raises:
            HookError: on all ranks, if a site was not reached.
        """
        by_site = {site: [t for _, t in captured] for site, captured in self._take().items() if captured}
        return {a.name: tensors for a, tensors in self._convert(self._distribute(by_site, everywhere))}

    def _distribute(self, read: SiteTensors, everywhere: bool) -> SiteTensors:
        """What the leader has captured, on every rank of the replica, or on the leader only."""
        mesh = self.session.mesh.replica()
        arrived = broadcast_in_buckets([(n, torch.empty(0)) for n in read], mesh, flex_config.bucket_bytes)
        silent = {a.site for a in self.aliases if a.sure} - {name for name, _ in arrived}
        if silent:
            names = ", ".join(sorted(a.name for a in self.aliases if a.site in silent))
            raise HookError(f"nothing was captured at {names}; name hook points that this run reaches")
        if not everywhere:
            return read if self.session.is_leader else {}
        items = [((site, n), t) for site, tensors in read.items() for n, t in enumerate(tensors)]
        everyones: SiteTensors = {}
        for (site, _), tensor in broadcast_in_buckets(items, mesh, flex_config.bucket_bytes):
            everyones.setdefault(site, []).append(tensor)
        return everyones

    def _convert(self, read: SiteTensors) -> Iterator[tuple[Alias, list[Tensor]]]:
        """The tensors of each alias in TransformerLens' shapes. Collective over the ranks that have them."""
        if not read:
            return
        weights = self.weights.assemble(w for a in self.aliases for w in a.view.weights)
        for alias in self.aliases:
            if alias.site in read:
                yield alias, [alias.view.to_lens(t, weights) for t in read[alias.site]]

    def clear_padding(self, alias: Alias, tensor: Tensor) -> Tensor:
        """The tensor with zeros at positions of padding, where its dims say which those are."""
        if self.mask is None:
            return tensor
        dims = alias.view.dims(self.session.sites[alias.site].shape) or guess_dims(tensor, self.mask)
        return clear_padding(tensor, self.mask, dims)

    def _take_last_step(self) -> SiteTensors:
        """On the leader, the captures of each site in the last step that reached it, after its edits."""
        last: SiteTensors = {}
        for site, captured in self._take().items():
            # of several calls in a microbatch the last
            by_microbatch = {k.microbatch: t for k, t in captured if k.step == captured[-1][0].step}
            if by_microbatch:
                last[site] = [by_microbatch[n] for n in sorted(by_microbatch)]
        return last

    def _take(self) -> dict[str, list[tuple[Key, Tensor]]]:
        """On the leader, all captures of each site, after its edits, in the order of time."""
        since, real = self._since, self.real

        def ours(key: Key) -> bool:
            filler = real is not None and key.microbatch >= real
            return key.step > since and (filler or key.site.removesuffix(EDITED_SUFFIX) in self.sites)

        captures = self.session.captures
        captured = [
            (key, tensor) for key, tensor in captures.take(ours) if real is None or key.microbatch < real
        ]
        by_site: dict[str, list[tuple[Key, Tensor]]] = {}
        for site in self.sites:
            of_site = [(k, t) for k, t in captured if k.site == site + EDITED_SUFFIX]
            of_site = of_site or [(k, t) for k, t in captured if k.site == site]
            by_site[site] = sorted(of_site, key=lambda pair: pair[0].time)
        for key, tensor in captured:
            if key.site in self._others:
                captures.add(key, tensor)
        return by_site

    @property
    def _others(self) -> set[str]:
        """Sites that other hooks read, too."""
        out: set[str] = set()
        for entry in self.session.registry.active:
            if entry.hook.save and entry.hook not in self._hooks:
                out |= {name + (GRADIENT_SUFFIX if entry.hook.backward else "") for name in entry.names}
                out |= {name + EDITED_SUFFIX for name in entry.names if entry.hook.captures_edited}
        return out


def concatenate(microbatches: list[Tensor]) -> Tensor:
    """Concatenated along the first dim, without a copy of one; tensors without dims are stacked."""
    if len(microbatches) == 1 and microbatches[0].ndim:
        return microbatches[0].contiguous()
    return (torch.cat if microbatches[0].ndim else torch.stack)(microbatches).contiguous()


def match_sites(sites: Iterable[str]) -> Callable[[Site], bool]:
    """A pattern for exactly these sites, with a name that all ranks can compare."""
    names = frozenset(sites)

    def has_name(site: Site) -> bool:
        return site.name in names

    digest = zlib.crc32(" ".join(sorted(names)).encode())
    has_name.__qualname__ = f"{len(names)} hook points ({digest:08x})"
    return has_name


def run(session: Session, prompts: Prompts, microbatch_size: int | None) -> int:
    """Run the model forward over full sequences. Every rank calls it.

    Returns:
        The number of microbatches; the step pads further ones with copies.

    Raises:
        FlexError: on all ranks: the model cannot take these prompts.
        HookError: a hook failed; on all ranks.
    """
    tokens = prompts.tokens
    count = len(tokens) // (microbatch_size or len(tokens)) if tokens.numel() and tokens.ndim else 1
    session.probing = count
    try:
        session.adapter.runner.run(prompts, microbatch_size)
    finally:
        session.probing = None
    return count


def check_pairs(hooks: object) -> None:
    """Check that hook functions are given as pairs in a list.

    Raises:
        HookError: they are not.
    """
    form = "give a list of pairs: [('blocks.0.hook_mlp_out', function)]"
    if isinstance(hooks, str) or not isinstance(hooks, Iterable):
        raise HookError(f"fwd_hooks is {hooks!r}; {form}")
    for pair in hooks:
        if isinstance(pair, HookFunction):
            raise HookError(f"fwd_hooks has {pair!r}; {form}, or register it with register_forward_hook")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not callable(pair[1]):
            raise HookError(f"fwd_hooks has {pair!r}, which is not a pair of a name and a function; {form}")


class HookPoint:
    """The second argument of a hook function: its hook point.

    Attributes:
        name: the full name under which it was requested.
        ctx: a dict for the function's own state, one for each hook point.

    Examples:
        >>> points = []
        >>> def double(tensor, hook):
        ...     points.append(hook.name)
        ...     return 2 * tensor
        >>> logits = flex.interp.run_with_hooks(tokens, [("blocks.0.hook_mlp_out", double)])
        >>> points
        ['blocks.0.hook_mlp_out']
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ctx: dict[str, Any] = {}

    def layer(self) -> int:
        """Return the layer's number.

        Raises:
            HookError: the hook point is in no layer.

        Examples:
            >>> def double(tensor, hook):
            ...     return 2 * tensor if hook.layer() > 1 else None
            >>> logits = flex.interp.run_with_hooks(tokens, [(lambda name: name.endswith("mlp_out"), double)])
        """
        numbers = [part for part in self.name.replace(":", ".").split(".") if part.isdigit()]
        if not numbers:
            raise HookError(f"{self.name} is in no layer; hook.layer() is for names of blocks")
        return int(numbers[0])

    def __repr__(self) -> str:
        return f"HookPoint({self.name!r})"


LensFunction = Callable[[Tensor, HookPoint], Tensor | None]
Hooks = Sequence[tuple[Filter, LensFunction]]


class TemporaryEdits(TemporaryHooks):
    """Hook functions `fn(tensor, hook)` as edits."""

    def add(self, alias: Alias, function: LensFunction) -> None:
        """Install one function at one hook point. Collective, if the view there needs weights.

        Raises:
            HookError: nothing can be edited there.
        """
        site, view = alias.edited
        if view.fixed:
            raise HookError(f"{alias.name} can be read and not edited: {view.fixed}")
        if not callable(function):
            raise HookError(f"the function for {alias.name} is {function!r}; give fn(tensor, hook)")
        weights, point = self.weights.assemble(view.weights), HookPoint(alias.name)

        def edit(
            module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict
        ) -> Tensor:
            count = self.session.probing
            if count is not None and self.session.clock.microbatch >= count:
                return inputs  # padding that the schedule needed
            lens_tensor = view.to_lens(inputs, weights)
            version = lens_tensor._version
            edited = function(lens_tensor, point)
            if edited is None:
                if lens_tensor._version == version:
                    return inputs
                edited = lens_tensor  # edited in place
            if not isinstance(edited, Tensor) or edited.shape != lens_tensor.shape:
                got = f"shape {tuple(edited.shape)}" if isinstance(edited, Tensor) else type(edited).__name__
                raise HookError(
                    f"{alias.name} has shape {tuple(lens_tensor.shape)}; the function returned {got}"
                )
            return view.to_site(edited, inputs, weights)

        vars(edit)["edit_traits"] = EditTraits(user_functions=(function,))
        edit.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
        self.install(HookFunction(match_sites([site]), editing_function=edit, save=False))


@contextmanager
def edits(
    session: Session, weights: FullWeights, hooks: Hooks, stop: StopPoint | None = None
) -> Iterator[TemporaryEdits]:
    """Hook functions for the duration of a scope.

    Args:
        session: the session that gets them.
        weights: the model's weights.
        hooks: pairs of a name, names, or a function of names, and the hook function.
        stop: where the runs of the scope stop, before which all names must be.

    Raises:
        SiteError: a name is unknown, or a filter matches nothing.
    """
    check_pairs(hooks)
    out = TemporaryEdits(session, weights)
    try:
        for names, function in hooks:
            aliases = (stop or weights.names).matching(names)
            if not aliases:
                described = getattr(names, "__qualname__", repr(names))
                raise HookError(f"the filter {described} matches none of {len(weights.names.aliases)} names")
            for alias in aliases:
                out.add(alias, function)
        yield out
    finally:
        out.remove()
