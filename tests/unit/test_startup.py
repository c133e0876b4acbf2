"""Start-up: what importing the package and listing the commands import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import megatron_flex as mf

typer = pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
from megatron_flex.cli.app import app  # noqa: E402
from megatron_flex.cli.command_group import SOURCES  # noqa: E402
from tests.support.messages import raises  # noqa: E402

HEAVY = ("torch", "numpy", "yaml", "megatron_flex.model")


def _list_heavy_imports(code: str) -> str:
    """Run code in a fresh interpreter and return which of the heavy modules it imported."""
    report = f"import sys; print('imported', [n for n in {HEAVY} if n in sys.modules], file=sys.stderr)"
    program = f"import atexit; atexit.register(lambda: exec({report!r}))\n{code}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import megatron_flex",
        "import megatron_flex; megatron_flex.__version__",
        "import sys; sys.argv[1:] = ['--help']; from megatron_flex.cli import main; main()",
        "import sys; sys.argv[1:] = ['--version']; from megatron_flex.cli import main; main()",
    ],
)
def test_start_up_imports_nothing_heavy(code: str) -> None:
    assert _list_heavy_imports(code) == "imported []"


def test_using_a_name_imports_its_module() -> None:
    code = "import megatron_flex as mf; assert mf.attach.__module__ == 'megatron_flex.model.attachment'"
    assert "torch" in _list_heavy_imports(code)


def test_every_public_name_has_one_source() -> None:
    named = {*mf._MODULES, *mf._SUBMODULES, "__version__"}
    assert named == set(mf.__all__)
    assert all(hasattr(mf, name) for name in mf.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with raises(AttributeError, "attahc"):
        getattr(mf, "attahc")  # noqa: B009


def test_listed_summaries_are_those_of_the_commands() -> None:
    group: Any = typer.main.get_command(app)
    commands = dict(group.commands.items())
    assert set(SOURCES) < set(commands)
    for name, source in SOURCES.items():
        assert source.summary == " ".join(commands[name].help.split("\n\n")[0].split()), name
