"""The models of Megatron inside the module that attach is given: that module itself, or those that it holds.

A value head's wrapper holds a GPTModel; LLaVA and Mimo hold vision towers, projectors and a language model.
Each such model is a part, with its own configuration. Sites and parameters have the paths that they have in
the module that holds all parts, as on one device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from megatron_flex.adapters.adapter_base import ParameterSite
from megatron_flex.adapters.megatron_core.module_classes import (
    LANGUAGE_CLASSES,
    PART_CLASSES,
    global_modules,
    is_megatron,
    is_megatron_class,
)
from megatron_flex.adapters.module_walk import find_once, walk_modules
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

SiteOrParameter = TypeVar("SiteOrParameter", Site, ParameterSite)

# The positions of a part's sites in the order of the model, of which each part has so many.
EMBEDDING, ENCODER_LAYER, ENCODER_END, LAYER, END, POSITIONS = 0, 1, 2, 3, 4, 8
STACK_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)[.:]")


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A model of Megatron inside the root module of a chunk.

    Attributes:
        path: its path in the root; empty if it is the root.
        module: the model.
        number: its number among the root's parts, in the order of the modules.
    """

    path: str
    module: Any
    number: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the names of its sites and parameters."""
        return f"{self.path}." if self.path else ""

    @property
    def is_language_model(self) -> bool:
        """Whether it is a language model, which pipeline stages can divide."""
        return is_megatron(self.module, *LANGUAGE_CLASSES)

    def named(self, sites: list[SiteOrParameter]) -> list[SiteOrParameter]:
        """Its sites or parameters, as the root has them."""
        if not self.path and not hasattr(self.module, "encoder_config"):
            return sites  # a model of one stack alone: the order of its sites follows from their names
        return [self._named(site) for site in sites]

    def _named(self, site: SiteOrParameter) -> SiteOrParameter:
        named = replace(site, name=f"{self.prefix}{site.name}", order=self.order(site.name))
        if isinstance(named, ParameterSite) and named.copy_of:
            named = replace(named, copy_of=f"{self.prefix}{named.copy_of}")
        return named

    def order(self, name: str) -> tuple[int, int]:
        """The position of a site or parameter in the order of the model, the same on all pipeline stages."""
        first = self.number * POSITIONS
        if not self.is_language_model:  # it is on one stage, whose order counts
            return first, 0
        layer = STACK_LAYER.match(name)
        if layer is not None:
            return first + (ENCODER_LAYER if layer[1] == "encoder" else LAYER), int(layer[2])
        if name.startswith("embedding"):
            return first + EMBEDDING, 0
        return first + (ENCODER_END if name.startswith("encoder") else END), 0


def parts_of(root: nn.Module) -> list[ModelPart]:
    """The parts of a chunk, in the order of its modules; parts inside of parts are not listed."""
    return find_once(_find_parts, root)


def _find_parts(root: nn.Module) -> list[ModelPart]:
    if is_megatron(root, *PART_CLASSES):
        return [ModelPart("", root)]
    if not walk_modules(root).of_classes(_is_part_class):
        return []
    parts: list[ModelPart] = []
    for path, module in global_modules(root):
        inside = any(path.startswith(part.prefix) for part in parts)
        if not inside and is_megatron(module, *PART_CLASSES):
            parts.append(ModelPart(path, module, len(parts)))
    return parts


def _is_part_class(kind: type) -> bool:
    return is_megatron_class(kind, *PART_CLASSES)


def main_part(root: nn.Module) -> ModelPart:
    """The part whose configuration Megatron's schedules use: the first language model, or the first part."""
    parts = parts_of(root)
    return next((part for part in parts if part.is_language_model), parts[0])


def config_of(root: Any) -> Any:
    """The configuration of a chunk: the root's own, as Megatron's schedules read it, or its main part's."""
    config = getattr(root, "config", None)
    return config if is_megatron(config, "ModelParallelConfig") else main_part(root).module.config


def refuse_other_groups(parts: list[ModelPart], mesh: Mesh) -> None:
    """Refuse parts that divide their tensors over other tensor parallel ranks than the mesh.

    Raises:
        FlexError: there is one.
    """
    for part in parts:
        size = getattr(part.module.config, "tensor_model_parallel_size", mesh["tp"].size)
        if size != mesh["tp"].size:
            raise FlexError(
                f"{part.path or 'the model'}, a {type(part.module).__name__}, has "
                f"tensor_model_parallel_size={size} and the rest of the model {mesh['tp'].size}; hooks need "
                "one tensor parallel size for all parts: attach to that part by itself"
            )
