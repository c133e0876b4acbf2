"""What a launched run reports: one line each on stderr, from the first rank, and all of it in a file.

Megatron's log has many lines for each iteration. What this package has to say about a run is a few lines
among them, so the first rank writes them to a file too, and names the file when the run ends.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from megatron_flex.adapters import training_argument
from megatron_flex.collectives import gather_numbers_to_first
from megatron_flex.dump.schema import ITERATION_NUMBERS, MEGATRON
from megatron_flex.errors import FlexWarning
from megatron_flex.launch.rank_errors import current_rank, print_notice
from megatron_flex.launch.settings_resolver import ResolvedSettings
from megatron_flex.mesh import Mesh
from megatron_flex.model import FlexModel
from megatron_flex.progress import format_bytes
from megatron_flex.runtime.dump_sink import DumpSink
from megatron_flex.wording import count_words

OWN_CHECK = (
    "Megatron's own check of losses and gradients stops the run before the ranks agree on the first value "
    "that is not finite: add --no-check-for-nan-in-loss-and-grad"
)


class RunReport:
    """The report of one run. Every rank makes one; only the first rank prints and writes.

    The file is created with the first line, and appended to where it exists: a run that continues another
    one adds to its report. A file that cannot be written is a line on stderr; training continues.

    Args:
        path: the file; None to print and write nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.expanduser()
        self._used = self._failed = False
        self._show: Callable[..., None] | None = None

    def write_line(self, line: str) -> None:
        """Print a line on the first rank, and write it."""
        if self.path is not None:
            print_notice(line)
            self.note(line)

    def note(self, text: str) -> None:
        """Write lines on the first rank, which are printed elsewhere."""
        if self.path is None or self._failed or current_rank() != 0:
            return
        head = (
            "" if self._used else f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {hide_secrets(sys.argv)}\n"
        )
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{head}{text.rstrip()}\n")
            self._used = True
        except OSError as error:
            self._failed = True
            print_notice(f"{self.path}: no report can be written: {error.strerror or error}")

    def note_error(self, error: BaseException) -> None:
        """Write an error, which is printed elsewhere, once the run has begun; before, it is the only line."""
        if self._used:
            self.note(f"error: {' '.join(str(error).split())}")

    def take_warnings(self) -> None:
        """Write the warnings of this package too, until `close`; they are shown as before."""
        if self.path is not None and self._show is None and current_rank() == 0:
            self._show, warnings.showwarning = warnings.showwarning, self._showwarning

    def _showwarning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, FlexWarning):
            self.note(f"warning: {message}")
        assert self._show is not None
        self._show(message, category, filename, lineno, file, line)

    def close(self) -> None:
        """Name the file, if anything was written to it; a second call does nothing."""
        if self._show is not None and warnings.showwarning == self._showwarning:
            warnings.showwarning = self._show
        self._show = None
        if self._used:
            self._used = False
            print_notice(f"these lines, and this package's warnings and errors, are in {self.path}")


SECRET_NAME = re.compile(r"token|key|password|passwd|passphrase|secret|credential|auth", re.IGNORECASE)
NOT_SECRET = re.compile(  # words of flags of Megatron: tokens of a model, keys of attention
    r"tokens|tokeni[sz]\w*|moe[-_]token|token[-_](id|type|drop|dispatch)|query[-_]key|key[-_]value|keys",
    re.IGNORECASE,
)
HIDDEN = "***"


def hide_secrets(words: Sequence[str]) -> str:
    """A command line with `***` in place of the values of flags whose names look like those of secrets."""
    out: list[str] = []
    hides = False
    for word in words:
        name, given, _ = word.partition("=")
        secret = looks_secret(name)
        if not hides or word.startswith("--"):
            out.append(f"{name}={HIDDEN}" if secret and given else word)
            hides = word.startswith("-") and secret and not given
        elif out[-1] != HIDDEN:
            out.append(HIDDEN)
    return " ".join(out)


def looks_secret(name: str) -> bool:
    """Whether the name of a flag or of a variable is that of a secret."""
    return SECRET_NAME.search(NOT_SECRET.sub("", name)) is not None


def describe_start(flex: FlexModel, resolved: ResolvedSettings, verified: int) -> str:
    """The hooks, dumps and statistics of a run, as one line: how many sites, and which folders.

    Args:
        flex: the model with its hooks.
        resolved: the resolved settings.
        verified: the number of steps in which the ranks are compared.
    """
    parts = [*_describe_edits(flex, resolved), *_describe_sinks(flex)]
    if verified:
        steps = "the first step" if verified == 1 else f"the first {verified} steps"
        parts.append(f"--flex-verify: the ranks' tensors are compared with their layouts in {steps}")
    sinks = flex.session.sinks
    if flex.session.adapter.name == MEGATRON and (sinks.dumps or sinks.statistics):
        parts.append(ITERATION_NUMBERS)
    return "; ".join(parts)


def _describe_edits(flex: FlexModel, resolved: ResolvedSettings) -> Iterator[str]:
    if resolved.edits:
        entries = [e for e in flex.session.registry.entries if e.hook in resolved.edits]
        sites = {name for entry in entries for name in entry.names}
        off = f", {len(resolved.waiting)} of them switched off" if resolved.waiting else ""
        yield f"{count_words(len(resolved.edits), 'edit')} at {count_words(len(sites), 'site')}{off}"


def _describe_sinks(flex: FlexModel) -> Iterator[str]:
    for sink in flex.session.sinks.dumps:
        what = _describe_selection(len(sink.chosen.sites), sink.chosen.parameters, sink.settings.gradients)
        yield f"dump of {what}{_describe_every(sink.settings.every)} to {sink.settings.path}"
    for measured in flex.session.sinks.statistics:
        selected, settings = measured.selection, measured.settings
        what = _describe_selection(len(selected.values), selected.parameters, bool(selected.gradients))
        yield f"statistics of {what}{_describe_every(settings.every)} in {settings.path}"
    for watch in flex.session.sinks.nonfinite:
        yield f"--flex-nonfinite {watch.settings.mode}: {watch.describe_extent()} are watched"
        if training_argument("check_for_nan_in_loss_and_grad"):
            yield OWN_CHECK


def _describe_selection(sites: int, parameters: Any, gradients: bool) -> str:
    parts = [count_words(sites, "site")] if sites else []
    if parameters is not None:
        parts.append(count_words(len(parameters.names), "parameter"))
    return " and ".join(parts) + (" with gradients" if gradients else "")


def _describe_every(every: int) -> str:
    return "" if every == 1 else f" in iterations that are multiples of {every}"


def describe_end(dumps: Sequence[DumpSink], mesh: Mesh) -> list[str]:
    """What was written of each dump, as one line on the first rank. Collective over the mesh.

    Args:
        dumps: dumps that are closed.
        mesh: the axes of the run.
    """
    out = []
    for dump in dumps:
        tally = dump.tally
        numbers = tally.written, tally.dropped, tally.failed, tally.nbytes, int(tally.waited * 1000)
        if not (ranks := gather_numbers_to_first(numbers, mesh)):
            continue
        written, dropped, failed, nbytes, waited = zip(*ranks, strict=True)
        out.append(
            f"dump to {dump.settings.path}: {count_words(min(written), 'iteration')} written, "
            f"{format_bytes(sum(nbytes))} by {count_words(len(ranks), 'rank')}; {max(dropped)} dropped, "
            f"{max(failed)} failed; the model waited {max(waited) / 1000:.1f} s for the disk"
        )
    return out
