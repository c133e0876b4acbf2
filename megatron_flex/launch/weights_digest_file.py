"""The file of `--flex-weights-digest`: the digest of every full parameter of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_flex.collectives import run_or_raise_on_all
from megatron_flex.conversion.weights import MegatronWeights
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.weights import digest_run

FLAG, FLAG_AT = "--flex-weights-digest", "--flex-weights-digest-at"


class DigestFile:
    """Digests the parameters once, and writes the file on the first rank. Every rank makes the same calls.

    Args:
        chunks: the model, or its virtual pipeline chunks.
        mesh: the axes of the run.
        path: the file, which is replaced.
        at: the iteration before whose step the parameters are digested; None for the end of the training.

    Raises:
        FlexError: on all ranks: the file cannot be written, or the layout of a parameter is not known.
    """

    def __init__(self, chunks: Any, mesh: Mesh, path: Path, at: int | None) -> None:
        self._chunks, self._mesh, self._path, self._at = chunks, mesh, path, at
        self._is_written, self._steps = False, 0
        run_or_raise_on_all(mesh, self._check_folder)
        MegatronWeights(chunks)  # raises where a layout is not known

    def _check_folder(self) -> None:
        if any(axis.coord for axis in self._mesh):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise FlexError(f"{FLAG} {self._path}: {error.strerror or error}") from None

    def step_begins(self, iteration: int | None) -> None:
        """Write the file if it is due before this step.

        Args:
            iteration: its number from 0; None if the loop does not count: then steps are counted here.
        """
        number = self._steps if iteration is None else iteration
        self._steps = number + 1
        if self._at == number:
            self._write(f"a run before iteration {number}")

    def training_ends(self) -> None:
        """Write the file if it is due at the end; a file that exists is replaced. Collective over the job."""
        if self._at is None:
            self._write(f"a run after {self._steps} iterations")

    def close(self) -> None:
        """Write the file if no end was announced. Collective over the job.

        Raises:
            FlexError: on all ranks: the training ended before the iteration.
        """
        if self._is_written:
            return
        if self._at is not None:
            raise FlexError(
                f"{FLAG_AT} {self._at}: the training ended after {self._steps} iterations; "
                f"{self._path} is empty"
            )
        self.training_ends()

    def _write(self, source: str) -> None:
        digest = digest_run(self._chunks, source)
        run_or_raise_on_all(self._mesh, lambda: None if digest is None else digest.write(self._path))
        self._is_written = True
