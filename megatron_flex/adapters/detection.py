"""What was found of a model, for a person to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_flex.adapters.base import Part
from megatron_flex.adapters.pipelining import opened
from megatron_flex.adapters.searching import search_frameworks
from megatron_flex.adapters.versions import Version

ASK_TOGETHER = "only all ranks together can tell: call detect(model, everywhere=True) on each"


@dataclass(frozen=True)
class Detection:
    """What `detect` found. Printed, it is a short text.

    Attributes:
        framework: the name of the one that built the model; `plain` if none did.
        why: what in the model shows it, in words.
        parts: what is around or in the model: who keeps its parameters, who calls it; None where only all
            ranks together can tell.
        mesh: the axes of the run, such as `tp=2 x pp=2`; None likewise.
        versions: of the frameworks in the model.
        others: the other adapters, and what each said.
    """

    framework: str
    why: str
    parts: tuple[Part, ...] | None
    mesh: str | None
    versions: tuple[Version, ...]
    others: tuple[Part, ...]

    def __str__(self) -> str:
        lines = [f"{self.framework}: {self.why}", f"  mesh: {self.mesh or ASK_TOGETHER}"]
        lines += [f"  with {part.name}: {part.why}" for part in self.parts or ()]
        lines += [f"  version: {version}" for version in self.versions]
        lines += [f"  not {part.name}: {part.why}" for part in self.others]
        return "\n".join(lines)


def detect(
    model: Any,
    *,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    process_group: Any = None,
    everywhere: bool = False,
) -> Detection:
    """Say what a model was built with, and why; nothing is changed.

    Args:
        model: the model or the list of its virtual pipeline chunks, bare or wrapped; or the schedule of
            torch.distributed.pipelining that runs it.
        tensor_parallel_size: what FlexModel would be given; likewise the next three.
        pipeline_parallel_size: likewise.
        data_parallel_size: likewise.
        process_group: likewise.
        everywhere: every rank calls this, as it makes FlexModels. Without it a single rank may call it, and
            mesh and parts are told only where they can be had without communication.

    Raises:
        FlexError: two frameworks claim the model; or, where the mesh is told, it cannot be hooked.
    """
    chunks = opened(model)
    axis_sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
    done = search_frameworks(chunks, axis_sizes, process_group)
    parts, mesh = None, None
    if everywhere or done.found.alone:
        adapter = done.found.make()
        parts, mesh = tuple(adapter.parts()), adapter.mesh.describe()
    return Detection(done.found.name, done.found.why, parts, mesh, done.versions, done.others)
