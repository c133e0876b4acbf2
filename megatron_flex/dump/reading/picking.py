"""Which tokens and samples a dump keeps, by the settings in its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_flex.dump.json_form import check_form
from megatron_flex.dump.selection import TokenSelection, tokens_from_json
from megatron_flex.errors import DumpError


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """What is kept.

    Attributes:
        tokens: the positions.
        samples: the samples.
        mean: whether the mean over tokens was taken, so that there are none.
        dtype: of means.
    """

    tokens: TokenSelection = None
    samples: frozenset[int] | slice | None = None
    mean: bool = False
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(settings: Mapping[str, Any]) -> SelectionSettings:
        """That of the settings of a dump.

        Raises:
            DumpError: they say what no settings say.
        """
        samples = settings.get("samples")
        try:
            chosen: frozenset[int] | slice | None = None
            if isinstance(samples, dict):
                chosen = _parse_slice(samples["slice"])
            elif samples is not None:
                chosen = frozenset(int(n) for n in samples)
            kept = getattr(torch, str(settings.get("dtype") or "float32"))
            if not isinstance(kept, torch.dtype):
                raise ValueError(f"dtype {kept!r}")
            token_setting = settings.get("tokens")
            if isinstance(token_setting, dict) and "slice" in token_setting:
                _parse_slice(token_setting["slice"])
            tokens = tokens_from_json(token_setting)
            return SelectionSettings(tokens, chosen, settings.get("reduce") == "mean", kept)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise DumpError(f"a manifest's settings of tokens or samples are no dump's: {error!r}") from error

    def keeps(self, sample: int) -> bool:
        """Whether a sample is kept."""
        if isinstance(self.samples, slice):
            first, last, step = self.samples.start or 0, self.samples.stop, self.samples.step or 1
            return sample >= first and (last is None or sample < last) and (sample - first) % step == 0
        return self.samples is None or sample in self.samples


def _parse_slice(values: Any) -> slice:
    """A slice whose ends are integers, and whose step counts upwards."""
    check_form(values, ["int|null"])
    start, stop, step = values
    range(1)[slice(start, stop, step)]
    return slice(start, stop, step)
