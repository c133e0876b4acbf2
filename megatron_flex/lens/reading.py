"""Reading what names mean, during whatever is run: one hook, and what it read to every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_flex.collectives import checksum, gather_objects, broadcast_in_buckets
from megatron_flex.errors import FlexError, HookError
from megatron_flex.config import flex_config
from megatron_flex.lens.lens_names import Alias
from megatron_flex.lens.full_weights import WholeWeights
from megatron_flex.runtime import HookFunction, Key, Session
from megatron_flex.sites import EDITED_SUFFIX, GRADIENT_SUFFIX, Site

SiteTensors = dict[str, list[Tensor]]  # by site, a tensor for each microbatch


class Reading:
    """Reads the sites of some aliases in the steps that run between `add` and `stop`.

    Every rank makes one alike. Other hooks stay as they are, and what they read stays theirs.

    Attributes:
        aliases: what is read, in the order of asking.
        real: how many microbatches of a step count, once it was run; None for all.
    """

    def __init__(self, session: Session, weights: WholeWeights) -> None:
        self.session, self.weights = session, weights
        self.aliases: list[Alias] = []
        self.real: int | None = None
        self._hooks: list[HookFunction] = []
        self._since = session.clock.step

    @property
    def sites(self) -> set[str]:
        """The names of the sites."""
        return {a.site for a in self.aliases}

    def add(self, aliases: Sequence[Alias]) -> None:
        """Read these too, after fetching the weights that their views need. Collective."""
        self.weights.of(w for a in aliases for w in a.view.weights)
        new = {a.site for a in aliases} - self.sites
        self.aliases += aliases
        if new:
            hook = HookFunction(match_sites(new))
            hook.behind = True
            self.session.add(hook, always=True)
            self._hooks.append(hook)

    def stop(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            self.session.remove(hook)
        self._hooks = []

    def collect(self, everywhere: bool = True) -> dict[str, Tensor]:
        """What was read last at each place, by alias, microbatches one behind the other. Collective.

        Args:
            everywhere: to every rank of the model replica; else to its leader, and elsewhere nothing.

        Raises:
            HookError: on all ranks, if nothing passed at one of the places.
        """
        mesh = self.session.mesh.replica()
        read = self._taken()
        arrived = broadcast_in_buckets([(n, torch.empty(0)) for n in read], mesh, flex_config.bucket_bytes)
        silent = {a.site for a in self.aliases if a.sure} - {name for name, _ in arrived}
        if silent:
            names = ", ".join(sorted(a.name for a in self.aliases if a.site in silent))
            raise HookError(f"nothing passed at {names}; ask for what this run goes through")
        if everywhere:
            items = [((site, n), t) for site, found in read.items() for n, t in enumerate(found)]
            read = {}
            for (site, _), tensor in broadcast_in_buckets(items, mesh, flex_config.bucket_bytes):
                read.setdefault(site, []).append(tensor)
        elif not self.session.is_leader:
            return {}
        weights = self.weights.of(w for a in self.aliases for w in a.view.weights)
        return {
            a.name: _concatenate([a.view.theirs(t, weights) for t in read[a.site]])
            for a in self.aliases
            if a.site in read
        }

    def _taken(self) -> SiteTensors:
        """On the leader what was read at each site in the last step that passed it, behind its edits."""
        since, real = self._since, self.real

        def ours(key: Key) -> bool:
            filler = real is not None and key.microbatch >= real
            return key.step > since and (filler or key.site.removesuffix(EDITED_SUFFIX) in self.sites)

        captures = self.session.captures
        captured = captures.take(ours)
        last: dict[str, dict[int, Tensor]] = {}
        for site in self.sites:
            mine = [(k, t) for k, t in captured if k.site == site + EDITED_SUFFIX]
            mine = mine or [(k, t) for k, t in captured if k.site == site]
            steps = [k.step for k, _ in mine]
            for key, tensor in mine:
                if key.step == max(steps) and (real is None or key.microbatch < real):
                    last.setdefault(site, {})[key.microbatch] = tensor  # of several calls the last
        for key, tensor in captured:
            if key.site in self._others and (real is None or key.microbatch < real):
                captures.add(key, tensor)
        return {site: [found[n] for n in sorted(found)] for site, found in last.items()}

    @property
    def _others(self) -> set[str]:
        """Places where somebody else reads too."""
        out: set[str] = set()
        for entry in self.session.registry.active:
            if entry.hook.save and entry.hook not in self._hooks:
                out |= {name + (GRADIENT_SUFFIX if entry.hook.backward else "") for name in entry.names}
                out |= {name + EDITED_SUFFIX for name in entry.names if entry.hook.behind}
        return out


def _concatenate(microbatches: list[Tensor]) -> Tensor:
    """One behind the other along the first dim, or, without dims, along one of their own."""
    return (torch.cat if microbatches[0].ndim else torch.stack)(microbatches).contiguous()


def match_sites(sites: Iterable[str]) -> Callable[[Site], bool]:
    """A pattern for exactly these sites, whose name all ranks can compare."""
    names = frozenset(sites)

    def these(site: Site) -> bool:
        return site.name in names

    mark = zlib.crc32(" ".join(sorted(names)).encode())
    these.__qualname__ = f"{len(names)} places ({mark:08x})"
    return these


def run(session: Session, tokens: Tensor, microbatch_size: int | None) -> int:
    """Run the model forward over whole tokens. Every rank calls it.

    Returns:
        How many microbatches they made; those of the step behind them are copies.

    Raises:
        FlexError: on all ranks: the ranks of a replica have other tokens, or the model cannot be given them.
        HookError: a hook failed; on all ranks.
    """
    if session.over_data:
        raise FlexError(
            "gather_data_parallel=True puts the same tokens of all replicas behind each other; attach "
            "without it to run the model over tokens"
        )
    mesh = session.mesh.replica()
    digests = gather_objects((tuple(tokens.shape), checksum(tokens)), mesh, [a.name for a in mesh])
    if len(set(digests)) > 1:
        shapes = ", ".join(map(str, sorted({shape for shape, _ in digests})))
        raise FlexError(f"ranks of one replica have different tokens (shapes {shapes}); give all the same")
    count = len(tokens) // (microbatch_size or len(tokens)) if tokens.numel() and tokens.ndim else 1
    session.probing = count
    try:
        session.adapter.run(tokens, microbatch_size)
    finally:
        session.probing = None
    return count
