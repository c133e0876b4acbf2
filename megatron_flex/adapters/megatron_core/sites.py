"""The sites of Megatron's dense models: one small function for each kind of module, by its role."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.kinds import global_modules, is_a, is_identity
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.adapters.megatron_core.taps import BiasDropoutAdd, Gemm
from megatron_flex.adapters.taps import MethodOutput, ModuleInput, ModuleOutput
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap

VERIFIED = ("embedding", "decoder", "output_layer")  # not the layers of multi-token prediction
NORMS = ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "final_norm")
FUSED_ROPE = "fused_single_qkv_rope=True keeps q, k and v inside one kernel; set it to False to have them"
NO_RULE = (
    "{kind} is none of Megatron's {known} and its layout is not known; build the layers with the local spec "
    "(--transformer-impl local)"
)
FLASH = (
    "{kind} keeps attention scores and probabilities inside its kernel; build the layers with the local spec "
    "(--transformer-impl local) to have them as tensors"
)


def sites_of(root: nn.Module, mesh: Mesh) -> list[Site]:
    """The sites of one chunk in model order."""
    return list(_Builder(root, mesh).all())


class _Builder:
    def __init__(self, root: Any, mesh: Mesh) -> None:
        self.root, self.mesh = root, mesh
        self.config: Any = root.config
        self.of = Layouts(self.config, mesh, _vocabulary(root))
        self.sizes: dict[str, Any] = {
            "h": self.config.hidden_size,
            "f": self.config.ffn_hidden_size,
            "n": self.config.num_attention_heads,
            "g": self.config.num_query_groups or self.config.num_attention_heads,
            "d": self.config.kv_channels,
            "v": self.of.vocabulary or getattr(root, "vocab_size", "v"),
        }

    def all(self) -> Iterator[Site]:
        for path, module in global_modules(self.root):
            role = path.rpartition(".")[2]
            if not path.startswith(VERIFIED):
                continue
            if path == "embedding":
                yield from self.embedding(path, module)
            elif is_a(module, "TransformerBlock", "HybridStack", "MambaStack") and self.root.post_process:
                yield self.site(f"{path}:output", self.of.stream(), ModuleOutput(module))
            elif is_a(module, "TransformerLayer"):
                yield from self.layer(path, module)
            elif role in NORMS and not is_identity(module):
                yield from self.both(path, module, self.of.stream(), "x")
            elif role == "self_attention" and is_a(module, "SelfAttention"):
                yield from self.attention(path, module)
            elif role == "mlp" and is_a(module, "MLP"):
                yield from self.mlp(path, module)
            elif path == "output_layer":
                yield from self.output_layer(path, module)
        if self.root.post_process:
            tap = MethodOutput(self.root, "compute_language_model_loss")
            yield self.site("loss:output", self.of.loss(), tap)

    def site(self, name: str, layout: Layout, tap: Tap, hidden: str = "", width: int | None = None) -> Site:
        names = [d.name for d in layout.dims]
        if layout.permute is not None:
            names = [names[i] for i in layout.permute]
        shape: list[int | str] = [self.sizes.get(n, n) for n in names]
        if width is not None:
            shape[-1] = width
        return Site(name, layout, tuple(shape), self.mesh["pp"].coord, hidden, tap)

    def both(self, path: str, module: Any, layout: Layout, keyword: str) -> Iterator[Site]:
        yield self.site(f"{path}:input", layout, ModuleInput(module, 0, keyword))
        yield self.site(f"{path}:output", layout, ModuleOutput(module))

    # -- the kinds of modules ------------------------------------------------------------------------

    def embedding(self, path: str, module: Any) -> Iterator[Site]:
        words = getattr(module, "word_embeddings", None)
        if words is not None:
            tap = ModuleOutput(words)
            yield self.site(f"{path}.word_embeddings:output", self.of.word_embeddings(words), tap)
        scattered = getattr(module, "scatter_to_sequence_parallel", True) and self.of.sequence_parallel
        yield self.site(f"{path}:output", self.of.stream(scattered), ModuleOutput(module))

    def layer(self, path: str, layer: Any) -> Iterator[Site]:
        yield self.site(f"{path}:input", self.of.stream(), ModuleInput(layer, 0, "hidden_states"))
        if not is_identity(layer.self_attn_bda) and not is_identity(layer.mlp):
            yield self.site(f"{path}:mid", self.of.stream(), BiasDropoutAdd(layer, "self_attn_bda"))
        yield self.site(f"{path}:output", self.of.stream(), ModuleOutput(layer))

    def attention(self, path: str, module: Any) -> Iterator[Site]:
        of, core, config = self.of, module.core_attention, self.config
        yield from self.both(path, module, of.stream(), "hidden_states")
        per_group = config.num_attention_heads // self.sizes["g"] * (2 if self._gated() else 1) + 2
        width = self.sizes["g"] * per_group * config.kv_channels
        yield from self.column(f"{path}.linear_qkv", module.linear_qkv, of.features("qkv"), width)
        hidden = FUSED_ROPE if getattr(config, "fused_single_qkv_rope", False) else ""
        parts = {"q": of.heads(), "k": of.groups(), "v": of.groups()}
        if self._gated():
            parts["gate"] = of.heads()
        for index, (name, layout) in enumerate(parts.items()):
            tap = MethodOutput(module, "get_query_key_value_tensors", index)
            yield self.site(f"{path}:{name}", layout, tap, hidden)
        for role, name in (("q_layernorm", "q"), ("k_layernorm", "k")):
            norm = getattr(module, role, None)
            if not is_identity(norm):
                yield from self.both(f"{path}.{role}", norm, parts[name], "x")
        for index, (name, keyword) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
            yield self.site(f"{path}.core_attention:{name}", parts[name], ModuleInput(core, index, keyword))
        yield from self.scores(f"{path}.core_attention", core)
        width = self.sizes["n"] * config.kv_channels
        yield self.site(f"{path}.core_attention:output", of.features("nd"), ModuleOutput(core), width=width)
        yield from self.row(f"{path}.linear_proj", module.linear_proj, "nd", width)

    def scores(self, path: str, core: Any) -> Iterator[Site]:
        softmax = getattr(core, "scale_mask_softmax", None)
        hidden = "" if softmax is not None else FLASH.format(kind=type(core).__name__)
        owner = softmax if softmax is not None else core
        yield self.site(f"{path}:scores", self.of.scores(), ModuleInput(owner, 0, "input"), hidden)
        yield self.site(f"{path}:probs", self.of.scores(), ModuleOutput(owner), hidden)

    def mlp(self, path: str, module: Any) -> Iterator[Site]:
        yield from self.both(path, module, self.of.stream(), "hidden_states")
        width = self.config.ffn_hidden_size
        gated = self.config.gated_linear_unit
        layout = self.of.features("gate|up" if gated else "f", (1, 1) if gated else (1,))
        yield from self.column(f"{path}.linear_fc1", module.linear_fc1, layout, width * (2 if gated else 1))
        yield from self.row(f"{path}.linear_fc2", module.linear_fc2, "f", width)

    def output_layer(self, path: str, module: Any) -> Iterator[Site]:
        def resolve(kwargs: dict[str, Any]) -> Layout | None:
            return self.of.logits(True) if kwargs.get("runtime_gather_output") else None

        layout = self.of.logits(bool(getattr(module, "gather_output", False)))
        width = self.sizes["v"]
        yield from self.column(path, module, layout, width if isinstance(width, int) else None, resolve)

    def column(
        self, path: str, module: Any, out: Layout, width: int | None, resolve: Any = None
    ) -> Iterator[Site]:
        cut = bool(getattr(module, "sequence_parallel", False))
        no = self.no_rule(module, "ColumnParallelLinear")
        yield self.site(f"{path}:input", self.of.stream(cut), ModuleInput(module, 0, "input_"), no)
        yield self.site(f"{path}:gemm_input", self.of.gathered(), Gemm(module, before=True), no)
        yield self.site(f"{path}:output", out, ModuleOutput(module, 0, resolve), no, width)

    def row(self, path: str, module: Any, name: str, width: int) -> Iterator[Site]:
        cut = bool(getattr(module, "sequence_parallel", False))
        no = self.no_rule(module, "RowParallelLinear")
        yield self.site(f"{path}:input", self.of.features(name), ModuleInput(module, 0, "input_"), no, width)
        yield self.site(f"{path}:partial", self.of.partial(), Gemm(module, before=False), no)
        yield self.site(f"{path}:output", self.of.stream(cut), ModuleOutput(module), no)

    def no_rule(self, module: Any, known: str) -> str:
        """Why a linear of another class is hidden: how it cuts its tensors is not known here."""
        return "" if is_a(module, known) else NO_RULE.format(kind=type(module).__name__, known=known)

    def _gated(self) -> bool:
        return bool(getattr(self.config, "attention_output_gate", False))


def _vocabulary(root: nn.Module) -> int | None:
    """The vocabulary without padding, as `megatron.training` knows it; None if nothing says it.

    A model knows only the padded number.
    """
    state = sys.modules.get("megatron.training.global_vars")
    tokenizer = getattr(state, "_GLOBAL_TOKENIZER", None)
    if tokenizer is None:
        args = getattr(state, "_GLOBAL_ARGS", None)
        found = getattr(args, "vocab_size", None)
    else:
        found = getattr(tokenizer, "vocab_size", None)
    padded = getattr(root, "vocab_size", None)
    return int(found) if isinstance(found, int) and isinstance(padded, int) and found <= padded else None
