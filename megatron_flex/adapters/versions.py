"""Which versions of the frameworks the tests run on, and what is imported here."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass

from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.config import flex_config

Release = tuple[int, ...]


@dataclass(frozen=True)
class TestedRange:
    """The versions of one framework that tests run on.

    Attributes:
        distribution: its name on the package index.
        module: what it is imported as; `__version__` is read there.
        first: the lowest version.
        below: the lowest version that is too new.
    """

    distribution: str
    module: str
    first: str
    below: str


# By the package whose classes a model is made of. Of torch, transformers and accelerate only where layouts or
# parameters hang on what they do not promise to keep: FSDP, DTensors, parallel styles, offloaded weights.
TESTED_RANGES = {
    "megatron": TestedRange("megatron-core", "megatron.core", "0.12.3", "0.20"),
    "fairscale": TestedRange("fairscale", "fairscale", "0.4.13", "0.5"),
    "apex": TestedRange("apex", "apex", "0.1", "0.2"),
    "torch": TestedRange("torch", "torch", "2.13", "2.14"),
    "deepspeed": TestedRange("deepspeed", "deepspeed", "0.19", "0.20"),
    "transformers": TestedRange("transformers", "transformers", "5.23", "5.24"),
    "accelerate": TestedRange("accelerate", "accelerate", "1.15", "1.16"),
}


@dataclass(frozen=True)
class Version:
    """The version of a framework that is imported.

    Attributes:
        tested: the range.
        text: the version as it says it; empty if it says none, as a copy in somebody's own repository may.
    """

    tested: TestedRange
    text: str

    @property
    def inside(self) -> bool | None:
        """Whether it is in the tested range; None where no version is said.

        What a build adds to a release (`+cu130`, `.post1`) makes no difference.
        """
        found = parse_release(self.text)
        if not found:
            return None
        return parse_release(self.tested.first) <= found < parse_release(self.tested.below)

    @property
    def early(self) -> bool:
        """Whether it is a pre-release of the version that is too new, as repositories under work are."""
        numbers = re.sub(r"[^\d.].*", "", self.text)
        return parse_release(numbers) == parse_release(self.tested.below) and bool(
            re.match(r"\.?(a|b|rc|dev)\d*", self.text[len(numbers.rstrip(".")) :])
        )

    def __str__(self) -> str:
        tested = f"{self.tested.first} to below {self.tested.below}"
        if self.inside is None:
            return f"{self.tested.distribution} of no known version (tested: {tested})"
        word = "inside" if self.inside else "outside"
        return f"{self.tested.distribution} {self.text}, {word} the tested range {tested}"


def parse_release(text: str) -> Release:
    """The numbers of a release, without zeros at the end; empty if there are none."""
    found = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", text.strip())
    numbers = [int(n) for n in found[1].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def version_of(package: str) -> Version | None:
    """The version of a package; None if it is none of the frameworks, or not imported."""
    tested = TESTED_RANGES.get(package)
    module = sys.modules.get(tested.module) if tested else None
    if tested is None or module is None:
        return None
    return Version(tested, str(getattr(module, "__version__", "") or ""))


def check_versions(versions: tuple[Version, ...]) -> None:
    """Refuse what no test has run on. What says no version, as forks may, is taken as it is.

    A pre-release right behind the range is warned of: it may still be what was tested, or not any more.

    Raises:
        FlexError: one is outside the tested range, and nobody said to go on.
    """
    for version in versions:
        if version.inside is not False:
            continue
        tested = version.tested
        if not flex_config.untested and not version.early:
            raise FlexError(
                f"{version}: layouts there may differ from those known here, so that a shard could pass for "
                f"the whole; install {tested.distribution}>={tested.first},<{tested.below}, or set "
                "FLEX_UNTESTED=1 (megatron_flex.config.flex_config.untested = True) to go on, and call verify()"
            )
        warnings.warn(f"{version}; going on, call verify() to be sure", FlexWarning, stacklevel=2)
