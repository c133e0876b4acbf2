"""The idioms of interpretability: runs over whole tokens with a cache, with hooks, with a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor

from megatron_flex.lens import (
    ActivationCache,
    Filter,
    Hooks,
    Names,
    Reading,
    Trace,
    WholeWeights,
    edits,
    run,
)
from megatron_flex.runtime import Session


class Interp:
    """What FlexModel does with whole tokens. Every rank calls these, a replica's with the same ones."""

    session: Session

    @cached_property
    def lens_names(self) -> Names:
        """TransformerLens' names that this model has, as `aliases`."""
        session = self.session
        return Names(session.sites, session.adapter.architecture(), list(session.survey.sites))

    def run_with_cache(
        self,
        tokens: Tensor,
        names_filter: Filter = None,
        *,
        everywhere: bool = True,
        microbatch_size: int | None = None,
    ) -> tuple[Tensor | None, ActivationCache]:
        """Run the model forward and keep what passes, as TransformerLens does. Every rank calls it.

        Hooks that stand already stay active; what they read comes into `output_dict` as in any step. The
        cache has what left the edits at a place. Nothing is differentiated, and the model is in the mode
        (`train()`, `eval()`) that it was given in.

        Args:
            tokens: `[batch, sequence]`, the same on all ranks of a replica.
            names_filter: what to keep: None for all that TransformerLens has (but `hook_result`), one of its
                names, a function of its names, the name of a site or a glob of them, or a list of such.
                In a plain module None is for the outputs of all modules that the run passes, and a function
                is one of their names.
            everywhere: on every rank; else on the leader alone.
            microbatch_size: sequences that go through the pipeline together; all, if it is not given.

        Returns:
            The logits `[batch, sequence, vocabulary]` (None where nothing arrives) and the cache, whose
            tensors are `[batch, pos, ...]` on the CPU.

        Raises:
            SiteError: a name stands for no place here.
            FlexError: the model cannot be given these tokens; on all ranks.
            HookError: an edit failed, or nothing passed at a place; on all ranks.
        """
        weights = WholeWeights(self.session, self.lens_names)
        aliases = self.lens_names.matching(names_filter)
        logits = self.lens_names.matching(self.session.adapter.logits)
        wanted = {a.name: a for a in [*aliases, *logits]}
        reading = Reading(self.session, weights)
        try:
            reading.add(list(wanted.values()))
            reading.real = run(self.session, tokens, microbatch_size)
            read = reading.collect(everywhere)
        finally:
            reading.stop()
        kept = {a.name: read[a.name] for a in aliases if a.name in read}
        return read.get(logits[0].name), ActivationCache(kept, weights, everywhere)

    def run_with_hooks(
        self, tokens: Tensor, fwd_hooks: Hooks = (), *, microbatch_size: int | None = None
    ) -> Tensor:
        """Run the model forward with hook functions of TransformerLens' kind. Every rank calls it.

        Args:
            tokens: `[batch, sequence]`, the same on all ranks of a replica.
            fwd_hooks: pairs of a name (or what else `run_with_cache` takes for names) and
                `fn(tensor, hook)`, which gets the whole `[batch, pos, ...]`, returns one of that shape or
                None for no change, and may change it in place. It runs on every rank that has a part.
            microbatch_size: sequences that go through the pipeline together, and to `fn`; all, if not given.

        Returns:
            The logits `[batch, sequence, vocabulary]`, on every rank.

        Raises:
            SiteError: a name stands for no place here.
            FlexError: the model cannot be given these tokens; on all ranks.
            HookError: a function failed, or nothing can be edited at a place; on all ranks.
        """
        with self.lens_hooks(fwd_hooks), self.trace(tokens, microbatch_size=microbatch_size) as trace:
            logits = trace.logits
        return logits.value

    @contextmanager
    def lens_hooks(self, fwd_hooks: Hooks) -> Iterator[None]:
        """Hook functions of TransformerLens' kind for the time of a scope, in runs and in one's own steps."""
        with edits(self.session, WholeWeights(self.session, self.lens_names), fwd_hooks):
            yield

    @contextmanager
    def trace(self, tokens: Tensor | None = None, *, microbatch_size: int | None = None) -> Iterator[Trace]:
        """Ask for tensors by place, and replace them; they are there when the block is over.

        With tokens the model is run over them at the end of the block; without, whatever is run inside it
        counts (of several steps the last), after the places were asked for. Every rank does the same.

        Args:
            tokens: `[batch, sequence]`, the same on all ranks of a replica.
            microbatch_size: as for `run_with_cache`.
        """
        trace = Trace(self.session, WholeWeights(self.session, self.lens_names))
        try:
            yield trace
            real = None
            if tokens is not None:
                real = run(self.session, tokens, microbatch_size)
            trace.finish(real)
        finally:
            trace.close()
