"""Every kind of hook on a simulated accelerator, and the same on the CPU: what tests compare.

Hooks are registered, and results read, by the public interface alone.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import gpt, llama
from tests.support.accelerator import Collective, Recording, Wait, Waits, move, simulated
from tests.support.gpt import Case

LAYER = "decoder.layers.1"
FC1, PROJECTION = f"{LAYER}.mlp.linear_fc1", f"{LAYER}.self_attention.linear_proj"
EXPERTS = f"{LAYER}.mlp.experts"
HEADS = f"{LAYER}.self_attention.core_attention:output"
ACTIVATION = "layers.1.feed_forward.act"  # between fairscale's layers: no rule says how it is sharded
LLAMA = "layers.1.feed_forward.w1"
DEVICE = "device"  # the folder of what is written from there
STEPS = 2  # the second is counted: in the first one sites are seen for the first time


def overwriting(inputs: Tensor) -> Tensor:
    """An activation function that writes over its input, as frameworks do where they can."""
    return torch.relu_(inputs)


@dataclass(frozen=True)
class Setup:
    """A model of a framework on two ranks.

    Attributes:
        framework: "megatron" or "fairscale".
        case: Megatron's model; of another framework its device.
    """

    framework: str
    case: Case

    @property
    def topology(self) -> str:
        """Ranks of their own, whose groups are made on the device."""
        return f"accelerator {self.case.topology if self.framework == 'megatron' else self.framework}"


GPT = Case(
    "tp2 sp", tp=2, sp=True, layers=2, gated=False, device="cuda", extra={"activation_func": overwriting}
)
MEGATRON, FAIRSCALE = Setup("megatron", GPT), Setup("fairscale", GPT)
RECOMPUTED = Setup("megatron", replace(GPT, name="recomputed", recompute=("full",)))
PACKED = Setup("megatron", replace(GPT, name="packed", packed="flat"))
FOLLOWED = Setup("fairscale", replace(GPT, name="followed", recompute=("full",)))
STAGES = Setup("megatron", Case("pp2", pp=2, layers=2, device="cuda"))
MOE = Setup("megatron", Case("moe", tp=2, sp=True, ep=2, layers=2, experts=4, device="cuda"))


@dataclass(frozen=True)
class Report:
    """What one rank says of steps with hooks of one kind.

    Attributes:
        waits: how often the host waited in the last step.
        places: for whom, in order.
        collectives: of all steps, in order.
        violations: what the device does not allow.
        unequal: names of results that are not those of the CPU.
    """

    waits: Waits
    places: list[Wait]
    collectives: list[Collective]
    violations: list[str]
    unequal: list[str]
    captures: int
    error: str


Results = dict[str, Any]
Make = Callable[[Any, Any], list[Any]]  # hooks, from the package and its presets
# With the package, on a FlexModel, that writes to a folder; may return what fills with results in the steps.
Register = Callable[[Any, Any, Path], dict[str, Tensor] | None]


class Kind(NamedTuple):
    """A kind of hooks.

    Attributes:
        hooks: makes them.
        setup: the model.
        register: what else is registered.
    """

    hooks: Make = lambda H, e: []
    setup: Setup = MEGATRON
    register: Register = lambda mf, flex, folder: None


def report(setup: Setup, kind: str, folder: Path) -> Report:
    """Run on each rank: two steps with hooks on the device, and the same on the CPU."""
    with simulated() as recording:
        got = _steps(setup, kind, folder / DEVICE, recording)
        waits, places = recording.count(), list(recording.waits)
        collectives, violations = list(recording.collectives), list(recording.violations)
    wanted = _steps(_on_cpu(setup), kind, folder / "cpu", None)
    error = got.get("error", "")
    captures = sum(name.startswith("capture") for name in got)
    unequal = sorted(n for n in got.keys() | wanted.keys() if not _equal(got.get(n), wanted.get(n)))
    return Report(waits, places, collectives, violations, unequal, captures, error)


def _on_cpu(setup: Setup) -> Setup:
    return replace(setup, case=replace(setup.case, device="cpu"))


def _equal(got: Any, wanted: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    if isinstance(got, float) and isinstance(wanted, float):
        return math.isclose(got, wanted, rel_tol=1e-5) or (math.isnan(got) and math.isnan(wanted))
    return type(got) is type(wanted) and bool(got == wanted)


def _steps(setup: Setup, kind: str, folder: Path, recording: Recording | None) -> Results:
    """All that comes of two steps: captures, gradients, losses, files."""
    import megatron_flex as mf

    model, hooks = _Model(setup), KINDS[kind]
    out: Results = {}
    with mf.attach(model.parts, hooks.hooks(mf.HookFunction, mf.edits)) as flex:
        registered = hooks.register(mf, flex, folder)
        try:
            for number in range(STEPS):
                if recording is not None:
                    recording.begin_step()
                out[f"losses {number}"] = [float(x) for x in model.step(flex, kind == "forward only")]
        except Exception as error:
            out["error"] = str(error) if isinstance(error, mf.HookError) else traceback.format_exc()
        if recording is not None:
            recording.pause()
        for name, readings in flex.output_dict.items():
            for number, reading in enumerate(readings):
                out[f"capture {name} {number}"] = reading
        out.update({name: tensor.cpu() for name, tensor in (registered or {}).items()})
        for number, parameter in enumerate(flex.trainable_parameters()):
            out[f"gradient of a trained module {number}"] = parameter.grad.cpu()
    for number, part in enumerate(model.parts):
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                out[f"gradient {number} {name}"] = parameter.grad.cpu()
    if dist.get_rank() == 0:
        out.update(_read_files(folder))
    return out


class _Model:
    """A model of a framework, and a step of it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        on_device = setup.case.device == "cuda"
        if setup.framework == "megatron":
            gpt.runtime(setup.case)
            gpt.initialize(setup.case)
            _forget_device()
            self.parts: list[nn.Module] = gpt.build(replace(setup.case, device="cpu"))
        else:
            from tests.support import llama_fairscale

            llama_fairscale.initialize(2)
            self.parts = [llama_fairscale.model(vocabulary=True)]
            if setup.case.recompute:
                for layer in self.parts[0].layers.values():  # type: ignore[union-attr, operator]
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if on_device:
            self.parts = [move(part) for part in self.parts]

    def step(self, flex: Any, forward_only: bool) -> list[Any]:
        """One step of two microbatches; its losses."""
        if self._setup.framework == "megatron":
            return gpt.step(self._setup.case, self.parts, 0, forward_only=forward_only)
        losses = []
        with flex.step():
            for replica in range(2):
                tokens, labels = (t.to(self._setup.case.device) for t in llama.batch(replica))
                loss = llama.loss_of(self.parts[0](tokens), labels)
                loss.backward()
                losses.append(loss.detach())
        return losses


