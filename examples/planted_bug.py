"""Find a bug by running the same model in two layouts: one process, and tp=2 x pp=2.

    torchrun --nproc-per-node 4 examples/planted_bug.py

Both runs dump the hook points of a step. The comparison names the first tensor that differs by more than
round-off.
"""

import tiny
import torch.distributed as dist

import megatron_flex as mf
from megatron_flex.compare import compare

SITES = ["decoder.layers.*", "decoder.layers.*:mid", "**.self_attention", "**.mlp", "**.linear_*", "loss"]


def scale_by_depth(chunks):
    """Divide the output of MLP n by n + 1, as a fork of Megatron might.

    The bug: n counts the layers of this pipeline stage. On one process that is right.
    """
    for n, layer in enumerate(chunks[0].decoder.layers):
        layer.mlp.register_forward_hook(lambda mlp, inputs, output, n=n: (output[0] / (n + 1), output[1]))


def main():
    chunks = tiny.load_model()
    scale_by_depth(chunks)
    dump = mf.Dump(tiny.empty_folder(), SITES)
    with mf.attach(chunks, dumps=dump):
        tiny.train_step(chunks, tiny.random_sums(8, seed=1))

    if dist.get_rank() == 0:
        with mf.open_dump(dump.path) as opened:
            loss = opened["loss"].torch().mean().item()
        expected = tiny.of_one_process(loss)
        print(f"loss: {loss:.4f} on {tiny.processes()}, expected {expected:.4f}")
        if dist.get_world_size() > 1:
            found = compare(tiny.OUT / "one-process", dump.path)
            print(f"{found.verdict}, first at {found.first.name}")
            print(found.first.evidence)
            tiny.save(mf.plot.divergence(found))
            assert found.first.name == "decoder.layers.2.mlp:output"  # the first layer of the second stage
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
