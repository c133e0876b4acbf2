"""How captures travel from the ranks of a pipeline stage to the rank that receives them.

Every way implements `Transport`. `TRANSPORTS` lists them, and `open_transports` chooses:

- `SharedMemoryTransport`: ranks of a node write their shards to their places in shared memory, and nothing
  but the flags of the step's end is sent. Ranks of other nodes send their shards from host to host.
- `ProcessGroupTransport`: collectives over the groups of the mesh. It carries every capture.
"""

from megatron_flex.collectives.transport.interface import Arrival, Transport, TransportBytes, Watch
from megatron_flex.collectives.transport.process_group import ProcessGroupTransport
from megatron_flex.collectives.transport.shared_memory import SharedMemoryTransport
from megatron_flex.mesh import Mesh

# In the order in which a capture is offered to them; the last one carries everything.
TRANSPORTS: tuple[type[Transport], ...] = (SharedMemoryTransport, ProcessGroupTransport)


def open_transports(mesh: Mesh, watch: Watch | None, setup: bool, name: str) -> tuple[Transport, ...]:
    """The transports of this stage; a capture goes with the first that accepts it.

    Collective within the stage if `setup`.

    Args:
        mesh: the axes of the run.
        watch: called now and then while this rank waits for another one; it may raise.
        setup: whether the ranks connect now; without, only the last transport, which needs no connection.
        name: the session's, the same on all ranks and different from that of every earlier one.
    """
    opened = (transport.open(mesh, watch, name) for transport in (TRANSPORTS if setup else TRANSPORTS[-1:]))
    return tuple(t for t in opened if t is not None)


__all__ = ["TRANSPORTS", "Arrival", "Transport", "TransportBytes", "open_transports"]
