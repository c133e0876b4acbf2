"""ActivationCache: the activations of a run, by TransformerLens' names or by site names, and quantities
computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Literal, Self, TypeVar, cast

import torch
from torch import Tensor

from megatron_flex.errors import FlexError, SiteError, suggest_nearest
from megatron_flex.layout import Sizes
from megatron_flex.lens.full_weights import FullWeights
from megatron_flex.lens.lens_names import LensNames, expand_shorthand
from megatron_flex.lens.tensor_views import centre_stream, normalize_stream
from megatron_flex.sites import Site

FetchedT = TypeVar("FetchedT")
MethodT = TypeVar("MethodT", bound=Callable[..., object])
DimSlice = int | slice | Sequence[int] | Tensor | None
CacheKey = str | tuple[str | int | None, ...]
LabelledStack = tuple[Tensor, list[str]]


def _needs_decoder(method: MethodT) -> MethodT:
    """Refuse a method of the residual stream where the model's components are not known."""

    @wraps(method)
    def checked(self: NamedTensors, *args: object, **kwargs: object) -> object:
        if self.lens_names.made_of is None:
            raise FlexError(
                f"{method.__name__} needs Megatron's decoder.layers.* or a Hugging Face model of a family in "
                "docs/lens.md; read this model's own hook points, such as "
                f"cache[{next(iter(self), 'name:output')!r}]"
            )
        return method(self, *args, **kwargs)

    return cast(MethodT, checked)


