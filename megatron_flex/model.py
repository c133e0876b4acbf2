"""The face: `FlexModel` wraps a model, `attach` does the same without a wrapper, for a training script."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from megatron_flex.adapters import detect
from megatron_flex.errors import HookError
from megatron_flex.runtime import Captures, HookFunction, Session, parameters
from megatron_flex.runtime.groups import checked_tags, selection
from megatron_flex.runtime.hooks import HookType
from megatron_flex.runtime.survey import Want
from megatron_flex.sites import Pattern, Site

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
        verify: check the first step, as `verify()` does.

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
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._given = module
        self.chunks = nn.ModuleList([module] if isinstance(module, nn.Module) else list(module))
        adapter = detect(list(self.chunks))
        adapter.mesh.check_sizes(
            {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
        )
        self.session = Session(adapter)
        if verify:
            self.verify()

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

    def sites(self, pattern: Pattern = "**") -> list[Site]:
        """The places of the whole model, all pipeline stages, where hooks can stand.

        Args:
            pattern: a name or glob of modules, or with `:` of points in them; `*` stays within one step of
                the path, `**` does not.
        """
        return self.session.sites.match(pattern)

    def get_module_parameter(
        self,
        name: str,
        expected_shape: Sequence[int | None] | None = None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Tensor | None:
        """A parameter, or its gradient, as one device would hold it. Every rank calls it.

        A gradient is read after the step and before the optimizer's, which may scale and clip it in place.
        It has the scale that the framework gave it: microbatches averaged, multiplied by the loss scale.
        Reduced, it is averaged over data parallel ranks, as the framework does it; not reduced, it is the one
        of each data parallel replica alone, and Megatron's DDP has not divided it yet.

        Args:
            name: its global name, `decoder.layers.3.mlp.linear_fc1.weight`.
            expected_shape: the whole's shape, None for a dim that may have any length. Checked, never needed.
            gradient: the gradient instead: `main_grad` where Megatron keeps that, `grad` otherwise.
            reduced: whether gradients are reduced, that is, whether `finalize_model_grads()` ran. Known
                without being said if the schedule calls it (`config.finalize_model_grads_func`), or if no
                DDP is around the model (then they are not).
            padded: with the rows that pad a vocabulary to a multiple.
            everywhere: on every rank instead of on the leader.

        Returns:
            A copy on the CPU, on the leader of each model replica or on every rank; None elsewhere.

        Raises:
            SiteError: no such parameter, or its module's layout is not known; on all ranks, as what follows.
            FlexError: another shape, no gradient, or one that is not what `reduced` says.
        """
        want = Want(gradient, reduced, padded, everywhere)
        return parameters.get(self.session.survey, name, want, expected_shape)

    def set_module_parameter(
        self,
        name: str,
        value: Tensor | None,
        *,
        gradient: bool = False,
        reduced: bool | None = None,
        padded: bool = False,
        optimizer: Any = None,
    ) -> None:
        """Set a parameter, or its gradient, from the tensor that one device would hold. Every rank calls it.

        All shards are set in place, those of every data parallel replica and of a tied output layer too.
        Megatron's mixed-precision and distributed optimizers keep copies of their own, which their next step
        would write back: give the optimizer, or call its `reload_model_params()` after the last one set.

        Args:
            name: its global name.
            value: the whole; the same on every rank, or on the leader alone and None elsewhere.
            gradient: its gradient instead.
            reduced: as for `get_module_parameter`.
            padded: `value` has the rows that pad a vocabulary; without them they stay as they are.
            optimizer: whose `reload_model_params()` is called.

        Raises:
            SiteError: no such parameter, or its module's layout is not known; on all ranks, as what follows.
            FlexError: another shape or dtype, differing values, or no value on the leader.
        """
        want = Want(gradient, reduced, padded)
        parameters.set_whole(self.session.survey, name, value, want, optimizer)

    def named_whole_parameters(
        self,
        gradients: bool = False,
        *,
        reduced: bool | None = None,
        padded: bool = False,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters, or their gradients, as one device would hold them, by global name in model order.

        Every rank runs it to its end; on ranks that get nothing it is empty. One whole is there at a time.
        Parameters without a known layout are left out with a warning, those without a gradient without.

        Args:
            gradients: their gradients instead; `reduced`, `padded`, `everywhere` as for one of them.
            reduced: likewise.
            padded: likewise.
            everywhere: likewise.
        """
        return parameters.every(self.session.survey, Want(gradients, reduced, padded, everywhere))

    def parameters_without_layout(self) -> dict[str, str]:
        """The parameters that cannot be put together, on all stages, and the classes of their modules."""
        return dict(self.session.survey.unknown)

    def verify(self, steps: int = 1) -> None:
        """Check this run against its layouts in the next steps. Every rank calls it.

        Each rank notes what passes through every site that is not hidden; when the step is over they compare:
        replicated tensors and duplicated heads have the same bits on all ranks that hold them, shards make
        the shapes that their sites promise, each site is passed on all ranks alike and by no tensor twice;
        parameters that layouts call replicated are equal, over data parallel ranks too. It costs a checksum
        of every such tensor. Values and parameters are checked; the gradients of sites are not.

        Args:
            steps: how many runs of the schedule, or calls of the model, from the next one on.

        Raises:
            VerifyError: at the end of such a step, on all ranks, with the findings of all ranks.
        """
        self.session.verify(steps)

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
        return self.session.firing.save_ctx

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

    @property
    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each tag; a tag that no hook carries is not there. `all` is every hook."""
        return self.session.registry.groups()

    def tag(self, hook: HookFunction, *tags: str) -> None:
        """Put a registered hook into further groups, on every rank alike."""
        hook.tags |= checked_tags(tags)
        self.session.registry.retagged()

    def untag(self, hook: HookFunction, *tags: str) -> None:
        """Take a hook out of groups, on every rank alike.

        Raises:
            HookError: it is not in one of them.
        """
        missing = checked_tags(tags) - hook.tags
        if missing:
            names = ", ".join(sorted(missing))
            raise HookError(f"hook ({hook.describe()}) is not in {names}; it is in {sorted(hook.tags)}")
        hook.tags -= set(tags)
        self.session.registry.retagged()

    @contextmanager
    def hooks(self, *groups: str, complement: bool = False) -> Iterator[None]:
        """Choose which hooks are active in a scope, on every rank alike.

        It counts for the steps, and calls of the model, that begin inside, with their backward passes. Where
        no hook is active the model runs as if none were there. Scopes may be nested; the inner one counts.

        Args:
            groups: names of groups, whose union it is; with a `-` in front, without those. `all` is every
                hook, and what is meant where only groups to leave out are named.
            complement: the other hooks instead.

        Raises:
            HookError: no hook is in such a group.
        """
        registry = self.session.registry
        before = registry.selection
        registry.selection = selection(groups, self.groups, complement)
        try:
            yield
        finally:
            registry.selection = before

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
            HookError: a hook fired on no rank in any step that it stood in, or no step ran that `verify()`
                was to check; the model is restored even so.
        """
        silent, unverified = self.session.silent(), self.session.unverified
        self.session.close()
        if silent:
            names = ", ".join(h.describe() for h in silent)
            raise HookError(
                f"never fired on any rank: {names}; the path did not run (no labels, no backward pass, a "
                "frozen part, a fused kernel): hook another place, or remove the hook before the end"
            )
        if unverified:
            raise HookError("verify() was asked for and no step ran after it; call it before a step")
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


def attach(model: Model, hooks: Sequence[HookFunction] = (), *, verify: bool = False) -> FlexModel:
    """Put hooks on a model without wrapping it.

    Every rank calls it alike. Use it as a context manager, or call `restore()` at the end.

    Args:
        model: the model or its chunks.
        hooks: each with its `hook_type`.
        verify: check the first step, as `FlexModel.verify` does.
    """
    flex = FlexModel(model, verify=verify)
    try:
        for hook in hooks:
            flex.session.add(hook)
    except Exception:
        flex.session.close()
        raise
    return flex
