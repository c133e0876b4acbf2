"""Megatron's arguments from a file, a mapping or flags; Megatron itself derives and validates the others."""

from __future__ import annotations

import argparse
import json
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
        raise FlexError(f"flags: {message}; `pretrain_gpt.py --help` lists what Megatron takes")


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
    args, world = (
        _parse_flags(parser, config) if _is_flags(config) else _parse_mapping(parser, _read_config(config))
    )
    more = {AXIS_ARGUMENTS.get(n, n): v for n, v in changes.items() if v is not None}
    for name in LAUNCHER_ARGUMENTS:
        world[name] = more.pop(name, world.get(name))
    _set_arguments(parser, args, more)
    _complete_arguments(args, world)
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
    return parser


def _is_flags(config: RunConfig) -> bool:
    return isinstance(config, Sequence) and not isinstance(config, str)


def _parse_flags(parser: argparse.ArgumentParser, config: Any) -> tuple[argparse.Namespace, dict[str, Any]]:
    own = _RaisingParser(add_help=False, allow_abbrev=False)
    for name in LAUNCHER_ARGUMENTS:
        own.add_argument("--" + name.replace("_", "-"), type=int)
    found, rest = own.parse_known_args([str(word) for word in config])
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        known = [o for a in parser._actions for o in a.option_strings]
        raise FlexError(f"Megatron has no flag {unknown[0]!r}{suggest_nearest(unknown[0], known)}")
    return args, vars(found)


def _read_config(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FlexError(f"{path}: {error.strerror}; give a YAML or JSON file of arguments") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except ValueError as error:
        raise FlexError(f"{path}: no JSON or YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise FlexError(f"{path} holds a {type(found).__name__}; it must map argument names to values")
    return found


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _parse_mapping(
    parser: argparse.ArgumentParser, config: Mapping[str, Any]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    args = parser.parse_args([])
    named = {str(n).replace("-", "_"): v for n, v in config.items()}
    world = {name: named.pop(name, None) for name in LAUNCHER_ARGUMENTS}
    _set_arguments(parser, args, named)
    return args, world


def _set_arguments(
    parser: argparse.ArgumentParser, args: argparse.Namespace, values: Mapping[str, Any]
) -> None:
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    for given, value in values.items():
        name = ARGUMENT_ALIASES.get(given, given)
        negating = _find_negating_flag(parser, name)
        if name not in actions and negating is None:
            known = [*actions, *ARGUMENT_ALIASES, *LAUNCHER_ARGUMENTS]
            raise FlexError(f"Megatron has no argument {given!r}{suggest_nearest(given, known)}")
        if negating is not None:
            setattr(args, negating.dest, negating.const if value else args.__dict__[negating.dest])
        else:
            setattr(args, name, _convert_value(actions[name], given, value))


def _find_negating_flag(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """The flag of that name that sets another argument: `no_rope_fusion`, `disable_bias_linear`."""
    flag = parser._option_string_actions.get("--" + name.replace("_", "-"))
    return flag if flag is not None and flag.dest != name and flag.nargs == 0 else None


def _convert_value(actions: list[argparse.Action], name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        wants = all(a.nargs == 0 for a in actions)
        if value is None or wants or any(a.type in (bool, None) for a in actions):
            return value
    action = next((a for a in actions if a.nargs != 0), actions[0])
    if action.nargs == 0:
        raise FlexError(f"{name}={value!r}: it is a switch; give true or false")
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        made = [action.type(str(v)) if callable(action.type) else v for v in items]
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise FlexError(f"{name}={value!r}: {error}") from error
    wrong = [v for v in made if action.choices is not None and v not in action.choices]
    if wrong:
        raise FlexError(f"{name}={wrong[0]!r} is not one of {', '.join(map(str, action.choices or ()))}")
    return made if action.nargs not in (None, "?") else made[0]


def _complete_arguments(args: argparse.Namespace, world: Mapping[str, Any]) -> None:
    """Set the arguments of a launcher and a run: the number of ranks, and switches that require a GPU."""
    _check_sizes(args)
    inner = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    replicas, ranks = world["data_parallel_size"], world["world_size"]
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
    """Validate the rules that are violated most often; Megatron validates the others.

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
