"""transformers' Trainer and accelerate's loops: gradient accumulation makes microbatches of one step.

The truth is the same Trainer on one process, observed by torch's own hooks.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import hf_llama, llama
from tests.support.pages import mine as blocks
from tests.support.pool import run_alone as run

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("accelerate", "peft")), reason="needs accelerate and peft"
)  # not importorskip: an import takes seconds of every collection

BOUND = 1e-5
ROOT = Path(__file__).parents[2]
SAMPLES = 20
LAYER = "model.layers.1.mlp"
LORA = "base_model.model."
ADAPTER = f"{LORA}model.layers.1.self_attn.q_proj.lora_B.default.weight"


def model_of(lora: bool) -> nn.Module:
    """The model of `llama`, with LoRA's adapters or without."""
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(hf_llama.config())
    plain = llama.single().state_dict()
    model.load_state_dict({hf_llama.theirs(n): t for n, t in plain.items()})
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, settings)  # type: ignore[arg-type]


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(llama.VOCABULARY, (SAMPLES, llama.TOKENS), generator=draw)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def trainer_of(model: nn.Module, folder: str, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29545")
    common: dict[str, Any] = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "disable_tqdm": True}
    ordered: dict[str, Any] = {"train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.1}
    plain: dict[str, Any] = {"lr_scheduler_type": "constant", "use_cpu": True, "save_strategy": "no"}
    settings = TrainingArguments(folder, **{**common, **ordered, **plain, **arguments})
    return Trainer(model=model, args=settings, train_dataset=samples())


class Seen:
    """What torch's own hooks see at a module: outputs and their gradients, in the order of microbatches."""

    def __init__(self, module: nn.Module) -> None:
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []
        module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.values.append(output.detach().clone())
        if output.requires_grad:
            output.register_hook(lambda grad: self.gradients.append(grad.clone()))


def alone(lora: bool, folder: str, steps: int) -> dict[str, Any]:
    """One process: what torch's hooks see, and each step's gradients of parameters, before clipping."""
    model = model_of(lora)
    front = LORA if lora else ""
    seen = Seen(model.get_submodule(front + LAYER))
    gradients: list[dict[str, Tensor]] = []
    loop = trainer_of(model, folder, gradient_accumulation_steps=steps, max_grad_norm=0.0)

    def before(*_: Any) -> None:
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)

    register_optimizer_step_pre_hook(before)
    loop.train()
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return {"values": seen.values, "backward": seen.gradients, "gradients": gradients, "trained": trained}


def hooked(lora: bool, folder: str, steps: int, **arguments: Any) -> dict[str, Any]:
    """What hooks and a dump have; on several ranks Trainer wraps the model in DDP, which is attached then."""
    from transformers import TrainerCallback

    site = (LORA if lora else "") + LAYER + ":output"
    parameter = ADAPTER if lora else "model.layers.1.mlp.down_proj.weight"
    loop = trainer_of(model_of(lora), folder, gradient_accumulation_steps=steps, **arguments)
    out: dict[str, Any] = {}

    class Hooks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            hooks = [mf.HookFunction(site), mf.HookFunction(site, hook_type="tensor")]
            dump = mf.Dump(f"{folder}/dump", [site], gradients=True, parameters=[parameter])
            out["flex"] = mf.attach(loop.model_wrapped, hooks, dumps=[dump])

    loop.add_callback(Hooks())
    loop.train()
    flex = out.pop("flex")
    for name, key in ((site, "values"), (f"{site}.grad", "backward")):
        out[key] = [t.clone() for t in flex.output_dict[name]] if flex.is_leader else []
        out[f"{key} keys"] = [k[2:] for k in flex.output_dict[name].keys] if flex.is_leader else []
    out["wrapped"] = type(loop.model_wrapped).__name__
    out["trained"] = {n: p.detach().clone() for n, p in loop.model.named_parameters() if p.requires_grad}
    flex.restore()
    return out


def keys_of(counts: list[int]) -> list[tuple[int, int, int]]:
    """Iteration, microbatch and call of each microbatch of steps with so many."""
    return [(step, n, 0) for step, count in enumerate(counts) for n in range(count)]


def same(got: list[Tensor], want: list[Tensor], factor: float = 1.0) -> bool:
    return len(got) == len(want) and all(
        relative(g, factor * w) < BOUND for g, w in zip(got, want, strict=True)
    )


