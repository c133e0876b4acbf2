"""The files under a path that can be patched, and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from patches.errors import PatchError
from patches.lines import Insertion, is_patched, take_out

LAYERS = "tensor_parallel/layers.py"
OF_FAIRSCALE = "model_parallel/layers.py"
# Their location below a checkout's root, site-packages, the package, or a folder in it.
BELOW = {
    "megatron": [f"{above}{LAYERS}" for above in ("megatron/core/", "core/", "")],
    "fairscale": [f"{above}{OF_FAIRSCALE}" for above in ("fairscale/nn/", "nn/", "")],
}
LAUNCHERS = "pretrain_*.py"
CALL = b"pretrain("


@dataclass(frozen=True)
class Target:
    """A file to patch.

    Attributes:
        path: the file, with links resolved.
        kind: `megatron`, `fairscale` or `launcher`.
    """

    path: Path
    kind: str

    def insertions(self, content: bytes) -> list[Insertion]:
        """The lines to insert.

        Raises:
            PatchError: it is no Python, or an anchor is not there.
        """
        from patches import fairscale, launcher, megatron
        from patches.tree import Tree

        codemods: dict[str, Callable[[Tree], list[Insertion]]] = {
            "megatron": megatron.insertions,
            "fairscale": fairscale.insertions,
            "launcher": launcher.insertions,
        }
        return codemods[self.kind](Tree(content))

    @property
    def installed(self) -> bool:
        """Whether it belongs to an installed package, which the next installation overwrites."""
        return bool({"site-packages", "dist-packages"} & set(self.path.parts))


def find(path: Path) -> list[Target]:
    """The files under a path, layers first; for the path of a file, that file.

    Raises:
        PatchError: there are none.
    """
    if path.is_file():
        return [Target(path.resolve(), _kind(path))]
    if not path.is_dir():
        raise PatchError(f"{path}: is neither a file nor a folder")
    layers = [(path / place, kind) for kind, places in BELOW.items() for place in places]
    scripts = [s for s in sorted(path.glob(LAUNCHERS)) if s.is_file() and CALL in s.read_bytes()]
    found = [Target(file.resolve(), kind) for file, kind in layers if file.is_file()]
    found += [Target(script.resolve(), "launcher") for script in scripts]
    if not found:
        looked = ", ".join(f"{places[0]}" for places in BELOW.values())
        raise PatchError(
            f"{path}: holds nothing to patch; looked for {looked} and {LAUNCHERS}: give a checkout's root, "
            "an installed package's folder, or a file"
        )
    return list(dict.fromkeys(found))


def _kind(path: Path) -> str:
    """The kind of a single file, from its location or content."""
    content = path.read_bytes()
    if is_patched(content):
        content = _unpatched(path, content)
    if re.search(rb"^\s*class ColumnParallelLinear\b", content, re.MULTILINE):
        return "fairscale" if b"copy_to_model_parallel_region" in content else "megatron"
    if CALL in content:
        return "launcher"
    raise PatchError(
        f"{path}: is neither a file of parallel layers (there is no class ColumnParallelLinear) nor a "
        "launcher (it does not call pretrain())"
    )


def _unpatched(path: Path, content: bytes) -> bytes:
    try:
        return take_out(content).before
    except PatchError as error:
        raise PatchError(f"{path}: {error}") from error
