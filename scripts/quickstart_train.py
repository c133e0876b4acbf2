"""Trains a small GPTModel or HybridModel with Megatron's `pretrain()`; megatron_flex reads and edits it.

Started by torchrun, in as many processes as the flags ask for, like any training script of Megatron's.
What is printed behind `quickstart:` is for the screen; the rest is Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_flex import Dump, FlexModel, HookFunction, attach, cpu, open_dump
from megatron_flex.runtime import Readings

cpu.enable()  # before Megatron is imported; leave it out on a machine with GPUs

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from quickstart import DUMP_EVERY  # noqa: E402
from quickstart_data import EDITS, Source, add_folder, held_out_batch, save  # noqa: E402
from torch import Tensor, nn  # noqa: E402

LOSS = "loss:output"
# Every layer, fc1 in each, the loss. After `gpt:` names are a GPTModel's, whichever of the two models it is.
LAYERS = "gpt:decoder.layers.*"
PLACES = (LAYERS, f"{LAYERS}.mlp.linear_fc1", LOSS)
# To disk also the attention patterns, the logits, and the input of the first layer.
DUMPED = (
    *PLACES,
    f"{LAYERS}.self_attention.core_attention:probs",
    "output_layer",
    "gpt:decoder.layers.0:input",
)


class Watch:
    """The hooks, and a description of each."""

    flex: FlexModel
    dump: Dump
    chunks: list[nn.Module]

    def attach(self, chunks: list[nn.Module]) -> list[nn.Module]:
        """Megatron calls this with the finished model: on each rank its own part of it."""
        self.chunks = chunks
        args = get_args()
        # On disk too: every tenth iteration, its first microbatch and the parameters; each rank its shards.
        self.dump = Dump(
            args.folder / "dump",
            DUMPED,
            every=DUMP_EVERY,
            samples=slice(args.micro_batch_size),
            parameters="**",
            gradients=True,
            dtype="bf16",
        )
        self.flex = attach(chunks, [HookFunction(place) for place in PLACES], dumps=self.dump)
        samples = f"the first {args.micro_batch_size} samples"
        say(f"Iterations are counted from 0, as in the dump. RMS over {samples}, which are dumped too.")
        say("iteration   loss    RMS of the residual stream after    RMS of fc1's output in")
        say("                    layer 0      1      2      3        layer 0      1      2      3")
        return chunks

    def tell(self) -> None:
        """Print a row for the last iteration, and forget it. Only the first rank has captures."""
        read, args = self.flex.output_dict, get_args()
        if not read:
            return
        iteration = read[LOSS].keys[0].iteration
        if iteration % max(1, args.train_iters // 8) == 0 or iteration == args.train_iters - 1:
            count = len(self.flex.sites(f"{LAYERS}:output"))
            layers = [LAYERS.replace("*", str(n)) for n in range(count)]
            stream = "".join(f"{rms(read[layer][0]):7.3f}" for layer in layers)
            fc1 = "".join(f"{rms(read[f'{layer}.mlp.linear_fc1'][0]):7.3f}" for layer in layers)
            say(f"{iteration:9}{mean(read[LOSS]):7.3f}    {stream}        {fc1}")
        read.clear()


def mean(tensors: Readings) -> float:
    """Over all microbatches."""
    return torch.stack([t.mean() for t in tensors]).mean().item()


def rms(tensor: Tensor) -> float:
    """The root of the mean square."""
    return tensor.square().mean().sqrt().item()


def say(line: str) -> None:
    """A line for the screen, from one rank."""
    if torch.distributed.get_rank() == 0:
        print(f"quickstart: {line}", flush=True)


# -- what every training script hands to Megatron ----------------------------------------------------


def forward_step(watch: Watch, data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this rank's part of the model."""
    watch.tell()
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, loss_of


def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """From the losses `[b, s]`: their sum, their number, and what Megatron logs."""
    total, tokens = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Source, None, None]:
    """Training data; no validation and no test."""
    return Source(sizes[0], get_args().seq_length), None, None


datasets.is_distributed = True  # every rank reads the data itself: nothing needs to be broadcast

# -- after training ----------------------------------------------------------------------------------


def dumped(watch: Watch) -> None:
    """Say what is on disk. Every rank calls it, and the first one reads what all have written."""
    watch.flex.remove_dump(watch.dump)
    if torch.distributed.get_rank() == 0:
        with open_dump(watch.dump.path) as dump:
            layer = dump["decoder.layers.0"]
            when = ", ".join(map(str, dump.iterations))
            say(f"dumped {len(dump.sites)} tensors at iterations {when}")
            dims = ", ".join(f"{dim} {size}" for dim, size in zip(layer.dims, layer.shape, strict=True))
            say(f"e.g. {layer.name}: [{dims}], {str(layer.dtype).removeprefix('torch.')}")


def held_out(watch: Watch) -> float:
    """The held-out batch forward through Megatron's schedule. The mean loss, on the first rank."""
    args = get_args()
    watch.flex.output_dict.clear()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, watch),
            data_iterator=iter([held_out_batch(args.micro_batch_size, args.seq_length)]),
            model=watch.chunks,
            num_microbatches=1,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )
    read = watch.flex.output_dict
    return mean(read[LOSS]) if read else float("nan")


def experiment(watch: Watch) -> dict[str, Tensor]:
    """Read the held-out batch, then run it again under each edit. Every rank does the same.

    Returns:
        On the first rank the captures, by site, and the loss of each run (without dims).
    """
    flex = watch.flex
    flex.register_forward_hook(HookFunction("output_layer"))  # the logits too
    losses = {"unedited": held_out(watch)}
    results = {site: readings[0] for site, readings in flex.output_dict.items()}
    say(f"held-out loss {losses['unedited']:.4f}")
    for label, (name, _, edit) in EDITS.items():
        hook = HookFunction(f"gpt:{name}", edit, save=False)
        flex.register_forward_hook(hook)
        losses[label] = held_out(watch)
        flex.remove_hook(hook)
        say(f"held-out loss {losses[label]:.4f} ({losses[label] - losses['unedited']:+.4f}), {label}")
    return results | {label: torch.tensor(loss) for label, loss in losses.items()}


def main() -> None:
    """Train, try the edits, and write the full weights and the captures."""
    args = parse_and_validate_args(add_folder)
    watch = Watch()
    model = (hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args)(args)
    model.post_wrap_hooks.append(watch.attach)
    container = pretrain_cfg_container_from_args(args, model)
    pretrain(container, datasets, ModelType.encoder_or_decoder, partial(forward_step, watch))
    watch.tell()
    dumped(watch)

    results = experiment(watch)
    # One file to look at: the model, the ranks, and what the dump has. One rank writes it.
    watch.flex.report.to_html(args.folder / "page.html", watch.dump.path, title="quick start")
    weights = dict(watch.flex.named_full_parameters())
    if torch.distributed.get_rank() == 0:
        save(args.folder / "weights", weights)
        save(args.folder / "parallel", results)
    watch.flex.restore()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
