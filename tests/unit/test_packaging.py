"""The metadata that a package index shows, as the build itself makes them, without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import megatron_flex
from tests.support.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "from setuptools import build_meta as b; print(b.prepare_metadata_for_build_wheel('out'))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the metadata, made from a copy of what a source distribution has."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("megatron_flex", "patches"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "out").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=tree, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return tree / "out" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    return Parser().parsestr((built / "METADATA").read_text(encoding="utf-8"))


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


def test_commands_are_installed(built: Path) -> None:
    text = (built / "entry_points.txt").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(\S+) = (\S+)$", text, re.MULTILINE))
    assert {*found} == {"megatron-flex"}
    for where in found.values():
        module, _, name = where.partition(":")
        assert callable(getattr(import_module(module), name))


def test_setup_py_defers_to_pyproject() -> None:
    code = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert code.rstrip().endswith("\nsetup()"), "one list of what the package is and needs: pyproject.toml"


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
