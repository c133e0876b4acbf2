"""Memory for what is read: used again, and advised to be of huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from megatron_flex.dump import host_memory
from megatron_flex.dump.host_memory import ReusedMemory, allocate_on_host


def test_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ReusedMemory()
    first = memory.take([4, 8], torch.float32)
    second = memory.take([3], torch.bfloat16)
    assert (first.shape, first.dtype, second.shape, second.dtype) == (
        (4, 8),
        torch.float32,
        (3,),
        torch.bfloat16,
    )
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    memory.release(first)
    third = memory.take([2, 8], torch.float64)
    assert (third.shape, third.dtype, third.data_ptr()) == ((2, 8), torch.float64, place)
    memory.release(third[:, :1], torch.zeros(4))
    assert memory.take([2], torch.int8).data_ptr() == place
    assert memory.take([2], torch.int8).data_ptr() != place, "a tensor from elsewhere is not used"
    memory.release(third)
    assert memory.take([1000], torch.int64).numel() == 1000, "larger than what was released"


def read_mapping_flags(address: int) -> list[str] | None:
    """The kernel's flags of the mapping around ``address``; None where /proc does not list them."""
    found = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16) <= address < int(match[2], 16)
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    return None


# Page faults are not counted: whether a huge page is free depends on what else runs on the machine. The
# kernel notes the advice as the flag hg of the mapping. Without such a note nothing can be tested here;
# the next test, which runs everywhere, checks the call itself.
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or read_mapping_flags(id(None)) is None,
    reason="this system has no huge pages that a program can advise, or does not list the flags of mappings",
)
def test_the_kernel_notes_the_advice_for_a_large_result() -> None:
    large = allocate_on_host([64, 1024, 256], torch.float32)
    plain = torch.empty([64, 1024, 256])
    flags = {
        name: "hg" in (read_mapping_flags(tensor.data_ptr() + tensor.nbytes // 2) or [])
        for name, tensor in [("large", large), ("plain", plain)]
    }
    assert flags == {"large": True, "plain": False}


def test_full_pages_of_large_results_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(host_memory, "HUGE_PAGES", 14)
    monkeypatch.setattr(host_memory, "_load_madvise", lambda: lambda *args: advised.append(args))
    small = allocate_on_host([host_memory.MIN_ADVISED_BYTES // 4 - 1], torch.float32)
    assert (small.numel() * 4 < host_memory.MIN_ADVISED_BYTES, advised) == (True, [])
    large = allocate_on_host([host_memory.MIN_ADVISED_BYTES // 2 + 3], torch.bfloat16)
    ((start, length, advice),) = advised
    end = large.data_ptr() + large.numel() * 2
    assert (start % mmap.PAGESIZE, length % mmap.PAGESIZE, advice) == (0, 0, 14)
    assert large.data_ptr() <= start < large.data_ptr() + mmap.PAGESIZE
    assert end - mmap.PAGESIZE < start + length <= end
    monkeypatch.setattr(host_memory, "_load_madvise", lambda: None)  # a C library without it
    assert allocate_on_host([host_memory.MIN_ADVISED_BYTES], torch.uint8).is_contiguous()
    assert len(advised) == 1
