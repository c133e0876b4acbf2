"""The face: `FlexModel` wraps a model, `attach` does so in passing; a file for each of its sides."""

from megatron_flex.model.flex_model import FlexModel, attach

__all__ = ["FlexModel", "attach"]
