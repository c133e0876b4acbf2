"""Hidden states of a rollout, as vLLM's `ExampleHiddenStatesConnector` writes them: a file for each request.

A file `REQUEST.safetensors` has `hidden_states` `[token, layer, feature]` and `token_ids` `[token]`. Which
layers these are is not in the file: they are those of `eagle_aux_hidden_state_layer_ids`. Layer `N` is the
residual stream before layer `N`; that of the model's number of layers is after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_flex.errors import FlexError
from megatron_flex.rollout.rollout_table import Request

STATES, TOKENS = "hidden_states", "token_ids"


class HiddenStates:
    """The hidden states of a rollout's requests. Opening checks all headers, and reads no states.

    Args:
        folder: has a file for each request.
        layers: vLLM's numbers of the layers, in the order of the files.

    Attributes:
        layers: the numbers.
        width: the hidden size.
        dtype: of the states.
        files: the file of each request.
    """

    def __init__(self, folder: str | PathLike[str], layers: Sequence[int]) -> None:
        self.layers = list(layers)
        self.files = {file.stem: file for file in sorted(Path(folder).glob("*.safetensors"))}
        if not self.files:
            raise FlexError(f"{folder} has no .safetensors files; give the folder with vLLM's hidden states")
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise FlexError(
                f"layers {self.layers} of {folder}: give vLLM's eagle_aux_hidden_state_layer_ids, in order"
            )
        forms = {name: self._read_form(file) for name, file in self.files.items()}
        (self.width, self.dtype), *others = dict.fromkeys(forms.values())
        if others:
            odd = next(name for name, form in forms.items() if form != (self.width, self.dtype))
            raise FlexError(
                f"{self.files[odd]} has hidden states of {forms[odd][0]} features in {forms[odd][1]}, and "
                f"{next(iter(self.files.values()))} of {self.width} in {self.dtype}: give files of one model"
            )

    def _read_form(self, file: Path) -> tuple[int, torch.dtype]:
        """The width and dtype of a file's states."""
        try:
            with safe_open(file, "pt") as opened:
                names = set(opened.keys())
                if not {STATES, TOKENS} <= names:
                    raise FlexError(
                        f"{file} has {sorted(names)}; vLLM's files have {STATES!r} and {TOKENS!r}"
                    )
                states, tokens = opened.get_slice(STATES), opened.get_slice(TOKENS)
                shape, count = states.get_shape(), tokens.get_shape()
                dtype = states[:0].dtype
        except (SafetensorError, OSError) as error:
            raise FlexError(f"{file} is damaged: {error}") from None
        if len(shape) != 3 or count != shape[:1]:
            raise FlexError(
                f"{file}: hidden_states {shape} and token_ids {count}; they are [token, layer, feature] and "
                "[token]"
            )
        if shape[1] != len(self.layers):
            raise FlexError(
                f"{file} has hidden states of {shape[1]} layers, and {len(self.layers)} are named: "
                f"{self.layers}; give vLLM's eagle_aux_hidden_state_layer_ids"
            )
        return shape[2], dtype

    def check_tokens(self, request: Request) -> None:
        """Refuse a file with other tokens than the table has.

        Args:
            request: of the table.

        Raises:
            FlexError: a token differs.
        """
        if request.name not in self.files:
            return
        ids = self.read_tokens(request.name)
        inside = request.positions < len(ids)
        positions = request.positions[inside]
        wrong = (ids[positions] != request.tokens[inside]).nonzero().flatten()
        if len(wrong):
            position = int(positions[wrong[0]])
            raise FlexError(
                f"{self.files[request.name]} has token {int(ids[position])} at position {position}, and the "
                f"table {int(request.tokens[inside][wrong[0]])}: give files of the same rollout"
            )

    def read_tokens(self, request: str) -> Tensor:
        """The token ids of a request's file: `[token]`."""
        with safe_open(self.files[request], "pt") as opened:
            tokens: Tensor = opened.get_tensor(TOKENS)
        return tokens.long()

    def read(self, request: str, positions: Tensor, layer: int) -> Tensor:
        """The states of one layer, by its place in `layers`, as fp64: `[token, feature]`."""
        first = int(positions[0])
        with safe_open(self.files[request], "pt") as opened:
            states: Tensor = opened.get_slice(STATES)[first : int(positions[-1]) + 1, layer : layer + 1]
        return states[positions - first, 0].double()