def read(folder: str, site: str, parameter: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The first step's values and gradients in the dump, and each step's gradient of the parameter."""
    with mf.open_dump(f"{folder}/dump") as dump:
        gradients = list(dump.parameter(parameter, gradient=True).torch())
        return dump[site].at(0).torch()[0], dump[f"{site}.grad"].at(0).torch()[0], gradients


@pytest.mark.parametrize("lora", [False, True], ids=["model", "LoRA"])
def test_one_process(lora: bool, tmp_path: Path) -> None:
    """The last step has fewer microbatches: twenty samples by eights."""
    (truth,) = run(1, alone, lora, str(tmp_path / "alone"), 8)
    (got,) = run(1, hooked_without_clipping, lora, str(tmp_path), 8)
    assert got["values keys"] == got["backward keys"] == keys_of([8, 8, 4])
    assert same(got["values"], truth["values"])
    assert same(got["backward"], truth["backward"])
    name = ADAPTER if lora else "model.layers.1.mlp.down_proj.weight"
    values, backward, gradients = read(str(tmp_path), (LORA if lora else "") + LAYER + ":output", name)
    assert same(list(values), [t[0] for t in truth["values"][:8]])
    assert same(list(backward), [t[0] for t in truth["backward"][:8]])
    assert same(gradients, [g[name] for g in truth["gradients"]])


def hooked_without_clipping(lora: bool, folder: str, steps: int) -> dict[str, Any]:
    return hooked(lora, folder, steps, max_grad_norm=0.0)


@pytest.mark.parametrize("lora", [False, True], ids=["model", "LoRA"])
def test_data_parallel(lora: bool, tmp_path: Path) -> None:
    """Two ranks: microbatch n of rank r is number 2n + r of one process."""
    (truth,) = run(1, alone, lora, str(tmp_path / "alone"), 4)
    ranks = run(2, hooked_without_clipping, lora, str(tmp_path), 2)
    for rank, got in enumerate(ranks):
        assert got["wrapped"] == "DistributedDataParallel"
        assert got["values keys"] == got["backward keys"] == keys_of([2] * 5)
        assert same(got["values"], truth["values"][rank::2])
        # Trainer multiplies the loss by the number of ranks, as DistributedDataParallel averages gradients.
        assert same(got["backward"], truth["backward"][rank::2], 2.0)
        assert all(relative(t, truth["trained"][n]) < BOUND for n, t in got["trained"].items())
    name = ADAPTER if lora else "model.layers.1.mlp.down_proj.weight"
    _, _, gradients = read(str(tmp_path), (LORA if lora else "") + LAYER + ":output", name)
    assert same(gradients, [g[name] for g in truth["gradients"]])


def defaults(folder: str) -> dict[str, Any]:
    """Trainer with default arguments; the hooks are there before it is."""
    from transformers import Trainer, TrainingArguments

    model = model_of(lora=False)
    seen = Seen(model.get_submodule(LAYER))
    out: dict[str, Any] = {}
    with mf.attach(model, [mf.HookFunction(LAYER, hook_type=t) for t in ("forward", "tensor")]) as flex:
        flex.register_statistics(mf.Statistics(f"{folder}/statistics", [f"{LAYER}:output"]))
        Trainer(model=model, args=TrainingArguments(folder), train_dataset=samples()).train()
        for name, key in ((f"{LAYER}:output", "values"), (f"{LAYER}:output.grad", "backward")):
            out[key] = [t.clone() for t in flex.output_dict[name]]
            out[f"{key} keys"] = [k[2:] for k in flex.output_dict[name].keys]
    out["seen"] = seen.values, seen.gradients
    return out


def test_default_arguments(tmp_path: Path) -> None:
    (got,) = run(1, defaults, str(tmp_path))
    assert got["values keys"] == got["backward keys"] == keys_of([1] * len(got["seen"][0]))
    assert same(got["values"], got["seen"][0])
    assert same(got["backward"], got["seen"][1])


# -- accelerate's own loop -----------------------------------------------------------------------------


def accumulating(steps: int, scaled: bool) -> dict[str, Any]:
    """Seven microbatches in steps of three: the last step has one. A call in evaluation is between them."""
    from accelerate import Accelerator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29546")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    tokens = torch.stack([llama.batch(n)[0][0] for n in range(7)])
    loader = torch.utils.data.DataLoader(tokens, batch_size=1)
    model = llama.single()
    seen = Seen(model.get_submodule("layers.1"))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    scale = "loss" if scaled else "raw"
    hooks = [
        mf.HookFunction("layers.1"),
        mf.HookFunction("layers.1", hook_type="tensor", gradient_scale=scale),
    ]
    out: dict[str, Any] = {}
    with mf.attach(model, hooks) as flex:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(llama.loss_of(model(batch), batch))
                out.setdefault("complete", []).append(len(flex.output_dict.get("layers.1:output", ())))
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model(tokens[:1])
        for name, key in (("layers.1:output", "values"), ("layers.1:output.grad", "backward")):
            out[key] = [t.clone() for t in flex.output_dict[name]]
            out[f"{key} keys"] = [k[2:] for k in flex.output_dict[name].keys]
    out["seen"] = seen.values, seen.gradients
    return out


@pytest.mark.parametrize("scaled", [False, True], ids=["raw", "own loss"])
def test_accumulate(scaled: bool) -> None:
    (got,) = run(1, accumulating, 3, scaled)
    keys = keys_of([3, 3, 1])
    assert got["complete"] == [0, 0, 3, 3, 3, 6, 7]  # the captures of a step are there before its optimizer
    assert got["backward keys"] == keys
    assert got["values keys"] == [*keys, (3, 0, 0)]
    assert same(got["values"], got["seen"][0])
    assert same(got["backward"], got["seen"][1], 3.0 if scaled else 1.0)


def failing(where: str) -> dict[str, Any]:
    """A microbatch raises; the loop goes on with another step."""
    from accelerate import Accelerator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29547")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(llama.single())
    norm = accelerator.unwrap_model(model).norm
    broken = {"call": 1, "backward": 1}

    def fail(*_: Any) -> None:
        broken[where] -= 1
        if broken[where] == 0:
            raise RuntimeError("broken")

    tokens = llama.batch(0)[0]
    with mf.attach(model, [mf.HookFunction("layers.1")]) as flex:
        for number in range(6):
            with accelerator.accumulate(model):
                handle = norm.register_forward_pre_hook(fail) if (number, where) == (0, "call") else None
                try:
                    loss = llama.loss_of(model(tokens), tokens)
                    if (number, where) == (0, "backward"):
                        loss.register_hook(fail)
                    accelerator.backward(loss)
                except RuntimeError:
                    pass
                if handle is not None:
                    handle.remove()
        return {"keys": [k[2:] for k in flex.output_dict["layers.1:output"].keys]}


@pytest.mark.parametrize("where", ["call", "backward"])
def test_a_microbatch_raises(where: str) -> None:
    """Its step is dropped. What is left of it is a step of its own, then come complete ones."""
    (got,) = run(1, failing, where)
    assert got["keys"] == [(1, 0, 0), (2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0)]


def leaving() -> dict[str, Any]:
    from accelerate import Accelerator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29548")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(llama.single())
    tokens = llama.batch(0)[0]
    with (
        pytest.warns(mf.FlexWarning) as told,
        mf.attach(model, [mf.HookFunction("layers.1")]),
        accelerator.accumulate(model),
    ):
        accelerator.backward(llama.loss_of(model(tokens), tokens))
    left = {"told": str(told[0].message)}
    from accelerate.state import GradientState

    left["functions"] = type(Accelerator.backward).__name__, type(GradientState._set_sync_gradients).__name__
    return left


def test_restored_inside_a_step() -> None:
    (got,) = run(1, leaving)
    assert "(1 microbatch)" in got["told"]
    assert got["functions"] == ("function", "function")


def page(code: str, folder: str) -> list[str]:
    from transformers import Trainer, TrainingArguments

    model, printed = model_of(lora=False), []
    names = {"model": model, "folder": folder, "print": lambda *w: printed.append(" ".join(map(str, w)))}
    names |= {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "dataset": samples()}
    exec(code, names)
    return printed


def test_the_page_on_trainer_runs(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    (code,) = blocks(ROOT / "docs/huggingface.md")
    ((printed,),) = run(1, page, code, str(tmp_path))
    assert printed == str([(step, n) for step in range(2) for n in range(4)])
    assert f"`{printed}`" in (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
