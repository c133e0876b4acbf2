"""Rollouts for tests: a separate run of the model in one process, with a fault, written as vLLM writes it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import gpt, packed, ranks
from tests.support.gpt import Case

SITES = [
    "embedding.word_embeddings:input",
    "embedding:output",
    "decoder.layers.*:output",
    "output_layer:output",
    "loss:output",
    "decoder.layers.*.mlp.router:logits",
    "decoder.layers.*.mlp.experts:output",
    "decoder.layers.*.mlp.experts:indices",
]
STALE, FLIPPED, TEMPERATURE = 2, 1, 0.7  # the layer of stale weights, that of the expert's choice
LAYERS = [0, 1, 2, 3, 4]  # vLLM's numbers
BEGIN = 5  # the token that a rollout has before all others, if its tokens are shifted
SEQUENCE = 64  # tokens
Change = Callable[[Any], object]


@contextmanager
def long_sequences() -> Iterator[None]:
    """Data and models of more tokens, so that there are near ties, and a difference may grow."""
    before, gpt.SEQUENCE = gpt.SEQUENCE, SEQUENCE
    try:
        yield
    finally:
        gpt.SEQUENCE = before


def make_state(case: Case) -> dict[str, Tensor]:
    """All weights, for runs in any layout."""
    return gpt.randomize(ranks.start(case.single())[0])


def write_dump(case: Case, state: dict[str, Tensor], path: str, sites: list[str], long: bool = True) -> None:
    """A step of a training run with a dump; what each rank does."""
    import megatron_flex as mf

    with long_sequences() if long else contextlib.nullcontext():
        chunks = ranks.start(case)
        gpt.load(chunks, state)
        with mf.attach(chunks, dumps=mf.Dump(path, sites, order="blocks")):
            gpt.step(case, chunks, ranks.mine(chunks))


def write_rollout(
    case: Case, state: dict[str, Tensor], folder: str, fault: str = "", layers: list[int] = LAYERS
) -> None:
    """Score the data of a case in one process, and write `rollout.jsonl` and `hidden/REQUEST.safetensors`.

    The hidden states are of torch's own hooks.
    """
    from safetensors.torch import save_file

    single = case.single()
    with long_sequences():
        (model,) = ranks.start(single)
        gpt.load([model], state)
        batches = gpt.data(single.microbatches)
    FAULTS.get(fault, lambda model: None)(model)
    tokens, nexts = (torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels"))
    every = torch.cat([tokens, nexts[:, -1:]], 1)
    if fault == "shifted tokens":
        every = torch.cat([torch.full_like(every[:, :1], BEGIN), every[:, :-1]], 1)
    logits, states = _run(model, every[:, :-1])
    if fault == "temperature":
        logits = logits / TEMPERATURE
    logprobs = score(every, logits)
    if fault == "shifted log-probabilities":
        logprobs = torch.cat([logprobs[:, 1:], logprobs[:, -1:]], 1)
    into = Path(folder)
    (into / "hidden").mkdir(parents=True)
    write_table(into / "rollout.jsonl", every, logprobs)
    for number, sequence in enumerate(every):
        stacked = torch.stack([states[layer][number] for layer in layers], 1)
        tensors = {"hidden_states": stacked.contiguous(), "token_ids": sequence[:-1].clone()}
        save_file(tensors, into / "hidden" / f"r{number}.safetensors")


def write_documents(case: Case, state: dict[str, Tensor], path: str) -> None:
    """Score each document of a packed case by itself, in one process without packing."""
    (model,) = ranks.start(replace(case.single(), packed="", padded=False))
    gpt.load([model], state)
    rows = [batch["tokens"].reshape(-1) for batch in gpt.data(case.microbatches)]
    documents = [row[start:stop] for row in rows for start, stop in pairwise(packed.ENDS)]
    scored = [score(document[None], _run(model, document[None])[0])[0] for document in documents]
    write_table(Path(path), documents, scored)


def write_table(path: Path, tokens: Iterable[Tensor], logprobs: Sequence[Tensor]) -> None:
    """Write a table of the tokens of sequences, and of the log-probabilities of all but the first."""
    with path.open("w") as table:
        for number, sequence in enumerate(tokens):
            for position, token in enumerate(sequence.tolist()):
                value = None if position == 0 else float(logprobs[number][position - 1])
                row = {"request": f"r{number}", "position": position, "token": token, "logprob": value}
                table.write(json.dumps(row) + "\n")


def score(tokens: Tensor, logits: Tensor) -> Tensor:
    """The log-probabilities of all tokens but the first: `[sample, token]`."""
    ahead = logits[:, : tokens.shape[1] - 1].float().log_softmax(-1)
    return ahead.gather(-1, tokens[:, 1:, None].long())[..., 0]


def _run(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits `[sample, token, vocabulary]`, and the residual stream before each layer and after the last."""
    states: list[Tensor] = []
    root: Any = model

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        states.append(tensor.detach().transpose(0, 1).clone())

    handles = [root.embedding.register_forward_hook(keep)]
    handles += [layer.register_forward_hook(keep) for layer in root.decoder.layers]
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    for handle in handles:
        handle.remove()
    return logits, states


# -- faults ------------------------------------------------------------------------------------------


def _make_stale(model: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    for parameter in model.decoder.layers[STALE].parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += (0.02 * noise).to(parameter.dtype)


def _scale_positions(model: Any) -> None:
    model.rotary_pos_emb.seq_len_interpolation_factor = 4


def _scale_frequencies(model: Any) -> None:
    """The low frequencies, as the scaling of Llama 3 does."""
    frequencies = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = torch.where(frequencies < 0.5, frequencies / 8, frequencies)


def _remove_query_norms(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm = nn.Identity()


def _round_routers(model: Any) -> None:
    def gate(router: Any, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs.bfloat16(), router.weight.bfloat16()).float()

    for layer in model.decoder.layers:
        layer.mlp.router.gating = partial(gate, layer.mlp.router)


def _flip_expert(model: Any) -> None:
    """Exchange the scores of the last chosen expert and the next one, of the token where they are closest."""
    router = model.decoder.layers[FLIPPED].mlp.router
    gating, chosen = router.gating, router.topk

    def flip(inputs: Tensor) -> Tensor:
        logits: Tensor = gating(inputs)
        rows = logits.view(-1, logits.shape[-1])
        values, experts = rows.topk(chosen + 1)
        row = int((values[:, chosen - 1] - values[:, chosen]).argmin())
        last, following = experts[row, chosen - 1], experts[row, chosen]
        rows[row, [last, following]] = rows[row, [following, last]]
        return logits

    router.gating = flip


FAULTS: dict[str, Change] = {
    "stale weights": _make_stale,
    "rope scaling": _scale_positions,
    "rope frequencies": _scale_frequencies,
    "no query norm": _remove_query_norms,
    "bf16 router": _round_routers,
    "expert choice": _flip_expert,
}
