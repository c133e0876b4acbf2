"""`megatron-flex rollout`: where a rollout and a training run part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_flex.cli.command_options import JsonOption
from megatron_flex.cli.json_output import print_json
from megatron_flex.cli.spinner import spinner
from megatron_flex.errors import FlexError
from megatron_flex.ranges import parse_numbers
from megatron_flex.rollout import compare_rollout


def rollout(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="ROLLOUT",
            help="JSON lines (.jsonl) or Parquet with the columns request, position (from 0, prompt "
            "included), token and logprob (null if there is none).",
            show_default=False,
        ),
    ],
    dump: Annotated[
        Path,
        typer.Argument(
            metavar="DUMP",
            help="A dump of the training run in any layout, with embedding.word_embeddings:input, and "
            "output_layer or loss.",
            show_default=False,
        ),
    ],
    hidden: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="vLLM's hidden states: FOLDER/REQUEST.safetensors for each request.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Their layers, eagle_aux_hidden_state_layer_ids, such as 0,16,32 or 1:33.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", help="What the rollout divided the logits of its log-probabilities by."),
    ] = 1.0,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="fp32, bf16 or fp16: what the rollout computed in; by default as its hidden states, or as "
            "the training run.",
            show_default=False,
        ),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The iteration of the dump; by default the first.", show_default=False
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The number of logits that are not padding; by default all of the dump.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[int, typer.Option("--rows", metavar="N", help="The number of rows of the table.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare a rollout's log-probabilities with a training run's; name the first token that differs.

    Requests are found in the dump by their tokens. The first token whose log-probabilities differ by more
    than round-off is named, and with hidden states the first hook point that does. A cause is named if the
    evidence excludes others: other tokens, shifted positions or log-probabilities, a temperature, the
    weights of a layer, attention scores, rotary embedding, the choice of an expert, routing weights, a
    router in bf16.

    The exit status is 0 if all differences are round-off, 1 if not, and 2 if nothing can be compared.
    """
    with spinner("reading"):
        comparison = compare_rollout(
            table,
            dump,
            hidden=hidden,
            layers=_parse_layers(layers),
            temperature=temperature,
            dtype=dtype,
            iteration=iteration,
            vocabulary=vocabulary,
        )
    if as_json:
        print_json(comparison.to_json())
    else:
        comparison.to_document(most).print()
    if comparison.exit_status:
        raise typer.Exit(comparison.exit_status)


def _parse_layers(text: str | None) -> list[int]:
    """The numbers of layers, in the given order."""
    numbers = [] if text is None else parse_numbers(text, "--layers")
    if isinstance(numbers, list):
        return numbers
    if numbers.stop is None:
        raise FlexError(f"--layers {text}: give the end of the range too, such as 1:33")
    return list(range(numbers.start or 0, numbers.stop, numbers.step or 1))
