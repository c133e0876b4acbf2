"""Hook a layer of your own: a LoRA linear, as a fork of Megatron might have it.

    torchrun --nproc-per-node 4 examples/own_layer.py

Nothing is declared: the layer is made of Megatron's parallel linears, whose layouts are known.
"""

import tiny
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import nn

import megatron_flex as mf

RANK = 4
LINEAR = "decoder.layers.1.self_attention.linear_qkv"


class LoRALinear(nn.Module):
    """A column parallel linear, plus a low-rank one."""

    def __init__(self, linear, config):
        super().__init__()
        options = {"config": config, "init_method": config.init_method, "bias": False}
        self.base_layer = linear
        self.down = ColumnParallelLinear(linear.input_size, RANK, gather_output=True, **options)
        self.up = ColumnParallelLinear(RANK, linear.output_size, gather_output=False, **options)

    def forward(self, stream):
        output, bias = self.base_layer(stream)
        return output + self.up(self.down(stream)[0])[0], bias


def main():
    chunks = tiny.load_model(sequence_parallel=False)
    for layer in chunks[0].decoder.layers:
        attention = layer.self_attention
        attention.linear_qkv = LoRALinear(attention.linear_qkv, chunks[0].config)
    flex = mf.FlexModel(chunks)
    generator = torch.Generator().manual_seed(0)
    for name, weight in dict(flex.named_full_parameters(everywhere=True)).items():
        if "linear_qkv.up" in name or "linear_qkv.down" in name:  # the same numbers in every layout
            flex.set_module_parameter(name, 0.1 * torch.randn(weight.shape, generator=generator))

    tokens = tiny.random_sums(8, seed=1)
    logits, cache = flex.interp.run_with_cache(tokens, [LINEAR, f"{LINEAR}.down"])
    low_rank = cache[f"{LINEAR}.down"]  # [batch, position, rank]
    strongest = low_rank.abs().mean((0, 1)).argmax().item()
    ablate = mf.edits.ablate_neurons([strongest])
    flex.register_forward_hook(mf.HookFunction(f"{LINEAR}.down", ablate, save=False))
    ablated = flex.interp.run_with_hooks(tokens)
    flex.restore()

    if dist.get_rank() == 0:
        for name, tensor in cache.items():
            print(f"{name}: {tuple(tensor.shape)}")
        effect = (ablated - logits).norm().item()
        print(f"without component {strongest} of {RANK} the logits change by {effect / logits.norm():.0%}")
        tiny.save(mf.plot.heat(cache, f"{LINEAR}.down"))
        tiny.compare_with_one_process("norm of the change", effect)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
