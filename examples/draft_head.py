"""Train an EAGLE-like draft head beside a frozen model, for speculative decoding.

    torchrun --nproc-per-node 4 examples/draft_head.py

From hidden states of three layers at a token, and from the token after it, the head drafts the one that
follows. The layers are on two pipeline stages; `flex.features` brings them to the last one.
"""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import megatron_flex as mf

LAYERS, HIDDEN, ITERATIONS = (0, 1, 3), 32, 80


class DraftHead(nn.Module):
    """Fuses hidden states with the embedding of the next token; then the model's own norm and unembedding."""

    def __init__(self, embedding, norm, unembedding):
        super().__init__()
        self.embedding, self.norm, self.unembedding = embedding, norm, unembedding  # frozen
        self.fuse = nn.Linear((len(LAYERS) + 1) * HIDDEN, 8 * HIDDEN)
        self.down = nn.Linear(8 * HIDDEN, HIDDEN)

    def forward(self, hidden, following):
        fused = self.fuse(torch.cat([*hidden, self.embedding[following]], dim=-1))
        stream = self.down(fused.square())  # sums modulo 32 are products of waves
        return F.rms_norm(stream, (HIDDEN,), self.norm, 1e-6) @ self.unembedding.T


def draft(head, hidden, tokens):
    """Logits at the numbers, `[step, batch, token]`: what follows the step after each number."""
    tokens = tokens.T  # [position, batch], as in Megatron
    return head([each[0:-2:2] for each in hidden], tokens[1:-1:2])


def main():
    chunks = tiny.load_model()
    with mf.attach(chunks) as flex:
        names = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"
        head = DraftHead(*(flex.get_module_parameter(name, everywhere=True) for name in names))
        flex.register_trainable_module("head", head)
        flex.freeze()
        features = flex.features(LAYERS)
        optimizer = torch.optim.Adam(flex.trainable_parameters(), lr=0.02)
        drafting = []

        def loss(losses, tokens):  # on the last stage
            logits = draft(flex.trainable_modules["head"], [features[n] for n in LAYERS], tokens)
            result = F.cross_entropy(logits.flatten(0, 1), tokens.T[2::2].flatten())
            drafting.append(result.item())  # Megatron divides the result in place
            return result + 0 * losses.mean()  # the stage before awaits a gradient of what it sent

        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            tiny.train_step(chunks, tiny.random_sums(64, seed=iteration), loss)
            optimizer.step()
        features.remove()

        tokens = tiny.random_sums(64, seed=1000)
        logits, cache = flex.interp.run_with_cache(tokens, [f"decoder.layers.{n}" for n in LAYERS])
    curve = [drafting[1::2]]  # of the second microbatch of each step
    dist.broadcast_object_list(curve, src=dist.get_world_size() - 1)  # the last stage has the losses
    if dist.get_rank() == 0:
        with torch.no_grad():
            drafted = draft(head, [cache[f"decoder.layers.{n}"].transpose(0, 1) for n in LAYERS], tokens)
        chosen = logits[:, 1:-1:2].argmax(-1).T  # what the model itself continues with
        accepted = (drafted.argmax(-1) == chosen).float().mean().item()
        print(f"loss of the head: {curve[0][0]:.2f} at first, {curve[0][-1]:.2f} after {ITERATIONS} steps")
        print(f"the model accepts {accepted:.0%} of the drafts")
        draw(curve[0])
        tiny.compare_with_one_process("last loss of the head", curve[0][-1], tolerance=1e-2)
    dist.destroy_process_group()


def draw(losses):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axes.plot(losses)
    axes.set(
        xlabel="step", ylabel="cross-entropy", ylim=(0, None), title="A draft head beside a frozen model"
    )
    tiny.save(figure)


if __name__ == "__main__":
    main()
