"""Editing functions that differ between ranks: other code is an error on all, other values are a warning."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import compat, gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")

CASES = [Case("tp2", tp=2, layers=2), Case("pp2", pp=2, layers=2), Case("dp2", dp=2, layers=2)]
PLACE = "decoder.layers.1.mlp"


def closing(value: Any) -> Callable[..., Any]:
    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs if value is None else inputs * 1.0

    return edit


def nested(scale: float) -> Any:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    return lambda module, inputs, save_ctx, modules: scaled(inputs)


def compiled(source: str, file: str = "edit.py", **names: Any) -> Any:
    scope: dict[str, Any] = dict(names)
    exec(compile(source, file, "exec"), scope)
    return scope["edit"]


def given(scale: float, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * scale


def keyword(module: Any, inputs: Tensor, save_ctx: Any, modules: Any, scale: float = 1.0) -> Tensor:
    return inputs * scale


class Scaled:
    def __init__(self, scale: float, rank: int = 0) -> None:
        self.scale, self.rank = scale, rank

    def __call__(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * self.scale

    def edit(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * self.scale


class Net(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        nn.init.constant_(self.linear.weight, weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs * self.linear.weight.detach().view(())


def declared(rank: int) -> Any:
    import megatron_flex as mf

    return mf.rank_dependent("value")(closing(rank))


def of_class(text: str) -> Any:
    source = f"class Edit:\n    def __call__(self, m, x, c, t):\n        return {text}\nedit = Edit()\n"
    return compiled(source)


def as_method(text: str) -> Any:
    source = f"class Edit:\n    def run(self, m, x, c, t):\n        return {text}\nedit = Edit().run\n"
    return compiled(source)


def as_module(text: str) -> Any:
    source = (
        f"class Edit(nn.Module):\n    def forward(self, m, x, c, t):\n        return {text}\nedit = Edit()\n"
    )
    return compiled(source, nn=nn)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


PLAIN = "def edit(m, x, c, t):\n    return x * {}\n"
# Of a rank's number, and of the model there.
SAME: dict[str, Callable[[int, Any], Any]] = {
    "lambda": lambda r, model: lambda m, x, c, t: x * 1.0,
    "exec, of files that differ": lambda r, model: compiled("\n" * r + PLAIN.format(2), f"/node{r}/edit.py"),
    "constants in a set": lambda r, model: compiled(PLAIN.format("(2 if 'a' in {'a', 'b', 'c'} else 1)")),
    "partial": lambda r, model: functools.partial(given, 1.5),
    "callable object": lambda r, model: Scaled(1.5, rank=r),
    "method": lambda r, model: Scaled(1.5, rank=r).edit,
    "module": lambda r, model: Net(1.5),
    "nested": lambda r, model: nested(1.5),
    "builtin": lambda r, model: functools.partial(max, key=is_tensor),
    "object": lambda r, model: closing(object()),
    "path": lambda r, model: closing((Path(f"/node{r}/vector"), f"/node{r}/vector")),
    "generators": lambda r, model: closing((torch.Generator().manual_seed(r), random.Random(r))),
    "declared": lambda r, model: declared(r),
    "part of the model": lambda r, model: closing(model),
    "parameter of the model": lambda r, model: closing(next(model.parameters())),
}
# Which variable differs, and its two values.
WARNED: dict[str, tuple[str, Any, str, str]] = {
    "number": ("closure variable 'value'", lambda r, model: closing(2.0 + r), "2.0", "3.0"),
    "list": ("closure variable 'value'", lambda r, model: closing([1, [r]]), "[1, [0]]", "[1, [1]]"),
    "nested": ("closure variable 'scale' of 'scaled'", lambda r, model: nested(2.0 + r), "2.0", "3.0"),
    "partial": ("argument 'scale'", lambda r, model: functools.partial(given, 2.0 + r), "2.0", "3.0"),
    "keyword": ("argument 'scale'", lambda r, model: functools.partial(keyword, scale=2.0 + r), "2.0", "3.0"),
    "attribute": ("attribute 'scale'", lambda r, model: Scaled(2.0 + r), "2.0", "3.0"),
    "method": ("attribute 'scale'", lambda r, model: Scaled(2.0 + r).edit, "2.0", "3.0"),
    "global": (
        "global 'S'",
        lambda r, model: compiled("def edit(m, x, c, t): return x * S", S=2.0 + r),
        "2.0",
        "3.0",
    ),
    "tensor": (
        "closure variable 'value'",
        lambda r, model: closing(torch.full((2, 3), 2.0 + r)),
        "tensor 2x3 float32 [2.0",
        "tensor 2x3 float32 [3.0",
    ),
    "shape": (
        "closure variable 'value'",
        lambda r, model: closing(torch.zeros(r + 1)),
        "tensor 1 f",
        "tensor 2 f",
    ),
    "module": ("closure variable 'value'", lambda r, model: closing(Net(2.0 + r)), "Net #", "Net #"),
    "weights": ("attribute 'linear'", lambda r, model: Net(2.0 + r), "Linear #", "Linear #"),
    "function": ("closure variable 'value'", lambda r, model: closing((print, len)[r]), "print", "len"),
}
WRONG: dict[str, tuple[str, Callable[[int, Any], Any]]] = {
    "exec": ("constants", lambda r, model: compiled(PLAIN.format(2 + r))),
    "other steps": ("bytecode", lambda r, model: compiled(f"def edit(m, x, c, t): return x {'+*'[r]} 2")),
    "names": ("names", lambda r, model: compiled(PLAIN.format(("len('12')", "int('12')")[r]))),
    "defaults": ("defaults", lambda r, model: compiled(f"def edit(m, x, c, t, k={r}): return x")),
    "lambda": ("constants", lambda r, model: compiled(f"edit = lambda m, x, c, t: x * {r}")),
    "nested": ("constants", lambda r, model: compiled(PLAIN.format(f"(lambda: {r})()"))),
    "callable object": ("constants", lambda r, model: of_class(f"x * {r}")),
    "method": ("constants", lambda r, model: as_method(f"x * {r}")),
    "module": ("constants", lambda r, model: as_module(f"x * {r}")),
    "partial": (
        "constants",
        lambda r, model: functools.partial(compiled(f"def edit(k, m, x, c, t): return x * {r}"), 1),
    ),
    "builtin": ("function", lambda r, model: functools.partial((max, min)[r], key=is_tensor)),
}


def attached(how: str, case: Case, chunks: list[Any], function: Any) -> tuple[Any, Any]:
    """A FlexModel with an editing function, and its session; a collected FlexModel has no hooks."""
    if how == "compat":
        from megatron_flex.compat import HookFunction

        flex = compat.wrap(case, chunks, {})
        flex.register_forward_hook(HookFunction(PLACE, editing_function=function))
        return flex, flex._flex.session
    import megatron_flex as mf

    native = mf.FlexModel(chunks, gather_data_parallel=False)
    native.register_forward_hook(mf.HookFunction(PLACE, editing_function=function, save=False))
    return native, native.session


def steps(case: Case, how: str) -> dict[str, Any]:
    """Of each function the error of a step, and the warnings of two."""
    from megatron_flex import FlexWarning, HookError

    chunks = ranks.start(case)
    rank = torch.distributed.get_rank()
    out: dict[str, Any] = {}
    makers = {f"same {n}": m for n, m in SAME.items()} | {f"warned {n}": w[1] for n, w in WARNED.items()}
    for name, make in (makers | {f"wrong {n}": w[1] for n, w in WRONG.items()}).items():
        error = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flex, session = attached(how, case, chunks, make(rank, chunks[0]))
            try:
                for _ in range(1 if name.startswith("same") else 2):
                    gpt.step(case, chunks, 0)
            except HookError as raised:
                error = str(raised)
            session.close(failed=True)
            del flex  # not before: its hooks go with it
        out[name] = error, [str(w.message) for w in caught if issubclass(w.category, FlexWarning)]
    return out


@pytest.mark.parametrize("how", ["native", "compat"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_functions_that_differ(case: Case, how: str) -> None:
    for rank, found in enumerate(run(2, steps, case, how)):
        for name in SAME:
            assert found[f"same {name}"] == ("", []), name
        for name, (variable, _, first, second) in WARNED.items():
            error, warned = found[f"warned {name}"]
            assert not error, name
            if rank:
                assert not warned, "one rank warns"
                continue
            (text,) = (w for w in warned if variable in w)
            assert_names(text, PLACE)
            before, _, after = text.partition("(on rank 0) and ")
            assert first in before, text
            assert second in after.partition("(on rank 1)")[0], text
            assert_names(text, "@mf.rank_dependent(")
        for name, (trait, _) in WRONG.items():
            error, warned = found[f"wrong {name}"]
            assert PLACE in error
            assert_names(error, trait)
            assert_names(error, "rank 0", "rank 1")
            assert_names(error, "@mf.rank_dependent")
            assert not warned


def strict(case: Case) -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    said = []
    flex = mf.attach(chunks, [mf.HookFunction(PLACE, editing_function=closing(torch.distributed.get_rank()))])
    with warnings.catch_warnings():
        warnings.simplefilter("error", mf.FlexWarning)
        try:
            gpt.step(case, chunks, 0)
        except mf.FlexWarning as warning:
            said.append(str(warning))
    gpt.step(case, chunks, 0)  # it was warned of
    flex.session.close(failed=True)
    return said


def test_where_warnings_are_errors_all_ranks_raise() -> None:
    for said in run(2, strict, CASES[0]):
        (text,) = said
        assert_names(text, "value")


def several(case: Case) -> list[str]:
    """Of four ranks: each has another value, and one has another function."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = torch.distributed.get_rank()
    said = []
    for function in (closing(rank), compiled(PLAIN.format(3 if rank == 2 else 1))):
        flex = mf.attach(chunks, [mf.HookFunction(PLACE, editing_function=function, save=False)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gpt.step(case, chunks, 0)
            except mf.HookError as error:
                said.append(str(error))
        said += [str(w.message) for w in caught if issubclass(w.category, mf.FlexWarning)]
        flex.session.close(failed=True)
    return said


def test_which_ranks_differ() -> None:
    for rank, said in enumerate(run(4, several, Case("tp2 dp2", tp=2, dp=2, layers=2))):
        assert len(said) == (1 if rank else 2)
        assert_names(said[-1], "None, 1", "ranks 0-1, 3", "None, 3", "rank 2")
        if not rank:
            assert all(f"{n} (on rank {n})" in said[0] for n in range(4))
