"""Layouts of the tensors between parallel modules, followed from one to the next.

While a place is hooked of which the layout is not known, `Trace` marks every tensor that torch functions make
in a call of the model: `rules` tell the mark of a result by those of the operands. The `LayoutPropagator` keeps what
was found.
"""

from megatron_flex.adapters.propagation.layout_propagation import PropagatedTap, PropagatedParameter, LayoutPropagator

__all__ = ["PropagatedTap", "PropagatedParameter", "LayoutPropagator"]
