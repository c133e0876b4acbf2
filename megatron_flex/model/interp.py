"""`flex.interp`: run tokens through the model with a cache, with hook functions, or in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_flex.errors import FlexError
from megatron_flex.lens import (
    ActivationCache,
    Filter,
    FullWeights,
    GeneratedText,
    Hooks,
    LensConfig,
    LensNames,
    Metric,
    PromptInput,
    StopPoint,
    TemporaryCaptures,
    Tokenizer,
    Trace,
    differentiate_metric,
    edits,
    make_lens_config,
    read_prompts,
    record_generation,
    run,
    run_backward,
)
from megatron_flex.runtime import Session


class Interp:
    """The interfaces of TransformerLens and nnsight on the full model: `flex.interp` of a `FlexModel`.

    Every rank calls these methods; ranks of one model replica pass the same tokens.

    Args:
        session: the session of the model.

    Attributes:
        tokenizer: what turns text into token ids where text is given in place of tokens; None at first.

    Examples:
        >>> logits, cache = flex.interp.run_with_cache(tokens, "blocks.0.hook_resid_post")
        >>> cache["blocks.0.hook_resid_post"].shape
        torch.Size([2, 16, 32])
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.tokenizer: Tokenizer | None = None

    @cached_property
    def names(self) -> LensNames:
        """Return the TransformerLens names that this model supports.

        Examples:
            >>> [name for name in flex.interp.names.aliases if name.startswith("blocks.0.hook")]
            ['blocks.0.hook_resid_pre', 'blocks.0.hook_attn_out', 'blocks.0.hook_resid_mid',
             'blocks.0.hook_mlp_out', 'blocks.0.hook_resid_post']
        """
        session = self._session
        return LensNames(session.sites, session.adapter.architecture(), list(session.parameters.index.sites))

    @property
    def cfg(self) -> LensConfig:
        """The sizes of the model, by the names of TransformerLens' `cfg`.

        Raises:
            FlexError: the model does not have TransformerLens' names.

        Examples:
            >>> flex.interp.cfg.n_layers, flex.interp.cfg.d_vocab
            (4, 64)
        """
        return make_lens_config(self.names)

    @property
    def W_E(self) -> Tensor:
        """The token embeddings, `[vocabulary, h]`, as they enter the residual stream. Every rank reads it.

        Examples:
            >>> flex.interp.W_E.shape
            torch.Size([64, 32])
        """
        return FullWeights(self._session, self.names).embedding()

    @property
    def W_U(self) -> Tensor:
        """The unembedding, `[h, vocabulary]`, without the final norm's weights. Every rank reads it.

        Raises:
            FlexError: the logits are more than a product with the output layer's weight.

        Examples:
            >>> flex.interp.W_U.shape
            torch.Size([32, 64])
        """
        return FullWeights(self._session, self.names).unembedding()

    def run_with_cache(
        self,
        tokens: PromptInput,
        names_filter: Filter = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        tokenizer: Tokenizer | None = None,
        everywhere: bool = True,
        microbatch_size: int | None = None,
        stop_at_layer: int | None = None,
        incl_bwd: bool = False,
        metric: Metric | None = None,
        **model_inputs: Any,
    ) -> tuple[Tensor | None, ActivationCache]:
        """Run the model forward and cache its activations, as TransformerLens does. Every rank calls it.

        Registered hooks stay active; their captures arrive in `output_dict` as in any step. The cache holds
        each tensor after the edits at its hook point. No gradients are computed, and the mode of the model
        (`train()`, `eval()`) is not changed.

        Args:
            tokens: token ids `[batch, sequence]`, a tokenizer's dict, or one or several texts if there is a
                tokenizer; the same on all ranks of a replica.
            names_filter: what to cache: None for all names of TransformerLens (except `hook_result`), one
                such name, a function of a name, the name or glob of a hook point, or a list of these. For a
                plain module, None selects the outputs of all modules that the run calls, and a function gets
                their names.
            attention_mask: `[batch, sequence]`, 1 at text and 0 at padding before or after it. Each text is
                moved to position 0 and its padding behind it, so that results, hook functions and `Select`
                count positions of the text.
            position_ids: `[batch, sequence]`, if the model should not count positions itself.
            tokenizer: `tokenizer(texts)["input_ids"]` gives token ids; by default `flex.interp.tokenizer`.
            everywhere: return the results on every rank; otherwise on the receiving rank only.
            microbatch_size: sequences that go through the pipeline together; all if None.
            stop_at_layer: run the layers before this one only, on all stages, without the final norm and the
                logits; negative numbers count from the end. The result is the residual stream there, and
                registered hooks at later layers are not called.
            incl_bwd: cache the gradients of `metric` too, under the names with `_grad`. Parameters get none.
                The model runs twice, and hook functions with it.
            metric: a function of the logits `[batch, pos, vocabulary]` that returns one number. Every rank
                calls it on the full logits.
            model_inputs: further keywords of the model.

        Returns:
            The logits `[batch, pos, vocabulary]` (None on ranks that receive nothing) and the cache, whose
            tensors are `[batch, pos, ...]` on the CPU. With a mask, `cache.lengths` are the texts' lengths,
            and entries at padding are zeros.

        Raises:
            SiteError: the model has no hook point of that name, or the run stops before it.
            FlexError: on all ranks: the model cannot take these tokens, or cannot stop at that layer.
            HookError: on all ranks: an edit failed, or the run reached one of the hook points with no tensor.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens, lambda name: name.endswith("hook_z"))
            >>> cache["blocks.0.attn.hook_z"].shape  # [batch, pos, head, size]
            torch.Size([2, 16, 4, 8])
        """
        session = self._session
        session.check_open()
        if incl_bwd and (not everywhere or stop_at_layer is not None):
            raise FlexError(
                "incl_bwd=True needs the logits on every rank; leave out everywhere and stop_at_layer"
            )
        given = attention_mask, position_ids, model_inputs, tokenizer or self.tokenizer
        prompts = read_prompts(self._session, tokens, *given)
        weights, stop = FullWeights(self._session, self.names), self._stop_point(stop_at_layer)
        aliases = (stop or self.names).matching(names_filter)
        result = self.names.logits(self._session.adapter.logits) if stop is None else stop.residual
        by_name = {a.name: a for a in [*aliases, result]}
        reading = TemporaryCaptures(self._session, weights)
        try:
            reading.add(list(by_name.values()))
            reading.mask = prompts.attention_mask
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            forked = torch.random.fork_rng(devices, enabled=incl_bwd)  # dropout is the same in both runs
            with stop.stopping() if stop else nullcontext(), forked:
                reading.real = run(self._session, prompts, microbatch_size)
            read = reading.collect(everywhere)
        finally:
            reading.remove()
        captured = {a.name: read[a.name] for a in aliases if a.name in read}
        if incl_bwd:
            gradient = differentiate_metric(session, metric, read[result.name], prompts.attention_mask)
            captured |= run_backward(session, weights, aliases, prompts, microbatch_size, gradient)
        return read.get(result.name), ActivationCache(captured, weights, everywhere, prompts.lengths)

    def run_with_hooks(
        self,
        tokens: PromptInput,
        fwd_hooks: Hooks = (),
        *,
        microbatch_size: int | None = None,
        stop_at_layer: int | None = None,
        **model_inputs: Any,
    ) -> Tensor:
        """Run the model forward with hook functions in TransformerLens' form. Every rank calls it.

        Args:
            tokens: as for `run_with_cache`.
            fwd_hooks: pairs of a name (or anything that `names_filter` of `run_with_cache` accepts) and
                `fn(tensor, hook)`. The function gets the full tensor `[batch, pos, ...]`, returns one of the
                same shape or None for no change, and may edit in place. It runs on every rank that holds a
                shard.
            microbatch_size: sequences that go through the pipeline, and to `fn`, together; all if None.
            stop_at_layer: as for `run_with_cache`.
            model_inputs: `attention_mask`, `position_ids`, `tokenizer` and the model's keywords, as for
                `run_with_cache`.

        Returns:
            The logits `[batch, pos, vocabulary]`, or the residual stream where the run stops, on every rank.

        Raises:
            SiteError: the model has no hook point of that name.
            FlexError: on all ranks: the model cannot take these tokens.
            HookError: on all ranks: a function failed, or one of the hook points cannot be edited.

        Examples:
            >>> def ablate(tensor, hook):
            ...     return 0 * tensor
            >>> logits = flex.interp.run_with_hooks(tokens, [("blocks.0.hook_mlp_out", ablate)])
            >>> logits.shape
            torch.Size([2, 16, 64])
        """
        self._session.check_open()
        stop, weights = self._stop_point(stop_at_layer), FullWeights(self._session, self.names)
        given = {"microbatch_size": microbatch_size, "stop_at_layer": stop_at_layer, **model_inputs}
        with edits(self._session, weights, fwd_hooks, stop), self.trace(tokens, **given) as trace:
            logits = trace.logits
        return logits.value

    def _stop_point(self, layer: int | None) -> StopPoint | None:
        return None if layer is None else StopPoint(self._session, self.names, layer)

    @contextmanager
    def stop_at_layer(self, layer: int) -> Iterator[None]:
        """Run only the layers before one in the forward passes of a scope, such as those that fill a dump.

        Every rank opens the scope. Modules that are passed by return the residual stream, the output layer
        too, and call no hooks.

        Args:
            layer: the first layer that does not run; negative numbers count from the end.

        Returns:
            A context manager.

        Raises:
            FlexError: on all ranks: the model cannot stop there.

        Examples:
            >>> with flex.interp.stop_at_layer(2), flex.interp.trace() as trace:
            ...     stream = trace["blocks.1"].output
            ...     _ = chunks[0](tokens, torch.arange(16).expand(2, 16), None)
            >>> stream.value.shape
            torch.Size([2, 16, 32])
        """
        self._session.check_open()
        with StopPoint(self._session, self.names, layer).stopping():
            yield

    @contextmanager
    def hooks(self, fwd_hooks: Hooks) -> Iterator[None]:
        """Register hook functions in TransformerLens' form for a scope; runs and steps inside call them.

        Every rank opens the scope.

        Args:
            fwd_hooks: as for `run_with_hooks`.

        Returns:
            A context manager.

        Raises:
            SiteError: the model has no hook point of that name.
            HookError: one of the hook points cannot be edited, or the model was restored.

        Examples:
            >>> with flex.interp.hooks([("blocks.0.hook_mlp_out", lambda tensor, hook: 0 * tensor)]):
            ...     train_step(chunks)
        """
        self._session.check_open()
        with edits(self._session, FullWeights(self._session, self.names), fwd_hooks):
            yield

    @contextmanager
    def generation(self, names_filter: Filter, *, everywhere: bool = True) -> Iterator[GeneratedText]:
        """Cache the activations of a text while it is generated, by position. Every rank opens the scope.

        Call `model.generate` of transformers, or Megatron's `StaticInferenceEngine`, once inside. The calls
        of the model on the prompts and on each new token become one tensor `[batch, pos, ...]`. Registered
        hooks stay active; `positions` of presets count in the complete text. Nothing is differentiated.

        Args:
            names_filter: what to cache, as for `run_with_cache`, with a dim of positions.
            everywhere: return the results on every rank; otherwise on the receiving rank only.

        Returns:
            A context manager with the text, whose `cache` is there after the block.

        Raises:
            SiteError: the model has no hook point of that name.
            HookError: on all ranks: a tensor cannot be joined by position, or an edit failed.

        Examples:
            >>> with flex.interp.generation("decoder.layers.1") as text:
            ...     for length in (15, 16):  # without a cache of keys and values
            ...         _ = chunks[0](tokens[:, :length], torch.arange(length).expand(2, -1), None)
            >>> text.cache["decoder.layers.1"].shape
            torch.Size([2, 16, 32])
        """
        self._session.check_open()
        weights = FullWeights(self._session, self.names)
        aliases = self.names.matching(names_filter)
        with record_generation(self._session, weights, aliases, everywhere) as text:
            yield text

    @contextmanager
    def trace(
        self,
        tokens: PromptInput | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        tokenizer: Tokenizer | None = None,
        microbatch_size: int | None = None,
        stop_at_layer: int | None = None,
        **model_inputs: Any,
    ) -> Iterator[Trace]:
        """Capture and replace tensors by the name of their hook point; values are available after the block.

        With tokens, the model runs on them at the end of the block. Without tokens, the trace uses the runs
        inside the block that follow the access to the hook points (of several steps, the last). Every rank
        opens the block and names the same hook points.

        Args:
            tokens: as for `run_with_cache`, as are the other arguments.
            attention_mask: 1 at text and 0 at padding.
            position_ids: `[batch, sequence]`.
            tokenizer: what turns text into token ids.
            microbatch_size: sequences that go through the pipeline together.
            stop_at_layer: the first layer that does not run; without tokens, in the runs of the block.
            model_inputs: further keywords of the model.

        Returns:
            A context manager, which gives the trace.

        Raises:
            SiteError: a name matches no hook point, or several.
            HookError: on all ranks, when the block ends, as for `run_with_cache` and `run_with_hooks`.

        Examples:
            >>> with flex.interp.trace(tokens) as trace:
            ...     middle = trace["blocks.1"].output
            >>> middle.value.shape
            torch.Size([2, 16, 32])
        """
        self._session.check_open()
        prompts, stop = None, self._stop_point(stop_at_layer)
        if tokens is not None:
            given = attention_mask, position_ids, model_inputs, tokenizer or self.tokenizer
            prompts = read_prompts(self._session, tokens, *given)
        trace = Trace(self._session, FullWeights(self._session, self.names), stop)
        try:
            with stop.stopping() if stop else nullcontext():
                yield trace
                real = None if prompts is None else run(self._session, prompts, microbatch_size)
            trace.finish(real, None if prompts is None else prompts.attention_mask)
        finally:
            trace.close()
