"""The truth of Transformer Engine's layers: what one process of Megatron's local layers says.

Transformer Engine has a norm inside the linear that follows it: the linear's input is the norm's, and the
linear has the norm's parameters.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tests.support import oracle, te, truths
from tests.support.gpt import Case


def truth_of(case: Case, sites: list[str], edits: list[str]) -> oracle.Truth:
    """`truths.of` of the same model of local layers, with the names that Transformer Engine's layers have."""
    names = _Names(case)
    at = {site: names.local_site(site) for site in sites}
    together = {edit: oracle.AND.join(map(names.local_site, oracle.apart(edit))) for edit in edits}
    extra = {
        name: value for name, value in case.extra.items() if name not in (te.OP_FUSER, te.FUSED_RESIDUAL)
    }
    local = replace(case.single(), te=False, grouped=False, extra=extra)
    truth = truths.of(local, list(dict.fromkeys(at.values())), list(dict.fromkeys(together.values())))
    values, gradients = truth["values"], truth["gradients"]
    edited = {edit: truth["edited"][name] for edit, name in together.items()}
    return {
        "state": names.parameters(truth["state"]),
        "losses": truth["losses"],
        "parameters": names.parameters(truth["parameters"]),
        "values": {site: values[name] for site, name in at.items() if name in values},
        "gradients": {site: gradients[name] for site, name in at.items() if name in gradients},
        "edited": {edit: (losses, names.parameters(found)) for edit, (losses, found) in edited.items()},
    }


class _Names:
    """Which module has which norm of a local model's layer inside, by hand."""

    def __init__(self, case: Case) -> None:
        self.grouped = case.grouped
        self.linears = {} if case.experts else {"pre_mlp_layernorm": "mlp.linear_fc1"}
        self.inputs = {} if case.experts else {"mlp": "pre_mlp_layernorm"}
        if not case.mla:
            first = "in_proj" if "G" in case.pattern else "linear_qkv"  # no case has both
            self.linears["input_layernorm"] = f"self_attention.{first}"
            self.inputs["self_attention"] = "input_layernorm"
        elif case.qk_norm:
            each = ("q", "kv") if case.q_rank else ("kv",)
            up = {f"self_attention.{n}_layernorm": f"self_attention.linear_{n}_up_proj" for n in each}
            self.linears.update(up)
        if "M" in case.pattern:
            self.linears["norm"] = "mixer.in_proj"
            self.inputs["mixer"] = "norm"
        self.inputs.update({linear: norm for norm, linear in self.linears.items()})

    def local_site(self, site: str) -> str:
        for module, norm in self.inputs.items():
            if site.endswith(f".{module}:input"):
                return f"{site.removesuffix(f'{module}:input')}{norm}:input"
        return site

    def parameters(self, local: dict[str, Any]) -> dict[str, Any]:
        return {self._parameter(name): value for name, value in local.items()}

    def _parameter(self, name: str) -> str:
        if self.grouped:  # local_experts.3.linear_fc1.weight
            name = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.\w+)$", r"\2\1", name)
        for norm, linear in self.linears.items():
            front, inside, kind = name.partition(f".{norm}.")
            if inside and front.rpartition(".")[2].isdigit():  # a layer's, and not the mixer's own norm
                return f"{front}.{linear}.layer_norm_{kind}"
        return name
