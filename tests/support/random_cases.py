"""Random cases: a model, how it is spread, what is hooked there; drawn by a seed, written as one JSON.

Pure data: nothing here starts a process or imports Megatron. `forbidden` has the rules of what can be drawn,
each with its reason; `tests/support/random_proof.py` runs a case against one process.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from tests.support import design, edit_table, failing, gpt, moe, oracle, ssm, wish_table
from tests.support.failing import Row

KINDS = ("gpt", "experts", "hybrid", "latent", "prediction", "bert")
VALUES = ("forward", "forward_pre")
GRADIENTS = ("full_backward", "full_backward_pre", "tensor", "parameter")
POINT_OF = {"forward_pre": ":input", "full_backward": ":input", "full_backward_pre": ":output"}
AXES = ("tp", "pp", "cp", "dp")
QUIET = "quiet"


@dataclass(frozen=True)
class Hook:
    """One hook of a case.

    Attributes:
        site: a site's name with its point, in which `*` may stand for all layers; of kind `parameter` that of
            a parameter.
        kind: the hook_type; `parameter` is `tensor` on a parameter.
        edit: a name of `edit_table`; none if empty.
        wish: what is selected or reduced, a name of `wish_table`; all is kept if empty.
        run: where the edit runs.
        quiet: whether it is off in the second step.
    """

    site: str
    kind: str = "forward"
    edit: str = ""
    wish: str = ""
    run: str = "replicated"
    quiet: bool = False

    @property
    def backward(self) -> bool:
        """Whether it sees gradients."""
        return self.kind in GRADIENTS

    @property
    def pattern(self) -> str:
        """What HookFunction is given: of kinds that mean a point of a module, the module."""
        return self.site.removesuffix(POINT_OF.get(self.kind, "\0"))


@dataclass(frozen=True)
class Draw:
    """A case: the model, the layout, the schedule, the hooks. The defaults are the simplest ones.

    Attributes:
        kind: of KINDS.
        pattern: of a hybrid model's layers, without cuts.
        padding: how many rows of the vocabulary stand for no token.
        first: how many layers the first pipeline stage has; equally many as the others if 0.
        steps: runs of the schedule; in the second one quiet hooks are off.
        scale: of what all hooks on gradients see, as `gradient_scale`.
        gathered: whether the samples of data parallel ranks are put together.
        verify: whether `verify()` checks the first step.
        dump: sites that are dumped, with their gradients.
        statistics: sites that are measured, with their gradients.
        frozen: which parameters need no gradient, of `failing.FROZEN`.
        failures: edits that fail on one rank, one after the other; nothing else is hooked then.
    """

    kind: str = "gpt"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    layers: int = 1
    first: int = 0
    pattern: str = ""
    hidden: int = gpt.HIDDEN
    heads: int = gpt.HEADS
    groups: int = gpt.GROUPS
    ffn: int = gpt.FFN
    vocabulary: int = gpt.VOCABULARY
    padding: int = 0
    gated: bool = True
    rms: bool = True
    rope: bool = True
    bias: bool = False
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = moe.TOPK
    dispatcher: str = "alltoall"
    shared_experts: bool = False
    capacity: float = 0.0
    q_rank: int = 0
    depths: int = 0
    microbatches: int = 1
    steps: int = 1
    forward_only: bool = False
    recompute: tuple[str, ...] = ()
    dropout: float = 0.0
    bf16: bool = False
    scale: str = "raw"
    gathered: bool = False
    verify: bool = False
    hooks: tuple[Hook, ...] = ()
    dump: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    frozen: str = ""
    failures: tuple[Row, ...] = ()

    @property
    def world(self) -> int:
        """How many ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def topology(self) -> str:
        """What ranks of a pool are divided into."""
        return self.case().topology

    @property
    def edits(self) -> bool:
        """Whether any hook edits."""
        return any(h.edit for h in self.hooks)

    @property
    def elements(self) -> frozenset[tuple[str, ...]]:
        """What is proven by it, for a covering design: each kind of hook and of edit along each axis."""
        found: set[tuple[str, ...]] = {("model", self.kind)}
        found |= {(n,) for n in ("forward_only", "bf16", "dropout", "verify", "gathered") if getattr(self, n)}
        for hook in self.hooks:
            for axis in design.axes(self.case()):
                found.add(("hook", hook.kind, axis))
                if hook.edit:
                    found |= {("edit", hook.edit, axis), ("edited", hook.kind, axis), (hook.run, axis)}
        return frozenset(found)

    def case(self) -> gpt.Case:
        """The model and its layout as the other tests have them."""
        extra: dict[str, Any] = {"moe_router_topk": self.top_k} if self.experts else {}
        extra |= {"moe_router_pre_softmax": True} if self.experts and self.top_k == 1 else {}
        if self.kind in ("gpt", "experts", "prediction", "bert"):
            extra |= {"hidden_size": self.hidden, "ffn_hidden_size": self.ffn}
            extra |= {"num_attention_heads": self.heads}
        extra |= {"moe_expert_capacity_factor": self.capacity} if self.capacity else {}
        extra |= {"mtp_num_layers": self.depths} if self.depths else {}
        extra |= ssm.MAMBA if "M" in self.pattern else {}
        extra |= ssm.DELTA if "G" in self.pattern else {}
        extra |= {"hidden_dropout": self.dropout, "attention_dropout": self.dropout} if self.dropout else {}
        if self.bf16:
            import torch

            extra |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
        return gpt.Case(
            self.layout,
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp if self.vpp > 1 else None,
            dp=self.dp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            sp=self.sp,
            microbatches=self.microbatches,
            gated=self.gated,
            rms=self.rms,
            rope=self.rope,
            bias=self.bias,
            tied=self.tied,
            qk_norm=self.qk_norm,
            groups=self.groups,
            recompute=self.recompute,
            layers=self.layers,
            experts=self.experts,
            dispatcher=self.dispatcher,
            shared_experts=self.shared_experts,
            pattern=self._cut(),
            mla="mended" if self.kind == "latent" or "+" in self.pattern else "",
            q_rank=self.q_rank or None,
            bert=self.kind == "bert",
            vocabulary=self.vocabulary,
            extra=extra,
            split={"num_layers_in_first_pipeline_stage": self.first} if self.first else {},
        )

    def _cut(self) -> str:
        """The pattern with the cuts of the pipeline, in equal parts."""
        each = len(self.pattern) // (self.pp * self.vpp) or 1
        return "|".join(self.pattern[n : n + each] for n in range(0, len(self.pattern), each))

    @property
    def layout(self) -> str:
        """How it is spread, in words."""
        sizes = {n: getattr(self, n) for n in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")}
        words = [f"{n}{size}" for n, size in sizes.items() if size > 1]
        return f"{self.kind} " + (" ".join([*words, *(["sp"] if self.sp else [])]) or "alone")

    def text(self) -> str:
        """One line of JSON, of what is not the default."""
        told: dict[str, Any] = _given(self)
        if self.hooks:
            told["hooks"] = [_given(h) for h in self.hooks]
        if self.failures:
            told["failures"] = [_given(row) for row in self.failures]
        return json.dumps(told, separators=(",", ":"))

    @staticmethod
    def read(text: str) -> Draw:
        """A case from its JSON.

        Raises:
            ValueError: the case cannot be drawn; the message says why.
        """
        told = json.loads(text)
        hooks = tuple(Hook(**h) for h in told.pop("hooks", []))
        failures = tuple(Row(**row) for row in told.pop("failures", []))
        lists = {n: tuple(v) for n, v in told.items() if isinstance(v, list)}
        draw = Draw(**{**told, **lists, "hooks": hooks, "failures": failures})
        if why := forbidden(draw):
            raise ValueError(f"no such case: {why}")
        return draw


def _given(thing: Any) -> dict[str, Any]:
    return {f.name: v for f in fields(thing) if (v := getattr(thing, f.name)) != f.default}


# -- sites -------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _sites(bare: Draw) -> tuple[str, ...]:
    return tuple(oracle.sites_of(bare.case()))


def sites_of(draw: Draw) -> tuple[str, ...]:
    """The names of all sites of a case's model, in the order of one process."""
    return _sites(replace(draw, hooks=(), dump=(), statistics=(), failures=()))


def matched(draw: Draw, hook: Hook) -> list[str]:
    """The sites that a hook means; a parameter is itself."""
    if hook.kind == "parameter":
        return [hook.site]
    wanted = re.compile("[^.]*".join(re.escape(part) for part in hook.site.split("*")))
    return [s for s in sites_of(draw) if wanted.fullmatch(s)]


def fitted(draw: Draw) -> Draw:
    """A case without the hooks, dumps and statistics whose sites its model does not have."""
    have = set(sites_of(draw))
    return replace(
        draw,
        hooks=tuple(h for h in draw.hooks if (h.kind != "parameter" and matched(draw, h)) or _has(draw, h)),
        dump=tuple(s for s in draw.dump if s in have),
        statistics=tuple(s for s in draw.statistics if s in have),
        failures=tuple(row for row in draw.failures if row.site in have),
    )


def _has(draw: Draw, hook: Hook) -> bool:
    """Whether a hook is on a parameter of a layer that there is."""
    if hook.kind != "parameter":
        return False
    layer = re.search(r"layers\.(\d+)", hook.site)
    return layer is None or int(layer[1]) < draw.layers


# -- what can be drawn -------------------------------------------------------------------------------


def forbidden(draw: Draw) -> str:
    """Why there is no such case; empty if there is."""
    return next((why for broken, why in _rules(draw) if broken), "") or _hooks_forbidden(draw)


def _rules(d: Draw) -> Iterator[tuple[bool, str]]:
    stages, model, ranks = d.pp * d.vpp, d.kind, d.tp * d.cp * d.dp
    count = len(d.pattern) if d.pattern else d.layers
    yield model not in KINDS, f"kind {model!r} does not exist; the kinds are {', '.join(KINDS)}"
    yield (model == "hybrid") != bool(d.pattern), "a hybrid model, and no other, has a pattern"
    # -- upstream's own rules
    yield d.sp and d.tp == 1, "sequence parallelism divides over tensor parallel ranks"
    yield bool(d.experts) and d.tp > 1 and not d.sp, "upstream: experts and TP want sequence parallelism"
    yield d.heads % d.tp != 0, "upstream: heads are divided over TP"
    yield bool(d.groups % d.tp and d.tp % d.groups), "upstream: groups are divided or copied over TP"
    yield d.heads % d.groups != 0, "each group of queries has equally many heads"
    yield (d.ffn % d.tp or d.vocabulary % d.tp) != 0, "upstream: features and vocabulary are divided over TP"
    yield gpt.SEQUENCE % (d.tp * 2 * d.cp) != 0, "the sequence is divided over CP, twice, and TP"
    yield d.vpp > 1 and d.pp == 1, "upstream: virtual stages are those of a pipeline"
    yield d.vpp > 1 and d.microbatches % d.pp != 0, "upstream: the interleaved schedule wants groups of PP"
    yield not d.first and count % stages != 0, "layers are divided over the stages"
    yield bool(d.first) and (d.vpp > 1 or d.pp == 1), "an uneven pipeline has plain stages here"
    yield bool(d.first) and (d.layers - d.first) % max(d.pp - 1, 1) != 0, "the other stages are alike"
    yield bool(d.first) and (bool(d.pattern) or d.first >= d.layers), "the first stage leaves layers over"
    yield ranks % (d.ep * d.etp) != 0, "upstream: EP and ETP divide the ranks of a stage"
    yield d.etp not in (1, d.tp), "experts are divided over TP or not at all"
    yield bool(d.experts % d.ep), "experts are divided over EP"
    yield (d.ep > 1 or d.etp > 1) and not d.experts, "EP is for experts"
    yield (model == "experts" or "E" in d.pattern) != bool(d.experts), "a model of experts has some"
    yield bool(d.experts) and not 0 < d.top_k <= d.experts, "a token goes to so many experts as there are"
    yield (
        bool(d.capacity) and (ranks != d.dp or not d.experts or d.dispatcher != "alltoall"),
        ("upstream drops tokens rank by rank: those of one process where TP and CP are 1; only by alltoall"),
    )
    yield bool(d.capacity) and d.gathered, "one process would drop among the tokens of all replicas"
    yield (d.padding > 0) and model not in ("gpt", "experts"), "only GPTs are drawn with padded vocabularies"
    yield d.vocabulary - d.padding < gpt.VOCABULARY, "the data have so many tokens"
    yield model == "bert" and (d.gated or d.rms or d.rope or not d.bias or d.tied), "BERT has one form"
    yield (
        model in ("latent", "hybrid") and (not d.gated or not d.rms or not d.rope or d.bias),
        ("the tests' specs of these models have one form"),
    )
    yield d.qk_norm and model in ("hybrid", "bert"), "these specs have no norms of queries"
    yield (
        model == "latent" and d.qk_norm and not d.q_rank,
        "upstream: their rank has the norms",
    )
    yield bool(d.q_rank) and model != "latent", "queries' rank is multi-latent attention's"
    yield bool(d.depths) != (model == "prediction"), "a model of prediction has depths"
    yield (
        model in ("latent", "hybrid") and (d.hidden, d.heads, d.ffn, d.groups) != _SIZES,
        ("their parts' widths are written down for one size"),
    )
    yield "M" in d.pattern and d.tp > 2, "two groups are divided over TP"
    yield "G" in d.pattern and d.tp > 2, "two key heads are divided over TP"
    yield "*" in d.pattern and "+" in d.pattern, "the sites of the two attentions are written down apart"
    yield d.pattern.endswith("M"), "a last layer of Mamba's makes rounding errors greater, upstream too"
    yield model == "experts" and d.bias, "upstream: grouped biases are not those of one process"
    yield d.tied and (model not in ("gpt",)), "tied embeddings are drawn in GPTs"
    # -- context parallelism, recomputation, schedules
    yield (
        d.cp > 1 and model in ("latent", "hybrid", "bert"),
        ("the tests' CP attention is causal with one head size; the package refuses CP inside Mamba"),
    )
    yield model == "prediction" and d.cp > 1, "upstream: a CP rank's loss of depths is of its own tokens"
    yield (
        model == "prediction" and d.pp > 1 and not d.rope,
        ("upstream: the two stages with embeddings sum no gradients of positions"),
    )
    yield d.forward_only and bool(d.recompute), "without a backward pass nothing is recomputed"
    yield bool(set(d.recompute) - set(RECOMPUTE[model])), f"recomputed in {model}: {RECOMPUTE[model]}"
    yield (
        "mlp" in d.recompute and d.bias,
        ("upstream: a recomputed MLP gives its bias out of the checkpoint, whose backward then never ends"),
    )
    yield "moe" in d.recompute and not d.experts, "no experts to recompute"
    # -- what is compared
    yield bool(d.dropout) and (d.bf16 or d.forward_only or d.gathered), "dropout is drawn in plain training"
    yield bool(d.dropout) and model in ("hybrid", "latent"), "their tests have no dropout"
    yield bool(d.dropout) and bool(d.dump or d.statistics), "with dropout a run is compared with itself"
    yield d.bf16 and (model != "gpt" or d.edits or bool(d.dump or d.statistics)), "bf16 is read, in GPTs"
    yield d.bf16 and (d.forward_only or d.gathered or d.steps > 1), "bf16 is read in plain training"
    yield d.gathered and (d.dp == 1 or bool(d.experts)), "samples are gathered over data parallel ranks"
    yield d.gathered and bool(d.dump or d.statistics), "these are of each replica, gathered or not"
    yield d.forward_only and bool(d.statistics), "statistics are taken in training"
    yield (
        any(_is_partial(d, s) for s in d.statistics),
        "statistics of partial sums are refused, of a gradient too",
    )
    yield d.verify and (d.gathered or bool(d.dropout)), "verified in plain runs"
    yield d.frozen not in failing.FROZEN, f"frozen is one of {failing.FROZEN}"
    parts = {d.frozen, *(row.frozen for row in d.failures)} - {""}
    yield (
        (bool(parts) and model == "prediction") or (bool(parts or d.failures) and d.tied and d.pp > 1),
        "the tests sum the embeddings' gradients, which must exist",
    )
    yield bool(d.frozen) and d.bf16, "bf16 is read in plain training"
    yield bool(d.frozen and d.recompute), "upstream: recomputed where the input needs no gradient, none comes"
    others = (d.hooks, d.dump, d.statistics, d.frozen, d.padding, d.steps > 1, d.forward_only)
    yield (
        bool(d.failures) and any((*others, d.dropout, d.bf16, d.gathered, d.verify)),
        "failures are drawn apart, in plain training",
    )


def _is_partial(d: Draw, site: str) -> bool:
    """Whether ranks hold partial sums of a site's value or gradient."""
    if ".local_experts." in site:
        inside = re.sub(r".*\.local_experts\.\d+", "", site)
        values, gradients = (":output", ".linear_fc2:output"), (":input", ".linear_fc1:input")
        return d.etp > 1 and inside in (*values, *gradients)
    shared = d.groups < d.tp and SHARED_KEYS.search(site) is not None
    return d.tp > 1 and (site.endswith(":gemm_input") or shared)


# Of ranks that share a group's key and value: each has the gradient of its own queries, a part of the sum.
SHARED_KEYS = re.compile(r"\.linear_qkv:[qkv]$|(self|core)_attention:[kv]$")
_SIZES = (gpt.HIDDEN, gpt.HEADS, gpt.FFN, gpt.GROUPS)
RECOMPUTE = {
    "gpt": ("full", "core_attn", "mlp", "layernorm"),
    "experts": ("full", "core_attn", "moe", "layernorm"),
    "hybrid": ("full",),
    "latent": ("full", "core_attn", "mlp", "layernorm"),
    "prediction": ("full", "core_attn"),
    "bert": ("full",),
}


def _hooks_forbidden(d: Draw) -> str:
    if not (d.hooks or d.dump or d.statistics or d.failures):
        return "nothing is hooked"
    if wrong := next((why for row in d.failures for broken, why in _row_rules(d, row) if broken), ""):
        return wrong
    sites = (*d.dump, *d.statistics, *(s for h in d.hooks if h.backward for s in matched(d, h)))
    if d.frozen and not all(_has_gradient(d.frozen, s) for s in sites):
        return "a tensor without a trained parameter before it has no gradient"
    if d.steps == 1 and any(h.quiet for h in d.hooks):
        return "a quiet hook is off in the second step"
    if missing := [s for s in (*d.dump, *d.statistics) if s not in sites_of(d)]:
        return f"the model has no {missing[0]}"
    if any(".local_experts." in s for s in d.dump):
        return "an expert's rows are another number in each microbatch; tests of dumps compare them by token"
    kept = [(s, h.backward, h.wish) for h in d.hooks if h.wish for s in matched(d, h)]
    if len(kept) > len(set(kept)):
        return "two hooks keep the same selection of a site"
    return next((why for h in d.hooks for why in _hook_forbidden(d, h)), "")


def _hook_forbidden(d: Draw, h: Hook) -> Iterator[str]:
    if h.backward and d.forward_only:
        yield f"{h}: there is no backward pass"
    if h.kind not in (*VALUES, *GRADIENTS):
        yield f"{h}: no such kind"
    if h.kind == "parameter":
        if h.edit or h.wish or not _has(d, h):
            yield f"{h}: a parameter's gradient is read"
        if d.bf16 or d.gathered:
            yield f"{h}: parameters are hooked in plain runs"
        return
    if not h.site.endswith(POINT_OF.get(h.kind, "")):
        yield f"{h}: a hook of this kind is on {POINT_OF[h.kind]}"
    found = matched(d, h)
    if not found:
        yield f"{h}: the model has no such site"
    for site in found:
        if moe.read_only(site) and (h.edit or h.backward):
            yield f"{h}: the package refuses it, numbers have no gradient and are not edited"
        if h.edit and h.edit not in edit_table.possible(site, h.backward, d.kind):
            yield f"{h}: no such edit there"
        if h.wish and h.wish not in wish_table.possible(site, d.kind):
            yield f"{h}: no such selection there"
    if h.edit and h.wish:
        yield f"{h}: selections are drawn apart from edits"


STREAM = re.compile(r"(decoder|encoder)\.layers\.\d+:(input|mid|output)")
FC = re.compile(r"decoder\.layers\.\d+\.mlp\.(linear_fc1:output|linear_fc2:input)")
FIRST = re.compile(r"decoder\.layers\.0:(input|mid)")


def _has_gradient(frozen: str, site: str) -> bool:
    """Whether trained parameters, those of layers, are before a site; of some sites it is not said."""
    return not frozen or (
        frozen == "embedding" and re.match(r"(decoder|encoder)\.layers\.\d+\.mlp", site) is not None
    )


def _row_rules(d: Draw, row: Row) -> Iterator[tuple[bool, str]]:
    """What keeps an edit that fails from being drawn."""
    told, gradient = f"{row}: ", row.kind.startswith("gradient")
    yield row.kind not in failing.KINDS, f"{told}the kinds are {failing.KINDS}"
    yield row.site not in sites_of(d), f"{told}the model does not have this site"
    yield moe.read_only(row.site), f"{told}numbers are not edited"
    expert = ".local_experts." in row.site
    yield expert and row.kind not in ("gathered", "skip", "local", "gradient"), f"{told}an expert has rows"
    stream = STREAM.fullmatch(row.site) is not None and d.kind != "hybrid"
    yield row.kind == "module" and not stream, f"{told}the module is for the residual stream"
    fc = FC.fullmatch(row.site) is not None and d.kind not in ("hybrid", "experts")
    yield row.kind == "chain" and not (stream or fc), f"{told}the direction is for some widths"
    alone = d.tp * d.cp == 1 and not d.experts
    local = row.kind in ("chain", "local", "skip local", "sum", "skip sum")
    yield local and row.trains and not alone, f"{told}refused: each rank would have a part of the gradient"
    first = FIRST.fullmatch(row.site) is not None and d.kind != "hybrid" and d.layers > 1
    two = row.kind.startswith("context") or row.kind == "then gradient"
    yield two and not first, f"{told}another hook is at the second layer's input"
    yield (gradient or two) and row.mode != "train", f"{told}gradients are of a training step"
    yield gradient and not _has_gradient(row.frozen, row.site), f"{told}the tensor has no gradient"
    yield row.kind == "then gradient" and bool(row.frozen) and not row.trains, f"{told}no gradient"
    yield row.mode == "call" and (d.kind != "gpt" or d.cp * d.pp > 1), f"{told}only GPTs are called"
    yield row.mode == "call" and d.dp > 1, f"{told}replicas may be called apart, and raise apart"
    yield row.mode == "call" and bool(d.recompute), f"{told}recomputed in a backward pass"
    yield (
        row.frozen == "embedding" and bool(d.recompute) and row.kind != "module",
        f"{told}upstream: a recomputed region whose input needs no gradient gives its parameters none",
    )
    yield (
        row.frozen == "model" and bool({"layernorm"} & set(d.recompute)),
        f"{told}upstream: what discards its output and needs no gradient keeps no input to compute it from",
    )


# -- drawing -----------------------------------------------------------------------------------------


def drawn(seed: int, worlds: Sequence[int] = (1, 2, 4)) -> Iterator[Draw]:
    """Cases without end, the same for a seed: number `n` depends on the seed and `n` alone."""
    number = 0
    while True:
        yield one(random.Random(f"{seed}/{number}"), worlds)
        number += 1


def one(rng: random.Random, worlds: Sequence[int]) -> Draw:
    """A case, in which an edit may fail on one rank, or parameters may be frozen."""
    draw, chance = plain(rng, worlds), rng.random()
    if chance < 0.25:
        return _failing(rng, draw)
    other = replace(draw, frozen=rng.choice(failing.FROZEN[1:]))
    return other if chance < 0.4 and not forbidden(other) else draw


def _failing(rng: random.Random, draw: Draw) -> Draw:
    """The same model with failures instead of the hooks; the same case where it can have none."""
    apart: dict[str, Any] = {n: getattr(Draw, n) for n in APART}
    bare = replace(draw, **apart)
    rows: list[Row] = []
    sites = [s for s in sites_of(bare) if not moe.read_only(s)]
    if forbidden(replace(bare, failures=(Row("gathered", sites[0], ""),))):
        return draw
    special = {
        "module": STREAM,
        "chain": re.compile(f"{STREAM.pattern}|{FC.pattern}"),
        **dict.fromkeys(("context", "context once", "then gradient"), FIRST),
    }
    while len(rows) < 3:
        kind = rng.choice(failing.KINDS)
        here = [s for s in sites if special[kind].fullmatch(s)] if kind in special else sites
        row = Row(
            kind,
            rng.choice(here or sites),
            rng.choice(failing.FROZEN),
            trains=rng.random() < 0.6,
            rank=rng.randrange(draw.world),
            step=rng.randrange(2),
            late=rng.random() < 0.3,
            mode=rng.choice(("train", "call", *failing.MODES)),
        )
        if not forbidden(replace(bare, failures=(row,))):
            rows.append(row)
    return replace(bare, failures=tuple(dict.fromkeys(rows)))


APART = (
    "hooks",
    "dump",
    "statistics",
    "padding",
    "steps",
    "forward_only",
    "dropout",
    "bf16",
    "gathered",
    "verify",
)


def plain(rng: random.Random, worlds: Sequence[int]) -> Draw:
    """A case in which nothing fails or is frozen; those that are not possible are drawn again."""
    while True:
        draw = _hooked(rng, _model(rng, worlds))
        if not forbidden(draw):
            return draw


def _model(rng: random.Random, worlds: Sequence[int]) -> Draw:
    kind = rng.choice(("gpt", "gpt", "gpt", *KINDS))
    world = rng.choices(worlds, weights=[4 if 1 < w < 8 else 1 for w in worlds])[0]
    while True:
        draw = _spread(rng, kind, world)
        if not next((why for broken, why in _rules(draw) if broken), ""):
            return draw


def _spread(rng: random.Random, kind: str, world: int) -> Draw:
    def maybe(chance: float) -> bool:
        return rng.random() < chance

    sizes = dict.fromkeys(AXES, 1)
    for _ in range(world.bit_length() - 1):
        sizes[rng.choice(AXES)] *= 2
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    vpp = 2 if pp > 1 and maybe(0.5) else 1
    told: dict[str, Any] = {**sizes, "vpp": vpp, "sp": tp > 1 and (maybe(0.6) or kind == "experts")}
    told["layers"] = rng.choice([n for n in range(1, 7) if n % (pp * vpp) == 0] or [pp * vpp])
    if 1 < pp < told["layers"] + 1 and vpp == 1 and maybe(0.4):
        told["layers"], told["first"] = rng.choice([(3, 1), (3, 2), (4, 1), (4, 3), (5, 2), (6, 3)])
    told["microbatches"] = rng.choice((pp, 2 * pp) if vpp > 1 else (1, 2, 2, 3, 4))
    told["steps"] = 2 if maybe(0.3) else 1
    if maybe(0.35):
        some = RECOMPUTE[kind][1:]
        told["recompute"] = ("full",) if maybe(0.5) or not some else (rng.choice(some),)
    elif maybe(0.15):
        told["forward_only"] = True
    told["scale"] = rng.choice(("raw", "raw", "loss"))
    told |= _details(rng, kind, told)
    training = "forward_only" not in told
    choices = [{}, {}, {}, {"verify": True}]
    choices += [{"gathered": True}] * 2 if dp > 1 and kind not in ("experts", "hybrid") else []
    choices += [{"dropout": 0.25}] if training and kind not in ("hybrid", "latent") else []
    choices += [{"bf16": True, "steps": 1}] if training and kind == "gpt" else []
    return Draw(kind=kind, **{**told, **rng.choice(choices)})


def _details(rng: random.Random, kind: str, so_far: dict[str, Any]) -> dict[str, Any]:
    """What is special of a kind of model."""
    coin = lambda: rng.random() < 0.5  # noqa: E731
    out: dict[str, Any] = {}
    if kind in ("gpt", "experts", "prediction", "bert"):
        out["hidden"], out["heads"] = rng.choice(((32, 4), (48, 4), (48, 8), (64, 8)))
        out["groups"] = rng.choice([n for n in (1, 2, 4, 8) if out["heads"] % n == 0])
        out["ffn"] = rng.choice((24, 40, 48, 64))
    if kind in ("gpt", "prediction"):
        out |= {"gated": coin(), "rms": coin(), "rope": coin(), "bias": coin()}
    if kind in ("gpt", "experts"):
        out["qk_norm"] = coin()
        out["vocabulary"] = rng.choice((64, 64, 72, 96))
        if out["vocabulary"] > 64 and coin():
            out["padding"] = rng.randint(1, out["vocabulary"] - 64)
    if kind == "gpt":
        out["tied"] = rng.random() < 0.2
    if kind == "experts":
        out |= _experts(rng, so_far) | {"shared_experts": coin(), "top_k": rng.choice((1, 2, 2, 3))}
        out["dispatcher"] = rng.choice(("alltoall", "allgather"))
        if so_far["tp"] * so_far["cp"] == 1 and coin():
            out |= {"capacity": rng.choice((0.75, 1.25)), "dispatcher": "alltoall"}
    if kind == "hybrid":
        letters = rng.choice(("M*-", "M*-E", "G*-", "MG*-E", "M+-", "+-E"))
        so_many = max(2, so_far["pp"] * so_far["vpp"])
        out["pattern"] = "".join(rng.choice(letters) for _ in range(so_many * rng.randint(1, 2)))
        out |= _experts(rng, so_far) if "E" in out["pattern"] else {}
        out["layers"] = 1
    if kind == "latent":
        out["q_rank"] = rng.choice((0, 16))
        out["qk_norm"] = bool(out["q_rank"]) and coin()
    if kind == "prediction":
        out["depths"] = rng.choice((1, 2))
    if kind == "bert":
        out |= {"gated": False, "rms": False, "rope": False, "bias": True}
    return out


def _experts(rng: random.Random, so_far: dict[str, Any]) -> dict[str, Any]:
    ranks = so_far["tp"] * so_far["cp"] * so_far["dp"]
    ep = rng.choice([n for n in (1, 2, 4) if ranks % n == 0])
    return {"experts": rng.choice((4, 4, 8)), "ep": ep, "etp": rng.choice((1, so_far["tp"]))}


def _hooked(rng: random.Random, draw: Draw) -> Draw:
    """The same with hooks: either many that read, or some that edit beside some that read."""
    sites = sites_of(draw)
    editing = not draw.bf16 and rng.random() < 0.7
    hooks = [_reading(rng, draw, rng.choice(sites)) for _ in range(rng.randint(3, 8 if editing else 24))]
    hooks += [_editing(rng, draw) for _ in range(rng.randint(1, 3) if editing else 0)]
    hooks = [h for h in hooks if h is not None]
    rng.shuffle(hooks)
    if draw.steps > 1:
        hooks = [replace(h, quiet=rng.random() < 0.3) for h in hooks]
    plain = not (draw.dropout or draw.bf16 or draw.gathered)
    some = [s for s in sites if not s.endswith(":partial") and not moe.read_only(s)]
    more: dict[str, Any] = {}
    if plain and rng.random() < 0.25:
        whole = [s for s in sites if ".local_experts." not in s]
        more["dump"] = tuple(dict.fromkeys(rng.choices(whole, k=4)))
    if plain and not draw.forward_only and rng.random() < 0.25:
        more["statistics"] = tuple(dict.fromkeys(rng.choices(some, k=4)))
    return replace(draw, hooks=tuple(dict.fromkeys(h for h in hooks if h)), **more)


def _kind(rng: random.Random, draw: Draw, site: str) -> str:
    gradient = not draw.forward_only and not moe.read_only(site) and rng.random() < 0.45
    kinds = [k for k in (GRADIENTS[:3] if gradient else VALUES) if site.endswith(POINT_OF.get(k, ""))]
    return rng.choice(kinds)


def _reading(rng: random.Random, draw: Draw, site: str) -> Hook | None:
    if not draw.forward_only and not (draw.bf16 or draw.gathered) and rng.random() < 0.1:
        name = f"decoder.layers.{rng.randrange(draw.layers)}.{rng.choice(PARAMETERS)}"
        known = draw.kind in ("gpt", "prediction")
        return Hook(name, "parameter") if known else None
    kind = _kind(rng, draw, site)
    wishes = wish_table.possible(site, draw.kind)
    wish = rng.choice(wishes) if wishes and rng.random() < 0.3 else ""
    return Hook(_globbed(rng, draw, site), kind, wish=wish)


PARAMETERS = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight")
PARAMETERS += ("self_attention.linear_proj.weight", "input_layernorm.weight")


def _editing(rng: random.Random, draw: Draw) -> Hook | None:
    site = rng.choice([s for s in sites_of(draw) if not moe.read_only(s)])
    kind = _kind(rng, draw, site)
    edit = rng.choice(edit_table.possible(site, kind in GRADIENTS, draw.kind))
    return Hook(_globbed(rng, draw, site), kind, edit, run=rng.choice(("replicated", "replicated", "once")))


def _globbed(rng: random.Random, draw: Draw, site: str) -> str:
    alike = draw.kind != "hybrid" and rng.random() < 0.2
    return re.sub(r"^(decoder|encoder)\.layers\.\d+", r"\1.layers.*", site) if alike else site
