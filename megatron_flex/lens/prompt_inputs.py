"""Prompts as users have them, read into one form: text starts at position 0 and padding follows it.

Tokenizers pad on either side. Text is moved to the start before the run, so that every hook point, selection
and edit counts positions of the text, whichever side was padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_flex.adapters import Prompts
from megatron_flex.collectives import checksum, gather_distinct
from megatron_flex.errors import FlexError
from megatron_flex.lens.tensor_views import Dims
from megatron_flex.runtime import Session

Text = str | Sequence[str]
PromptInput = Tensor | Mapping[str, Any] | Text
Tokenizer = Callable[..., Mapping[str, Any]]
MASK_FORM = "give [batch, sequence] as the tokens have it, 1 at text and 0 at padding"


def read_prompts(
    session: Session,
    given: PromptInput,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Prompts:
    """Read what a user gave. Collective over the model replica.

    Args:
        session: the session of the model.
        given: token ids, a tokenizer's result, or text.
        attention_mask: 1 at text, 0 at padding.
        position_ids: positions, in the place of the model's own.
        inputs: further keywords of the model.
        tokenizer: what turns text into token ids.

    Raises:
        FlexError: on all ranks: something is wrong with the prompts, or ranks have different ones; or a step
            is running.
    """
    if session.over_data:
        raise FlexError(
            "gather_data_parallel=True concatenates the same tokens of all replicas; attach "
            "without it to run the model over tokens"
        )
    if session.running:  # other ranks may be elsewhere in the step, and would not meet this one
        raise FlexError(
            "a step is running, and a run over tokens is a step of its own; call it after that step"
        )
    local: Prompts | None = None
    try:
        named = name_inputs(given, attention_mask, position_ids, inputs or {}, tokenizer)
        local = align_to_start(*named, multiple=session.adapter.runner.length_multiple)
        report: tuple[str, tuple[int, ...], tuple[Any, ...]] = "", tuple(local.tokens.shape), _digest(local)
    except FlexError as error:
        report = str(error), (), ()
    reports = gather_distinct(report, session.mesh.replica())
    for why, _, _ in reports:
        if why:
            raise FlexError(why)
    if len(reports) > 1:
        shapes = ", ".join(map(str, sorted({shape for _, shape, _ in reports})))
        entries = {entry for _, _, digest in reports for entry in digest}
        names = sorted({name for name, _ in entries if sum(name == n for n, _ in entries) > 1} or {"inputs"})
        raise FlexError(
            f"ranks of one replica have different {', '.join(names)} (tokens of shapes {shapes}); give all "
            "the same"
        )
    assert local is not None
    return local


def _digest(prompts: Prompts) -> tuple[Any, ...]:
    """What must be equal on all ranks of a replica."""
    values = {"tokens": prompts.tokens, **prompts.keywords()}
    return tuple(
        (name, (tuple(value.shape), checksum(value)) if isinstance(value, Tensor) else repr(value))
        for name, value in values.items()
    )


NamedInputs = tuple[Tensor, Tensor | None, Tensor | None, dict[str, Any]]


def name_inputs(
    given: PromptInput,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    inputs: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> NamedInputs:
    """Tokens, mask, positions and further keywords, from any form.

    Raises:
        FlexError: it has none of these forms, or a keyword stands in the dict and in the call.
    """
    keywords = {"attention_mask": attention_mask, "position_ids": position_ids, **inputs}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    texts = _as_texts(given)
    if texts is not None:
        given = encode(texts, tokenizer)
    elif isinstance(given, Mapping):
        given = {name: _as_tensor(name, value) for name, value in given.items()}
        if "input_ids" not in given:
            raise FlexError(f"a dict of {', '.join(given) or 'nothing'} has no tokens; give it input_ids")
    if isinstance(given, Mapping):
        twice = sorted(keywords.keys() & given.keys())
        if twice:
            whose = "made from the text" if texts is not None else "in the dict of prompts"
            raise FlexError(f"{', '.join(twice)} is given, and is {whose}; leave out one of them")
        keywords = {**given, **keywords}
        given = keywords.pop("input_ids")
    if not isinstance(given, Tensor):
        raise FlexError(
            f"tokens is a {type(given).__name__}; give a tensor of token ids [batch, sequence], such as "
            "torch.tensor([ids]), a tokenizer's result, or text"
        )
    return given, keywords.pop("attention_mask", None), keywords.pop("position_ids", None), keywords


def _as_texts(given: object) -> list[str] | None:
    if isinstance(given, str):
        return [given]
    is_list = isinstance(given, (list, tuple)) and given and all(isinstance(text, str) for text in given)
    return list(given) if is_list and isinstance(given, (list, tuple)) else None


def _as_tensor(name: str, value: Any) -> Any:
    """A list of a tokenizer's result as a tensor; other values as they are."""
    if not isinstance(value, list):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError):
        raise FlexError(
            f"{name} of the dict of prompts is a list that makes no tensor; give the tokenizer padding=True "
            "and return_tensors='pt'"
        ) from None


