"""The files under a path that can be patched, and how."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.lines import Insertion, is_patched, take_out

LAYERS = "tensor_parallel/layers.py"
OF_FAIRSCALE = "model_parallel/layers.py"
# Their location below a checkout's root, site-packages, the package, or a folder in it.
BELOW = {
    "megatron": [f"{above}{LAYERS}" for above in ("megatron/core/", "core/", "")],
    "fairscale": [f"{above}{OF_FAIRSCALE}" for above in ("fairscale/nn/", "nn/", "")],
}
LAUNCHERS = "*.py"
CALL = b"pretrain("
INSTALLED = {"site-packages", "dist-packages"}
NOT_LAUNCHERS = {*INSTALLED, "tests", "build", "__pycache__"}


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
            PatchError: it is not valid Python, or an anchor is missing.
        """
        from megatron_flex_patches import fairscale, launcher, megatron
        from megatron_flex_patches.tree import Tree

        codemods: dict[str, Callable[[Tree], list[Insertion]]] = {
            "megatron": megatron.insertions,
            "fairscale": fairscale.insertions,
            "launcher": launcher.insertions,
        }
        return codemods[self.kind](Tree(content))

    @property
    def installed(self) -> bool:
        """Whether it belongs to an installed package, which the next installation overwrites."""
        return bool(INSTALLED & set(self.path.parts))


def find(path: Path) -> list[Target]:
    """The files under a path, layers first; for the path of a file, that file.

    Launchers are looked for in all folders of a checkout, tests left out: Megatron's own are in its root, in
    `examples/` and in `megatron/elastification/`. Of an installed package only the named folder is searched.

    Raises:
        PatchError: there are none.
    """
    if path.is_file():
        return [Target(path.resolve(), _kind(path))]
    if not path.is_dir():
        raise PatchError(f"{path}: is neither a file nor a folder")
    layers = [(path / place, kind) for kind, places in BELOW.items() for place in places]
    scripts = [s for s in _list_scripts(path) if _launches(s)]
    found = [Target(file.resolve(), kind) for file, kind in layers if file.is_file()]
    found += [Target(script.resolve(), "launcher") for script in scripts]
    if not found:
        looked = ", ".join(f"{places[0]}" for places in BELOW.values())
        raise PatchError(
            f"{path}: holds nothing to patch; looked for {looked} and scripts that call pretrain(): give a "
            "checkout's root, an installed package's folder, or a file"
        )
    return list(dict.fromkeys(found))


def _list_scripts(path: Path) -> Iterator[Path]:
    """The Python files that may be launchers, in order."""
    if INSTALLED & set(path.resolve().parts):
        yield from sorted(f for f in path.glob(LAUNCHERS) if f.is_file())
        return
    for folder, inner, files in os.walk(path):
        inner[:] = sorted(
            n
            for n in inner
            if n not in NOT_LAUNCHERS and not n.startswith(".") and not _is_environment(folder, n)
        )
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _is_environment(folder: str, name: str) -> bool:
    """Whether a folder is a virtual environment."""
    return os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))


def _launches(path: Path) -> bool:
    """Whether a file calls `pretrain()`, as `pretrain()` or `module.pretrain()`, and does not define it."""
    content = path.read_bytes()
    if CALL not in content:
        return False
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        return False  # no Python of today: nothing that starts Megatron
    defined = any(isinstance(n, ast.FunctionDef) and n.name == "pretrain" for n in nodes)
    return not defined and any(isinstance(n, ast.Call) and _called_name(n.func) == "pretrain" for n in nodes)


def _called_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


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
        f"{path}: is neither a file of parallel layers (it has no class ColumnParallelLinear) nor a "
        "launcher (it does not call pretrain())"
    )


def _unpatched(path: Path, content: bytes) -> bytes:
    try:
        return take_out(content).before
    except PatchError as error:
        raise PatchError(f"{path}: {error}") from error
