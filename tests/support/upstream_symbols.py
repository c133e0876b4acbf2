"""The private and undocumented names of other packages that this package uses, in one table.

Nothing is imported here. A new version of a package may change such a name without notice:
`tests/unit/test_upstream_symbols.py` compares the table with the installed packages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamSymbol:
    """A name that its package does not promise to keep.

    Attributes:
        package: the distribution on the package index.
        path: `module:name` or `module:Class.name`.
        reason: why no public name does it.
        versions: the supported versions that have it, as a version specifier; `*` for all of them.
        assigned_in: the module that assigns the name, where an object gets it at run time.
    """

    package: str
    path: str
    reason: str
    versions: str = "*"
    assigned_in: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.replace(":", ".").rpartition(".")[2]

    @property
    def module(self) -> str:
        """The module in the path."""
        return self.path.partition(":")[0]


def _of(
    package: str, module: str, names: str, reason: str, versions: str = "*", assigned_in: str = ""
) -> tuple[UpstreamSymbol, ...]:
    """Several names of one module that are used for one reason."""
    return tuple(
        UpstreamSymbol(package, f"{module}:{name}", reason, versions, assigned_in) for name in names.split()
    )


_REGIONS = (
    "_CopyToModelParallelRegion _ReduceFromModelParallelRegion _GatherFromModelParallelRegion "
    "_ScatterToModelParallelRegion"
)
_SEQUENCE_REGIONS = (
    "_GatherFromSequenceParallelRegion _ScatterToSequenceParallelRegion "
    "_ReduceScatterToSequenceParallelRegion"
)
_LOGITS_REASON = "the scale of the logits (muP), or what a model derived from Megatron's puts in its place"
_REGION_REASON = "the node of the autograd graph is known by the name of its function only"
_GEMM_REASON = "the partial sum before the reduction has no hook"

MEGATRON_SYMBOLS = (
    *_of("megatron-core", "megatron.core.tensor_parallel.mappings", _REGIONS, _REGION_REASON),
    *_of("megatron-core", "megatron.core.tensor_parallel.mappings", _SEQUENCE_REGIONS, _REGION_REASON),
    *_of(
        "megatron-core",
        "megatron.core.tensor_parallel.layers",
        "RowParallelLinear._forward_impl",
        _GEMM_REASON,
    ),
    *_of(
        "megatron-core",
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule._scale_logits",
        _LOGITS_REASON,
        ">=0.19",
    ),
    *_of(
        "megatron-core",
        "megatron.training.global_vars",
        "_GLOBAL_ARGS _GLOBAL_TOKENIZER _GLOBAL_TENSORBOARD_WRITER _GLOBAL_WANDB_WRITER",
        "the public getter raises an error, or cannot be set, where the value is absent",
        ">=0.19",
    ),
    *_of(
        "megatron-core",
        "megatron.training.arguments",
        "args._is_global_batch_size_explicitly_specified",
        "validate_args() reads it from arguments that parse_args() made",
        ">=0.19",
    ),
    *_of(
        "megatron-core",
        "megatron.core.transformer.moe.experts",
        "TEGroupedMLP._with_fused_impl",
        "only the layer knows whether it uses the fused operation",
        ">=0.19",
    ),
    *_of(
        "megatron-core",
        "megatron.core.extensions.transformer_engine",
        "TELinear._tp_group",
        "Transformer Engine's linear layers keep the group under this name",
        ">=0.16",
    ),
    *_of(
        "megatron-core",
        "megatron.core.utils",
        "_te_version",
        "an estimate builds layers of Transformer Engine where it is not installed",
    ),
    *_of(
        "megatron-core",
        "megatron.core.tensor_parallel.random",
        "_get_share_storage",
        "checkpointing on a CPU needs another function that shares storage",
        ">=0.19",
    ),
    *_of(
        "megatron-core",
        "megatron.core.fp8_utils",
        "_quantize_param_shard_impl",
        "0.12 calls it without Transformer Engine, where it raises an error",
    ),
    *_of(
        "megatron-core",
        "megatron.core.ssm.gated_delta_net",
        "GatedDeltaNet._prepare_input_for_gated_delta_rule GatedDeltaNet._compute_g_and_beta",
        "tensors inside the layer have no hook",
        ">=0.19",
    ),
)

FAIRSCALE_SYMBOLS = (
    *_of("fairscale", "fairscale.nn.model_parallel.mappings", _REGIONS, _REGION_REASON),
    *_of(
        "fairscale",
        "fairscale.nn.data_parallel.sharded_ddp",
        "ShardedDataParallel._sharded_optimizers ShardedDataParallel._process_group "
        "ShardedDataParallel._grad_to_be_reduced ShardedDataParallel._should_accumulate_grads "
        "ShardedDataParallel._accumulate_grads_flipped ShardedDataParallel._auto_refresh_trainable "
        "ShardedDataParallel._bucket_list ShardedDataParallel._grad_hooks",
        "the wrapper has no public record of its group and of the gradients that it has averaged",
    ),
    *_of(
        "fairscale",
        "fairscale.nn.misc.param_bucket",
        "ParamBucket._params ParamBucket._param_ids",
        "the wrapper has no public list of the parameters in a bucket",
    ),
    *_of(
        "fairscale",
        "fairscale.optim.oss",
        "OSS._param_to_rank",
        "the rank that gets a parameter's gradient is kept here only",
    ),
)

APEX_SYMBOLS = (
    *_of("apex", "apex.transformer.tensor_parallel.mappings", _REGIONS, _REGION_REASON),
    *_of("apex", "apex.transformer.tensor_parallel.mappings", _SEQUENCE_REGIONS, _REGION_REASON),
    *_of("apex", "apex.transformer.tensor_parallel.layers", "RowParallelLinear._forward_impl", _GEMM_REASON),
    *_of(
        "apex",
        "apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_with_interleaving",
        "_forward_backward_pipelining_with_interleaving",
        "get_forward_backward_func() returns it; its calls begin and end a step",
    ),
)

DEEPSPEED_SYMBOLS = (
    *_of(
        "deepspeed",
        "deepspeed.runtime.pipe.module",
        "PipelineModule._layer_specs",
        "tied layers are named in the specifications only",
    ),
    *_of(
        "deepspeed",
        "deepspeed.runtime.pipe.engine",
        "PipelineEngine._exec_schedule",
        "a step's microbatches begin and end there, in training and in evaluation",
    ),
    *_of(
        "deepspeed",
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._get_optimizer_loss_scale",
        "the public loss_scale() does not exist for every optimizer",
    ),
    *_of(
        "deepspeed",
        "deepspeed.runtime.zero.stage3",
        "Parameter._z3_optimizer",
        "marks a parameter whose optimizer state ZeRO-3 keeps",
    ),
    *_of(
        "deepspeed",
        "deepspeed.runtime.zero.stage_1_and_2",
        "Parameter._hp_mapping",
        "marks a parameter with a copy in full precision",
    ),
    *_of(
        "deepspeed",
        "deepspeed.runtime.zero.partition_parameters",
        "Parameter.ds_id",
        "marks a parameter that ZeRO-3 has sharded",
    ),
)

HUGGINGFACE_SYMBOLS = (
    *_of("accelerate", "accelerate.hooks", "Module._hf_hook", "offloaded weights are in the hook's own map"),
    *_of(
        "accelerate",
        "accelerate.state",
        "GradientState._set_sync_gradients GradientState._shared_state",
        "accelerate and Trainer report in this way alone which microbatch ends a step",
    ),
    *_of(
        "datasets",
        "datasets.arrow_dataset",
        "state._data_files",
        "a key of state.json: files of a data set are written piece by piece",
    ),
    *_of(
        "transformers",
        "transformers.configuration_utils",
        "PretrainedConfig._attn_implementation PretrainedConfig._experts_implementation",
        "the model is built already, and its attention and experts are to run in eager code for one pass",
    ),
    *_of(
        "transformers",
        "transformers.modeling_utils",
        "AttentionInterface.get_interface",
        "an attention module asks it for its function, which has the queries, keys, scores and probabilities",
    ),
    *_of(
        "transformers",
        "transformers.utils.generic",
        "GeneralInterface._global_mapping",
        "a registered attention function has no public way out",
    ),
)

_MODULE_REASON = "named_parameters() and the like leave out repeated objects, absent ones, or the owner"
_FSDP_REASON = "FullyShardedDataParallel has no public access to its flat parameters"
_FSDP2_REASON = "fully_shard() has no public access to its groups of parameters"
_SCHEDULE_REASON = "a pipeline schedule has no public access to its stages, microbatches and loss"
_DEVICE_REASON = "a default device must be the CPU too, and its table must hold torch's own functions"
_SCRIPT_REASON = "torch.jit.script knows functions by identity, those of the CPU runtime too"

TORCH_MODULE_SYMBOLS = (
    *_of(
        "torch",
        "torch.nn.modules.module",
        "Module._parameters Module._buffers Module._modules Module._non_persistent_buffers_set "
        "Module._forward_hooks Module._forward_pre_hooks",
        _MODULE_REASON,
    ),
    *_of(
        "torch",
        "torch.nn.modules.module",
        "Module._call_impl Module._compiled_call_impl",
        "the entrance of a call, outside hooks, has no public name",
    ),
    *_of("torch", "torch.nn.modules.module", "_IncompatibleKeys", "the type that load_state_dict() returns"),
    *_of(
        "torch",
        "torch._C._functorch",
        "peek_interpreter_stack",
        "whether a transform of torch.func runs has no public name",
    ),
    *_of("torch", "torch.nn.modules.batchnorm", "_NormBase", "the base class of all batch normalisation"),
    *_of(
        "torch",
        "torch._dynamo.eval_frame",
        "OptimizedModule._orig_mod",
        "the module inside torch.compile()'s wrapper",
    ),
    *_of("torch", "torch", "_dynamo", "sys.modules shows whether compilation is in use without importing it"),
    *_of(
        "torch",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper._checkpoint_wrapped_module",
        "the module inside a wrapper is part of parameter names",
        assigned_in="torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    ),
)

TORCH_TENSOR_SYMBOLS = (
    *_of("torch", "torch", "Tensor._version", "the only sign of a change in place"),
    *_of("torch", "torch", "Tensor._base Tensor._is_view", "whether two tensors have the same memory"),
    *_of("torch", "torch", "UntypedStorage._cdata", "the identity of a storage, also of one without memory"),
    *_of(
        "torch",
        "torch",
        "_C._autograd._top_saved_tensors_default_hooks",
        "whether something may recompute, or move away, what autograd saves",
    ),
    *_of(
        "torch", "torch", "_C._current_graph_task_id", "distinguishes backward passes, nested ones included"
    ),
    *_of(
        "torch",
        "torch.autograd",
        "Variable._execution_engine",
        "a call at the end of a backward pass is queued there only",
    ),
    *_of(
        "torch",
        "torch.autograd.function",
        "BackwardCFunction._forward_cls",
        "the function of a node in the autograd graph",
    ),
    *_of(
        "torch",
        "torch.utils.checkpoint",
        "_StopRecomputationError",
        "ends a recomputation that needs no more: it is no failure of an edit",
    ),
    *_of("torch", "torch.utils", "_device", _DEVICE_REASON),
    *_of("torch", "torch.utils._device", "_device_constructors", _DEVICE_REASON),
    *_of("torch", "torch.jit", "_builtins", _SCRIPT_REASON),
    *_of("torch", "torch.jit._builtins", "_find_builtin _get_builtin_table", _SCRIPT_REASON),
    *_of(
        "torch",
        "torch._dynamo.config",
        "_config",
        "what is set of the compiler holds in one thread; others see the default",
    ),
    *_of(
        "torch",
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter",
        "loaders draw random numbers and pin memory when an iterator is made",
    ),
    *_of(
        "torch", "torch.cuda", "_lazy_init _sleep", "Megatron and tests call it; on a CPU it must do nothing"
    ),
)

TORCH_DISTRIBUTED_SYMBOLS = (
    *_of(
        "torch",
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "init_process_group() returns no store, and a second one needs another port",
    ),
    *_of(
        "torch",
        "torch.distributed",
        "ProcessGroup._get_backend ProcessGroup._device_types",
        "the timeout of a process group, and the devices of its tensors, have no public names",
    ),
    *_of(
        "torch",
        "torch.distributed.distributed_c10d",
        "_world",
        "names and ranks of process groups have no public table",
    ),
    *_of(
        "torch",
        "torch.distributed.distributed_c10d",
        "_abort_process_group",
        "groups that are aborted must be noticed as groups that are destroyed are",
    ),
    *_of(
        "torch", "torch._C", "_distributed_c10d", "classes of stores and groups that torch.distributed hides"
    ),
    *_of(
        "torch",
        "torch._C._distributed_c10d",
        "FakeProcessGroup._create_internal",
        "an estimate needs a group of many ranks in one process",
    ),
    *_of(
        "torch",
        "torch.testing",
        "_internal",
        "an estimate needs torch's store of a fake process group",
    ),
    *_of(
        "torch",
        "torch.nn.parallel.distributed",
        "_DDPSink",
        "the node of the autograd graph is known by the name of its function only",
    ),
    *_of(
        "torch",
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._comm_hooks DistributedDataParallel._static_graph_delay_allreduce_enqueued",
        "the wrapper has no public record of how and when it averages gradients",
    ),
    *_of(
        "torch",
        "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",
        "_reducer_allreduce_and_upcast_hook",
        "the hook of mixed precision, which averages gradients",
    ),
    *_of(
        "torch",
        "torch.distributed.algorithms",
        "_comm_hooks",
        "the module of FullyShardedDataParallel's communication hooks",
    ),
    *_of("torch", "torch.distributed", "_composable", "the module of replicate(), which is refused"),
)

TORCH_SHARDING_SYMBOLS = (
    *_of(
        "torch",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel._flat_param",
        _FSDP_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel._fsdp_wrapped_module",
        "the module inside a wrapper is part of parameter names",
        assigned_in="torch.distributed.fsdp._common_utils",
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._common_utils",
        "_FSDPState._handle _FSDPState._use_orig_params _FSDPState._comm_hook _FSDPState._comm_hook_state "
        "_FSDPState._device_mesh",
        _FSDP_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._common_utils",
        "_FSDPState._inter_node_pg",
        "the group over replicas of hybrid sharding has no public name",
        assigned_in="torch.distributed.fsdp._init_utils",
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._flat_param",
        "FlatParameter._local_shard FlatParameter._fqns",
        _FSDP_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "FSDPModule._get_fsdp_state",
        _FSDP2_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState._fsdp_param_group FSDPState._fsdp_param_groups FSDPState._training_state",
        _FSDP2_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "FSDPParam._unsharded_param",
        "the full parameter between its gathering and its release",
    ),
    *_of(
        "torch",
        "torch.distributed.tensor.parallel.ddp",
        "Tensor._st_info",
        "marks a local tensor that DistributedDataParallel made of a DTensor",
    ),
    *_of(
        "torch",
        "torch.distributed.tensor.placement_types",
        "_StridedShard",
        "a placement that DTensors have after tensor parallelism and fully_shard()",
    ),
    *_of(
        "torch",
        "torch.distributed.tensor._api",
        "_ToTorchTensor _FromTorchTensor",
        "the node of the autograd graph is known by the name of its function only",
    ),
    *_of(
        "torch",
        "torch.distributed.device_mesh",
        "DeviceMesh._get_root_mesh _mesh_resources",
        "the mesh that a mesh was sliced from has no public name",
    ),
)

TORCH_PIPELINE_SYMBOLS = (
    *_of(
        "torch",
        "torch.distributed.pipelining.schedules",
        "_PipelineSchedule PipelineScheduleSingle._initialize_stage PipelineScheduleMulti._initialize_stages "
        "PipelineScheduleSingle._stage PipelineScheduleMulti._stages _PipelineSchedule._n_microbatches "
        "_PipelineSchedule._loss_fn _PipelineSchedule._has_backward "
        "PipelineScheduleSingle._stage_forward_initialized "
        "PipelineScheduleSingle._stage_backward_initialized "
        "PipelineScheduleMulti._stages_forward_initialized "
        "PipelineScheduleMulti._stages_backward_initialized",
        _SCHEDULE_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase _PipelineStageBase._stage_meta",
        _SCHEDULE_REASON,
    ),
    *_of(
        "torch",
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase.forward_one_chunk _PipelineStageBase.backward_one_chunk "
        "_PipelineStageBase.forward_maybe_with_nosync",
        "undocumented: where a schedule runs a microbatch of a stage",
    ),
)

PYTHON_SYMBOLS = (
    *_of(
        "python",
        "argparse",
        "ArgumentParser._actions ArgumentParser._option_string_actions",
        "argparse does not list the arguments of a parser",
    ),
)

UPSTREAM_SYMBOLS = (
    *MEGATRON_SYMBOLS,
    *FAIRSCALE_SYMBOLS,
    *APEX_SYMBOLS,
    *DEEPSPEED_SYMBOLS,
    *HUGGINGFACE_SYMBOLS,
    *TORCH_MODULE_SYMBOLS,
    *TORCH_TENSOR_SYMBOLS,
    *TORCH_DISTRIBUTED_SYMBOLS,
    *TORCH_SHARDING_SYMBOLS,
    *TORCH_PIPELINE_SYMBOLS,
    *PYTHON_SYMBOLS,
)
