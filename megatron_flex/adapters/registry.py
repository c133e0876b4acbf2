"""Which framework built a model: finders are asked in order, and what they say is kept in words."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, Protocol, cast

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import pipelining, plain, pytorch
from megatron_flex.adapters.base import Adapter, Part, Undo
from megatron_flex.adapters.versions import Version, check_versions, version_of
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.knobs import knobs

GROUP = "megatron_flex.adapters"  # of the entry points by which others add finders

Said = Mapping[str, int | None]  # axis name to the size that a person gave


@dataclass(frozen=True)
class Found:
    """What a finder says of a model that is its framework's.

    Attributes:
        name: the framework's.
        why: what in the model shows it, in words.
        make: makes the adapter; called on all ranks together.
        alone: whether `make` communicates nothing, so that one rank may call it by itself.
    """

    name: str
    why: str
    make: Callable[[], Adapter]
    alone: bool = False


class Finder(Protocol):
    """Knows one framework's models.

    It may have an attribute `before`: names of frameworks that do not get a model which it claims too.
    """

    def __call__(self, chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
        """Look at a model; None if it is not the framework's. Nothing is communicated.

        Args:
            chunks: the model, or its virtual pipeline chunks; bare or wrapped.
            said: the sizes that a person gave, by axis.
            process_group: the ranks that a person gave; the default group if None.
        """


@dataclass(frozen=True)
class Known:
    """A finder in the registry.

    Attributes:
        name: the framework's, or the entry point's.
        get: gives the finder; imports it, where it is an entry point's.
        origin: who brought it; empty for those of this package.
        package: what must be imported for the framework to be in use; empty if it is always asked.
        before: names of frameworks that do not get a model which this one claims too.
    """

    name: str
    get: Callable[[], Finder]
    origin: str = ""
    package: str = ""
    before: tuple[str, ...] = ()


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


def _megatron_core(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import megatron_core

    adapter = megatron_core.detect(chunks)
    if adapter is None:
        return None

    def make() -> Adapter:
        adapter.mesh.check_sizes(said)
        return adapter

    return Found(
        "megatron-core", f"it is a {type(adapter.roots[0]).__name__} of Megatron's", make, alone=True
    )


def _dtensor(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import dtensor

    return dtensor.find(chunks, said, process_group)


def _fairscale(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import fairscale

    return fairscale.find(chunks, said, process_group)


def _apex(chunks: list[nn.Module], said: Said, process_group: Any) -> Found | None:
    from megatron_flex.adapters import apex

    return apex.find(chunks, said, process_group)


# By the package without which there is nothing to find, in the order in which they are asked.
BUILT_IN: tuple[tuple[str, Callable[..., Found | None]], ...] = (
    ("megatron", _megatron_core),
    ("fairscale", _fairscale),
    ("apex", _apex),
    ("torch.distributed.tensor", _dtensor),
)

_registered: list[Known] = []


def register_adapter(finder: Finder, name: str = "", before: tuple[str, ...] = ()) -> Undo:
    """Ask one more finder about every model, in this process.

    A package that is installed says the same by an entry point of the group `megatron_flex.adapters`.

    Args:
        finder: called with `(chunks, said, process_group)`; returns a `Found`, or None.
        name: the framework's; the finder's own if it is not given.
        before: names of frameworks that do not get a model which this one claims too.

    Returns:
        A function that takes it out again.

    Raises:
        FlexError: the name is taken.
    """
    name = name or _name(finder)
    taken = next((k for k in _known() if k.name == name), None)
    if taken is not None:
        raise FlexError(
            f"an adapter {name!r} is there already ({taken.origin or 'built in'}); give another name"
        )
    module = getattr(finder, "__module__", type(finder).__module__)
    known = Known(name, lambda: finder, f"registered by {module}", before=before)
    _registered.append(known)
    return lambda: _registered.remove(known) if known in _registered else None


def _name(finder: Any) -> str:
    own = getattr(finder, "name", None) or getattr(finder, "__name__", type(finder).__name__)
    return str(own).strip("_").replace("_", "-")


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Entry points of what is installed on this `sys.path`."""
    return tuple(entry_points(group=GROUP))


def _known() -> list[Known]:
    built_in = [Known(_name(f), lambda f=f: f, "", package) for package, f in BUILT_IN]  # type: ignore[misc]
    theirs = [*_registered]
    for entry in _installed(tuple(sys.path)):
        by = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"
        theirs.append(Known(entry.name, entry.load, f"entry point of {by}"))
    off = {name.strip() for name in knobs.adapters_off.split(",")}
    return [*built_in, *(k for k in theirs if k.name not in off)]


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
    for known in _known():
        if known.package and known.package not in sys.modules:
            others.append(Part(known.name, f"not asked: {known.package} is not imported"))
            continue
        try:
            claim = _asked(known, chunks, said, process_group)
        except FlexError:
            raise
        except Exception as error:
            if not known.origin:
                raise
            failed.append(f"adapter {known.name!r} ({known.origin}) failed: {type(error).__name__}: {error}")
            others.append(Part(known.name, failed[-1]))
            continue
        if claim is None:
            others.append(Part(known.name, "it claims nothing here"))
        else:
            claims.append(claim)
    left = [c for c in claims if not any(other.beats(c) for other in claims)]
    if claims and len(left) != 1:
        raise FlexError(_several(claims))
    others += [Part(c.found.name, f"it gives way to {left[0].found.name}") for c in claims if c not in left]
    found = left[0].found if left else _of_none(chunks, said, process_group, failed)
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


def _several(claims: list[Claim]) -> str:
    told = "; ".join(
        f"{c.found.name} ({c.known.origin or 'built in'}), because {c.found.why}" for c in claims
    )
    return (
        f"several frameworks claim this model: {told}; give FlexModel the part of one of them, or let one "
        "adapter come `before` the other"
    )


def _of_none(chunks: list[nn.Module], said: Said, process_group: Any, failed: list[str]) -> Found:
    """A model that no framework claims: what torch's wrappers around it tell, or a plain one."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
    if failed and several:
        raise FlexError(
            f"no framework claims this model, and one could not be asked: {'; '.join(failed)}; mend or "
            "uninstall it, or set FLEX_ADAPTERS_OFF to its name, so that shards are not taken for the whole"
        )
    wrapped = pytorch.look(chunks, said, process_group)
    if wrapped is not None:
        return Found("pytorch", *wrapped, alone=not several)
    why = "no framework's parallel modules are in it"
    return Found("plain", why, lambda: plain.take(chunks, said, process_group), alone=not several)


def _versions(chunks: list[nn.Module], claims: list[Claim]) -> tuple[Version, ...]:
    """Of the framework that claims a model, and of whose classes are around or in it; torch for wrappers."""
    packages = [c.known.package.partition(".")[0] for c in claims if c.known.package]
    kinds = {kind for chunk in chunks for m in chunk.modules() for kind in type(m).__mro__}
    for kind in kinds:
        package, _, rest = kind.__module__.partition(".")
        if package in ("fairscale", "deepspeed", "apex") or rest.startswith(("nn.parallel.", "distributed.")):
            packages.append(package)
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
