"""Three analyses of a model that is spread over the processes; started by torchrun in each of them.

Every rank runs the same lines. What is printed behind `quickstart:` is for the screen.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_flex import FlexModel, HookFunction, cpu, figures, plot

cpu.enable()  # before Megatron is imported; leave it out on a machine with GPUs

import torch  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training import get_args  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from quickstart_data import Source, add_folder, held_out_batch, load, one_byte, save  # noqa: E402
from quickstart_train import say  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

SEQUENCES, LENGTH = 8, 128


def flags(parser: ArgumentParser) -> ArgumentParser:
    """Megatron lets a script add flags of its own."""
    parser.add_argument("--tuning", type=int, required=True, help="steps of the tuned lens")
    parser.add_argument("--plots", type=Path, help="where pictures go")
    return add_folder(parser)


def build() -> FlexModel:
    """This rank's part of the model, with its part of the quick start's weights."""
    args = parse_and_validate_args(flags)
    initialize_megatron()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    flex = FlexModel(model.eval())
    for name, whole in load(args.folder / "weights").items():
        flex.set_module_parameter(name, whole)
    return flex


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits `[..., batch, pos, v]` for labels `[batch, pos]`: `[...]`."""
    likely = logits.log_softmax(-1).gather(-1, labels.expand(logits.shape[:-1])[..., None])
    return -likely.squeeze(-1).mean((-1, -2))


# -- induction heads ---------------------------------------------------------------------------------


def repeated() -> Tensor:
    """Random bytes, twice: `[batch, sequence]`."""
    shape = SEQUENCES, LENGTH // 2
    once = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(4))
    return torch.cat([once, once], 1)


def induction(flex: FlexModel) -> dict[str, Tensor]:
    """Random bytes, twice: which heads look from a byte to what followed it the first time?

    Returns:
        `induction` and `previous`: by layer and head, how much attention goes from the second half to the
        byte behind the earlier copy, and to the byte before; `uniform`: what a head without any preference
        gives either; `repeated`: the loss in the first and in the second half.
    """
    half, tokens = LENGTH // 2, repeated()
    logits, cache = flex.interp.run_with_cache(tokens, lambda name: name.endswith("hook_pattern"))
    found = figures.induction(cache)
    next_ones = [losses(logits[:, a : b - 1], tokens[:, a + 1 : b]) for a, b in ((0, half), (half, LENGTH))]
    return {
        "induction": torch.from_numpy(found.scores),
        "previous": torch.from_numpy(found.previous),
        "uniform": torch.tensor(found.uniform),
        "repeated": torch.stack(next_ones),
    }


# -- lenses ------------------------------------------------------------------------------------------


def logit_lens(flex: FlexModel) -> dict[str, Tensor]:
    """The prediction of each layer's input, as if it were the last layer's output.

    Returns:
        `lens losses`, by layer; `text`, one held-out sequence, and for it `guesses` and `certainty`: by layer
        and position the likeliest next byte and its probability.
    """
    batch = held_out_batch(SEQUENCES, LENGTH)
    wanted = [
        f"blocks.{n}.hook_resid_{at}" for n in range(flex.interp.names.layers) for at in ("pre", "post")
    ]
    _, cache = flex.interp.run_with_cache(batch["tokens"], wanted)
    logits = cache.logit_lens(cache.accumulated_resid())  # [layer, batch, pos, v]
    certainty, guesses = logits[:, 0].softmax(-1).max(-1)
    return {
        "lens losses": losses(logits, batch["labels"]),
        "guesses": guesses,
        "certainty": certainty,
        "text": batch["tokens"][0],
    }


class Translators(nn.Module):
    """For each layer's input an affine map to the last layer's output.

    Args:
        layers: how many.
        width: of the stream.
        norm: weight of the model's last norm.
        unembedding: `[v, h]`, of the model.
        epsilon: of that norm.
    """

    def __init__(self, layers: int, width: int, norm: Tensor, unembedding: Tensor, epsilon: float) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for one in self.maps:
            nn.init.zeros_(one.weight)
            nn.init.zeros_(one.bias)
        self.epsilon = epsilon
        self.fixed = norm, unembedding  # the model's own, which are not trained

    def logits(self, layer: int, stream: Tensor) -> Tensor:
        """What the tuned lens sees in a stream `[..., h]`."""
        norm, unembedding = self.fixed
        stream = stream + self.maps[layer](stream)
        return F.rms_norm(stream, stream.shape[-1:], norm, self.epsilon) @ unembedding.T


