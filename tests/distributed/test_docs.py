"""The examples in the documents run as they stand.

`blocks` gives those of a page that name the test which asks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flex as mf
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from tests.distributed import test_pipelining
from tests.support import (
    distribution,
    fairscaled,
    families,
    gpt,
    handmade,
    llama,
    moe,
    oracle,
    packed,
    ranks,
    truths,
    wheels,
)
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pages import mine as blocks
from tests.support.pool import run_alone as run  # as a person runs them
from tests.support.rank import changes

ROOT = Path(__file__).parents[2]


CASE = Case("tp2 sp pp2", tp=2, sp=True, pp=2)
EXPERTS = Case("tp2 sp pp2 ep2", tp=2, sp=True, pp=2, ep=2, experts=4, layers=2)


def execute(code: str, case: Case = CASE) -> list[str]:
    chunks = ranks.start(case)
    printed: list[str] = []

    def collect(*words: Any) -> None:
        printed.append(" ".join(str(w) for w in words))

    names = {
        "chunks": chunks,
        "model": chunks,
        "print": collect,
        "train_step": lambda c: gpt.step(case, c, 0),
    }
    exec(code, names)
    return printed


# One process with the weights of the README's example; raises if the ranks have another result.
README_TRUTH = """
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
given = torch.randn(4, 8)
wide = plain[0](given)
plain[2](plain[1](wide - wide.mean(-1, keepdim=True))).square().mean().backward()
for name, parameter in model.named_parameters():
    # Without a collective of torch's, whose thread may abort a process that ends just then.
    places = {"device_mesh": parameter.grad.device_mesh, "placements": parameter.grad.placements}
    truth = plain.get_parameter(name).grad
    truth = torch.distributed.tensor.distribute_tensor(truth, **places, src_data_rank=None)
    torch.testing.assert_close(parameter.grad.to_local(), truth.to_local(), rtol=1e-5, atol=1e-7)
for tensors in flex.output_dict.values():
    torch.testing.assert_close(tensors[0], wide.detach(), rtol=1e-5, atol=1e-6)
