"""The face: `FlexModel` wraps a model, `attach` does the same without a wrapper, for a training script."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from megatron_flex.adapters import detect
from megatron_flex.errors import HookError
from megatron_flex.runtime import Captures, HookFunction, Session
from megatron_flex.runtime.hooks import HookType
from megatron_flex.sites import Site

Model = nn.Module | Sequence[nn.Module]


class FlexModel(nn.Module):
    """A distributed model whose tensors are read and edited as one device would hold them.

    Every rank makes one, on the same model, and registers the same hooks in the same order. The `register_*`
    methods have the names of torch's and take a HookFunction instead.

    Args:
        module: the model or the list of its virtual pipeline chunks, bare or wrapped by the framework.
            Framework, groups and layouts are found.
        tensor_parallel_size: if given, compared with what was found; likewise the two others.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.

    Raises:
        FlexError: no known framework built the model, sizes contradict, or hooks cannot work at all here.
    """

    def __init__(
        self,
        module: Model,
        *,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
    ) -> None:
        super().__init__()
        self._given = module
        self.chunks = nn.ModuleList([module] if isinstance(module, nn.Module) else list(module))
        adapter = detect(list(self.chunks))
        adapter.mesh.check_sizes(
            {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
        )
        self.session = Session(adapter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, as it is called without hooks.

        Raises:
            HookError: there are several chunks, which only the framework's schedule can run.
        """
        if len(self.chunks) != 1:
            raise HookError(
                f"{len(self.chunks)} virtual chunks cannot be called; run the framework's schedule over them"
            )
        return self.chunks[0](*args, **kwargs)

    def sites(self, pattern: str = "**") -> list[Site]:
        """The places of the whole model, all pipeline stages, where hooks can stand.

        Args:
            pattern: a name or glob of modules, or with `:` of points in them; `*` stays within one step of
                the path, `**` does not.
        """
        return self.session.sites.match(pattern)

    def named_whole_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters as one device would hold them: on the leader, by global name; elsewhere empty.

        Every rank calls it. Parameters of modules without a known layout are left out. They are what the
        model holds: between an optimizer's step and the next forward pass Megatron's `overlap_param_gather`
        leaves old ones there, until `start_param_sync(force_sync=True)` of its DistributedDataParallel.
        """
        return self.session.whole_parameters()

    @property
    def is_leader(self) -> bool:
        """Whether what is read arrives on this rank: the first one of each model replica."""
        return self.session.is_leader

    @property
    def output_dict(self) -> Captures:
        """On the leader (the first rank of each model replica) what was read, by site; elsewhere empty.

        Filled at the end of each run of the schedule, or call of the model, or backward pass behind it.
        """
        return self.session.captures

    @property
    def save_ctx(self) -> Namespace:
        """What editing functions of this rank share."""
        return self.session.save_ctx

    def register_forward_hook(self, hook: HookFunction) -> None:  # type: ignore[override]
        """See, and perhaps edit, what a module returns."""
        self._register(hook, "forward")

    def register_forward_pre_hook(self, hook: HookFunction) -> None:  # type: ignore[override]
        """See, and perhaps edit, what a module gets."""
        self._register(hook, "forward_pre")

    def register_full_backward_hook(self, hook: HookFunction) -> None:  # type: ignore[override]
        """See, and perhaps edit, the gradient of what a module gets."""
        self._register(hook, "full_backward")

    def register_full_backward_pre_hook(self, hook: HookFunction) -> None:  # type: ignore[override]
        """See, and perhaps edit, the gradient of what a module returns."""
        self._register(hook, "full_backward_pre")

    def register_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, the gradient of a parameter or site."""
        self._register(hook, "tensor")

    def remove_hook(self, hook: HookFunction) -> None:
        """Take one hook out."""
        self.session.remove(hook)

    def _register(self, hook: HookFunction, kind: HookType) -> None:
        hook.hook_type = kind
        self.session.add(hook)

    def restore(self) -> Model:
        """Take everything out again. Every rank calls it.

        Returns:
            The model as it was given, with each function, class and attribute as it was.

        Raises:
            HookError: a hook fired on no rank in any step that it stood in; the model is restored even so.
        """
        silent = self.session.silent()
        self.session.close()
        if silent:
            names = ", ".join(h.describe() for h in silent)
            raise HookError(
                f"never fired on any rank: {names}; the path did not run (no labels, no backward pass, a "
                "frozen part, a fused kernel): hook another place, or remove the hook before the end"
            )
        return self._given

    def __enter__(self) -> FlexModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.restore()
        else:
            self.session.close()  # what went wrong first is what matters


def attach(model: Model, hooks: Sequence[HookFunction] = ()) -> FlexModel:
    """Put hooks on a model without wrapping it.

    Every rank calls it alike. Use it as a context manager, or call `restore()` at the end.

    Args:
        model: the model or its chunks.
        hooks: each with its `hook_type`.
    """
    flex = FlexModel(model)
    try:
        for hook in hooks:
            flex.session.add(hook)
    except Exception:
        flex.session.close()
        raise
    return flex
