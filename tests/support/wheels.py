"""The distributions of the package, built without a network, and environments that have the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests.support.pages import ROOT

NOT_COPIED = (
    ".git",
    ".venvs",
    ".venv",
    "build",
    "dist",
    "site",
    "__pycache__",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
)
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution of this checkout, and the wheel that is built from it, in the folder."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
    sdist = _run_backend("build_sdist", tree, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, _run_backend("build_wheel", unpacked, folder)


def install(wheel: Path, folder: Path) -> Path:
    """The Python of an environment with this wheel and this environment's packages, without the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages, wheel]
    subprocess.run([sys.executable, "-m", *command], check=True)
    # A .pth file inside this folder is not read, so that the checkout's is not.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def _run_backend(name: str, tree: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, name, folder], cwd=tree, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]
