"""`align`: a Hugging Face model and a Megatron model on the same tokens, hook point by hook point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_flex.adapters.megatron_core import MegatronAdapter
from megatron_flex.alignment.alignment_result import Alignment
from megatron_flex.alignment.candidate_run import CandidateRun
from megatron_flex.alignment.causes import find_causes
from megatron_flex.alignment.counterparts import Match, family_of
from megatron_flex.alignment.evidence import Evidence
from megatron_flex.alignment.reference_run import Captures, ReferenceRun
from megatron_flex.alignment.routing import Routing
from megatron_flex.alignment.site_pairs import axis_sizes, compared_pair, reference_tensor
from megatron_flex.alignment.site_rows import Dtypes, make_rows, make_verdict, sum_site
from megatron_flex.alignment.step_gradients import StepGradients
from megatron_flex.alignment.token_batch import TokenBatch, prepare_batch, sequence_divisor
from megatron_flex.collectives import broadcast_object
from megatron_flex.compare.comparison import Row
from megatron_flex.compare.tensor_pairs import DifferenceSums
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
    hf_captures: Captures = {}
    _on_first(flex, lambda: hf_captures.update(_run_reference(hf_model, points, tokens)))
    comparer = _SiteComparer(candidate.matches, tokens, hf_model, config, tolerance, hf_captures)
    # `roots` is Megatron's adapter's, which was checked above
    with evaluation_mode(*session.adapter.roots):  # type: ignore[attr-defined]
        captures = _run_candidate(candidate, comparer, flex, isolate)
        step = StepGradients(hf_model if first else None, flex, tokens) if gradients else None

    def finish() -> Alignment:
        model = f"Hugging Face {kind[1]} and Megatron on {_describe_mesh(flex)}"
        aligned = comparer.alignment(model, candidate.uncompared)
        with evaluation_mode(hf_model) if hf_model is not None else nullcontext():
            if step is None:
                return aligned
            gradients = step.verdicts(comparer.tolerances)
            return replace(aligned, gradients=gradients, notes=(*aligned.notes, *step.notes))

    alignment: Alignment = _on_first(flex, finish)
    sites = {m.site: m for m in candidate.matches}
    if alignment.first is None or alignment.first.site not in sites:
        return alignment
    at, weights = alignment.first, _layer_weights(flex, alignment.first.site)
    around = at, sites, hf_captures, captures, weights, hf_model, config, tokens
    causes = _on_first(flex, lambda: find_causes(Evidence(*around)))
    return replace(alignment, causes=tuple(causes))


def _run_candidate(
    candidate: CandidateRun, comparer: _SiteComparer, flex: FlexModel, isolate: bool
) -> Captures:
    """Run the Megatron model once or twice, and compare; returns the captures of the last run. Collective."""
    tokens = comparer.batch.tokens
    captures = candidate.run(tokens)
    enough = _on_first(flex, lambda: comparer.accumulate(captures))
    if enough and not isolate:
        return captures
    captures = {}  # so that a rank holds the captures of one run
    inputs = candidate.broadcast(_layer_inputs(candidate.matches, comparer.hf_captures))
    captures = candidate.run(tokens, inputs)
    _on_first(flex, lambda: comparer.isolate(captures))
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
    mesh, outcome, problem = flex.session.mesh, None, ""
    if all(axis.coord == 0 for axis in mesh):
        try:
            outcome = work()
        except FlexError as error:
            problem = str(error)
        except Exception as error:  # of the Hugging Face model, on which the other ranks would wait
            problem = f"the Hugging Face model cannot be compared: {describe_error(error)}"
    result, raised = broadcast_object((outcome, problem), mesh)
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


def _layer_inputs(matches: list[Match], hf_captures: Captures) -> Captures:
    """The input of each layer and of the final norm in the Hugging Face model, by the Megatron site."""
    input_matches = [
        m for m in matches if m.site in FINAL_INPUTS or m.site == f"decoder.layers.{m.layer}{LAYER_INPUT}"
    ]
    return {m.site: hf_captures[m.row.other[0]] for m in input_matches if m.row.other[0] in hf_captures}


def _layer_weights(flex: FlexModel, site: str) -> dict[str, Tensor]:
    """The full parameters of a layer and those outside of layers, on the first rank. Collective."""
    survey, gpt = flex.session.parameters.index, flex.session.sites.gpt_names
    layer = site.split(".")[2] if site.startswith("decoder.layers.") else None
    stored_names = {gpt.to_gpt(n) or n if gpt.renames else n: n for n in survey.sites}
    names = [n for n in stored_names if not n.startswith("decoder.layers.") or n.split(".")[2] == layer]
    out = {}
    for name in names:
        full = full_parameters.gather_parameter(survey, stored_names[name], ParameterRequest(), None)
        if full is not None:
            out[name] = full
    return out


@dataclass
class _Pass:
    """The differences of one run of the Megatron model.

    Attributes:
        sums: by site, in the order of execution.
        shapes: of the compared tensors.
        dtypes: of both.
        absent: the sites that were not compared, with the reason.
        notes: on tokens that were left out.
    """

    sums: dict[str, DifferenceSums] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, Dtypes] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class _SiteComparer:
    """Compares the captures of both models, on the first rank."""

    matches: list[Match]
    batch: TokenBatch
    hf_model: Any
    config: Any
    tolerance: float | None
    hf_captures: Captures
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
        sums = self.accumulated = self._compare(captures, carried=True)
        return not sums.notes and not any(row.diverges for row in self._rows(sums, True).values())

    def isolate(self, captures: Captures) -> None:
        """Compare a run with the layer inputs of Hugging Face."""
        self.isolated = self._compare(captures, carried=False)

    def _compare(self, captures: Captures, carried: bool) -> _Pass:
        sizes = axis_sizes(self.hf_model.config, len(self.batch.tokens))
        routing = Routing(self.matches, self.hf_captures, captures, self.batch, self.tolerances, carried)
        out = _Pass(notes=tuple(routing.notes))
        for match in self.matches:
            hf, megatron = reference_tensor(match.row, self.hf_captures, sizes), captures.get(match.site)
            if hf is None or megatron is None:
                if not (match.row.optional and hf is None and megatron is None):
                    lacks = "Hugging Face" if hf is None else "Megatron"
                    out.absent[match.site] = f"{lacks} has no tensor there in this run"
                continue
            out.shapes[match.site], out.dtypes[match.site] = tuple(hf.shape), (megatron.dtype, hf.dtype)
            pair = compared_pair(match.row, megatron, hf, sizes, self.config)
            out.sums[match.site] = sum_site(*routing.select(match, *pair))
        return out

    def _rows(self, sums: _Pass, isolated: bool) -> dict[str, Row]:
        layers = {match.site: match.layer for match in self.matches}
        return make_rows(self.tolerances, sums.sums, sums.dtypes, layers, isolated)

    def alignment(self, model: str, uncompared: dict[str, str]) -> Alignment:
        """The verdicts for all sites.

        Args:
            model: the two models as text.
            uncompared: further sites that were not compared, with the reason.
        """
        runs = self.accumulated, self.isolated or self.accumulated
        accumulated, isolated = self._rows(runs[0], False), self._rows(runs[1], True)
        verdicts = tuple(
            make_verdict(
                match.row.points,
                match.part,
                runs[0].shapes[s],
                runs[0].dtypes[s],
                accumulated[s],
                isolated[s],
            )
            for match in self.matches
            if (s := match.site) in accumulated and s in isolated
        )
        return Alignment(
            model,
            verdicts,
            notes=(*self.batch.notes, *self.accumulated.notes),
            uncompared={**uncompared, **runs[0].absent, **runs[1].absent},
            runs=1 if self.isolated is None else 2,
        )
