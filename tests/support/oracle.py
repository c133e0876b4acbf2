"""The single-process truth: values, gradients and edits of a plain Megatron run, taken by plain PyTorch.

Nothing here goes through the library. On one process every local tensor is the whole, so a hook on the
module, or a wrapped function, has the tensor that the library must give back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import bert, families, gpt, latent, lora, moe, mtp, parts, ssm, te

Visit = Callable[[Tensor], Tensor]
ARGUMENTS = {"q": (0, "query"), "k": (1, "key"), "v": (2, "value"), "scores": (0, "input")}

PARTS = ("q", "k", "v", "gate")


def edit(tensor: Tensor) -> Tensor:
    """An edit that mixes neighbours and treats every place differently: no shard can do it alone."""
    places = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device).reshape(tensor.shape)
    return tensor * (1 + 0.1 * torch.cos(places)).to(tensor.dtype) + 0.05 * tensor.roll(1, -1).roll(1, 0)


def install(root: nn.Module, site: str, visit: Visit) -> None:
    """Put `visit` at a site of a one-process model, by whatever plain means; it is never taken out."""
    path, _, point = site.partition(":")
    if path.rpartition(".")[2] == "loss":
        return _wrap(root.get_submodule(path.rpartition(".")[0]), "compute_language_model_loss", visit, None)
    if moe.knows(site):
        return moe.install(root, site, visit)
    module = root.get_submodule(path)
    if families.install(module, path, point, visit):
        return None
    if path.startswith("embedding") and type(root).__name__ != "T5Model":  # whose two calls are the site
        visit = mtp.first_call(root, visit)
    if type(module).__name__ == "MultiTokenPredictionLayer" and point == "input":
        return _before(module, 2, "hidden_states", visit)
    place = ssm.part_of(path, point)
    if place is not None:
        return _after(module, lambda t: _with_part(t, place, visit))
    if type(module).__name__ == "GatedDeltaNet" and point not in ("input", "output"):
        if point == "conv":
            return _wrap_input(module, ssm.PREPARE, visit)
        return _wrap(module, ssm.METHODS[point][0], visit, ssm.METHODS[point][1])
    if path.endswith(("linear_qkv", "linear_fc1")) and point in parts.POINTS:
        parts.install(module, getattr(module, "config", root.config), path, point, visit)
    elif point == "output" and getattr(module, "apart", False):  # of packed sequences: [t, n, d]
        _after(module, lambda t: visit(t.flatten(1)).view(t.shape))
    elif point in ("output", "partial", "probs"):
        target = module.scale_mask_softmax if point == "probs" else module
        _after(target, visit)
    elif point in ("input", "gemm_input"):
        _before(module, 0, None, visit)
    elif point == "mid":
        _mid(module, visit)
    elif path.endswith("core_attention"):
        target = module.scale_mask_softmax if point == "scores" else module
        _before(target, *ARGUMENTS[point], visit)
    else:
        _wrap(module, "get_query_key_value_tensors", visit, PARTS.index(point))
    return None


def _after(module: nn.Module, visit: Visit) -> None:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return visit(output)
        first, *rest = output
        if isinstance(first, tuple):  # with the norm's output beside it
            return ((visit(first[0]), *first[1:]), *rest)
        return (visit(first), *rest)

    module.register_forward_hook(hook)


def _before(module: nn.Module, index: int, keyword: str | None, visit: Visit) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > index:
            return (*args[:index], visit(args[index]), *args[index + 1 :]), kwargs
        name = keyword or next(iter(kwargs))
        return args, {**kwargs, name: visit(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _wrap(owner: Any, name: str, visit: Visit, index: int | None) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if index is None:
            return visit(output)
        return tuple(visit(item) if i == index else item for i, item in enumerate(output))

    setattr(owner, name, wrapped)


def _wrap_input(owner: Any, name: str, visit: Visit) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda first, *args: original(visit(first), *args))


def _with_part(packed: Tensor, place: slice, visit: Visit) -> Tensor:
    before, part, behind = packed[..., : place.start], packed[..., place], packed[..., place.stop :]
    return torch.cat([before, visit(part), behind], -1)


def _mid(layer: Any, visit: Visit) -> None:
    original = layer.self_attn_bda

    def make(*args: Any) -> Callable[..., Tensor]:
        add = original(*args)
        return lambda *a, **k: visit(add(*a, **k))

    layer.self_attn_bda = make


Truth = dict[str, Any]
AND = " + "  # between the names of sites that are edited in one run


def apart(sites: str) -> list[str]:
    """The sites that are edited in one run."""
    return sites.split(AND)


def run(case: gpt.Case, sites: list[str], edits: list[str]) -> Truth:
    """Everything that a sharded run is compared with, from one process.

    Returns:
        `state`, the weights; `losses` of each microbatch; `values` and `gradients` of each site by
        microbatch; `parameters`, their gradients; `edited`, losses and parameter gradients of each edit.
    """
    gpt.runtime(case)
    gpt.initialize(case)
    chunks = gpt.build(case)
    state = gpt.randomize(chunks[0])
    losses, parameters = _step(case, chunks)
    truth: Truth = {"state": state, "losses": losses, "parameters": parameters, "edited": {}}

    watched = gpt.build(case)
    gpt.load(watched, state)
    values: dict[str, list[Tensor]] = defaultdict(list)
    gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)  # by forward call: backward ones are reversed

    def watch(site: str) -> Visit:
        def visit(tensor: Tensor) -> Tensor:
            call = len(values[site])
            values[site].append(tensor.detach().clone())
            if tensor.requires_grad:
                tensor = tensor.clone()  # masking in place would take the hook away from a view
                tensor.register_hook(lambda grad: gradients[site].update({call: grad.detach().clone()}))
            return tensor

        return visit

    for site in sites:
        install(watched[0], site, watch(site))
    _step(case, watched)
    ordered = {site: [found[call] for call in sorted(found)] for site, found in gradients.items()}
    truth.update(values=dict(values), gradients=ordered)

    truth["edited"] = edited(case, edits)
    return truth


def edited(case: gpt.Case, sites: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Losses and parameter gradients of one process with `edit` at sites, each alone or several together.

    Args:
        case: a case of one process.
        sites: for each run the name of a site, or of several with `AND` between them.
    """
    gpt.runtime(case)
    gpt.initialize(case)
    found = {}
    for together in sites:
        chunks = gpt.build(case)
        gpt.randomize(chunks[0])
        for site in apart(together):
            install(chunks[0], site, edit)
        found[together] = _step(case, chunks)
    return found


