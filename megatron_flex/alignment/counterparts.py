"""The table of hook points: for every Megatron site the tensor of the Hugging Face model that equals it.

A row is written once for all architectures that have the part. Modules are written by their role, as
`{attn}`, and a family gives the module path of each role. Axes are written as in `axes`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from megatron_flex.errors import FlexError, suggest_nearest

LAYER = "decoder.layers.{layer}"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """A Megatron site and the tensors of a Hugging Face model that equal it.

    Attributes:
        site: the Megatron site.
        other: points of the Hugging Face model; several are concatenated along the last axis.
        megatron_axes: the axes of the Megatron tensor.
        hf_axes: the axes of each Hugging Face tensor.
        part: which equal part of the last axis to take in Hugging Face, and of how many; None for all of it.
        bias: the Megatron parameter that Megatron adds after this site and Hugging Face before it.
        bias_part: which equal part of it, and of how many; None for all of it.
        rotary: whether the features of a head are in the order of rotary position embedding.
        causal: whether only entries that a causal mask allows have a meaning.
        norm: `outside` or `inside`, where the row holds only for norms before, or within, the next linear.
        optional: whether a run may leave it out, such as an expert that gets no token.
    """

    site: str
    other: tuple[str, ...]
    megatron_axes: str
    hf_axes: str
    part: tuple[int, int] | None = None
    bias: str = ""
    bias_part: tuple[int, int] | None = None
    rotary: bool = False
    causal: bool = False
    norm: str = ""
    optional: bool = False

    @property
    def points(self) -> str:
        """The Hugging Face points as text."""
        return " + ".join(self.other)

    def named(self, paths: Mapping[str, str]) -> Counterpart:
        """The row with module paths in place of roles."""
        return replace(
            self,
            site=self.site.format_map(paths),
            other=tuple(o.format_map(paths) for o in self.other),
            megatron_axes=self.megatron_axes.format_map(paths),
            hf_axes=self.hf_axes.format_map(paths),
            bias=self.bias.format_map(paths),
        )


Rows = tuple[Counterpart, ...]


def _row(site: str, other: str, megatron_axes: str, hf_axes: str = "", **more: object) -> Counterpart:
    axes = megatron_axes, hf_axes or "b s h"
    return Counterpart(site, tuple(other.split(" + ")), *axes, **more)  # type: ignore[arg-type]  # of many types


STREAM = "s b h"
EMBEDDING: Rows = (_row("embedding.word_embeddings:output", "{embed}:output", "b s h"),)
EMBEDDING_SUM: Rows = (_row("embedding:output", "{embedded}:output", STREAM),)
ATTENTION_INPUT: Rows = (
    _row(LAYER + ":input", "{block}:input", STREAM),
    _row(LAYER + ".input_layernorm:input", "{norm1}:input", STREAM),
    _row(LAYER + ".input_layernorm:output", "{norm1}:output", STREAM),
    _row(LAYER + ".self_attention:input", "{norm1}:output", STREAM, norm="outside"),
    _row(LAYER + ".self_attention:input", "{norm1}:input", STREAM, norm="inside"),
)
QKV_INPUT: Rows = (
    _row(LAYER + ".self_attention.linear_qkv:input", "{norm1}:output", STREAM, norm="outside"),
    _row(LAYER + ".self_attention.linear_qkv:input", "{norm1}:input", STREAM, norm="inside"),
)
SEPARATE_QKV: Rows = (
    _row(LAYER + ".self_attention.linear_qkv:q", "{attn}.q_proj:output", "s b n d", "b s (n d)"),
    _row(LAYER + ".self_attention.linear_qkv:k", "{attn}.k_proj:output", "s b g d", "b s (g d)"),
    _row(LAYER + ".self_attention.linear_qkv:v", "{attn}.v_proj:output", "s b g d", "b s (g d)"),
)
HEADS_AS_PROJECTED: Rows = (
    _row(LAYER + ".self_attention:q", "{attn}.q_proj:output", "s b n d", "b s (n d)"),
    _row(LAYER + ".self_attention:k", "{attn}.k_proj:output", "s b g d", "b s (g d)"),
    _row(LAYER + ".self_attention:v", "{attn}.v_proj:output", "s b g d", "b s (g d)"),
)
HEADS_AFTER_NORMS: Rows = (
    _row(LAYER + ".self_attention.q_layernorm:input", "{attn}.q_norm:input", "s b n d", "b s n d"),
    _row(LAYER + ".self_attention.q_layernorm:output", "{attn}.q_norm:output", "s b n d", "b s n d"),
    _row(LAYER + ".self_attention.k_layernorm:input", "{attn}.k_norm:input", "s b g d", "b s g d"),
    _row(LAYER + ".self_attention.k_layernorm:output", "{attn}.k_norm:output", "s b g d", "b s g d"),
    _row(LAYER + ".self_attention:q", "{attn}.q_norm:output", "s b n d", "b s n d"),
    _row(LAYER + ".self_attention:k", "{attn}.k_norm:output", "s b g d", "b s g d"),
    _row(LAYER + ".self_attention:v", "{attn}.v_proj:output", "s b g d", "b s (g d)"),
)
FUSED_QKV: Rows = tuple(
    _row(f"{LAYER}.{at}:{name}", "{attn}.c_attn:output", f"s b {axis} d", f"b s ({axis} d)", part=(index, 3))
    for at in ("self_attention.linear_qkv", "self_attention")
    for index, (name, axis) in enumerate((("q", "n"), ("k", "g"), ("v", "g")))
)
CORE: Rows = (
    _row(LAYER + ".self_attention.core_attention:q", "{attn}:query", "s b n d", "b n s d", rotary=True),
    _row(
        LAYER + ".self_attention.core_attention:k",
        "{attn}:key",
        "s b {groups} d",
        "b {groups} s d",
        rotary=True,
    ),
    _row(LAYER + ".self_attention.core_attention:v", "{attn}:value", "s b {groups} d", "b {groups} s d"),
    _row(LAYER + ".self_attention.core_attention:scores", "{attn}:scores", "b n s t", "b n s t", causal=True),
    _row(LAYER + ".self_attention.core_attention:probs", "{attn}:probs", "b n s t", "b n s t"),
    _row(LAYER + ".self_attention.core_attention:output", "{attn}.{o_proj}:input", "s b (n d)", "b s (n d)"),
    _row(LAYER + ".self_attention.linear_proj:input", "{attn}.{o_proj}:input", "s b (n d)", "b s (n d)"),
    _row(
        LAYER + ".self_attention.linear_proj:output",
        "{attn}.{o_proj}:output",
        STREAM,
        bias=LAYER + ".self_attention.linear_proj.bias",
    ),
    _row(
        LAYER + ".self_attention:output",
        "{attn}:output",
        STREAM,
        bias=LAYER + ".self_attention.linear_proj.bias",
    ),
)
MIDDLE: Rows = (
    _row(LAYER + ":mid", "{norm2}:input", STREAM),
    _row(LAYER + ".pre_mlp_layernorm:input", "{norm2}:input", STREAM),
    _row(LAYER + ".pre_mlp_layernorm:output", "{norm2}:output", STREAM),
    _row(LAYER + ".mlp:input", "{norm2}:output", STREAM, norm="outside"),
    _row(LAYER + ".mlp:input", "{norm2}:input", STREAM, norm="inside"),
)
FC1_INPUT: Rows = (
    _row(LAYER + ".mlp.linear_fc1:input", "{norm2}:output", STREAM, norm="outside"),
    _row(LAYER + ".mlp.linear_fc1:input", "{norm2}:input", STREAM, norm="inside"),
)
PLAIN_MLP: Rows = (
    *FC1_INPUT,
    _row(
        LAYER + ".mlp.linear_fc1:output",
        "{mlp}.c_fc:output",
        "s b f",
        "b s f",
        bias=LAYER + ".mlp.linear_fc1.bias",
    ),
    _row(LAYER + ".mlp.linear_fc2:input", "{mlp}.c_proj:input", "s b f", "b s f"),
    _row(
        LAYER + ".mlp.linear_fc2:output", "{mlp}.c_proj:output", STREAM, bias=LAYER + ".mlp.linear_fc2.bias"
    ),
)


def _gated(megatron: str, hf: str) -> Rows:
    """The rows of a gated MLP."""
    bias = f"{megatron}.linear_fc1.bias"
    points = (("gate", f"{hf}.gate_proj:output"), ("up", f"{hf}.up_proj:output"))
    return (
        *(
            _row(f"{megatron}.linear_fc1:{name}", other, "s b f", "b s f", bias=bias, bias_part=(index, 2))
            for index, (name, other) in enumerate(points)
        ),
        _row(
            f"{megatron}.linear_fc1:output",
            f"{hf}.gate_proj:output + {hf}.up_proj:output",
            "s b f",
            "b s f",
            bias=bias,
        ),
        _row(f"{megatron}.linear_fc2:input", f"{hf}.down_proj:input", "s b f", "b s f"),
        _row(
            f"{megatron}.linear_fc2:output",
            f"{hf}.down_proj:output",
            STREAM,
            bias=f"{megatron}.linear_fc2.bias",
        ),
    )


GATED_MLP: Rows = (*FC1_INPUT, *_gated(LAYER + ".mlp", "{mlp}"))
MLP_OUTPUT: Rows = (
    _row(LAYER + ".mlp:output", "{mlp}:output", STREAM, bias=LAYER + ".mlp.linear_fc2.bias"),
    _row(LAYER + ":output", "{block}:output", STREAM),
)
EXPERT = LAYER + ".mlp.experts.local_experts.{expert}"
ROUTER: Rows = (
    _row(LAYER + ".mlp.router:input", "{mlp}.gate:input", STREAM, "{tokens} h"),
    _row(LAYER + ".mlp.router:logits", "{mlp}.gate:output", "s b e", "(b s) e"),
    _row(LAYER + ".mlp.router:probs", "{mlp}.gate:probs", "s b e", "(b s) e"),
    _row(LAYER + ".mlp.router:map", "{mlp}.gate:map", "s b e", "(b s) e"),
    _row(LAYER + ".mlp.experts:indices", "{mlp}.experts:indices", "s b k", "(b s) k"),
    _row(LAYER + ".mlp.experts:weights", "{mlp}.experts:weights", "s b k", "(b s) k"),
    _row(LAYER + ".mlp.experts:dispatched", "{mlp}.experts:dispatched", "s b k h", "(b s) k h"),
)
EXPERTS: Rows = (
    _row(EXPERT + ":input", "{mlp}.experts.{expert}:input", "t h", "t h", optional=True),
    _row(EXPERT + ".linear_fc1:input", "{mlp}.experts.{expert}:input", "t h", "t h", optional=True),
    _row(EXPERT + ".linear_fc1:gate", "{mlp}.experts.{expert}:gate", "t f", "t f", optional=True),
    _row(EXPERT + ".linear_fc1:up", "{mlp}.experts.{expert}:up", "t f", "t f", optional=True),
    _row(
        EXPERT + ".linear_fc1:output",
        "{mlp}.experts.{expert}:gate + {mlp}.experts.{expert}:up",
        "t f",
        "t f",
        optional=True,
    ),
    _row(EXPERT + ".linear_fc2:input", "{mlp}.experts.{expert}:middle", "t f", "t f", optional=True),
    _row(EXPERT + ".linear_fc2:output", "{mlp}.experts.{expert}:output", "t h", "t h", optional=True),
    _row(EXPERT + ":output", "{mlp}.experts.{expert}:output", "t h", "t h", optional=True),
)
GROUPED_EXPERTS: Rows = (
    _row(LAYER + ".mlp.experts.linear_fc1:input", "{mlp}.experts:dispatched", "s b k h", "(b s) k h"),
    _row(LAYER + ".mlp.experts.linear_fc1:output", "{mlp}.experts:gate|up", "s b k f", "(b s) k f"),
    _row(LAYER + ".mlp.experts.linear_fc2:input", "{mlp}.experts:middle", "s b k f", "(b s) k f"),
    _row(LAYER + ".mlp.experts.linear_fc2:output", "{mlp}.experts:slots", "s b k h", "(b s) k h"),
    _row(LAYER + ".mlp.experts:output", "{mlp}.experts:slots", "s b k h", "(b s) k h"),
)
SHARED_EXPERTS: Rows = (
    _row(LAYER + ".mlp.shared_experts:input", "{mlp}.shared_experts:input", STREAM),
    _row(LAYER + ".mlp.shared_experts.linear_fc1:input", "{mlp}.shared_experts:input", STREAM),
    *_gated(LAYER + ".mlp.shared_experts", "{mlp}.shared_experts"),
    _row(LAYER + ".mlp.shared_experts:output", "{mlp}.shared_experts:output", STREAM),
)
MLA = LAYER + ".self_attention"
LATENT_QKV: Rows = (
    _row(MLA + ".linear_q_proj:input", "{norm1}:output", STREAM),
    _row(MLA + ".linear_q_proj:output", "{attn}.q_proj:output", "s b (n d)", "b s (n d)"),
    _row(MLA + ".linear_q_down_proj:input", "{norm1}:output", STREAM),
    _row(MLA + ".linear_q_down_proj:output", "{attn}.q_a_proj:output", "s b r", "b s r"),
    _row(MLA + ".linear_kv_down_proj:input", "{norm1}:output", STREAM),
    _row(MLA + ".linear_kv_down_proj:output", "{attn}.kv_a_proj_with_mqa:output", "s b r", "b s r"),
    _row(MLA + ".q_layernorm:input", "{attn}.q_a_layernorm:input", "s b r", "b s r"),
    _row(MLA + ".q_layernorm:output", "{attn}.q_a_layernorm:output", "s b r", "b s r"),
    _row(MLA + ".kv_layernorm:input", "{attn}.kv_a_layernorm:input", "s b r", "b s r"),
    _row(MLA + ".kv_layernorm:output", "{attn}.kv_a_layernorm:output", "s b r", "b s r"),
    _row(MLA + ".linear_q_up_proj:input", "{attn}.q_a_layernorm:output", "s b r", "b s r", norm="outside"),
    _row(MLA + ".linear_q_up_proj:input", "{attn}.q_a_layernorm:input", "s b r", "b s r", norm="inside"),
    _row(MLA + ".linear_q_up_proj:output", "{attn}.q_b_proj:output", "s b (n d)", "b s (n d)"),
    _row(MLA + ".linear_kv_up_proj:input", "{attn}.kv_a_layernorm:output", "s b r", "b s r", norm="outside"),
    _row(MLA + ".linear_kv_up_proj:input", "{attn}.kv_a_layernorm:input", "s b r", "b s r", norm="inside"),
    _row(MLA + ".linear_kv_up_proj:output", "{attn}.kv_b_proj:output", "s b (n d)", "b 1 s (n d)"),
)
LAST: Rows = (
    _row("decoder.final_layernorm:input", "{final}:input", STREAM),
    _row("decoder.final_layernorm:output", "{final}:output", STREAM),
    _row("decoder.final_norm:input", "{final}:input", STREAM),
    _row("decoder.final_norm:output", "{final}:output", STREAM),
    _row("decoder:output", "{final}:output", STREAM),
    _row("output_layer:input", "{head}:input", STREAM),
    _row("output_layer:output", "{head}:output", "s b v", "b s v"),
)

# Sites that no Hugging Face model has, and why: globs, the first match counts.
WITHOUT_COUNTERPART = (
    ("*:partial", "a tensor parallel rank's part of a sum, which is compared at :output"),
    ("*:gemm_input", "the gathered input of a sharded product; the same tensor is compared at :input"),
    ("*.linear_qkv:output", "the heads packed by group; its parts :q, :k and :v are compared"),
    ("*.linear_qkv_down_proj:*", "two projections packed in one; the norms that follow are compared"),
    ("loss:output", "Hugging Face computes the mean only; the logits are compared"),
    ("mtp.*", "Hugging Face leaves out the layers of multi-token prediction"),
    ("*.core_attention:scores", "this attention keeps its scores inside a kernel"),
    ("*.core_attention:probs", "this attention keeps its probabilities inside a kernel"),
)
NO_ROW = "the architecture {family} has no such tensor"


_NUMBER_OF = {"decoder.layers.": "layer", "local_experts.": "expert"}
NUMBERED = re.compile("(" + "|".join(map(re.escape, _NUMBER_OF)) + r")(\d+)")
_LINEAR_AFTER_NORM = {"self_attention": "self_attention.linear_qkv", "mlp": "mlp.linear_fc1"}


def _normalizing_linear(site: str) -> str:
    """The linear that may contain the norm of what enters a site's module."""
    parent, _, role = site.partition(":")[0].rpartition(".")
    return f"{parent}.{_LINEAR_AFTER_NORM.get(role, role)}"


