"""What other people's code and files rest on, as lines of text: names, commands, flags, variables, schemas.

`tests/surface/` keeps the lines. A change of what is public changes a file there, where a reviewer sees it;
`python -m tests.support.surface` writes them anew.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import megatron_flex

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests" / "surface"
FROZEN_FORMS = ROOT / "tests" / "unit" / "dump_forms.json"
MODULES = (  # those that documents name or that other people's sources import
    "megatron_flex",
    "megatron_flex.adapters",
    "megatron_flex.compare",
    "megatron_flex.compat",
    "megatron_flex.compat.core",
    "megatron_flex.compat.distributed",
    "megatron_flex.compat.traverse",
    "megatron_flex.estimate",
    "megatron_flex.cpu",
    "megatron_flex.dump",
    "megatron_flex.dump.reader",
    "megatron_flex.edits",
    "megatron_flex.figures",
    "megatron_flex.launch",
    "megatron_flex.layout",
    "megatron_flex.lens",
    "megatron_flex.model",
    "megatron_flex.plot",
    "megatron_flex.points",
    "megatron_flex.statistics",
    "megatron_flex.view",
)


def names() -> Iterator[str]:
    """Each public name with its signature; of a class also what its instances have."""
    known: dict[int, str] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        for name in _public(module):
            value, full = getattr(module, name), f"{path}.{name}"
            first = known.setdefault(id(value), full) if callable(value) else full
            yield from _described(full, value) if first == full else [f"{full} = {first}"]


def _public(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
    return sorted(n for n in own if not n.startswith("_"))


def _described(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    yield f"class {name}{_signature(value)}"
    # Fields without a default are attributes of the class only where it has slots.
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    for member in sorted(n for n in {*dir(value), *fields} if not n.startswith("_")):
        found = inspect.getattr_static(value, member, None)
        owner = next((c for c in value.__mro__ if member in vars(c)), value)
        if not owner.__module__.startswith("megatron_flex"):
            continue
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        kind = _signature(found) if inspect.isroutine(found) else ""
        yield f"{name}.{member}{kind}"


def _signature(value: Callable[..., Any]) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def commands() -> Iterator[str]:
    """Each command of the command line with its arguments and options."""
    import typer.main

    from megatron_flex.cli.app import app

    def walk(command: Any, path: str) -> Iterator[str]:
        for parameter in sorted(command.params, key=lambda p: p.name):
            default = f"default {parameter.default!r}, {parameter.nargs} value(s)"
            words = [path, " ".join([*parameter.opts, *parameter.secondary_opts]), default]
            words += [word for word in ("required", "multiple", "is_flag") if getattr(parameter, word, False)]
            yield re.sub(r" at 0x[0-9a-f]+", "", " | ".join(words))
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            yield f"{path} {name}"
            yield from walk(inner, f"{path} {name}")

    yield from walk(typer.main.get_command(app), "megatron-flex")


def flags() -> Iterator[str]:
    """Each flag that launchers get, with its default."""
    parser = argparse.ArgumentParser(add_help=False)
    megatron_flex.add_flex_args(parser)
    for action in sorted(parser._actions, key=lambda a: a.option_strings):
        kind = type(action).__name__.strip("_")
        choices = "" if action.choices is None else f" | one of {', '.join(map(str, action.choices))}"
        yield f"{' '.join(action.option_strings)} | {kind} | default {action.default!r}{choices}"


def variables() -> Iterator[str]:
    """Each environment variable of ours that the package reads."""
    found = set()
    for info in pkgutil.walk_packages(megatron_flex.__path__, "megatron_flex."):
        path = ROOT / Path(*info.name.split("."))
        source = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if re.fullmatch(r"FLEX_[A-Z_]+", node.value) else set()
    yield from sorted(found)


def registered() -> Iterator[str]:
    """What is found by a string: entry points, frameworks, kinds of hooks, exports."""
    from megatron_flex.adapters import adapter_registry

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    yield from (f"entry point console_scripts: {name} = {to}" for name, to in project["scripts"].items())
    yield from sorted(f"extra: {name}" for name in project["optional-dependencies"])
    markers = settings["tool"]["pytest"]["ini_options"]["markers"]
    yield from sorted(f"marker: {m.split(':')[0]}" for m in markers)
    yield from (f"framework: {package}" for package, _ in adapter_registry.BUILT_IN)


def schema() -> Iterator[str]:
    """What is on disk: each field of each version of the format of dumps, and of statistics.

    Those of dumps are what readers hold files against; defaults are those of the classes that both make.
    """
    from megatron_flex.dump import checksums, json_form, part_format, schema
    from megatron_flex.dump.schema import Manifest
    from megatron_flex.dump.schema import SiteRecord as PlaceOfDump

    yield (
        f"dump: {schema.DUMP_FORMAT}, writes version {schema.DUMP_VERSION}, "
        f"reads {', '.join(map(str, schema.READABLE_VERSIONS))}"
    )
    yield f"dump: kinds {', '.join(_kinds_of_entries(schema))}"
    yield f"dump: dtypes {', '.join(sorted(part_format.NAMED_DTYPES))}"
    yield (
        f"dump: blocks of {checksums.CHECKSUM_BLOCK} bytes, "
        f"tensors at multiples of {part_format.TENSOR_ALIGNMENT}"
    )
    names = (
        part_format.format_run_folder(7),
        schema.MANIFEST_NAME,
        part_format.format_iteration_folder(7, 1),
        part_format.format_part_name(7, 0, 1),
    )
    yield f"dump: names such as {', '.join(names)}"
    for version, several in schema.FORMS.items():
        for name, form in {**several, "TENSOR": schema.TENSOR_FORM}.items():
            yield from _fields_of_form(f"dump {version} | {name.lower()}", form)
    for kind in (Manifest, PlaceOfDump, schema.PartIndex, schema.ShardEntry):
        yield from _fields_of_class("dump", kind)
    yield from (
        f"dump | entry leaves out {field.name} = {field.default!r}"
        for field, storage in json_form.list_storage(schema.ShardEntry)
        if storage.omitted
    )
    yield from _schema_of_statistics()


def forms_of_dumps() -> dict[str, Any]:
    """The forms of each version of dumps, by name."""
    from megatron_flex.dump import schema
    from megatron_flex.dump.json_form import derive_form

    def forms(version: int) -> dict[str, Any]:
        return {
            "CUT": schema.CUT_FORM,
            "DIM": schema.DIM_FORM,
            "LAYOUT": schema.LAYOUT_FORM,
            "SITE": derive_form(schema.SiteRecord, version),
            "ENTRY": derive_form(schema.ShardEntry, version),
            "TENSOR": schema.TENSOR_FORM,
            **schema.FORMS[version],
        }

    now = schema.DUMP_VERSION
    return {"version": now, "forms": forms(now), "version 1": forms(1)}


def _kinds_of_entries(files: ModuleType) -> list[str]:
    names = ("VALUE", "GRADIENT", "PARAMETER", "PARAMETER_GRADIENT", "ROUTING", "REPLICA")
    return [str(getattr(files, name)) for name in names]


def _schema_of_statistics() -> Iterator[str]:
    from megatron_flex.statistics import statistics_files
    from megatron_flex.statistics import statistics_records as records

    yield f"statistics: {records.STATISTICS_FORMAT}, version {records.STATISTICS_VERSION}"
    yield f"statistics: bins from 2^{records.LOWEST_EXPONENT} to 2^{records.HIGHEST_EXPONENT}"
    yield f"statistics: {statistics_files.ITERATIONS_PER_PART} iterations a part"
    yield f"statistics: kinds {', '.join(get_args(records.StatisticsKind))}"
    ends = ",".join(statistics_files.SUFFIXES.values())
    names = (
        f"{statistics_files.STEM}-0000{{{ends}}}",
        statistics_files.HEADER_NAME,
        statistics_files.PARQUET_NAME.format(0),
    )
    yield f"statistics: names such as {', '.join(names)}"
    place = records.MeasuredSite("site", {}, ("s", 1))
    told = records.StatisticsHeader("now", {}, "a framework", {"tp": 2}, (place,), {})
    row = records.TensorStatistics(0, "site", "value", 0, 0, 1, *[None] * 7, 0, 0, (0, 1), 1)
    for name, line in (("header", told.to_json()), ("row", statistics_files._row_to_json(row))):
        fields_of = json.loads(statistics_files._format_line(line))
        yield f"statistics | JSON lines | {name}: {', '.join(fields_of)}"
    arrow = SimpleNamespace(
        string=lambda: "string",
        float64=lambda: "double",
        int64=lambda: "int64",
        list_=lambda one: f"list<{one}>",
        schema=lambda fields, metadata: (fields, metadata),
    )
    columns, metadata = statistics_files._make_schema(arrow, "", "")
    yield from (f"statistics | Parquet | {name}: {kind}" for name, kind in columns)
    yield f"statistics | Parquet | metadata: {', '.join(key.decode() for key in metadata)}"
    for kind in (
        records.StatisticsHeader,
        records.MeasuredSite,
        records.TensorStatistics,
    ):
        yield from _fields_of_class("statistics", kind)


def _fields_of_form(path: str, form: Any) -> Iterator[str]:
    """The fields of a form, the outer ones first."""
    if isinstance(form, str):
        yield f"{path}: {form}"
    elif isinstance(form, list):
        yield from _fields_of_form(f"{path}[]", form[0])
    else:
        for key, one in form.items():
            optional = " (optional)" if key.endswith("?") else ""
            yield from _fields_of_form(f"{path}.{key.removesuffix('?')}{optional}", one)


def _fields_of_class(what: str, kind: Any) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        told = "" if default is dataclasses.MISSING else f" = {default!r}"
        yield f"{what} | {kind.__name__}.{field.name}: {field.type}{told}"


TOPICS: dict[str, Callable[[], Iterator[str]]] = {
    "names": names,
    "commands": commands,
    "flags": flags,
    "variables": variables,
    "registered": registered,
    "schema": schema,
}


def kept(topic: str) -> list[str]:
    """The lines of a topic as they were when they were last written."""
    return (KEPT / f"{topic}.txt").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for topic, lines in TOPICS.items():
        (KEPT / f"{topic}.txt").write_text("\n".join(lines()) + "\n", encoding="utf-8")
    FROZEN_FORMS.write_text(json.dumps(forms_of_dumps(), indent=1) + "\n", encoding="utf-8")
