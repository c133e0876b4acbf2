"""`attach`: register hooks, dumps, statistics and searches on a model in one call, for a training script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_flex.dump import Dump
from megatron_flex.model.argument_checks import check_attach_arguments, register_hook
from megatron_flex.model.flex_model import FlexModel, Model
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime import HookFunction
from megatron_flex.statistics import Statistics


def attach(
    model: Model,
    hooks: Sequence[HookFunction] = (),
    *,
    dumps: Sequence[Dump] | Dump = (),
    statistics: Sequence[Statistics] | Statistics = (),
    nonfinite: NonFinite | Literal["stop", "warn"] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    gather_data_parallel: bool = False,
    process_group: Any = None,
    verify: bool = False,
) -> FlexModel:
    """Register hooks, dumps and statistics on a model that the caller still calls directly.

    Every rank calls `attach` with the same arguments. Use the result as a context manager, or call
    `restore()` at the end.

    Args:
        model: the model, or the list of its virtual pipeline chunks.
        hooks: each HookFunction with its `hook_type` set.
        dumps: one Dump or several, registered with `register_dump`.
        statistics: one Statistics or several, registered with `register_statistics`.
        nonfinite: what to do about NaN and infinities, for `register_nonfinite`; None: do not watch for them.
        tensor_parallel_size: as for FlexModel, like the five arguments below.
        pipeline_parallel_size: as for FlexModel.
        data_parallel_size: as for FlexModel.
        gather_data_parallel: as for FlexModel.
        process_group: as for FlexModel.
        verify: as for FlexModel.

    Returns:
        The FlexModel that manages the hooks. If a registration fails, the model is restored first.

    Raises:
        FlexError: as for FlexModel, `register_dump`, `register_statistics` and `register_nonfinite`.

    Examples:
        >>> dump = Dump("dumps/new", "decoder.layers.*")
        >>> with attach(chunks, [HookFunction("decoder.layers.3")], dumps=dump) as flex:
        ...     train_step(chunks)
        ...     flex.output_dict["decoder.layers.3"][0].shape
        torch.Size([16, 2, 32])
    """
    check_attach_arguments(model, hooks, dumps, statistics)
    flex = FlexModel(
        model,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
        gather_data_parallel=gather_data_parallel,
        process_group=process_group,
        verify=verify,
    )
    try:
        for hook in hooks:
            register_hook(flex.session, hook, hook.hook_type)
        for dump in [dumps] if isinstance(dumps, Dump) else dumps:
            flex.register_dump(dump)
        for measured in [statistics] if isinstance(statistics, Statistics) else statistics:
            flex.register_statistics(measured)
        if nonfinite is not None:
            flex.register_nonfinite(nonfinite)
    except Exception:  # raised again after the model is restored
        flex.session.close(failed=True)
        raise
    return flex
