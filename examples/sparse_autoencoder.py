"""Train a sparse autoencoder in the run, and splice it into the model.

    torchrun --nproc-per-node 4 examples/sparse_autoencoder.py

The autoencoder receives the full output of layer 2, which is sharded over the sequence on the second pipeline
stage. After training, its reconstruction replaces the output.
"""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import megatron_flex as mf

LAYER, HIDDEN, FEATURES, ITERATIONS = "decoder.layers.2", 32, 96, 40


class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(HIDDEN, FEATURES)
        self.decoder = nn.Linear(FEATURES, HIDDEN)

    def features(self, stream):
        return F.relu(self.encoder(stream))

    def forward(self, stream):
        return self.decoder(self.features(stream))


def train(current_module, inputs, save_ctx, modules):
    stream, sae = inputs.detach(), modules["sae"]
    features = sae.features(stream)
    loss = F.mse_loss(sae.decoder(features), stream) + 0.002 * features.sum(-1).mean()
    loss.backward()
    return inputs


def main():
    flex = mf.FlexModel(tiny.load_model())
    torch.manual_seed(0)
    flex.register_trainable_module("sae", SparseAutoencoder())
    optimizer = torch.optim.Adam(flex.trainable_parameters(), lr=0.01)
    hook = mf.HookFunction(LAYER, train, save=False)
    flex.register_forward_hook(hook)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        flex.interp.run_with_hooks(tiny.random_sums(64, seed=iteration))
        optimizer.step()
    flex.remove_hook(hook)

    tokens = tiny.random_sums(64, seed=1000, length=9)
    tokens, answers = tokens[:, :16], tokens[:, 2::2]
    _, cache = flex.interp.run_with_cache(tokens, LAYER)
    flex.register_forward_hook(mf.HookFunction(LAYER, mf.edits.splice("sae"), save=False))
    logits = flex.interp.run_with_hooks(tokens)[:, 1::2]
    sae = flex.trainable_modules["sae"]
    flex.restore()
    if dist.get_rank() == 0:
        stream = cache[LAYER][:, 1::2]  # at the steps
        with torch.no_grad():
            features = sae.features(stream)
            explained = 1 - (sae(stream) - stream).var() / stream.var()
        print(
            f"variance explained {explained:.1%}, active features {(features > 0).float().sum(-1).mean():.1f}"
        )
        print(f"right answers with the reconstruction {(logits.argmax(-1) == answers).float().mean():.1%}")
        draw(features, answers)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        tiny.compare_with_one_process("loss with the reconstruction", loss.item(), tolerance=1e-2)
    dist.destroy_process_group()


def draw(features, answers):
    import matplotlib.pyplot as plt

    mean = torch.stack([features[answers == number].mean(0) for number in range(tiny.NUMBERS)])
    selective = (mean.max(0).values - mean.mean(0)).topk(32).indices
    order = selective[mean[:, selective].argmax(0).argsort()]
    figure, axes = plt.subplots(figsize=(5.4, 4), layout="constrained")
    image = axes.imshow(mean[:, order].T, cmap="viridis", aspect="auto")
    axes.set(title="The 32 most selective features", xlabel="answer", ylabel="feature")
    figure.colorbar(image, label="mean activation")
    tiny.save(figure)


if __name__ == "__main__":
    main()
