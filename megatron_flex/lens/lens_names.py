"""TransformerLens' names: the site of each, and the conversion of its tensor to TransformerLens' shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_flex.adapters import Architecture, DecoderPaths, LayerPoint
from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.gpt_names import NAMESPACE
from megatron_flex.lens.tensor_views import (
    BatchFirst,
    Biased,
    HeadResults,
    HeadsFirst,
    Mapped,
    MaskedScores,
    Normalized,
    Part,
    Pattern,
    Positions,
    Scale,
    Scaled,
    Scores,
    SplitHeads,
    Unweighted,
    View,
)
from megatron_flex.sites import Site, SiteTable

Filter = str | Sequence[str] | Callable[[str], bool] | None
NORM_NOT_EDITABLE = (
    "it is computed from the norm's input; edit hook_normalized, or the stream that enters the norm"
)
RESULT_NOT_EDITABLE = "it is computed from hook_z; edit that, or hook_attn_out"
LENS_PREFIXES = ("blocks.", "hook_", "ln_final", "unembed.")  # prefixes of their names


@dataclass(frozen=True)
class Alias:
    """A name, with its site and the conversion of the tensor.

    Attributes:
        name: TransformerLens' name, or the site's.
        site: the site to read.
        view: the conversion of the site's tensor.
        edit: the site to edit, and the conversion there, if they differ.
        large: whether it is omitted when all names are requested.
        sure: whether every run must pass it.
    """

    name: str
    site: str
    view: View
    edit: tuple[str, View] | None = None
    large: bool = False
    sure: bool = True

    @property
    def edited(self) -> tuple[str, View]:
        """The site and the conversion for edits."""
        return self.edit or (self.site, self.view)


@dataclass(frozen=True)
class BlockSites:
    """A block, as TransformerLens has them, with attention, MLP or another mixer.

    Attributes:
        name: TransformerLens' name.
        number: of the layer with the attention.
        attention: the path of that layer.
        mlp: the path of the layer with the MLP, usually the same.
        mid: the site of the residual stream between them.
    """

    name: str
    number: int
    attention: str
    mlp: str
    mid: str


def expand_shorthand(name: str, layer: int | None = None, kind: str | None = None) -> str:
    """The full name for a short one: `("k", 6)`, `"k6"`, `("scale", 2, "ln1")`.

    Args:
        name: a full name, or the word after `hook_`, with or without the layer.
        layer: the block.
        kind: the part of the block, where the word is ambiguous.
    """
    if layer is None and kind is None and ("." in name or name.startswith("hook_")):
        return name
    written = re.match(r"([a-z_]+?)(\d+)([a-z]?.*)", name)
    if written:
        name, layer, kind = written[1], int(written[2]), written[3]
    name = SYNONYMS.get(name, name)
    if name in ATTENTION_NAMES:
        kind = "attn"
    elif name in MLP_NAMES:
        kind = "mlp"
    else:
        kind = BLOCK_PARTS.get(kind or "", kind)
    if name in ("scale", "normalized") and layer is None:
        kind = "ln_final"
    block = "" if layer is None else f"blocks.{layer}."
    return f"{block}{kind + '.' if kind else ''}hook_{name}"


ATTENTION_NAMES = ("q", "k", "v", "z", "rot_q", "rot_k", "result", "pattern", "attn_scores")
MLP_NAMES = ("pre", "post", "mid", "pre_linear")
BLOCK_PARTS = {"a": "attn", "m": "mlp", "b": "", "block": "", "blocks": "", "attention": "attn"}
SYNONYMS = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}


# The names of TransformerLens 4's TransformerBridge within a block, and those of 3.9's HookedTransformer.
BRIDGE_BLOCK_NAMES = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "ln1.hook_in": "hook_resid_pre",
    "ln2.hook_in": "hook_resid_mid",
    "attn.hook_out": "hook_attn_out",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "mlp.hook_out": "hook_mlp_out",
    "mlp.gate.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
}
BRIDGE_NAMES = {"embed.hook_out": "hook_embed", "pos_embed.hook_out": "hook_pos_embed"}


def resolve_bridge_name(name: str, gated: bool) -> str:
    """The name in TransformerLens 3.9 of a name of TransformerLens 4's bridge; other names as they are.

    Args:
        name: such as `blocks.0.attn.q.hook_out`.
        gated: whether the MLPs are gated: there `mlp.in` is the linear without the activation.
    """
    block = re.fullmatch(r"(blocks\.\d+\.)(.+)", name)
    if block is None:
        return BRIDGE_NAMES.get(name, name)
    if block[2] == "mlp.in.hook_out":
        return f"{block[1]}mlp.hook_{'pre_linear' if gated else 'pre'}"
    return block[1] + BRIDGE_BLOCK_NAMES.get(block[2], block[2])


class LensNames:
    """The names of one model.

    Args:
        sites: its sites, over all stages.
        made_of: the model's components; None where only site names are known.
        parameters: the names of its parameters.
    """

    def __init__(self, sites: SiteTable, made_of: Architecture | None, parameters: Sequence[str]) -> None:
        self.sites, self.made_of, self._parameters = sites, made_of, set(parameters)
        layer = re.compile(rf"{re.escape(made_of.paths.layers)}\.(\d+)[.:]") if made_of else None
        matches = (layer.match(s.name) for s in sites) if layer else iter(())
        self.layers = 1 + max((int(m[1]) for m in matches if m), default=-1)
        every = self._all(made_of) if made_of else iter(())
        self.aliases = {a.name: a for a in every if a.site in sites}

    def matching(self, selection: Filter) -> list[Alias]:
        """The names that a filter selects, each once.

        Args:
            selection: None for all of TransformerLens' names of this model (but `hook_result`); one of them,
                or the name that TransformerLens 4's bridge has for it; a site's name, or a glob; a list of
                these; or a function of TransformerLens' names. A model that has none of them has the outputs
                of its modules instead, of the modules that a run calls.

        Raises:
            SiteError: a name matches nothing, or its site is hidden.
        """
        if selection is None:
            return [a for a in self._visible() if not a.large]
        if isinstance(selection, str):
            return self._named(selection)
        if callable(selection):
            return [a for a in self._visible() if selection(a.name)]
        return list({a.name: a for name in selection for a in self._named(name)}.values())

    def logits(self, site: str) -> Alias:
        """The model's logits, of which `site` has the output layer's result."""
        (alias,) = self.matching(site)
        scale = None if self.made_of is None else self.made_of.scale_logits
        view = alias.view if scale is None else Mapped(view=alias.view, function=scale)
        return replace(alias, name="logits", view=view)

    def norm(self, path: str) -> tuple[str, ...]:
        """The names of a norm's weight and bias, where they exist."""
        layer, _, role = path.rpartition(".")
        inside = {} if self.made_of is None else self.made_of.paths.fused_norms
        options = [f"{path}.{{}}", f"{layer}.{inside.get(role, role)}.layer_norm_{{}}"]
        return tuple(o.format(n) for o in options for n in ("weight", "bias") if self.has(o.format(n)))

    @property
    def paths(self) -> DecoderPaths:
        """Where the parts of the model are.

        Raises:
            SiteError: that is not known of this model.
        """
        if self.made_of is None:
            raise SiteError("where the parts of this model are is not known; use the names of its modules")
        return self.made_of.paths

    @property
    def final_norm(self) -> str:
        """The path of the norm before the logits."""
        options = self.paths.final_norms
        return next((p for p in options if f"{p}:input" in self.sites), options[0])

    def has(self, parameter: str) -> bool:
        """Whether the model has a parameter of that name."""
        return parameter in self._parameters

    def _visible(self) -> Iterator[Alias]:
        if not self.made_of:
            outputs = (s for s in self.sites if s.point == "output" and not s.hidden)
            return (Alias(s.name, s.name, site_view(s), sure=False) for s in outputs)
        without_prefix = (a for a in self.aliases.values() if not a.name.startswith(NAMESPACE))
        return (a for a in without_prefix if not self.sites[a.site].hidden)

    def resolve(self, name: str) -> str:
        """The name under which `aliases` has a name of TransformerLens 3.9 or 4; other names as they are.

        After `gpt:`, blocks are numbered as in a GPTModel with the same weights.

        Raises:
            SiteError: the name is such a one, and the model has no layers as a GPTModel has them.
        """
        if name in self.aliases or self.made_of is None:
            return name
        if not self.sites.has_gpt_prefix(name):
            return resolve_bridge_name(name, self.made_of.gated)
        resolved = resolve_bridge_name(name.removeprefix(NAMESPACE), self.made_of.gated)
        if not resolved.startswith(LENS_PREFIXES):
            return name
        self.sites.gpt_names.check(name)
        of_block = resolved.startswith(LENS_PREFIXES[0]) and not self.sites.gpt_names.same
        return NAMESPACE + resolved if of_block else resolved

    def _named(self, name: str) -> list[Alias]:
        name = self.resolve(name)
        if name in self.aliases:
            alias = self.aliases[name]
            hidden = self.sites[alias.site].hidden
            if hidden:
                raise SiteError(f"{name} is {alias.site} here, which is not available: {hidden}")
            return [alias]
        if self.made_of and name.removeprefix(NAMESPACE).startswith(LENS_PREFIXES):
            raise SiteError(f"this model has nothing called {name!r}{suggest_nearest(name, self.aliases)}")
        return [Alias(s.name, s.name, site_view(s)) for s in self.sites.match(name, "output")]

    def _all(self, of: Architecture) -> Iterator[Alias]:
        paths, plain = of.paths, of.embedding_scale == 1.0
        yield Alias(
            "hook_embed",
            f"{paths.embedding}:output",
            View() if plain else Scaled(factor=of.embedding_scale),
        )
        if self.has(paths.position_table):
            positions = Positions((paths.position_table,), factor=of.embedding_scale)
            yield Alias("hook_pos_embed", paths.position_sum, self._ordered(positions))
        stream = self._ordered(View())
        for block in self._blocks(paths):
            yield Alias(f"{block.name}.hook_resid_pre", f"{block.attention}:input", stream)
            yield from self._norms(of, block.name, block.attention, "ln1")
            for name, point in paths.attention_points.items():
                yield from self._point(of, block, name, block.attention, point)
            yield Alias(f"{block.name}.hook_resid_mid", block.mid, stream)
            yield from self._norms(of, block.name, block.mlp, "ln2")
            for name, point in paths.mlp_points.items():
                yield from self._point(of, block, name, block.mlp, point)
            yield Alias(f"{block.name}.hook_resid_post", f"{block.mlp}:output", stream)
        yield from self._norm(of, "ln_final", self.final_norm)
        yield Alias("unembed.hook_in", f"{paths.head}:input", stream)
        yield Alias("unembed.hook_out", f"{paths.head}:output", stream)

    def _ordered(self, view: View) -> View:
        """The view of a tensor whose batch and sequence dims are in the model's order."""
        return BatchFirst.around(view, self.paths.sequence_first)

    def _blocks(self, paths: DecoderPaths) -> Iterator[BlockSites]:
        """The model's layers; and if these are halves of a GPTModel's, under `gpt:` that model's layers."""
        for n in range(self.layers):
            layer = paths.layer(n)
            yield BlockSites(f"blocks.{n}", n, layer, layer, f"{layer}:mid")
        gpt = self.sites.gpt_names
        for n in range(0 if gpt.same or gpt.why else self.layers // 2):
            stream, mid = (gpt.to_model(f"{paths.layer(n)}:{point}") for point in ("input", "mid"))
            attention = stream.partition(":")[0]
            mlp = gpt.to_model(paths.layer(n))
            yield BlockSites(f"{NAMESPACE}blocks.{n}", int(attention.rpartition(".")[2]), attention, mlp, mid)

    def _point(
        self, of: Architecture, block: BlockSites, name: str, layer: str, point: LayerPoint
    ) -> Iterator[Alias]:
        """The aliases of one row of the table."""
        full, site = f"{block.name}.{name}", f"{layer}.{point.site}"
        if name == "attn.hook_attn_scores":
            if of.causal:
                yield Alias(full, site, self._scores(of, block))
        elif name == "attn.hook_pattern":
            yield Alias(full, site, Pattern())
        elif not name.startswith("attn.hook_rot_") or of.rotary:
            yield Alias(full, site, self._ordered(self._part(of, layer, point)))
        weight = f"{layer}.{of.paths.head_output}.weight"
        if name == "attn.hook_z" and self.has(weight):
            results = HeadResults((weight,), RESULT_NOT_EDITABLE, of.heads, of.paths.transposed)
            yield Alias(f"{block.name}.attn.hook_result", site, self._ordered(results), large=True)

    def _scores(self, of: Architecture, block: BlockSites) -> View:
        if of.mask_added:
            return MaskedScores()
        return Scores(factor=float(block.number + 1) if of.scaled_by_layer else 1.0)

    def _part(self, of: Architecture, layer: str, point: LayerPoint) -> View:
        """The conversion of a tensor of the table, with the batch dim first."""
        if point.heads:
            counts = [{"n": of.heads, "g": of.groups}[kind] for kind in point.heads]
            first = sum(counts[: point.index])
            return SplitHeads(heads=counts[point.index], first=first, total=sum(counts))
        if point.heads_first:
            return HeadsFirst()
        if point.parts > 1:
            return Part(index=point.index, count=point.parts)
        bias = f"{layer}.{point.bias}"
        return Biased((bias,), "", point.bias_part) if point.bias and self.has(bias) else View()

    def _norms(self, of: Architecture, block: str, layer: str, first: str) -> Iterator[Alias]:
        """The norms of a half of a layer, by the first part of their names."""
        for name, point in of.paths.norms.items():
            if name.partition("_")[0] == first:
                edited = point.edited and f"{layer}.{point.edited}"
                yield from self._norm(of, f"{block}.{name}", f"{layer}.{point.module}", edited)

    def _norm(self, of: Architecture, lens_path: str, module: str, edited: str = "") -> Iterator[Alias]:
        scale = Scale((), NORM_NOT_EDITABLE, of.rms, of.epsilon)
        yield Alias(f"{lens_path}.hook_scale", f"{module}:input", self._ordered(scale))
        unweighted = Unweighted(self.norm(module), "", float(of.unit_offset))
        edit = (edited or f"{module}:output", self._ordered(unweighted))
        read = Normalized((), "", of.rms, of.epsilon)
        yield Alias(f"{lens_path}.hook_normalized", f"{module}:input", self._ordered(read), edit)


def site_view(site: Site) -> View:
    """The view for a site's own name: the batch dim before the sequence dim."""
    return BatchFirst() if tuple(site.shape[:2]) == ("s", "b") else View()
