"""FlexModel with the interface of 2023: a wrapper module with hooks on the modules inside.

Also the names of modules, and the registration of hooks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex.collectives import gather_objects
from megatron_flex.compat.core.hook_function import (
    HookFunction,
    HookGroups,
    HookSelection,
    SaveContext,
    SharedState,
    default_editing_function,
)
from megatron_flex.compat.core.native_hooks import (
    GRADIENT_HOOK_TYPES,
    CaptureDelivery,
    CaptureRecipient,
    SaveContextReplay,
    capture_name,
    wrap_editing_function,
)
from megatron_flex.compat.distributed.distributed_state import build_parallel_state, start_torch_distributed
from megatron_flex.compat.utils import setup_from_environment
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime import Session
from megatron_flex.runtime.hook_groups import ALL_GROUPS
from megatron_flex.runtime.hooks import POINT_OF_TYPE, EditingFunction, HookType, check_signature

# The attributes under which wrappers hold the wrapped module, at any position in a path.
WRAPPER_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class ModuleNames:
    """The names of one model's modules and parameters, over all pipeline stages.

    The constructor is collective over the stages.

    Attributes:
        modules: the names in the given model, with layers counted over the full model.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._prefix = session, session.adapter.prefix
        names_of_stages = gather_objects(session.adapter.module_names(), session.mesh, ["pp"])
        inside = list(dict.fromkeys(name for names in names_of_stages for name in names))
        parts = self._prefix.rstrip(".").split(".") if self._prefix else []
        wrappers = [".".join(parts[:n]) for n in range(len(parts))]
        self.modules = [*wrappers, *(self._outside(name) for name in inside)]
        self._known = {*inside, *session.parameters.index.sites, *(s.name for s in session.sites)}

    def _outside(self, name: str) -> str:
        return f"{self._prefix}{name}" if name else self._prefix.rstrip(".")

    def resolve(self, name: str) -> str:
        """The global name for the user's `name`; `name` without prefixes if no such module exists."""
        bare = ".".join(p for p in name.split(".") if p not in WRAPPER_ATTRIBUTES)
        candidates = [name, name.removeprefix(self._prefix)]
        for spelling in (name, bare):
            candidates.append(spelling)
            while candidates[-1].startswith("module."):
                candidates.append(candidates[-1].removeprefix("module."))
        return next((c for c in candidates if c in self._known), candidates[-1])

    def matching(self, text: str, kind: HookType, edits: bool) -> list[str]:
        """The modules (for `tensor` the parameters) with a text in their names that can have such a hook.

        Raises:
            HookError: one of them is read-only, and the hook edits.
        """
        if kind == "tensor":
            copies = self._session.parameters.index.first_copies()
            names = [name for name, parameter in copies.items() if not parameter.hidden]
        else:
            sites = [s for s in self._session.sites if s.point == POINT_OF_TYPE[kind] and not s.hidden]
            names = list(dict.fromkeys(s.module for s in sites))
            fixed = next((s for s in sites if s.read_only_reason and text in self._outside(s.module)), None)
            if fixed is not None and (edits or kind.startswith("full_backward")):
                raise HookError(
                    f"{fixed.name} has {text!r} in its name and cannot have such a hook: "
                    f"{fixed.read_only_reason}"
                )
        return [outside for n in names if text in (outside := self._outside(n))]


def _close_session(session: Session) -> None:
    """Remove the hooks of a FlexModel that has been collected; does not wait for any rank.

    If there are hooks on gradients, the FlexModel may have been dropped between a call and its backward pass:
    hooks are then removed at the end of that pass.
    """
    if not session.open:
        return
    deliver = session.delivered
    if deliver is None or not any(entry.hook.backward for entry in session.registry.entries):
        session.close()
        return

    def finish() -> None:
        deliver()
        if session.open:
            session.close()

    session.delivered = finish


