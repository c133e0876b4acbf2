"""Results can be printed: each class that a public function returns has a text that a person can read."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatron_flex as mf
from megatron_flex.compare import compare
from megatron_flex.conversion.architecture_arguments import MegatronArguments
from megatron_flex.conversion.weights import LoadedWeights
from megatron_flex.dump.tools.dump_contents import list_dump_contents
from megatron_flex.dump.tools.dump_verification import verify_dump
from megatron_flex.dump.tools.value_summary import summarize_values
from megatron_flex.text_table import format_series, format_table, shorten_rows
from tests.support import dumps, measured
from tests.support.dumps import COLUMN, Given, random

MODULES = (
    "megatron_flex",
    "megatron_flex.alignment",
    "megatron_flex.compare",
    "megatron_flex.conversion",
    "megatron_flex.dump.tools.dump_contents",
    "megatron_flex.dump.tools.dump_verification",
    "megatron_flex.dump.tools.value_summary",
    "megatron_flex.estimate",
    "megatron_flex.figures",
    "megatron_flex.launch.estimate",
)
CLASSES = (
    mf.Alignment,
    mf.FlexModel,
    mf.OpenDump,
    mf.OpenStatistics,
    import_module("megatron_flex.compare").Comparison,
    import_module("megatron_flex.model.interp").Interp,
    import_module("megatron_flex.model.report").Report,
)
NO_RESULTS = {  # what is returned to be used, not to be read, and why a dataclass's own text is enough
    "HuggingFaceArchitecture": "internal table of load_hf",
    "GptNames": "a table of names",
    "HookSpec": "a parsed option",
    "Interp": "a namespace",
    "LayerVerdict": "a row of an Alignment",
    "LensNames": "a table of names",
    "LocatedShard": "a part of a file",
    "Manifest": "the file's fields",
    "PassEstimate": "a cell of a RunEstimate",
    "ProgressBar": "a scope",
    "Report": "a namespace",
    "Row": "a row of a Comparison",
    "RunFolder": "a folder's files",
    "Renamed": "a folder's name",
    "SettingsRecord": "the file's fields",
    "ShardEntry": "the file's fields",
    "ShuffledRows": "a dataset of torch",
    "Site": "short; lists of sites are tables",
    "SiteRecord": "the file's fields",
    "SiteVerdict": "a row of an Alignment",
    "SkipCount": "two fields",
    "StoredPart": "a file's fields",
    "StoredIteration": "a folder's files",
    "TensorStatistics": "a row of OpenStatistics",
    "TokenRows": "a dataset of torch",
    "Trace": "a scope",
    "TreeNode": "nested data; report.show() prints it",
}


def list_classes(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    for part in typing.get_args(annotation):
        yield from list_classes(part)


def list_functions() -> Iterator[Callable[..., Any]]:
    for name in MODULES:
        module = import_module(name)
        public = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        for one in (getattr(module, n) for n in public):
            if inspect.isfunction(one) and one.__module__.startswith("megatron_flex"):
                yield one
    for kind in CLASSES:
        for name, one in vars(kind).items():
            found = getattr(one, "fget", None) or getattr(one, "func", None) or one
            if inspect.isfunction(found) and (not name.startswith("_") or name == "__getitem__"):
                yield found


def list_results() -> set[type]:
    """The classes of this package that public functions and methods return."""
    out: set[type] = set()
    for function in list_functions():
        try:
            hints = typing.get_type_hints(function)
        except NameError:  # imported for type checkers only: resolved by name below
            hints = {}
            text = str(inspect.signature(function).return_annotation)
            if text == "RunEstimate":
                hints = {"return": import_module("megatron_flex.estimate").RunEstimate}
        out |= {c for c in list_classes(hints.get("return")) if c.__module__.startswith("megatron_flex")}
    return out


def is_printable(kind: type) -> bool:
    """Whether the class says itself how it is printed; a dataclass's generated text does not count."""
    for base in kind.__mro__[:-1]:
        made = dataclasses.is_dataclass(base) or issubclass(kind, (str, tuple))
        if "__str__" in vars(base) or ("__repr__" in vars(base) and not made):
            return True
    return issubclass(kind, (str, tuple, nn.Module, Exception))


RESULTS = sorted(list_results(), key=lambda kind: kind.__name__)


def test_the_results_are_found() -> None:
    names = {kind.__name__ for kind in RESULTS}
    wanted = {"Alignment", "Comparison", "DumpEstimate", "RunEstimate", "Verification", "StatisticsSeries"}
    assert wanted <= names
    assert {"Norms", "LoadedWeights", "MegatronArguments", "DumpContents", "ValueSummary"} <= names
    assert len(names) == len(RESULTS)


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_a_result_has_a_text(kind: type) -> None:
    assert is_printable(kind) or kind.__name__ in NO_RESULTS


def test_a_text_that_is_missed_would_be_noticed() -> None:
    @dataclasses.dataclass
    class Silent:
        figure: int

    class Mute:
        pass

    assert not is_printable(Silent)
    assert not is_printable(Mute)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("printed") / "dump"
    given = {f"decoder.layers.{n}:output": Given(random(2, 2, 4, 8, seed=n), COLUMN) for n in range(2)}
    dumps.write(path, given, mesh={"tp": 2}, iterations=[0, 10])
    return path


def check(result: object, *said: str) -> None:
    text = str(result)
    for part in said:
        assert part in text
    assert " object at 0x" not in text
    assert "array(" not in text
    assert max(map(len, text.splitlines())) < 200


def test_what_is_printed(dump: Path, tmp_path: Path) -> None:
    check(compare(dump, dump), "equal", "decoder.layers.0:output")
    check(verify_dump(dump), "all is as it was written", "complete iterations: 0, 10")
    check(list_dump_contents(dump), "run", "decoder.layers.1:output", "2x4x8", "float32", "0, 10")
    check(summarize_values(lambda: [torch.arange(10.0)]), "mean      4.5", "absmax    9")
    check(mf.figures.norms(dump), "Norms: ", "values: array [2, 2], float64", "iterations: 0, 10")
    measured.write(tmp_path / "stats", range(60))
    series = mf.open_statistics(tmp_path / "stats")[measured.SITES[0]]
    check(series, series.site, "rms", "... 40 more")
    check(
        LoadedWeights(("a",), 2048, ("b",), ()), "1 parameter loaded on this rank, 2.00 KiB read", "unused: b"
    )
    check(MegatronArguments({"num_layers": 2}, {"vocab_size": 8}), "TransformerConfig: num_layers = 2")


def test_sites_are_a_table() -> None:
    flex = mf.FlexModel(nn.Sequential(nn.Linear(2, 2)))
    check(flex.sites(), "site ", "0:output", "sites")
    check(flex.sites("0:output"), "1 site")
    flex.restore()


def test_tables() -> None:
    rows = [("a", "1"), ("long", "1000")]
    assert list(format_table(rows, ("name", ">n"))) == ["name     n", "a        1", "long  1000"]
    assert list(format_table(rows)) == ["a     1", "long  1000"]
    assert list(format_table([], ("a", "b"))) == ["a  b"]
    many = [(str(n), "x") for n in range(1000)]
    assert shorten_rows(many, 4, 2) == [many[0], many[1], ["... 996 more", ""], many[-2], many[-1]]
    assert shorten_rows(rows, 4, 2) == rows
    assert format_series(range(0, 100, 10)) == "0 … 90 (10, every 10)"
