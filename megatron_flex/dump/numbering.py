"""Which sample of the global batch is which: the same answer when a rank writes and when it is read back."""

from __future__ import annotations


def number_first_sample(
    order: str, microbatch: int, replica: int, replicas: int, microbatches: int, count: int
) -> int | None:
    """The number in the global batch of the first sample of a microbatch.

    Args:
        order: `interleaved`: microbatch by microbatch over all replicas; `blocks`: replica by replica.
        microbatch: its number on its data parallel replica.
        replica: that replica's coordinate.
        replicas: how many there are.
        microbatches: how many each has; 0 if that is not known.
        count: samples in a microbatch.

    Returns:
        None where it cannot be known.
    """
    if order == "interleaved":
        return (microbatch * replicas + replica) * count
    if microbatches or replicas == 1:
        return (replica * microbatches + microbatch) * count
    return None
