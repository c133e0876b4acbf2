"""The model as a tree of modules, hook points and hooks, equal layers folded into one; layouts, shapes and
numbers as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_flex.errors import SiteError
from megatron_flex.layout import Layout, Sizes, full_order
from megatron_flex.sites import Site


def describe_layout(layout: Layout, sizes: Sizes) -> str:
    """`Layout.describe`, with the dims in the order of the full tensor: `[s/cp zigzag/tp, b, f/tp]`.

    Args:
        layout: the layout.
        sizes: the sizes of the mesh axes; axes with one rank are omitted.
    """
    order = full_order(layout)
    return replace(layout, dims=tuple(layout.dims[i] for i in order), permute=None).describe(sizes)


def describe_shape(shape: Sequence[int | str]) -> str:
    """`s x b x 512`; names where the length depends on the data."""
    return " x ".join(map(str, shape))


def describe_numbers(numbers: Iterable[int]) -> str:
    """`0-15,17,20-24`; evenly spaced numbers as `0-30:2`."""
    left = sorted(set(numbers))
    out: list[str] = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        run = 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        if run < 3 and step != 1:
            run = 1
        first, last = left[0], left[run - 1]
        out.append(str(first) if run == 1 else f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}")
        left = left[run:]
    return ",".join(out)


@dataclass(frozen=True, slots=True)
class TreeHook:
    """A hook, dump or measurement at a hook point.

    Attributes:
        kind: `reads`, `edits`, `dump` or `statistics`.
        what: the editing function of an edit, as text.
        groups: its groups.
        gradient: whether it gets the gradient there.
        active: whether it is active.
        at: for folded modules, the numbers of those that have the point; empty for all.
    """

    kind: str
    what: str = ""
    groups: tuple[str, ...] = ()
    gradient: bool = False
    active: bool = True
    at: str = ""

    def describe(self) -> str:
        """As text: `edits gradient by scale(2.0) [steer], off`."""
        words = [
            self.kind,
            *(["gradient"] if self.gradient else []),
            *([f"by {self.what}"] if self.what else []),
        ]
        groups = f" [{', '.join(self.groups)}]" if self.groups else ""
        at = f" at {self.at}" if self.at else ""
        return " ".join(words) + groups + at + ("" if self.active else ", off")


@dataclass(frozen=True, slots=True)
class TreePoint:
    """A hook point of a module.

    Attributes:
        point: its name in the module.
        layout: as text.
        shape: of the full tensor, as text.
        hidden: why no hook can be registered here.
        read_only_reason: why a hook here can only read.
        hooks: the hooks registered here.
    """

    point: str
    layout: str
    shape: str
    hidden: str = ""
    read_only_reason: str = ""
    hooks: tuple[TreeHook, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module, or several equal modules.

    Attributes:
        label: the last component of its path, or numbers such as `0-31`.
        points: its points, in the order of the forward pass.
        children: its submodules.
        stages: pipeline stages that own some of it.
        count: how many modules this represents.
    """

    label: str
    points: tuple[TreePoint, ...] = ()
    children: tuple[TreeNode, ...] = ()
    stages: frozenset[int] = frozenset()
    count: int = 1

    @property
    def alike(self) -> tuple[Any, ...]:
        """What modules must have in common to be folded: all but their hooks."""
        points = tuple(replace(p, hooks=()) for p in self.points)
        return points, tuple((c.label, c.count, c.alike) for c in self.children)

    def to_json(self) -> dict[str, Any]:
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
                    "fixed": p.read_only_reason,
                    "hooks": [h.describe() for h in p.hooks],
                }
                for p in self.points
            ],
            "children": [c.to_json() for c in self.children],
        }


@dataclass(slots=True)
class _NodeBuilder:
    label: str
    points: list[TreePoint] = field(default_factory=list)
    children: dict[str, _NodeBuilder] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)

    def grown(self) -> TreeNode:
        children = tuple(c.grown() for c in self.children.values())
        stages = frozenset(self.stages).union(*(c.stages for c in children))
        return TreeNode(self.label, tuple(self.points), children, stages)


def build_tree(
    sites: Iterable[Site], sizes: Sizes, hooks: Mapping[str, Sequence[TreeHook]] | None = None
) -> TreeNode:
    """The tree of some sites, in their order; its root has no label.

    Args:
        sites: the sites.
        sizes: the mesh.
        hooks: the hooks of each site.
    """
    root = _NodeBuilder("")
    for site in sites:
        at = root
        for step in site.module.split("."):
            at = at.children.setdefault(step, _NodeBuilder(step))
        at.stages.add(site.stage)
        at.points.append(
            TreePoint(
                site.point + (f"[{site.index}]" if site.index else ""),
                "known when the model runs" if site.inferred else describe_layout(site.layout, sizes),
                describe_shape(site.shape),
                site.hidden,
                site.read_only_reason,
                tuple((hooks or {}).get(site.name, ())),
            )
        )
    return root.grown()


def sites_of_stage(sites: Sequence[Site], stage: int | None) -> list[Site]:
    """The sites of one stage; all if None.

    Raises:
        SiteError: there are none.
    """
    of_stage = [s for s in sites if stage is None or s.stage == stage]
    if not of_stage:
        stages = describe_numbers(s.stage for s in sites)
        raise SiteError(f"stage {stage} owns none of these sites, which are on {stages}; name one of those")
    return of_stage


def fold_layers(node: TreeNode) -> TreeNode:
    """The same tree with equal numbered modules folded into one, at the position of the first."""
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
    """Equal modules as one."""
    if len(group) == 1:
        return group[0]
    merged = _merge_nodes(group, [n.label for n in group])
    return replace(merged, label=describe_numbers(int(n.label) for n in group), count=len(group))


def _merge_nodes(group: Sequence[TreeNode], labels: Sequence[str]) -> TreeNode:
    """The first of some modules, with the stages and hooks of all; `labels` are their numbers."""
    points = zip(*(n.points for n in group), strict=True)
    children = zip(*(n.children for n in group), strict=True)
    return replace(
        group[0],
        points=tuple(
            replace(same[0], hooks=_merge_hooks([p.hooks for p in same], labels)) for same in points
        ),
        children=tuple(_merge_nodes(same, labels) for same in children),
        stages=frozenset[int]().union(*(n.stages for n in group)),
    )


def _merge_hooks(hooks_at: Sequence[Sequence[TreeHook]], labels: Sequence[str]) -> tuple[TreeHook, ...]:
    """The hooks at one hook point of equal modules, each listed once."""
    where: dict[TreeHook, list[int]] = {}
    for label, hooks in zip(labels, hooks_at, strict=True):
        for hook in dict.fromkeys(hooks):
            where.setdefault(hook, []).append(int(label))
    out = []
    for hook, numbers in where.items():
        some = describe_numbers(numbers) if len(numbers) < len(labels) else ""
        out.append(replace(hook, at="/".join(w for w in (some, hook.at) if w)))
    return tuple(out)
