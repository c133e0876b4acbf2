"""ActivationCache: what was read in a run, by TransformerLens' names, and what is computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_flex.errors import FlexError
from megatron_flex.lens.decomposition import decompose_stream
from megatron_flex.lens.mapping import CacheKey, NamedTensors, DimSlice, slice_dim
from megatron_flex.lens.tensor_views import centre_stream, normalize_stream

LabelledStack = tuple[Tensor, list[str]]


class ActivationCache(NamedTensors):
    """Tensors by name, as TransformerLens has them; `pos` and `batch` are as in the tokens.

    `cache["blocks.3.hook_resid_post"]`, `cache["resid_post", 3]`, `cache["k3"]`, `cache["scale", 3, "ln1"]`,
    and what was read under our own names. Stacks have a first dim of components. `layer` is the one whose
    input is meant: None, -1 or the number of layers is what enters the unembedding.

    Methods that need weights say so: those are fetched from all ranks, so every rank calls them alike, and
    they are what the model has when they are first asked for.
    """

    # -- the residual stream ---------------------------------------------------------------------------

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: DimSlice = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Tensor | LabelledStack:
        """The residual stream in front of each layer up to `layer`, and behind the last.

        Args:
            layer: whose input is the last of them.
            incl_mid: those between attention and MLP too.
            apply_ln: scale them as `apply_ln_to_stack` does; but where `layer` is behind the last, norm each
                by itself, for a logit lens.
            pos_slice: these positions only.
            mlp_input: the input of that layer's MLP too.
            return_labels: return `(stack, labels)`.

        Returns:
            `[components, batch, pos, h]`.
        """
        last = self._number(layer)
        names: list[tuple[str, CacheKey]] = []
        for n in range(last):
            names.append((f"{n}_pre", ("resid_pre", n)))
            names += [(f"{n}_mid", ("resid_mid", n))] if incl_mid else []
        if last == self._layers:
            names.append(("final_post", ("resid_post", last - 1)))
        else:
            names.append((f"{last}_pre", ("resid_pre", last)))
            names += [(f"{last}_mid", ("resid_mid", last))] if mlp_input else []
        return self._made(names, last, mlp_input, apply_ln, pos_slice, return_labels, last == self._layers)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: DimSlice = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Tensor | LabelledStack:
        """What the embeddings and each sublayer added to the residual stream in front of `layer`.

        Args:
            layer: the layer.
            mlp_input: what that layer's attention added too.
            mode: all of them, or attention's or MLPs' only.
            apply_ln: scale them as `apply_ln_to_stack` does.
            pos_slice: these positions only.
            incl_embeds: the embeddings too.
            return_labels: return `(stack, labels)`.

        Returns:
            `[components, batch, pos, h]`; all of them sum to the stream.
        """
        last, aliases = self._number(layer), self._fetch.names.aliases
        names: list[tuple[str, CacheKey]] = []
        if incl_embeds:
            names = [("embed", "hook_embed")]
            names += [("pos_embed", "hook_pos_embed")] if "hook_pos_embed" in aliases else []
        kinds = {"all": ("attn", "mixer", "mlp"), "attn": ("attn",), "mlp": ("mlp",)}[mode]
        for n in range(last):
            there = [k for k in kinds if f"blocks.{n}.hook_{k}_out" in aliases]
            names += [(f"{n}_{k}_out", f"blocks.{n}.hook_{k}_out") for k in there]
        if mlp_input and mode != "mlp":
            names.append((f"{last}_attn_out", ("attn_out", last)))
        return self._made(names, last, mlp_input, apply_ln, pos_slice, return_labels)

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: DimSlice = None,
        batch_slice: DimSlice = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Centre (of a LayerNorm) and scale components as the norm in front of `layer` does to their sum.

        The norm's weights stay out, as where TransformerLens has folded them into those behind it.

        Args:
            residual_stack: `[components, batch, pos, h]`, sliced by position already.
            layer: the layer.
            mlp_input: its second norm.
            pos_slice: the positions that the stack has.
            batch_slice: the sequences to take of the stack.
            has_batch_dim: whether it has that dim.
            recompute_ln: if `layer` is behind the last, norm each component by itself instead.
        """
        made_of, last = self._fetch.names.made_of, self._number(layer)
        scale = self["ln_final.hook_scale"]
        if last < self._layers:
            scale = self["scale", last, "ln2" if mlp_input else "ln1"]
        scale = slice_dim(scale, pos_slice, -2)
        if self.has_batch_dim:
            scale = slice_dim(scale, batch_slice, 0)
        if has_batch_dim:
            residual_stack = slice_dim(residual_stack, batch_slice, 1)
        if recompute_ln and last == self._layers:
            return self._normed(residual_stack)
        assert made_of is not None
        return centre_stream(residual_stack, made_of.rms) / scale

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """The tensors of that short name in all layers before `layer`, stacked."""
        return torch.stack([self[activation_name, n, sublayer_type] for n in range(self._number(layer))])

    # -- with weights ----------------------------------------------------------------------------------

    def compute_head_results(self) -> None:
        """Put `hook_result` of every layer into the cache. Every rank calls it."""
        for n in range(self._layers):
            name = f"blocks.{n}.attn.hook_result"
            if name in self._fetch.names.aliases and name not in self._tensors:
                output = self._weight(partial(self._fetch.output, n))
                z = self["z", n]
                self._tensors[name] = torch.einsum("...nd,ndh->...nh", z, output.to(z))

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: DimSlice = None,
        apply_ln: bool = False,
    ) -> Tensor | LabelledStack:
        """What each head before `layer` added to the residual stream. Every rank calls it.

        Args:
            layer: the layer.
            return_labels: return `(stack, labels)`, labels as `L0H0`.
            incl_remainder: the rest of the stream as one more component.
            pos_slice: these positions only.
            apply_ln: scale them as `apply_ln_to_stack` does.

        Returns:
            `[layers * heads, batch, pos, h]`.
        """
        self.compute_head_results()
        last = self._number(layer)
        kept = [n for n in range(last) if f"blocks.{n}.attn.hook_result" in self._tensors]
        found = [slice_dim(self["result", n], pos_slice, -3) for n in kept]
        labels = [f"L{n}H{m}" for n, piece in zip(kept, found, strict=True) for m in range(piece.shape[-2])]
        return self._stacked(found, labels, layer, return_labels, incl_remainder, pos_slice, apply_ln)

    def get_neuron_results(self, layer: int, neuron_slice: DimSlice = None, pos_slice: DimSlice = None) -> Tensor:
        """What each neuron of one layer added, `[batch, pos, neurons, h]`. Every rank calls it."""
        output = self._weight(lambda: self._fetch.neurons(layer))
        active = slice_dim(slice_dim(self["post", layer], pos_slice, -2), neuron_slice, -1)
        return active[..., None] * slice_dim(output, neuron_slice, 0).to(active)

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: DimSlice = None,
        neuron_slice: DimSlice = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
    ) -> Tensor | LabelledStack:
        """What each neuron before `layer` added, `[neurons, batch, pos, h]`. Every rank calls it. Large.

        The arguments are those of `stack_head_results`, labels as `L0N0`; `neuron_slice` takes some of each
        layer.
        """
        found = [self.get_neuron_results(n, neuron_slice, pos_slice) for n in range(self._number(layer))]
        width = self["post", 0].shape[-1]
        numbers = [int(n) for n in slice_dim(torch.arange(width), neuron_slice, 0).reshape(-1)]
        labels = [f"L{n}N{m}" for n in range(len(found)) for m in numbers]
        return self._stacked(found, labels, layer, return_labels, incl_remainder, pos_slice, apply_ln)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: DimSlice = None,
        return_labels: bool = False,
    ) -> Tensor | LabelledStack:
        """Heads, neurons, embeddings and the sum of biases, which sum to the stream. Every rank calls it.

        The arguments are those of `decompose_resid`; without `expand_neurons` an MLP is one component.

        Returns:
            `[components, batch, pos, h]`.
        """
        last = self._number(layer)
        weights = self._weight(lambda: self._fetch)
        stack, labels = decompose_stream(self, weights, last, mlp_input, expand_neurons, pos_slice)
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice, None, self.has_batch_dim)
        return (stack, labels) if return_labels else stack

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: int | Tensor,
        incorrect_tokens: int | Tensor | None = None,
        pos_slice: DimSlice = None,
        batch_slice: DimSlice = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """What each component adds to the logits of some tokens. Every rank calls it.

        That is the component scaled by the final norm, times the norm's weight, times the tokens' columns of
        W_U. Over all components it sums to the logit, less what a LayerNorm's bias adds.

        Args:
            residual_stack: `[components, batch, pos, h]`.
            tokens: one, one for each sequence `[batch]`, or one for each place `[batch, pos]`.
            incorrect_tokens: likewise; what is added to those is taken off.
            pos_slice: the positions that the stack has.
            batch_slice: the sequences to take of the stack.
            has_batch_dim: whether it has that dim.

        Returns:
            `[components, batch, pos]`.

        Raises:
            FlexError: the tokens differ in shape.
        """
        chosen = torch.as_tensor(tokens)
        others = None if incorrect_tokens is None else torch.as_tensor(incorrect_tokens)
        if others is not None and others.shape != chosen.shape:
            raise FlexError(
                f"tokens have shape {tuple(chosen.shape)}, incorrect_tokens {tuple(others.shape)}; give one"
            )
        columns = self._weight(self._fetch.unembedding).T
        weight = self._weight(lambda: self._fetch.final_norm()[0])
        directions = columns[chosen] if others is None else columns[chosen] - columns[others]
        scaled = self.apply_ln_to_stack(residual_stack, -1, False, pos_slice, batch_slice, has_batch_dim)
        if has_batch_dim and scaled.ndim == 4 and chosen.ndim == 1 and len(chosen) == scaled.shape[1]:
            directions = directions.unsqueeze(-2)  # one token for each sequence, at all its positions
        return (scaled * (directions * weight).to(scaled)).sum(-1)

    def logit_lens(self, residual_stack: Tensor) -> Tensor:
        """The logits that streams would make if they were the last, each normed by itself. Every rank calls.

        Args:
            residual_stack: `[..., h]`, for example what `accumulated_resid()` gave.

        Returns:
            `[..., vocabulary]`.
        """
        weight, bias = self._weight(lambda: self._fetch.final_norm()[0]), self._fetch.final_norm()[1]
        stream = self._normed(residual_stack)
        stream = stream * weight.to(stream)
        stream = stream if bias is None else stream + bias.to(stream)
        return stream @ self._weight(self._fetch.unembedding).to(stream)

    def _normed(self, stream: Tensor) -> Tensor:
        """Streams as the last norm makes them, without its weights."""
        made_of = self._fetch.names.made_of
        assert made_of is not None
        return normalize_stream(stream, made_of.rms, made_of.epsilon)

    def _made(
        self,
        names: Sequence[tuple[str, CacheKey]],
        last: int,
        mlp_input: bool,
        apply_ln: bool,
        pos_slice: DimSlice,
        return_labels: bool,
        recompute_ln: bool = False,
    ) -> Tensor | LabelledStack:
        if not names:
            raise FlexError("no component is asked for; take embeddings, or a layer above 0")
        stack = torch.stack([slice_dim(self[key], pos_slice, -2) for _, key in names])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack, last, mlp_input, pos_slice, None, self.has_batch_dim, recompute_ln
            )
        return (stack, [label for label, _ in names]) if return_labels else stack

    def _stacked(
        self,
        found: list[Tensor],
        labels: list[str],
        layer: int,
        return_labels: bool,
        incl_remainder: bool,
        pos_slice: DimSlice,
        apply_ln: bool,
    ) -> Tensor | LabelledStack:
        """Pieces `[..., piece, h]` of several layers as components, and what is left of the stream."""
        last = self._number(layer)
        stream = slice_dim(self["resid_post", last - 1] if last else self["resid_pre", 0], pos_slice, -2)
        stack = torch.cat(found, -2).movedim(-2, 0) if found else stream.new_zeros(0, *stream.shape)
        if incl_remainder:
            stack, labels = torch.cat([stack, (stream - stack.sum(0))[None]]), [*labels, "remainder"]
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, last, False, pos_slice, has_batch_dim=self.has_batch_dim)
        return (stack, labels) if return_labels else stack
