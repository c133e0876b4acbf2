"""The table of a rollout: the token and its log-probability at each position of each request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import FlexError, format_value

COLUMNS = ("request", "position", "token", "logprob")
MAX_LOGPROB = 1e-5  # of a probability that is rounded to slightly more than 1


class Request(NamedTuple):
    """The tokens of a request, in the order of their positions.

    Attributes:
        name: as in the table.
        positions: of the tokens in the sequence, prompt included: `[token]`.
        tokens: the token ids: `[token]`.
        logprobs: of each token after those before it: `[token]`; NaN where the table has none.
    """

    name: str
    positions: Tensor
    tokens: Tensor
    logprobs: Tensor


def read_table(path: str | PathLike[str]) -> list[Request]:
    """Read a table of JSON lines or Parquet with the columns request, position, token and logprob.

    Args:
        path: the file, which ends in .jsonl, .json or .parquet.

    Returns:
        The requests, in the order in which the table first names them.

    Raises:
        FlexError: another type of file; a column is missing; a position or token is not a whole number; a
            (request, position) is there twice; a log-probability is NaN, infinite or positive.
    """
    file = Path(path)
    readers = {".jsonl": _read_lines, ".json": _read_lines, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise FlexError(
            f"{file}: a rollout is a table of JSON lines (.jsonl) or Parquet (.parquet), not {file.suffix!r}"
        )
    if not file.is_file():
        raise FlexError(f"{file} is not a file; give the table of the rollout")
    requests: dict[str, dict[int, tuple[int, float]]] = {}
    for where, row in readers[file.suffix](file):
        request, position, token, logprob = _check_row(row, where)
        tokens = requests.setdefault(request, {})
        if position in tokens:
            raise FlexError(f"{where}: request {request!r} has position {position} twice; give it one token")
        tokens[position] = token, logprob
    if not requests:
        raise FlexError(f"{file} has no rows; a row has {', '.join(COLUMNS)}")
    return [_make_request(name, tokens) for name, tokens in requests.items()]


def _make_request(name: str, tokens: dict[int, tuple[int, float]]) -> Request:
    positions = sorted(tokens)
    ids, logprobs = zip(*(tokens[position] for position in positions), strict=True)
    return Request(
        name, torch.tensor(positions), torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float64)
    )


def _check_row(row: Any, where: str) -> tuple[str, int, int, float]:
    """The request, position, token and log-probability of a row."""
    missing = [c for c in COLUMNS if not isinstance(row, dict) or c not in row]
    if missing:
        raise FlexError(f"{where} has no {missing[0]!r}; a row of a rollout has {', '.join(COLUMNS)}")
    for name in ("position", "token"):
        if not isinstance(row[name], int) or isinstance(row[name], bool) or row[name] < 0:
            raise FlexError(f"{where}: {name} is {format_value(row[name])}, not a whole number from 0")
    logprob = row["logprob"]
    if logprob is None:  # the first token of a prompt has none
        return str(row["request"]), row["position"], row["token"], math.nan
    if isinstance(logprob, bool) or not isinstance(logprob, int | float):
        raise FlexError(f"{where}: logprob is {format_value(logprob)}, not a number")
    if not math.isfinite(logprob) or logprob > MAX_LOGPROB:
        raise FlexError(
            f"{where}: logprob is {logprob}; a log-probability is finite and at most 0 (natural logarithm), "
            "and null if there is none"
        )
    return str(row["request"]), row["position"], row["token"], float(logprob)


def _read_lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield f"{file}, line {number}", json.loads(line)
            except ValueError:
                raise FlexError(
                    f"{file}, line {number} is not JSON: {format_value(line.strip())}; a line is one row"
                ) from None


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise FlexError(
            f"{file}: reading Parquet needs pyarrow: pip install 'megatron-flex[parquet]', or give JSON lines"
        ) from None
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:  # pyarrow raises errors of its own and OSError for files that are damaged
        raise FlexError(f"{file} cannot be read as Parquet: {error}") from None
    with table:
        columns = [name for name in COLUMNS if name in table.schema_arrow.names]
        row = 0
        for batch in table.iter_batches(columns=columns):
            for values in batch.to_pylist():
                yield f"{file}, row {row}", values
                row += 1
