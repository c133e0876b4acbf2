"""Source codemods on made-up sources: what goes in, that it comes out byte for byte, and what is refused."""

from __future__ import annotations

import difflib
import errno
import os
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst", reason="the patches are made with it: pip install megatron-flex[patches]")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import megatron_flex_patches.files
from megatron_flex import points
from megatron_flex_patches import VERSION, lines
from megatron_flex_patches.command import main
from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.finding import Target, find
from megatron_flex_patches.launcher import LINES
from megatron_flex_patches.points import IMPORT
from tests.support import sources
from tests.support.messages import assert_names, raises

ROOT = Path(__file__).parents[2]
KINDS = {"megatron": sources.layers(), "fairscale": sources.FAIRSCALE, "launcher": sources.GUARDED}


def patched(source: bytes, kind: str = "megatron") -> bytes:
    return lines.put_in(source, Target(Path("x.py"), kind).insertions(source))


def added(source: str, kind: str) -> list[str]:
    """The lines that a patch adds, without header and marks."""
    new = patched(source.encode(), kind).decode()
    compared = list(difflib.ndiff(source.splitlines(), new.splitlines()))
    assert not [line for line in compared if line.startswith("- ")], "a line that was there is gone"
    mark = f"  {lines.MARK.decode()}"
    ours = [line[2:] for line in compared if line.startswith("+ ")]
    assert all(line.endswith(mark) for line in ours)
    assert lines.HEADER.search(ours[0].encode())
    return [line.removesuffix(mark) for line in ours[1:]]


# --- what goes in


@pytest.mark.versions
@pytest.mark.parametrize("version", sources.SHAPES)
def test_layers_of_versions(version: str) -> None:
    shape = sources.SHAPES[version]
    group = ", group=self.tp_group" if shape.groups else ""
    partial, inner = 'found = self.flex_points("partial", found)', " " * (16 if shape.inference else 12)
    summand = [" " * 12 + partial, " " * 12 + partial]
    inference = [inner + partial, f'{inner}out = self.flex_points("output", out)'] if shape.inference else []
    assert added(sources.layers(shape), "megatron") == [
        *IMPORT,
        '    flex_points = _flex.Points("gemm_input", "local", "output")',
        "        flex_module = self",
        '        if self.flex_points.stands("gemm_input"):',
        "            if (self.cut):",
        f"                y = gather_from_sequence_parallel_region(y{group})",
        "            elif (sums):",
        f"                y = copy_to_tensor_model_parallel_region(y{group})",
        '            y = self.flex_points("gemm_input", y)',
        "            self = _flex.Alone(self)",
        "        self = flex_module",
        '        z = self.flex_points("local", z)',
        '        out = self.flex_points("output", out, runtime_gather_output=runtime_gather_output)',
        '    flex_points = _flex.Points("gemm_input", "partial", "output")',
        '        x = self.flex_points("gemm_input", x)',
        '        z = self.flex_points("partial", z)',
        '        out = self.flex_points("output", out)',
        '    flex_points = _flex.Points("partial", "output")',
        *inference,
        *summand,
        '        out = self.flex_points("output", out)',
    ]


def test_fairscale() -> None:
    ours = added(sources.FAIRSCALE, "fairscale")
    assert ours[: len(IMPORT)] == [*IMPORT]
    ours = ours[len(IMPORT) :]
    assert ours[:4] == [
        '    flex_points = _flex.Points("gemm_input", "local", "output")',
        '        y = self.flex_points("gemm_input", y)',
        '        z = self.flex_points("local", z)',
        '        out = self.flex_points("output", out)',
    ]
    assert [line.strip() for line in ours[4:] if "_flex.Points" in line] == [
        'flex_points = _flex.Points("gemm_input", "partial", "output")',
        'flex_points = _flex.Points("local", "output")',
        'flex_points = _flex.Points("partial", "output")',
    ]


@pytest.mark.parametrize(
    ("source", "behind", "indent"),
    [
        (sources.GUARDED, "    # why it starts so", "    "),
        (sources.BARE, "", ""),
        (sources.CALLED, '    """Starts."""', "    "),
    ],
    ids=["guarded", "bare", "in a function"],
)
def test_launchers(source: str, behind: str, indent: str) -> None:
    assert added(source, "launcher") == [indent + line for line in LINES]
    new = patched(source.encode(), "launcher").decode().splitlines()
    at = next(i for i, line in enumerate(new) if "# megatron_flex patch" in line)
    assert new[at - 1] == behind
    if source is sources.BARE:
        assert new[at + 1 + len(LINES)].startswith("config = training.parse_and_validate_args()")


