"""The calls that FlexModel (2023) advertised, and the test that shows each."""

from __future__ import annotations

_API, _GROUPS = "tests/distributed/test_compat_api.py::", "tests/distributed/test_compat_groups.py::"
_MEGATRON, _PLAIN = "tests/distributed/test_compat.py::", "tests/distributed/test_compat_plain.py::"
_SENT, _DEMOS = "tests/distributed/test_compat_distributed.py::", "tests/distributed/test_compat_demos.py::"
_TREES, _SILENT = "tests/unit/test_compat_traverse.py::", "tests/distributed/test_compat_silent.py::"

ADVERTISED = {
    # names to import
    "FlexModel": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "HookFunction": f"{_MEGATRON}test_registered_hooks_edit_the_whole",
    "DummyModule": f"{_PLAIN}test_dummy_module",
    "core": f"{_DEMOS}test_single_gpu_example",
    "core.default_editing_function": f"{_PLAIN}test_registered_hooks_in_one_process",
    "distributed": f"{_SENT}test_initialize_distributed_state",
    "traverse": f"{_TREES}test_flatten_and_unflatten",
    "utils": f"{_DEMOS}test_fsdp_example",
    "utils.setup_logger": f"{_DEMOS}test_fsdp_example",
    "FLEXMODEL_DEBUG": f"{_API}test_flexmodel_debug",
    # the constructor
    "FlexModel(module)": f"{_API}test_virtual_pipeline_chunks",
    "FlexModel(output_ptr)": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "FlexModel(tensor_parallel_size)": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel(pipeline_parallel_size)": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel(data_parallel_size)": f"{_PLAIN}test_samples_of_data_parallel_ranks",
    "FlexModel(process_group)": f"{_PLAIN}test_process_group",
    "FlexModel(everywhere)": f"{_API}test_every_rank",
    "FlexModel(divide_gradients_by_dp)": f"{_API}test_gradients_divided_by_the_data_parallel_size",
    # running
    "FlexModel.forward": f"{_GROUPS}test_groups_all_and_complement_of_a_call",
    "FlexModel.forward(groups)": f"{_GROUPS}test_groups_all_and_complement_of_a_call",
    "FlexModel.forward(complement)": f"{_GROUPS}test_groups_all_and_complement_of_a_call",
    "FlexModel.hooks": f"{_GROUPS}test_groups_in_a_schedule",
    # hooks
    "FlexModel.register_forward_hook": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "FlexModel.register_forward_pre_hook": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "FlexModel.register_full_backward_hook": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "FlexModel.register_full_backward_pre_hook": f"{_MEGATRON}test_registered_hooks_read_the_whole",
    "FlexModel.register_hook": f"{_MEGATRON}test_register_hook_edits_a_parameters_gradient",
    "HookFunction(module_name)": f"{_API}test_names_with_the_prefixes_of_wrappers",
    "HookFunction(expected_shape)": f"{_PLAIN}test_expected_shape_is_checked",
    "HookFunction(editing_function)": f"{_API}test_editing_functions_get_four_arguments",
    "HookFunction(unpack_idx)": f"{_PLAIN}test_unpack_idx_counts_tensors_depth_first",
    "HookFunction.offload_strategy": f"{_API}test_offload_strategies",
    "HookFunction._shared_state": f"{_API}test_shared_state_of_a_hook",
    # groups
    "FlexModel.create_hook_group": f"{_GROUPS}test_create_hook_group_with_every_hook_type",
    "FlexModel.update_hook_groups": f"{_GROUPS}test_update_hook_groups",
    "FlexModel.remove_hook_groups": f"{_GROUPS}test_remove_hook_groups",
    "FlexModel.get_hook_function_groups": f"{_GROUPS}test_get_hook_function_groups",
    "FlexModel.get_group_hook_functions": f"{_GROUPS}test_get_group_hook_functions",
    "FlexModel._hook_fn_group_manager": f"{_GROUPS}test_the_map_of_hooks_to_groups",
    # what is shared
    "FlexModel.save_ctx": f"{_API}test_save_ctx_between_layers_equals_one_process",
    "FlexModel.register_trainable_module": f"{_API}test_register_trainable_module",
    "FlexModel.trainable_modules": f"{_API}test_register_trainable_module",
    # modules and parameters
    "FlexModel.module": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel.state_dict": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel.named_parameters": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel.named_buffers": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel.parameters": f"{_API}test_the_constructor_and_the_names_of_parameters",
    "FlexModel.get_module_parameter": f"{_API}test_get_module_parameter",
    "FlexModel.wrapped_module_names": f"{_API}test_wrapped_module_names",
    "FlexModel.trainable_modules_names": f"{_API}test_trainable_and_all_modules_names",
    "FlexModel.all_modules_names": f"{_API}test_trainable_and_all_modules_names",
    "FlexModel.wrapped_module_requires_grad": f"{_API}test_wrapped_module_requires_grad",
    "FlexModel.restore": f"{_API}test_restore_takes_everything_out",
    # offload strategies
    "distributed.BaseOffloadStrategy": f"{_API}test_an_offload_strategy_of_ones_own",
    "distributed.CPUPinnedMemoryOffloadStrategy": f"{_API}test_offload_strategies",
    "distributed.CPUPagedMemoryOffloadStrategy": f"{_API}test_offload_strategies",
    "distributed.GPUMemoryOffloadStrategy": f"{_API}test_offload_strategies",
    "distributed.NullMemoryOffloadStrategy": f"{_API}test_offload_strategies",
    # ranks, groups and what is sent along them
    "FlexModel.fmps": f"{_SENT}test_the_state_of_a_megatron_model_is_megatrons",
    "distributed.initialize_distributed_state": f"{_SENT}test_initialize_distributed_state",
    "distributed.ParallelState": f"{_SENT}test_initialize_distributed_state",
    **{
        f"fmps.get_{what}": f"{_SENT}test_initialize_distributed_state"
        for what in (
            "local_rank",
            "local_world_size",
            "subset_rank",
            "subset_world_size",
            "subset_process_group",
            *(f"{axis}_parallel_{x}" for axis in ("tensor", "pipeline", "data") for x in ("rank", "group")),
            *(f"{axis}_parallel_world_size" for axis in ("tensor", "pipeline", "data")),
        )
    },
    "distributed.all_gather_tensor_parallel": f"{_SENT}test_all_gather",
    "distributed.all_gather_data_parallel": f"{_SENT}test_all_gather",
    "distributed.scatter_tensor_parallel": f"{_SENT}test_scatter",
    "distributed.scatter_data_parallel": f"{_SENT}test_scatter",
    "distributed.broadcast_tensor_parallel": f"{_SENT}test_broadcast",
    "distributed.broadcast_data_parallel": f"{_SENT}test_broadcast",
    "distributed.gather_pipeline_parallel_tensor_dicts": f"{_SENT}test_gather_pipeline_parallel_tensor_dicts",
    "distributed.batch_isend_irecv_pipeline_parallel": f"{_SENT}test_batch_isend_irecv_pipeline_parallel",
    "distributed.unity": f"{_TREES}test_names_of_the_original_modules",
    # trees
    "traverse.flatten": f"{_TREES}test_flatten_and_unflatten",
    "traverse.unflatten": f"{_TREES}test_flatten_and_unflatten",
    "traverse.nodes": f"{_TREES}test_register_internal_node_type",
    "traverse.InternalNode": f"{_TREES}test_register_internal_node_type",
    "traverse.LeafNode": f"{_TREES}test_register_leaf_node_type",
    "traverse.InternalObject": f"{_TREES}test_names_of_the_original_modules",
    "traverse.LeafObject": f"{_TREES}test_names_of_the_original_modules",
    "traverse.ScalarObject": f"{_TREES}test_names_of_the_original_modules",
    "traverse.ScalarNode": f"{_TREES}test_names_of_the_original_modules",
    "traverse.register_internal_node_type": f"{_TREES}test_register_internal_node_type",
    "traverse.register_leaf_node_type": f"{_TREES}test_register_leaf_node_type",
}

