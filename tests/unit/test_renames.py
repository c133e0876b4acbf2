"""The codemod that renames modules and names: by what names mean, not by how they look."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import megatron_flex
from tests.support.pages import ROOT

OLD = {
    "megatron_flex/a.py": '''"""Has `told`, which `b` uses."""

from typing import TypeVar

LIMIT = 3
Kind = TypeVar("Kind")


def told(told_too: int, LIMIT: int = 1) -> int:
    """See `told` and `b`."""
    return told_too + LIMIT


class Box:
    told = 1
    __slots__ = ("LIMIT",)

    def LIMIT(self) -> int:
        return LIMIT
''',
    "megatron_flex/__init__.py": 'from megatron_flex.a import told as told\n\n__all__ = ["told"]\n',
    "megatron_flex/b.py": """from megatron_flex import a, told
from megatron_flex.a import LIMIT as most
from megatron_flex.a import Box


def f(text: str) -> list[int]:
    told_here = [told(n) for n in range(most)]
    setattr(a, "LIMIT", 4)

    def told(n: int) -> int:
        return n

    return [*told_here, told(1), a.told(2), a.LIMIT, Box.told]


WHERE = "megatron_flex.a.told", "megatron_flex/a.py", "megatron_flex.about"
""",
}
MAP = """
[modules]
"megatron_flex.a" = "megatron_flex.counts"

[names]
"megatron_flex.a:told" = "count"
"megatron_flex.a:LIMIT" = "MOST"
"megatron_flex.a:Kind" = "KindT"