"""


def test_the_first_lines_of_the_readme_run() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "README.md")
    (first,), *others = run(4, execute, code)
    wide = (gpt.SEQUENCE, gpt.BATCH, 2 * gpt.FFN)
    names = {f"decoder.layers.{n}.mlp.linear_fc1:output": wide for n in range(4)}
    assert eval(first, {"torch": torch}) == names | {
        "decoder.layers.2:output": (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN)
    }
    assert others == [["{}"]] * 3


def test_the_readme_runs(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "README.md")
    body, end = code.rstrip().rsplit("\n", 1)
    assert end == "torch.distributed.destroy_process_group()"
    (tmp_path / "example.py").write_text(f"{body}\n{README_TRUTH}{end}\n", encoding="utf-8")
    python = wheels.install(wheels.build(tmp_path)[1], tmp_path / "environment")
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    where = [python, "-c", "import megatron_flex; print(megatron_flex.__file__)"]
    source = subprocess.run(where, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=100)
    assert source.stdout.startswith(str(tmp_path / "environment")), source.stderr
    launcher = [python, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*launcher, "--standalone", "--nproc-per-node", "2", "example.py"],
        cwd=tmp_path,
        env=outside,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'0:output': (4, 32)}\n"
    assert "`{'0:output': (4, 32)}`" in (ROOT / "README.md").read_text(encoding="utf-8")


PACKED = Case("packed cp2 tp2 sp", cp=2, tp=2, sp=True, packed="flat", padded=True, layers=2)


def test_the_page_on_packed_sequences_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    capture, read = blocks(ROOT / "docs" / "captures.md")
    code = f"folder = {str(tmp_path / 'dump')!r}\n{capture}"
    (printed, *others) = run(4, execute, code, PACKED)
    residual, hidden = "decoder.layers.1:output", gpt.HIDDEN
    row, lengths = packed.length(True), (5, 11, 7, 9)
    assert sorted(printed) == sorted(
        [
            f"{residual} ({row}, 1, {hidden})",
            f"{residual}.ends (2, 1, {hidden})",
            f"decoder.layers.1.self_attention.core_attention:q (7, {gpt.HEADS}, {hidden // gpt.HEADS})",
            *(f"{residual}.mean.sequence{n} (1, {hidden})" for n in range(4)),
            f"{lengths} {[(n, 1, hidden) for n in lengths]}",
        ]
    )
    assert others == [[], [], []]
    lines: list[str] = []

    def keep(*words: object) -> None:
        lines.append(" ".join(map(str, words)))

    exec(f"import megatron_flex as mf\n{read}", {"folder": str(tmp_path / "dump"), "print": keep})
    both = [(m, n) for m in range(2) for n in lengths]
    assert lines == [f"{i} {m} {list(range(n))} (1, {n}, {hidden})" for i, (m, n) in enumerate(both)]


@pytest.mark.versions
def test_the_page_on_features_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "features.md")
    answers = run(4, execute, code)
    wide = f"({gpt.SEQUENCE}, {gpt.BATCH}, {2 * gpt.FFN})"
    stream = f"({gpt.SEQUENCE}, {gpt.BATCH}, {gpt.HIDDEN})"
    wanted = [f"decoder.layers.{n}.mlp.linear_fc1:output {wide}" for n in range(4)]
    assert sorted(answers[0]) == sorted([*wanted, f"decoder.layers.2:output {stream}"])
    assert answers[1:] == [[], [], []]


def test_the_page_on_parameters_runs() -> None:
    pytest.importorskip("megatron.core")
    (whole,) = blocks(ROOT / "docs" / "captures.md")
    answers = run(4, execute, whole)
    weight = f"({2 * gpt.FFN}, {gpt.HIDDEN})"
    assert answers[0][0] == weight
    assert f"decoder.layers.3.mlp.linear_fc1.weight {weight}" in answers[0]
    assert f"output_layer.weight ({gpt.VOCABULARY}, {gpt.HIDDEN})" in answers[0]
    assert answers[1:] == [[], [], []]


def test_the_check_of_a_live_run_runs() -> None:
    pytest.importorskip("megatron.core")
    (check,) = blocks(ROOT / "docs" / "compare.md")
    assert run(4, execute, check) == [[], [], [], []]


def test_the_page_on_sites_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "sites.md")
    (dispatched, expert), *others = run(4, execute, code, EXPERTS)
    shape, rows = f"({gpt.SEQUENCE}, {gpt.BATCH}, {moe.TOPK}", int(dispatched.rpartition(" ")[2])
    assert dispatched == f"{shape}, {gpt.HIDDEN}) {shape}) {rows}"
    assert rows > 0
    assert expert == f"({rows}, {2 * moe.WIDTH})", (
        "an expert's own rows are those of the slots with its number"
    )
    assert others == [[], [], []]


HYBRID = Case("tp2 sp pp2", tp=2, sp=True, pp=2, hybrid=True)
EFFECT = """
with mf.FlexModel(chunks) as flex:
    for name, weight in weights.items():
        moved = flex.get_module_parameter(f"gpt:{name}", everywhere=True)
        print(name, torch.equal(moved, weight))
