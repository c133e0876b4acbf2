"""scripts/gpu without a network: wheels that are carried to the GPU's machine, an environment made of them.

Nothing here needs more than Python's own library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = "megatron-core==0.19.2"
# What megatron-core and the parts import, and what those need in turn; not torch, nor what torch needs.
PACKAGES = (
    *("einops", "numpy", "packaging", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("pyyaml", "regex", "safetensors", "tqdm", "xxhash"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_5_x86_64")
MAX_BYTES = 60 << 20
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


def carry(folder: Path) -> None:
    """Download the wheels, for Python 3.12 on x86-64 Linux, whatever machine this is.

    Raises:
        SystemExit: pip fails, or they are too large to be carried.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=folder) as downloaded:
        _download(Path(downloaded))
        replace_wheels(Path(downloaded), folder)
    wheels = sorted(folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:7.1f} MiB  {wheel.name}")
    if nbytes > MAX_BYTES:
        raise SystemExit(
            f"error: {folder} holds {nbytes / 2**20:.1f} MiB, at most {MAX_BYTES >> 20}: name fewer packages"
        )
    print(f"{nbytes / 2**20:7.1f} MiB in {folder}; there: scripts/gpu --wheels {folder}")


def replace_wheels(downloaded: Path, folder: Path) -> None:
    """Move wheels to a folder, and remove other versions of the same packages there, and nothing else."""
    packages = {wheel.name.partition("-")[0] for wheel in downloaded.glob("*.whl")}
    for old in folder.glob("*.whl"):
        if old.name.partition("-")[0] in packages:
            old.unlink()  # of two versions of one package pip would have to choose
    for wheel in downloaded.glob("*.whl"):
        wheel.rename(folder / wheel.name)


def _download(folder: Path) -> None:
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    # pydantic works with one pydantic-core alone, which pip finds; torch must not be found with Megatron.
    _pip(sys.executable, ["download", "--dest", str(folder), *target, "--no-deps", MEGATRON])
    constraints = ["--constraint", str(ROOT / "scripts" / "constraints.txt")]
    _pip(sys.executable, ["download", "--dest", str(folder), *target, *constraints, *PACKAGES])


def environment(venv: Path, wheels: Path | None) -> str:
    """The Python of an environment; with `wheels` it is made of them over this Python's own packages.

    Args:
        venv: its folder.
        wheels: what `carry` gathered; None for an environment that is there.

    Raises:
        SystemExit: it is not there, pip fails, or this Python has no torch.
    """
    python = venv / "bin" / "python"
    if wheels is None:
        if not python.exists():
            raise SystemExit(f"error: {venv} is not an environment: make one with --wheels, or name another")
        return str(python)
    if not list(wheels.glob("*.whl")):
        raise SystemExit(f"error: no wheel is in {wheels}: gather them with scripts/gpu --carry {wheels}")
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode:
        raise SystemExit(
            f"error: {sys.executable} has no torch, which is not carried: set FLEX_PYTHON to one that has"
        )
    make = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(venv)]
    subprocess.run(make, check=True)
    own = Path(_paths(str(python)))
    # From within an environment, the system's packages are not those of that environment: name them, too.
    theirs = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "machine.pth").write_text("\n".join(sorted(theirs)) + "\n", encoding="utf-8")
    if subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "ensurepip"], check=True, stdout=sys.stderr)
    offline = ["--isolated", "install", "--no-index", "--find-links", str(wheels)]
    _pip(str(python), [*offline, "--no-deps", MEGATRON])
    _pip(str(python), [*offline, *PACKAGES])
    return str(python)


def _paths(python: str) -> str:
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()


def _pip(python: str, words: Sequence[str]) -> None:
    done = subprocess.run(
        [python, *PIP, *words], stdout=sys.stderr, env={**os.environ, "PIP_PROGRESS_BAR": "off"}
    )
    if done.returncode:
        raise SystemExit(f"error: pip {' '.join(words)} failed, see above")
