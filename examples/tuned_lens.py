"""Train a tuned lens in the run, and compare it with the logit lens.

    torchrun --nproc-per-node 4 examples/tuned_lens.py

For the output of each layer, an affine map is trained to predict the model's final logits. The layers are on
two pipeline stages; `save_ctx` sends their outputs to the stage that has the logits.
"""

from functools import partial

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import megatron_flex as mf

LAYERS, HIDDEN, ITERATIONS = 3, 32, 30  # the last layer of the four needs no lens


class TunedLens(nn.Module):
    """An affine map for each layer, then the model's own last norm and unembedding."""

    def __init__(self, norm, unembedding):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        for parameter in self.maps.parameters():
            nn.init.zeros_(parameter)  # it begins as the logit lens
        self.norm, self.unembedding = norm, unembedding

    def forward(self, layer, stream):
        stream = stream + self.maps[layer](stream)
        return F.rms_norm(stream, (HIDDEN,), self.norm, 1e-6) @ self.unembedding.T


def remember(layer, current_module, inputs, save_ctx, modules):
    setattr(save_ctx, f"stream{layer}", inputs.detach())
    return inputs


def train(current_module, inputs, save_ctx, modules):
    final = inputs[1::2].detach()  # at the steps: what follows a number is random
    streams = [getattr(save_ctx, f"stream{layer}")[1::2] for layer in range(LAYERS)]
    losses = [divergence(modules["lens"](layer, stream), final) for layer, stream in enumerate(streams)]
    sum(losses).backward()
    return inputs


def divergence(logits, final):
    """KL divergence of the lens' prediction from the model's, in nats."""
    log_final = final.log_softmax(-1)
    return (log_final.exp() * (log_final - logits.log_softmax(-1))).sum(-1).mean()


def evaluate(lens, streams, final):
    """The divergence of each layer's prediction at the steps."""
    with torch.no_grad():
        guesses = [lens(layer, stream[:, 1::2]) for layer, stream in enumerate(streams)]
        return [divergence(guess, final[:, 1::2]).item() for guess in guesses]


def main():
    flex = mf.FlexModel(tiny.load_model())
    names = "decoder.final_layernorm.weight", "output_layer.weight"
    lens = TunedLens(*(flex.get_module_parameter(name, everywhere=True) for name in names))
    flex.register_trainable_module("lens", lens)
    optimizer = torch.optim.Adam(flex.trainable_parameters(), lr=0.01)

    layers = [f"decoder.layers.{n}" for n in range(LAYERS)]
    hooks = [mf.HookFunction(layer, partial(remember, n), save=False) for n, layer in enumerate(layers)]
    hooks.append(mf.HookFunction("output_layer", train, save=False))
    handles = [flex.register_forward_hook(hook) for hook in hooks]
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        flex.interp.run_with_hooks(tiny.random_sums(64, seed=iteration))
        optimizer.step()
    for handle in handles:
        handle.remove()

    final, cache = flex.interp.run_with_cache(tiny.random_sums(64, seed=1000), layers)
    flex.restore()
    logit_lens = TunedLens(lens.norm, lens.unembedding)  # not trained
    if dist.get_rank() == 0:
        plain, tuned = (
            evaluate(each, [cache[layer] for layer in layers], final) for each in (logit_lens, lens)
        )
        print("logit lens, by layer:", *(f"{nats:.2f}" for nats in plain))
        print("tuned lens, by layer:", *(f"{nats:.2f}" for nats in tuned))
        draw(plain, tuned)
        tiny.compare_with_one_process("divergence of the tuned lens at layer 2", tuned[2], tolerance=1e-3)
    dist.destroy_process_group()


def draw(plain, tuned):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    layers = [f"layer {n}" for n in range(LAYERS)]
    axes.plot(layers, plain, marker="o", label="logit lens")
    axes.plot(layers, tuned, marker="o", label="tuned lens")
    axes.set(ylabel="nats", ylim=(0, None), title="KL divergence from the model's prediction")
    axes.legend()
    tiny.save(figure)


if __name__ == "__main__":
    main()
