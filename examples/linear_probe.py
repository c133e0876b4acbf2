"""Train linear probes in the run: from which layer on can the sum be read off the residual stream?

    torchrun --nproc-per-node 4 examples/linear_probe.py

Each probe is an ordinary torch module. Every rank holds a replica, and all replicas get the same gradient.
"""

from functools import partial

import tiny
import torch
import torch.distributed as dist
from torch.nn import functional as F

import megatron_flex as mf

LAYERS, HIDDEN, ITERATIONS = 4, 32, 30


def train_probe(name, current_module, inputs, save_ctx, modules):
    """An editing function that edits nothing. At the steps it asks the probe for the next number."""
    steps = inputs.detach()[1::2]  # [step, batch, feature]
    F.cross_entropy(modules[name](steps).flatten(0, 1), save_ctx.answers.T.flatten()).backward()
    return inputs


def batch(seed):
    """Sums, and the number that follows each step: [batch, step]."""
    tokens = tiny.random_sums(64, seed, length=9)
    return tokens[:, :16], tokens[:, 2::2]


def main():
    chunks = tiny.load_model()
    layers = [f"decoder.layers.{n}" for n in range(LAYERS)]
    hooks = [
        mf.HookFunction(layer, partial(train_probe, f"probe{n}"), save=False)
        for n, layer in enumerate(layers)
    ]
    with mf.attach(chunks, hooks) as flex:
        for n in range(LAYERS):
            flex.register_trainable_module(f"probe{n}", torch.nn.Linear(HIDDEN, tiny.NUMBERS))
        optimizer = torch.optim.Adam(flex.trainable_parameters(), lr=0.05)
        for iteration in range(ITERATIONS):
            tokens, flex.save_ctx.answers = batch(seed=iteration)
            optimizer.zero_grad()
            flex.interp.run_with_hooks(tokens)  # each probe's gradient
            optimizer.step()
        probes = list(flex.trainable_modules.values())

    tokens, answers = batch(seed=1000)
    flex = mf.FlexModel(chunks)
    _, cache = flex.interp.run_with_cache(tokens, layers)
    flex.restore()
    if dist.get_rank() == 0:
        logits = [probe(cache[layer][:, 1::2]) for probe, layer in zip(probes, layers, strict=True)]
        accuracy = [(guess.argmax(-1) == answers).float().mean().item() for guess in logits]
        print("accuracy after layer 0, 1, 2, 3:", *(f"{a:.0%}" for a in accuracy))
        draw(accuracy)
        loss = F.cross_entropy(logits[2].flatten(0, 1), answers.flatten())
        tiny.compare_with_one_process("loss of the probe at layer 2", loss.item(), tolerance=1e-3)
    dist.destroy_process_group()


def draw(accuracy):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    bars = axes.bar([f"layer {n}" for n in range(LAYERS)], accuracy)
    axes.bar_label(bars, fmt="{:.0%}")
    axes.axhline(1 / tiny.NUMBERS, color="gray", linestyle="--", label="chance")
    axes.set(ylabel="accuracy", ylim=(0, 1.15), title="Linear probes for the sum, at the step")
    axes.legend(loc="upper left")
    tiny.save(figure)


if __name__ == "__main__":
    main()
