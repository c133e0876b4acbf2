"""Reads without a collective: ranks of a node write their parts of a tensor to their place in shared memory.

`open_shared_memory` sets it up for the ranks whose reads go to one leader; a `SharedMemoryTransport` is what each of them then writes to.
Sockets carry the little that ranks must tell each other, at the end of a step; no tensor goes through them.
"""

from megatron_flex.collectives.shared.board import SharedMemoryTransport
from megatron_flex.collectives.shared.joining import open_shared_memory

__all__ = ["SharedMemoryTransport", "open_shared_memory"]
