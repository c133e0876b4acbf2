"""Linears of Megatron's with an adapter around them, such as LoRA's.

The wrapper is where the linear was: the linear's hook points are the wrapper's input and output. It holds the
linear, in Megatron-Bridge as `to_wrap` and in mcore-bridge as `base_layer`, and the linears of the adapter,
each of which is sharded as its own class says, whatever the linear that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_flex.adapters.megatron_core.module_classes import (
    COLUMN_LINEARS,
    LINEAR_WITH_NORM,
    PLAIN_BASES,
    ROW_LINEARS,
    is_megatron,
)
from megatron_flex.adapters.taps import module_input, module_output
from megatron_flex.layout import Dim, Layout
from megatron_flex.sites import Site, Tap

if TYPE_CHECKING:
    from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
    from megatron_flex.adapters.megatron_core.site_builder import SiteBuilder

BASE_NAMES = ("to_wrap", "base_layer")
LINEARS = (*COLUMN_LINEARS, *ROW_LINEARS, "TELinear", "TEGroupedLinear")
BRIDGE_ADAPTER = "ParallelLinearAdapter"
AROUND = "{kind} is around the linear that has it; hook {path}.{name}:{point}"
UNSHARDED_ADAPTER = (
    "how {kind} is sharded over tensor parallel ranks is not known; build adapters of Megatron's "
    "ColumnParallelLinear and RowParallelLinear, or run with tensor_model_parallel_size=1"
)
INPUT_GATHERED_AGAIN = (
    "sequence_parallel_input_regather=True gathers it in training alone; set it to False to have this tensor"
)


@lru_cache(4096)
def _may_wrap(cls: Any) -> bool:
    """Whether a class may be a wrapper's: neither torch's own nor a part of Megatron's."""
    return not cls.__module__.startswith("torch.") and not any(
        c.__module__.startswith("megatron.core") and c.__name__ not in PLAIN_BASES for c in cls.__mro__
    )


def base_linear(module: Any) -> tuple[str, nn.Module] | None:
    """The linear around which a module has an adapter, and its name there; None if it has none.

    It is the one that the known wrappers hold, or else the only linear of Megatron's among the children.
    """
    cls: Any = type(module)
    if not isinstance(module, nn.Module) or not _may_wrap(cls):
        return None
    linears = [(n, m) for n, m in module.named_children() if is_megatron(m, *LINEARS)]
    named = [pair for pair in linears if pair[0] in BASE_NAMES]
    return named[0] if named else linears[0] if len(linears) == 1 else None


def unadapted(module: Any) -> Any:
    """The linear in a wrapper; the module itself if it is none."""
    base = base_linear(module)
    return module if base is None else base[1]


def adapter_around(path: str, module: Any, point: str) -> str:
    """Why a wrapper has no tensor between its linear's GEMM and collective; empty for a linear itself."""
    base = base_linear(module)
    if base is None:
        return ""
    return AROUND.format(kind=type(module).__name__, path=path, name=base[0], point=point)


def features_of(linear: Any, tp: int) -> tuple[int, int]:
    """The input and output features of the full weight; a linear of Transformer Engine's has its shard's."""
    if hasattr(linear, "input_size"):
        return linear.input_size, linear.output_size
    row, column = is_megatron(linear, *ROW_LINEARS), is_megatron(linear, *COLUMN_LINEARS)
    return linear.in_features * (tp if row else 1), linear.out_features * (tp if column else 1)


def packed_alike(wrapper: nn.Module, tp: int) -> Iterator[tuple[str, nn.Module]]:
    """The linears in a wrapper with the output of its own linear, that one first, by their names there.

    Their outputs are added, and therefore packed and sharded alike.
    """
    base = base_linear(wrapper)
    if base is None:
        return
    yield base
    if not is_megatron(base[1], *COLUMN_LINEARS):
        return
    width = features_of(base[1], tp)[1]
    for name, module in _adapter_modules(wrapper, base):
        gathered = getattr(module, "gather_output", False)
        if is_megatron(module, *COLUMN_LINEARS) and not gathered and features_of(module, tp)[1] == width:
            yield name, module


