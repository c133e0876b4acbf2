"""Adapters around Megatron's linears, in the two forms in which people meet them, written for tests.

`bridge` is the form of Megatron-Bridge: the wrapper holds the linear as `to_wrap`, and `adapter` has
Megatron's own parallel linears, with the collectives of sequence parallelism around them. `mcore` is the
form of mcore-bridge and ms-swift: the wrapper holds `base_layer`, and dicts of linears by the adapter's
name, one of which is Transformer Engine's duplicated linear.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

RANK, SCALE = 4, 0.5
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
FORMS = ("bridge", "mcore")


class ParallelLinearAdapter(nn.Module):
    """Two parallel linears that have the full sequence; a row-parallel base has a row-parallel first one."""

    def __init__(self, base: Any, config: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        self.input_is_parallel = isinstance(base, RowParallelLinear)
        self.cut, config.sequence_parallel = config.sequence_parallel, False
        common: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
        if self.input_is_parallel:
            self.linear_in = RowParallelLinear(
                base.input_size, RANK, input_is_parallel=True, skip_bias_add=True, **common
            )
        else:
            self.linear_in = ColumnParallelLinear(
                base.input_size, RANK, gather_output=True, disable_grad_reduce=self.cut, **common
            )
        self.linear_out = ColumnParallelLinear(
            RANK, base.output_size, gather_output=self.input_is_parallel, **common
        )
        self.activation = nn.Identity()
        config.sequence_parallel = self.cut

    def forward(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.cut and not self.input_is_parallel:
            x = mappings.gather_from_sequence_parallel_region(x)
        x, _ = self.linear_in(x)
        x, _ = self.linear_out(self.activation(x) * SCALE)
        if self.cut and self.input_is_parallel:
            x = mappings.scatter_to_sequence_parallel_region(x)
        return x


class LoRALinear(nn.Module):
    """Megatron-Bridge's wrapper."""

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.to_wrap(x, *args, **kwargs)
        return out + self.adapter(x.contiguous()).reshape(out.shape), bias


class LoraParallelLinear(nn.Module):
    """The wrapper of mcore-bridge, around a linear of Transformer Engine's."""

    def __init__(self, base: Any, config: Any) -> None:
        super().__init__()
        from megatron.core.extensions import transformer_engine as te

        self.base_layer, self.normed = base, isinstance(base, te.TELayerNormColumnParallelLinear)
        if self.normed:
            base.return_layernorm_output = True
        row, tp = isinstance(base, te.TERowParallelLinear), config.tensor_model_parallel_size
        common: dict[str, Any] = {
            "config": config,
            "init_method": nn.init.xavier_normal_,
            "bias": False,
            "skip_bias_add": False,
        }

        def whole(features: int, out: int) -> Any:
            return te.TELinear(
                features, out, parallel_mode="duplicated", skip_weight_param_allocation=False, **common
            )

        of_tp: dict[str, Any] = {**common, "is_expert": False}
        if row:
            a = te.TERowParallelLinear(base.in_features * tp, RANK, input_is_parallel=True, **of_tp)
            b = whole(RANK, base.out_features)
        else:
            a = whole(base.in_features, RANK)
            b = te.TEColumnParallelLinear(RANK, base.out_features * tp, gather_output=False, **of_tp)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.base_layer(x, *args, **kwargs)
        if self.normed:
            out, x = out
        low, _ = self.lora_A["default"](x)
        added, _ = self.lora_B["default"](low)
        return out + added * SCALE, bias


def adapt(model: nn.Module, form: str, config: Any) -> None:
    """Put adapters around the linears of every layer.

    Args:
        model: a chunk of a GPT.
        form: one of `FORMS`.
        config: the model's.
    """
    for path, linear in [m for m in model.named_modules() if m[0].rpartition(".")[2] in LINEARS]:
        parent, _, name = path.rpartition(".")
        if form == "bridge":
            wrapper: nn.Module = LoRALinear(linear, ParallelLinearAdapter(linear, config))
        else:
            wrapper = LoraParallelLinear(linear, config)
        setattr(model.get_submodule(parent), name, wrapper)


def freeze_all_else(model: nn.Module) -> None:
    """Train the adapters alone."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name or "lora_" in name)


def sites_of(sites: list[str], form: str) -> list[str]:
    """The sites of a model with adapters, from those of the model without, by hand."""
    out = []
    for site in sites:
        path, _, point = site.partition(":")
        role = path.rpartition(".")[2]
        if role not in LINEARS:
            out.append(site)
            continue
        base = f"{path}.{'to_wrap' if form == 'bridge' else 'base_layer'}"
        if point in ("gemm_input", "partial"):
            out.append(f"{base}:{point}")
            continue
        out.append(site)
        if point in ("input", "output"):
            adapter = ("adapter", "adapter.linear_in", "adapter.linear_out")
            parts = adapter if form == "bridge" else ("lora_A.default", "lora_B.default")
            out += [f"{base}:{point}", *(f"{path}.{part}:{point}" for part in parts)]
    inner = ("gemm_input", "partial")
    if form == "bridge":
        at = [
            s.partition(":")[0] for s in out if s.endswith((".adapter.linear_in:input", "linear_out:input"))
        ]
        row = ("linear_proj.adapter.linear_in", "linear_fc2.adapter.linear_in")
        out += [f"{path}:{inner[path.endswith(row)]}" for path in at]
    return out