def _forget_device() -> None:
    """Have Megatron make anew what it keeps for all models of a process, which may be of the other device."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import token_dispatcher

    parallel_state.get_global_memory_buffer().buffer.clear()
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None


def _read_files(folder: Path) -> Results:
    import megatron_flex as mf

    out: Results = {}
    if (folder / "dump").exists():
        with mf.open_dump(folder / "dump") as dump:
            for name in dump:
                array = dump[name]
                for step in range(STEPS):
                    out[f"dump {name} {step}"] = array[step].torch()
    if (folder / "statistics").exists():
        for row in mf.open_statistics(folder / "statistics").rows():
            for column in ("mean", "rms", "absmax", "count", "nans", "histogram"):
                out[f"statistics {row.site} {row.iteration} {column}"] = getattr(row, column)
    return out


# -- kinds of hooks --------------------------------------------------------------------------------------


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """An edit of the full tensor of which nothing is known."""
    return inputs * 2 - inputs.mean()


def failing_on_one(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """An edit that fails on rank 1."""
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    return inputs * 2


def keeping(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Keep something of this microbatch for another hook point."""
    save_ctx.level = inputs.mean()
    return inputs


def using(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Use what was kept."""
    return inputs - save_ctx.level


def drawing(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Draw random numbers."""
    return inputs + torch.rand_like(inputs)


def adapting(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Use a trainable module."""
    return inputs + modules["adapter"](inputs)


def _vector() -> Tensor:
    return torch.linspace(-1, 1, gpt.HIDDEN)


def _selections(H: Any, e: Any) -> list[Any]:
    from megatron_flex import Select

    wanted = [
        Select(positions=-1),
        Select(positions=[0, 3, 9], samples=1),
        Select(neurons=slice(None, None, 2)),
    ]
    places = [(site, n) for site in (LAYER, FC1) for n in range(len(wanted))]
    return [H(site, select=wanted[n], keep_as=f"part{n}") for site, n in places]


def _rows_of_experts(H: Any, e: Any) -> list[Any]:
    from megatron_flex import Select

    return [H(LOCAL_EXPERT, select=Select(dims={"t": [0, 2]}))]


def _reductions(H: Any, e: Any) -> list[Any]:
    from megatron_flex import reduce

    out = []
    for site, last, length in ((LAYER, "h", gpt.HIDDEN), (FC1, "f", gpt.FFN)):
        direction = torch.linspace(-1, 1, length)
        reductions = (reduce.mean("s"), reduce.norm(last), reduce.topk(3, last), reduce.dot(direction))
        out += [H(site, reduce=r, keep_as=f"reduced{n}") for n, r in enumerate(reductions)]
    return out


def _train(mf: Any, flex: Any, folder: Path) -> None:
    torch.manual_seed(5)
    adapter: nn.Module = nn.Linear(gpt.HIDDEN, gpt.HIDDEN)
    flex.register_trainable_module("adapter", move(adapter) if folder.name == DEVICE else adapter)


def _dump(mf: Any, flex: Any, folder: Path) -> None:
    sites = ["decoder.layers.*", FC1, f"{PROJECTION}:partial"]
    flex.register_dump(mf.Dump(folder / "dump", sites=sites, gradients=True))


def _measure(mf: Any, flex: Any, folder: Path) -> None:
    path = folder / "statistics"
    flex.register_statistics(
        mf.Statistics(path, sites=["decoder.layers.*", FC1], gradients=True, histogram=True)
    )


def _watch(mf: Any, flex: Any, folder: Path) -> None:
    flex.register_nonfinite("stop")


def _feature(gradients: bool, mf: Any, flex: Any, folder: Path) -> dict[str, Tensor]:
    arrived: dict[str, Tensor] = {}

    def keep(features: Any, microbatch: int) -> None:
        for layer, tensor in features.items():
            assert tensor.device.type == ("cuda" if folder.name == DEVICE else "cpu")
            arrived[f"feature {layer} {microbatch} {len(arrived)}"] = tensor.detach().clone()

    features = flex.features([0, 1], gradients=gradients, on_features=keep)

    def use(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs + 0.01 * (features[0] * features[1]).mean()

    if gradients:
        flex.register_forward_hook(mf.HookFunction("output_layer", use, save=False))
    return arrived


def _verify(mf: Any, flex: Any, folder: Path) -> None:
    flex.verify(steps=STEPS)


def _preset(make: Callable[[Any], Any], site: str = LAYER) -> Kind:
    return Kind(lambda H, e: [H(site, editing_function=make(e))])


def _edit(function: Callable[..., Tensor], site: str = FC1, setup: Setup = MEGATRON, **options: Any) -> Kind:
    return Kind(lambda H, e: [H(site, editing_function=function, **options)], setup)


def _read(*sites: str, setup: Setup = MEGATRON, **options: Any) -> Kind:
    return Kind(lambda H, e: [H(site, **options) for site in sites], setup)


def _several(*kinds: Kind) -> Kind:
    return Kind(lambda H, e: [h for kind in kinds for h in kind.hooks(H, e)], kinds[0].setup)


LOCAL_EXPERT = f"{EXPERTS}.local_experts.*.linear_fc1"
BACKWARD: dict[str, Any] = {"hook_type": "full_backward"}
KINDS = {
    "nothing": Kind(),
    "read": _read("decoder.layers.*", FC1, f"{PROJECTION}:partial", "output_layer"),
    "read over stages": _read("decoder.layers.*", FC1, setup=STAGES),
    "read selections": Kind(_selections),
    "read reductions": Kind(_reductions),
    "read gradients": _several(
        _read("decoder.layers.*", **BACKWARD), _read(FC1, hook_type="full_backward_pre")
    ),
    "forward only": _read("decoder.layers.*", FC1),
    "local edit": _preset(lambda e: e.scale(0.5), FC1),
    "linear edit": _preset(lambda e: e.scale(0.5), f"{PROJECTION}:partial"),
    "gathered edit": _edit(doubled),
    "gathered edit without capture": _edit(doubled, save=False),
    "local gradient edit": Kind(lambda H, e: [H(FC1, editing_function=e.scale(0.5), **BACKWARD)]),
    "gathered gradient edit": _edit(doubled, **BACKWARD),
    "edit on one rank": _edit(doubled, run="once"),
    "edit that may be skipped": _edit(doubled, on_error="skip"),
    "skipped edit": _edit(failing_on_one, on_error="skip"),
    "failing edit": _several(_read(LAYER), _edit(failing_on_one)),
    "random edit": _edit(drawing, LAYER),
    "context": _several(_edit(keeping, "decoder.layers.0"), _edit(using, LAYER)),
    "trainable module": Kind(lambda H, e: [H(LAYER, editing_function=adapting)], register=_train),
    "expected shape": _edit(doubled, expected_shape=(gpt.SEQUENCE, gpt.BATCH, gpt.FFN)),
    "swap": _preset(lambda e: e.swap(0, 1)),
    "resample samples": _preset(lambda e: e.resample("b")),
    "resample positions": _preset(lambda e: e.resample("s")),
    "noise": _preset(lambda e: e.noise(0.1)),
    "mean": _preset(lambda e: e.mean()),
    "steer": _preset(lambda e: e.steer(_vector(), 2.0, positions=[0, -1])),
    "project out": _preset(lambda e: e.project_out(_vector())),
    "patch": _preset(lambda e: e.patch(torch.ones(gpt.SEQUENCE, gpt.BATCH, gpt.HIDDEN), positions=2)),
    "ablate heads": _preset(lambda e: e.ablate_heads([0, 3]), HEADS),
    "dump": Kind(register=_dump),
    "statistics": Kind(register=_measure),
    "values that are not finite": Kind(register=_watch),
    "features": Kind(setup=STAGES, register=partial(_feature, False)),
    "features with gradients": Kind(setup=STAGES, register=partial(_feature, True)),
    "gathered features": Kind(register=partial(_feature, True)),
    "verify": Kind(_several(_read(LAYER), _edit(doubled)).hooks, register=_verify),
    "recomputed edits": Kind(
        _several(_edit(keeping, "decoder.layers.0"), _edit(using, LAYER), _edit(drawing)).hooks, RECOMPUTED
    ),
    "read experts": _read(
        f"{LAYER}.mlp.router:logits", f"{EXPERTS}:indices", f"{EXPERTS}:dispatched", LOCAL_EXPERT, setup=MOE
    ),
    "read selected rows of experts": Kind(_rows_of_experts, MOE),
    "edit of experts": _edit(doubled, LOCAL_EXPERT, MOE),
    "gradients of experts": _read(LOCAL_EXPERT, setup=MOE, **BACKWARD),
    "packed sequences": Kind(_several(_read(LAYER), _edit(doubled)).hooks, PACKED),
    "fairscale read": _read(LLAMA, "layers.*", "output", setup=FAIRSCALE),
    "fairscale layouts that are followed": Kind(
        lambda H, e: [H(ACTIVATION), H(ACTIVATION, editing_function=doubled), H(ACTIVATION, **BACKWARD)],
        FOLLOWED,
    ),
    "fairscale edit": _edit(doubled, LLAMA, FAIRSCALE),
    "fairscale gradients": _several(
        _read(LLAMA, setup=FAIRSCALE, **BACKWARD), _edit(doubled, "layers.0", FAIRSCALE, **BACKWARD)
    ),
}
