"""FlexModel as it was: a module around a module, with hooks on what is inside."""

from __future__ import annotations

import warnings
import weakref
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.compat.core.context import SaveContextReplay
from megatron_flex.compat.core.delivery import CaptureDelivery
from megatron_flex.compat.core.groups import HookGroups, HookSelection
from megatron_flex.compat.core.hook_function import HookFunction, SharedState
from megatron_flex.compat.core.names import ModuleNames
from megatron_flex.compat.core.registering import HookRegistrationMethods
from megatron_flex.compat.distributed.state import start_torch_distributed, build_parallel_state
from megatron_flex.compat.utils import setup_from_environment
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime.hook_groups import ALL_GROUPS
from megatron_flex.runtime.hooks import EditingFunction, HookType


class FlexModel(HookRegistrationMethods, nn.Module):  # type: ignore[misc]
    """A module whose tensors are read and edited as one device would hold them.

    Every rank makes one and registers the same hooks in the same order. Samples of data parallel ranks are
    put together along the batch dim.

    Args:
        module: the model, bare or wrapped; or the list of its virtual pipeline chunks.
        output_ptr: where what is read is appended, by the hook's `module_name`: detached copies on the CPU,
            in the order of the forward passes, on the first rank. Empty it when it is needed no more.
        tensor_parallel_size: how many ranks share each tensor.
        pipeline_parallel_size: how many pipeline stages there are.
        data_parallel_size: how many replicas there are.
        process_group: the ranks that run the model; None for all.
        every_rank: fill `output_ptr` on every rank.
        divide_gradients_by_dp: show the gradients of modules divided by the data parallel size, and multiply
            what an edit returns, as FlexModel did.

    Attributes:
        module: the wrapped module.
        output_ptr: the dict as given.
        save_ctx: what editing functions keep from one call to another; each rank has its own.
        trainable_modules: what `register_trainable_module` was given.
        fmps: ranks and groups.

    Raises:
        FlexError: the sizes are not the model's.
    """

    _given: nn.Module | Sequence[nn.Module]

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        output_ptr: dict[str, list[Tensor]],
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        process_group: Any = None,
        *,
        every_rank: bool = False,
        divide_gradients_by_dp: bool = False,
    ) -> None:
        super().__init__()
        setup_from_environment()
        start_torch_distributed()
        native = Native(
            module,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            gather_data_parallel=True,
            process_group=process_group,
        )
        # No submodules: state_dict has the wrapped module's keys once.
        vars(self).update(_flex=native, _given=module)
        session = native.session
        self.module = module if isinstance(module, nn.Module) else nn.ModuleList(module)
        self.output_ptr = output_ptr
        self.save_ctx = Namespace()
        self.trainable_modules = native.trainable_modules
        self.fmps = build_parallel_state(session.mesh, process_group)
        self._names = ModuleNames(session)
        self._shared_state = SharedState(self.fmps, output_ptr, self.save_ctx, self.trainable_modules)
        self._hook_fn_group_manager = HookGroups(native)
        self._delivery = CaptureDelivery(session, output_ptr, every_rank)
        self._rewind = SaveContextReplay(self.save_ctx)
        self._divisor = self.fmps.get_data_parallel_world_size() if divide_gradients_by_dp else 1
        self._finalizer = weakref.finalize(self, session.close)
        self._finalizer.atexit = False

    def forward(
        self, *args: Any, groups: str | list[str] = ALL_GROUPS, complement: bool = False, **kwargs: Any
    ) -> Any:
        """Call the module with some groups of hooks active, in this call and its backward pass.

        Args:
            args: the module's.
            groups: names of groups; hooks in any of them are active.
            complement: the other hooks instead.
            kwargs: the module's.

        Raises:
            HookError: no hook is in such a group; or the framework's schedule runs the model, which chooses
                when it starts: run it inside `with model.hooks(...)`.
        """
        names = [groups] if isinstance(groups, str) else list(groups)
        session = self._flex.session
        if session.in_schedule:
            if names != [ALL_GROUPS] or complement:
                session.cannot(
                    f"groups={groups!r}, complement={complement} inside a run of the schedule come too late; "
                    "run the schedule inside `with model.hooks(...)`"
                )
            return self._flex(*args, **kwargs)
        with self.hooks(*names, complement=complement):
            return self._flex(*args, **kwargs)

    def hooks(self, *groups: str, complement: bool = False) -> AbstractContextManager[None]:
        """A scope for runs of a schedule, as `forward` has `groups` for a call."""
        if not groups:  # natively that is all of them
            return self._flex.hooks(ALL_GROUPS, complement=not complement)
        return self._flex.hooks(*groups, complement=complement)

    # -- groups ----------------------------------------------------------------------------------------

    def create_hook_group(
        self,
        group_name: str,
        group_constructor: str,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int = 0,
        hook_type: HookType = "forward",
    ) -> None:
        """Make and register a hook on every module that has a text in its name, in one group.

        Args:
            group_name: the group.
            group_constructor: the text; with `hook_type="tensor"` it is looked for in parameters' names.
                Modules that no tensor passes are left out.
            expected_shape: as a HookFunction takes it.
            editing_function: likewise.
            unpack_idx: likewise.
            hook_type: `forward`, `forward_pre`, `full_backward`, `full_backward_pre` or `tensor`.

        Raises:
            HookError: no name has the text, no such hook type, or one of the places cannot be edited.
        """
        self._check_kind(hook_type)
        edits = editing_function is not None
        names = self._names.matching(group_constructor, hook_type, edits)
        if not names:
            what = "parameter" if hook_type == "tensor" else "module"
            raise HookError(
                f"no {what} that a {hook_type} hook can stand on has {group_constructor!r} in its name; "
                "wrapped_module_names has all names"
            )
        for name in names:
            hook = HookFunction(name, expected_shape, editing_function, unpack_idx)
            self._register(hook, hook_type)
            self._hook_fn_group_manager.update(hook, group_name)

    def update_hook_groups(self, group_constructor: HookSelection, group_name: str) -> None:
        """Put hooks into a group.

        Args:
            group_constructor: a list of hooks, one hook, or a text in the `module_name` of registered ones.
            group_name: the group.

        Raises:
            HookError: no hook is meant.
        """
        self._hook_fn_group_manager.update(group_constructor, group_name)

    def remove_hook_groups(self, group_constructor: HookSelection, group_name: str) -> None:
        """Take hooks out of a group, which vanishes when it is empty.

        Args:
            group_constructor: as `update_hook_groups` takes it; a text means those in the group.
            group_name: the group.

        Raises:
            HookError: no hook is meant, one is not in the group, or it is `all`; nothing is removed then.
        """
        self._hook_fn_group_manager.remove(group_constructor, group_name)

    def get_hook_function_groups(self, hook_function: HookFunction) -> set[str]:
        """The groups of a hook; every registered one is in `all`."""
        return self._hook_fn_group_manager.of(hook_function)

    def get_group_hook_functions(self, group_name: str) -> list[HookFunction]:
        """The hooks of a group, in the order of registration."""
        return self._hook_fn_group_manager.members(group_name)

    # -- modules and parameters ------------------------------------------------------------------------

    def register_trainable_module(self, name: str, module: nn.Module) -> None:
        """Give all editing functions a module, as `modules[name]`; also those registered before."""
        self._flex.register_trainable_module(name, module)

    def wrapped_module_requires_grad(self, requires_grad: bool) -> None:
        """Say whether the wrapped module's parameters get gradients. Every rank calls it.

        Args:
            requires_grad: True for all; False for none, which `restore()` undoes.

        Raises:
            FlexError: the framework's wrapper waits for gradients that would never come.
        """
        if requires_grad:
            self._flex.unfreeze()
            self.module.requires_grad_(True)
        else:
            self._flex.freeze()

    def get_module_parameter(
        self, parameter_name: str, expected_shape: Sequence[int | None] | None = None
    ) -> Tensor:
        """A whole parameter: a detached copy on the CPU. Every rank calls it, and every rank gets it.

        Args:
            parameter_name: its name, layers counted over the whole model.
            expected_shape: the whole's shape, None for a dim of any length. Checked, not needed.

        Raises:
            SiteError: no such parameter.
            FlexError: another shape.
        """
        name = self._names.resolve(parameter_name)
        return cast(Tensor, self._flex.get_module_parameter(name, expected_shape, everywhere=True))

    @property
    def wrapped_module_names(self) -> list[str]:
        """The names of the wrapped module's submodules, on all pipeline stages."""
        return list(self._names.modules)

    @property
    def trainable_modules_names(self) -> list[str]:
        """The names of the trainable modules."""
        return list(self.trainable_modules)

    @property
    def all_modules_names(self) -> list[str]:
        """Both."""
        return self.wrapped_module_names + self.trainable_modules_names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped module's parameters on this rank, by its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The wrapped module's buffers on this rank, by its own names."""
        return self.module.named_buffers(*args, **kwargs)

    # -- the end ---------------------------------------------------------------------------------------

    def restore(self) -> nn.Module | Sequence[nn.Module]:
        """Take everything out of the module again, and return it as it was given. Sends nothing.

        It also happens when the FlexModel is collected. A hook that never fired gives a warning.
        """
        session = self._flex.session
        quiet = [h.describe() for h in session.standing.list_uncalled_hooks()] if self._finalizer.alive else []
        self._finalizer()
        if quiet:
            warnings.warn(f"never fired on this rank: {', '.join(quiet)}", stacklevel=2)
        return self._given
