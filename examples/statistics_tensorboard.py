"""Statistics of every layer in TensorBoard, while Megatron's `pretrain()` trains.

    torchrun --nproc-per-node 4 examples/statistics_tensorboard.py
    tensorboard --logdir out/statistics_tensorboard

Each rank measures its own shard, and one all-reduce per step combines the numbers. Megatron's own writer logs
them beside the loss. The model is trained on another task: +1 now adds 2, +2 adds 4.
"""

import sys
from contextlib import ExitStack

import tiny
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch.utils.data import Dataset

import megatron_flex as mf

ITERATIONS = 10
FLAGS = f"""
--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 40
--make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --seq-length 16 --max-position-embeddings 16
--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 32 --global-batch-size 64 --lr 3e-3
--train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval {ITERATIONS}
--tensorboard-log-interval 1
--transformer-impl local --distributed-backend gloo --use-cpu-initialization --num-workers 0
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
"""


class DoubleSteps(Dataset):
    def __init__(self, samples):
        self.tokens = tiny.random_sums(samples, seed=1, length=9)
        numbers = self.tokens[:, ::2]
        numbers[:] = (2 * numbers - numbers[:, :1]) % tiny.NUMBERS

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"tokens": tokens[:16], "labels": tokens[1:17], "positions": torch.arange(16)}


def datasets(sizes, vp_stage=None):
    return DoubleSteps(sizes[0]), None, None


datasets.is_distributed = True  # every rank reads the data itself


def forward_step(data, model):
    batch = next(data)
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return losses, loss


def loss(losses):
    losses = losses[:, 1::2]  # at the steps: what follows a number is random
    total, tokens = losses.sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def main():
    tensor, pipeline = tiny.start()
    folder = tiny.empty_folder()
    sys.argv += [*FLAGS.split(), "--tensorboard-dir", str(folder)]
    if tensor > 1:
        sys.argv += ["--tensor-model-parallel-size", str(tensor), "--sequence-parallel"]
    sys.argv += ["--pipeline-model-parallel-size", str(pipeline)]
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    config = pretrain_cfg_container_from_args(args, model)
    statistics = mf.Statistics(folder / "statistics", "decoder.layers.*", gradients=True)

    with ExitStack() as stack:  # its end writes the last iteration

        def attach(chunks):  # Megatron calls it with this rank's part of the model
            mf.load_hf(chunks, tiny.ADDING)
            stack.enter_context(mf.attach(chunks, statistics=statistics))
            return chunks

        model.post_wrap_hooks.append(attach)
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    dist.barrier()
    if dist.get_rank() == 0:
        report(folder)
    dist.destroy_process_group()


def report(folder):
    """Read the files of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    layers = [f"flex/decoder.layers.{n}:output" for n in range(4)]
    tags = ["lm loss", *(f"{layer}.grad/rms" for layer in layers), *(f"{layer}/rms" for layer in layers)]
    curves = {tag: [event.value for event in events.Scalars(tag)] for tag in tags}
    for tag in "lm loss", tags[1], tags[-1]:
        print(f"{tag}: {curves[tag][0]:.3g} at first, {curves[tag][-1]:.3g} after {ITERATIONS} iterations")
    draw(curves)
    tiny.compare_with_one_process(tags[-1], curves[tags[-1]][-1], tolerance=1e-3)


def draw(curves):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    for tag, curve in curves.items():
        panel = axes[0 if tag == "lm loss" else 2 if ".grad" in tag else 1]
        panel.plot(range(1, len(curve) + 1), curve, label=f"layer {tag[20]}" if "layers" in tag else None)
    for panel, title in zip(axes, ("loss", "RMS of the output", "RMS of its gradient"), strict=True):
        panel.set(title=title, xlabel="iteration", ylim=(0, None))
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper")
    tiny.save(figure)


if __name__ == "__main__":
    main()