print(type(build(config, "*-*-").decoder).__name__)
"""


def execute_migration(code: str, weights: dict[str, Any]) -> list[str]:
    """The page on a HybridModel; its last block builds one, which needs a configuration of one process."""
    single = gpt.config(Case("one", layers=2, hybrid=True))
    given = {"chunks": ranks.start(HYBRID), "train_step": lambda c: gpt.step(HYBRID, c, 0)}
    printed: list[str] = []
    names = {**given, "torch": torch, "weights": weights, "config": single}
    exec(code, names | {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    return printed


def test_the_page_on_hybrid_models_runs() -> None:
    pytest.importorskip("megatron.core.models.hybrid", reason="HybridModel came with megatron-core 0.19")
    page = ROOT / "docs" / "models.md"
    state = truths.of(Case("tp2").single(), oracle.sites_of(Case("tp2").single()), [])["state"]
    first, *others = run(4, execute_migration, "\n".join([*blocks(page), EFFECT]), state)
    shown = "".join(blocks(page, "text")).splitlines()
    assert first[: len(shown)] == shown
    assert others[0][0] == shown[-1], "flex.sites() is the same on every rank"
    lens, unchanged, *moved, stack = first[len(shown) :]
    assert lens == f"({gpt.BATCH}, 16, {gpt.HIDDEN}) ({gpt.BATCH}, {gpt.HEADS}, 16, 16)"
    assert unchanged == "False", "the edit changes the logits"
    assert moved == [f"{name} True" for name in state]
    assert stack == "HybridStack"


def test_the_page_on_models_that_hold_others_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "models.md")
    case = Case("value head tp2 sp", tp=2, sp=True, layers=2, family=families.VALUE)
    shapes = {
        "policy.decoder.layers.1.mlp.linear_fc1:output": (gpt.SEQUENCE, gpt.BATCH, 2 * gpt.FFN),
        "v_head.1:output": (gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN // 2),
    }
    first, second = run(2, execute, code, case)
    assert sorted(first) == sorted(f"{name} {shape}" for name, shape in shapes.items())
    assert second == []


def test_the_page_on_dumps_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write, read = blocks(ROOT / "docs" / "dumps.md")
    run(4, execute, f"folder = {str(tmp_path / 'dump')!r}\n{write}")
    printed: list[str] = []
    names = {"folder": str(tmp_path / "dump"), "print": lambda *words: printed.append(str(words[0]))}
    exec(read, names)
    assert printed[0] == "[0, 2]"
    assert printed[1] == "('iteration', 'sample', 'token', 'gate|up')"
    assert printed[2] == "torch.Size([4, 8])"
    assert printed[3] == "torch.Size([32, 32])"
    (shown,) = blocks(ROOT / "docs" / "dumps.md", "text")
    written = {str(p.relative_to(tmp_path / "dump")) for p in (tmp_path / "dump").rglob("*") if p.is_file()}
    for line in shown.splitlines():
        form = re.sub(r"\d", r"\\d", re.escape(line.split()[0].removeprefix("DIR/")))
        assert any(re.fullmatch(form, name) for name in written), line


def test_the_page_on_statistics_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write, read, watch = blocks(ROOT / "docs" / "statistics.md")
    folder = f"folder = {str(tmp_path / 'stats')!r}\n"
    run(4, execute, folder + write)
    run(4, execute, f"import megatron_flex as mf\n{watch}")
    printed: list[str] = []
    exec(folder + read, {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    count = gpt.SEQUENCE * gpt.BATCH * gpt.HIDDEN * CASE.microbatches
    names = ["decoder.layers.0:mid", "decoder.layers.0.mlp.linear_fc1:output", "decoder.layers.0:output"]
    assert printed[0] == "[0, 2]"
    assert any(f"'{name}'" in printed[1] for name in names)
    assert printed[2].endswith(f"] [{count}, {count}]")
    assert re.fullmatch(r"\[[\d.e-]+, [\d.e-]+\]", printed[3])
    assert re.fullmatch(r"decoder\S+ [02] [\d.]+", printed[4])


def test_the_page_on_cpus_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "start.md")
    run(1, _run_plainly, code)


def test_the_scale_of_gradients_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "how-it-works.md")
    first, *others = run(4, execute, code)
    shape = f"({gpt.SEQUENCE}, {gpt.BATCH}, {gpt.HIDDEN})"
    assert first == [f"decoder.layers.3:output.grad {shape}"]
    assert others == [[], [], []]


def test_the_page_on_the_compatible_interface_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "moving.md")
    first, *others = run(4, execute, code)
    wide = f"({gpt.SEQUENCE}, {gpt.BATCH}, {2 * gpt.FFN})"
    wanted = [f"decoder.layers.{n}.mlp.linear_fc1 {CASE.microbatches} {wide}" for n in range(4)]
    stream = f"decoder.layers.1 {CASE.microbatches} ({gpt.SEQUENCE}, {gpt.BATCH}, {gpt.HIDDEN})"
    assert sorted(first[:-1]) == sorted([*wanted, stream])
    assert first[-1] == "decoder.layers.1"
    assert all(sorted(other) == sorted(first) for other in others), "on every rank"


@pytest.mark.versions
def test_the_page_on_selecting_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "captures.md")
    first, *others = run(4, execute, code)
    s, b, h = gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN
    assert sorted(first) == [
        f"decoder.layers.0.self_attention.core_attention:q {(s, b, 2, h // gpt.HEADS)}",
        f"decoder.layers.1:output {(1, b, h)}",
        f"decoder.layers.1:output.norm {(s, b)}",
        f"decoder.layers.3.mlp.linear_fc1:output {(1, 64)}",
        f"decoder.layers.3.mlp.linear_fc1:output.probe {(s, b, 3)}",
        f"output_layer:output {(2, b, 5)}",
        f"output_layer:output.indices {(2, b, 5)}",
    ]
    assert others == [[], [], []]


@pytest.mark.versions
def test_the_page_on_edits_runs() -> None:
    pytest.importorskip("megatron.core")
    own, ready, patching, marked = blocks(ROOT / "docs" / "edits.md")
    for (printed,) in run(4, execute, own):
        assert_names(printed, "decoder.layers.2", "center")
    assert run(4, execute, ready) == [["swap(0, 1) | clamp(-2.0, 2.0)"]] * 4
    assert run(4, execute, marked) == [["True"]] * 4
    for (printed,) in run(4, execute, patching):
        assert_names(printed, "decoder.layers.2")


@pytest.mark.versions
def test_the_page_on_edits_that_sum_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "contributing" / "extend.md")
    for printed in run(4, execute, code):
        on_parts, on_wholes = ([float(x) for x in line.split()] for line in printed)
        assert on_parts == pytest.approx(on_wholes, rel=1e-5)


@pytest.mark.versions
def test_the_page_on_debugging_runs() -> None:
    pytest.importorskip("megatron.core")
    page = ROOT / "docs" / "debugging.md"
    explain, stop = blocks(page)
    first, *others = run(4, execute, explain)
    (shown,) = blocks(page, "text")
    assert [timeless(line) for line in first] == [timeless(shown.rstrip())]
    assert others == [[], [], []]
    assert run(4, execute, stop) == [[], [], [], []]


def timeless(text: str) -> str:
    return re.sub(r"[\d.]+ ms", "T ms", text)


def test_the_page_on_plain_modules_runs() -> None:
    alone, spread = blocks(ROOT / "docs" / "plain.md")
    printed: list[str] = []
    exec(alone, {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    gradients = {"0:output[-1].grad (1, 2, 16)", "0.weight_ih_l0.grad (64, 8)"}
    assert set(printed) == {"0:output[2] (1, 2, 16)", *gradients}
    assert run(2, _run_by_hand, spread) == [["(3, 4, 16)"], []]


def _run_by_hand(code: str) -> list[str]:
    printed: list[str] = []
    model, batch = handmade.parallel(2), handmade.batch(0)
    exec(code, {"model": model, "batch": batch, "print": lambda text: printed.append(str(text))})
    return printed


def test_an_inferred_layout_runs() -> None:
    pytest.importorskip("fairscale")
    (code,) = blocks(ROOT / "docs" / "how-it-works.md")
    assert run(2, _run_followed, code) == [[f"(2, 8, {llama.FFN})"], []]


def _run_followed(code: str) -> list[str]:
    printed: list[str] = []
    fairscaled.take_over()
    names = {"model": fairscaled.llama_of(2), "tokens": llama.batch(0)[0]}
    exec(code, {**names, "print": lambda text: printed.append(str(text))})
    return printed


@pytest.mark.versions
def test_the_page_on_training_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "training.md")
    assert run(4, execute, code) == [[f"({gpt.VOCABULARY}, {gpt.HIDDEN})"]] * 4


def distill(code: str) -> list[float]:
    """The greatest gradients of weights of this rank's layers, with the loss function of the page."""
    chunks = ranks.start(CASE)
    teacher = torch.zeros(gpt.SEQUENCE, gpt.BATCH, 2 * gpt.HIDDEN)
    step = gpt.forward_step
    with mf.attach(chunks) as flex:
        names: dict[str, Any] = {"flex": flex, "torch": torch, "teacher": teacher}
        exec(code, names)

        def run(*args: Any, **kwargs: Any) -> Any:
            output, _ = step(*args, **kwargs)
            return output, lambda output: (names["loss_function"](0.0 * output)[0], {"loss": torch.zeros(())})

        changes.setattr(gpt, "forward_step", run)
        gpt.step(CASE, chunks, 0)
    grads = {n: p.grad for n, p in gpt.global_names(chunks[0]) if n.endswith("linear_fc2.weight")}
    return [float(grad.abs().max()) for grad in grads.values() if grad is not None]