def _adapter_modules(wrapper: nn.Module, base: tuple[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    inside = {id(module) for module in base[1].modules()}
    for name, module in wrapper.named_modules():
        if name and id(module) not in inside:
            yield name, module


# -- sites ---------------------------------------------------------------------------------------------


def adapted_sites(
    b: SiteBuilder,
    path: str,
    wrapper: Any,
    base_sites: Callable[[str, Any], Iterator[Site]],
    ends: tuple[Layout, Layout],
    widths: tuple[int | None, int | None],
    hidden: str,
) -> Iterator[Site]:
    """The sites inside a wrapper; none if the module is a linear itself.

    Args:
        b: the builder.
        path: the wrapper's global path.
        wrapper: the wrapper, or a linear.
        base_sites: the sites of the linear in it, for its path.
        ends: the layouts of the wrapper's input and output.
        widths: the features of these in the full tensor, if they are not the hidden size.
        hidden: why all of it is hidden.
    """
    base = base_linear(wrapper)
    if base is None:
        return
    yield from base_sites(f"{path}.{base[0]}", base[1])
    alike = {id(module) for _, module in packed_alike(wrapper, b.of.tp)}
    for name, module in _adapter_modules(wrapper, base):
        at = f"{path}.{name}"
        if any(c.__name__ == BRIDGE_ADAPTER for c in type(module).__mro__) and "." not in name:
            entering = _normed_layout(b, base[1]) if is_megatron(base[1], LINEAR_WITH_NORM) else ends[0]
            yield b.site(f"{at}:input", entering, Tap(module_input, module, (0, "x")), hidden, widths[0])
            yield b.site(f"{at}:output", ends[1], Tap(module_output, module), hidden, widths[1])
        elif is_megatron(module, *LINEARS) or isinstance(module, nn.Linear):
            holder = wrapper.get_submodule(name.rpartition(".")[0])
            again = b.of.sequence_parallel and getattr(holder, "sequence_parallel_input_regather", False)
            for site in _linear_sites(b, at, module, ends[1] if id(module) in alike else None, hidden):
                gathered = again and site.point in ("input", "gemm_input")
                yield replace(site, hidden=INPUT_GATHERED_AGAIN) if gathered else site


def _linear_sites(b: SiteBuilder, path: str, linear: Any, out: Layout | None, hidden: str) -> Iterator[Site]:
    """The sites of one linear of an adapter; `out` is its output's layout, if it is the wrapper's."""
    entering, leaving = features_of(linear, b.of.tp)
    if is_megatron(linear, *COLUMN_LINEARS):
        gathered = bool(getattr(linear, "gather_output", False))
        layout = out or (_tokens(b, "r", False) if gathered else b.of.features("out"))
        # Of adapters alone: a linear of the model that leaves the reduction to nobody is a fault.
        reduced_before = bool(getattr(linear, "disable_grad_reduce", False))
        yield from b.column(
            path, linear, layout, leaving, hidden=hidden, input_width=entering, reduced_before=reduced_before
        )
    elif is_megatron(linear, *ROW_LINEARS):
        yield from b.row(path, linear, "in", entering, hidden, leaving)
    elif not is_megatron(linear, "TEGroupedLinear"):
        duplicated = is_megatron(linear, "TELinear")
        if not duplicated and b.of.tp > 1:
            hidden = hidden or UNSHARDED_ADAPTER.format(kind=type(linear).__name__)
        keyword = "x" if duplicated else "input"
        layout = _tokens(b, "r", b.of.sequence_parallel)
        yield b.site(f"{path}:input", layout, Tap(module_input, linear, (0, keyword)), hidden, entering)
        yield b.site(f"{path}:output", layout, Tap(module_output, linear), hidden, leaving)


def _tokens(b: SiteBuilder, features: str, cut: bool) -> Layout:
    """`[s, b, features]`, its features not sharded."""
    return Layout((b.of.sequence(cut), Dim("b"), Dim(features)))


def _normed_layout(b: SiteBuilder, linear: Any) -> Layout:
    """The layout of the norm's output that a linear with a norm returns beside its own, for an adapter."""
    gathered = getattr(linear, "return_layernorm_output_gathered", False) and b.of.sequence_parallel
    return b.of.gathered() if gathered else b.of.stream()


def normed_beside(b: SiteBuilder, linear: Any) -> tuple[Layout, ...]:
    """The layout of what a linear inside a wrapper returns between its output and its bias, if anything."""
    return (_normed_layout(b, linear),) if is_megatron(linear, LINEAR_WITH_NORM) else ()


# -- parameters ----------------------------------------------------------------------------------------


def linear_roles(modules: Mapping[str, nn.Module], tp: int) -> dict[str, str]:
    """The roles of linears inside wrappers, by their paths: the wrapper's, if their rows are packed alike."""
    return {
        f"{path}.{name}": path.rpartition(".")[2]
        for path, wrapper in modules.items()
        for name, _ in packed_alike(wrapper, tp)
    }


def whole_adapter_layouts(
    of: ModelLayouts, modules: Mapping[str, nn.Module]
) -> Iterator[tuple[nn.Parameter, Layout]]:
    """The layouts of parameters of adapters' modules that are not Megatron's, if there is one rank of `tp`.

    On more ranks their sharding is unknown.
    """
    if of.tp > 1:
        return
    for path, wrapper in modules.items():
        base = base_linear(wrapper)
        if base is not None and ".experts." not in path:
            for _, module in _adapter_modules(wrapper, base):
                if not is_megatron(module, *LINEARS):
                    for parameter in module.parameters(recurse=False):
                        yield parameter, of.replicated(parameter.ndim, shared=False)