@dataclass(frozen=True, slots=True)
class Match:
    """A Megatron site with its row.

    Attributes:
        row: the row, with numbers in its names.
        order: the number of the row in the table.
        layer: the number of the layer; None outside of layers.
        expert: the number of the expert; -1 outside of experts.
    """

    row: Counterpart
    order: int
    layer: int | None
    expert: int

    @property
    def site(self) -> str:
        """The Megatron site."""
        return self.row.site

    @property
    def part(self) -> str:
        """The part of the model that it is in: the number of the layer, `embedding` or `logits`."""
        return BEFORE if self.time[0] == 0 else AFTER if self.time[0] == 2 else str(self.layer)

    @property
    def time(self) -> tuple[int, int, int, int]:
        """A sort key: the order of execution."""
        if self.layer is None:
            return (2 if self.site.startswith(LAST_SITES) else 0), 0, self.order, self.expert
        return 1, self.layer, self.order, self.expert


LAST_SITES = ("decoder", "output_layer")
BEFORE, AFTER = "embedding", "logits"  # the parts of a model outside of its layers


@dataclass(frozen=True)
class Family:
    """An architecture: the rows that it has, and the module path of each role.

    Attributes:
        name: transformers' `model_type`.
        paths: the module paths by role; `{layer}` and `{expert}` stay.
        rows: the rows, in the order of execution.
    """

    name: str
    paths: Mapping[str, str]
    rows: Rows

    @cached_property
    def counterparts(self) -> list[Counterpart]:
        """The rows, with `{layer}` and `{expert}` in them."""
        paths = {"layer": "{layer}", "expert": "{expert}", **self.paths}
        for _ in range(3):  # roles are written with roles: a norm within a block within the layers
            paths = {role: path.format_map(_Keep(paths)) for role, path in paths.items()}
        return [row.named(paths) for row in self.rows]

    @cached_property
    def _numbered(self) -> dict[str, list[tuple[int, Counterpart]]]:
        by_site: dict[str, list[tuple[int, Counterpart]]] = {}
        for number, row in enumerate(self.counterparts):
            by_site.setdefault(row.site, []).append((number, row))
        return by_site

    def find(self, site: str, inside: Container[str] = ()) -> Match | None:
        """The row of a site; None if there is none.

        Args:
            site: the site's name.
            inside: the parameters of the Megatron model, which show the norms that are part of a linear.
        """
        numbers = {_NUMBER_OF[m[1]]: m[2] for m in NUMBERED.finditer(site)}
        general = NUMBERED.sub(lambda m: f"{m[1]}{{{_NUMBER_OF[m[1]]}}}", site)
        norm = "inside" if f"{_normalizing_linear(site)}.layer_norm_weight" in inside else "outside"
        for order, row in self._numbered.get(general, ()):
            if row.norm in ("", norm):
                named = row.named({"layer": "", "expert": "", **numbers})
                layer = int(numbers["layer"]) if "layer" in numbers else None
                return Match(named, order, layer, int(numbers.get("expert", -1)))
        return None

    def match(
        self, sites: Iterable[str], parameters: Container[str] = ()
    ) -> tuple[list[Match], dict[str, str]]:
        """The rows of these sites in the order of execution, and the other sites with the reason.

        Args:
            sites: names of sites.
            parameters: as for `find`.
        """
        by_site = {site: self.find(site, parameters) for site in sites}
        matches = sorted((m for m in by_site.values() if m is not None), key=lambda m: m.time)
        return matches, {site: self.reason(site) for site, m in by_site.items() if m is None}

    def reason(self, site: str) -> str:
        """Why a site has no counterpart."""
        reasons = (why for pattern, why in WITHOUT_COUNTERPART if fnmatchcase(site, pattern))
        return next(reasons, NO_ROW.format(family=self.name))


