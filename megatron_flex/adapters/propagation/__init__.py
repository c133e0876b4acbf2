"""Layouts of the tensors between parallel modules, propagated from one to the next.

While a hook point of unknown layout has a hook, `Trace` marks every tensor that torch functions create in a
call of the model: rules infer the mark of a result from those of the operands. The `LayoutPropagator` caches
the result.
"""

from megatron_flex.adapters.propagation.layout_propagation import (
    LayoutPropagator,
    PropagatedParameter,
)

__all__ = ["LayoutPropagator", "PropagatedParameter"]
