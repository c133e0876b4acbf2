"""A setting added to `Dump` in one place is an argument, a flag, a YAML key, recorded, and estimated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLACE = "    groups: Setting[Iterable[str], tuple[str, ...]] = Setting(NAMES, (), recorded=False)\n"
SETTING = """    hurry: Setting[int, int] = Setting(
        COUNT, 1, flag="dump-hurry", help="Another setting.", metavar="N"
    )
"""
PROGRAM = """
import json, sys
import torch
import megatron_flex as mf
from megatron_flex.launch import load_settings
from megatron_flex.launch.flags import format_help, settings_from_argv
from megatron_flex.launch.settings_resolver import resolve_settings

WORDS = ["--flex-dump=d", "--flex-sites=a"]

def dump_of(settings):
    return resolve_settings(settings).dumps[0]

folder = sys.argv[1]
open(f"{folder}/hooks.yaml", "w").write("sites: a\\ndumps: [{path: d, hurry: 4}]\\n")
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
with mf.attach(model, dumps=mf.Dump(f"{folder}/dump", "0", hurry=5)):
    model(torch.ones(1, 2))
print(json.dumps({
    "argument": mf.Dump("d", "a", hurry=2).hurry,
    "default": mf.Dump("d", "a").hurry,
    "flag": dump_of(settings_from_argv([*WORDS, "--flex-dump-hurry=3"], {})[0]).hurry,
    "long": dump_of(settings_from_argv([*WORDS, "--megatron-flex-dump-hurry", "6"], {})[0]).hurry,
    "help": "--flex-dump-hurry N" in format_help(),
    "yaml": dump_of(load_settings(f"{folder}/hooks.yaml", environment={})).hurry,
    "manifest": json.load(open(f"{folder}/dump/run-0000/manifest.json"))["settings"]["hurry"],
}))
"""
RUN = [
    *("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "4"),
    *("--max-position-embeddings", "4", "--micro-batch-size", "1", "--vocab-size", "8"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one more setting."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_flex", folder / "megatron_flex", ignore=ignored)
    file = folder / "megatron_flex" / "dump" / "dump_settings.py"
    text = file.read_text(encoding="utf-8")
    assert text.count(PLACE) == 1
    file.write_text(text.replace(PLACE, PLACE + SETTING), encoding="utf-8")
    return folder


def run(package: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_the_constructor_flags_yaml_and_manifest(package: Path, tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    assert json.loads(run(package, "-c", PROGRAM, str(tmp_path))) == {
        **{"argument": 2, "default": 1, "flag": 3, "long": 6, "help": True, "yaml": 4, "manifest": 5},
    }


def test_in_an_estimate(package: Path) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("megatron.training", exc_type=ImportError)
    command = ("-m", "megatron_flex.cli", "estimate")
    assert "--hurry N" in run(package, *command, "--help")
    shown = run(package, *command, "-s", "decoder.layers.*", "--hurry", "7", "--json", "--", *RUN)
    assert json.loads(shown)["settings"]["hurry"] == 7
