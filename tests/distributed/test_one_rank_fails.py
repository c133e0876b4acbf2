"""One rank fails before a collective that its peers are in already: nothing hangs, and all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

PAIR = Case("tp2", tp=2, layers=1)
SITE = "decoder.layers.0.mlp.linear_fc1"
RANK = 1  # that fails
SECONDS = 40  # that ranks have, fewer than a process group waits


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def more_dims(local: Tensor) -> Tensor:
    return local.unsqueeze(0)


def longer(local: Tensor) -> Tensor:
    return torch.cat([local, local], -1)


def fewer(local: Tensor) -> Tensor:
    return local[..., :-1]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"dims": more_dims, "longer": longer, "odd": fewer}


class OddShards:
    """What passes a module of this rank has another shape than its rule says, and the model does not notice.

    A hook of torch in front of the package's changes the output, and one behind them returns it to what the
    framework goes on with, which depends on what came back as it would if its own was odd.
    """

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        self.module, self.change, self.on = module, change, False
        self.plain: list[Tensor] = []
        module.register_forward_hook(self.before)

    def end(self) -> None:
        """Begin behind the hooks that are there by now."""
        self.module.register_forward_hook(self.behind)

    def before(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.on:
            return output
        self.plain.append(output[0])
        return self.change(output[0]), *output[1:]

    def behind(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.on:
            return output
        plain = self.plain.pop()
        return plain + (output[0] - self.change(plain)).sum() * 0.0, *output[1:]


def steps(case: Case, hook: dict[str, Any], count: int, change: str) -> dict[str, Any]:
    """Make steps, the last one with odd shards on a rank; what each raised, and how long it took."""
    import megatron_flex as mf
    from megatron_flex.config import flex_config

    flex_config.dry_run = False
    chunks = ranks.start(case)
    gpt.step(case, chunks, 0)
    odd = OddShards(chunks[0].get_submodule(SITE), CHANGES[change])
    flex = mf.FlexModel(chunks)
    flex.session.hooks.add(mf.HookFunction(**hook))
    odd.end()
    texts = []
    start = time.monotonic()
    for number in range(count):
        odd.on = number == count - 1 and dist.get_rank() == RANK
        try:
            gpt.step(case, chunks, 0)
            texts.append("")
        except mf.HookError as error:
            texts.append(str(error))
    seconds = time.monotonic() - start
    odd.on = False
    gpt.step(case, chunks, 0)
    flex.session.close()
    return {"texts": texts, "seconds": seconds}


def check(answers: list[dict[str, Any]], good: int, *values: object) -> None:
    """All ranks raised the same, in the last of their steps alone."""
    texts = answers[0]["texts"]
    assert all(a["texts"] == texts for a in answers), answers
    assert texts[:good] == [""] * good
    assert_names(texts[good], *values)
    assert all(a["seconds"] < SECONDS / 2 for a in answers)


@pytest.mark.parametrize("change", ["dims", "longer"])
@pytest.mark.parametrize("more", [{}, {"run": "once"}, {"on_error": "skip"}, {"hook_type": "tensor"}])
def test_a_shard_that_does_not_fit_at_first(change: str, more: dict[str, Any]) -> None:
    hook = {"module_name": SITE, "editing_function": doubled, **more}
    check(run(2, steps, PAIR, hook, 1, change, timeout=SECONDS), 0, SITE)


@pytest.mark.parametrize("more", [{}, {"run": "once"}, {"on_error": "skip"}])
def test_a_shard_that_does_not_fit_later(more: dict[str, Any]) -> None:
    hook = {"module_name": SITE, "editing_function": doubled, **more}
    check(run(2, steps, PAIR, hook, 3, "dims", timeout=SECONDS), 2, SITE, f"rank {RANK}", "(1, 16, 2, 48)")


def test_a_shard_that_does_not_fit_in_a_replay() -> None:
    case = replace(PAIR, name="tp2 recomputed", recompute=("full",))
    hook = {"module_name": SITE, "editing_function": doubled}
    check(run(2, steps, case, hook, 2, "dims", timeout=SECONDS), 1, SITE, f"rank {RANK}", "(1, 16, 2, 48)")


def read(case: Case, count: int) -> dict[str, Any]:
    from megatron_flex.config import flex_config

    for name, value in (("shared_bytes", 0), ("pending_bytes", 1)):  # sent at the end of each microbatch
        changes.setattr(flex_config, name, value)

    return steps(case, {"module_name": SITE}, count, "dims")


def test_a_shard_that_does_not_fit_and_is_sent_within_the_step() -> None:
    case = replace(PAIR, name="tp2, three microbatches", microbatches=3)
    check(run(2, read, case, 3, timeout=SECONDS), 2, SITE, "(1, 16, 2, 48)", f"rank {RANK}")
