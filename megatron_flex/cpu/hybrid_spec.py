"""The spec that Megatron's scripts take with `--spec megatron_flex.cpu.hybrid_spec hybrid_stack_spec`.

Importing this imports megatron-core 0.19 or later; nothing else here does.
"""

from __future__ import annotations

from megatron_flex.cpu.hybrid_layers import local_hybrid_stack_spec

hybrid_stack_spec = local_hybrid_stack_spec()
