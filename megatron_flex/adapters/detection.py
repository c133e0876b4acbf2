"""Detection of the framework that built a model, its version, and the reason, from the answers of all
finders.

Unknown wrappers and layers hide names, flatten parameters or reduce gradients in their own ways: a model
with one of them must not be treated as plain, and is refused. So is a framework whose version is outside
of the tested range.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from megatron_flex.adapters import huggingface, pipelining, pytorch
from megatron_flex.adapters.adapter_base import Adapter, AxisSizes, FrameworkMatch, Part
from megatron_flex.adapters.adapter_registry import FinderEntry, finder_entries
from megatron_flex.adapters.module_walk import shared_walk, walk_modules
from megatron_flex.adapters.pipelining import list_model_chunks
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, FlexWarning

Release = tuple[int, ...]


@dataclass(frozen=True)
class TestedRange:
    """The versions of one framework that are tested.

    Attributes:
        distribution: its name on the package index.
        module: its import name; `__version__` is read there.
        first: the lowest version.
        below: the lowest version that is too new.
    """

    distribution: str
    module: str
    first: str
    below: str


# By the package of a model's classes. torch, transformers and accelerate only where layouts or
# parameters depend on undocumented properties: FSDP, DTensors, parallel styles, offloaded weights.
TESTED_RANGES = {
    "megatron": TestedRange("megatron-core", "megatron.core", "0.12.3", "0.20"),
    "fairscale": TestedRange("fairscale", "fairscale", "0.4.13", "0.5"),
    "apex": TestedRange("apex", "apex", "0.1", "0.2"),
    "torch": TestedRange("torch", "torch", "2.13", "2.15"),
    "deepspeed": TestedRange("deepspeed", "deepspeed", "0.19", "0.20"),
    "transformers": TestedRange("transformers", "transformers", "5.23", "5.24"),
    "accelerate": TestedRange("accelerate", "accelerate", "1.15", "1.16"),
}


@dataclass(frozen=True)
class Version:
    """The version of a framework that is imported.

    Attributes:
        tested: the range.
        text: the version string; empty if there is none, as in a vendored copy.
    """

    tested: TestedRange
    text: str

    @property
    def inside(self) -> bool | None:
        """Whether it is in the tested range; None where there is no version.

        Local and post-release suffixes (`+cu130`, `.post1`) are ignored.
        """
        release = parse_release(self.text)
        if not release:
            return None
        return parse_release(self.tested.first) <= release < parse_release(self.tested.below)

    @property
    def early(self) -> bool:
        """Whether it is a pre-release of the first version above the range, as development branches are."""
        numbers = re.sub(r"[^\d.].*", "", self.text)
        return parse_release(numbers) == parse_release(self.tested.below) and bool(
            re.match(r"\.?(a|b|rc|dev)\d*", self.text[len(numbers.rstrip(".")) :])
        )

    def __str__(self) -> str:
        tested = f"{self.tested.first} to below {self.tested.below}"
        if self.inside is None:
            return f"{self.tested.distribution} of no known version (tested: {tested})"
        word = "inside" if self.inside else "outside"
        return f"{self.tested.distribution} {self.text}, {word} the tested range {tested}"


def parse_release(text: str) -> Release:
    """The numbers of a release, without zeros at the end; empty if there are none."""
    matched = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", text.strip())
    numbers = [int(n) for n in matched[1].split(".")] if matched else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def version_of(package: str) -> Version | None:
    """The version of a package; None if it is not one of the frameworks, or not imported."""
    tested = TESTED_RANGES.get(package)
    module = sys.modules.get(tested.module) if tested else None
    if tested is None or module is None:
        return None
    return Version(tested, str(getattr(module, "__version__", "") or ""))


def check_versions(versions: tuple[Version, ...]) -> None:
    """Refuse untested versions. A package without a version, such as a fork, is accepted.

    A pre-release right after the range raises a warning: it may differ from the tested version.

    Raises:
        FlexError: one is outside the tested range, and FLEX_UNTESTED is not set.
    """
    for version in versions:
        if version.inside is not False:
            continue
        tested = version.tested
        if not flex_config.untested and not version.early:
            raise FlexError(
                f"{version}: layouts there may differ from those known here, so that a shard could pass for "
                f"the full tensor; install {tested.distribution}>={tested.first},<{tested.below}, or set "
                "FLEX_UNTESTED=1 (megatron_flex.config.flex_config.untested = True) to continue, and call "
                "verify()"
            )
        warnings.warn(f"{version}; continuing: call verify() to check it", FlexWarning, stacklevel=2)


USE_TORCHS = "use torch's DistributedDataParallel, or fairscale's ShardedDataParallel with OSS"
USE_FULLY_SHARD = "use torch's fully_shard or FullyShardedDataParallel"
USE_PIPE = "use fairscale's Pipe in one process, or torch.distributed.pipelining"


class UnsupportedClass(NamedTuple):
    """A class that is refused.

    Attributes:
        package: its package.
        why: what it does.
        instead: what the user can do.
    """

    package: str
    why: str
    instead: str


UNSUPPORTED = {
    "FullyShardedDataParallel": UnsupportedClass(
        "fairscale",
        "which does not run without a GPU (`KeyError: 'all_gather'` in its forward: it makes streams only "
        "there), and whose parameters nothing here puts together",
        USE_FULLY_SHARD,
    ),
    "FlattenParamsWrapper": UnsupportedClass(
        "fairscale", "which keeps parameters in flat ones, without their names", "give the module without it"
    ),
    "MOELayer": UnsupportedClass(
        "fairscale",
        "whose experts differ between ranks, and no rule describes how they are sharded",
        "give the part of the model without it",
    ),
    "SlowMoDistributedDataParallel": UnsupportedClass(
        "fairscale", "whose replicas have parameters of their own between its synchronizations", USE_TORCHS
    ),
    "OffloadModel": UnsupportedClass(
        "fairscale",
        "which runs copies of the layers shard by shard, with gradients that it makes itself",
        "give the module that it was made of, or use accelerate's device_map",
    ),
    "AsyncPipe": UnsupportedClass("fairscale", "whose ranks call their partitions by messages", USE_PIPE),
    "PipeRPCWrapper": UnsupportedClass(
        "fairscale", "whose partitions run in other processes by RPC", USE_PIPE
    ),
    "DistributedPipeline": UnsupportedClass(
        "fairscale", "whose partitions run in other processes by RPC", USE_PIPE
    ),
    "DistributedDataParallel": UnsupportedClass(
        "apex", "which averages gradients in ways that no test has run", "use torch's DistributedDataParallel"
    ),
    "DDP": UnsupportedClass(
        "torch.distributed._composable.replicate",
        "which replicate() has made, and which averages gradients in hooks of its own",
        "use DistributedDataParallel around the module",
    ),
}


def why_unsupported(module: nn.Module) -> str:
    """Why a model with this module in it cannot be hooked, and what to do; empty if it can."""
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        return (
            f"torch's DataParallel over devices {module.device_ids}, which runs copies of the model in "
            "threads; use DistributedDataParallel, with a process for each device"
        )
    for base in type(module).__mro__:
        unsupported = UNSUPPORTED.get(base.__name__)
        if unsupported is not None and f"{base.__module__}.".startswith(f"{unsupported.package}."):
            package = unsupported.package.partition(".")[0]
            return f"a {base.__name__} of {package}'s, {unsupported.why}; {unsupported.instead}"
    return ""


def refuse_unsupported(chunks: Any) -> None:
    """Refuse a model that holds a module that cannot be hooked, at any depth. Nothing is communicated.

    Raises:
        FlexError: a module cannot be hooked; the message says where it is.
    """
    for chunk in chunks:
        walk = walk_modules(chunk)
        # One module of each class is enough, but for DataParallel, where the number of devices decides.
        suspects = (
            m for kind, m in walk.classes.items() if issubclass(kind, DataParallel) or why_unsupported(m)
        )
        if next(suspects, None) is None:
            continue
        for name, module in chunk.named_modules():
            if why := why_unsupported(module):
                where = f"at {name!r} " if name else ""
                raise FlexError(f"the model holds {where}{why}")


@dataclass(frozen=True)
class SearchResult:
    """The answers of all finders about a model.

    Attributes:
        framework: the detected framework.
        versions: versions of the model's frameworks that have a tested range.
        others: the other finders, and their answers.
    """

    framework: FrameworkMatch
    versions: tuple[Version, ...]
    others: tuple[Part, ...]


class FinderClaim(NamedTuple):
    """The answer of a finder about a model of its framework, and its priority."""

    known: FinderEntry
    framework: FrameworkMatch
    before: tuple[str, ...]

    def beats(self, other: FinderClaim) -> bool:
        """Whether this claim has priority over the other."""
        return other is not self and not {other.known.name, other.framework.name}.isdisjoint(self.before)


def search_frameworks(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None
) -> SearchResult:
    """Ask every finder about a model; a model of none is a plain module. Nothing is communicated.

    A failing finder of another package only causes a warning if another framework claims the model, or if
    one process has all of it. An unclaimed model of several ranks might belong to its framework, and its
    shards would be treated as full tensors.

    Raises:
        FlexError: it contains an unsupported class; two frameworks claim it; or none does, there are several
            ranks, and a finder failed.
    """
    if isinstance(chunks, pipelining.StageModules):
        return _search_stages(chunks, axis_sizes, process_group)
    with shared_walk():
        return _ask_finders(chunks, axis_sizes, process_group)


def _ask_finders(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> SearchResult:
    refuse_unsupported(chunks)
    claims: list[FinderClaim] = []
    others: list[Part] = []
    failed: list[str] = []
    for known in finder_entries():
        if known.package and known.package not in sys.modules:
            others.append(Part(known.name, f"not checked: {known.package} is not imported"))
            continue
        try:
            claim = _ask_finder(known, chunks, axis_sizes, process_group)
        except FlexError:
            raise
        except Exception as error:  # third-party code may raise anything: reported by name below
            if not known.origin:
                raise
            failed.append(f"adapter {known.name!r} ({known.origin}) failed: {type(error).__name__}: {error}")
            others.append(Part(known.name, failed[-1]))
            continue
        if claim is None:
            others.append(Part(known.name, "does not recognize this model"))
        else:
            claims.append(claim)
    winning = _winning_claims(claims)
    others += [
        Part(c.framework.name, f"it gives way to {winning[0].framework.name}")
        for c in claims
        if c not in winning
    ]
    several = _has_several_ranks(process_group)
    if failed and several and all(c.framework.around for c in winning):
        raise FlexError(
            f"no framework claims this model, and an adapter failed: {'; '.join(failed)}; repair or "
            "uninstall it, or set FLEX_ADAPTERS_OFF to its name (shards could be mistaken for full tensors)"
        )
    none = FrameworkMatch(
        "plain",
        pytorch.why_plain(chunks),
        lambda: pytorch.make_plain_adapter(chunks, axis_sizes, process_group),
    )
    framework = winning[0].framework if winning else none
    framework = framework if several else replace(framework, alone=True)
    for text in failed:
        warnings.warn(f"{text}; repair or uninstall it, or set FLEX_ADAPTERS_OFF", FlexWarning, stacklevel=3)
    return SearchResult(framework, _versions_in(chunks, winning), tuple(others))


def _ask_finder(
    known: FinderEntry, chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any
) -> FinderClaim | None:
    finder = known.get()
    framework = cast(Any, finder(chunks, axis_sizes, process_group))
    if framework is None:
        return None
    if not isinstance(framework, FrameworkMatch):
        raise TypeError(f"it returned a {type(framework).__name__}, and must return a FrameworkMatch or None")
    return FinderClaim(known, framework, known.before or tuple(getattr(finder, "before", ())))


def _winning_claims(claims: list[FinderClaim]) -> list[FinderClaim]:
    """The claim with priority; None if there is none.

    Raises:
        FlexError: there are several.
    """
    inside = [c for c in claims if not c.framework.around]
    winning = [c for c in inside if not any(other.beats(c) for other in inside)]
    if len(winning) == 1 or not inside:
        return winning or claims[:1]
    claimants = "; ".join(
        f"{c.framework.name} ({c.known.origin or 'built in'}), because {c.framework.why}" for c in inside
    )
    raise FlexError(
        f"several frameworks claim this model: {claimants}; give FlexModel the part of one of them, or let "
        "one adapter come `before` the other"
    )


def _has_several_ranks(process_group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def _versions_in(chunks: list[nn.Module], claims: list[FinderClaim]) -> tuple[Version, ...]:
    """Versions of the framework that claims a model, and of those that layouts or parameters depend on."""
    packages = [c.known.package.partition(".")[0] for c in claims if c.known.package]
    walks = [walk_modules(chunk) for chunk in chunks]
    for base in {base for walk in walks for kind in walk.classes for base in kind.__mro__}:
        package, _, rest = base.__module__.partition(".")
        from_torch = package == "torch" and rest.startswith("distributed.")
        if package in ("fairscale", "deepspeed", "apex") or from_torch:
            packages.append(package)
    replaced = (m for walk in walks for m in walk.with_own_forward)
    if any(huggingface.transformers_style_of(m) is not None for m in replaced):
        packages.append("transformers")
    if any(map(huggingface.is_offloaded, chunks)):
        packages.append("accelerate")
    versions = (version_of(p) for p in dict.fromkeys(sorted(packages)))
    return tuple(version for version in versions if version is not None)


def find_framework(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None
) -> FrameworkMatch:
    """Detect which framework built a model; a model of none is a plain module.

    Raises:
        FlexError: two frameworks claim it, a finder failed and no framework claims it, or a framework has an
            untested version.
    """
    done = search_frameworks(chunks, axis_sizes, process_group)
    check_versions(done.versions)
    return done.framework


def _search_stages(
    chunks: pipelining.StageModules, axis_sizes: AxisSizes, process_group: Any
) -> SearchResult:
    """The answer for a pipeline's stages and their schedule."""

    def adapter_of(modules: list[nn.Module], sizes: AxisSizes) -> Adapter:
        return find_framework(modules, sizes, process_group).make()

    inner = search_frameworks(list(chunks[:1]), axis_sizes, process_group)
    name = "pytorch" if inner.framework.name == "plain" else inner.framework.name
    why = (
        f"a {type(chunks.schedule).__name__} of torch.distributed.pipelining runs its stages, and of these: "
    )
    pipeline = FrameworkMatch(
        name,
        why + inner.framework.why,
        lambda: pipelining.make_pipeline_adapter(chunks, axis_sizes, adapter_of),
    )
    return SearchResult(pipeline, inner.versions, inner.others)


