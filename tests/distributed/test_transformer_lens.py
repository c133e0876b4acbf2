"""The same random weights in TransformerLens and, on four ranks, in Megatron: one cache, name by name."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.distributed.matrix import BOUND, Cell, relative
from tests.support import theirs
from tests.support.conversion import FAMILIES, LAYERS, converted
from tests.support.gpt import Case
from tests.support.pool import run_alone as run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(
    find_spec("transformer_lens") is None or find_spec("transformers") is None,
    reason="needs transformer-lens and transformers: pip install --group peers",
)

MODEL = "GPT-2 and Llama, against TransformerLens"
# What enters a sublayer, once more or once for each head, which TransformerLens computes if it is told to
# (cfg.use_attn_in, use_split_qkv_input, use_hook_mlp_in): Megatron has one stream there, by other names.
COPIES = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in")
COMPUTED = ("hook_scale", "hook_result")  # here from what passes, so that an edit has nothing to go back to
# Of TransformerLens' ActivationCache: gradients of a cache, and layers that HookedTransformer cannot have.
NOT_HERE = {"toggle_autodiff", "ssm_layers", "compute_ssm_effective_attention", "compute_ssm_state"}


def error(got: Any, want: Any) -> float:
    """Greatest relative difference of tensors, or of those in lists; infinite where labels differ."""
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return float("inf")
        return max((error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)
    if not isinstance(want, Tensor):
        return 0.0 if got == want else float("inf")
    if got.shape == want.shape and not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    return relative(got.masked_fill(got.isinf(), 0.0), want.masked_fill(want.isinf(), 0.0))


def ours(case: Case, family: str) -> dict[str, Any]:
    """The same questions to the model on this rank's part of the mesh."""
    import megatron_flex as mf

    chunks = converted(case, family)
    tokens = theirs.TOKENS
    with mf.FlexModel(chunks) as flex:
        names = list(flex.interp.names.aliases)
        logits, cache = flex.interp.run_with_cache(tokens)
        out: dict[str, Any] = {
            "public": theirs.public(cache),
            "names": names,
            "logits": {"": logits},
            "kept": list(cache),
        }
        out["shorter"] = {"": flex.interp.run_with_cache(tokens[:1, :6])[0]}
        out["methods"] = {name: method(cache) for name, method in theirs.METHODS.items()}
        out["methods"]["logit_lens"] = cache.logit_lens(cache.accumulated_resid(incl_mid=True))
        one = flex.interp.run_with_cache(tokens[:1])[1].remove_batch_dim()
        out["methods"]["one sequence"] = theirs.of_one_sequence(one)
        out["cache"] = dict(flex.interp.run_with_cache(tokens, lambda name: True)[1].items())
        out["by microbatch"] = dict(flex.interp.run_with_cache(tokens, names, microbatch_size=1)[1].items())
        out |= edited(flex, names)
    return out


def edited(flex: Any, names: list[str]) -> dict[str, Any]:
    """Logits with one edit after the other, and which edits are refused."""
    import megatron_flex as mf

    def edit(tensor: Tensor, hook: Any) -> Tensor:
        return theirs.whole_edit(hook.name, tensor)

    out, refused = {}, {}
    for name in names:
        try:
            out[name] = flex.interp.run_with_hooks(theirs.TOKENS, [(name, edit)])
        except mf.HookError as refusal:
            refused[name] = str(refusal)
    out["in place"] = flex.interp.run_with_hooks(theirs.TOKENS, theirs.IN_PLACE)
    out["several"] = flex.interp.run_with_hooks(theirs.TOKENS, [(list(theirs.SEVERAL), edit)])
    return {"edited": out, "refused": refused}


@cache
def answers(family: str) -> list[dict[str, Any]]:
    """What the four ranks say."""
    case = FAMILIES[family]
    return run(case.world, ours, case, family, timeout=200)


def agree(
    family: str, what: str, wanted: dict[str, Any], cells: list[Any], check: str = "value", how: str = ""
) -> None:
    """Every rank has what is wanted."""
    errors: dict[str, float] = {}
    for answer in answers(family):
        assert answer[what].keys() == wanted.keys()
        for name, want in wanted.items():
            errors[name] = max(errors.get(name, 0.0), error(answer[what][name], want))
    worst = max(errors, key=lambda name: errors[name])
    print(f"{family}, {what}: {len(errors)} compared, greatest difference {errors[worst]:.1e} {worst}")
    case = FAMILIES[family].name + how
    found = [Cell(case, name or "logits", check, e, model=MODEL) for name, e in errors.items()]
    matrix.judge(found, cells)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_are_the_same(family: str) -> None:
    true, (first, *others) = theirs.known(family), answers(family)
    copies = {f"blocks.{n}.{name}" for n in range(LAYERS) for name in COPIES}
    assert set(true["names"]) - set(first["names"]) == copies
    assert set(first["names"]) <= set(true["names"])
    assert first["kept"] == [n for n in first["names"] if not n.endswith("hook_result")], "unless asked for"
    assert true["public"] - first["public"] == NOT_HERE
    assert all(other["names"] == first["names"] for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_the_cache_are_the_same(family: str, cells: list[Any]) -> None:
    true = theirs.known(family)
    agree(family, "logits", {"": true["logits"]}, cells)
    agree(family, "shorter", {"": true["shorter"]}, cells, how=", a shorter sequence")
    agree(family, "cache", true["cache"], cells)
    agree(family, "by microbatch", true["cache"], cells, how=", by microbatch")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_from_the_cache_is_the_same(family: str, cells: list[Any]) -> None:
    agree(family, "methods", theirs.known(family)["methods"], cells, "computed value")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_at_each_name_does_the_same(family: str, cells: list[Any]) -> None:
    true = theirs.known(family)
    wanted = {n: logits for n, logits in true["edited"].items() if not n.endswith(COMPUTED)}
    agree(family, "edited", wanted, cells, "edited logits")
    for name, logits in wanted.items():
        assert relative(logits, true["logits"]) > 100 * BOUND, f"the edit of {name} does something"
    for answer in answers(family):
        assert set(answer["refused"]) == {n for n in true["cache"] if n.endswith(COMPUTED)}
