"""megatron-core: mesh from its groups, sites and layouts of its dense models, its schedule.

Modules are identified by their class names and their role in the parent, never by a size.
"""

from __future__ import annotations

from megatron_flex.adapters.megatron_core.adapter import MegatronAdapter, make_megatron_adapter

__all__ = ["MegatronAdapter", "make_megatron_adapter"]
