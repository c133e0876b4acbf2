"""What both launches of the quick start share: the text, the held-out batch, the edits, the files."""

from __future__ import annotations

import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def add_folder(parser: ArgumentParser) -> ArgumentParser:
    """Megatron lets a script add flags of its own; ours says where the results go."""
    parser.add_argument("--folder", type=Path, required=True, help="where weights and tensors are written")
    return parser


# -- text --------------------------------------------------------------------------------------------


@cache
def text() -> Tensor:
    """The source files of Python's standard library, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def one_byte(token: int) -> bytes:
    """The text of a token, which is a byte."""
    return bytes([int(token)])


class Source(Dataset[dict[str, Tensor]]):
    """Stretches of source code, drawn from the first nine tenths of the text, or from the rest.

    Args:
        count: how many.
        length: bytes in each.
        held_out: whether they come from the part that is never trained on.
    """

    def __init__(self, count: int, length: int, held_out: bool = False) -> None:
        cut = len(text()) * 9 // 10
        low, high = (cut, len(text())) if held_out else (0, cut)
        generator = torch.Generator().manual_seed(2)
        self.length = length
        self.starts = torch.randint(low, high - length, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        stretch = text()[start : start + self.length + 1].long()
        return {"tokens": stretch[:-1], "labels": stretch[1:], "position_ids": torch.arange(self.length)}


def held_out_batch(sequences: int, length: int) -> dict[str, Tensor]:
    """One microbatch `[b, s]` that no training run sees."""
    source = Source(sequences, length, held_out=True)
    return {name: torch.stack([source[i][name] for i in range(sequences)]) for name in source[0]}


# -- edits: plain code for one device ----------------------------------------------------------------


def ablate(current_module: nn.Module, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    """Zero everything."""
    return torch.zeros_like(inputs)


def steer(current_module: nn.Module, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict) -> Tensor:
    """Push every token of the residual stream `[s, b, h]` the same way."""
    direction = torch.randn(inputs.shape[-1], generator=torch.Generator().manual_seed(3))
    return inputs + 2.0 * direction.to(inputs)


# Where, by a GPTModel's name and by a HybridModel's, which has attention and MLP as layers of their own.
EDITS = {
    "MLP of layer 1 zeroed": ("decoder.layers.1.mlp.linear_fc2", "decoder.layers.3.mlp.linear_fc2", ablate),
    "steered after layer 2": ("decoder.layers.2", "decoder.layers.5", steer),
}

# -- files -------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name: as safetensors where that is installed."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(whole, path)
    else:
        save_file(whole, path)


def load(path: Path) -> dict[str, Tensor]:
    """Read what `save` wrote."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        return torch.load(path, weights_only=True)
    return load_file(path)
