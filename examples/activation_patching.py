"""Activation patching: where does the model keep the number that it adds to?

    torchrun --nproc-per-node 4 examples/activation_patching.py

In a run of `5 +3 8 +2 10 +4`, the residual stream at one layer and position is replaced by that of
`20 +3 23 +2 25 +4`. If the answer turns from 14 into 29, the number was there.
"""

import tiny
import torch
import torch.distributed as dist

import megatron_flex as mf

LAYERS, STEPS = 4, [3, 2, 4]


def main():
    flex = mf.FlexModel(tiny.load_model())
    tokens, others = (tiny.sums(torch.tensor([start]), torch.tensor([STEPS])) for start in (5, 20))
    clean, _ = flex.interp.run_with_cache(tokens)
    other, cache = flex.interp.run_with_cache(others, lambda name: name.endswith("hook_resid_pre"))

    recovered = torch.zeros(LAYERS, tokens.shape[1])
    for layer in range(LAYERS):
        for position in range(tokens.shape[1]):

            def patch(stream, hook, position=position):  # [batch, position, feature], the full tensor
                stream[:, position] = cache[hook.name][:, position]

            logits = flex.interp.run_with_hooks(tokens, [(f"blocks.{layer}.hook_resid_pre", patch)])
            recovered[layer, position] = preference(logits)
    recovered = (recovered - preference(clean)) / (preference(other) - preference(clean))
    flex.restore()

    if dist.get_rank() == 0:
        layer, position = divmod(recovered.argmax().item(), tokens.shape[1])
        print(f"recovered most: {recovered.max():.0%}, layer {layer}, position {position}")
        draw(recovered, tokens[0], others[0])
        tiny.compare_with_one_process("recovered before layer 2, at +4", recovered[2, -1].item())
    dist.destroy_process_group()


def preference(logits):
    """How much the model prefers 29 to 14."""
    return logits[0, -1, 29] - logits[0, -1, 14]


def draw(recovered, tokens, others):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    image = axes.imshow(recovered, cmap="Blues", vmin=0, vmax=1)
    for layer, row in enumerate(recovered.tolist()):
        for position, share in enumerate(row):
            color = "white" if share > 0.6 else "black"
            axes.text(position, layer, f"{share:.0%}", ha="center", va="center", color=color)
    words = zip(tokens.tolist(), others.tolist(), strict=True)
    axes.set_xticks(range(len(tokens)), [f"{tiny.word(own)}\n{tiny.word(other)}" for own, other in words])
    axes.set_yticks(range(LAYERS), [f"layer {n}" for n in range(LAYERS)])
    axes.set(
        title="Patching one position turns 14 into 29",
        xlabel="patched position: own token, and the other run's",
    )
    figure.colorbar(image, label="of the difference in logits")
    tiny.save(figure)


if __name__ == "__main__":
    main()
