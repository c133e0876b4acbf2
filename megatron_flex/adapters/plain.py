"""Any nn.Module that no framework's adapter knows: the person says the mesh, and where needed the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from megatron_flex.adapters.base import Listener, LocalGradient, ParameterSite, Undo, replaying
from megatron_flex.adapters.leaves import AnyInput, AnyOutput
from megatron_flex.adapters.taps import intercept
from megatron_flex.collectives import everyone
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, declared
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import Site

AXES = ("pp", "dp", "tp")  # from the outermost to the innermost
ROOT = "root"  # what the outermost module is called, which torch gives an empty name
PARALLEL = ("megatron.", "fairscale.", "transformer_engine.")  # whose modules hold shards

Said = Mapping[str, int | None]  # axis name to the size that a person gave
Ranks = tuple[int, ...]
Groups = dict[tuple[Ranks, Ranks], list[Any]]  # by all ranks and the sizes of the axes

_made: WeakKeyDictionary[Any, Groups] = WeakKeyDictionary()  # by the process group of the whole job


def take(chunks: list[nn.Module], said: Said, process_group: Any = None) -> Plain:
    """The adapter of a plain module.

    Collective over the group's ranks, the first time that they are divided so.

    Raises:
        FlexError: there are several chunks, the sizes do not fit the number of ranks, or the module has
            a framework's parallel layers in it and nobody says the tensor parallel size.
    """
    names = ", ".join(dict.fromkeys(type(c).__name__ for c in chunks)) or "no module"
    if len(chunks) != 1:
        raise FlexError(
            f"{names}: {len(chunks)} virtual chunks that no known framework built as one model; give one "
            "module"
        )
    root = unwrap(chunks[0])
    shards = next((m for m in root.modules() if _is_parallel(m)), None)
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1
    if shards is not None and not alone and said.get("tp") is None:
        raise FlexError(
            f"{names} holds a {type(shards).__name__} and is no model that is known as a whole, as "
            "megatron-core's GPTModel, HybridModel, MambaModel and BertModel are; say tensor_parallel_size "
            "to have it as a plain module, and expected_shape where tensors are cut"
        )
    prefix = next(f"{n}." if n else "" for n, m in chunks[0].named_modules() if m is root)
    return Plain(root, mesh_of(said, process_group), prefix)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch's data parallel wrappers."""
    while isinstance(module, (DistributedDataParallel, DataParallel)):
        module = module.module
    return module