class _Keep(dict[str, str]):
    """Leaves `{role}` as it is where the role has no path yet."""

    def __missing__(self, role: str) -> str:
        return f"{{{role}}}"


GPT2_PATHS = {
    "embed": "transformer.wte",
    "embedded": "transformer.drop",
    "block": "transformer.h.{layer}",
    "norm1": "{block}.ln_1",
    "norm2": "{block}.ln_2",
    "attn": "{block}.attn",
    "o_proj": "c_proj",
    "mlp": "{block}.mlp",
    "final": "transformer.ln_f",
    "head": "lm_head",
    "groups": "g",
}
LLAMA_PATHS = {
    "embed": "model.embed_tokens",
    "embedded": "model.embed_tokens",
    "block": "model.layers.{layer}",
    "norm1": "{block}.input_layernorm",
    "norm2": "{block}.post_attention_layernorm",
    "attn": "{block}.self_attn",
    "o_proj": "o_proj",
    "mlp": "{block}.mlp",
    "final": "model.norm",
    "head": "lm_head",
    "groups": "g",
    "tokens": "(b s)",
}
ENTRY: Rows = (*EMBEDDING, *EMBEDDING_SUM, *ATTENTION_INPUT)
PROJECTED: Rows = (*ENTRY, *QKV_INPUT, *SEPARATE_QKV)
ALL_EXPERTS: Rows = (*ROUTER, *EXPERTS, *GROUPED_EXPERTS)
DENSE: Rows = (*PROJECTED, *HEADS_AS_PROJECTED, *CORE, *MIDDLE, *GATED_MLP, *MLP_OUTPUT, *LAST)
QK_NORMS: Rows = (*PROJECTED, *HEADS_AFTER_NORMS, *CORE, *MIDDLE)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpt2",
            GPT2_PATHS,
            (*ENTRY, *QKV_INPUT, *FUSED_QKV, *CORE, *MIDDLE, *PLAIN_MLP, *MLP_OUTPUT, *LAST),
        ),
        Family("llama", LLAMA_PATHS, DENSE),
        Family("mistral", LLAMA_PATHS, DENSE),
        Family("qwen2", LLAMA_PATHS, DENSE),
        Family("qwen3", LLAMA_PATHS, (*QK_NORMS, *GATED_MLP, *MLP_OUTPUT, *LAST)),
        Family("qwen3_moe", LLAMA_PATHS, (*QK_NORMS, *GATED_MLP, *ALL_EXPERTS, *MLP_OUTPUT, *LAST)),
        Family(
            "mixtral",
            LLAMA_PATHS,
            (*PROJECTED, *HEADS_AS_PROJECTED, *CORE, *MIDDLE, *ALL_EXPERTS, *MLP_OUTPUT, *LAST),
        ),
        Family(
            "deepseek_v3",
            {**LLAMA_PATHS, "groups": "n", "tokens": "b s"},
            (
                *ENTRY,
                *LATENT_QKV,
                *CORE,
                *MIDDLE,
                *GATED_MLP,
                *ALL_EXPERTS,
                *SHARED_EXPERTS,
                *MLP_OUTPUT,
                *LAST,
            ),
        ),
    )
}


