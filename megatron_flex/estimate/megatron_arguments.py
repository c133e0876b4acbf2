"""Megatron's arguments from a file, a mapping or flags; Megatron itself derives and validates the others."""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.ranges import check_count

RunConfig = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]

# From names of TransformerConfig to the names of Megatron's arguments.
ARGUMENT_ALIASES = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
LAUNCHER_ARGUMENTS = ("world_size", "data_parallel_size")  # not flags, because the launcher sets them
AXIS_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


class _RaisingParser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise FlexError(f"{message}; `pretrain_gpt.py --help` lists what Megatron takes")


MAX_COUNT = 1 << 24  # ranks or tokens; an estimate holds numbers for each of them


def parse_arguments(config: RunConfig, changes: Mapping[str, Any]) -> argparse.Namespace:
    """Megatron's arguments, validated by Megatron.

    Args:
        config: a YAML or JSON file, a mapping, or a list of flags.
        changes: arguments that override the config's; None values are ignored.

    Raises:
        FlexError: a name that Megatron does not know, a value that it rejects, or invalid sizes.
    """
    for name, count in changes.items():
        if count is not None and check_count(name, count) > MAX_COUNT:
            raise FlexError(f"{name}={count}: at most {MAX_COUNT:,}")
    parser = _build_parser()
    if isinstance(config, Sequence) and not isinstance(config, str):
        words = [str(word) for word in config]
    else:
        words = _to_flags(parser, _read_config(config))
    words += _to_flags(parser, {AXIS_ARGUMENTS.get(name, name): value for name, value in changes.items()})
    args, unknown = parser.parse_known_args(words)  # of a flag that is given twice the last one counts
    if unknown:
        known = list(parser._option_string_actions)
        raise FlexError(f"Megatron has no flag {unknown[0]!r}{suggest_nearest(unknown[0], known)}")
    _complete_arguments(args)
    with translate_megatron_errors():
        from megatron.training.arguments import validate_args

        validate_args(args)
    args.moe_grouped_gemm = args.grouped
    return args


