"""The worked launcher: plain and by the runner in one process, by the Slurm example in four."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import megatron_flex as mf
from megatron_flex.compare import compare
from tests.support import pages
from tests.support.launching import SCRIPTS, Server, has_pretrain, torchrun

ROOT = SCRIPTS.parent
SCRIPT = SCRIPTS / "pretrain_tiny.py"
BATCH = SCRIPTS / "slurm" / "pretrain_tiny.sbatch"
PAGE = ROOT / "docs" / "launch.md"
ITERATIONS, SAMPLES, LENGTH, HIDDEN = 3, 8, 32, 64
CLOSE = 1e-5  # between layouts, relative; fp32
SMALLER = (
    f"--hidden-size {HIDDEN} --ffn-hidden-size 96 --seq-length {LENGTH} --max-position-embeddings {LENGTH}"
)
TRAINING = f"--micro-batch-size 4 --global-batch-size {SAMPLES} --train-iters {ITERATIONS} --eval-interval 2"

# The scheduler, in small: a task for each node, on this machine.
SRUN = """#!/usr/bin/env bash
while [[ ${1:-} == --* ]]; do shift; done
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_NODEID=$node "$@" &
  tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "$status"
"""
NUDGE = '''
def nudge(current_module, inputs, save_ctx, modules):
    """Mixes features, so that no rank could do it with its shard alone."""
    return inputs + 0.1 * inputs.roll(1, -1)
'''
MLP, LAYER = "decoder.layers.1.mlp.linear_fc2", "decoder.layers.1"
HALF, NUDGED = MLP, "decoder.layers.2.mlp.linear_fc1"
SITES = ["decoder.layers.*", f"{LAYER}:mid", MLP, "decoder.layers.*.mlp.linear_fc1", "loss"]


# Around the page's code: a probe with labels of each microbatch, and a vector that the model's loss trains.
BEFORE_THE_PAGE = f"""
import json
import sys

from megatron_flex import cpu

cpu.enable()
import torch

import megatron_flex as mf

sys.path.insert(0, {str(SCRIPTS)!r})
import pretrain_tiny as script

sent, read = [], []


def probe(current_module, inputs, save_ctx, modules):
    read.append(save_ctx.labels.sum().item())
    logits = modules["probe"](inputs.detach()).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, save_ctx.labels.T.flatten()).backward()
    return inputs


def steer(current_module, inputs, save_ctx, modules):
    return inputs + modules["vector"]["direction"]


hooks = [
    mf.HookFunction("decoder.layers.2", probe, save=False),
    mf.HookFunction("decoder.layers.1", steer, save=False),
]
modules = {{
    "probe": torch.nn.Linear({HIDDEN}, 256),
    "vector": torch.nn.ParameterDict({{"direction": torch.zeros({HIDDEN})}}),
}}
"""
AFTER_THE_PAGE = """
norms = []


def forward_step(data, model):
    batch = script.batch_of(data)
    flex.save_ctx.labels = batch["labels"]
    sent.append(batch["labels"].sum().item())
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), script.loss_of


def noting(*args, **kwargs):
    out = step_both(*args, **kwargs)
    norms.append([p.detach().norm().item() for p in flex.trainable_parameters()])
    return out