def family_of(model_type: str) -> Family:
    """The table of an architecture.

    Args:
        model_type: transformers' name of it, as `config.model_type` has it.

    Raises:
        FlexError: there is no table for it.
    """
    if model_type not in FAMILIES:
        raise FlexError(
            f"the architecture {model_type!r} has no table of hook "
            f"points{suggest_nearest(model_type, FAMILIES)}; "
            f"known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


class SiteNames(list[tuple[str, str, str]]):
    """The table of an architecture: the Megatron site, the Hugging Face point, and the axes or the reason.

    Printed it is a table.
    """

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self) for i in range(2)]
        return "\n".join(
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[2])) for row in self
        )

    def __repr__(self) -> str:
        return str(self)


def site_names(model_type: str, sites: Iterable[str] = ()) -> SiteNames:
    """Which tensor of a Hugging Face model equals each Megatron site.

    Args:
        model_type: the architecture, such as `llama`.
        sites: names of sites to list; all of the table, with `{layer}` for the number, if empty.

    Returns:
        Rows of the Megatron site, the Hugging Face point, and the axes of the two, `b s (n d) -> s b n d`.
        Where there is no counterpart the point is empty and the last entry says why.

    Raises:
        FlexError: there is no table for the architecture.

    Examples:
        >>> print(site_names("llama", ["decoder.layers.1.mlp.linear_fc2:input"]))
        decoder.layers.1.mlp.linear_fc2:input  model.layers.1.mlp.down_proj:input  b s f -> s b f
    """
    family = family_of(model_type)
    if not list(sites):
        rows = [(r.site, r.points, describe_axes(r)) for r in family.counterparts]
        return SiteNames(rows + [(p, "", why) for p, why in WITHOUT_COUNTERPART])
    out = SiteNames()
    for site in sites:
        match = family.find(site)
        out.append(
            (site, "", family.reason(site))
            if match is None
            else (site, match.row.points, describe_axes(match.row))
        )
    return out


def describe_axes(row: Counterpart) -> str:
    """The rearrangement of a row in words."""
    part = f" (part {row.part[0]} of {row.part[1]})" if row.part else ""
    norm = f", where the norm is {row.norm} the linear" if row.norm else ""
    of = f" (part {row.bias_part[0]} of {row.bias_part[1]})" if row.bias_part else ""
    bias = f", with {row.bias}{of} added" if row.bias else ""
    return f"{row.hf_axes}{part} -> {row.megatron_axes}{bias}{norm}"
