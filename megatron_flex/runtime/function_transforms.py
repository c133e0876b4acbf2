"""Models called in a transform of `torch.func`: which hooks work there, and which are refused.

Tensors are then wrappers that are valid inside the transform only. An edit computes with them like the model
does. A capture would be dead when it is used, and gradients flow outside of the autograd graph that hooks on
gradients, trainable modules and the collectives of gathered edits are nodes of.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_flex.collectives import running_transform
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hooks import HookFunction

SHARDING_AXES = ("tp", "cp", "pp")


def check_transform(hooks: Iterable[HookFunction], mesh: Mesh, trains: bool) -> None:
    """Refuse what does not work in the transform that runs, before the model is called.

    Args:
        hooks: the active hooks.
        mesh: the run's axes.
        trains: whether trainable modules are registered.

    Raises:
        HookError: on all ranks, which call the model in the same transform.
    """
    name = running_transform().key().name.lower()
    for hook in hooks:
        why, remedy = _explain_hook(hook, mesh, trains)
        if why:
            raise HookError(
                f"hook ({hook.describe()}) cannot work in a transform of torch.func ({name}), in which the "
                f"model is called: {why}; {remedy}",
                hook=hook,
            )


def _explain_hook(hook: HookFunction, mesh: Mesh, trains: bool) -> tuple[str, str]:
    """Why a hook cannot work in a transform, and the remedy; empty if it can."""
    if hook.backward:
        return "no gradient reaches it there", "call the model outside of torch.func, and backward()"
    edits = hook.editing_function is not None
    if hook.tensor_sink is not None or hook.captures_edited or (hook.save and not edits):
        return "a tensor read there is dead after it", "call the model outside of torch.func to read tensors"
    if hook.save:
        return "a tensor read there is dead after it", "pass save=False"
    if edits and uses_context(hook.editing_function):
        return "a tensor in save_ctx is dead after it", "compute the value within the function"
    if hook.run == "once":
        return "one rank's result goes to the others by a collective", "leave out run='once'"
    if trains:
        return (
            "trainable modules get their gradients from backward() only",
            "remove the modules for this call",
        )
    spread = [f"{name}={mesh[name].size}" for name in SHARDING_AXES if mesh[name].size > 1]
    if spread:
        return (
            f"its collectives over {', '.join(spread)} have no transform",
            "call the model outside of torch.func",
        )
    return "", ""