def encode(texts: list[str], tokenizer: Tokenizer | None) -> dict[str, Tensor]:
    """The token ids of texts, padded at the end, and their mask. The tokenizer needs no padding token.

    Raises:
        FlexError: no tokenizer was given, or a text has no tokens.
    """
    if tokenizer is None:
        shown = texts[0] if len(texts[0]) <= 40 else f"{texts[0][:40]}..."
        raise FlexError(
            f"tokens={shown!r} is text; set flex.interp.tokenizer, or give token ids [batch, sequence], "
            "such as tokenizer(text, return_tensors='pt').input_ids"
        )
    ids = [torch.as_tensor(row) for row in tokenizer(texts)["input_ids"]]
    empty = [text for text, row in zip(texts, ids, strict=True) if not len(row)]
    if empty:
        raise FlexError(f"the tokenizer gives no token for {empty[0]!r}; give text that has some")
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).long()
    lengths = torch.tensor([len(row) for row in ids])
    return {"input_ids": tokens, "attention_mask": _mask(lengths, tokens.shape[1])}


def _mask(lengths: Tensor, length: int) -> Tensor:
    return (torch.arange(length) < lengths[:, None]).long()


def align_to_start(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    inputs: dict[str, Any],
    multiple: int = 1,
) -> Prompts:
    """Move each text to the start of its sequence, with whatever has an entry for each of its tokens.

    Args:
        tokens: the token ids.
        attention_mask: 1 at text and 0 at padding, on either side.
        position_ids: positions, or None.
        inputs: further keywords.
        multiple: what the length of sequences with a mask is padded to a multiple of.

    Raises:
        FlexError: the mask or the positions do not fit the tokens, or a text has holes.
    """
    shape = tokens.shape[:2]
    if position_ids is not None:
        _check_shape("position_ids", position_ids, tokens)
    if attention_mask is None:
        return Prompts(tokens, None, position_ids, inputs)
    mask = check_mask(attention_mask, tokens)
    first = mask.argmax(1)
    order = (torch.arange(shape[1], device=mask.device) + first[:, None]) % shape[1]

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:2] != shape:
            return value
        rows = torch.arange(shape[0], device=value.device)[:, None]
        moved = value[rows, order.to(value.device)] if bool(first.any()) else value
        missing = -shape[1] % multiple
        return torch.cat([moved, moved.new_zeros(shape[0], missing, *moved.shape[2:])], 1)

    moved = {name: move(value) for name, value in inputs.items()}
    return Prompts(move(tokens), move(mask), move(position_ids), moved)


def _check_shape(name: str, tensor: object, tokens: Tensor) -> Tensor:
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if not isinstance(tensor, Tensor) or tokens.ndim < 2 or shape != tuple(tokens.shape[:2]):
        form = MASK_FORM if name == "attention_mask" else "give [batch, sequence] as the tokens have it"
        raise FlexError(f"{name} is {shape}, and the tokens are {tuple(tokens.shape)}; {form}")
    return tensor


def check_mask(attention_mask: Tensor, tokens: Tensor) -> Tensor:
    """A mask as integers.

    Raises:
        FlexError: it does not have the tokens' shape, other values than 0 and 1, or text with holes.
    """
    mask = _check_shape("attention_mask", attention_mask, tokens)
    if not bool(((mask == 0) | (mask == 1)).all()):
        wrong = float(mask[(mask != 0) & (mask != 1)].flatten()[0])
        raise FlexError(f"attention_mask has the value {wrong:g}; {MASK_FORM}")
    mask = mask.long()
    starts = mask.diff(dim=1, prepend=mask.new_zeros(len(mask), 1)).eq(1).sum(1)
    for row in (starts != 1).nonzero().flatten().tolist():
        what = (
            "has no text" if starts[row] == 0 else f"has {int(starts[row])} texts with padding between them"
        )
        raise FlexError(f"row {row} of attention_mask {what}; padding can be before and after one text")
    return mask


def guess_dims(tensor: Tensor, mask: Tensor) -> Dims:
    """The dims of a plain module's tensor, whose first two are sequences and positions by their sizes.

    A tensor that may have them elsewhere, such as `[batch, head, pos, size]`, has unknown dims.
    """
    is_text = tensor.ndim > 2 and tensor.shape[:2] == mask.shape
    return ("b", "s") if is_text and tensor.shape[2:-1].count(mask.shape[1]) == 0 else ()


def clear_padding(tensor: Tensor, mask: Tensor, dims: Dims) -> Tensor:
    """A tensor with zeros at the positions where a mask `[batch, pos]` is 0.

    Args:
        tensor: the tensor.
        mask: the mask.
        dims: `b` and `s` name the dims of sequences and positions; without both nothing is changed.
    """
    if "b" not in dims or "s" not in dims:
        return tensor
    batch, position = dims.index("b"), dims.index("s")
    if (tensor.shape[batch], tensor.shape[position]) != tuple(mask.shape):
        return tensor
    padding = (mask if batch < position else mask.T).to(tensor.device) == 0
    shape = [n if dim in (batch, position) else 1 for dim, n in enumerate(tensor.shape)]
    return tensor.masked_fill(padding.reshape(shape), 0)
