"""Which tokens and samples a dump keeps, by the settings in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_flex.dump.selection import Tokens, tokens_from_json
from megatron_flex.errors import DumpError


@dataclass(frozen=True, slots=True)
class Selection:
    """What is kept.

    Attributes:
        tokens: the positions.
        samples: the samples.
        mean: whether the mean over tokens was taken, so that there are none.
    """

    tokens: Tokens = None
    samples: frozenset[int] | slice | None = None
    mean: bool = False

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Selection:
        """That of the settings of a dump.

        Raises:
            DumpError: they say what no settings say.
        """
        samples = settings.get("samples")
        try:
            chosen: frozenset[int] | slice | None = None
            if isinstance(samples, dict):
                chosen = slice(*(None if n is None else int(n) for n in samples["slice"]))
            elif samples is not None:
                chosen = frozenset(int(n) for n in samples)
            return Selection(
                tokens_from_json(settings.get("tokens")), chosen, settings.get("reduce") == "mean"
            )
        except (TypeError, ValueError, KeyError) as error:
            raise DumpError(f"a manifest's settings of tokens or samples are no dump's: {error!r}") from error

    def keeps(self, sample: int) -> bool:
        """Whether a sample is kept."""
        if isinstance(self.samples, slice):
            first, last, step = self.samples.start or 0, self.samples.stop, self.samples.step or 1
            return sample >= first and (last is None or sample < last) and (sample - first) % step == 0
        return self.samples is None or sample in self.samples
