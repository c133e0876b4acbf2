"""Read a layer of a model that is sharded over tp=2 x pp=2, and steer the model with what was read.

torchrun --nproc-per-node 4 examples/read_and_steer.py
"""

import tiny
import torch
import torch.distributed as dist

import megatron_flex as mf

LAYER = "decoder.layers.0"


def main():
    chunks = tiny.load_model()
    flex = mf.FlexModel(chunks)
    tokens = tiny.sums(torch.tensor([5, 5]), torch.tensor([[2, 1], [2, 6]]))  # 5 +2 7 +1 and 5 +2 7 +6

    # Read: the full tensor [batch, position, feature], on every rank.
    before, cache = flex.interp.run_with_cache(tokens, LAYER)
    stream = cache[LAYER]

    # Steer: at the last position of the first sequence, add what makes +6 of +1.
    steer = mf.edits.steer(stream[1, -1] - stream[0, -1], positions=-1)
    flex.register_forward_hook(mf.HookFunction(LAYER, steer, save=False))
    after = flex.interp.run_with_hooks(tokens[:1])
    flex.restore()

    before, after = before[0, -1].softmax(-1), after[0, -1].softmax(-1)
    if dist.get_rank() == 0:
        print(f"{LAYER}: {tuple(stream.shape)}")
        for name, answer in ("not steered", before), ("steered", after):
            print(f"{name}: {tiny.show(tokens[0])} {answer.argmax()}, with probability {answer.max():.3f}")
        draw(before, after)
        tiny.compare_with_one_process("probability of 13", after[13].item())
    dist.destroy_process_group()


def draw(before, after):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    numbers = torch.arange(tiny.NUMBERS)
    axes.bar(numbers - 0.2, before[numbers], 0.4, label="not steered")
    axes.bar(numbers + 0.2, after[numbers], 0.4, label="steered from +1 to +6")
    axes.set(
        xlabel="next number", ylabel="probability", title="What comes after 5 +2 7 +1", xticks=numbers[::2]
    )
    axes.legend()
    tiny.save(figure)


if __name__ == "__main__":
    main()
