"""Which framework built a model: all finders are asked, and what they say is kept in words."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import offloaded, pipelining, plain, transformers_tp
from megatron_flex.adapters.base import Adapter, Part
from megatron_flex.adapters.adapter_registry import Found, FinderEntry, AxisSizes, finder_entries
from megatron_flex.adapters.versions import Version, check_versions, version_of
from megatron_flex.errors import FlexError, FlexWarning


@dataclass(frozen=True)
class SearchResult:
    """What all finders said of a model.

    Attributes:
        found: the framework.
        versions: of what the model is made of, as far as there is a tested range.
        others: the other finders, and what they said.
    """

    found: Found
    versions: tuple[Version, ...]
    others: tuple[Part, ...]


class FinderClaim(NamedTuple):
    """What a finder says of a model that is its framework's, and before whom it comes."""

    known: FinderEntry
    found: Found
    before: tuple[str, ...]

    def beats(self, other: FinderClaim) -> bool:
        """Whether the model is this one's though the other claims it."""
        return other is not self and not {other.known.name, other.found.name}.isdisjoint(self.before)


def search_frameworks(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None) -> SearchResult:
    """Ask every finder about a model; a model of none is taken as a plain one. Nothing is communicated.

    A finder of another package that fails does no harm to a model that another framework claims, or that
    one process has all of: it is told as a warning. A model of several ranks that nobody claims might be its
    framework's, whose shards would pass for the whole.

    Raises:
        FlexError: two frameworks claim it; or nobody does, there are several ranks, and a finder failed.
    """
    if isinstance(chunks, pipelining.StageModules):
        return _search_stages(chunks, axis_sizes, process_group)
    claims: list[FinderClaim] = []
    others: list[Part] = []
    failed: list[str] = []
    for known in finder_entries():
        if known.package and known.package not in sys.modules:
            others.append(Part(known.name, f"not asked: {known.package} is not imported"))
            continue
        try:
            claim = _ask_finder(known, chunks, axis_sizes, process_group)
        except FlexError:
            raise
        except Exception as error:  # somebody else's code: told by name below, as a warning or an error
            if not known.origin:
                raise
            failed.append(f"adapter {known.name!r} ({known.origin}) failed: {type(error).__name__}: {error}")
            others.append(Part(known.name, failed[-1]))
            continue
        if claim is None:
            others.append(Part(known.name, "it claims nothing here"))
        else:
            claims.append(claim)
    left = _winning_claims(claims)
    others += [Part(c.found.name, f"it gives way to {left[0].found.name}") for c in claims if c not in left]
    several = _has_several_ranks(process_group)
    if failed and several and all(c.found.around for c in left):
        raise FlexError(
            f"no framework claims this model, and one could not be asked: {'; '.join(failed)}; mend or "
            "uninstall it, or set FLEX_ADAPTERS_OFF to its name, so that shards are not taken for the whole"
        )
    why = "no framework's parallel modules are in it"
    none = Found("plain", why, lambda: plain.make_plain_adapter(chunks, axis_sizes, process_group))
    found = left[0].found if left else none
    found = found if several else replace(found, alone=True)
    for text in failed:
        warnings.warn(f"{text}; mend or uninstall it, or set FLEX_ADAPTERS_OFF", FlexWarning, stacklevel=3)
    return SearchResult(found, _versions_in(chunks, left), tuple(others))


def _ask_finder(known: FinderEntry, chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> FinderClaim | None:
    """What one finder says."""
    finder = known.get()
    found = cast(Any, finder(chunks, axis_sizes, process_group))
    if found is None:
        return None
    if not isinstance(found, Found):
        raise TypeError(f"it returned a {type(found).__name__}, and must return a Found or None")
    return FinderClaim(known, found, known.before or tuple(getattr(finder, "before", ())))


def _winning_claims(claims: list[FinderClaim]) -> list[FinderClaim]:
    """The one claim that counts; none if there is none.

    Raises:
        FlexError: there are several.
    """
    inside = [c for c in claims if not c.found.around]
    left = [c for c in inside if not any(other.beats(c) for other in inside)]
    if len(left) == 1 or not inside:
        return left or claims[:1]
    claimants = "; ".join(
        f"{c.found.name} ({c.known.origin or 'built in'}), because {c.found.why}" for c in inside
    )
    raise FlexError(
        f"several frameworks claim this model: {claimants}; give FlexModel the part of one of them, or let one "
        "adapter come `before` the other"
    )


def _has_several_ranks(process_group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def _versions_in(chunks: list[nn.Module], claims: list[FinderClaim]) -> tuple[Version, ...]:
    """Of the framework that claims a model, and of those in it that layouts or parameters hang on."""
    packages = [c.known.package.partition(".")[0] for c in claims if c.known.package]
    modules = [m for chunk in chunks for m in chunk.modules()]
    for kind in {kind for m in modules for kind in type(m).__mro__}:
        package, _, rest = kind.__module__.partition(".")
        own = package == "torch" and rest.startswith("distributed.")
        if package in ("fairscale", "deepspeed", "apex") or own:
            packages.append(package)
    if any(transformers_tp.transformers_style_of(m) is not None for m in modules):
        packages.append("transformers")
    if any(map(offloaded.is_offloaded, chunks)):
        packages.append("accelerate")
    found = (version_of(p) for p in dict.fromkeys(sorted(packages)))
    return tuple(version for version in found if version is not None)


def find_framework(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None) -> Found:
    """Say which framework built a model; a model of none is taken as a plain one.

    Raises:
        FlexError: two frameworks claim it, one could not be asked and nobody claims it, or a framework is of
            a version that no test has run on.
    """
    done = search_frameworks(chunks, axis_sizes, process_group)
    check_versions(done.versions)
    return done.found


def _search_stages(chunks: pipelining.StageModules, axis_sizes: AxisSizes, process_group: Any) -> SearchResult:
    """What is found in a pipeline's stages, under their schedule."""

    def adapter_of(modules: list[nn.Module], sizes: AxisSizes) -> Adapter:
        return find_framework(modules, sizes, process_group).make()

    inner = search_frameworks(list(chunks[:1]), axis_sizes, process_group)
    name = "pytorch" if inner.found.name == "plain" else inner.found.name
    why = (
        f"a {type(chunks.schedule).__name__} of torch.distributed.pipelining runs its stages, and of these: "
    )
    made = Found(name, why + inner.found.why, lambda: pipelining.make_pipeline_adapter(chunks, axis_sizes, adapter_of))
    return SearchResult(made, inner.versions, inner.others)