ASK_TOGETHER = "only all ranks together can tell: call detect(model, everywhere=True) on each"


@dataclass(frozen=True)
class Detection:
    """The result of `detect`. Its string is a short text.

    Attributes:
        framework: the framework that built the model; `plain` if none did.
        why: the evidence in the model, as text.
        parts: components in or around the model: parameter storage, caller; None where detecting them
            needs all ranks together.
        mesh: the axes of the run, such as `tp=2 x pp=2`; None likewise.
        versions: of the frameworks in the model.
        others: the other adapters, and the answer of each.

    Examples:
        >>> print(detect(chunks))
        megatron-core: it is a GPTModel of Megatron's
          mesh: one rank
        ...
    """

    framework: str
    why: str
    parts: tuple[Part, ...] | None
    mesh: str | None
    versions: tuple[Version, ...]
    others: tuple[Part, ...]

    def __str__(self) -> str:
        lines = [f"{self.framework}: {self.why}", f"  mesh: {self.mesh or ASK_TOGETHER}"]
        lines += [f"  with {part.name}: {part.why}" for part in self.parts or ()]
        lines += [f"  version: {version}" for version in self.versions]
        lines += [f"  not {part.name}: {part.why}" for part in self.others]
        return "\n".join(lines)


def detect(
    model: Any,
    *,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    process_group: Any = None,
    everywhere: bool = False,
) -> Detection:
    """Detect the frameworks of a model, with the reasons; nothing is changed.

    Args:
        model: the model or the list of its virtual pipeline chunks, bare or wrapped; or the schedule of
            torch.distributed.pipelining that runs it.
        tensor_parallel_size: as for FlexModel; likewise the next three.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.
        process_group: likewise.
        everywhere: every rank calls this, as for FlexModel. Otherwise a single rank may call it, and mesh and
            parts are included only if they need no communication.

    Returns:
        The detection, whose string is a short text.

    Raises:
        FlexError: two frameworks claim the model; or, where the mesh is included, it cannot be hooked.

    Examples:
        >>> detection = detect(chunks)
        >>> detection.framework, detection.mesh
        ('megatron-core', 'one rank')
    """
    chunks = list_model_chunks(model)
    axis_sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
    done = search_frameworks(chunks, axis_sizes, process_group)
    parts, mesh = None, None
    if everywhere or done.framework.alone:
        adapter = done.framework.make()
        parts, mesh = tuple(adapter.parts()), adapter.mesh.describe()
    return Detection(done.framework.name, done.framework.why, parts, mesh, done.versions, done.others)