# The tests of FlexModel that cannot pass: why, mostly as they call internals, and our tests of the same.
INTERNALS = {
    "core/test_hook_function_group_manager.py": (
        "all call the private _HookFunctionGroupManager",
        f"{_GROUPS}test_update_hook_groups",
        f"{_GROUPS}test_remove_hook_groups",
        f"{_GROUPS}test_create_hook_group_with_every_hook_type",
        f"{_GROUPS}test_groups_all_and_complement_of_a_call",
    ),
    "distributed/test_initialize.py": (
        "calls the private _BaseGPUDeviceMesh",
        f"{_SENT}test_initialize_distributed_state",
    ),
    "core/test_wrapper.py::test_FlexModel_group_creation": (
        "compares lists by torch.allclose, which raises as soon as a hook is created; in FlexModel none was",
        f"{_GROUPS}test_groups_all_and_complement_of_a_call",
    ),
    **dict.fromkeys(
        (
            "multi_gpu/core/test_fairscale_mpu_vs_ddp.py::test_full_backward_hooks_fairscale",
            "multi_gpu/core/test_fairscale_mpu_vs_ddp.py::test_full_backward_pre_hooks_fairscale",
        ),
        (
            "expects the output's shape of the input's gradient, which was gathered as if sharded; it is an "
            "error here",
            f"{_MEGATRON}test_registered_hooks_edit_the_whole",
            f"{_PLAIN}test_expected_shape_is_checked",
        ),
    ),
    "multi_gpu/distributed/test_initialize.py": (
        "imports the private _global_state_is_initialized",
        f"{_SENT}test_initialize_distributed_state",
    ),
}

