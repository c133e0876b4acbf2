"""Runs that stop early: from one layer on the residual stream passes unchanged, and the head does nothing.

The modules around the layers still run, so that pipeline stages send and receive what their schedule expects.
Modules that are passed by run none of their hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Undo, leaf, with_leaf
from megatron_flex.adapters.taps import intercept, join_undos
from megatron_flex.adapters.tensor_trees import tensors
from megatron_flex.errors import FlexError

ENTRANCE = "_call_impl"  # around the hooks of a module


def find_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The residual stream among the arguments of a module."""
    named = kwargs.get("hidden_states")
    stream: Tensor = named if isinstance(named, Tensor) else tensors((args, kwargs))[0]
    return stream


def pass_by(module: nn.Module, result_of: Callable[[Tensor], Any]) -> Undo:
    """Return `result_of(stream)` from calls of a module, which does not run."""
    return intercept(module, ENTRANCE, lambda _, *args, **kwargs: result_of(find_stream(args, kwargs)))


def list_stacks(root: nn.Module) -> list[str]:
    """The paths of lists of layers, the outermost only: of modules that have modules inside."""
    paths: list[str] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{other}.") for other in paths)
        if path and not inside and isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = list(module.children())
            if children and all(child._modules for child in children):
                paths.append(path)
    return paths


def find_stack(root: nn.Module) -> str:
    """The path of the one list of layers.

    Raises:
        FlexError: there is none, or several.
    """
    paths = list_stacks(root)
    if len(paths) != 1:
        raise FlexError(
            f"stop_at_layer needs a model with one list of layers, and {type(root).__name__} has "
            f"{len(paths)}{': ' * bool(paths)}{', '.join(paths[:4])}; run it without stop_at_layer"
        )
    return paths[0]


class ModuleStop:
    """The layers of a module of one stage from one on, and what the module calls after them, passed by.

    Args:
        root: the module, whose call begins a run.
        path: the path of its layers.
        start: the first layer that does not run.
    """

    def __init__(self, root: nn.Module, path: str, start: int) -> None:
        self._stopped = False
        self._output: Any = None  # of the last layer that ran, whose form the others return
        layers = list(root.get_submodule(path).children())
        undos = [intercept(root, ENTRANCE, self._begin)]
        undos += [intercept(layer, ENTRANCE, self._run_last) for layer in layers[start - 1 : start]]
        undos += [pass_by(layer, self._as_layer) for layer in layers[start:]]
        undos += [intercept(module, ENTRANCE, self._run_before) for module in _modules_around(root, path)]
        self.undo = join_undos(undos)

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._stopped = False
        return call(*args, **kwargs)

    def _run_last(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._output = call(*args, **kwargs)
        self._stopped = True
        return self._output

    def _as_layer(self, stream: Tensor) -> Any:
        return with_leaf(self._output, 0, stream) if leaf(self._output, 0) is not None else stream

    def _run_before(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return find_stream(args, kwargs) if self._stopped else call(*args, **kwargs)


def _modules_around(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules beside the layers and beside the modules that hold them."""
    holder = root
    for step in path.split("."):
        yield from (module for name, module in holder.named_children() if name != step)
        holder = holder.get_submodule(step)


def refuse_compiled(modules: Iterable[nn.Module], is_compiled: Callable[[nn.Module], bool]) -> None:
    """Refuse code that was compiled with calls of layers in it.

    Raises:
        FlexError: there is some.
    """
    compiled = next((module for module in modules if is_compiled(module)), None)
    if compiled is not None:
        raise FlexError(
            f"stop_at_layer passes by layers, and a compiled {type(compiled).__name__} calls all of its own; "
            "attach to the model before torch.compile"
        )