class NamedTensors(Mapping[str, Tensor]):
    """The captures of a run, and the weights of the model.

    Attributes:
        has_batch_dim: whether the tensors have a batch dim.
        lengths: how many positions of each sequence are text, `[batch]`; None if the run had no attention
            mask. The positions from there on are padding, and their entries zeros.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        weights: FullWeights,
        spread: bool = True,
        lengths: Tensor | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self._fetch, self._spread = weights, spread
        self.has_batch_dim, self.lengths = True, lengths

    def __getitem__(self, key: CacheKey) -> Tensor:
        name = self._full(key)
        if name not in self._tensors:
            raise SiteError(f"{name!r} is not in this cache{suggest_nearest(name, self._tensors)}")
        return self._tensors[name]

    def _full(self, key: CacheKey) -> str:
        if isinstance(key, str):
            names = self._fetch.names
            key = key if key in self._tensors else names.resolve(key)
            key = key if key in self._tensors else names.sites.own_name(key)
            if key in self._tensors or ":" in key:
                return key
            points = [n for n in self._tensors if n.partition(":")[0] == key and ":" in n]
            return points[0] if len(points) == 1 else expand_shorthand(key)
        name, layer, kind = (*key, None, None)[:3]
        if not isinstance(name, str) or isinstance(layer, str) or isinstance(kind, int):
            raise SiteError(f"{key!r} is not (name, layer, kind of part); write it in that order")
        return expand_shorthand(name, layer if layer is None or layer >= 0 else layer + self._layers, kind)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, tuple)) and self._full(key) in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__} with keys {list(self._tensors)}"

    def to(self, device: str | torch.device) -> Self:
        """The same object, with its tensors moved to a device."""
        self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        return self

    def remove_batch_dim(self) -> Self:
        """The same object, its tensors without the batch dim, for a run over one sequence.

        Raises:
            FlexError: there are more sequences.
        """
        if self.has_batch_dim:
            wrong = next((n for n, t in self._tensors.items() if t.shape[0] != 1), None)
            if wrong is not None:
                raise FlexError(
                    f"{wrong} has {len(self._tensors[wrong])} sequences; only a batch of one can lose its dim"
                )
            self._tensors = {name: tensor[0] for name, tensor in self._tensors.items()}
            self.lengths = None if self.lengths is None else self.lengths[0]
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: DimSlice) -> Self:
        """A cache of these sequences only; with an integer, without the batch dim. This cache is unchanged.

        Raises:
            FlexError: the tensors have no batch dim.
        """
        if not self.has_batch_dim:
            raise FlexError("the batch dim is removed; take sequences before that")
        sliced = {name: slice_dim(tensor, batch_slice, 0) for name, tensor in self._tensors.items()}
        lengths = None if self.lengths is None else slice_dim(self.lengths, batch_slice, 0)
        out = type(self)(sliced, self._fetch, self._spread, lengths)
        out.has_batch_dim = not isinstance(batch_slice, int)
        return out

    @property
    def lens_names(self) -> LensNames:
        """The TransformerLens names of this model, as `aliases`."""
        return self._fetch.names

    @property
    def sizes(self) -> Sizes:
        """The number of ranks on each axis of the mesh."""
        return self._fetch.sizes

    def site(self, key: CacheKey) -> Site | None:
        """The site that a tensor was captured at; None where it was computed from several."""
        name, names = self._full(key), self._fetch.names
        name = names.aliases[name].site if name in names.aliases else name
        return next((site for site in names.sites if site.name == name), None)

    @property
    def _layers(self) -> int:
        return self._fetch.names.layers

    def _number(self, layer: int | None) -> int:
        last = self._layers if layer is None or layer == -1 else layer
        if not 0 <= last <= self._layers:
            raise FlexError(
                f"layer {layer} is not one of 0 to {self._layers}; -1 is what enters the unembedding"
            )
        return last

    def _has(self, layer: int, name: str) -> bool:
        """Whether the model has the hook point in that layer."""
        return f"blocks.{layer}.hook_{name}" in self._fetch.names.aliases

    def _check_mlp(self, layer: int) -> bool:
        """True; an error if the layer has no MLP, or is after the last."""
        if not self._has(layer, "mlp_out"):
            layers = [str(n) for n in range(self._layers) if self._has(n, "mlp_out")]
            raise FlexError(
                f"mlp_input=True: layer {layer} has no MLP; layers with one are {', '.join(layers) or 'none'}"
            )
        return True

    def _weight(self, fetch: Callable[[], FetchedT]) -> FetchedT:
        """A weight; an error on ranks that have no cache while the others would wait in the collective."""
        if not self._spread:
            raise FlexError("this needs weights, which all ranks must fetch; run_with_cache(everywhere=True)")
        return fetch()


def slice_dim(tensor: Tensor, which: DimSlice, dim: int) -> Tensor:
    """Entries along a dim: all (None), one (which removes the dim), a range (a slice), or a list.

    A tuple or list of one to three numbers is interpreted as a slice's arguments, as in TransformerLens.
    """
    if which is None:
        return tensor
    if isinstance(which, int):
        return tensor.select(dim, which)
    if isinstance(which, (tuple, list)):
        which = slice(*which) if isinstance(which, tuple) else torch.as_tensor(which)
    if isinstance(which, slice):
        return tensor.movedim(dim, 0)[which].movedim(0, dim)
    return tensor.index_select(dim, torch.as_tensor(which, device=tensor.device))


def decompose_stream(
    cache: ActivationCache,
    weights: FullWeights,
    last: int,
    mlp_input: bool,
    expand_neurons: bool,
    where: DimSlice,
) -> LabelledStack:
    """The components of the residual stream before layer `last`, or before its MLP, with labels."""
    aliases, paths = weights.names.aliases, weights.names.paths
    layers = range(last + (mlp_input and not paths.parallel))
    parts: list[Tensor | LabelledStack] = []
    expanded: list[int] = []
    if not paths.normed_outputs:  # after a norm, heads and neurons are not what is added to the stream
        parts.append(cache.stack_head_results(len(layers), True, pos_slice=where))
        expanded = [n for n in layers if f"blocks.{n}.attn.hook_result" in cache]
    expand_neurons = expand_neurons and not paths.normed_outputs
    dense = [n for n in range(last) if expand_neurons and f"blocks.{n}.mlp.hook_post" in aliases]
    if dense:
        parts.append(cache.stack_neuron_results(last, where, return_labels=True))
    unexpanded = {
        "attn": [n for n in layers if n not in expanded],
        "mixer": list(layers),
        "mlp": [n for n in range(last) if n not in dense],
    }  # sublayers that are one component
    whole = [
        (f"{n}_{kind}_out", f"blocks.{n}.hook_{kind}_out") for kind in unexpanded for n in unexpanded[kind]
    ]
    whole = [(label, name) for label, name in whole if name in aliases]
    whole += [(name, f"hook_{name}") for name in ("embed", "pos_embed") if name in cache]
    parts += [(slice_dim(cache[name], where, -2)[None], [label]) for label, name in whole]
    stacks, labels = zip(*parts, strict=True)
    linears = [f"{paths.layer(n)}.{paths.head_output}" for n in expanded]
    linears += [f"{paths.layer(n)}.{paths.neuron_output}" for n in dense]
    biases = [bias for linear in linears if (bias := weights.bias(linear)) is not None]
    bias = sum(biases, torch.zeros(())).to(stacks[0])
    stack = torch.cat([*stacks, bias.expand(1, *stacks[0].shape[1:])])
    return stack, [*(label for some in labels for label in some), "bias"]


class ActivationCache(NamedTensors):
    """Activations by name, as in TransformerLens; `pos` and `batch` are as in the tokens.

    `cache["blocks.3.hook_resid_post"]`, `cache["resid_post", 3]`, `cache["k3"]`, `cache["scale", 3, "ln1"]`,
    and captures under site names. Stacks have a first dim of components. `layer` is the layer whose input is
    meant: None, -1 or the number of layers is the input of the unembedding.

    Methods that need weights document that: every rank calls these methods, because weights are gathered
    from all ranks, and they have the values of the first call.

    Examples:
        >>> logits, cache = flex.interp.run_with_cache(tokens)
        >>> cache["blocks.3.hook_resid_post"].shape, cache["pattern", 0].shape
        (torch.Size([2, 16, 32]), torch.Size([2, 4, 16, 16]))
    """

    # -- the residual stream ---------------------------------------------------------------------------

    @_needs_decoder
    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: DimSlice = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Tensor | LabelledStack:
        """The residual stream before each layer up to `layer`, and after the last.

        Args:
            layer: the layer whose input is the last component.
            incl_mid: include the stream between attention and MLP, of layers that have both.
            apply_ln: scale them as `apply_ln_to_stack` does; but where `layer` is after the last, norm each
                separately, for a logit lens.
            pos_slice: these positions only.
            mlp_input: include the input of that layer's MLP.
            return_labels: return `(stack, labels)`.

        Returns:
            `[components, batch, pos, h]`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> stack, labels = cache.accumulated_resid(return_labels=True)
            >>> stack.shape, labels
            (torch.Size([5, 2, 16, 32]), ['0_pre', '1_pre', '2_pre', '3_pre', 'final_post'])
        """
        last = self._number(layer)
        names: list[tuple[str, CacheKey]] = []
        for n in range(last):
            names.append((f"{n}_pre", ("resid_pre", n)))
            names += [(f"{n}_mid", ("resid_mid", n))] if incl_mid and self._has(n, "resid_mid") else []
        if last == self._layers:
            names.append(("final_post", ("resid_post", last - 1)))
        else:
            names.append((f"{last}_pre", ("resid_pre", last)))
            mid = mlp_input and self._check_mlp(last) and self._has(last, "resid_mid")
            names += [(f"{last}_mid", ("resid_mid", last))] if mid else []
        stack = self._stack(names, pos_slice)
        return self._scaled(
            stack, last, mlp_input, apply_ln, pos_slice, return_labels, recompute_ln=last == self._layers
        )

    @_needs_decoder
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
        """The contributions of the embeddings and each sublayer to the residual stream before `layer`.

        Args:
            layer: the layer.
            mlp_input: include the output of that layer's attention.
            mode: all components, or attention's or MLPs' only.
            apply_ln: scale them as `apply_ln_to_stack` does.
            pos_slice: these positions only.
            incl_embeds: include the embeddings.
            return_labels: return `(stack, labels)`.

        Returns:
            `[components, batch, pos, h]`; all of them sum to the stream.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> stack, labels = cache.decompose_resid(layer=1, return_labels=True)
            >>> labels
            ['embed', '0_attn_out', '0_mlp_out']
            >>> torch.allclose(stack.sum(0), cache["resid_pre", 1], atol=1e-4)
            True
        """
        last, aliases = self._number(layer), self._fetch.names.aliases
        names: list[tuple[str, CacheKey]] = []
        if incl_embeds:
            names = [("embed", "hook_embed")]
            names += [("pos_embed", "hook_pos_embed")] if "hook_pos_embed" in aliases else []
        kinds = {"all": ("attn", "mixer", "mlp"), "attn": ("attn",), "mlp": ("mlp",)}[mode]
        for n in range(last):
            names += [(f"{n}_{k}_out", f"blocks.{n}.hook_{k}_out") for k in kinds if self._has(n, f"{k}_out")]
        before_mlp = self._has(last, "attn_out") and not self.lens_names.paths.parallel
        if mlp_input and self._check_mlp(last) and mode != "mlp" and before_mlp:
            names.append((f"{last}_attn_out", ("attn_out", last)))
        stack = self._stack(names, pos_slice)
        return self._scaled(stack, last, mlp_input, apply_ln, pos_slice, return_labels)

    @_needs_decoder
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
        """Center (for a LayerNorm) and scale components as the norm before `layer` does to their sum.

        The norm's weights are not applied, as where TransformerLens has folded them into the next linears.

        Args:
            residual_stack: `[components, batch, pos, h]`, sliced by position already.
            layer: the layer.
            mlp_input: use the norm before its MLP.
            pos_slice: the positions that the stack has.
            batch_slice: the sequences to select from the stack.
            has_batch_dim: whether the stack has a batch dim.
            recompute_ln: if `layer` is after the last, norm each component separately instead.

        Returns:
            `[components, batch, pos, h]`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> cache.apply_ln_to_stack(cache.decompose_resid()).shape
            torch.Size([9, 2, 16, 32])
        """
        made_of, last = self._fetch.names.made_of, self._number(layer)
        scale = self["ln_final.hook_scale"]
        if last < self._layers:
            if not self.lens_names.paths.normed_inputs:
                raise FlexError(
                    f"layer {last} of this model reads the stream without a norm, so it has no scale; leave "
                    "apply_ln out, or take layer=-1"
                )
            first = not mlp_input and f"blocks.{last}.ln1.hook_scale" in self._fetch.names.aliases
            scale = self["scale", last, "ln1" if first else "ln2"]
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
        """Return the tensors of that short name in all layers before `layer`, stacked.

        Layers that have no such tensor are left out: a HybridModel has attention and MLP in different layers.

        Raises:
            SiteError: no layer has it, or the cache lacks it for a layer.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> cache.stack_activation("mlp_out").shape
            torch.Size([4, 2, 16, 32])
        """
        keys: list[CacheKey] = [(activation_name, n, sublayer_type) for n in range(self._number(layer))]
        present = [key for key in keys if key in self or self._full(key) in self._fetch.names.aliases]
        return torch.stack([self[key] for key in present or keys])

    # -- with weights ----------------------------------------------------------------------------------

    @_needs_decoder
    def compute_head_results(self) -> None:
        """Add `hook_result` of every layer to the cache. Every rank calls it.

        Raises:
            FlexError: the linear after the heads does more than multiply by its weight, as LoRA's does.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> cache.compute_head_results()
            >>> cache["blocks.0.attn.hook_result"].shape  # [batch, pos, head, h]
            torch.Size([2, 16, 4, 32])
        """
        for n in range(self._layers):
            name, aliases = f"blocks.{n}.attn.hook_result", self._fetch.names.aliases
            if name not in aliases and f"blocks.{n}.attn.hook_z" in aliases:
                paths = self.lens_names.paths
                raise FlexError(
                    f"{paths.layer(n)}.{paths.head_output} has no weight that gives the results of heads; "
                    "merge an adapter such as LoRA's into it, or use hook_attn_out"
                )
            if name in aliases and name not in self._tensors:
                output = self._weight(partial(self._fetch.output, n))
                z = self["z", n]
                self._tensors[name] = torch.einsum("...nd,ndh->...nh", z, output.to(z))

    @_needs_decoder
    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: DimSlice = None,
        apply_ln: bool = False,
    ) -> Tensor | LabelledStack:
        """The contribution of each head before `layer` to the residual stream. Every rank calls it.

        Args:
            layer: the layer.
            return_labels: return `(stack, labels)`, labels as `L0H0`.
            incl_remainder: add the rest of the stream as one more component.
            pos_slice: these positions only.
            apply_ln: scale them as `apply_ln_to_stack` does.

        Returns:
            `[layers * heads, batch, pos, h]`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> stack, labels = cache.stack_head_results(layer=2, return_labels=True)
            >>> stack.shape, labels[:2]
            (torch.Size([8, 2, 16, 32]), ['L0H0', 'L0H1'])
        """
        self.compute_head_results()
        last = self._number(layer)
        layers_with_heads = [n for n in range(last) if f"blocks.{n}.attn.hook_result" in self._tensors]
        head_results = [slice_dim(self["result", n], pos_slice, -3) for n in layers_with_heads]
        labels = [
            f"L{n}H{m}"
            for n, piece in zip(layers_with_heads, head_results, strict=True)
            for m in range(piece.shape[-2])
        ]
        stack = self._stack_pieces(head_results, labels, last, incl_remainder, pos_slice)
        return self._scaled(stack, last, False, apply_ln, pos_slice, return_labels)

    @_needs_decoder
    def get_neuron_results(
        self, layer: int, neuron_slice: DimSlice = None, pos_slice: DimSlice = None
    ) -> Tensor:
        """Return the contribution of each neuron of a layer, `[batch, pos, neurons, h]`. Every rank calls it.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> cache.get_neuron_results(0, neuron_slice=[7, 11]).shape
            torch.Size([2, 16, 2, 32])
        """
        output = self._weight(lambda: self._fetch.neurons(layer))
        active = slice_dim(slice_dim(self["post", layer], pos_slice, -2), neuron_slice, -1)
        return active[..., None] * slice_dim(output, neuron_slice, 0).to(active)

    @_needs_decoder
    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: DimSlice = None,
        neuron_slice: DimSlice = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
    ) -> Tensor | LabelledStack:
        """Return contributions of neurons before `layer`. Large. Every rank calls it.

        The arguments are those of `stack_head_results`, labels as `L0N0`; `neuron_slice` selects neurons of
        each layer. Layers without an MLP, and those whose MLP is a mixture of experts, have none.

        Returns:
            `[neurons, batch, pos, h]`, and labels with `return_labels`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> cache.stack_neuron_results(layer=2, neuron_slice=[7, 11]).shape
            torch.Size([4, 2, 16, 32])
        """
        last, aliases = self._number(layer), self._fetch.names.aliases
        layers_with_mlp = [n for n in range(last) if f"blocks.{n}.mlp.hook_post" in aliases]
        neuron_results = [self.get_neuron_results(n, neuron_slice, pos_slice) for n in layers_with_mlp]
        width = self["post", layers_with_mlp[0]].shape[-1] if layers_with_mlp else 0
        numbers = [int(n) for n in slice_dim(torch.arange(width), neuron_slice, 0).reshape(-1)]
        labels = [f"L{n}N{m}" for n in layers_with_mlp for m in numbers]
        stack = self._stack_pieces(neuron_results, labels, last, incl_remainder, pos_slice)
        return self._scaled(stack, last, False, apply_ln, pos_slice, return_labels)

    @_needs_decoder
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

        The arguments are those of `decompose_resid`. Without `expand_neurons` an MLP is one component. A
        mixture of experts, a Mamba mixer, and an attention without results of heads are always one component.

        Returns:
            `[components, batch, pos, h]`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> stack = cache.get_full_resid_decomposition(layer=1, expand_neurons=False)
            >>> torch.allclose(stack.sum(0), cache["resid_pre", 1], atol=1e-4)
            True
        """
        last = self._number(layer)
        if mlp_input:
            self._check_mlp(last)
        weights = self._weight(lambda: self._fetch)
        stack = decompose_stream(self, weights, last, mlp_input, expand_neurons, pos_slice)
        return self._scaled(stack, last, mlp_input, apply_ln, pos_slice, return_labels)

    @_needs_decoder
    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: int | Tensor,
        incorrect_tokens: int | Tensor | None = None,
        pos_slice: DimSlice = None,
        batch_slice: DimSlice = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """The contribution of each component to the logits of some tokens. Every rank calls it.

        It is the component scaled by the final norm, times the norm's weight, times the tokens' columns of
        W_U. Over all components it sums to the logit, without the part of a LayerNorm's bias.

        Args:
            residual_stack: `[components, batch, pos, h]`.
            tokens: one, one for each sequence `[batch]`, or one for each position `[batch, pos]`.
            incorrect_tokens: likewise; their contribution is subtracted.
            pos_slice: the positions that the stack has.
            batch_slice: the sequences to select from the stack.
            has_batch_dim: whether the stack has a batch dim.

        Returns:
            `[components, batch, pos]`.

        Raises:
            FlexError: the tokens differ in shape.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> attributions = cache.logit_attrs(cache.decompose_resid(), tokens=5)
            >>> torch.allclose(attributions.sum(0), logits[:, :, 5], atol=1e-4)
            True
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

    @_needs_decoder
    def logit_lens(self, residual_stack: Tensor) -> Tensor:
        """The logits of residual streams as if each were the last, normed separately. Every rank calls it.

        Args:
            residual_stack: `[..., h]`, for example the result of `accumulated_resid()`.

        Returns:
            `[..., vocabulary]`.

        Examples:
            >>> logits, cache = flex.interp.run_with_cache(tokens)
            >>> lens = cache.logit_lens(cache.accumulated_resid())
            >>> torch.allclose(lens[-1], logits, atol=1e-4)
            True
        """
        return self._weight(lambda: self._fetch.logits(self._normed(residual_stack)))

    def _normed(self, stream: Tensor) -> Tensor:
        """Streams after the final norm, without its weights."""
        made_of = self._fetch.names.made_of
        assert made_of is not None
        return normalize_stream(stream, made_of.rms, made_of.epsilon)

    def _stack(self, names: Sequence[tuple[str, CacheKey]], pos_slice: DimSlice) -> LabelledStack:
        if not names:
            raise FlexError("no component is selected; take embeddings, or a layer above 0")
        stack = torch.stack([slice_dim(self[key], pos_slice, -2) for _, key in names])
        return stack, [label for label, _ in names]

    def _stack_pieces(
        self,
        pieces: list[Tensor],
        labels: list[str],
        last: int,
        incl_remainder: bool,
        pos_slice: DimSlice,
    ) -> LabelledStack:
        """Pieces `[..., piece, h]` of several layers as components, and the remainder of the stream."""
        stream = slice_dim(self["resid_post", last - 1] if last else self["resid_pre", 0], pos_slice, -2)
        stack = torch.cat(pieces, -2).movedim(-2, 0) if pieces else stream.new_zeros(0, *stream.shape)
        if incl_remainder:
            stack, labels = torch.cat([stack, (stream - stack.sum(0))[None]]), [*labels, "remainder"]
        return stack, labels

    def _scaled(
        self,
        stack: LabelledStack,
        last: int,
        mlp_input: bool,
        apply_ln: bool,
        pos_slice: DimSlice,
        return_labels: bool,
        recompute_ln: bool = False,
    ) -> Tensor | LabelledStack:
        """The components as a method returns them: scaled with `apply_ln`, and labelled on request."""
        components, labels = stack
        if apply_ln:
            components = self.apply_ln_to_stack(
                components, last, mlp_input, pos_slice, None, self.has_batch_dim, recompute_ln
            )
        return (components, labels) if return_labels else components
