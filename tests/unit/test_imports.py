"""Importing the package loads no upstream package and changes nothing of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPSTREAM = ("megatron", "fairscale", "apex", "transformer_engine", "deepspeed")

IMPORT_PROBE = """
import importlib, json, sys
import torch, torch.distributed
import torch.nn.modules.module as modules

WATCHED = {
    "torch.nn.Module": torch.nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch.autograd.Function": torch.autograd.Function,
    "torch.distributed": torch.distributed,
    "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d,
    "torch.cuda": torch.cuda,
}

def snapshot():
    seen = {"sys.excepthook": sys.excepthook}
    for owner, holder in WATCHED.items():
        seen |= {f"{owner}.{name}": value for name, value in list(vars(holder).items()) if callable(value)}
    return seen

def global_hooks():
    return {f"torch.nn.modules.module.{name}": dict(value) for name, value in vars(modules).items()
            if name.startswith("_global") and isinstance(value, dict)}

report = {}
for name in sys.argv[1:]:
    before, hooks, loaded = snapshot(), global_hooks(), set(sys.modules)
    importlib.import_module(name)
    after, hooks_after = snapshot(), global_hooks()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    changed += [key for key, value in hooks.items() if hooks_after.get(key) != value]
    report[name] = {"changed": changed, "loaded": sorted(set(sys.modules) - loaded)}
print(json.dumps(report))
"""


def import_report(*names: str, path: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """Import each name in one fresh interpreter; what each changed in torch and which modules it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, *names], cwd=path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def upstream_among(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] in UPSTREAM]


@pytest.mark.versions
def test_import_loads_no_upstream_and_patches_nothing() -> None:
    report = import_report("megatron_flex", "megatron_flex.model", "megatron_flex.compat")
    assert "megatron_flex" in report["megatron_flex"]["loaded"]
    for name, found in report.items():
        assert upstream_among(found["loaded"]) == [], name
        assert found["changed"] == [], name


def test_the_probe_notices_each_change(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    sources = {
        "patches_call": "import torch; torch.nn.Module.__call__ = lambda self: None",
        "patches_collective": "import torch.distributed as d; d.all_reduce = lambda t: None",
        "patches_excepthook": "import sys; sys.excepthook = print",
        "adds_global_hook": "from torch.nn.modules.module import *; register_module_forward_hook(print)",
        "loads_upstream": "import megatron",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)

    report = import_report(*sources, path=tmp_path)

    assert report["patches_call"]["changed"] == ["torch.nn.Module.__call__"]
    assert report["patches_collective"]["changed"] == ["torch.distributed.all_reduce"]
    assert report["patches_excepthook"]["changed"] == ["sys.excepthook"]
    assert report["adds_global_hook"]["changed"] == ["torch.nn.modules.module._global_forward_hooks"]
    assert upstream_among(report["loads_upstream"]["loaded"]) == ["megatron"]