def test_the_page_on_hidden_states_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "training.md")
    answers = run(4, distill, code)
    assert [[grad > 0 for grad in grads] for grads in answers[:2]] == [[True, True]] * 2
    assert [[grad > 0 for grad in grads] for grads in answers[2:]] == [[True, False]] * 2, "beyond layer 2"


@pytest.mark.versions
def test_the_page_on_shared_values_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "edits.md")
    answers = run(4, execute, code)
    told = [f"{CASE.microbatches} {list(range(CASE.microbatches))}"]
    assert answers == [[], [], told, told]


def test_the_page_on_adapters_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "contributing" / "extend.md"
    toy, adapter, use, detect = blocks(page)
    assert len(adapter.splitlines()) < 100
    (line,) = re.findall(r"^toy = .*", page.read_text(encoding="utf-8"), re.MULTILINE)
    distribution.install(tmp_path, "toy_flex", adapter, line.replace('"', ""))
    (tmp_path / "toy.py").write_text(toy, encoding="utf-8")
    (again, first, *read), (_, *others) = run(2, _run_adapter, use, detect, str(tmp_path))
    assert again == first
    (shown,) = blocks(page, "text")
    told = set(shown.splitlines())
    for text in (first, *others):
        assert {line for line in text.splitlines() if not line.startswith("  not ")} < told
    assert len(others) == 1
    assert set(read) == {
        "0:output (4, 16)",
        "0:output.grad (4, 16)",
        "1:output (4, 16)",
        "2:partial (4, 8)",
        "2.weight.grad (8, 16)",
    }


