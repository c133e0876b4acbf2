"""Dump activations and gradients of a sharded run, read them back as full tensors, and plot them.

    torchrun --nproc-per-node 4 examples/dump_and_plot.py

Each rank writes its own shards, and ranks send each other nothing. What reads the dump needs no Megatron.
"""

import tiny
import torch.distributed as dist

import megatron_flex as mf


def main():
    chunks = tiny.load_model()
    sites = ["decoder.layers.*", "**.core_attention:probs"]
    dump = mf.Dump(tiny.empty_folder(), sites, gradients=True)
    with mf.attach(chunks, dumps=dump):
        tiny.train_step(chunks, tiny.random_sums(8, seed=1))

    if dist.get_rank() == 0:
        read(dump.path)
    dist.destroy_process_group()


def read(folder):
    """From here on one process is enough, on any machine."""
    with mf.open_dump(folder) as dump:
        layer, gradient = dump["decoder.layers.3"], dump["decoder.layers.3:output.grad"]
        print(layer.name, dict(zip(layer.dims, layer.shape, strict=True)))
        print("one token of one sample:", tuple(layer[0, 5, -1].torch().shape))
        tiny.save(mf.plot.attention(dump, layer=2), "attention")
        tiny.save(mf.plot.norms(dump), "norms")
        norm = gradient.torch().norm().item()
    tiny.compare_with_one_process("norm of the gradient after layer 3", norm)


if __name__ == "__main__":
    main()
