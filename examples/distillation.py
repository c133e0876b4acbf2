"""Distil a teacher's hidden states into a model on two pipeline stages.

    torchrun --nproc-per-node 4 examples/distillation.py

The teacher is a model of Transformers on the ranks of the last stage. The student, in Megatron, has noise in
its weights. `flex.features` brings the student's hidden states to the last stage, and the gradients back.
"""

import tiny
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import megatron_flex as mf

LAYERS, ITERATIONS, NOISE = (0, 1, 2), 40, 0.1
OWN = 0.01  # the share of the model's own loss


def disturb(flex):
    """Add noise to the matrices of the student's layers, the same in every layout."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(flex.named_full_parameters(everywhere=True)):
        if ".layers." in name and weight.dim() == 2:
            flex.set_module_parameter(name, weight + NOISE * torch.randn(weight.shape, generator=generator))


def main():
    teacher = AutoModelForCausalLM.from_pretrained(tiny.ADDING).eval()
    chunks = tiny.load_model(sequence_parallel=False)
    with mf.attach(chunks) as flex, flex.features(LAYERS, gradients=True) as features:
        disturb(flex)
        optimizer = torch.optim.Adam((p for chunk in chunks for p in chunk.parameters()), lr=0.01)
        distances = []

        def loss(losses, tokens):  # on the last stage
            with torch.no_grad():
                hidden = teacher(tokens, output_hidden_states=True).hidden_states[1:]  # [batch, position, h]
            apart = [(features[n].transpose(0, 1) - hidden[n]).square().mean() for n in LAYERS]
            distances.append([value.item() for value in apart])
            return OWN * losses.mean() + sum(apart)

        for iteration in range(ITERATIONS):
            optimizer.zero_grad()
            tiny.train_step(chunks, tiny.random_sums(64, seed=iteration), loss)
            optimizer.step()
    curve = [distances[1::2]]  # of the second microbatch of each step
    dist.broadcast_object_list(curve, src=dist.get_world_size() - 1)  # the last stage has the losses
    if dist.get_rank() == 0:
        for when, row in (("at first", curve[0][0]), (f"after {ITERATIONS} steps", curve[0][-1])):
            print(f"distance by layer {when}:", *(f"{value:.4f}" for value in row))
        draw(curve[0])
        tiny.compare_with_one_process("last distance at layer 2", curve[0][-1][2], tolerance=1e-2)
    dist.destroy_process_group()


def draw(distances):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axes.semilogy(distances, label=[f"layer {n}" for n in LAYERS])
    axes.set(xlabel="step", ylabel="mean squared difference", title="The student's hidden states")
    axes.legend()
    tiny.save(figure)


if __name__ == "__main__":
    main()