[locals."megatron_flex.a"]
told_too = "more"
"""


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import renames

    yield renames
    for name in ("renames", "merges", "public_renames"):
        sys.modules.pop(name, None)


def read(renames: ModuleType, folder: Path, text: str = MAP) -> "object":
    (folder / "map.toml").write_text(text)
    return renames.Renames.read(folder / "map.toml")


def test_names_are_renamed_by_what_they_mean(renames: ModuleType, tmp_path: Path) -> None:
    found = renames.renamed(renames.Tree(OLD), read(renames, tmp_path))
    path, a = found["megatron_flex/a.py"]
    assert path == "megatron_flex/counts.py"
    assert "MOST = 3" in a
    assert 'KindT = TypeVar("KindT")' in a
    assert "def count(more: int, LIMIT: int = 1)" in a, "a parameter of that name is its own"
    assert "return more + LIMIT" in a
    assert "    told = 1" in a, "so is an attribute"
    assert '__slots__ = ("LIMIT",)' in a, "and a slot"
    assert "def LIMIT(self)" in a
    assert "return MOST" in a, "a method does not see the class's names"
    assert "See `count` and `b`" in a
    assert found["megatron_flex/__init__.py"][1] == (
        'from megatron_flex.counts import count as count\n\n__all__ = ["count"]\n'
    )
    b = found["megatron_flex/b.py"][1]
    assert "from megatron_flex import counts, count\n" in b
    assert "from megatron_flex.counts import MOST as most" in b
    assert 'setattr(counts, "MOST", 4)' in b
    assert "told(1), counts.count(2), counts.MOST, Box.told" in b, "a function inside is another"
    assert 'WHERE = "megatron_flex.counts.count", "megatron_flex/counts.py", "megatron_flex.about"' in b


def test_the_inverse_map_gives_what_was(renames: ModuleType, tmp_path: Path) -> None:
    there = read(renames, tmp_path)
    new = dict(renames.renamed(renames.Tree(OLD), there).values())
    back = dict(renames.renamed(renames.Tree(new), there.inverse()).values())
    assert back == OLD


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"megatron_flex.a:told" = "Box"', "Box is there already"),
        ('"megatron_flex.a:gone" = "here"', "megatron_flex.a:gone"),
    ],
)
def test_what_cannot_be_renamed(renames: ModuleType, tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        renames.strangers(renames.Tree(OLD), read(renames, tmp_path, f"[names]\n{line}\n"))


def test_the_code_of_others(renames: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    theirs = tmp_path / "theirs" / "train.py"
    theirs.write_text(
        "import megatron_flex as mf\nfrom megatron_flex.runtime.failing import numbered\n"
        "from megatron_flex import edits\n\nprint(numbered([0]), edits.heads(0), mf.edits.ablate())\n"
    )
    renames.fork(renames.Renames.read(ROOT / "docs" / "renames.toml").for_importers(), [tmp_path / "theirs"])
    assert theirs.read_text() == (
        "import megatron_flex as mf\nfrom megatron_flex.runtime.edit_failures import format_ranks\n"
        "from megatron_flex import edits\n\n"
        "print(format_ranks([0]), edits.ablate_heads(0), mf.edits.zero())\n"
    )


def test_public_names_in_the_code_of_others(renames: ModuleType, tmp_path: Path) -> None:
    theirs = tmp_path / "train.py"
    theirs.write_text(
        "import megatron_flex as mf\nfrom megatron_flex import HookFunction\n"
        "from megatron_flex.launch.planning import costs, plan\n\n"
        "hook = mf.HookFunction('a', run='leader', tags=('b',))\n"
        "more = HookFunction('leader', tags=tags(run='leader'))\n"
        "with mf.attach(model, [hook]) as flex:\n    flex.tag(hook, 'c')\n    other.tag(hook)\n"
        "    print(flex.costs(), hook.tags, plan('a.yaml'), costs('a.yaml'))\n"
        "with mf.open_dump('d') as dump:\n    print(dump.place('a'), other.place('a'))\n"
    )
    renames.fork(renames.Renames.read(ROOT / "docs" / "renames.toml").for_importers(), [theirs])
    assert theirs.read_text() == (
        "import megatron_flex as mf\nfrom megatron_flex import HookFunction\n"
        "from megatron_flex.launch.estimate import estimate_hooks, estimate_dump\n\n"
        "hook = mf.HookFunction('a', run='once', groups=('b',))\n"
        "more = HookFunction('leader', groups=tags(run='leader'))\n"
        "with mf.attach(model, [hook]) as flex:\n    flex.add_to_groups(hook, 'c')\n    other.tag(hook)\n"
        "    print(flex.estimate(), hook.groups, estimate_dump('a.yaml'), estimate_hooks('a.yaml'))\n"
        "with mf.open_dump('d') as dump:\n    print(dump.site_record('a'), other.place('a'))\n"
    )


def test_methods_that_moved_are_pointed_out(
    renames: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, others = tmp_path / "theirs.py", tmp_path / "others.py"
    text = "flex.run_with_cache(t)\nwith flex.lens_hooks([]):\n    flex.interp.trace()\nflex.report.show\n"
    theirs.write_text("import megatron_flex\n" + text)
    others.write_text(text)
    there = renames.Renames.read(ROOT / "docs" / "renames.toml").for_importers()
    renames.fork(there, [theirs, others])
    assert capsys.readouterr().out.splitlines() == [
        f"{theirs}:2: FlexModel.run_with_cache is FlexModel.interp.run_with_cache now, if this is one",
        f"{theirs}:3: FlexModel.lens_hooks is FlexModel.interp.hooks now, if this is one",
    ]
    assert theirs.read_text() == "import megatron_flex\n" + text


def test_methods_that_moved_are_where_the_map_says(renames: ModuleType) -> None:
    flex = megatron_flex.FlexModel(nn.Linear(2, 2))
    there = renames.Renames.read(ROOT / "docs" / "renames.toml")
    assert len(there.methods) > 5
    for (owner, name), access in there.methods.items():
        assert owner == "megatron_flex.FlexModel"
        assert not hasattr(flex, name), f"{name} has moved, and has no alias"
        space, _, method = access.partition(".")
        assert hasattr(getattr(flex, space), method), access
    flex.restore()


def test_modules_are_merged(renames: ModuleType) -> None:
    import merges

    files = {
        "megatron_flex/low.py": '"""Low."""\n\nimport math\n\n\ndef low() -> float:\n    return math.pi\n',
        "megatron_flex/high.py": '"""High."""\n\nfrom megatron_flex.low import low\n\n\nHIGH = low()\n',
        "megatron_flex/user.py": (
            "from megatron_flex import low\nfrom megatron_flex.high import HIGH\n\nlow.low()\n"
        ),
        "megatron_flex/__init__.py": "",
    }
    owners = {"megatron_flex.low": "megatron_flex.one", "megatron_flex.high": "megatron_flex.one"}
    tree = renames.Tree(files)
    members = [tree.modules[m] for m in ("megatron_flex.high", "megatron_flex.low")]
    assert merges.collisions(tree, members, owners) == []
    text = merges.united(tree, merges.ordered(tree, members), "Both.", owners)
    assert text.startswith('"""Both."""\n\nfrom __future__ import annotations\n\nimport math\n')
    assert "import low" not in text
    scope: dict[str, object] = {}
    exec(text, scope)  # what is needed comes first
    assert scope["HIGH"] == 3.141592653589793
    user = tree.files["megatron_flex/user.py"]
    merges.change_importer(tree, user, owners)
    assert user.edited() == (
        "from megatron_flex import one\nfrom megatron_flex.one import HIGH\n\none.low()\n"
    )
    other = {**files, "megatron_flex/high.py": "def low() -> None: ...\n"}
    tree = renames.Tree(other)
    members = [tree.modules[m] for m in owners]
    (problem,) = merges.collisions(tree, members, owners)
    assert problem.startswith("low: ")