@contextmanager
def translate_megatron_errors() -> Iterator[None]:
    """Convert Megatron's validation errors to FlexErrors, with Megatron's message or the violated rule.

    Raises:
        FlexError: Megatron rejected the arguments.
    """
    try:
        yield
    except FlexError:
        raise
    except (AssertionError, ValueError, TypeError, RuntimeError, ImportError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        negating = str(error).strip() or f"the rule `{(frames[-1].line or '').rstrip(', ')}` does not hold"
        raise FlexError(f"Megatron refuses this configuration: {negating}") from error


def _build_parser() -> argparse.ArgumentParser:
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        raise FlexError(
            f"an estimate needs megatron.training with its argument definitions ({error}); install "
            "megatron-flex[megatron] with megatron-core 0.19"
        ) from error
    parser = _RaisingParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    for name in LAUNCHER_ARGUMENTS:
        parser.add_argument(_flag_of(name), type=int)
    return parser


def _read_config(config: Any) -> Mapping[str, Any]:
    import yaml

    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlexError(f"{path}: {error.strerror}; give a YAML or JSON file of arguments") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FlexError(f"{path}: not JSON or YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise FlexError(f"{path} holds a {type(values).__name__}; it must map argument names to values")
    return values


def _to_flags(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """The flags that set these arguments: Megatron's own parser then converts and checks the values.

    Args:
        parser: of the flags.
        values: by the name of an argument or of a flag; None leaves the default.
    """
    by_name: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        by_name.setdefault(action.dest, []).append(action)
    words: list[str] = []
    for given, value in values.items():
        name = str(given).replace("-", "_")
        name = ARGUMENT_ALIASES.get(name, name)
        flag, flags = _flag_of(name), parser._option_string_actions
        if flag not in flags and name not in by_name:
            known = [*by_name, *ARGUMENT_ALIASES]
            raise FlexError(f"Megatron has no argument {given!r}{suggest_nearest(name, known)}")
        if value is None:
            continue
        action = flags[flag] if flag in flags else by_name[name][0]
        if action.nargs == 0:
            words += _to_switch(parser, action, given, value, flag in action.option_strings)
        elif isinstance(value, (list, tuple)) and action.nargs not in (None, "?"):
            words += [action.option_strings[0], *map(str, value)]
        else:
            words.append(f"{action.option_strings[0]}={value}")
    return words


def _to_switch(
    parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any, is_flag: bool
) -> list[str]:
    """The flag that turns a switch on or off.

    Args:
        parser: of the flags.
        action: a switch that sets the argument.
        name: of the argument, for messages.
        value: for the argument, or for the flag if the name is that of a flag.
        is_flag: whether it is; that of `no_rope_fusion` is the opposite of the argument's.
    """
    if not isinstance(value, bool):
        raise FlexError(f"{name}={value!r}: it is a switch; give true or false")
    if isinstance(action, argparse.BooleanOptionalAction):
        return [action.option_strings[0 if value else -1]]
    const = (action.const if value else not action.const) if is_flag else value
    switches = [a for a in parser._actions if a.dest == action.dest and a.nargs == 0 and a.const == const]
    return [a.option_strings[0] for a in switches[:1]]  # without one the default is the other value


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _complete_arguments(args: argparse.Namespace) -> None:
    """Set the arguments of a launcher and a run: the number of ranks, and switches that require a GPU."""
    _check_sizes(args)
    inner = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas, ranks = args.data_parallel_size, args.world_size
    if ranks is None:
        ranks = inner * (replicas or _smallest_data_parallel_size(args))
    if ranks % inner or (replicas is not None and replicas * inner != ranks):
        raise FlexError(
            f"world_size={ranks} must be {inner} (tensor x pipeline x context parallel sizes) times "
            f"the data parallel size{'' if replicas is None else f' {replicas}'}; nearest: "
            f"{max(1, ranks // inner) * inner}"
        )
    inside = ranks // args.pipeline_model_parallel_size
    experts = args.expert_model_parallel_size * (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    if inside % experts:
        raise FlexError(
            f"a stage of {inside} ranks does not divide by {experts}, the expert parallel size times the "
            "expert tensor parallel size; choose sizes whose product divides it"
        )
    samples = args.micro_batch_size * (ranks // inner)
    if args.global_batch_size is not None and args.global_batch_size % samples:
        raise FlexError(
            f"global_batch_size={args.global_batch_size} must divide by {samples}, micro_batch_size times "
            f"the data parallel size; nearest: {-(-args.global_batch_size // samples) * samples}"
        )
    args.rank, args.world_size = 0, ranks
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.use_cpu_initialization, args.perform_initialization = True, False
    for name in ("gradient_accumulation_fusion", "apply_rope_fusion"):  # kernels; no tensor depends on them
        setattr(args, name, False)
    args.moe_grouped_gemm, args.grouped = False, bool(args.moe_grouped_gemm)  # validation asks for a GPU
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length


def _smallest_data_parallel_size(args: argparse.Namespace) -> int:
    """The least data parallel size that the experts' sizes allow."""
    from math import gcd

    inside = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    return int(experts // gcd(inside, experts))


def _check_sizes(args: argparse.Namespace) -> None:
    """Validate what Megatron does not, or without the value; Megatron validates the rest.

    Raises:
        FlexError: a rule is violated.
    """
    sizes = {name: getattr(args, flag) for name, flag in AXIS_ARGUMENTS.items() if name != "dp"}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise FlexError(f"{AXIS_ARGUMENTS[name]}={size}: a number of ranks, at least 1")
    for name in ("hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if not getattr(args, name) or getattr(args, name) < 1:
            raise FlexError(f"{name}={getattr(args, name)}: an estimate needs it, at least 1")
    if args.num_layers is None and args.hybrid_layer_pattern is None:
        raise FlexError("num_layers=None: an estimate needs num_layers, or a hybrid_layer_pattern")
    if args.vocab_size is None and args.padded_vocab_size is None:
        raise FlexError(
            "vocab_size=None: an estimate has no tokenizer to ask; give vocab_size or padded_vocab_size"
        )
    tp, cp = sizes["tp"], sizes["cp"]
    parts = (2 * cp if cp > 1 else 1) * (tp if args.sequence_parallel else 1)
    rules = [
        ("num_attention_heads", tp, "the tensor parallel size"),
        ("seq_length", parts, "twice the context parallel size times, if sequence parallel, the tensor one"),
        ("ffn_hidden_size", tp, "the tensor parallel size"),
        ("num_experts", sizes["ep"], "the expert parallel size"),
    ]
    if args.kv_channels is None:
        rules.append(("hidden_size", args.num_attention_heads, "num_attention_heads, or give kv_channels"))
    for name, divisor, what in rules:
        value = getattr(args, name)
        if value is not None and value % divisor:
            up = -(-value // divisor) * divisor
            raise FlexError(f"{name}={value} must divide by {divisor}, {what}; nearest: {up}")
    if args.num_query_groups and args.group_query_attention:
        groups = args.num_query_groups
        if groups % tp and tp % groups:
            raise FlexError(
                f"num_query_groups={groups} must divide by the tensor parallel size {tp}, or divide it; "
                "choose another of the two"
            )