@pytest.mark.versions
def test_the_page_on_extending_runs() -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "contributing" / "extend.md")
    assert run(4, execute, code) == [["soften(2.0, positions=-1) True"]] * 4


def _run_adapter(code: str, detect: str, folder: str) -> list[str]:
    sys.path.insert(0, folder)
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    exec(code, names)
    exec(detect, names)
    printed.insert(0, printed.pop())
    _compare_toy(names)
    return printed


def _compare_toy(names: dict[str, Any]) -> None:
    """The example's tensors are those of one process with the same weights."""
    import megatron_flex as mf

    flex, functional = names["flex"], torch.nn.functional
    with mf.FlexModel(names["model"]) as whole:
        up, down = (t.clone().requires_grad_() for _, t in whole.named_full_parameters(everywhere=True))
    assert (tuple(up.shape), tuple(down.shape)) == ((16, 6), (8, 16))
    x = functional.linear(torch.arange(24.0).view(4, 6) / 24, up)
    edited = x / x.norm(dim=-1, keepdim=True)
    active = functional.gelu(edited)
    y = functional.linear(active, down)
    truth = {"0:output": x, "1:output": active, "2:partial": y}
    found = torch.autograd.grad(y.square().sum(), [edited, down])
    truth |= dict(zip(("0:output.grad", "2.weight.grad"), found, strict=True))
    for name, tensors in flex.output_dict.items():
        torch.testing.assert_close(tensors[0], truth[name].detach(), rtol=1e-5, atol=1e-5)


def test_the_page_on_comparing_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write, read = blocks(ROOT / "docs" / "compare.md")
    for name in ("one", "four"):  # of the same weights; other layouts: test_compare_bugs.py
        run(4, execute, f"folder = {str(tmp_path / name)!r}\n{write}")
    printed: list[str] = []
    names = {"one": tmp_path / "one", "four": tmp_path / "four"}
    exec(read, names | {"print": lambda *words: printed.append(" ".join(map(str, words)))})
    assert printed[0] in ("equal", INDISTINGUISHABLE)
    assert "loss:output value 0 True" in printed
    assert "decoder.layers.3.mlp:output.grad gradient 0 True" in printed


def test_how_it_works_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    page = ROOT / "docs" / "how-it-works.md"
    layout, site, hook = blocks(page)
    printed: list[str] = []
    names: dict[str, Any] = {"print": printed.append}
    exec(layout, names)
    (shown,) = blocks(page, "text")
    assert printed == [shown.rstrip()]
    head, _, rest = names["svg"].partition(">")
    dark = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
    kept = page.parent / "layout.svg"
    assert kept.read_text(encoding="utf-8") == f"{head}>{dark}{rest}\n", "write it anew"
    wide = re.escape(f"('s', 'b', {2 * gpt.FFN}) 1")
    for axes, *sites in run(4, execute, site):
        assert axes == "['pp', 'tp']"
        found = [line for line in sites if line.startswith("decoder.layers.3.mlp.linear_fc1:output ")]
        assert len(found) == 1
        assert re.fullmatch(rf"\S+ \[s, b, \S+/tp in 2 segments\] {wide}", found[0])
    first, *others = run(4, execute, hook)
    seen = [f"decoder.layers.{n}.mlp.linear_fc1:output" for n in range(4)]
    assert first == [str(sorted([*seen, "decoder.layers.2:output"]))]
    assert others == [["[]"]] * 3


def test_the_page_on_estimates_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.training", exc_type=ImportError)
    (code,) = blocks(ROOT / "docs" / "estimate.md")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    seconds, moved = done.stdout.splitlines()[-1].split()
    assert 0 < float(seconds) < 10
    assert float(moved) > 0