def mesh_of(said: Said, process_group: Any = None) -> Mesh:
    """The ranks of a group as pipeline, data and tensor parallel ones, the last next to each other.

    Args:
        said: the sizes; `tp` and `pp` are 1 where none is given, and `dp` is what is left.
        process_group: all ranks that take part, in the order of their numbers; the default group if None, or
            one process without any.

    Raises:
        FlexError: the sizes do not make up the number of ranks, or this rank is not in the group.
    """
    joined = dist.is_available() and dist.is_initialized()
    ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))) if joined else (0,)
    rank = dist.get_rank() if joined else 0
    if rank not in ranks:
        raise FlexError(
            f"rank {rank} is none of process_group's {list(ranks)}; make the FlexModel on those ranks only"
        )
    tp, pp = said.get("tp") or 1, said.get("pp") or 1
    dp = said.get("dp") or max(1, len(ranks) // (tp * pp))
    if tp * pp * dp != len(ranks):
        raise FlexError(
            f"tensor_parallel_size={tp} x pipeline_parallel_size={pp} x data_parallel_size={dp} make "
            f"{tp * pp * dp} ranks, but there are {len(ranks)}; let the product be that"
        )
    sizes = (pp, dp, tp)
    groups = _groups(ranks, sizes, process_group) if joined else [None] * len(AXES)
    axes = []
    for name, group, lines in zip(AXES, groups, _lines(ranks, sizes), strict=True):
        line = next(n for n in lines if rank in n)
        axes.append(Axis(name, len(line), line.index(rank), group, line))
    return Mesh(tuple(axes), ranks=ranks)


def _lines(ranks: Ranks, sizes: Ranks) -> list[list[Ranks]]:
    """For each axis the ranks along it, from every place on the other axes."""
    out = []
    for axis, size in enumerate(sizes):
        step = prod(sizes[axis + 1 :])
        firsts = [n for n in range(len(ranks)) if n // step % size == 0]
        out.append([tuple(ranks[first + i * step] for i in range(size)) for first in firsts])
    return out


def _groups(ranks: Ranks, sizes: Ranks, given: Any) -> list[Any]:
    """This rank's process group on each axis of more than one rank; made once for the same division."""
    known = _made.setdefault(dist.group.WORLD, {})
    if (ranks, sizes) not in known:
        part = len(ranks) < dist.get_world_size()
        if part and max(sizes) == len(ranks):
            return [given if size > 1 else None for size in sizes]
        if part:
            _check_names(given)
        known[ranks, sizes] = [_group(lines, part) for lines in _lines(ranks, sizes)]
    return known[ranks, sizes]


def _group(lines: list[Ranks], part: bool) -> Any:
    """The group of this rank's line. All ranks make all lines, unless they are only a part of the job."""
    mine = None
    for line in lines:
        if len(line) > 1 and (not part or dist.get_rank() in line):
            group = dist.new_group(list(line), use_local_synchronization=part)
            mine = group if dist.get_rank() in line else mine
    return mine


def _check_names(group: Any) -> None:
    """Refuse where torch would name the same new group differently on its ranks, and wait for ever.

    Collective over `group`.
    """
    counts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(counts)) > 1:
        raise FlexError(
            f"the ranks of process_group are in differently many process groups ({counts}), so that torch "
            "cannot make groups among them; make the FlexModel before those, or give no process_group"
        )


def _can_be_called(module: nn.Module) -> bool:
    """Whether it has a `forward`; a ModuleList has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_parallel(module: nn.Module) -> bool:
    return any(c.__module__.startswith(PARALLEL) for c in type(module).__mro__)


class Plain:
    """One module, which each tensor parallel rank has in the same shape or as a shard."""

    name = "plain"

    def __init__(self, root: nn.Module, mesh: Mesh, prefix: str = "") -> None:
        self.root, self.mesh, self.prefix = root, mesh, prefix
        self._own = ROOT if mesh["pp"].size == 1 else f"stage{mesh['pp'].coord}"
        self.logits = f"{self._own}:output"
        self._modules = list(self._named_modules())
        parameters = list(root.named_parameters())
        self._lazy = {n: type(p).__name__ for n, p in parameters if is_lazy(p)}
        self._parameters = [(n, p) for n, p in parameters if not is_lazy(p)]
        self._listener: Listener | None = None

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules that can be called, by name."""
        named = dict(self.root.named_modules())
        if self._own in named:
            named.pop("")  # a part has that name
        return [(n or self._own, m) for n, m in named.items() if _can_be_called(m)]

    def module_names(self) -> list[str]:
        """All modules, also those that only hold others; the outermost has an empty name."""
        return [name for name, _ in self.root.named_modules()]

    def check(self) -> None:
        """Refuse what runs past its modules, and two stages with the same names. Collective over `pp`."""
        for name, module in self.root.named_modules():
            kind = type(module).__name__
            if kind in ("OptimizedModule", "RecursiveScriptModule"):
                raise FlexError(
                    f"{name or ROOT} is a {kind}, compiled code that runs past hooks; give the "
                    "module as it was before torch.compile or torch.jit.script"
                )
        mine = [*(n for n, _ in self._modules), *(n for n, _ in self._parameters)]
        seen: dict[str, int] = {}
        for stage, names in enumerate(everyone(mine, self.mesh, ["pp"])):
            for name in names:
                if seen.setdefault(name, stage) != stage:
                    raise FlexError(
                        f"pipeline stages {seen[name]} and {stage} both have a {name!r}; a name must "
                        "stand for one place: give the modules of each stage names of their own"
                    )

    def sites(self) -> list[Site]:
        """Input and output of every module that can be called, parents first."""
        stage, none = self.mesh["pp"].coord, Layout(())
        out = []
        for name, module in self._modules:
            for point, tap in (("input", AnyInput(module)), ("output", AnyOutput(module))):
                out.append(Site(f"{name}:{point}", none, (), stage, tap=tap, inferred=True))
        return out

    def parameters(self) -> list[ParameterSite]:
        """All parameters that have a shape already."""
        stage = self.mesh["pp"].coord
        return [
            ParameterSite(n, declared(p.shape, None, 1), tuple(p.shape), p, stage, inferred=True)
            for n, p in self._parameters
        ]

    def without_layout(self) -> dict[str, str]:
        """Those without one: of lazy modules that have not run."""
        return self._lazy

    def settle(self) -> None:
        """Nothing is on its way."""

    def gradients_reduced(self) -> bool:
        """Never known to be: each data parallel replica is asked for its own, which may be reduced."""
        return False

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """A parameter's gradient."""
        return LocalGradient(parameter.grad)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off for all parameters, until the returned function is called."""
        trained = [p for p in self.root.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def undo() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)

        return undo

    def open_recomputed(self) -> Undo:
        """Nothing: how a module recomputes is its own."""
        return lambda: None

    def architecture(self) -> None:
        """Not known."""

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Call the module with tokens, whatever they are to it; microbatches along their first dim."""
        if self.mesh["pp"].size > 1:
            raise FlexError(
                "a module on several pipeline stages cannot be run from here, since only your loop knows "
                "what they hand on; run that in `with flex.trace(), flex.step():`"
            )
        assert self._listener is not None
        self._listener.step_begins(None)
        failed = True
        try:
            with torch.no_grad():
                for part in tokens.split(microbatch_size or max(len(tokens), 1)):
                    self.root(part)
            failed = False
        finally:
            if failed:
                self._listener.step_ends(True)
        self._listener.step_ends(False)

    def watch(self, listener: Listener) -> Undo:
        """Tell each call of the module, but not its recomputation."""
        self._listener = listener
        running: list[bool] = []

        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            if running or replaying():
                return call(*args, **kwargs)
            listener.call_begins()
            running.append(True)
            try:
                output = call(*args, **kwargs)
            except BaseException:
                running.clear()
                listener.call_ends(True)
                raise
            running.clear()
            listener.call_ends(False)
            return output

        # About all hooks, also those that are put on later: what they see belongs to the call.
        return intercept(self.root, "_call_impl", around)
