"""`align`: a Hugging Face model and a Megatron model on the same tokens, hook point by hook point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_flex.adapters.megatron_core import MegatronAdapter
from megatron_flex.alignment.alignment_result import Alignment, SiteVerdict, part_of
from megatron_flex.alignment.candidate_run import CandidateRun
from megatron_flex.alignment.causes import find_causes
from megatron_flex.alignment.counterparts import Match, family_of
from megatron_flex.alignment.evidence import Evidence
from megatron_flex.alignment.reference_run import Captures, ReferenceRun
from megatron_flex.alignment.routing import Routing
from megatron_flex.alignment.site_pairs import axis_sizes, compared_pair, reference_tensor
from megatron_flex.alignment.step_gradients import StepGradients
from megatron_flex.alignment.tensor_difference import Difference, measure
from megatron_flex.alignment.token_batch import TokenBatch, prepare_batch, sequence_divisor
from megatron_flex.collectives import gather_objects
from megatron_flex.compare.compared_dump import VALUE, ComparedTensor
from megatron_flex.compare.noise_scale import SoftmaxNoise
from megatron_flex.compare.tolerance import Tolerances, make_precision
from megatron_flex.errors import FlexError, describe_error
from megatron_flex.model import FlexModel
from megatron_flex.runtime import full_parameters
from megatron_flex.runtime.full_parameters import ParameterRequest

LAYER_INPUT, FINAL_INPUTS = ":input", ("decoder.final_layernorm:input", "decoder.final_norm:input")
NO_MODEL = (
    "the first rank has no Hugging Face model; give it on the first rank, and None or the same on the others"
)


def align(
    hf_model: nn.Module | None,
    flex: FlexModel,
    batch: Any,
    *,
    tolerance: float | None = None,
    gradients: bool = False,
    isolate: bool = False,
) -> Alignment:
    """Compare a Hugging Face model with a Megatron model on the same tokens. Every rank calls it.

    The Hugging Face model runs on the first rank. The Megatron model runs forward as it is (the
    *accumulated* difference). Where a hook point then differs by more than layers with equal inputs may,
    it runs again, with each layer's input replaced by that of Hugging Face (the *isolated* difference, to
    which earlier layers contribute nothing). Both models run in the mode of `eval()`, without dropout; the
    mode of each module is restored.

    Args:
        hf_model: a causal language model of transformers; the other ranks may pass None.
        flex: the Megatron model, in any layout.
        batch: tokens `[batch, sequence]`, the same on all ranks, or a mapping with `input_ids` and
            `attention_mask`. Padding is moved to the end of a sequence and is not compared.
        tolerance: how far tensors may differ, relative to their norm and to their greatest entry; None:
            derived from the precisions of the two models and the depth of the site.
        gradients: also compare the loss and the parameter gradients of one step, in which each token predicts
            the next. The gradients of the Megatron model are cleared.
        isolate: run with the layer inputs of Hugging Face in any case.

    Returns:
        On every rank, the verdicts for each hook point and each layer, and likely causes of the first
        difference.

    Raises:
        FlexError: on all ranks: there is no table for the architecture, no model, or the tokens do not fit.

    Examples:
        >>> print(align(hf_model, flex, tokens))
        agrees: 135 hook points, greatest error ...
        Hugging Face LlamaForCausalLM and Megatron on one rank
    """
    session = flex.session
    first = all(axis.coord == 0 for axis in session.mesh)
    kind: tuple[str, str] = _on_first(flex, lambda: _check_models(hf_model, flex))
    config = session.adapter.roots[0].config  # type: ignore[attr-defined]  # of Megatron, as checked
    tokens = prepare_batch(batch, sequence_divisor(session.mesh, bool(config.sequence_parallel)))
    candidate = CandidateRun(flex, family_of(kind[0]))
    points = {other for match in candidate.matches for other in match.row.other}
    theirs: Captures = {}
    _on_first(flex, lambda: theirs.update(_run_reference(hf_model, points, tokens)))
    judge = _Judge(candidate.matches, tokens, hf_model, config, tolerance, theirs)
    # `roots` is Megatron's adapter's, which was checked above
    with evaluation_mode(*session.adapter.roots):  # type: ignore[attr-defined]
        captures = _run_candidate(candidate, judge, flex, isolate)
        step = StepGradients(hf_model if first else None, flex, tokens) if gradients else None

    def finish() -> Alignment:
        model = f"Hugging Face {kind[1]} and Megatron on {_describe_mesh(flex)}"
        found = judge.alignment(model, candidate.uncompared)
        with evaluation_mode(hf_model) if hf_model is not None else nullcontext():
            if step is None:
                return found
            gradients = step.verdicts(judge.tolerances)
            return replace(found, gradients=gradients, notes=(*found.notes, *step.notes))

    alignment: Alignment = _on_first(flex, finish)
    sites = {m.site: m for m in candidate.matches}
    if alignment.first is None or alignment.first.site not in sites:
        return alignment
    at, weights = alignment.first, _layer_weights(flex, alignment.first.site)
    around = at, sites, theirs, captures, weights, hf_model, config, tokens
    causes = _on_first(flex, lambda: find_causes(Evidence(*around)))
    return replace(alignment, causes=tuple(causes))


def _run_candidate(candidate: CandidateRun, judge: _Judge, flex: FlexModel, isolate: bool) -> Captures:
    """Run the Megatron model once or twice, and compare; returns the captures of the last run. Collective."""
    tokens = judge.batch.tokens
    captures = candidate.run(tokens)
    enough = _on_first(flex, lambda: judge.accumulate(captures))
    if enough and not isolate:
        return captures
    captures = {}  # so that a rank holds the captures of one run
    inputs = candidate.broadcast(_layer_inputs(candidate.matches, judge.theirs))
    captures = candidate.run(tokens, inputs)
    _on_first(flex, lambda: judge.isolate(captures))
    return captures


def _run_reference(hf_model: Any, points: set[str], batch: TokenBatch) -> Captures:
    """The tensors of the Hugging Face model at the points of the table."""
    with evaluation_mode(hf_model):
        return ReferenceRun(hf_model, points).run(batch.tokens)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """The mode of `eval()` for models, and after the block the mode that each module had."""
    modules = [module for model in models for module in model.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _check_models(hf_model: Any, flex: FlexModel) -> tuple[str, str]:
    """The architecture and the class of the Hugging Face model.

    Raises:
        FlexError: the models cannot be compared.
    """
    adapter = flex.session.adapter
    if not isinstance(adapter, MegatronAdapter):
        raise FlexError(
            f"align compares with a Megatron model, and this is one of {adapter.name}; "
            "dump both and compare the dumps"
        )
    adapter.check_is_one_model("align")
    if hf_model is None:
        raise FlexError(NO_MODEL)
    kind = getattr(getattr(hf_model, "config", None), "model_type", None)
    if kind is None:
        raise FlexError(
            f"a {type(hf_model).__name__} has no config.model_type; give a model of transformers, such as "
            "AutoModelForCausalLM.from_pretrained(folder)"
        )
    family_of(kind)
    return str(kind), type(hf_model).__name__


ResultT = TypeVar("ResultT")


def _on_first(flex: FlexModel, work: Callable[[], ResultT]) -> ResultT:
    """The result of the first rank, on all ranks; what it raises there, all ranks raise. Collective.

    Raises:
        FlexError: on all ranks.
    """
    mesh, found, problem = flex.session.mesh, None, ""
    if all(axis.coord == 0 for axis in mesh):
        try:
            found = work()
        except FlexError as error:
            problem = str(error)
        except Exception as error:  # of the Hugging Face model, on which the other ranks would wait
            problem = f"the Hugging Face model cannot be compared: {describe_error(error)}"
    result, raised = gather_objects((found, problem), mesh, [axis.name for axis in mesh])[0]
    if raised:
        raise FlexError(raised)
    shared: ResultT = result
    return shared


def _describe_mesh(flex: FlexModel) -> str:
    sizes = {a.name: a.size for a in flex.session.mesh if a.size > 1}
    experts = flex.session.mesh["ep"].size
    return (
        " x ".join(f"{n}={s}" for n, s in ({**sizes, "ep": experts} if experts > 1 else sizes).items())
        or "one rank"
    )


def _layer_inputs(matches: list[Match], theirs: Captures) -> Captures:
    """The input of each layer and of the final norm in the Hugging Face model, by the Megatron site."""
    wanted = [
        m for m in matches if m.site in FINAL_INPUTS or m.site == f"decoder.layers.{m.layer}{LAYER_INPUT}"
    ]
    return {m.site: theirs[m.row.other[0]] for m in wanted if m.row.other[0] in theirs}


def _layer_weights(flex: FlexModel, site: str) -> dict[str, Tensor]:
    """The full parameters of a layer and those outside of layers, on the first rank. Collective."""
    survey, gpt = flex.session.parameter_index, flex.session.sites.gpt_names
    layer = site.split(".")[2] if site.startswith("decoder.layers.") else None
    own = {gpt.to_gpt(n) or n if gpt.renames else n: n for n in survey.sites}
    names = [n for n in own if not n.startswith("decoder.layers.") or n.split(".")[2] == layer]
    out = {}
    for name in names:
        full = full_parameters.gather_parameter(survey, own[name], ParameterRequest(), None)
        if full is not None:
            out[name] = full
    return out


def bound_sites(
    tolerances: Tolerances,
    differences: Mapping[str, Difference],
    dtypes: Mapping[str, Sequence[torch.dtype]],
    layers: Mapping[str, int | None],
    isolated: bool,
) -> dict[str, float]:
    """How far the tensors of each site may differ, with what attention scores before them explain.

    Args:
        tolerances: from dtype and depth.
        differences: by site, in the order of execution.
        dtypes: of both tensors of each site.
        layers: of the sites; None outside of layers.
        isolated: whether each layer has its own input, so that nothing carries over to the next one.
    """
    out: dict[str, float] = {}
    softmax, layer = SoftmaxNoise(), None
    for site, found in differences.items():
        if isolated and layers[site] != layer:
            softmax = SoftmaxNoise()
        item, layer = ComparedTensor(site, VALUE), layers[site]
        out[site] = tolerances.bound(item, dtypes[site], isolated, softmax.later)
        if found.error <= out[site]:
            softmax.observe(item, found.error, abs(found.here - found.there))
    return out


@dataclass
class _Pass:
    """The differences of one run of the Megatron model.

    Attributes:
        differences: by site.
        kinds: the shape of each compared pair, and its two dtypes.
        absent: the sites that were not compared, with the reason.
        notes: on tokens that were left out.
        bounds: the tolerance of each site, as the model runs and with each layer's input given.
    """

    differences: dict[str, Difference] = field(default_factory=dict)
    kinds: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, torch.dtype]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bounds: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))


@dataclass
class _Judge:
    """Compares the captures of both models, on the first rank."""

    matches: list[Match]
    batch: TokenBatch
    hf_model: Any
    config: Any
    tolerance: float | None
    theirs: Captures
    accumulated: _Pass = field(default_factory=_Pass)
    isolated: _Pass | None = None  # None: the accumulated differences are small enough

    @cached_property
    def tolerances(self) -> Tolerances:
        """How far the tensors may differ."""
        precisions = (
            make_precision(vars(self.config), torch.float32),
            make_precision(vars(self.hf_model.config), next(self.hf_model.parameters()).dtype),
        )
        return Tolerances(self.tolerance, [m.site for m in self.matches], precisions)

    def accumulate(self, captures: Captures) -> bool:
        """Compare a run of the model as it is.

        Returns:
            Whether every difference, of all tokens, is small enough for layers with equal inputs. Then no
            layer differs by itself: its own error would show beside the small one that enters.
        """
        found = self.accumulated = self._compare(captures, carried=True)
        bounds = found.bounds[True]
        return not found.notes and all(d.error <= bounds[s] for s, d in found.differences.items())

    def isolate(self, captures: Captures) -> None:
        """Compare a run with the layer inputs of Hugging Face."""
        self.isolated = self._compare(captures, carried=False)

    def _compare(self, captures: Captures, carried: bool) -> _Pass:
        sizes = axis_sizes(self.hf_model.config, len(self.batch.tokens))
        routing = Routing(self.matches, self.theirs, captures, self.batch, self.tolerances, carried)
        out = _Pass(notes=tuple(routing.notes))
        for match in self.matches:
            there, here = reference_tensor(match.row, self.theirs, sizes), captures.get(match.site)
            if there is None or here is None:
                if not (match.row.optional and there is None and here is None):
                    lacks = "Hugging Face" if there is None else "Megatron"
                    out.absent[match.site] = f"{lacks} has no tensor there in this run"
                continue
            out.kinds[match.site] = tuple(there.shape), (here.dtype, there.dtype)
            pair = compared_pair(match.row, here, there, sizes, self.config)
            out.differences[match.site] = measure(*routing.select(match, *pair))
        layers = {match.site: match.layer for match in self.matches}
        dtypes = {site: kind[1] for site, kind in out.kinds.items()}
        out.bounds = (
            bound_sites(self.tolerances, out.differences, dtypes, layers, False),
            bound_sites(self.tolerances, out.differences, dtypes, layers, True),
        )
        return out

    def alignment(self, model: str, uncompared: dict[str, str]) -> Alignment:
        """The verdicts for all sites.

        Args:
            model: the two models as text.
            uncompared: further sites that were not compared, with the reason.
        """
        runs = self.accumulated, self.isolated or self.accumulated
        verdicts = tuple(
            self._verdict(match, *runs)
            for match in self.matches
            if all(match.site in run.differences for run in runs)
        )
        return Alignment(
            model,
            verdicts,
            notes=(*self.batch.notes, *self.accumulated.notes),
            uncompared={**uncompared, **runs[0].absent, **runs[1].absent},
            runs=1 if self.isolated is None else 2,
        )

    def _verdict(self, match: Match, accumulated: _Pass, isolated: _Pass) -> SiteVerdict:
        shape, dtypes = accumulated.kinds[match.site]
        return SiteVerdict(
            match.site,
            " + ".join(match.row.other),
            part_of(match),
            accumulated.differences[match.site],
            accumulated.bounds[False][match.site],
            isolated.differences[match.site],
            isolated.bounds[True][match.site],
            shape,
            (str(dtypes[0]).removeprefix("torch."), str(dtypes[1]).removeprefix("torch.")),
        )
