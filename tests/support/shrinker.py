"""Make a failing case smaller while it still fails, by one simplification after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.support.failing import Row
from tests.support.random_cases import Draw, fitted, forbidden

PLAIN = Draw()
SWITCHES = (
    "dump",
    "statistics",
    "verify",
    "gathered",
    "dropout",
    "bf16",
    "forward_only",
    "recompute",
    "scale",
    "frozen",
)
MODEL = (
    "capacity",
    "shared_experts",
    "dispatcher",
    "top_k",
    "q_rank",
    "tied",
    "padding",
    "vocabulary",
    "qk_norm",
)
MODEL += ("bias", "rope", "rms", "gated", "hidden", "heads", "groups", "ffn", "depths")


@dataclass(frozen=True)
class Shrunk:
    """The smallest case that was found, and how many were run to find it."""

    draw: Draw
    runs: int


def shrink(draw: Draw, fails: Callable[[Draw], bool], budget: int = 60) -> Shrunk:
    """The smallest case that still fails, by greedy steps.

    Args:
        draw: a case that fails.
        fails: runs a case; whether it fails in the way that is looked for.
        budget: how many cases may be run.
    """
    seen, runs, smaller = {draw}, 0, True
    while smaller and runs < budget:
        smaller = False
        for candidate in simpler(draw):
            if candidate in seen or runs >= budget:
                continue
            seen.add(candidate)
            runs += 1
            if fails(candidate):
                draw, smaller = candidate, True
                break
    return Shrunk(draw, runs)


def simpler(draw: Draw) -> Iterator[Draw]:
    """Cases that are simpler in one respect, those first that leave out most; each of them is possible."""
    for candidate in _candidates(draw):
        found = fitted(candidate)
        if found != draw and not forbidden(found):
            yield found


def _candidates(draw: Draw) -> Iterator[Draw]:
    yield from _fewer_hooks(draw)
    yield replace(draw, steps=1, hooks=tuple(replace(h, quiet=False) for h in draw.hooks))
    for name in SWITCHES:
        yield replace(draw, **{name: getattr(PLAIN, name)})
    yield from _fewer_ranks(draw)
    yield from _fewer_layers(draw)
    for count in (1, draw.pp):
        yield replace(draw, microbatches=min(count, draw.microbatches))
    yield _plain_model(draw)
    for name in MODEL:
        yield replace(draw, **{name: getattr(PLAIN, name)})
    yield from _plainer_hooks(draw)


def _fewer_hooks(draw: Draw) -> Iterator[Draw]:
    hooks = draw.hooks
    if len(hooks) > 2:
        half = len(hooks) // 2
        yield replace(draw, hooks=hooks[:half])
        yield replace(draw, hooks=hooks[half:])
    for n in range(len(hooks)):
        yield replace(draw, hooks=hooks[:n] + hooks[n + 1 :])
    for name in ("dump", "statistics", "failures"):
        items = getattr(draw, name)
        for n in range(len(items)):
            yield replace(draw, **{name: items[:n] + items[n + 1 :]})


def _fewer_ranks(draw: Draw) -> Iterator[Draw]:
    alone = {"ep": 1, "etp": 1}
    for name in ("dp", "cp"):
        yield replace(draw, **{name: 1})
        yield replace(draw, **{name: 1}, **alone)
    yield replace(draw, vpp=1)
    yield replace(draw, first=0)
    for size in (1, 2):
        if size < draw.pp:
            yield replace(draw, pp=size, vpp=1, first=0)
        if size < draw.tp:
            sequence = draw.sp and size > 1
            yield replace(draw, tp=size, sp=sequence)
            yield replace(draw, tp=size, sp=sequence, **alone)
    yield replace(draw, sp=False)
    yield replace(draw, ep=1)
    yield replace(draw, etp=1)


def _fewer_layers(draw: Draw) -> Iterator[Draw]:
    """Fewer layers; hooks of those that go are put on the last one that stays."""
    for count in sorted({draw.pp * draw.vpp, draw.layers // 2, draw.layers - 1}):
        if 0 < count < draw.layers:
            fewer = replace(draw, layers=count, **_moved(draw, count))
            yield fewer
            yield replace(fewer, first=0)
    for n in range(len(draw.pattern)):
        yield replace(draw, pattern=draw.pattern[:n] + draw.pattern[n + 1 :])


def _moved(draw: Draw, count: int) -> dict[str, tuple[Any, ...]]:
    def move(site: str) -> str:
        found = re.match(r"(decoder|encoder)\.layers\.(\d+)(.*)", site)
        return f"{found[1]}.layers.{min(int(found[2]), count - 1)}{found[3]}" if found else site

    hooks = dict.fromkeys(replace(h, site=move(h.site)) for h in draw.hooks)
    more = {
        name: tuple(dict.fromkeys(move(s) for s in getattr(draw, name))) for name in ("dump", "statistics")
    }
    failures = dict.fromkeys(replace(row, site=move(row.site)) for row in draw.failures)
    return {"hooks": tuple(hooks), "failures": tuple(failures), **more}


def _plain_model(draw: Draw) -> Draw:
    """A GPT of the plainest form, with the same layers, layout and hooks; an encoder is a decoder there."""
    hooks = tuple(replace(h, site=h.site.replace("encoder.", "decoder.", 1)) for h in draw.hooks)
    kept = {f.name: getattr(draw, f.name) for f in fields(Draw) if f.name not in (*MODEL, "kind", "pattern")}
    return Draw(
        **{
            **kept,
            "experts": 0,
            "ep": 1,
            "etp": 1,
            "layers": len(draw.pattern) or draw.layers,
            "hooks": hooks,
        }
    )


def _plainer_hooks(draw: Draw) -> Iterator[Draw]:
    for n, hook in enumerate(draw.hooks):
        for plainer in (
            replace(hook, run="replicated"),
            replace(hook, wish=""),
            replace(hook, quiet=False),
            replace(hook, edit="scale") if hook.edit else hook,
            replace(hook, site=hook.site.replace(".layers.*", ".layers.0")),
        ):
            yield replace(draw, hooks=(*draw.hooks[:n], plainer, *draw.hooks[n + 1 :]))
    for n, row in enumerate(draw.failures):
        for name in ("frozen", "trains", "step", "late", "mode", "rank"):
            simple = replace(
                row, **{name: {"frozen": "", "trains": False, "rank": 0}.get(name, getattr(Row, name))}
            )
            yield replace(draw, failures=(*draw.failures[:n], simple, *draw.failures[n + 1 :]))