training.train_step, script.forward_step = noting, forward_step
script.main()
print(json.dumps({"sent": sent, "read": read, "norms": norms}))
"""


class Run(NamedTuple):
    """A training that is over."""

    output: str
    folder: Path

    @property
    def losses(self) -> list[float]:
        """By iteration."""
        return [float(x) for x in re.findall(r"iteration +\d+/.*?lm loss: ([\d.E+-]+)", self.output)]

    @property
    def curve(self) -> list[str]:
        """What Megatron logs of each iteration, without the time."""
        lines = re.findall(r"iteration +\d+/.*", self.output)
        return [re.sub(r"elapsed time per iteration \(ms\): [\d.]+", "", line) for line in lines]


def ran(command: list[object], folder: Path, **variables: str) -> Run:
    """Run it in a process group of its own, of which nothing is left behind if it fails."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "MASTER_PORT": str(free_port()),
    }
    process = subprocess.Popen(
        [str(word) for word in command],
        env=environment | variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0, output[-6000:]
    return Run(output, folder)


def free_port(low: int = 0) -> int:
    """A port that nothing listens at: any, or the first one from `low` on."""
    with socket.socket() as s:
        while True:
            try:
                s.bind(("localhost", low))
            except OSError:
                low += 1
            else:
                return int(s.getsockname()[1])


def flags_for_a_cpu() -> list[str]:
    """Those with which the page runs the example on a laptop."""
    (words,) = re.findall(r"^scripts/slurm/pretrain_tiny.sbatch (.*)", PAGE.read_text("utf-8"), re.MULTILINE)
    return words.split()


def flags_of_the_example() -> list[str]:
    """The model's and the training's flags in the Slurm example."""
    arrays = re.findall(r"^(?:MODEL|TRAINING)=\(\n(.*?)^\)", BATCH.read_text(), re.DOTALL | re.MULTILINE)
    return re.sub(r"#.*", "", " ".join(arrays)).split()


@pytest.fixture(scope="module")
def first(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ...]:
    """The script alone, and by the runner with no flags but that for the CPU; both leave a checkpoint."""
    if not has_pretrain():
        pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
    words = [SCRIPT, *flags_of_the_example(), *flags_for_a_cpu(), *f"{SMALLER} {TRAINING}".split()]
    words += ["--eval-iters", "0", "--save", "checkpoint", "--save-interval", "100"]
    plain, runner = (tmp_path_factory.mktemp(name) for name in ("plain", "runner"))
    return forked(server, plain, *words, plain=True), forked(server, runner, *words, "--flex-cpu")


def forked(server: Server, folder: Path, *words: object, plain: bool = False) -> Run:
    """The script in one process, plainly or by the runner."""
    done = server(1, folder, *words, plain=plain)
    assert done.status == [0], done.err[0][-6000:]
    return Run(done.out[0] + done.err[0], folder)


@pytest.fixture(scope="module")
def both(first: tuple[Run, ...], server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ...]:
    """From the same weights, by flags in one process and by a file in four: dumped, measured, edited."""
    more = [*flags_for_a_cpu(), *f"{SMALLER} {TRAINING} --eval-iters 1".split()]
    more += ["--load", str(first[0].folder / "checkpoint"), "--finetune"]
    one = tmp_path_factory.mktemp("one")
    (one / "edits.py").write_text(NUDGE, encoding="utf-8")
    ours = ["--flex-cpu", "--flex-gradients", "--flex-sites", *SITES]
    ours += ["--flex-dump", "dump", "--flex-stats", "stats"]
    ours += ["--flex-edit", HALF, "scale=0.5", "--flex-edit", f"{NUDGED} edits.py:nudge"]
    by_flags = forked(server, one, SCRIPT, *ours, *flags_of_the_example(), *more)
    return by_flags, run_job(tmp_path_factory.mktemp("four"), more)


def run_job(folder: Path, more: list[str]) -> Run:
    """Two nodes with two processes each, as sbatch runs the example."""
    (folder / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho localhost\n"}.items():
        (folder / "bin" / name).write_text(text, encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    (folder / "edits.py").write_text(NUDGE, encoding="utf-8")
    (folder / "hooks.yaml").write_text(
        f"""
sites: [{", ".join(f"'{s}'" for s in SITES)}]
gradients: true
dumps: [{{path: dump}}]
statistics: {{path: stats}}
edits:
  - {{site: {HALF}, edit: scale=0.5}}
  - {{site: {NUDGED}, edit: "edits.py:nudge"}}
""",
        encoding="utf-8",
    )
    return ran(
        [BATCH, *more],
        folder,
        PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        PYTHON=sys.executable,
        SCRIPT=str(SCRIPT),
        PROCESSES="2",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[0-1]",
        SLURM_JOB_ID=str(free_port(20000 + os.getpid() % 9000)),  # the example makes a port of it
        SLURM_SUBMIT_DIR=str(folder),
        MEGATRON_FLEX_FLAGS="--flex-cpu --flex-config hooks.yaml",
    )


def checkpoint(run: Run) -> bytes:
    """Weights, optimizer state, states of random generators and Megatron's arguments, as they are on disk."""
    (saved,) = (run.folder / "checkpoint").glob("iter_*/__0_0.distcp")
    return saved.read_bytes()


@pytest.mark.timeout(900)
def test_without_flags_nothing_is_different(first: tuple[Run, ...]) -> None:
    plain, runner = first
    assert len(plain.losses) == ITERATIONS
    assert runner.curve == plain.curve
    left, right = map(checkpoint, first)
    assert len(left) > 4 * 3 * 4 * HIDDEN * HIDDEN  # fp32 weights and Adam's two moments, and there are more
    assert left == right
    assert not (runner.folder / "dump").exists()
    assert "megatron_flex" not in SCRIPT.read_text(encoding="utf-8")


@pytest.mark.timeout(900)
def test_the_loss_is_that_of_one_process(first: tuple[Run, ...], both: tuple[Run, ...]) -> None:
    one, four = both
    assert len(one.losses) == ITERATIONS
    torch.testing.assert_close(torch.tensor(four.losses), torch.tensor(one.losses), rtol=CLOSE, atol=0)


@pytest.mark.timeout(900)
def test_the_dump_is_that_of_one_process(both: tuple[Run, ...]) -> None:
    one, four = (run.folder / "dump" for run in both)
    with mf.open_dump(one) as a, mf.open_dump(four) as b:
        assert a.iterations == b.iterations == list(range(ITERATIONS))
        assert set(a.sites) == set(b.sites)
        assert {f"decoder.layers.{n}:output" for n in range(4)} < set(a.sites)
        assert "loss:output" in a.sites
        assert f"{LAYER}:output.grad" in a.sites
        for site in a.sites:
            want, got = a[site].torch(), b[site].torch()
            assert want.shape[:3] == (ITERATIONS, SAMPLES, LENGTH), site
            torch.testing.assert_close(got, want, rtol=0, atol=CLOSE * want.abs().max().item(), msg=site)
    report = compare(one, four)
    assert report.first is None, report


@pytest.mark.timeout(900)
def test_the_edit_did_what_it_says(both: tuple[Run, ...]) -> None:
    for run in both:
        with mf.open_dump(run.folder / "dump") as dump:
            before, written, after = (dump[s].torch() for s in (f"{LAYER}:mid", MLP, LAYER))
        torch.testing.assert_close(after, before + 0.5 * written, rtol=1e-5, atol=1e-6)
        assert written.abs().max() > 0.01


@pytest.mark.timeout(900)
def test_statistics_are_those_of_one_process(both: tuple[Run, ...]) -> None:
    a, b = (mf.open_statistics(run.folder / "stats") for run in both)
    assert a.iterations == b.iterations == list(range(ITERATIONS))
    assert a.sites == b.sites
    assert {f"{LAYER}:output", f"{LAYER}:output.grad", "loss:output"} < set(a.sites)
    for site in a.sites:
        want, got = a[site], b[site]
        assert got.count == want.count, site
        assert got.microbatches == want.microbatches == [2] * ITERATIONS, site
        for name in ("mean", "std", "rms", "absmax", "zeros", "kurtosis", "norm"):
            x, y = (torch.tensor(getattr(of, name), dtype=torch.float64) for of in (got, want))
            largest = max(want.absmax) if name in ("mean", "std") else y.nan_to_num().abs().max().item()
            told = f"{site}: {name}, {x.tolist()}, {y.tolist()}"  # a constant has no kurtosis in either
            torch.testing.assert_close(x, y, rtol=0, atol=CLOSE * largest, equal_nan=True, msg=told)


def test_the_page_trains_modules_in_pretrain(tmp_path: Path) -> None:
    """Two stages, two microbatches in a step; the probe is on the second stage, the vector on the first."""
    if not has_pretrain():
        pytest.skip("needs megatron.training of megatron-core 0.19 or newer")
    (code,) = pages.mine(ROOT / "docs" / "training.md")
    script = tmp_path / "train.py"
    script.write_text(BEFORE_THE_PAGE + code + AFTER_THE_PAGE, encoding="utf-8")
    flags = [
        *flags_of_the_example(),
        *flags_for_a_cpu(),
        *f"{SMALLER} {TRAINING}".split(),
        "--eval-iters",
        "0",
    ]
    done = torchrun(2, tmp_path, str(script), *flags, "--pipeline-model-parallel-size", "2")
    assert done.status == [0], done.err
    first, second = (json.loads(out.splitlines()[-1]) for out in done.out)
    microbatches = SAMPLES // 4
    assert len(set(second["sent"])) == ITERATIONS * microbatches, "each microbatch has other labels"
    assert second["read"] == second["sent"]
    assert first["read"] == []
    assert first["norms"] == second["norms"]
    for norms in zip(*first["norms"], strict=True):
        assert len({*norms}) == ITERATIONS, "each step changes each parameter"
    assert all(norm > 0 for norm in first["norms"][0])