def tune(
    layer: int, current_module: nn.Module, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict
) -> Tensor:
    """Nothing is edited: a translator learns to say here what the model says in the end."""
    seen = modules["tuned"].logits(layer, inputs.detach().transpose(0, 1))
    F.kl_div(seen.log_softmax(-1), save_ctx.final, reduction="none", log_target=True).sum(
        -1
    ).mean().backward()
    return inputs


def tuned_lens(flex: FlexModel, steps: int) -> dict[str, Tensor]:
    """Train a translator for each layer's input, on the ranks that have the layer, all in the same passes.

    Returns:
        `tuned losses`, by layer, on the held-out batch; `divergence`, by the lens' kind and by layer, from
        what the model says.
    """
    norm, words = (
        flex.get_module_parameter(name, everywhere=True)
        for name in ("decoder.final_layernorm.weight", "output_layer.weight")
    )
    layers = flex.interp.names.layers
    epsilon = flex.chunks[0].config.layernorm_epsilon
    flex.register_trainable_module("tuned", Translators(layers, words.shape[1], norm, words, epsilon))
    optimizer = torch.optim.Adam(flex.trainable_parameters(), lr=3e-3)
    source = Source(steps * SEQUENCES, LENGTH)
    hooks = [HookFunction(f"decoder.layers.{n}:input", partial(tune, n), save=False) for n in range(layers)]
    for step in range(steps):
        tokens = torch.stack([source[step * SEQUENCES + n]["tokens"] for n in range(SEQUENCES)])
        flex.save_ctx.final = flex.interp.run_with_hooks(tokens).log_softmax(-1)
        for hook in hooks:
            flex.register_forward_pre_hook(hook)
        optimizer.zero_grad()
        flex.interp.run_with_hooks(tokens)  # fills the gradients, the same on every rank
        optimizer.step()
        for hook in hooks:
            flex.remove_hook(hook)
    batch = held_out_batch(SEQUENCES, LENGTH)
    wanted = [f"blocks.{n}.hook_resid_pre" for n in range(layers)]
    logits, cache = flex.interp.run_with_cache(batch["tokens"], wanted)
    streams, tuned = cache.stack_activation("resid_pre"), flex.trainable_modules["tuned"]
    with torch.no_grad():
        seen = torch.stack([tuned.logits(n, streams[n]) for n in range(layers)])
    final = logits.log_softmax(-1)
    kinds = (cache.logit_lens(streams), seen)
    far = [(final.exp() * (final - k.log_softmax(-1))).sum(-1).mean((-1, -2)) for k in kinds]
    return {"tuned losses": losses(seen, batch["labels"]), "divergence": torch.stack(far)}


# -- pictures ----------------------------------------------------------------------------------------


def pictures(flex: FlexModel, folder: Path) -> None:
    """Draw what was found; every rank makes the figures, since weights come from all, and the first saves."""
    _, cache = flex.interp.run_with_cache(repeated(), lambda name: name.endswith("hook_pattern"))
    scores = figures.induction(cache)
    drawn = {"induction": plot.induction(scores)}
    layer = scores.layers[int(scores.scores.max(1).argmax())]
    drawn["attention"] = plot.attention(cache, layer)
    tokens = held_out_batch(1, LENGTH)["tokens"]
    _, cache = flex.interp.run_with_cache(tokens, lambda name: name.endswith(("resid_pre", "resid_post")))
    drawn["logit-lens"] = plot.logit_lens(cache, tokens=tokens[0].tolist(), tokenizer=one_byte)
    drawn["logit-lens-rank"] = plot.logit_lens(
        cache, tokens=tokens[0].tolist(), tokenizer=one_byte, show="rank"
    )
    drawn["norms"] = plot.norms(cache)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png")


def main() -> None:
    """All three, and their results to a file."""
    flex = build()
    results: dict[str, Any] = {}
    for label, analysis in (
        ("induction heads", induction),
        ("logit lens", logit_lens),
        ("tuned lens", partial(tuned_lens, steps=get_args().tuning)),
    ):
        say(f"  {label}")
        results |= analysis(flex)
    if get_args().plots is not None:
        say("  pictures")
        pictures(flex, get_args().plots)
    flex.restore()
    if torch.distributed.get_rank() == 0:
        save(get_args().folder / "analyses", results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
