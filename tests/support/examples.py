"""The examples in docstrings, run as doctest runs them, on one rank with a real model of Megatron.

An example begins with the names that docs/api/hooks.md lists, in a folder of its own that holds what
`record` wrote. What it prints is compared. The model gets its weights back after each example.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import gpt, hugging_face, rollouts
from tests.support.gpt import Case

with contextlib.suppress(ImportError):  # before a rank is compared with itself: it adds a finder of imports
    import transformers  # noqa: F401

ONE = Case("one process")  # of Megatron's groups, which the model of the examples has too
PACKAGE = Path(__file__).parents[2] / "megatron_flex"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SECTION = re.compile(r"^Examples:\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)


class Example(NamedTuple):
    """The example of one docstring."""

    name: str
    text: str


def section(docstring: str) -> str:
    """The part of a docstring that has its examples; empty if it has none."""
    return "".join(SECTION.findall(docstring + "\n"))


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the package, with the full name of what it describes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        yield from _docstrings_in(ast.parse(path.read_text(encoding="utf-8")), module)


def _docstrings_in(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[tuple[str, str]]:
    if text := ast.get_docstring(node):
        yield name, text
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            yield from _docstrings_in(inner, f"{name}.{inner.name}")


def collect() -> list[Example]:
    """The examples of the package."""
    return [Example(name, found) for name, text in docstrings() if (found := section(text))]


def record(folder: Path, hf_model: Any, chunks: list[Any]) -> None:
    """Write what examples open, as docs/api/hooks.md lists it."""
    import megatron_flex as mf

    hooks = [mf.HookFunction("decoder.layers.2:output", editing_function=mf.edits.scale(1.5))]
    for name, edits in (("run", []), ("changed", hooks)):
        dump = mf.Dump(
            folder / "dumps" / name,
            ["**:output", "**:probs", "decoder.layers.*:input"],
            parameters=["decoder.final_layernorm.*", "output_layer.*", "decoder.layers.0.**"],
        )
        measured = mf.Statistics(folder / "stats" / name, "decoder.layers.*", gradients=True)
        with mf.attach(chunks, edits, dumps=dump, statistics=measured):
            for _ in range(2):
                gpt.step(ONE, chunks, 0)
    ids = "embedding.word_embeddings:input"
    with mf.attach(chunks, dumps=mf.Dump(folder / "dumps" / "tokens", [ids, "output_layer"])):
        gpt.step(ONE, chunks, 0)
    with mf.open_dump(folder / "dumps" / "tokens") as tokens:
        scored = tokens[ids][0].torch(), tokens["output_layer"][0].torch()
    rollouts.write_table(folder / "dumps" / "rollout.jsonl", scored[0], rollouts.score(*scored))
    dump = mf.Dump(folder / "dumps" / "hf", "**:*")
    with mf.attach(hf_model, dumps=dump) as flex, flex.step(), torch.no_grad():
        hf_model(gpt.data(1)[0]["tokens"], use_cache=False)
    mf.to_hf(chunks, folder / "llama", config=hf_model.config)


@contextlib.contextmanager
def _folder_with(recorded: Path) -> Iterator[None]:
    """Make a folder for one example the working directory; it has links to what `record` wrote."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for kind in ("dumps", "stats"):
            os.mkdir(kind)
            for each in (recorded / kind).iterdir():
                os.symlink(each, f"{kind}/{each.name}")
        os.symlink(recorded / "llama", "llama")
        yield


def run(examples: list[Example]) -> list[str]:
    """Run examples on this rank, in order.

    Args:
        examples: the examples.

    Returns:
        A report for each example that failed.
    """
    import megatron_flex as mf

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.FlexWarning)
        hf_model, chunks = _models()
        record(Path(folder), hf_model, chunks)
        names = {
            **_public_names(),
            "chunks": chunks,
            "hf_model": hf_model,
            "tokens": gpt.data(1)[0]["tokens"],
            "train_step": _train_step,
        }
        kept = [(p, p.detach().clone()) for p in chunks[0].parameters()]
        failures = []
        for example in examples:
            with _folder_with(Path(folder)):
                failures += _run_one(example, dict(names))
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
                    parameter.grad = None
    return failures


def run_without_groups(examples: list[Example]) -> list[str]:
    """Run examples that need a process without process groups, in this one; the result is that of `run`."""
    failures = []
    for example in examples:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            failures += _run_one(example, _public_names())
    return failures


def _public_names() -> dict[str, Any]:
    import megatron_flex as mf

    return {**{n: getattr(mf, n) for n in mf.__all__}, "mf": mf, "torch": torch}


def _models() -> tuple[Any, list[Any]]:
    from megatron_flex.conversion import config_from_hf, load_hf

    hf_model = hugging_face.make_model("llama")
    chunks = hugging_face.build(ONE, config_from_hf(hf_model))
    load_hf(chunks, hf_model)
    return hf_model, chunks


def _train_step(chunks: list[Any]) -> None:
    gpt.step(ONE, chunks, 0)


def _run_one(example: Example, names: dict[str, Any]) -> list[str]:
    from megatron_flex import FlexModel

    if re.search(r"\bflex\b", example.text):
        names["flex"] = FlexModel(names["chunks"])
    torch.manual_seed(1)
    test = doctest.DocTestParser().get_doctest(
        textwrap.dedent(example.text), names, example.name, example.name, 0
    )
    out = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    try:
        runner.run(test, out=out.write, clear_globs=False)
    finally:
        for value in names.values():
            if isinstance(value, FlexModel):
                value.session.close(failed=True)
    if not test.examples:
        return [f"{example.name}: no line of the example begins with >>>"]
    return [out.getvalue()] if runner.failures else []


def run_on_rank(case: Case, examples: list[Example]) -> list[str]:
    """`run`, on a rank of a pool."""
    return run(examples)
