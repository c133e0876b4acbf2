"""Generate text with a steering vector.

    torchrun --nproc-per-node 4 examples/steering_generation.py

The text says +1 each time. A vector at layer 0, the mean difference between two steps, makes it add more.
"""

import tiny
import torch
import torch.distributed as dist

import megatron_flex as mf

LAYER, LENGTH = "decoder.layers.0", 8


def step_vectors(flex):
    """The mean of the residual stream at each step, over all numbers: [step, feature]."""
    steps = torch.arange(tiny.STEPS)
    tokens = tiny.sums(
        torch.arange(tiny.NUMBERS).repeat(len(steps)), steps.repeat_interleave(tiny.NUMBERS)[:, None]
    )
    _, cache = flex.interp.run_with_cache(tokens, LAYER)
    return cache[LAYER][:, 1].view(len(steps), tiny.NUMBERS, -1).mean(1)


def generate(flex, start):
    """Numbers that the model says, and +1 after each: `start +1 ... +1 ...`."""
    tokens = torch.tensor([[start]])
    for _ in range(LENGTH - 1):
        tokens = torch.cat([tokens, torch.tensor([[tiny.NUMBERS + 1]])], 1)
        logits = flex.interp.run_with_hooks(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0], logits[0, -1]


def main():
    flex = mf.FlexModel(tiny.load_model())
    vectors = step_vectors(flex)
    texts = {}
    for step in (1, 2, 4):
        steer = mf.edits.steer(vectors[step] - vectors[1], positions=slice(1, None, 2))  # at the steps
        hook = mf.HookFunction(LAYER, steer, save=False)
        flex.register_forward_hook(hook)
        texts[step], logits = generate(flex, start=2)
        flex.remove_hook(hook)
    flex.restore()

    if dist.get_rank() == 0:
        for step, text in texts.items():
            print(f"steered to +{step}:", tiny.show(text))
        draw(texts)
        tiny.compare_with_one_process("probability of the last number", logits.softmax(-1).max().item())
    dist.destroy_process_group()


def draw(texts):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    for step, text in texts.items():
        axes.plot(text[::2], marker="o", label=f"steered to +{step}" if step > 1 else "not steered")
    axes.set(title="The text says +1 each time", xlabel="numbers generated", ylabel="number")
    axes.legend()
    tiny.save(figure)


if __name__ == "__main__":
    main()