def test_the_page_on_launchers_runs() -> None:
    pytest.importorskip("pydantic")
    (code,) = blocks(ROOT / "docs" / "launch.md")
    code += "import sys\nprint(sys.argv[1:], 'megatron' in sys.modules)"
    words = [
        sys.executable,
        "-c",
        code,
        "--lr",
        "1",
        "--flex-stats",
        "out",
        "--flex-sites",
        "decoder.layers.*",
    ]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--lr', '1'] False\n"


def test_the_page_on_the_bridge_runs(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    (code,) = blocks(ROOT / "docs" / "launch.md")
    run(2, _run_bridged, code, tmp_path)
    with mf.open_dump(tmp_path / "dumps" / "run") as dump:
        assert list(dump.iterations) == [0, 1, 2]
        assert list(dump.sites) == [f"decoder.layers.{n}:mid" for n in range(2)]


def _run_bridged(code: str, folder: Path) -> None:
    from tests.distributed import test_bridge

    os.chdir(folder)
    chunks = ranks.start(test_bridge.TP2)
    state = SimpleNamespace(train_state=SimpleNamespace(step=0))
    context = SimpleNamespace(state=state, model=chunks, user_state={})

    def pretrain(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        manager = test_bridge.Contract()
        manager.add(callbacks)
        test_bridge.train(lambda event: manager.fire(event, context), chunks, state, 3)

    exec(code, {"pretrain": pretrain, "config": None, "forward_step": None})


def test_the_page_on_deepspeed_runs() -> None:
    if find_spec("deepspeed") is None:  # not importorskip: importing it here would patch this process
        pytest.skip("deepspeed is not installed")
    (code,) = blocks(ROOT / "docs" / "frameworks.md")
    assert run(1, _run_deepspeed, code) == [False]


def _run_deepspeed(code: str) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    exec(code, {"deepspeed": deepspeed})
    return deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


def test_the_page_on_steps_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "plain.md")
    stage = torch.nn.Linear(2, 3)
    with mf.attach(stage, [mf.HookFunction("root")]) as flex:
        exec(code, {"flex": flex, "stage": stage, "microbatches": torch.ones(4, 5, 2)})
        (tensors,) = flex.output_dict.values()
    assert [tuple(t.shape) for t in tensors] == [(5, 3)] * 4


def test_the_page_on_pipelines_runs() -> None:
    (code,) = blocks(ROOT / "docs" / "plain.md")
    assert run(2, _run_pipelined, code) == [["layers.0:output 4"], []]


def _run_pipelined(code: str) -> list[str]:
    printed: list[str] = []
    schedule = test_pipelining.schedule_of("Interleaved1F1B", 4, 2)
    tokens, labels = llama.batch(0)
    names = {
        "stages": schedule._stages,
        "loss_fn": llama.loss_of,
        "hooks": [mf.HookFunction("layers.0")],
        "tokens": tokens.repeat(2, 1),
        "labels": labels.repeat(2, 1),
        "print": lambda *words: printed.append(" ".join(map(str, words))),
    }
    exec(code, names)
    return printed


def _run_plainly(code: str) -> None:
    exec(code, {})


def test_the_page_on_moving_runs() -> None:
    pytest.importorskip("megatron.core")
    code = "\n".join(blocks(ROOT / "docs" / "moving.md"))
    b, s, h = gpt.BATCH, gpt.SEQUENCE, gpt.HIDDEN
    heads = (b, s, gpt.HEADS, h // gpt.HEADS)
    assert run(4, execute, code) == [[f"{heads} True", f"{(b, s, h)}"]] * 4


@pytest.mark.versions
def test_the_page_on_the_lens_runs() -> None:
    pytest.importorskip("megatron.core")
    code = "\n".join(blocks(ROOT / "docs" / "lens.md"))
    b, s, h, v = gpt.BATCH, gpt.SEQUENCE, gpt.HIDDEN, gpt.VOCABULARY
    wanted = [
        f"{(b, gpt.HEADS, s, s)} ['embed', '0_attn_out', '0_mlp_out'] {(4 * gpt.HEADS, b, s, h)} "
        f"{(9, b, s)} {(5, b, s, v)}",
        "decoder.layers.0.mlp.linear_fc1:output",
        f"{(b, s, h)} True False",
        f"{(b, s, h)}",
        f"{(2, v)} tensor([5, 6])",
        f"{(b, s, v)} {(b, s, v)}",
        f"{(b, s, h)} {(b, s, gpt.FFN)}",
        f"{(2 * b, s, h)}",
    ]
    assert run(4, execute, code) == [wanted] * 4