class FlexModel(nn.Module):
    """A module whose full tensors are captured and edited.

    Every rank creates one and registers the same hooks in the same order. Samples of data parallel ranks are
    concatenated along the batch dim.

    Args:
        module: the model, with or without wrappers; or the list of its virtual pipeline chunks.
        output_ptr: the dict to which captures are appended, by the hook's `module_name`: detached copies on
            the CPU, in the order of the forward passes, on every rank. The caller empties it.
        tensor_parallel_size: the number of ranks that share each tensor.
        pipeline_parallel_size: the number of pipeline stages.
        data_parallel_size: the number of replicas.
        process_group: the ranks that run the model; None for all.
        everywhere: fill `output_ptr` on every rank; False fills it on the first rank only, and sends less.
        divide_gradients_by_dp: pass the gradients of modules divided by the data parallel size to hooks, and
            multiply the result of an edit by that size. They are then those of one device if its loss is
            the mean over the samples of all replicas, and each replica's loss the mean over its own. False
            passes them on the scale of the backward pass, as where the replicas' losses are summed.

    Attributes:
        module: the wrapped module.
        output_ptr: the given dict.
        save_ctx: the state that editing functions keep between calls; each rank has its own.
        trainable_modules: the modules registered by `register_trainable_module`.
        fmps: ranks and groups.
        tp_size, pp_size, dp_size, process_group: as given.

    Raises:
        FlexError: the sizes differ from the model's.
    """

    _flex: Native
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
        everywhere: bool = True,
        divide_gradients_by_dp: bool = True,
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
        self.tp_size, self.pp_size = tensor_parallel_size, pipeline_parallel_size
        self.dp_size = data_parallel_size
        self.process_group = process_group
        self.save_ctx = SaveContext()
        self.trainable_modules = native.trainable_modules
        self.fmps = build_parallel_state(session.mesh, process_group)
        self._names = ModuleNames(session)
        self._shared_state = SharedState(output_ptr, self.save_ctx, self.trainable_modules)
        self._hook_fn_group_manager = HookGroups(native, self._shared_state)
        self._delivery = CaptureDelivery(session, everywhere)
        self._rewind = SaveContextReplay(self.save_ctx)
        weakref.finalize(self, _close_session, session).atexit = False
        self._divisor = self.fmps.get_data_parallel_world_size() if divide_gradients_by_dp else 1

    def forward(
        self, *args: Any, groups: str | list[str] = ALL_GROUPS, complement: bool = False, **kwargs: Any
    ) -> Any:
        """Call the module with the hooks of some groups active, in this call and its backward pass.

        Args:
            args: the module's positional arguments.
            groups: names of groups; hooks in any of them are active.
            complement: activate all other hooks instead.
            kwargs: the module's keyword arguments.

        Raises:
            HookError: a group has no hooks; or the framework's schedule runs the model, for which groups are
                selected at its start: run it inside `with model.hooks(...)`.
        """
        names = [groups] if isinstance(groups, str) else list(groups)
        session = self._flex.session
        if session.in_step():
            if names != [ALL_GROUPS] or complement:
                session.reject_step(
                    f"groups={groups!r}, complement={complement} inside a run of the schedule come too late; "
                    "run the schedule inside `with model.hooks(...)`"
                )
            return self._flex(*args, **kwargs)
        if not session.open and names == [ALL_GROUPS] and not complement:
            return self._flex(*args, **kwargs)  # a bare model
        with self.hooks(*names, complement=complement):
            return self._flex(*args, **kwargs)

    def hooks(self, *groups: str, complement: bool = False) -> AbstractContextManager[None]:
        """A context manager that selects groups for runs of a schedule, like `groups` of `forward`."""
        if not groups:  # natively that selects all of them
            return self._flex.hooks(ALL_GROUPS, complement=not complement)
        return self._flex.hooks(*groups, complement=complement)

    # -- registration of hooks: each HookFunction is registered once -------------------------------------

    def register_forward_hook(self, hook_function: HookFunction) -> None:  # type: ignore[override]  # nn.Module takes a callable
        """Capture, and optionally edit, a module's output."""
        self._register(hook_function, "forward")

    def register_forward_pre_hook(self, hook_function: HookFunction) -> None:  # type: ignore[override]  # nn.Module takes a callable
        """Capture, and optionally edit, a module's input."""
        self._register(hook_function, "forward_pre")

    def register_full_backward_hook(self, hook_function: HookFunction) -> None:  # type: ignore[override]  # nn.Module takes a callable
        """Capture, and optionally edit, the gradient of a module's input."""
        self._register(hook_function, "full_backward")

    def register_full_backward_pre_hook(self, hook_function: HookFunction) -> None:  # type: ignore[override]  # nn.Module takes a callable
        """Capture, and optionally edit, the gradient of a module's output."""
        self._register(hook_function, "full_backward_pre")

    def register_hook(self, hook_function: HookFunction) -> None:
        """Capture, and optionally edit, the gradient of the parameter named by `module_name`.

        The edit applies to each data parallel replica's own gradient; the first replica's is captured.
        """
        self._register(hook_function, "tensor")

    def _register(self, hook: HookFunction, kind: HookType) -> None:
        if not isinstance(hook, HookFunction):
            raise HookError(f"a {type(hook).__name__} cannot be registered; make a compat HookFunction")
        if hook._shared_state is not None:
            raise HookError(f"the hook on {hook.module_name!r} is registered already; make another one")
        session = self._flex.session
        session.check_open()
        check_signature(hook.editing_function)
        divisor = self._divisor if kind in GRADIENT_HOOK_TYPES and kind != "tensor" else 1
        name, places = self._places(hook, kind)
        number = len(self._hook_fn_group_manager.registered)
        native = NativeHook(
            name,
            expected_shape=self._expected(hook, kind, places),
            unpack_idx=hook.unpack_idx,
            hook_type=kind,
            groups=hook._groups,
        )
        edits = hook.editing_function is not default_editing_function
        # The native hook captures the tensor before all edits, the wrapped function what it receives.
        captures_input = edits or any(self._edited(n, kind) for n in places)
        label = f"hook {number}: {hook.module_name}"
        if captures_input:
            native.save, native.records = False, True
            native.editing_function = wrap_editing_function(
                hook, kind, self._shared_state, session, self._rewind, label, divisor
            )
        session.hooks.add(native)
        recipient = CaptureRecipient(hook, native, number, 1 if captures_input else divisor)
        names = {capture_name(n, kind) for n in session.registry.entries[-1].names}
        for captured in {label} if captures_input else names:
            self._delivery.recipients.setdefault(captured, []).append(recipient)
        hook._shared_state, hook._native = self._shared_state, native
        self._hook_fn_group_manager.add(hook)

    def _places(self, hook: HookFunction, kind: HookType) -> tuple[str, list[str]]:
        """The global name of a hook's module or parameter, and the names of its sites."""
        name, session = self._names.resolve(hook.module_name), self._flex.session
        if kind == "tensor" and name in session.parameters.index.sites:
            return name, [name]
        return name, [s.name for s in session.sites.match(name, POINT_OF_TYPE[kind])]

    def _edited(self, name: str, kind: HookType) -> bool:
        """Whether an earlier hook edits there, so that this hook's input differs from the native capture."""
        backward, registry = kind in GRADIENT_HOOK_TYPES, self._flex.session.registry
        return any(
            name in e.names and e.hook.backward == backward and e.hook.editing_function is not None
            for e in registry.entries
        )

    def _expected(
        self, hook: HookFunction, kind: HookType, places: Sequence[str]
    ) -> tuple[int | None, ...] | None:
        """The full tensor's shape, in the validated dims: users give the batch size of one replica."""
        want = hook.expected_shape
        if want is None or all(n is None for n in want):
            return None
        session = self._flex.session
        if session.mesh["dp"].size == 1:
            return want
        layouts = [session.sites[n].layout for n in places if n in session.sites]
        batches = {i for layout in layouts for i, d in enumerate(layout.dims) if d.name == "b"}
        if kind != "tensor" and any(session.sites[n].inferred for n in places):
            batches = {0}
        return tuple(None if i in batches else n for i, n in enumerate(want))

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
        """Create and register a hook in one group on every module whose name contains a text.

        Args:
            group_name: the group.
            group_constructor: the text; with `hook_type="tensor"` the names of parameters are searched.
                Modules without tensors are left out.
            expected_shape: as in HookFunction.
            editing_function: as in HookFunction.
            unpack_idx: as in HookFunction.
            hook_type: `forward`, `forward_pre`, `full_backward`, `full_backward_pre` or `tensor`.

        Raises:
            HookError: no name contains the text, the hook type is unknown, or a hook point is read-only.
        """
        self._flex.session.check_open()
        if hook_type not in POINT_OF_TYPE:
            raise HookError(f"hook_type {hook_type!r} is not one of {', '.join(POINT_OF_TYPE)}")
        edits = editing_function is not None
        names = self._names.matching(group_constructor, hook_type, edits)
        if not names:
            what = "parameter" if hook_type == "tensor" else "module"
            raise HookError(
                f"no {what} that a {hook_type} hook can be registered on has {group_constructor!r} in "
                "its name; wrapped_module_names has all names"
            )
        for name in names:
            hook = HookFunction(name, expected_shape, editing_function, unpack_idx)
            self._register(hook, hook_type)
            self._hook_fn_group_manager.update(hook, group_name)

    def update_hook_groups(self, group_constructor: HookSelection, group_name: str) -> None:
        """Add hooks to a group.

        Args:
            group_constructor: a list of hooks, one hook, or a text in the `module_name` of registered ones.
            group_name: the group.

        Raises:
            HookError: the selection is empty.
        """
        self._flex.session.check_open()
        self._hook_fn_group_manager.update(group_constructor, group_name)

    def remove_hook_groups(self, group_constructor: HookSelection, group_name: str) -> None:
        """Remove hooks from a group. A group without hooks ceases to exist.

        Args:
            group_constructor: as in `update_hook_groups`; a text selects among the hooks of the group.
            group_name: the group.

        Raises:
            HookError: the selection is empty, a hook is not in the group, or the group is `all`. Then no hook
                is removed.
        """
        self._flex.session.check_open()
        self._hook_fn_group_manager.remove(group_constructor, group_name)

    def get_hook_function_groups(self, hook_function: HookFunction) -> set[str]:
        """The groups of a hook; every registered one is in `all`."""
        return self._hook_fn_group_manager.groups_of(hook_function)

    def get_group_hook_functions(self, group_name: str) -> list[HookFunction]:
        """The hooks of a group, in the order of registration."""
        return self._hook_fn_group_manager.members(group_name)

    # -- modules and parameters ------------------------------------------------------------------------

    def register_trainable_module(self, name: str, module: nn.Module) -> None:
        """Make a module available to all editing functions, as `modules[name]`, also to earlier hooks."""
        self._flex.register_trainable_module(name, module)

    def wrapped_module_requires_grad(self, requires_grad: bool) -> None:
        """Set `requires_grad` of the wrapped module's parameters. Every rank calls it.

        Args:
            requires_grad: the new value for all parameters; `restore()` undoes False.

        Raises:
            FlexError: the framework's wrapper would wait for gradients that never arrive.
        """
        self._flex.session.check_open()
        if requires_grad:
            self._flex.unfreeze()
            self.module.requires_grad_(True)
        else:
            self._flex.freeze()

    def get_module_parameter(
        self, parameter_name: str, expected_shape: Sequence[int | None] | None = None
    ) -> Tensor:
        """A full parameter, as a detached copy on the CPU, on every rank. Every rank calls it.

        Args:
            parameter_name: its name, with layers counted over the full model.
            expected_shape: the shape of the full tensor, None for a dim of any length. Only validated.

        Raises:
            SiteError: the parameter does not exist.
            FlexError: the shape differs.
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
        """The names of the wrapped module's submodules and of the trainable modules."""
        return self.wrapped_module_names + self.trainable_modules_names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped module's parameters on this rank, by its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The wrapped module's buffers on this rank, by its own names."""
        return self.module.named_buffers(*args, **kwargs)

    # -- the end ---------------------------------------------------------------------------------------

    def restore(self) -> nn.Module | Sequence[nn.Module]:
        """Remove all hooks from the module, and return it as it was given. Sends nothing.

        Hooks are removed as well when the FlexModel is garbage collected; let all ranks drop it at the same
        place. A hook that was never called causes a warning.
        """
        session = self._flex.session
        quiet = [h.describe() for h in session.taps.list_local_uncalled_hooks()]
        if session.open:
            session.close()
        if quiet:
            warnings.warn(f"never fired on this rank: {', '.join(quiet)}", stacklevel=2)
        return self._given
