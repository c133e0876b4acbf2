"""What a long run leaves behind: nothing, once what was read is cleared."""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from typing import Any

import pytest
from torch import Tensor

from tests.support import ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

SETTLED = 100  # by then caches have what they need


FIELDS = (  # of struct mallinfo2
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2() returns; not what is resident, which also has what was freed."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)


def _in_use() -> int:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    heap = ask()
    return int(heap.uordblks + heap.hblkhd)


def _tensors() -> int:
    time.sleep(0.1)  # gloo's thread lets go of the last collective's tensor a moment after the wait for it
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def many(case: Case, forwards: int) -> dict[str, Any]:
    import megatron_flex as mf

    chunks = ranks.start(case)

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.last = inputs.mean(0)
        return inputs + 0.01 * save_ctx.last

    hooks = [
        mf.HookFunction("decoder.layers.*"),
        mf.HookFunction("decoder.layers.0.mlp.linear_fc1", editing_function=edit),
        mf.HookFunction("decoder.layers.1:mid", editing_function=edit, run="once"),
        mf.HookFunction("decoder.layers.1", hook_type="full_backward_pre", gradient_scale="loss"),
    ]
    found: dict[str, Any] = {"tensors": [], "bytes": [], "read": 0}
    with mf.attach(chunks, hooks) as flex:
        for number in range(forwards + 1):
            ranks.call(chunks).mean().backward()
            chunks[0].zero_grad(set_to_none=True)
            found["read"] += sum(len(r) for r in flex.output_dict.values())
            flex.output_dict.clear()
            if number % 100 == 0:
                gc.collect()  # when Python itself would do so depends on what else it has to hold
            if number in (SETTLED, forwards):
                found["tensors"].append(_tensors())
                found["bytes"].append(_in_use())
    return found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc tells how many bytes are in use")
@pytest.mark.slow
@pytest.mark.parametrize("forwards", [250, 1000])
def test_memory_is_flat_over_many_forwards(forwards: int) -> None:
    answers = run(2, many, Case("tp2 sp", tp=2, sp=True, layers=2), forwards, timeout=280)
    assert answers[0]["read"] == (2 + 1 + 1 + 1) * (forwards + 1)
    for answer in answers:
        assert answer["tensors"][0] == answer["tensors"][1]
        # one tensor of the stream kept from each forward would be 600 KiB of 150 forwards
        assert answer["bytes"][1] - answer["bytes"][0] < 1 << 19, answer["bytes"]