def _step(case: gpt.Case, chunks: list[nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    losses = gpt.step(case, chunks, 0)
    return losses, {n: p.grad.clone() for n, p in gpt.global_names(chunks[0]) if p.grad is not None}


def sites_of(case: gpt.Case) -> list[str]:
    """The names of all sites of a case's model, written down here by hand and not asked of the library."""
    norm, final = ("input_layernorm", "pre_mlp_layernorm"), "final_layernorm"
    if case.hybrid or case.pattern:
        final = "final_norm"
    attention = [
        *(f"self_attention:{p}" for p in ("input", "output", "q", "k", "v")),
        *(f"self_attention.linear_qkv:{p}" for p in ("input", "gemm_input", "output", "q", "k", "v")),
        *(f"self_attention.core_attention:{p}" for p in ("q", "k", "v", "scores", "probs", "output")),
        *(f"self_attention.linear_proj:{p}" for p in ("input", "partial", "output")),
        *(f"{norm[0]}:{p}" for p in ("input", "output")),
    ]
    if case.extra.get("attention_output_gate"):
        attention += ["self_attention:gate", "self_attention.linear_qkv:gate"]
    if case.mla:  # in a pattern, `+` takes the place of `*`
        attention = latent.sites(case.q_rank, case.qk_norm)
    elif case.qk_norm:
        attention += [f"self_attention.{n}_layernorm:{p}" for n in "qk" for p in ("input", "output")]
    mlp = [
        *(f"mlp:{p}" for p in ("input", "output")),
        *(f"mlp.linear_fc1:{p}" for p in ("input", "gemm_input", "output")),
        *(f"mlp.linear_fc1:{p}" for p in ("gate", "up") if case.gated),
        *(f"mlp.linear_fc2:{p}" for p in ("input", "partial", "output")),
        *(f"{norm[1]}:{p}" for p in ("input", "output")),
    ]
    experts = [*(f"{norm[1]}:{p}" for p in ("input", "output")), *moe.sites_of(case)]
    if case.experts and not case.pattern:
        mlp = experts
    out = [f"embedding{p}:output" for p in (".word_embeddings", "")] + ["embedding.word_embeddings:partial"]
    out += ["embedding.word_embeddings:input"]
    out += ssm.sites_of(case.pattern, attention, mlp, experts=experts)
    for layer in range(0 if case.pattern else case.layers * (2 if case.hybrid else 1)):
        own = attention + mlp if not case.hybrid else (attention if layer % 2 == 0 else mlp)
        out += [f"decoder.layers.{layer}:{p}" for p in ("input", "output")]
        out += [f"decoder.layers.{layer}:mid"] if not case.hybrid else []
        out += [f"decoder.layers.{layer}.{name}" for name in own]
    out += ["decoder:output", f"decoder.{final}:input", f"decoder.{final}:output"]
    later = case.pattern.partition("/")[2]
    stack = partial(ssm.sites_of, later, attention, mlp) if later else None
    depths = 1 if case.extra.get("mtp_use_repeated_layer") else case.extra.get("mtp_num_layers")
    out += mtp.sites_of(depths, attention + mlp, stack)
    out += [*(f"output_layer:{p}" for p in ("input", "gemm_input", "output")), "loss:output"]
    out = te.visible(out, case.extra) if case.te else out
    out = lora.sites_of(out, case.adapters) if case.adapters else out
    if case.family:
        return families.sites_of(case, out, families.Parts(attention, mlp))
    return bert.sites_of(out) if case.bert else out


def edits_of(case: gpt.Case) -> list[str]:
    """One site of each kind (of one layer, on the last stage), and what one stage hands to the next."""
    count = case.layers * (2 if case.hybrid else 1)
    keep = [f"decoder.layers.{n}" for n in range(count - (2 if case.hybrid else 1), count)]
    keep = ["mtp.layers.0", *(ssm.kept(case.pattern) if case.pattern else keep)]
    count = len(ssm.layers_of(case.pattern)) or count
    border = [f"decoder.layers.{count // 2 - 1}:output", f"decoder.layers.{count // 2}:input"]
    if case.family:
        keep, border = families.kept(case, keep), families.kept(case, border)
    if case.bert:
        keep, border = ([s.replace("decoder", "encoder") for s in names] for names in (keep, border))
    return [
        s
        for s in sites_of(case)
        if (".layers." not in s or s in border or any(s.startswith((f"{k}:", f"{k}.")) for k in keep))
        and not moe.read_only(s)
    ]
