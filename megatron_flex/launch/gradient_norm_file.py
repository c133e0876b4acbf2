"""The file of `--flex-gradient-norms`: each reported gradient norm beside that of the full gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_flex.collectives import run_or_raise_on_all
from megatron_flex.dump.json_form import load_json, stringify_nonfinite
from megatron_flex.errors import FlexError
from megatron_flex.model import FlexModel
from megatron_flex.runtime.gradient_norm import GradientNorms


class NormRecord(NamedTuple):
    """A line of the file.

    Attributes:
        iteration: the iteration of the training, from 0.
        reported: the norm that the training loop reports.
        full: the norm of the full gradients.
        finding: the two norms and what explains that they differ; empty if they agree.
        parameters: the parameters that are counted wrongly; empty if no cause explains the difference.
    """

    iteration: int
    reported: float
    full: float
    finding: str
    parameters: tuple[str, ...]


class NormFile:
    """Compares the norm of each step, and writes it down on the first rank. Every rank makes the same calls.

    Args:
        flex: the model with its hooks.
        path: the file, which is replaced.

    Raises:
        FlexError: on all ranks: the file cannot be written.
    """

    def __init__(self, flex: FlexModel, path: Path) -> None:
        session = flex.session
        self._writes = all(coord == 0 for coord in session.mesh.coords.values())
        self._path = path
        run_or_raise_on_all(session.mesh, self._begin)
        self._norms = GradientNorms(session.parameters.index)

    def _begin(self) -> None:
        if self._writes:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text("")
            except OSError as error:
                raise FlexError(f"--flex-gradient-norms {self._path}: {error.strerror or error}") from None

    def write(self, flex: FlexModel) -> None:
        """Compare the norm of the step that has ended. Collective over the mesh."""
        session = flex.session
        compared = self._norms.compare(session.mesh)
        if self._writes:
            records = [
                NormRecord(session.clock.iteration, norm.norm, norm.full, norm.finding, norm.names)
                for norm in compared
            ]
            with self._path.open("a", encoding="utf-8") as file:
                for record in records:
                    plain = stringify_nonfinite(record._asdict())
                    file.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._norms.stop()


def read_norms(path: Path) -> Iterator[NormRecord]:
    """The lines of a file.

    Args:
        path: the file; one that does not exist has none.
    """
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = load_json(line.encode())
            norms = {name: float(fields[name]) for name in ("reported", "full")}
            yield NormRecord(**fields | norms | {"parameters": tuple(fields["parameters"])})