# Public names of its modules that are not here, and why.
LEFT_OUT = {
    **dict.fromkeys(
        (
            "distributed.strategies.BaseRoutingStrategy",
            "distributed.strategies.ParameterTensorParallelRoutingStrategy",
            "distributed.strategies.ActivationTensorAllToAllRoutingStrategy",
        ),
        "how a hook gathers follows from the layout of its tensor",
    ),
    **dict.fromkeys(
        (
            "distributed.strategies.BaseFunctionStrategy",
            "distributed.strategies.NonValidatedFunctionStrategy",
        ),
        "an editing function is called by the session",
    ),
    "package_info": "it describes the package flex-model",
}

# What failed silently, and the test that shows the right result or the error.
SILENT = {
    "outputs that are dicts, dataclasses, named tuples": f"{_SILENT}test_outputs_that_are_no_tuple",
    "modules called by keyword": f"{_SILENT}test_megatrons_layers_which_are_called_by_keyword",
    "recomputation": f"{_SILENT}test_recomputation_in_megatron_replays_what_save_ctx_held",
    "random numbers of each rank": f"{_SILENT}test_random_numbers_are_the_same_on_all_ranks",
    "a first gradient that is None": f"{_SILENT}test_a_first_gradient_that_is_none",
    "uneven data parallel batches": f"{_PLAIN}test_samples_of_data_parallel_ranks",
    "a hook on one rank only": f"{_SILENT}test_a_hook_on_one_rank_only_is_an_error_on_all",
    "groups, threads and file descriptors left behind": f"{_SILENT}test_nothing_grows_over_twenty_wraps",
    "one module used twice": f"{_SILENT}test_one_module_used_twice_is_kept_in_the_order_of_its_calls",
    "an unknown group": f"{_GROUPS}test_what_is_refused",
    "what is kept is no copy": f"{_SILENT}test_what_is_kept_is_a_copy",
}
