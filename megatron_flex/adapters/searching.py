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
from megatron_flex.adapters.registry import Found, Known, Said, known_adapters
from megatron_flex.adapters.versions import Version, check_versions, version_of
from megatron_flex.errors import FlexError, FlexWarning


@dataclass(frozen=True)
class Search:
    """What all finders said of a model.

    Attributes:
        found: the framework.
        versions: of what the model is made of, as far as there is a tested range.
        others: the other finders, and what they said.
    """

    found: Found
    versions: tuple[Version, ...]
    others: tuple[Part, ...]


class Claim(NamedTuple):
    """What a finder says of a model that is its framework's, and before whom it comes."""

    known: Known
    found: Found
    before: tuple[str, ...]

    def beats(self, other: Claim) -> bool:
        """Whether the model is this one's though the other claims it."""
        return other is not self and not {other.known.name, other.found.name}.isdisjoint(self.before)


def search(chunks: list[nn.Module], said: Said, process_group: Any = None) -> Search:
    """Ask every finder about a model; a model of none is taken as a plain one. Nothing is communicated.

    A finder of another package that fails does no harm to a model that another framework claims, or that
    one process has all of: it is told as a warning. A model of several ranks that nobody claims might be its
    framework's, whose shards would pass for the whole.

    Raises:
        FlexError: two frameworks claim it; or nobody does, there are several ranks, and a finder failed.
    """
    if isinstance(chunks, pipelining.Stages):
        return _staged(chunks, said, process_group)
    claims: list[Claim] = []
    others: list[Part] = []
    failed: list[str] = []
    for known in known_adapters():
        if known.package and known.package not in sys.modules:
            others.append(Part(known.name, f"not asked: {known.package} is not imported"))
            continue
        try:
            claim = _asked(known, chunks, said, process_group)
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
    left = _left(claims)
    others += [Part(c.found.name, f"it gives way to {left[0].found.name}") for c in claims if c not in left]
    several = _several_ranks(process_group)
    if failed and several and all(c.found.around for c in left):
        raise FlexError(
            f"no framework claims this model, and one could not be asked: {'; '.join(failed)}; mend or "
            "uninstall it, or set FLEX_ADAPTERS_OFF to its name, so that shards are not taken for the whole"
        )
    why = "no framework's parallel modules are in it"
    none = Found("plain", why, lambda: plain.take(chunks, said, process_group))
    found = left[0].found if left else none
    found = found if several else replace(found, alone=True)
    for text in failed:
        warnings.warn(f"{text}; mend or uninstall it, or set FLEX_ADAPTERS_OFF", FlexWarning, stacklevel=3)
    return Search(found, _versions(chunks, left), tuple(others))


def _asked(known: Known, chunks: list[nn.Module], said: Said, process_group: Any) -> Claim | None:
    """What one finder says."""
    finder = known.get()
    found = cast(Any, finder(chunks, said, process_group))
    if found is None:
        return None
    if not isinstance(found, Found):
        raise TypeError(f"it returned a {type(found).__name__}, and must return a Found or None")
    return Claim(known, found, known.before or tuple(getattr(finder, "before", ())))


def _left(claims: list[Claim]) -> list[Claim]:
    """The one claim that counts; none if there is none.

    Raises:
        FlexError: there are several.
    """
    inside = [c for c in claims if not c.found.around]
    left = [c for c in inside if not any(other.beats(c) for other in inside)]
    if len(left) == 1 or not inside:
        return left or claims[:1]
    told = "; ".join(
        f"{c.found.name} ({c.known.origin or 'built in'}), because {c.found.why}" for c in inside
    )
    raise FlexError(
        f"several frameworks claim this model: {told}; give FlexModel the part of one of them, or let one "
        "adapter come `before` the other"
    )


def _several_ranks(process_group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


def _versions(chunks: list[nn.Module], claims: list[Claim]) -> tuple[Version, ...]:
    """Of the framework that claims a model, and of those in it that layouts or parameters hang on."""
    packages = [c.known.package.partition(".")[0] for c in claims if c.known.package]
    modules = [m for chunk in chunks for m in chunk.modules()]
    for kind in {kind for m in modules for kind in type(m).__mro__}:
        package, _, rest = kind.__module__.partition(".")
        own = package == "torch" and rest.startswith("distributed.")
        if package in ("fairscale", "deepspeed", "apex") or own:
            packages.append(package)
    if any(transformers_tp.style_of(m) is not None for m in modules):
        packages.append("transformers")
    if any(map(offloaded.is_offloaded, chunks)):
        packages.append("accelerate")
    found = (version_of(p) for p in dict.fromkeys(sorted(packages)))
    return tuple(version for version in found if version is not None)


def find(chunks: list[nn.Module], said: Said, process_group: Any = None) -> Found:
    """Say which framework built a model; a model of none is taken as a plain one.

    Raises:
        FlexError: two frameworks claim it, one could not be asked and nobody claims it, or a framework is of
            a version that no test has run on.
    """
    done = search(chunks, said, process_group)
    check_versions(done.versions)
    return done.found


def _staged(chunks: pipelining.Stages, said: Said, process_group: Any) -> Search:
    """What is found in a pipeline's stages, under their schedule."""

    def adapter_of(modules: list[nn.Module], sizes: Said) -> Adapter:
        return find(modules, sizes, process_group).make()

    inner = search(list(chunks[:1]), said, process_group)
    name = "pytorch" if inner.found.name == "plain" else inner.found.name
    why = (
        f"a {type(chunks.schedule).__name__} of torch.distributed.pipelining runs its stages, and of these: "
    )
    made = Found(name, why + inner.found.why, lambda: pipelining.take(chunks, said, adapter_of))
    return Search(made, inner.versions, inner.others)
