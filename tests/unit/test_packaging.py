"""The metadata that a package index shows, as the build itself makes them, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

import megatron_flex
from tests.support import wheels
from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    return wheels.build(tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> dict[str, str]:
    """The texts of the wheel's metadata by the names of the files; other files have an empty text."""
    with ZipFile(built[1]) as archive:
        return {
            name.rpartition(".dist-info/")[2]: archive.read(name).decode() if ".dist-info/" in name else ""
            for name in archive.namelist()
        }


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, str]) -> Message:
    return Parser().parsestr(wheel["METADATA"])


def test_the_metadata_are_complete(metadata: Message) -> None:
    assert metadata["Name"] == "megatron-flex"
    assert metadata["Version"] == megatron_flex.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {*metadata.get_all("Provides-Extra", [])} == {*PROJECT["optional-dependencies"]}
    addresses = [text.partition(", ")[2] for text in metadata.get_all("Project-URL", [])]
    assert addresses
    assert all(address.startswith("https://") for address in addresses)
    assert metadata.get_payload().startswith("#"), "the README is the description"


def test_an_index_shows_the_description(built: tuple[Path, Path], metadata: Message) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_distributions_are_whole(built: tuple[Path, Path], wheel: dict[str, str]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert tracked.stdout or not (ROOT / ".git").exists()
    files = {name for name in tracked.stdout.splitlines() if not name.startswith((".git", "setup.cfg"))}
    assert {name for name in files if (ROOT / name).exists()} - names == set()
    assert {"megatron_flex/py.typed", "megatron_flex_patches/py.typed"} <= {*wheel}
    assert {name.partition("/")[0] for name in wheel if "/" in name} <= {
        "megatron_flex",
        "megatron_flex_patches",
        "licenses",
    }


def test_commands_are_installed(wheel: dict[str, str]) -> None:
    text = wheel["entry_points.txt"]
    found = dict(re.findall(r"^(\S+) = (\S+)$", text, re.MULTILINE))
    assert {*found} == {"megatron-flex"}
    for where in found.values():
        module, _, name = where.partition(":")
        assert callable(getattr(import_module(module), name))


def test_every_script_uses_one_environment() -> None:
    """Scripts that name other extras would install the same environment again each time another one runs."""
    folders = ROOT / "scripts", ROOT / "scripts" / "dev"
    scripts = [path for f in folders for path in f.iterdir() if path.is_file() and path.suffix in ("", ".sh")]
    calls = [
        (path.name, call)
        for path in scripts
        for call in re.findall(r"\$\(make_venv (.*)\)", path.read_text(encoding="utf-8"))
        if "$FLEX_MEGATRON" in call
    ]
    assert len(calls) >= 13
    assert [name for name, call in calls if '"$FLEX_EXTRAS"' not in call] == []