ABSENT = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == {absent!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.modules["stand_in"] = sys.modules["somewhere"] = stand_in = type(sys)("stand_in")
"""


def run_without(absent: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where a package is not installed."""
    program = ABSENT.format(absent=absent) + program
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_patched_layers_without_megatron_flex() -> None:
    """They are imported, and every point returns what it gets; another missing package is an error."""
    names = (
        "F copy_to_model_parallel_region gather_from_model_parallel_region reduce_from_model_parallel_region"
    )
    program = f"""
for name in {names.split()!r}:
    setattr(stand_in, name, lambda x, *more: x + 1)
stand_in.F.linear = lambda x, w: x * w
space = {{}}
exec(compile({patched(sources.FAIRSCALE.encode(), "fairscale")!r}, "layers.py", "exec"), space)
layer = space["ColumnParallelLinear"]()
layer.weight = 10
print(layer.forward(1), layer.flex_points.stands("gemm_input"))
"""
    done = run_without("megatron_flex", program)
    assert done.stdout == "21 False\n", done.stderr
    done = run_without("torch", program)
    assert done.returncode == 1
    assert_names(done.stderr, "torch")


def test_a_patched_launcher_without_megatron_flex() -> None:
    content = patched(sources.GUARDED.encode(), "launcher")
    program = f"""
stand_in.model = stand_in.parse_and_validate_args = lambda: 5
stand_in.pretrain = lambda *given: print("pretrained", given[0])
exec(compile({content!r}, "script.py", "exec"), {{"__name__": "__main__"}})
"""
    done = run_without("megatron_flex", program)
    assert done.stdout == "pretrained 5\n", done.stderr


class Layer:
    """What the made-up layers compute with, telling what is called."""

    def __init__(self, told: list[Any], **attributes: Any) -> None:
        vars(self).update(attributes)
        self.told = told


@pytest.mark.parametrize("version", sources.SHAPES)
@pytest.mark.parametrize("cut", [False, True])
def test_what_patched_source_does(version: str, cut: bool) -> None:
    """The collective on the input leaves the GEMM where a hook stands, and only there."""
    told: list[Any] = []
    stand_in: Any = types.ModuleType("stand_in")

    def named(name: str) -> Any:
        def call(value: int, *args: Any, **how: Any) -> int:
            told.append((name, value))
            return value

        return call

    for line in sources.HEAD.splitlines():
        if line.startswith("    ") and line.endswith(","):
            setattr(stand_in, line.strip(" ,"), named(line.strip(" ,")))

    def gemm(input: int, weight: int, allreduce_dgrad: bool, sequence_parallel: bool, **how: Any) -> int:
        told.append(("gemm", input, allreduce_dgrad, sequence_parallel))
        return input * 10

    stand_in.gemm = gemm
    space: dict[str, Any] = {}
    sys.modules["stand_in"] = stand_in
    try:
        exec(compile(patched(sources.layers(sources.SHAPES[version]).encode()), "layers.py", "exec"), space)
    finally:
        del sys.modules["stand_in"]
    linear = space["ColumnParallelLinear"]()
    vars(linear).update(sums=not cut, cut=cut, tp_group=None, gathers=False)

    assert linear.forward(1) == (10, None)
    assert told == [("gemm", 1, not cut, cut)]
    own = dict(vars(linear))
    told.clear()
    undo = points.install(linear, "gemm_input", lambda x: x + 1)
    done = points.install(linear, "local", lambda x: x + 5)
    assert linear.forward(1) == (25, None)
    whole = "gather_from_sequence_parallel_region" if cut else "copy_to_tensor_model_parallel_region"
    assert told == [(whole, 1), ("gemm", 2, False, False)]
    undo()
    done()
    assert vars(linear) == own

    row = space["RowParallelLinear"]()
    vars(row).update(cut=cut, tp_group=None, weight=1, bias=None)
    told.clear()
    points.install(row, "partial", lambda x: x + 1)
    points.install(row, "output", lambda x: x * 2)
    assert row.forward(1) == (22, None)
    assert told[-1][1] == 11, "the summand enters the reduction edited"


# --- in and out, byte for byte

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    end=ENDS,
    tabs=st.booleans(),
    bom=st.booleans(),
    encoding=st.sampled_from(["", "latin-1", "utf-8"]),
    last=st.sampled_from(["", "\n", "\n\n  \n", "\n# the end", "\n\x0c\n"]),
    comments=st.lists(st.tuples(st.integers(0, 200), st.text("aä#\t '\"\\", max_size=9)), max_size=8),
)
def test_out_is_what_was_in(
    kind: str, end: bytes, tabs: bool, bom: bool, encoding: str, last: str, comments: list[Any]
) -> None:
    assume(end != b"\r" or not encoding)  # the first line then has no end for what looks for an encoding
    text = KINDS[kind].rstrip("\n").split("\n")
    for at, words in comments:
        place = 1 + at % (len(text) - 1)
        if text[place] and not text[place].rstrip().endswith(('"""', "(")):
            text[place] += f"  # {words}".rstrip() + " ä"
    source = "\n".join(text) + last
    if tabs:
        source = source.replace("    ", "\t")
    if encoding and not bom:
        source = f"# -*- coding: {encoding} -*-\n" + source
    content = source.encode("latin-1" if encoding == "latin-1" and not bom else "utf-8").replace(b"\n", end)
    content = lines.BOM + content if bom else content
    compile(content, "before.py", "exec")

    new = patched(content, kind)
    compile(new, "after.py", "exec")
    taken = lines.take_out(new)
    assert taken.before == content
    assert taken.untouched
    assert [line for line in lines.split(new) if not lines.MARKED.search(line)] == lines.split(content)
    assert patched(taken.before, kind) == new


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Something that looks like a checkout's root."""
    (tmp_path / "megatron/core/tensor_parallel").mkdir(parents=True)
    (tmp_path / "megatron/core/tensor_parallel/layers.py").write_text(sources.layers())
    (tmp_path / "pretrain_gpt.py").write_text(sources.GUARDED)
    (tmp_path / "pretrain_data.py").write_text("nothing = 1\n")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_checkout_in_and_out(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(checkout)
    script = checkout / "pretrain_gpt.py"
    script.chmod(0o755)
    assert main(["--check", str(checkout)]) == 1
    assert main(["--diff", str(checkout)]) == 0
    assert contents(checkout) == before
    shown = capsys.readouterr().out
    assert shown.count("+++") == 2
    assert_names(shown, "megatron_flex.launch.install()")
    subprocess.run(["git", "apply"], cwd=checkout, input=shown.encode(), check=True)
    applied = contents(checkout)
    subprocess.run(["git", "apply", "--reverse"], cwd=checkout, input=shown.encode(), check=True)
    assert main(["--apply", str(checkout)]) == 0
    assert contents(checkout) == applied
    told = capsys.readouterr().out
    assert told.count("patched: ") == 2
    assert "layers.py" in told
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    once = contents(checkout)
    assert once.keys() == before.keys(), "nothing is left beside them"
    assert {n for n in once if once[n] != before[n]} == {
        "megatron/core/tensor_parallel/layers.py",
        script.name,
    }
    assert main(["--check", str(checkout)]) == 0
    assert main(["--apply", str(checkout)]) == 0
    assert contents(checkout) == once, "twice is once"
    assert main(["--diff", str(checkout)]) == 0
    assert "+++" not in capsys.readouterr().out
    assert main(["--revert", str(checkout)]) == 0
    removed = capsys.readouterr().out
    assert contents(checkout) == before
    assert main(["--revert", str(checkout)]) == 0
    assert capsys.readouterr().out not in ("", removed), "that they are not patched"


def test_the_command_of_the_package(checkout: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from megatron_flex.cli.app import app

    answers = [
        runner.invoke(app, ["patch", *words, str(checkout)])
        for words in (["--check"], ["--apply"], ["--check"], ["--revert"], ["--apply", "--revert"])
    ]
    assert [answer.exit_code for answer in answers] == [1, 0, 0, 0, 2]
    assert_names(answers[-1].output, "megatron-flex patch", "--revert", "--apply")


@pytest.mark.parametrize(
    "below", ["", "megatron", "megatron/core", "megatron/core/tensor_parallel/layers.py"]
)
def test_paths_that_mean_it(checkout: Path, below: str) -> None:
    assert main(["--apply", str(checkout / below)]) == 0
    assert lines.is_patched((checkout / "megatron/core/tensor_parallel/layers.py").read_bytes())


def test_launchers_in_all_folders_of_a_checkout(checkout: Path) -> None:
    """Those of Megatron-LM that are not in its root: examples, an elastic script in the package."""
    taken = ["train_rl.py", "examples/mimo/train.py", "megatron/elastification/pretrain_hybrid_flex.py"]
    left = [
        "tests/unit/test_x.py",
        ".git/x.py",
        "venv/x.py",
        "tools/prepare_cache.py",
        "megatron/training.py",
    ]
    for name in (*taken, *left):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(sources.GUARDED)
    (checkout / "venv/pyvenv.cfg").touch()
    (checkout / "tools/prepare_cache.py").write_text("# pretrain() does the same\n")
    (checkout / "tools/old.py").write_text("print 'pretrain()'\n")
    (checkout / "megatron/training.py").write_text("def pretrain(x):\n    return pretrain(x)\n")
    found = [str(t.path.relative_to(checkout.resolve())) for t in find(checkout) if t.kind == "launcher"]
    assert sorted(found) == sorted(["pretrain_gpt.py", *taken])
    (checkout / "site-packages/x").mkdir(parents=True)
    (checkout / "site-packages/pretrain_x.py").write_text(sources.GUARDED)
    (checkout / "site-packages/x/y.py").write_text(sources.GUARDED)
    assert [t.path.name for t in find(checkout / "site-packages")] == ["pretrain_x.py"]


def test_changed_since(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = checkout / "pretrain_gpt.py"

    def says(flag: str) -> str:
        capsys.readouterr()
        assert main([flag, str(script)]) == 0
        return capsys.readouterr().out

    says("--apply")
    checked, reverted = says("--check"), says("--revert")
    says("--apply")
    script.write_text(script.read_text().replace("why it starts so", "for another reason"))
    assert says("--check") != checked, "that there are other changes"
    changed = script.read_text()
    says("--apply")
    assert script.read_text() == changed
    assert says("--revert") != reverted, "that the other changes stay"
    assert script.read_text() == sources.GUARDED.replace("why it starts so", "for another reason")


def test_an_older_patch_is_replaced(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--apply", str(checkout)])
    once = contents(checkout)
    for module in (lines, megatron_flex_patches.files):
        monkeypatch.setattr(module, "VERSION", VERSION + 1)
    monkeypatch.setattr("megatron_flex_patches.command.VERSION", VERSION + 1)
    assert main(["--check", str(checkout)]) == 1
    assert_names(capsys.readouterr().out, f"{VERSION}, this is {VERSION + 1}")
    assert main(["--apply", str(checkout)]) == 0
    newer = contents(checkout)
    assert {
        k: v.replace(b"patch %d," % (VERSION + 1), b"patch %d," % VERSION) for k, v in newer.items()
    } == once
    monkeypatch.undo()
    assert main(["--revert", str(checkout)]) == 2
    assert_names(capsys.readouterr().err, VERSION + 1)
    assert contents(checkout) == newer


# --- what is refused

IMPORTED = "    gather_from_sequence_parallel_region,\n"
MISSING = {  # what the message names, and the change that takes it away
    "ColumnParallelLinear": ("class ColumnParallelLinear(", "class Columns("),
    "RowParallelLinear.forward": ("def forward(self, x):", "def run(self, x):"),
    "self._forward_impl": ("z = self._forward_impl(", "z = self.gemm("),
    "sequence_parallel": ("            sequence_parallel=self.cut,\n", ""),
    "allreduce_dgrad": ("            allreduce_dgrad=sums,\n", ""),
    "input": ("input=y,", "input=y + 0,"),
    "copy_to_tensor_model_parallel_region": ("copy_to_tensor_model_parallel_region(x", "copied(x"),
    "gather_from_sequence_parallel_region": (IMPORTED, ""),
    "reduce_scatter_to_sequence_parallel_region": ("_parallel_region(z", "_region(z"),
    "VocabParallelEmbedding.forward": ("_parallel_region(found", "_region(found"),
    "return out + 0, None": ("return out, None", "return out + 0, None"),
    "a = 1; return out, None": ("        return out, None", "        a = 1; return out, None"),
    "Syntax Error": ("class Base:", "class Base"),
}


@pytest.mark.parametrize("anchor", MISSING)
def test_an_anchor_that_is_not_there(anchor: str, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = checkout / "megatron/core/tensor_parallel/layers.py"
    old, new = MISSING[anchor]
    assert old in layers.read_text()
    layers.write_text(layers.read_text().replace(old, new))
    before = contents(checkout)
    for doing in ("--apply", "--check", "--diff"):
        assert main([doing, str(checkout)]) == 2
        told = capsys.readouterr().err
        assert anchor in told
        assert str(layers) in told
        assert told.count("\n") == 1, "one line"
    assert contents(checkout) == before, "nor is the launcher written"


def test_all_files_or_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(checkout)
    real, calls = megatron_flex_patches.files.os.replace, []

    def replace(new: Path, old: Path) -> None:
        calls.append(old)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(new, old)

    monkeypatch.setattr(megatron_flex_patches.files.os, "replace", replace)
    assert main(["--apply", str(checkout)]) == 2
    assert_names(capsys.readouterr().err, os.strerror(errno.ENOSPC))
    assert len(calls) == 3, "the first is brought back"
    assert contents(checkout) == before


def test_read_only(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = checkout / "pretrain_gpt.py"
    script.chmod(0o444)
    before = contents(checkout)
    assert main(["--apply", str(checkout)]) == 2
    told = capsys.readouterr().err
    assert str(script) in told
    assert_names(told, "u+w")
    assert contents(checkout) == before


def test_links_and_installed_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = tmp_path / "site-packages/fairscale/nn/model_parallel/layers.py"
    real.parent.mkdir(parents=True)
    real.write_text(sources.FAIRSCALE)
    link = tmp_path / "layers.py"
    link.symlink_to(real)
    assert main(["--apply", str(link)]) == 0
    assert_names(capsys.readouterr().out, real)
    assert link.is_symlink()
    assert lines.is_patched(real.read_bytes())
    assert main(["--revert", str(tmp_path / "site-packages")]) == 0
    assert real.read_text() == sources.FAIRSCALE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s.replace(b"        import megatron_flex.launch  # <megatron_flex>\n", b""),
            (4, 5),
        ),
        (
            lambda s: b"".join(x for x in lines.split(s) if b"_flex patch " not in x),
            (0,),
        ),
    ],
    ids=["a line", "the header"],
)
def test_a_damaged_patch(
    change: Any, said: tuple[object, ...], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = checkout / "pretrain_gpt.py"
    main(["--apply", str(script)])
    script.write_bytes(change(script.read_bytes()))
    before = script.read_bytes()
    for doing in ("--revert", "--apply", "--check"):
        assert main([doing, str(script)]) == 2
        assert_names(capsys.readouterr().err, *said)
    assert script.read_bytes() == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", ()),
        ("if True: pretrain(\n", ()),
        ("# pretrain()\n", ("pretrain()",)),
        ('if __name__ == "__main__": pretrain(1)\n', ()),
        ("f = lambda: pretrain(1)\n", ()),
    ],
)
def test_other_files(
    source: str, said: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pretrain_x.py"
    file.write_text(source)
    assert main(["--apply", str(file)]) == 2
    assert_names(capsys.readouterr().err, file, *said)
    assert file.read_text() == source


def test_paths_that_hold_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        assert main(["--check", str(path)]) == 2
        assert_names(capsys.readouterr().err, path)


def test_a_file_that_ends_in_its_anchor() -> None:
    with raises(PatchError, 1):
        lines.put_in(b"x = 1", [lines.Insertion(2, b"", ("y",))])


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class No(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, No())
sys.argv = ["patch_upstream", *sys.argv[1:]]
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("absent", [("torch", "megatron_flex", "megatron", "fairscale"), ("libcst",)])
def test_what_the_script_needs(absent: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    program = ALONE.format(absent=absent, script=str(ROOT / "scripts/patch_upstream"))
    done = subprocess.run(
        [sys.executable, "-c", program, "--apply", str(checkout)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    if "libcst" in absent:
        assert done.returncode == 2
        assert_names(done.stderr, "pip install libcst", "megatron-flex[patches]")
        assert done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0, done.stderr
        assert lines.is_patched((checkout / "pretrain_gpt.py").read_bytes())
