"""The model as a tree: modules, their points, what stands there; equal layers folded into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_flex.errors import SiteError
from megatron_flex.layout import Sizes
from megatron_flex.sites import Site
from megatron_flex.view.words import describe_layout, describe_numbers, describe_shape


@dataclass(frozen=True, slots=True)
class TreeHook:
    """Something that stands at a place.

    Attributes:
        kind: `reads`, `edits`, `dump` or `statistics`.
        what: of edits the function, in words.
        tags: the groups that it is in.
        gradient: whether it sees the gradient there.
        active: whether it is switched on.
        at: of modules shown as one, the numbers of those where it stands; empty for all.
    """

    kind: str
    what: str = ""
    tags: tuple[str, ...] = ()
    gradient: bool = False
    active: bool = True
    at: str = ""

    def describe(self) -> str:
        """In words: `edits gradient by scale(2.0) [steer], off`."""
        words = [
            self.kind,
            *(["gradient"] if self.gradient else []),
            *([f"by {self.what}"] if self.what else []),
        ]
        tags = f" [{', '.join(self.tags)}]" if self.tags else ""
        at = f" at {self.at}" if self.at else ""
        return " ".join(words) + tags + at + ("" if self.active else ", off")


@dataclass(frozen=True, slots=True)
class TreePoint:
    """A point of a module where a tensor passes.

    Attributes:
        point: its name in the module.
        layout: in words.
        shape: of the whole, in words.
        hidden: why no hook can be here.
        fixed: why a hook here can only read.
        hooks: what stands here.
    """

    point: str
    layout: str
    shape: str
    hidden: str = ""
    fixed: str = ""
    hooks: tuple[TreeHook, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module, or several that are alike.

    Attributes:
        label: the last step of its path, or numbers such as `0-31`.
        places: its points, in the order in which they are passed.
        children: what is in it.
        stages: pipeline stages that own some of it.
        count: how many modules this stands for.
    """

    label: str
    places: tuple[TreePoint, ...] = ()
    children: tuple[TreeNode, ...] = ()
    stages: frozenset[int] = frozenset()
    count: int = 1

    @property
    def alike(self) -> tuple[Any, ...]:
        """What two modules have in common that are shown as one: all but where hooks stand."""
        places = tuple(replace(p, hooks=()) for p in self.places)
        return places, tuple((c.label, c.count, c.alike) for c in self.children)

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "label": self.label,
            "count": self.count,
            "stages": sorted(self.stages),
            "places": [
                {
                    "point": p.point,
                    "layout": p.layout,
                    "shape": p.shape,
                    "hidden": p.hidden,
                    "fixed": p.fixed,
                    "hooks": [h.describe() for h in p.hooks],
                }
                for p in self.places
            ],
            "children": [c.to_json() for c in self.children],
        }


@dataclass(slots=True)
class _NodeBuilder:
    label: str
    places: list[TreePoint] = field(default_factory=list)
    children: dict[str, _NodeBuilder] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)

    def grown(self) -> TreeNode:
        children = tuple(c.grown() for c in self.children.values())
        stages = frozenset(self.stages).union(*(c.stages for c in children))
        return TreeNode(self.label, tuple(self.places), children, stages)


def build_tree(sites: Iterable[Site], sizes: Sizes, hooks: Mapping[str, Sequence[TreeHook]] | None = None) -> TreeNode:
    """The tree of some sites, in their order; its root has no label.

    Args:
        sites: the sites.
        sizes: the mesh.
        hooks: by site what stands there.
    """
    root = _NodeBuilder("")
    for site in sites:
        at = root
        for step in site.module.split("."):
            at = at.children.setdefault(step, _NodeBuilder(step))
        at.stages.add(site.stage)
        at.places.append(
            TreePoint(
                site.point + (f"[{site.index}]" if site.index else ""),
                "told when a tensor passes" if site.inferred else describe_layout(site.layout, sizes),
                describe_shape(site.shape),
                site.hidden,
                site.fixed,
                tuple((hooks or {}).get(site.name, ())),
            )
        )
    return root.grown()


def sites_of_stage(sites: Sequence[Site], stage: int | None) -> list[Site]:
    """The sites of one stage; all if None.

    Raises:
        SiteError: there are none.
    """
    found = [s for s in sites if stage is None or s.stage == stage]
    if not found:
        stages = describe_numbers(s.stage for s in sites)
        raise SiteError(f"stage {stage} owns none of these sites, which are on {stages}; name one of those")
    return found


def fold_layers(node: TreeNode) -> TreeNode:
    """The same with numbered modules that are alike in one, where the first of them was."""
    children = [fold_layers(c) for c in node.children]
    numbered = [c for c in children if c.label.isdigit()]
    groups: dict[Any, list[TreeNode]] = {}
    for child in numbered:
        groups.setdefault(child.alike, []).append(child)
    out: list[TreeNode] = []
    for child in children:
        group = groups.get(child.alike) if child.label.isdigit() else [child]
        if group and group[0] is child:
            out.append(_fold_group(group))
    return replace(node, children=tuple(out))


def _fold_group(group: list[TreeNode]) -> TreeNode:
    """Modules that are alike as one."""
    if len(group) == 1:
        return group[0]
    merged = _merge_nodes(group, [n.label for n in group])
    return replace(merged, label=describe_numbers(int(n.label) for n in group), count=len(group))


def _merge_nodes(group: Sequence[TreeNode], labels: Sequence[str]) -> TreeNode:
    """The first of some, with the stages and hooks of all; `labels` are the numbers of those they are in."""
    places = zip(*(n.places for n in group), strict=True)
    children = zip(*(n.children for n in group), strict=True)
    return replace(
        group[0],
        places=tuple(replace(same[0], hooks=_merge_hooks([p.hooks for p in same], labels)) for same in places),
        children=tuple(_merge_nodes(same, labels) for same in children),
        stages=frozenset[int]().union(*(n.stages for n in group)),
    )


def _merge_hooks(hooks_at: Sequence[Sequence[TreeHook]], labels: Sequence[str]) -> tuple[TreeHook, ...]:
    """What stands at one place of modules that are alike, each told once."""
    where: dict[TreeHook, list[int]] = {}
    for label, hooks in zip(labels, hooks_at, strict=True):
        for hook in dict.fromkeys(hooks):
            where.setdefault(hook, []).append(int(label))
    out = []
    for hook, numbers in where.items():
        some = describe_numbers(numbers) if len(numbers) < len(labels) else ""
        out.append(replace(hook, at="/".join(w for w in (some, hook.at) if w)))
    return tuple(out)
